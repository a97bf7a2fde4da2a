"""The Hopper kernels as they ship, compiled for an H200 on a CPU: what the assembler says, for every configuration.

Needs NVIDIA's packages (`octavo_kernels.aot.PACKAGES`); without them these tests are skipped and counted.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from importlib.resources import files

import pytest

from octavo_core.testing.patience import PATIENCE_S
from octavo_kernels import aot


def _missing() -> list[str]:
    found = {str(package.metadata["Name"]).lower() for package in importlib.metadata.distributions()}
    return [name for name in aot.PACKAGES if name not in found]


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(_missing()), reason=f"compiling for a GPU without one needs {', '.join(_missing())}"),
]


def _name(variant: tuple[int, int, str, bool]) -> str:
    head_dim, block_size, stored, has_rules = variant
    return f"head_dim={head_dim}-block_size={block_size}-{stored}{'-rules' if has_rules else ''}"


@pytest.fixture(scope="module", params=aot.SHIPPED, ids=_name)
def kernels(request, tmp_path_factory):
    """What was compiled for one variant, by kernel."""
    path = tmp_path_factory.mktemp("aot") / "kernels.json"
    head_dim, block_size, stored, has_rules = request.param
    command = [sys.executable, "-m", "octavo_kernels.aot", "--json", str(path)]
    command += ["--head-dim", str(head_dim), "--block-size", str(block_size), "--stored", stored]
    command += ["--rules", "with" if has_rules else "without"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert path.exists(), done.stderr[-3000:]
    return {kernel["name"]: kernel for kernel in json.loads(path.read_text())}


MERGE = "octavo_merge"


def test_the_kernels_use_the_units_they_are_written_for_and_spill_nothing(kernels) -> None:
    for name in kernels.keys() - {MERGE, "octavo_latent"}:
        kernel = kernels[name]
        assert kernel["spilled_bytes"] == 0, kernel
        assert kernel["registers"] <= 168, kernel  # three warpgroups share 65,536
        assert {"UTMALDG", "HGMMA", "USETMAXREG", "UTMASTG"} <= set(kernel["opcodes"]), kernel
        assert not {"LDL", "STL", "HMMA"} & set(kernel["opcodes"]), kernel
    assert kernels[MERGE]["spilled_bytes"] == 0


def test_the_kernel_over_latents_spills_nothing_whatever_is_stored(kernels) -> None:
    if "octavo_latent" not in kernels:
        assert set(kernels) == {"octavo_decode", "octavo_prefill", MERGE}
        return
    kernel = kernels["octavo_latent"]
    assert kernel["spilled_bytes"] == 0, kernel
    assert kernel["registers"] <= 128, kernel  # four warpgroups share 65,536
    assert {"UTMALDG", "HGMMA", "USETMAXREG", "UTMASTG"} <= set(kernel["opcodes"]), kernel
    assert not {"LDL", "STL", "HMMA"} & set(kernel["opcodes"]), kernel


def test_the_table_of_what_spills_says_what_the_assembler_says(kernels) -> None:
    table = json.loads(files("octavo_kernels._src").joinpath("compiled.json").read_text(encoding="utf-8"))
    known = {tuple(item[name] for name in ("kernel", "head_dim", "stored", "tile_kv", "take_turns")): item for item in table}
    for name in kernels.keys() - {MERGE, "octavo_latent"}:
        kernel = kernels[name]
        which = name.removeprefix("octavo_"), *(kernel[key] for key in ("head_dim", "stored", "tile_kv", "take_turns"))
        assert known[which]["spilled_bytes"] == kernel["spilled_bytes"], kernel


def test_shared_memory_is_what_the_configuration_says(kernels) -> None:
    for name in kernels.keys() - {MERGE}:
        planned, real = kernels[name]["planned_smem_bytes"], kernels[name]["smem_bytes"]
        assert real <= planned <= real + 1024, kernels[name]
        assert planned <= 227 * 1024
