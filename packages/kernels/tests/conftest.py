import os
from importlib.metadata import version

from jaxtyping import install_import_hook

install_import_hook("octavo_kernels", "beartype.beartype")

if tuple(map(int, version("jax").split(".")[:2])) >= (0, 11):
    # The threads of an interpreted kernel wait for each other inside XLA's own, of which there are as many as cores: two wait for ever.
    os.environ.setdefault("NPROC", "16")
