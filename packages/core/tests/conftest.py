"""Shape checks for this package, also where the workspace's own conftest is not in sight."""

from jaxtyping import install_import_hook

install_import_hook("octavo_core", "beartype.beartype")
