"""The disk by NIXL, where it is installed (`uv run --group nixl pytest ...`); and how the way to a disk is chosen, with it and without."""

import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from octavo_core.testing import tiers as suite
from octavo_core.tiers import Answer
from octavo_offload import Slab, ThreadFiles, gds_files, open_tiers
from octavo_offload._src import nixl, nixl_files
from octavo_offload._src.files import Files
from octavo_offload._src.nixl_files import NixlFiles, choose_files

HIT, MISS = Answer.HIT_VERIFIED, Answer.MISS
PAGE = 4096
needs_nixl = pytest.mark.skipif(nixl.name() is None, reason=f"NIXL is not installed: {nixl.INSTALL}")


@pytest.fixture(params=["io_uring", "libaio"])
def mode(request):
    return request.param


@pytest.fixture
def files(mode, tmp_path):
    try:
        return NixlFiles(tmp_path, mode)
    except OSError as error:
        pytest.skip(f"{mode} does not work here: {error}")


def test_without_nixl_threads_are_chosen_and_the_install_line_is_told(monkeypatch, tmp_path):
    monkeypatch.setattr(nixl, "_MODULES", ("no_such_module",))
    files = choose_files(tmp_path)
    assert isinstance(files, ThreadFiles)
    assert f"NIXL is not installed ({nixl.INSTALL})" in files.told


@needs_nixl
def test_with_nixl_what_is_chosen_is_told(tmp_path, make_disk):
    files = choose_files(tmp_path)
    assert isinstance(files, Files)
    assert files.told.startswith(("NIXL POSIX with io_uring", "NIXL POSIX with libaio", "threads"))
    assert make_disk().told.startswith(files.told)


FORBIDDEN = """
import ctypes, struct, sys, pathlib
numbers = [int(n) for n in sys.argv[2].split(",")]
load, equal, give = 0x20, 0x15, 0x06  # of struct seccomp_data, the system call's number is at 0
code = [struct.pack("HBBI", load, 0, 0, 0)]
for n in numbers:
    code += [struct.pack("HBBI", equal, 0, 1, n), struct.pack("HBBI", give, 0, 0, 0x50000 | 1)]
code += [struct.pack("HBBI", give, 0, 0, 0x7FFF0000)]
program = ctypes.create_string_buffer(b"".join(code))
filter = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(code), ctypes.addressof(program)))
libc = ctypes.CDLL(None, use_errno=True)
if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, filter, 0, 0):
    print("no seccomp here")
    sys.exit(0)
from octavo_offload._src.nixl_files import choose_files
files = choose_files(pathlib.Path(sys.argv[1]))
print(files.told)
"""


@needs_nixl
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of system calls are those of x86-64")
@pytest.mark.parametrize(
    ("forbidden", "wanted"),
    [("425", "NIXL POSIX with libaio"), ("425,206", "threads with preadv and pwritev")],
    ids=["io_uring", "both"],
)
def test_where_the_system_forbids_a_way_the_next_is_taken(tmp_path, forbidden, wanted):
    """As containers do, whose seccomp profile leaves io_uring out."""
    run = subprocess.run([sys.executable, "-c", FORBIDDEN, tmp_path, forbidden], capture_output=True, text=True, timeout=600)
    if "no seccomp" in run.stdout:
        pytest.skip("seccomp filters cannot be set here")
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip().splitlines()[-1].startswith(wanted), run.stdout + run.stderr
    assert wanted.startswith("NIXL") or "NIXL with libaio" in run.stdout


@needs_nixl
def test_a_disk_by_nixl_keeps_the_promises_of_a_tier(make_disk, tmp_path, files, mode):
    folders = iter(range(100))

    def make():
        path = tmp_path / str(next(folders))
        path.mkdir()
        return make_disk(path=path, files=NixlFiles(path, mode))

    suite.check_tier(make)


@needs_nixl
def test_what_one_way_wrote_the_other_reads(make_disk, tmp_path, files):
    tier = make_disk(files=files)
    assert suite.put(tier, range(4)) == (HIT,) * 4
    make_disk.close(tier)
    tier = make_disk(files=ThreadFiles(tmp_path))
    assert suite.get(tier, range(4)) == (HIT,) * 4
    assert suite.put(tier, range(4, 8)) == (HIT,) * 4
    make_disk.close(tier)
    assert suite.get(make_disk(files=NixlFiles(tmp_path, files._mode)), range(8)) == (HIT,) * 8


@needs_nixl
def test_many_threads_get_their_own_bytes_adopted_or_not(files, tmp_path):
    slab, fd = Slab(8, 4 * PAGE), files.open(tmp_path / "f", 64 * 4 * PAGE)
    files.adopt(slab.whole)
    wrong = []

    def work(number):
        rng = random.Random(number)
        mine = [slab.slot(number), memoryview(Slab(1, 4 * PAGE).whole)]
        try:
            for round_ in range(20):
                place, data = (number * 8 + rng.randrange(8)) * 4 * PAGE, rng.randbytes(4 * PAGE)
                out, into = mine[round_ % 2], mine[rng.randrange(2)]
                out[:] = data
                files.write(fd, [out[:PAGE], out[PAGE:]], place)
                into[:] = bytes(4 * PAGE)
                files.read(fd, [into[:PAGE], into[PAGE:]], place)
                wrong.extend([] if into == data else [(number, round_)])
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    files.close(fd)
    assert not wrong


@needs_nixl
def test_a_file_that_ends_early_and_a_place_outside_are_errors_and_the_next_call_works(files, tmp_path):
    fd, page = files.open(tmp_path / "f", 8 * PAGE), Slab(1, PAGE).whole
    page[:] = b"x" * PAGE
    files.write(fd, [page], 0)
    with pytest.raises(OSError, match="not inside"):
        files.read(fd, [page], 8 * PAGE)
    os.truncate(tmp_path / "f", 2 * PAGE)
    with pytest.raises(OSError, match=r"nixl\w*Error|transfer ended"):
        files.read(fd, [page], 4 * PAGE)
    files.read(fd, [page], 0)
    assert page == b"x" * PAGE
    files.close(fd)


@needs_nixl
def test_a_descriptor_that_was_another_files_reads_its_own(files, tmp_path):
    pages = Slab(2, PAGE)
    fds = []
    for i in range(3):
        fd = files.open(tmp_path / str(i), (i + 1) * PAGE)
        pages.slot(0)[:] = bytes([i]) * PAGE
        files.write(fd, [pages.slot(0)], i * PAGE)
        files.read(fd, [pages.slot(1)], i * PAGE)
        assert pages.slot(1) == bytes([i]) * PAGE
        files.close(fd)
        fds.append(fd)
    assert len(set(fds)) == 1


WRITER = """
import sys, pathlib, itertools
from octavo_core.testing import tiers as suite
from octavo_offload import DiskTier, Jobs
tier = DiskTier(pathlib.Path(sys.argv[1]), 16 * 12288, suite.BLOCK_BYTES, b"i" * 32, Jobs(3, "t"), segment_bytes=4 * 12288)
print(tier.told, flush=True)
for n in itertools.count(0, 4):
    answers = suite.put(tier, range(n, n + 4))
    print(*(k for k, a in zip(range(n, n + 4), answers) if a), flush=True)
"""


@needs_nixl
def test_a_writer_that_is_killed_amid_nixl_loses_nothing_it_was_told_is_stored(make_disk, tmp_path):
    child = subprocess.Popen([sys.executable, "-c", WRITER, tmp_path], stdout=subprocess.PIPE, text=True)
    assert "NIXL" in child.stdout.readline()
    told = [int(n) for _ in range(5) for n in child.stdout.readline().split()]
    os.kill(child.pid, signal.SIGKILL)
    told += [int(n) for line in child.stdout.read().splitlines(keepends=True) if line.endswith("\n") for n in line.split()]
    child.wait()
    child.stdout.close()
    tier = make_disk(16)
    assert all(suite.get(tier, told[-12:])), f"of {told[-12:]} some are gone"


@needs_nixl
def test_a_process_that_used_nixl_ends_as_it_should(tmp_path):
    """Some of NIXL's plugins were seen to fault at the interpreter's exit; this one must not."""
    words = textwrap.dedent(
        """
        import sys, pathlib
        from octavo_offload._src.nixl_files import choose_files
        files = choose_files(pathlib.Path(sys.argv[1]))
        assert files.told.startswith("NIXL"), files.told
        """
    )
    run = subprocess.run([sys.executable, "-c", words, tmp_path], capture_output=True, text=True, timeout=600)
    assert (run.returncode, run.stdout) == (0, ""), run.stderr


@needs_nixl
def test_tiers_over_a_disk_by_nixl_give_back_what_was_saved(tmp_path, pieces_of):
    """Host slabs are adopted: blocks go between them and the file without a copy."""
    for _ in range(2):  # the second time from the disk alone
        store = open_tiers((512, 4096), host_bytes=8 * suite.BLOCK_BYTES, disk=(tmp_path, 48 * 3 * PAGE))
        assert store.disk.told.startswith("NIXL")
        if _ == 0:
            store.save([suite.key_of(n) for n in range(6)], pieces_of(range(6)))
            assert store.wait_idle(600.0)
        fetch = store.fetch([suite.key_of(n) for n in range(6)], 1e6)
        assert fetch.wait(600.0)
        assert all((mine == theirs).all() for mine, theirs in zip(fetch.take(), pieces_of(range(6)), strict=True))
        store.close()


def test_threads_take_any_buffer(tmp_path):
    files = ThreadFiles(Path(tmp_path))
    assert isinstance(files, Files)
    files.adopt(memoryview(bytearray(8)))


def test_gpudirect_storage_is_refused_where_no_gpu_is_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(nixl_files, "_GPU", tmp_path / "nothing")
    with pytest.raises(OSError, match="no NVIDIA GPU is seen"):
        gds_files(tmp_path)


def test_gpudirect_storage_without_nixl_is_refused_with_the_install_line(tmp_path, monkeypatch):
    monkeypatch.setattr(nixl_files, "_GPU", tmp_path)
    monkeypatch.setattr(nixl, "_MODULES", ())
    with pytest.raises(OSError, match=r"NIXL is not installed \(pip install"):
        gds_files(tmp_path)


@needs_nixl
@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is a GPU: the plugin may work")
def test_gpudirect_storage_without_the_libraries_of_cuda_is_refused_by_their_names(tmp_path, monkeypatch):
    """The plugin is in NIXL's wheel, what it stands on is not."""
    monkeypatch.setattr(nixl_files, "_GPU", tmp_path)
    with pytest.raises(OSError, match=r"plugin GDS_MT does not work: .* libcufile"):
        gds_files(tmp_path / "kv")


@needs_nixl
@pytest.mark.hopper
@pytest.mark.skipif(not Path("/dev/nvidiactl").exists(), reason="no GPU: nothing for GPUDirect Storage to talk to")
def test_a_disk_by_gpudirect_storage_gives_back_what_was_put(tmp_path, make_disk):
    tier = make_disk(files=gds_files(tmp_path))
    assert tier.told.startswith("NIXL GDS_MT")
    assert suite.put(tier, range(6)) == suite.get(tier, range(6)) == (HIT,) * 6
