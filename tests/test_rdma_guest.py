"""What starts the guest for RDMA: that it notices what is missing, and never takes a guest that said nothing for one that was content."""

import sys

import pytest

from octavo_tools import rdma
from octavo_tools.environments import SKIPPED


def test_what_is_missing_is_told_with_its_packages_and_nothing_is_found_out(monkeypatch, capsys):
    monkeypatch.setattr(rdma, "PROGRAMS", {"a-program-nobody-has": "qemu-system-x86", "another-one": "cpio"})
    assert rdma.main([]) == SKIPPED
    assert "apt-get install --no-install-recommends qemu-system-x86 cpio" in capsys.readouterr().out


def test_a_kernel_that_cannot_be_downloaded_is_a_skip_with_what_failed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(rdma, "check_programs", lambda: None)
    monkeypatch.setattr(rdma, "IMPORTS", "pass")
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "apt-cache").write_text("#!/bin/sh\necho E: no such list >&2\nexit 100\n")
    (tmp_path / "apt-cache").chmod(0o755)
    assert rdma.main(["--python", sys.executable]) == SKIPPED
    assert "`apt-cache depends linux-image-amd64` failed: E: no such list" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ("octavo-guest: 0", 0),
        ("octavo-guest: 3", 3),
        ("before octavo-guest: 0", 1),
        ("nothing", 1),
        ("octavo-guest: 3\\noctavo-guest: 0", 3),
    ],
)
def test_the_guest_ends_well_only_where_its_script_said_so(said, wanted, capfd):
    assert rdma.boot([sys.executable, "-c", f'print("{said}")'], 60.0) == wanted


def test_a_guest_that_hangs_is_ended(capfd):
    assert rdma.boot([sys.executable, "-c", "import time; time.sleep(600)"], 0.2) == 1
    assert "not within" in capfd.readouterr().out
