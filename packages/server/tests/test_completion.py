"""Completion scripts, tried in the shells they are for."""

import os
import select
import shutil
import subprocess
import sys
import time
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from octavo_core.testing.patience import PATIENCE_S
from octavo_core.testing.terminal import start_in_terminal
from octavo_server import cli
from octavo_server._src import completion_command


@pytest.fixture(scope="module")
def scripts(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("completion")
    for shell in completion_command.SHELLS:
        (folder / shell).write_text(completion_command.script(shell))
    return folder


BASH = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(( $# - 1 )); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}
_shtab_octavo octavo "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


def in_bash(scripts: Path, *words: str, folder: Path | None = None) -> set[str]:
    done = subprocess.run(
        ["bash", "-c", BASH, "bash", scripts / "bash", "octavo", *words], capture_output=True, text=True, check=True, cwd=folder
    )
    return set(done.stdout.split())


def in_fish(scripts: Path, *words: str, folder: Path | None = None) -> set[str]:
    line = " ".join(["octavo", *words])
    done = subprocess.run(
        ["fish", "--no-config", "-c", f"source {scripts / 'fish'}; complete -C '{line}'"],
        capture_output=True,
        text=True,
        cwd=folder,
    )
    return {found.partition("\t")[0].removeprefix("./") for found in done.stdout.splitlines()}


@pytest.mark.parametrize("ask", [in_bash, in_fish])
def test_commands_options_choices_and_files_are_completed(scripts: Path, tmp_path: Path, ask) -> None:
    shell = ask.__name__.removeprefix("in_")
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "weights.gguf").touch()
    assert ask(scripts, "comp") == {"completion"}
    assert {"--api-key", "--api-keys-file"} <= ask(scripts, "serve", "--api")
    assert ask(scripts, "completion", "") >= {"bash", "zsh", "fish"}
    assert "weights.gguf" in ask(scripts, "serve", "./wei" if shell == "fish" else "wei", folder=tmp_path)
    assert "--debug" in ask(scripts, "chat", "--de")


def test_zsh_completes_in_a_terminal(scripts: Path, tmp_path: Path) -> None:
    if shutil.which("zsh") is None:
        pytest.skip("zsh is not installed")
    (tmp_path / "_octavo").write_text((scripts / "zsh").read_text())
    pid, terminal = start_in_terminal("zsh", "-f", "-i", PS1="> ")
    try:
        os.write(
            terminal, f"fpath=({tmp_path} $fpath); autoload -U compinit; compinit -u -d {tmp_path}/dump; echo re''ady\n".encode()
        )
        read_until(terminal, "ready\r\n")
        os.write(terminal, b"octavo comple\t")
        read_until(terminal, "completion")
    finally:
        os.close(terminal)
        os.waitpid(pid, 0)


def read_until(terminal: int, wanted: str, timeout_s: float = PATIENCE_S) -> None:
    told, end = "", time.monotonic() + timeout_s
    while wanted not in told:
        assert time.monotonic() < end, told
        if select.select([terminal], [], [], 0.2)[0]:
            told += os.read(terminal, 4096).decode(errors="replace")


def test_a_command_that_cannot_be_loaded_is_left_out(monkeypatch) -> None:
    entries = [EntryPoint("key", "octavo_server.commands:key", cli.GROUP), EntryPoint("broken", "no_such_module:x", cli.GROUP)]
    monkeypatch.setattr(completion_command, "entry_points", lambda group: entries)
    text = completion_command.script("bash")
    assert "subparsers=(key)" in text
    assert "broken" not in text


def test_the_command_prints_the_script_and_names_its_shells(capsys) -> None:
    assert cli.main(["completion", "bash"]) == 0
    assert "complete -o bashdefault -F _shtab_octavo octavo" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.main(["completion", "tcsh"])
    assert "choose from" in capsys.readouterr().err


def test_help_does_not_load_what_completion_needs() -> None:
    program = "import sys\nfrom octavo_server import cli\ntry: cli.main(['--help'])\nexcept SystemExit: pass\nprint('shtab' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("False")
