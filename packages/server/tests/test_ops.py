import json
import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from octavo_server import ServerConfig, __version__
from octavo_server._src.app import build_app
from octavo_server._src.state import ServerState


def test_models_are_listed_and_found_with_slashes_in_their_names(make_api) -> None:
    api = make_api(config=ServerConfig(served_model_name=("org/one", "two")))
    cards = api.get("/v1/models").json()["data"]
    assert [card["id"] for card in cards] == ["org/one", "two"]
    assert cards[0]["max_model_len"] == 512
    assert api.get("/v1/models/org/one").json() == cards[0]
    assert api.get("/v1/models/org%2Fone").json() == cards[0]
    for name in ("three", "", "org/one/"):
        response = api.get(f"/v1/models/{name}")
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "model_not_found"
    assert api.complete(model="two")["model"] == "two"
    assert api.complete()["model"] == "org/one"


def test_unknown_routes_and_wrong_methods_are_told_in_openais_shape(api) -> None:
    for method, path, status in (("GET", "/v1/nothing", 404), ("GET", "/v1/completions", 405), ("DELETE", "/v1/completions", 405),
                                 ("POST", "/health", 405), ("GET", "/v1/models/", 404), ("GET", "/", 404)):  # fmt: skip
        response = api.request(method, path)
        assert response.status_code == status
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        assert response.headers["x-request-id"]
    assert "POST" in api.get("/v1/completions").headers["allow"]


def test_request_ids_are_distinct_echoed_if_sane_and_name_the_answer(api) -> None:
    ids = {api.post("/v1/completions", {"prompt": "x"}).headers["x-request-id"] for _ in range(3)}
    assert len(ids) == 3
    response = api.post("/v1/completions", {"prompt": "x"}, headers={"x-request-id": "mine-1"})
    assert response.headers["x-request-id"] == "mine-1"
    assert response.json()["id"] == "cmpl-mine-1"
    for insane in ("a b", "x" * 200, "<script>"):
        assert api.get("/health", headers={"x-request-id": insane}).headers["x-request-id"] != insane


def test_the_same_client_id_twice_at_once_does_not_mix_requests(api) -> None:
    bodies = [api.post("/v1/completions", {"prompt": "x", "n": 3}, headers={"x-request-id": "same"}).json() for _ in range(2)]
    assert all(len(body["choices"]) == 3 for body in bodies)


def test_the_version_is_the_packages(api) -> None:
    from importlib.metadata import version

    assert api.get("/version").json() == {"version": __version__}
    assert __version__ == version("octavo-server")


def test_openapi_describes_every_route_and_every_reference_exists(api) -> None:
    document = api.get("/openapi.json").json()
    assert document["openapi"].startswith("3.")
    served = {"/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/models/{model}", "/tokenize", "/detokenize", "/health",
              "/version", "/openapi.json", "/metrics"}  # fmt: skip
    assert set(document["paths"]) == served
    for name in re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(document)):
        assert name in document["components"]["schemas"]
    assert "temperature" in document["components"]["schemas"]["CompletionRequest"]["properties"]


def test_metrics_count_what_was_served(api) -> None:
    api.complete([7] * 40, max_tokens=5, ignore_eos=True)
    api.complete([7] * 40, max_tokens=5, ignore_eos=True, n=2)
    api.post("/v1/completions", {"prompt": -1})
    response = api.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    samples = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }
    label = ("model_name", "org/toy")
    expected = {
        "octavo:num_requests_running": 0,
        "octavo:num_requests_waiting": 0,
        "octavo:kv_cache_usage_perc": 0,
        "octavo:prompt_tokens_total": 120,
        "octavo:generation_tokens_total": 15,
        "octavo:prefix_cache_queries_total": 120,
        "octavo:prefix_cache_hits_total": 64,
        "octavo:num_preemptions_total": 0,
        "octavo:recompiles_total": 0,
        "octavo:time_to_first_token_seconds_count": 3,
        "octavo:inter_token_latency_seconds_count": 12,
        "octavo:e2e_request_latency_seconds_count": 3,
        "octavo:request_prompt_tokens_sum": 120,
        "octavo:request_generation_tokens_sum": 15,
    }
    for name, value in expected.items():
        assert samples[name, (label,)] == value, name
    assert samples["octavo:request_success_total", (("finished_reason", "length"), label)] == 3
    assert samples["octavo:cache_config_info", (("block_size", "16"), label, ("num_gpu_blocks", "0"))] == 1
    route = (("handler", "/v1/completions"), ("method", "POST"))
    assert samples["octavo:http_requests_total", (*route, ("status", "200"))] == 2
    assert samples["octavo:http_requests_total", (*route, ("status", "400"))] == 1


def test_wasted_slots_and_dropped_events_are_those_of_the_engine(api) -> None:
    from octavo_core.wire import EngineStats

    api.engine.stats = lambda: EngineStats(kv_wasted_slots=37, kv_waste=0.25, kv_event_batches_dropped=3)
    text = api.get("/metrics").text
    assert 'octavo:kv_cache_wasted_slots{model_name="org/toy"} 37.0' in text
    assert 'octavo:kv_cache_waste_perc{model_name="org/toy"} 0.25' in text
    assert 'octavo:kv_event_batches_dropped_total{model_name="org/toy"} 3.0' in text


def test_every_tier_below_the_device_has_its_own_metrics(api) -> None:
    from octavo_core.wire import EngineStats, TierStats

    assert "kv_tier" not in api.get("/metrics").text
    tiers = [TierStats(name="host", hits=7, read_s=0.5), TierStats(name="disk", state="read-only", corrupt=2, used_bytes=4096)]
    api.engine.stats = lambda: EngineStats(kv_tiers=tiers)
    text = api.get("/metrics").text
    assert 'octavo:kv_tier_hits_total{model_name="org/toy",tier="host"} 7.0' in text
    assert 'octavo:kv_tier_read_seconds_total{model_name="org/toy",tier="host"} 0.5' in text
    assert 'octavo:kv_tier_corrupt_total{model_name="org/toy",tier="disk"} 2.0' in text
    assert 'octavo:kv_tier_used_bytes{model_name="org/toy",tier="disk"} 4096.0' in text
    assert 'octavo:kv_tier_state{model_name="org/toy",state="read-only",tier="disk"} 1.0' in text
    assert 'octavo:kv_tier_state{model_name="org/toy",state="on",tier="disk"} 0.0' in text


def test_paths_of_clients_make_no_metric_labels(api) -> None:
    for index in range(5):
        api.get(f"/secret-{index}")
        api.request(f"BREW{index}", "/health")
    assert "secret" not in api.get("/metrics").text
    assert "BREW" not in api.get("/metrics").text


@pytest.mark.parametrize(
    "stats", [{"is_ready": False}, {"error": "out of memory", "is_ready": True}, {"is_ready": True, "last_step_age_s": 60.0}]
)
def test_health_is_red_unless_a_token_can_be_made(api, stats) -> None:
    from octavo_core.wire import EngineStats

    assert api.get("/health").status_code == 200
    api.engine.stats = lambda: EngineStats(**stats)
    response = api.get("/health")
    assert response.status_code == 503
    assert response.json()["error"]["message"]


def test_before_the_model_is_loaded_everything_that_needs_it_is_503(make_api) -> None:
    api = make_api()
    api.app = build_app(ServerState(ServerConfig()))
    for method, path in (("GET", "/health"), ("GET", "/v1/models"), ("POST", "/v1/completions"), ("POST", "/tokenize")):
        response = api.request(method, path, json={"prompt": "x"})
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "not_ready"
        assert response.headers["retry-after"]
    assert api.get("/version").status_code == 200
    assert api.get("/metrics").status_code == 200


def test_tokenize_and_detokenize_invert_each_other(api) -> None:
    for text in ("Hello world", "naïve 日本語 😀👍🏽\n\tx", "<|start|>x", ""):
        body = api.post("/tokenize", {"prompt": text}).json()
        assert body["count"] == len(body["tokens"])
        assert body["max_model_len"] == 512
        assert api.post("/detokenize", {"tokens": body["tokens"]}).json() == {"prompt": text}
        assert api.post("/tokenize", {"content": text}).json() == body
    assert api.post("/tokenize", {}).status_code == 400
    named = api.post("/tokenize", {"prompt": "the", "return_token_strs": True}).json()
    assert len(named["token_strs"]) == named["count"]
