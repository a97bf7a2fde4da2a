import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL))
def test_the_readme_s_example_runs(block: str) -> None:
    exec(compile(block, str(README), "exec"), {"__name__": "readme"})
