import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_examples_of_the_readme_run_and_are_short():
    examples = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
    assert examples
    for example in examples:
        assert len(example.splitlines()) <= 15
        exec(compile(example, str(README), "exec"), {})
