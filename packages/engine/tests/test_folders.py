"""Where a server keeps its sockets: nobody else's folder, no dead server's leftovers, and a word where there is no place."""

import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

from octavo_core.errors import ConfigError
from octavo_engine._src.process import folders, transport
from octavo_engine._src.process.folders import ServerFolder, user_folder
from octavo_engine._src.process.transport import choose


@pytest.fixture(autouse=True)
def base(monkeypatch):
    """A place of the test's own with a short name, and none else."""
    with tempfile.TemporaryDirectory(prefix="octavo-", dir="/tmp") as name:
        monkeypatch.setattr(folders, "_places", lambda: [name])
        yield Path(name)


def test_folders_of_living_servers_stay_and_those_of_dead_ones_go(base, tmp_path) -> None:
    program = textwrap.dedent("""
        import os, signal, sys
        from octavo_engine._src.process import folders
        folders._places = lambda: [sys.argv[1]]
        print(folders.ServerFolder().path, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    living = ServerFolder()
    done = subprocess.run([sys.executable, "-c", program, str(base)], capture_output=True, text=True)
    dead = done.stdout.strip()
    assert os.path.isdir(dead)
    (user_folder() / "s-halfmade").mkdir()
    other = ServerFolder()
    assert not os.path.exists(dead)
    assert sorted(path.name for path in user_folder().glob("s-*")) == sorted([living.path.name, other.path.name])
    for one in (living, other):
        one.close()
    assert not list(user_folder().glob("s-*"))


def test_a_link_or_a_file_in_the_folders_place_is_refused(base, tmp_path) -> None:
    place = base / f"octavo-{os.getuid()}"
    place.symlink_to(tmp_path)
    with pytest.raises(ConfigError, match=r"it is no folder.*XDG_RUNTIME_DIR"):
        ServerFolder()
    place.unlink()
    place.write_text("")
    with pytest.raises(ConfigError, match="it is no folder"):
        ServerFolder()


def test_a_folder_others_could_write_to_is_closed_to_them(base) -> None:
    place = base / f"octavo-{os.getuid()}"
    place.mkdir(mode=0o700)
    place.chmod(0o777)
    assert user_folder() == place
    assert place.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("place", ["/nowhere/to/be/found", "/proc", "/dev/null"])
def test_a_place_that_cannot_be_written_to_is_passed_over_and_named_where_there_is_no_other(base, monkeypatch, place) -> None:
    monkeypatch.setattr(folders, "_places", lambda: [place, str(base)])
    assert user_folder().parent == base
    monkeypatch.setattr(folders, "_places", lambda: [place])
    with pytest.raises(ConfigError, match=f"{place}/octavo-"):
        user_folder()


def test_a_place_with_a_name_too_long_for_sockets_is_passed_over(base, tmp_path, monkeypatch) -> None:
    long = tmp_path / ("x" * 90)
    long.mkdir()
    monkeypatch.setattr(folders, "_places", lambda: [str(long)])
    with pytest.raises(ConfigError, match="the name is too long"):
        user_folder()


def test_without_room_for_shared_memory_sockets_are_used_and_it_is_said_so(monkeypatch) -> None:
    monkeypatch.setattr(transport, "free_bytes", lambda: 2**20)
    kind, why = choose("auto")
    assert kind == "sockets"
    assert "1024 KiB free" in why
    with pytest.raises(ConfigError, match=r"KiB free.*use --ipc sockets"):
        choose("iceoryx2")


def test_a_sender_takes_all_its_shared_memory_at_once_or_is_refused(monkeypatch) -> None:
    made = transport.Iceoryx()
    sender = made.sender(f"whole-{os.getpid()}")
    (path,) = Path(transport.SHARED_MEMORY).glob(f"*_{sender._publisher.id.value}.data")
    assert path.stat().st_blocks * 512 >= path.stat().st_size >= transport.NUM_SLOTS * transport.SLOT_BYTES
    monkeypatch.setattr(transport, "free_bytes", lambda: 2**10)
    with pytest.raises(OSError, match="is full"):
        made.sender(f"none-{os.getpid()}")
    sender.close()
    made.close()
