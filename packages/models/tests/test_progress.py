import io
import sys

import pytest

from octavo_models.checkpoints import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_log_gets_one_plain_line(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with progress("loading weights", 10) as advance:
        for _ in range(10):
            advance(1)
    assert stream.getvalue() == "loading weights\n"


@pytest.mark.parametrize("unit", ["B", "tensors"])
def test_a_terminal_gets_a_bar(monkeypatch, unit):
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    with progress("loading weights", 1000, unit=unit) as advance:
        advance(1000)
    assert "loading weights" in stream.getvalue()
