"""RDMA without a network card: a virtual machine with the kernel's soft-RoCE, in which `guest.sh` moves blocks by each library.

The guest is Debian's own kernel with its modules and one static busybox; its root is this machine's, read-only under a layer in memory, so what it
does to files is forgotten. It has no network but an interface without a cable. By default qemu emulates its processors: the point is
whether RDMA works, not how fast. `--accel kvm` is quicker where nested virtualisation works.

What is missing is told with the line that installs it, and the exit status is 75: nothing was found out.
"""

from __future__ import annotations

import argparse
import gzip
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from octavo_tools.environments import SKIPPED, CommandFailed, RegistryUnreachable, uv
from octavo_tools.workspace import ROOT

HERE: Final = Path(__file__).parent
MODULES: Final = (
    *("crc32_generic", "crc32c_generic", "virtio_pci", "9pnet_virtio", "9p", "overlay"),
    *("dummy", "ib_uverbs", "rdma_ucm", "rdma_rxe"),
)
"""Checksums first: without them a soft-RoCE device cannot be added."""
PROGRAMS: Final = {
    "qemu-system-x86_64": "qemu-system-x86",
    "busybox": "busybox-static",
    "cpio": "cpio",
    "modprobe": "kmod",
    "rdma": "iproute2",
    "ibv_rc_pingpong": "ibverbs-utils ibverbs-providers rdma-core",
    "apt-get": "apt",
    "dpkg-deb": "dpkg",
}
IMPORTS: Final = (
    "import octavo_core.testing.tiers, octavo_engine.config, octavo_server.cli, "
    "octavo_offload.fabric, octavo_offload._src.remote.agent, octavo_offload._src.remote.serve, octavo_offload.node"
)
"""Compiled here, once: an emulated processor would take minutes."""
LIMIT_S: Final = 2_400.0


class Missing(Exception):
    """Something the guest needs is not to be had here; the message says how to come by it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Build the guest, boot it, and answer as it ended; 75 where it cannot be built."""
    parser = argparse.ArgumentParser(prog="tools/rdma", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--accel", default="tcg,thread=multi", help="qemu's accelerator (default: %(default)s)")
    parser.add_argument("--kernel", type=Path, help="an unpacked linux-image package (default: Debian's newest, downloaded)")
    parser.add_argument(
        "--python", type=Path, help="an environment's, with the groups nixl and mooncake (default: made for the run)"
    )
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds until the guest is ended (default: %(default)s)")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="octavo-rdma-") as name:
        folder = Path(name)
        try:
            check_programs()
            python = args.python or make_environment(folder / "venv")
            run(python, "-c", IMPORTS, cwd=ROOT)
            kernel = args.kernel or download_kernel(folder / "kernel")
            image = build(kernel, folder)
        except (Missing, RegistryUnreachable) as error:
            print(f"SKIP: {error}")
            return SKIPPED
        except CommandFailed as error:
            print(f"FAIL: {error}")
            return 1
        return boot(command(kernel, image, python, args.accel), args.limit)


def check_programs() -> None:
    """Whether the system has what is called.

    Raises:
        Missing: It has not.
    """
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    missing = [package for program, package in PROGRAMS.items() if shutil.which(program, path=path) is None]
    if missing:
        raise Missing(f"the guest wants programs that are not here: apt-get install --no-install-recommends {' '.join(missing)}")


def make_environment(folder: Path) -> Path:
    """The workspace with both libraries of one-sided reads; answers its interpreter."""
    uv("sync", "--quiet", "--frozen", "--group", "nixl", "--group", "mooncake", UV_PROJECT_ENVIRONMENT=str(folder))
    return folder / "bin" / "python"


def run(*words: str | Path, cwd: Path | None = None) -> str:
    """What a program prints.

    Raises:
        Missing: It failed.
    """
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, cwd=cwd, check=False)
    if done.returncode:
        raise Missing(f"`{' '.join(map(str, words))}` failed: {' '.join((done.stderr or done.stdout).split())[-300:]}")
    return done.stdout


def download_kernel(folder: Path) -> Path:
    """Debian's newest kernel package, unpacked."""
    folder.mkdir()
    depends = run("apt-cache", "depends", "linux-image-amd64")
    found = re.search(r"Depends: (linux-image-\S+)", depends)
    if found is None:
        raise Missing("apt knows no linux-image-amd64; apt-get update, or --kernel FOLDER")
    run("apt-get", "download", found[1], cwd=folder)
    run("dpkg-deb", "-x", next(folder.glob("*.deb")), folder / "image")
    return folder / "image"


def build(kernel: Path, folder: Path) -> Path:
    """The guest's first file system: busybox, modules in the order they are needed, and `init.sh`."""
    release = next(path.name for path in (kernel / "lib/modules").iterdir())
    run("/sbin/depmod", "-b", kernel, release)
    root = folder / "root"
    for name in ("bin", "proc", "sys", "dev", "host", "layer", "tree", "modules"):
        (root / name).mkdir(parents=True)
    shutil.copy(shutil.which("busybox") or "", root / "bin/busybox")
    shutil.copy(HERE / "init.sh", root / "init")
    (root / "init").chmod(0o755)
    files: list[str] = []
    for module in MODULES:
        shown = run("/sbin/modprobe", "-d", kernel, "-S", release, "--show-depends", module)
        files += [line.split()[1] for line in shown.splitlines() if line.startswith("insmod")]
    for number, file in enumerate(dict.fromkeys(files)):
        shutil.copy(file, root / "modules" / f"{number:03}-{Path(file).name}")
    names = "\n".join(str(path.relative_to(root)) for path in [root, *sorted(root.rglob("*"))])
    packed = subprocess.run(["cpio", "-o", "-H", "newc"], input=names.encode(), capture_output=True, cwd=root, check=True).stdout
    image = folder / "guest.gz"
    image.write_bytes(gzip.compress(packed, 1))
    return image


def command(kernel: Path, image: Path, python: Path, accel: str) -> list[str]:
    """How the guest is started."""
    words = f"octavo.run={HERE / 'guest.sh'} octavo.python={python.absolute()} octavo.root={ROOT}"
    quiet = "console=ttyS0 loglevel=4 panic=-1 rdinit=/init mitigations=off tsc=reliable no_timer_check"
    share = "local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap"
    return [
        *(
            "qemu-system-x86_64",
            "-accel",
            accel,
            "-cpu",
            "max",
            "-smp",
            "2",
            "-m",
            "6144",
            "-nographic",
            "-no-reboot",
            "-nic",
            "none",
        ),
        *("-kernel", str(next((kernel / "boot").glob("vmlinuz-*"))), "-initrd", str(image)),
        *("-append", f"{quiet} {words}", "-virtfs", share),
    ]


def boot(words: Sequence[str], limit_s: float) -> int:
    """Run the guest, showing its console; 0 when its script ended so."""
    with subprocess.Popen(
        ["timeout", str(limit_s), *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, errors="replace"
    ) as qemu:
        status = None
        for line in qemu.stdout or ():
            print(line, end="", flush=True)
            status = verdict(line) if status is None else status
    if status is None:
        print(f"FAIL: the guest ended without a word of how, or not within {limit_s:.0f} s")
    return 1 if status is None else status


def verdict(line: str) -> int | None:
    """The status of the guest's script, where a line of its console says it."""
    found = re.match(r"octavo-guest: (\d+)\s*$", line)
    return int(found[1]) if found else None
