"""What importing a package drags in, seen at run time where import-linter sees only source."""

import subprocess
import sys

import pytest

FRONTEND = [
    "octavo_core",
    "octavo_models",
    "octavo_models.text",
    "octavo_models.checkpoints",
    "octavo_engine",
    "octavo_engine.config",
    "octavo_server.cli",
]
COMPONENTS = ["octavo_scheduler", "octavo_kvcache", "octavo_kernels", "octavo_models", "octavo_offload"]


def loaded_by(module: str) -> set[str]:
    """Top-level names of everything in `sys.modules` after importing one module in a fresh process."""
    program = f"import sys, {module}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    return set(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split())


@pytest.mark.parametrize("module", FRONTEND)
def test_a_frontend_never_loads_jax(module: str) -> None:
    assert not {"jax", "jaxlib", "flax"} & loaded_by(module)


@pytest.mark.parametrize("module", COMPONENTS)
def test_a_component_loads_no_sibling_but_core(module: str) -> None:
    siblings = {name for name in loaded_by(module) if name.startswith("octavo_")}
    assert siblings <= {module, "octavo_core"}
