"""What the start-up table and the doctor say of XLA's command buffers."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from octavo_core.testing.patience import PATIENCE_S
from octavo_engine._src.command_buffers import DEFAULT, FLAG, NEEDED, command_buffers


@pytest.mark.parametrize(
    ("flags", "state"),
    [
        ("", "on"),
        ("--xla_cpu_use_thunk_runtime=true", "on"),
        (f"{FLAG}=", "off"),
        (f"{FLAG}=FUSION", "in part"),
        (f"{FLAG}=fusion,custom_call", "on"),
        (f"{FLAG}=+WHILE", "on"),
        (f"{FLAG}=-CUSTOM_CALL", "in part"),
        (f"{FLAG}= {FLAG}=FUSION,CUSTOM_CALL", "on"),
        ("/etc/xla_flags", "unknown"),
    ],
)
def test_flags_decide_whether_a_gpu_replays_its_kernels(flags: str, state: str) -> None:
    got, why = command_buffers("gpu", flags)
    assert got == state
    assert why


def test_a_cpu_has_none() -> None:
    assert command_buffers("cpu", f"{FLAG}=FUSION")[0] == "not used"


READ = """
from jax._src.lib import xla_client
print(xla_client.CompileOptions().SerializeAsString().hex())
"""
NUMBERS = {"FUSION": 1, "CUBLAS": 2, "CUDNN": 3, "CONDITIONAL": 5, "CUSTOM_CALL": 7, "CUBLASLT": 8, "DYNAMIC_SLICE_FUSION": 9}
"""Of `CommandBufferCmdType` in XLA's `xla.proto`; the flag is field 258 of its debug options, packed."""
FIELD = bytes([258 << 3 & 127 | 2 | 128, 258 << 3 >> 7])


def test_what_we_call_the_default_is_what_this_xla_does() -> None:
    command = [sys.executable, "-c", READ]
    environment = {**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True, env=environment)
    data = bytes.fromhex(done.stdout.strip())
    at = data.index(FIELD) + len(FIELD)
    kinds = set(data[at + 1 : at + 1 + data[at]])
    assert {NUMBERS[kind] for kind in DEFAULT} <= kinds
    assert set(NEEDED) <= set(DEFAULT)
