from jaxtyping import install_import_hook

install_import_hook("octavo_kernels", "beartype.beartype")
