"""Whether XLA records a program's kernels into CUDA graphs (its command buffers) and replays them, instead of launching each from the host.

Knows XLA's flag and what XLA does without it. Knows nothing of what is in a program.
"""

from __future__ import annotations

from typing import Final

FLAG: Final = "--xla_gpu_enable_command_buffer"
DEFAULT: Final = ("FUSION", "CUBLAS", "CUBLASLT", "CUDNN", "CUSTOM_CALL", "CONDITIONAL", "DYNAMIC_SLICE_FUSION")
"""Kinds of operations XLA records when nothing is asked, in every JAX that serves here."""
NEEDED: Final = ("FUSION", "CUSTOM_CALL")
"""What a step is made of beside matrix products; attention kernels are custom calls."""


def command_buffers(platform: str, flags: str) -> tuple[str, str]:
    """`on`, `in part`, `off` or `not used`, and why.

    Args:
        platform: Of JAX's first device.
        flags: `XLA_FLAGS`; of several the last word counts, `+KIND` and `-KIND` change what was said before.
    """
    if platform not in ("gpu", "cuda"):
        return "not used", f"CUDA graphs are for GPUs, JAX's first device is a {platform}"
    if flags and not flags.lstrip().startswith("-"):
        return "unknown", f"XLA_FLAGS names the file {flags.strip()}; put {FLAG} into XLA_FLAGS itself to have it told"
    kinds, said = set(DEFAULT), "XLA's default"
    for part in flags.split():
        name, _, value = part.partition("=")
        if name == FLAG:
            kinds, said = _changed(kinds, [kind for kind in value.upper().split(",") if kind]), f"XLA_FLAGS has {part}"
    missing = [kind for kind in NEEDED if kind not in kinds]
    if not missing:
        return "on", f"{said}: kernels of a step are replayed as CUDA graphs"
    state = "off" if len(missing) == len(NEEDED) else "in part"
    return state, f"{said}: {' and '.join(missing)} are launched one by one by the host; drop the flag"


def _changed(kinds: set[str], asked: list[str]) -> set[str]:
    if not any(kind[0] in "+-" for kind in asked):
        return set(asked)
    more, less = ({kind[1:] for kind in asked if kind[0] == sign} for sign in "+-")
    return (kinds | more) - less
