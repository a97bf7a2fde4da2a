"""The README's examples run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_an_example_of_the_readme_runs(number: int) -> None:
    exec(compile(EXAMPLES[number], f"{README}#{number}", "exec"), {})


def test_the_readme_has_examples() -> None:
    assert EXAMPLES
