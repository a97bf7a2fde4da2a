"""What this machine's RDMA fabric looks like, from files of the system: links, GIDs, limits, counters. Reads `/sys`, `/proc` and `/dev`.

`octavo doctor --fabric` prints it; `counters` gives congestion counters for a monitor. Everything takes the root of the tree it reads, so
that a recorded tree can be read as well. Layout: Documentation/ABI/stable/sysfs-class-infiniband of the Linux kernel.
"""

from __future__ import annotations

import ctypes.util
import os
import platform
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from octavo_offload._src import nixl
from octavo_offload._src.remote import mooncake

_LEAST_MTU: Final = 4200
"""Of the network device, for an RDMA path MTU of 4096 bytes and its headers."""
_LEAST_SHM: Final = 1 << 30
_LEAST_KERNEL: Final = (5, 15)
_COUNTERS: Final = {
    "np_cnp_sent": ("cnp_sent", "Congestion notifications this receiver sent"),
    "rp_cnp_handled": ("cnp_handled", "Congestion notifications this sender slowed down for"),
    "np_ecn_marked_roce_packets": ("ecn_marked", "Packets that came with a switch's congestion mark"),
    "out_of_sequence": ("out_of_sequence", "Packets that came out of order: loss"),
    "packet_seq_err": ("sequence_errors", "Retransmissions asked for"),
    "local_ack_timeout_err": ("ack_timeouts", "Acknowledgements that did not come"),
    "rnr_nak_retry_err": ("rnr_retries", "Receivers that were not ready, beyond retries"),
    "port_xmit_wait": ("transmit_waits", "Ticks with data to send and no leave to: pauses of the peer"),
    "rx_pause": ("pauses_received", "Pause frames received"),
    "tx_pause": ("pauses_sent", "Pause frames sent"),
}


class Gid(NamedTuple):
    """One address of a port: its number in the table, `IB/RoCE v1` or `RoCE v2`, and the network device it belongs to."""

    number: int
    address: str
    kind: str
    device: str

    @property
    def is_ipv4(self) -> bool:
        """A routable one that follows from an IPv4 address."""
        return self.address.startswith("0000:0000:0000:0000:0000:ffff:")


class Port(NamedTuple):
    """One port of an RDMA device. `mtu` is the network device's, 0 where there is none."""

    device: str
    number: int
    state: str
    rate: str
    link_layer: str
    gids: tuple[Gid, ...]
    mtu: int

    @property
    def is_active(self) -> bool:
        """The link is up."""
        return "ACTIVE" in self.state

    @property
    def best_gid(self) -> Gid | None:
        """That of RoCE v2 with an IPv4 address, else any of RoCE v2."""
        routable = [gid for gid in self.gids if gid.kind == "RoCE v2"]
        return next((gid for gid in routable if gid.is_ipv4), routable[0] if routable else None)


class Fact(NamedTuple):
    """One line of the report."""

    name: str
    is_good: bool
    told: str


class Counter(NamedTuple):
    """One reading."""

    device: str
    port: int
    name: str
    help: str
    value: int


def ports(root: Path = Path("/")) -> list[Port]:
    """Every port of every RDMA device."""
    return [_port(root, folder) for folder in _port_folders(root)]


def _port_folders(root: Path) -> list[Path]:
    return sorted((root / "sys/class/infiniband").glob("*/ports/*"))


def _read(path: Path) -> str:
    """What a file says; nothing where it is not there or, as GID types of empty entries, cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _number(path: Path) -> int | None:
    text = _read(path)
    return int(text) if text.isdecimal() else None


def _port(root: Path, folder: Path) -> Port:
    gids = []
    for path in sorted((folder / "gids").glob("*"), key=lambda p: int(p.name) if p.name.isdecimal() else -1):
        address = _read(path)
        if address.strip("0:"):
            kind, device = (_read(folder / "gid_attrs" / what / path.name) for what in ("types", "ndevs"))
            gids.append(Gid(int(path.name), address, kind, device))
    devices = {gid.device for gid in gids if gid.device}
    mtus = [_number(root / "sys/class/net" / device / "mtu") or 0 for device in devices]
    state, rate, layer = (_read(folder / name) for name in ("state", "rate", "link_layer"))
    return Port(folder.parts[-3], int(folder.name), state, rate, layer, tuple(gids), min(mtus, default=0))


def counters(root: Path = Path("/")) -> Iterator[Counter]:
    """Congestion, loss and pauses of every port, as far as the driver tells them there."""
    for folder in _port_folders(root):
        for file, (name, text) in _COUNTERS.items():
            for group in ("hw_counters", "counters"):
                value = _number(folder / group / file)
                if value is not None:
                    yield Counter(folder.parts[-3], int(folder.name), name, text, value)
                    break


def exposition(root: Path = Path("/")) -> str:
    """The counters in Prometheus' text format."""
    lines, told = [], set()
    for one in sorted(counters(root), key=lambda c: (c.name, c.device, c.port)):
        name = f"octavo_fabric_{one.name}_total"
        if name not in told:
            told.add(name)
            lines += [f"# HELP {name} {one.help}", f"# TYPE {name} counter"]
        lines.append(f'{name}{{device="{one.device}",port="{one.port}"}} {one.value}')
    return "".join(line + "\n" for line in lines)


def report(root: Path = Path("/"), *, allow_tcp: bool = False) -> list[Fact]:
    """Everything, link by link and limit by limit. With `allow_tcp` what RDMA alone wants is told and may be missing."""
    links = ports(root)
    facts = [fact for port in links for fact in _port_facts(port)]
    if not links:
        facts.append(
            Fact("link", allow_tcp, "no RDMA device in /sys/class/infiniband" + ("" if allow_tcp else "; --allow-tcp does without"))
        )
    verbs, memlock = (fact._replace(is_good=fact.is_good or allow_tcp) for fact in (_verbs(root), _memlock()))
    facts += [verbs, _kernel(), memlock, _hugepages(root), _shm(root), _nixl(), _mooncake()]
    facts.append(_transport(any(port.is_active for port in links), allow_tcp=allow_tcp))
    return facts


def _transport(has_link: bool, *, allow_tcp: bool) -> Fact:
    """How blocks would travel: RDMA only where UCX is here, has a link and is not left the choice of TCP."""
    choice = os.environ.get("UCX_TLS", "")
    names = {word.split("_")[0] for word in choice.lstrip("^").split(",") if word}
    if nixl.name() is None:
        told = "blocks travel by gRPC over TCP; NIXL is not installed"
    elif not has_link:
        told = "blocks travel by gRPC, or by UCX where the store has --transport ucx, over TCP: there is no active RDMA link"
    elif not choice or choice.startswith("^") or names & {"tcp", "all"}:
        told = f"UCX may choose TCP (UCX_TLS={choice or 'not set'}); set UCX_TLS=rc,cuda_copy,cuda_ipc on both sides"
    else:
        return Fact("transport", True, f"UCX over {choice}, where the store has --transport ucx")
    return Fact("transport", allow_tcp, told + ("" if allow_tcp else "; no RDMA. --allow-tcp says that this is meant"))


def _port_facts(port: Port) -> Iterator[Fact]:
    name = f"{port.device}/{port.number}"
    yield Fact("link", port.is_active, f"{name}: {port.state or 'state unknown'}, {port.rate or 'rate unknown'}, {port.link_layer}")
    if port.link_layer != "Ethernet":
        return
    gid = port.best_gid
    if gid is None:
        yield Fact("gid", False, f"{name}: no RoCE v2 address; give {name} an IPv4 address and see gid_attrs/types")
    else:
        kind = "IPv4" if gid.is_ipv4 else "no IPv4: not routable"
        yield Fact("gid", gid.is_ipv4, f"{name}: index {gid.number} is RoCE v2, {kind}; UCX_IB_GID_INDEX={gid.number}")
    hint = "" if port.mtu >= _LEAST_MTU else f"; set 9000 on host and switch (at least {_LEAST_MTU} for a path MTU of 4096)"
    yield Fact("mtu", port.mtu >= _LEAST_MTU, f"{name}: {port.mtu or 'unknown'}{hint}")


def _verbs(root: Path) -> Fact:
    library, devices = ctypes.util.find_library("ibverbs"), (root / "dev/infiniband").is_dir()
    told = f"{library or 'no libibverbs: install rdma-core'}, /dev/infiniband is {'there' if devices else 'not there'}"
    return Fact("rdma-core", bool(library) and devices, told)


def _kernel() -> Fact:
    release = platform.release()
    numbers = [int(part) for part in release.split("-")[0].split(".")[:2] if part.isdecimal()]
    return Fact("kernel", tuple(numbers) >= _LEAST_KERNEL, release)


def _memlock() -> Fact:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    is_free = limit in (resource.RLIM_INFINITY, -1)
    told = (
        "unlimited"
        if is_free
        else f"{limit // 1024} KiB; registered memory is locked: ulimit -l unlimited, or LimitMEMLOCK=infinity"
    )
    return Fact("memlock", is_free, told)


def _hugepages(root: Path) -> Fact:
    folder = root / "sys/kernel/mm/hugepages/hugepages-2048kB"
    total, free = (_number(folder / f"{what}_hugepages") or 0 for what in ("nr", "free"))
    mode = _read(root / "sys/kernel/mm/transparent_hugepage/enabled")
    is_good = total > 0 or "[never]" not in mode
    return Fact("hugepages", is_good, f"{free} of {total} of 2 MiB free, transparent: {mode or 'unknown'}")


def _shm(root: Path) -> Fact:
    try:
        status = os.statvfs(root / "dev/shm")
    except OSError:
        return Fact("/dev/shm", False, "not there")
    size = status.f_frsize * status.f_blocks
    return Fact(
        "/dev/shm", size >= _LEAST_SHM, f"{size / 2**30:.1f} GiB" + ("" if size >= _LEAST_SHM else "; at least 1 GiB is wanted")
    )


def _nixl() -> Fact:
    module = nixl.name()
    told = f"{module} is installed" if module else f"not installed, and not needed; for io_uring and RDMA: {nixl.INSTALL}"
    return Fact("nixl", True, told)


def _mooncake() -> Fact:
    told = (
        "its transfer engine is installed" if mooncake.is_here() else f"not installed, and not needed; for RDMA: {mooncake.INSTALL}"
    )
    return Fact("mooncake", True, told)
