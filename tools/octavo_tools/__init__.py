"""What the programs in `tools/` share. For developers of this workspace; no package of Octavo imports it."""
