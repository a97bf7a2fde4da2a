import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_readmes_examples_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text("utf-8"), re.S)
    assert blocks
    for block in blocks:
        exec(compile(block, str(README), "exec"), {"__name__": "readme"})
