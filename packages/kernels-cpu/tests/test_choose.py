"""An instruction set is used only where it gives the results of the one that is tested."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest

from octavo_kernels_cpu._src import build_library, choose
from octavo_kernels_cpu._src.library import Library


def test_a_library_agrees_with_itself(library: Library) -> None:
    choose.check_agreement(library, library)


def test_products_that_differ_in_one_bit_are_refused(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    right, calls = choose.score, []

    def off_by_a_bit(*args: object) -> np.ndarray:
        calls.append(args)
        y = np.array(right(*args))
        y[3, 5] = np.nextafter(y[3, 5], np.float32(np.inf)) if len(calls) == 5 else y[3, 5]
        return y

    monkeypatch.setattr(choose, "score", off_by_a_bit)
    with pytest.raises(NotImplementedError, match="products in Q8 differ from"):
        choose.check_agreement(library, library)


@pytest.mark.slow
def test_the_source_without_vector_units_agrees(library: Library, portable: Library) -> None:
    choose.check_agreement(portable, library)


@pytest.mark.slow
def test_random_shapes_stay_inside_their_buffers(library: Library, tmp_path: Path) -> None:
    flags = [flag for flag in build_library.FLAGS[library.isa] if not flag.startswith("-O")]
    sources, program = build_library.PACKAGE / "csrc", tmp_path / "fuzz"
    sanitize = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    command = [
        "g++",
        "-std=c++20",
        "-O1",
        "-w",
        "-pthread",
        *flags,
        *sanitize,
        f"-I{sources}",
        str(Path(__file__).parent / "fuzz.cc"),
    ]
    subprocess.run([*command, "-o", str(program)], check=True)
    subprocess.run([str(program), "20", "1"], check=True)
