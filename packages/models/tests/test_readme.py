import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_readmes_examples_run(smollm2_path):
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    assert blocks
    names = {}
    for block in blocks:
        exec(compile(block, str(README), "exec"), names)
