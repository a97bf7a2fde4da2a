"""Implementation; public names are re-exported by the package."""
