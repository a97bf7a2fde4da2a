import json

from octavo_offload import bench


def test_the_bench_runs_and_names_its_figures(tmp_path, capsys):
    bench.main(["--quick", "--json", str(tmp_path / "out.json"), "--folder", str(tmp_path)])
    names = {row["name"] for row in json.loads((tmp_path / "out.json").read_text())}
    tiers = {
        f"tier_{tier}_{way}{what}" for tier in ("host", "disk", "remote") for way in ("write", "read") for what in ("", "_fraction")
    }
    worse = {f"tier_{tier}_fraction" for tier in ("host", "disk", "remote")}
    assert names == {"checksum", "disk_threads_write", "disk_threads_read"} | tiers | worse
    assert "goal" in capsys.readouterr().out
