"""Prometheus metrics under vLLM's names with the prefix `octavo:`. Gauges and engine counters are read from `EngineStats` when asked."""

from __future__ import annotations

import time
from collections.abc import Iterator, Set
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from octavo_core.wire import EngineStats

if TYPE_CHECKING:
    from octavo_core.seams import Engine
else:
    Engine = Any

_LABEL = "model_name"
_FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_GAP_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40, 80)
_WHOLE_S = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
_TOKENS = tuple(10**e * m for e in range(7) for m in (1, 2, 5))

_GAUGES = (
    ("num_requests_running", "Sequences in the running batch", "num_running"),
    ("num_requests_waiting", "Sequences waiting to run", "num_waiting"),
    ("kv_cache_usage_perc", "Share of KV blocks holding live sequences, 0 to 1", "kv_usage"),
    ("kv_cache_wasted_slots", "KV slots in blocks of running sequences that hold no token", "kv_wasted_slots"),
    ("kv_cache_waste_perc", "Share of the KV slots of running sequences that hold no token, 0 to 1", "kv_waste"),
    ("engine_last_step_age_seconds", "Seconds since the step loop last came round", "last_step_age_s"),
)
_COUNTERS = (
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache", "prefix_queries_tokens"),
    ("prefix_cache_hits", "Prompt tokens found in the prefix cache", "prefix_hits_tokens"),
    ("num_preemptions", "Sequences that gave up their blocks", "preemptions"),
    ("preempted_tokens", "Tokens whose KV preempted sequences gave up", "preempted_tokens"),
    ("prompt_tokens", "Prompt tokens taken in", "prompt_tokens"),
    ("generation_tokens", "Tokens generated", "generation_tokens"),
    ("recompiles", "Compilations after the engine became ready", "recompiles"),
    ("engine_steps", "Forward passes", "steps"),
    (
        "kv_event_batches_dropped",
        "KV event batches not published because the publisher could not keep up",
        "kv_event_batches_dropped",
    ),
)

_TIER_GAUGES = (
    ("kv_tier_blocks", "KV blocks that can be found in a tier below the device", "num_blocks"),
    ("kv_tier_used_bytes", "Storage a tier has taken", "used_bytes"),
    ("kv_tier_total_bytes", "Storage a tier may take", "total_bytes"),
    ("kv_tier_leased_blocks", "Blocks of a tier that something is under way with", "num_leased"),
)
_TIER_COUNTERS = (
    ("kv_tier_hits", "Blocks a tier answered, verified", "hits"),
    ("kv_tier_misses", "Blocks a tier was asked for and did not answer", "misses"),
    ("kv_tier_verified", "Blocks whose checksum was right", "verified"),
    ("kv_tier_corrupt", "Blocks whose checksum was wrong: they count as misses", "corrupt"),
    ("kv_tier_stored", "Blocks a tier took in", "stored"),
    ("kv_tier_dropped", "Blocks a tier refused", "dropped"),
    ("kv_tier_evicted", "Blocks a tier gave up for others", "evicted"),
    ("kv_tier_errors", "Calls the storage of a tier failed", "errors"),
    ("kv_tier_read_bytes", "Bytes read from a tier", "read_bytes"),
    ("kv_tier_written_bytes", "Bytes written to a tier", "written_bytes"),
    ("kv_tier_read_seconds", "Time reading took, summed over threads", "read_s"),
    ("kv_tier_write_seconds", "Time writing took, summed over threads", "write_s"),
)
_TIER_STATES = ("on", "read-only", "off")


class _EngineCollector(Collector):
    """Metrics of the newest `EngineStats`."""

    def __init__(self, engine: Engine, model_name: str, live: Set[str]) -> None:
        self._engine, self._model_name, self._live = engine, model_name, live

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        for name, text, field in _GAUGES:
            gauge = GaugeMetricFamily(f"octavo:{name}", text, labels=[_LABEL])
            gauge.add_metric([self._model_name], getattr(stats, field))
            yield gauge
        for name, text, field in _COUNTERS:
            counter = CounterMetricFamily(f"octavo:{name}", text, labels=[_LABEL])
            counter.add_metric([self._model_name], getattr(stats, field))
            yield counter
        in_flight = GaugeMetricFamily("octavo:num_requests_in_flight", "Sequences the server waits for", labels=[_LABEL])
        in_flight.add_metric([self._model_name], len(self._live))
        yield in_flight
        yield self._cache_config(stats)
        yield from self._tiers(stats)

    def _tiers(self, stats: EngineStats) -> Iterator[Metric]:
        """Of each tier below the device; nothing where there are none."""
        if not stats.kv_tiers:
            return
        labels = [_LABEL, "tier"]
        for kind, rows in ((GaugeMetricFamily, _TIER_GAUGES), (CounterMetricFamily, _TIER_COUNTERS)):
            for name, text, field in rows:
                family = kind(f"octavo:{name}", text, labels=labels)
                for tier in stats.kv_tiers:
                    family.add_metric([self._model_name, tier.name], getattr(tier, field))
                yield family
        state = GaugeMetricFamily("octavo:kv_tier_state", "1 for the state a tier is in", labels=[*labels, "state"])
        for tier in stats.kv_tiers:
            for name in _TIER_STATES:
                state.add_metric([self._model_name, tier.name, name], int(tier.state == name))
        yield state

    def _cache_config(self, stats: EngineStats) -> Metric:
        info = GaugeMetricFamily(
            "octavo:cache_config_info", "Sizes of the KV cache", labels=[_LABEL, "block_size", "num_gpu_blocks"]
        )
        info.add_metric([self._model_name, str(stats.block_size), str(stats.num_blocks)], 1)
        return info


class SequenceTimer:
    """Observes one sequence: call `token` per output that brought tokens, `end` once."""

    def __init__(self, metrics: Metrics, arrival_s: float, prompt_tokens: int) -> None:
        self._metrics, self._arrival_s, self._prompt_tokens = metrics, arrival_s, prompt_tokens
        self._last_s: float | None = None
        self._tokens = 0

    def token(self, count: int, *, queue_s: float | None = None) -> None:
        """`count` tokens have come, the first after `queue_s` of waiting for a step."""
        if queue_s is not None:
            self._metrics.observe("request_queue_time_seconds", queue_s)
        if count == 0:
            return
        now = time.monotonic()
        if self._last_s is None:
            self._metrics.observe("time_to_first_token_seconds", now - self._arrival_s)
        else:
            for _ in range(count):
                self._metrics.observe("inter_token_latency_seconds", (now - self._last_s) / count)
        self._last_s, self._tokens = now, self._tokens + count

    def end(self, reason: str) -> None:
        """The sequence has ended."""
        self._metrics.finished(reason)
        self._metrics.observe("e2e_request_latency_seconds", time.monotonic() - self._arrival_s)
        self._metrics.observe("request_prompt_tokens", self._prompt_tokens)
        self._metrics.observe("request_generation_tokens", self._tokens)


class Metrics:
    """One server's registry."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._model_name = ""
        self._success = Counter("octavo:request_success", "Sequences ended", [_LABEL, "finished_reason"], registry=self._registry)
        self._http = Counter("octavo:http_requests", "HTTP answers", ["method", "handler", "status"], registry=self._registry)
        self._histograms = {
            name: Histogram(f"octavo:{name}", text, [_LABEL], buckets=buckets, registry=self._registry)
            for name, text, buckets in (
                ("time_to_first_token_seconds", "Receipt to first token", _FIRST_TOKEN_S),
                ("inter_token_latency_seconds", "Gap between tokens", _GAP_S),
                ("request_queue_time_seconds", "Receipt to the first step", _WHOLE_S),
                ("e2e_request_latency_seconds", "Receipt to last token", _WHOLE_S),
                ("request_prompt_tokens", "Prompt tokens of a sequence", _TOKENS),
                ("request_generation_tokens", "Tokens generated for a sequence", _TOKENS),
            )
        }

    def follow(self, engine: Engine, model_name: str, live: Set[str]) -> None:
        """Report this engine from now on."""
        self._model_name = model_name
        self._registry.register(_EngineCollector(engine, model_name, live))
        for histogram in self._histograms.values():
            histogram.labels(model_name)
        for reason in ("stop", "length", "abort", "error"):
            self._success.labels(model_name, reason)

    def observe(self, name: str, value: float | int) -> None:
        """One value of a histogram."""
        self._histograms[name].labels(self._model_name).observe(value)

    def finished(self, reason: str) -> None:
        """One sequence ended."""
        self._success.labels(self._model_name, reason).inc()

    def answered(self, method: str, handler: str, status: int) -> None:
        """One HTTP answer. `handler` is a route's pattern, never a client's path: the number of labels stays bounded."""
        self._http.labels(method, handler, str(status)).inc()

    def render(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self._registry)
