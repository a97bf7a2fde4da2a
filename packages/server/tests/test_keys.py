"""API keys in a file, and what each of them may use."""

import json
import subprocess
import sys

import pytest

from octavo_core.errors import ConfigError
from octavo_core.testing.patience import PATIENCE_S
from octavo_server import ServerConfig, cli
from octavo_server._src.keys import KeyEntry, Keys, digest_of
from octavo_server._src.openai_errors import RateLimitedError
from octavo_server._src.quotas import Quotas


def keys_file(tmp_path, *entries):
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"keys": [{"name": f"key {i}", **entry} for i, entry in enumerate(entries)]}))
    return str(path)


def entry(key, **fields):
    return {"sha256": digest_of(key), **fields}


def test_a_key_made_on_the_command_line_opens_and_its_entry_does_not_hold_it(capsys, tmp_path) -> None:
    assert cli.main(["key", "team a", "--tenant", "a"]) == 0
    out, err = capsys.readouterr()
    key = err.strip().rpartition(" ")[2]
    assert len(key) >= 43
    assert key not in out
    path = tmp_path / "keys.json"
    path.write_text(f'{{"keys": [{out}]}}')
    index, found = Keys.load((), str(path)).find(key)
    assert (index, found.name, found.own_tenant) == (0, "team a", "a")
    assert Keys.load((), str(path)).find(key + "x") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not what it should be"),
        ('{"keys": [{"name": "a"}]}', "missing required field `sha256`"),
        ('{"keys": [{"name": "a", "sha256": "xyz"}]}', "matching regex"),
        (json.dumps({"keys": [{"name": "a", "key": "plain", "sha256": "0" * 64}]}), "unknown field `key`"),
        (json.dumps({"keys": [{"name": "a", "sha256": "0" * 64, "priority": [5, 1]}]}), "lowest first"),
        (json.dumps({"keys": [{"name": n, "sha256": "0" * 64} for n in "ab"]}), "given twice"),
        (
            json.dumps({"keys": [{"name": n, "sha256": n * 64, "tenant": "t", "quota": q} for q, n in enumerate("ab")]}),
            "different quotas",
        ),
        ('{"keys": []}', "has no key"),
    ],
)
def test_a_keys_file_that_cannot_be_meant_is_refused(tmp_path, text, message) -> None:
    path = tmp_path / "keys.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        Keys.load((), str(path))


def seen(api, body, key):
    """The request the engine got."""
    kept, submit = [], api.engine.submit
    api.engine.submit = lambda requests: kept.extend(requests) or submit(requests)
    assert api.post("/v1/completions", body, headers={"authorization": f"Bearer {key}"}).status_code == 200
    api.engine.submit = submit
    return kept[0]


def test_tenants_share_no_prefix_keys_of_one_do_and_priorities_are_clamped(make_api, tmp_path) -> None:
    path = keys_file(
        tmp_path,
        entry("a1", tenant="a", priority=[0, 5], quota=1),
        entry("a2", tenant="a", quota=1),
        entry("b", priority=[-7, -7]),
    )
    api = make_api(config=ServerConfig(api_keys_file=path, api_key=("plain",)))
    body = {"prompt": "the quick brown fox", "max_tokens": 1, "priority": 9}
    first, second, third, plain = (seen(api, body, key) for key in ("a1", "a2", "b", "plain"))
    assert first.namespace == second.namespace
    assert len({one.namespace for one in (first, third, plain)}) == 3
    assert [one.priority for one in (first, second, third, plain)] == [5, 9, -7, 9]
    assert [one.tenant for one in (first, second, third, plain)] == [1, 1, 0, 0]
    salted = seen(api, {**body, "cache_salt": "s"}, "a1")
    assert salted.namespace != first.namespace
    assert seen(api, {**body, "priority": -3}, "a1").priority == 0


@pytest.mark.parametrize("field", ["tenant", "namespace", "tier", "kv_transfer_params", "arrival_s", "quota", "address"])
def test_nothing_internal_is_read_from_a_body(api, field) -> None:
    answer = api.post("/v1/completions", {"prompt": "x", "max_tokens": 1, field: "x"})
    assert answer.status_code == 400


def test_a_request_id_of_a_client_never_names_a_sequence(make_api) -> None:
    api = make_api(config=ServerConfig(api_key=("k",)))
    one = seen(api, {"prompt": "x", "max_tokens": 1, "request_id": "mine"}, "k")
    assert "mine" not in one.request_id


class Clock:
    now_s = 100.0

    def __call__(self):
        return self.now_s


def test_requests_at_once_are_bounded_and_every_ending_gives_one_back(make_api, tmp_path) -> None:
    path = keys_file(tmp_path, entry("k", max_concurrent_requests=1))
    api = make_api(config=ServerConfig(api_keys_file=path))
    for body in ({"prompt": "x", "max_tokens": 1}, {"prompt": [-1]}, b"{", {"prompt": "x", "stream": True, "max_tokens": 1}) * 3:
        assert api.post("/v1/completions", body, headers={"authorization": "Bearer k"}).status_code in (200, 400)
    quotas = Quotas(Keys.load((), path).entries)
    quotas.enter(0)
    with pytest.raises(RateLimitedError, match="1 requests at once and has 1"):
        quotas.enter(0)
    quotas.leave(0)
    quotas.enter(0)


def test_tokens_come_back_with_time_and_a_minutes_worth_may_come_at_once() -> None:
    clock = Clock()
    quotas = Quotas([KeyEntry(name="k", sha256="0" * 64, max_tokens_per_minute=60)], clock=clock)
    quotas.enter(0)
    quotas.spend(0, 75)
    with pytest.raises(RateLimitedError) as refused:
        quotas.enter(0)
    assert refused.value.retry_after_s == 16
    clock.now_s += 15.5
    quotas.enter(0)
    clock.now_s += 10_000
    quotas.spend(0, 59)
    quotas.enter(0)
    quotas.spend(0, 1)
    with pytest.raises(RateLimitedError):
        quotas.enter(0)


def test_a_frontend_that_dies_takes_its_count_with_it(tmp_path) -> None:
    entries = [KeyEntry(name="k", sha256="0" * 64, max_concurrent_requests=4)]
    first, second = (Quotas(entries, tmp_path / "quotas", row=row, num_rows=2) for row in range(2))
    for quotas in (first, first, second, second):
        quotas.enter(0)
    with pytest.raises(RateLimitedError):
        first.enter(0)
    successor = Quotas(entries, tmp_path / "quotas", row=1, num_rows=2)
    successor.enter(0)
    successor.enter(0)
    with pytest.raises(RateLimitedError):
        first.enter(0)


ENTER = """
import sys
from pathlib import Path
from octavo_server._src.keys import KeyEntry
from octavo_server._src.openai_errors import RateLimitedError
from octavo_server._src.quotas import Quotas
quotas = Quotas([KeyEntry(name="k", sha256="0" * 64, max_concurrent_requests=500)], Path(sys.argv[1]), row=int(sys.argv[2]), num_rows=2)
sys.stdin.readline()
count = 0
for _ in range(1000):
    try:
        quotas.enter(0)
        count += 1
    except RateLimitedError:
        pass
print(count)
"""


def test_the_bound_is_exact_when_frontends_race(tmp_path) -> None:
    command = [sys.executable, "-c", ENTER, str(tmp_path / "quotas")]
    racers = [subprocess.Popen([*command, str(row)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for row in range(2)]
    for racer in racers:
        racer.stdin.write("\n")
        racer.stdin.flush()
    assert sum(int(racer.communicate(timeout=PATIENCE_S)[0]) for racer in racers) == 500
