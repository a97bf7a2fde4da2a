"""Trees laid out as the kernel's, and what is read from them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from octavo_offload import fabric
from octavo_offload._src import nixl
from octavo_offload._src.remote import mooncake

PORT = "sys/class/infiniband/mlx5_0/ports/1"
GOOD = {
    f"{PORT}/state": "4: ACTIVE\n",
    f"{PORT}/rate": "400 Gb/sec (4X NDR)\n",
    f"{PORT}/link_layer": "Ethernet\n",
    f"{PORT}/gids/0": "fe80:0000:0000:0000:0ac0:ebff:fe12:3456\n",
    f"{PORT}/gids/1": "fe80:0000:0000:0000:0ac0:ebff:fe12:3456\n",
    f"{PORT}/gids/2": "0000:0000:0000:0000:0000:ffff:0a00:0005\n",
    f"{PORT}/gids/3": "0000:0000:0000:0000:0000:ffff:0a00:0005\n",
    f"{PORT}/gids/4": "0000:0000:0000:0000:0000:0000:0000:0000\n",
    **{f"{PORT}/gid_attrs/ndevs/{i}": "eth0\n" for i in range(4)},
    **{f"{PORT}/gid_attrs/types/{i}": ("RoCE v2\n" if i % 2 else "IB/RoCE v1\n") for i in range(4)},
    "sys/class/net/eth0/mtu": "9000\n",
    f"{PORT}/hw_counters/np_cnp_sent": "17\n",
    f"{PORT}/hw_counters/rp_cnp_handled": "4\n",
    f"{PORT}/hw_counters/np_ecn_marked_roce_packets": "2000\n",
    f"{PORT}/hw_counters/out_of_sequence": "N/A (no permission)\n",
    f"{PORT}/counters/port_xmit_wait": "99\n",
    "sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages": "1024\n",
    "sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages": "1000\n",
}


@pytest.fixture
def tree(tmp_path):
    def make(**changes):
        for name, text in {**GOOD, **changes}.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return tmp_path

    return make


def facts(root, **options):
    return {fact.name: fact for fact in fabric.report(root, **options)}


def test_a_good_link_is_told_with_the_index_to_use(tree):
    (port,) = fabric.ports(tree())
    assert (port.device, port.number, port.is_active, port.mtu, len(port.gids)) == ("mlx5_0", 1, True, 9000, 4)
    assert port.best_gid.number == 3
    found = facts(tree())
    assert all(found[name].is_good for name in ("link", "gid", "mtu", "hugepages"))
    assert "UCX_IB_GID_INDEX=3" in found["gid"].told
    assert "1000 of 1024" in found["hugepages"].told


@pytest.mark.parametrize(
    ("changes", "name", "words"),
    [
        ({f"{PORT}/state": "1: DOWN\n"}, "link", "DOWN"),
        ({"sys/class/net/eth0/mtu": "1500\n"}, "mtu", "1500; set 9000"),
        ({f"{PORT}/gid_attrs/types/{i}": "IB/RoCE v1\n" for i in range(4)}, "gid", "no RoCE v2"),
        ({f"{PORT}/gids/3": "fe80:0000:0000:0000:0ac0:ebff:fe12:3456\n"}, "gid", "not routable"),
    ],
)
def test_what_is_wrong_is_named(tree, changes, name, words):
    fact = facts(tree(**changes))[name]
    assert not fact.is_good
    assert words in fact.told


def test_a_link_of_infiniband_has_no_gid_type_and_no_mtu_to_check(tree):
    assert {"gid", "mtu"} & set(facts(tree(**{f"{PORT}/link_layer": "InfiniBand\n"}))) == set()


def test_counters_that_can_be_read_are_and_others_are_left_out(tree):
    assert {(c.name, c.value) for c in fabric.counters(tree())} == {
        ("cnp_sent", 17),
        ("cnp_handled", 4),
        ("ecn_marked", 2000),
        ("transmit_waits", 99),
    }
    text = fabric.exposition(tree())
    assert '# TYPE octavo_fabric_cnp_sent_total counter\noctavo_fabric_cnp_sent_total{device="mlx5_0",port="1"} 17\n' in text


def test_without_a_fabric_tcp_has_to_be_wanted(tmp_path):
    assert fabric.ports(tmp_path) == []
    assert fabric.exposition(tmp_path) == ""
    refused, allowed = facts(tmp_path), facts(tmp_path, allow_tcp=True)
    assert not refused["link"].is_good
    assert "--allow-tcp" in refused["transport"].told
    assert all(allowed[name].is_good for name in ("link", "rdma-core", "memlock", "transport"))


@pytest.mark.parametrize(
    ("installed", "choice", "is_good", "words"),
    [
        (False, "rc", False, "NIXL is not installed"),
        (True, "", False, "not set"),
        (True, "rc,tcp", False, "may choose TCP"),
        (True, "^rc", False, "may choose TCP"),
        (True, "rc,cuda_copy,cuda_ipc", True, "UCX over rc"),
        (True, "rc_verbs", True, "UCX over rc_verbs"),
    ],
)
def test_rdma_is_good_where_ucx_has_no_other_choice(tree, monkeypatch, installed, choice, is_good, words):
    monkeypatch.setattr(nixl, "name", lambda: "nixl_cu12" if installed else None)
    monkeypatch.setenv("UCX_TLS", choice)
    fact = facts(tree())["transport"]
    assert fact.is_good == is_good
    assert words in fact.told
    assert facts(tree(), allow_tcp=True)["transport"].is_good
    down = facts(tree(**{f"{PORT}/state": "1: DOWN\n"}))["transport"]
    assert not down.is_good


def test_the_install_line_is_told(monkeypatch):
    monkeypatch.setattr(nixl, "_MODULES", ())
    monkeypatch.setattr(mooncake, "_PACKAGE", "a_package_nobody_has")
    assert "pip install --no-deps nixl-cu12" in facts(Path("/"))["nixl"].told
    assert "pip install --no-deps mooncake-transfer-engine-non-cuda" in facts(Path("/"))["mooncake"].told


def test_neither_the_doctor_nor_an_engine_loads_grpc():
    """It has threads of its own; stores and agents have it."""
    words = "import sys, octavo_offload, octavo_offload.fabric; sys.exit('grpc' in sys.modules)"
    subprocess.run([sys.executable, "-c", words], check=True)


@pytest.mark.skipif(not os.path.isdir("/sys"), reason="wants Linux")
def test_this_machine_can_be_looked_at():
    assert {"kernel", "memlock", "hugepages", "/dev/shm", "rdma-core", "nixl", "mooncake", "transport"} <= set(facts(Path("/")))
