"""Host memory: near which node, in which pages, locked or not; as far as this machine lets it be seen."""

import re
from pathlib import Path

import numpy as np
import pytest

from octavo_core.testing import tiers as suite
from octavo_offload import HostTier, Jobs, Slab
from octavo_offload._src import numa
from octavo_offload._src.slab import Slabs, address

TWO_SOCKETS = {
    "sys/devices/system/node/has_memory": "0-1\n",
    "sys/devices/system/node/has_cpu": "0-1\n",
    "sys/devices/system/node/online": "0-1\n",
    "sys/devices/system/node/possible": "0-1\n",
    "proc/self/status": "Name:\tpython\nMems_allowed:\t00000000,00000003\nMems_allowed_list:\t0-1\nvoluntary_ctxt_switches:\t1\n",
}
"""As a machine with two sockets tells it (Documentation/ABI/stable/sysfs-devices-node)."""


def tree(root: Path, **changes: str) -> Path:
    for name, text in {**TWO_SOCKETS, **changes}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_nodes_with_memory_are_found(tmp_path):
    assert numa.memory_nodes(tree(tmp_path)) == [0, 1]


def test_a_node_without_memory_or_outside_the_cpuset_is_not_used(tmp_path):
    cpus_only = tree(
        tmp_path / "a", **{"sys/devices/system/node/has_memory": "0,2-3\n", "proc/self/status": "Mems_allowed_list:\t0-3\n"}
    )
    assert numa.memory_nodes(cpus_only) == [0, 2, 3]
    confined = tree(tmp_path / "b", **{"proc/self/status": "Mems_allowed_list:\t1\n"})
    assert numa.memory_nodes(confined) == [1]


@pytest.mark.parametrize("text", ["", "x", "0-", "-1", "0,a"])
def test_a_tree_that_cannot_be_read_means_no_nodes(tmp_path, text):
    assert numa.memory_nodes(tree(tmp_path, **{"sys/devices/system/node/has_memory": text})) == []
    assert numa.memory_nodes(tmp_path / "nothing") == []


def test_memory_of_a_node_is_asked_of_the_system():
    nodes = numa.memory_nodes()
    if not nodes:
        pytest.skip("this system tells no memory nodes")
    slab = Slab(3, 1 << 20, node=nodes[-1])
    slab.slot(2)[:] = b"7" * (1 << 20)
    if f"node {nodes[-1]}" in slab.told and "not" not in slab.told:
        assert numa.preferred(address(slab.whole)) == nodes[-1]
        assert f"bind:{nodes[-1]}" in _policy(slab) or f"prefer:{nodes[-1]}" in _policy(slab)
    else:
        assert "mbind is not allowed" in slab.told


def _policy(slab: Slab) -> str:
    """What the kernel says of a slab."""
    start = f"{address(slab.whole):08x} "
    path = Path("/proc/self/numa_maps")
    return next((line for line in path.read_text().splitlines() if line.startswith(start)), "") if path.exists() else "prefer:0"


def test_a_node_that_is_not_there_is_said_and_memory_works():
    slab = Slab(1, 4096, node=1023)
    slab.slot(0)[:4] = b"abcd"
    assert "not bound to node 1023" in slab.told
    assert bytes(slab.slot(0)[:4]) == b"abcd"


def test_slots_of_two_nodes_lie_on_both_in_turn_and_nowhere_twice():
    slabs = Slabs(7, 5000, nodes=[0, 0])
    assert [part.num_slots for part in slabs.parts] == [4, 3]
    for i in range(7):
        slabs.slot(i)[:] = bytes([i]) * 8192
    assert all(bytes(slabs.slot(i)) == bytes([i]) * 8192 for i in range(7))
    inside = [address(slabs.parts[0].whole) <= address(slabs.slot(i)) < address(slabs.parts[0].whole) + 4 * 8192 for i in range(7)]
    assert inside == [True, False] * 3 + [True]
    assert len({address(slabs.slot(i)) for i in range(7)}) == 7


def test_one_node_and_fewer_slots_than_nodes_mean_one_slab():
    assert len(Slabs(7, 4096, nodes=[0]).parts) == len(Slabs(1, 4096, nodes=[0, 0]).parts) == len(Slabs(7, 4096).parts) == 1


def test_a_tier_over_two_slabs_keeps_the_promises_of_a_tier():
    jobs = Jobs(2, "test")
    suite.check_tier(lambda: HostTier(8 * suite.BLOCK_BYTES, suite.BLOCK_BYTES, jobs, nodes=[0, 0]))
    jobs.close()


def test_what_was_granted_is_told():
    slab = Slab(2, 4096, lock=True)
    told = slab.told
    assert re.fullmatch(r"(2 MiB pages|huge pages where free|small pages), (locked|not locked \(raise the memlock limit\))", told)
    locked = int(re.search(r"VmLck:\s+(\d+)", Path("/proc/self/status").read_text())[1])
    assert ("not locked" in told) or locked >= 8


def test_reserved_huge_pages_are_used_where_enough_are_free(monkeypatch):
    free = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")
    slab = Slab(3, 1 << 20)
    is_reserved = free.exists() and int(free.read_text()) >= 2
    assert ("2 MiB pages" in slab.told) == is_reserved
    assert len(slab.whole) == 3 << 20
    assert np.frombuffer(slab.whole, np.uint8).sum() == 0
