"""Prometheus metrics. Names follow vLLM's, with the prefix octavo_.

What a request experiences is counted here, in the front end; what the engine is doing is read from
its stats at scrape time. The unit of `octavo_request_success_total` is one prompt (with all its n samples).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from octavo.request import FinishReason
from octavo.server.metrics_alias import Aliased
from octavo.server.quotas import Accounts

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

_TTFT_BUCKETS = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_ITL_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5, 10)
_E2E_BUCKETS = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)


_COUNT_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000)


class ServerMetrics:
    """One registry per application, so that two servers in one process do not share counters."""

    def __init__(
        self, model_name: str, *, accounts: Accounts | None = None, aliases: Mapping[str, tuple[str, ...]] | None = None
    ) -> None:
        """`aliases`: further names under which metrics are shown, see octavo.server.metrics_alias."""
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self._aliases = aliases or {}
        self._engine = _EngineCollector(model_name)
        self.registry.register(self._engine)
        if accounts is not None:
            self.registry.register(_KeyCollector(model_name, accounts))

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, ("model_name",), registry=self.registry).labels(model_name)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            metric = Histogram(name, text, ("model_name",), buckets=buckets, registry=self.registry)
            return metric.labels(model_name)

        self.prompt_tokens = counter("octavo_prompt_tokens", "Prompt tokens of admitted prompts, cached ones included.")
        self.cached_tokens = counter("octavo_prompt_tokens_cached", "Prompt tokens taken from the prefix cache.")
        self.generation_tokens = counter("octavo_generation_tokens", "Generated tokens.")
        self.ttft = histogram(
            "octavo_time_to_first_token_seconds", "From the arrival of a request to its first token.", _TTFT_BUCKETS
        )
        self.itl = histogram("octavo_inter_token_latency_seconds", "Between two tokens of one sequence.", _ITL_BUCKETS)
        self.e2e = histogram(
            "octavo_e2e_request_latency_seconds", "From the arrival of a prompt to its end, for any reason.",
            _E2E_BUCKETS,
        )  # fmt: skip
        self._tpot = histogram(
            "octavo_request_time_per_output_token_seconds", "Mean time per token of a sample after its first one.",
            _ITL_BUCKETS,
        )  # fmt: skip
        self._decode = histogram(
            "octavo_request_decode_time_seconds", "From the first token of a sample to its last.", _E2E_BUCKETS
        )
        self._request_prompt = histogram("octavo_request_prompt_tokens", "Tokens of a prompt.", _COUNT_BUCKETS)
        self._request_generated = histogram(
            "octavo_request_generation_tokens", "Tokens generated for a prompt, all samples.", _COUNT_BUCKETS
        )
        self._request_longest = histogram(
            "octavo_request_max_num_generation_tokens", "Tokens of the longest sample of a prompt.", _COUNT_BUCKETS
        )
        self._finished = Counter(
            "octavo_request_success",
            "Prompts that ended, by reason: stop, length, abort (the client left), error.",
            ("finished_reason", "model_name"),
            registry=self.registry,
        )
        for reason in FinishReason:  # a series exists before its first event, so that rates are right
            self._finished.labels(reason.value, model_name)
        self._responses = Counter(
            "octavo_http_responses", "HTTP responses, by status.", ("code", "model_name"), registry=self.registry
        )

    def finished(self, reason: FinishReason, seconds: float) -> None:
        self._finished.labels(reason.value, self._model_name).inc()
        self.e2e.observe(seconds)

    def answered(self, num_prompt_tokens: int, samples: Sequence[tuple[int, float]]) -> None:
        """A prompt got its whole answer. Of each sample: its tokens, and seconds from the first to the last."""
        self._request_prompt.observe(num_prompt_tokens)
        self._request_generated.observe(sum(num for num, _ in samples))
        self._request_longest.observe(max(num for num, _ in samples))
        for num_tokens, seconds in samples:
            if num_tokens:
                self._decode.observe(seconds)
            if num_tokens > 1:
                self._tpot.observe(seconds / (num_tokens - 1))

    def responded(self, status: int) -> None:
        self._responses.labels(str(status), self._model_name).inc()

    def render(self, engine_stats: dict[str, Any] | None, *, num_restarts: int = 0, num_in_flight: int = 0) -> bytes:
        """Prometheus text format 0.0.4. With no stats (engine down) the engine's last known values stay."""
        self._engine.num_restarts = num_restarts
        self._engine.num_in_flight = num_in_flight
        if engine_stats is not None:
            self._engine.stats = engine_stats
        if not self._aliases:
            return generate_latest(self.registry)
        return generate_latest(Aliased(self.registry, self._aliases))


_GAUGES = (
    ("num_running", "octavo_num_requests_running", "Sequences in the running batch."),
    ("num_waiting", "octavo_num_requests_waiting", "Sequences that wait to be computed."),
    ("num_compiling", "octavo_num_requests_compiling", "Sequences whose grammar is being compiled."),
    ("num_blocks", "octavo_kv_blocks", "KV blocks in the pool."),
    ("num_cached_blocks", "octavo_kv_blocks_cached", "KV blocks that the prefix cache can find."),
    ("num_free_blocks", "octavo_kv_blocks_free", "KV blocks that no sequence uses (the prefix cache may)."),
)
_COUNTERS = (
    ("num_preemptions", "octavo_num_preemptions", "Sequences preempted for lack of KV blocks."),
    ("num_lost_tokens", "octavo_preempted_tokens", "Computed tokens given up by preemptions."),
    ("num_readmission_hit_tokens", "octavo_preempted_tokens_restored", "Of these, found in the prefix cache again."),
    ("num_steps", "octavo_engine_steps", "Engine steps."),
    ("num_prompt_tokens", "octavo_prompt_tokens_computed", "Prompt tokens computed by the engine."),
    ("num_hit_tokens", "octavo_prefix_cache_hits", "Tokens found in the prefix cache at first admission."),
    ("num_sibling_hit_tokens", "octavo_prompt_tokens_shared", "Prompt tokens that samples took from a sibling."),
    ("num_query_tokens", "octavo_prefix_cache_queries", "Tokens looked up in the prefix cache at first admission."),
)
_OBSERVED_COUNTERS = (
    ("wait_seconds", "reason", "octavo_wait_seconds", "Time that sequences waited, by what they waited for."),
    (
        "misses",
        "reason",
        "octavo_prefix_cache_admissions",
        "First admissions, by why the prefix hit ended (none: full).",
    ),
)
_OBSERVED_HISTOGRAMS = (
    ("queue", "octavo_request_queue_time_seconds", "From the arrival of a sequence to its first admission."),
    ("prefill", "octavo_request_prefill_time_seconds", "Steps that computed the prompt, until the first token."),
)
_STEP_HISTOGRAMS = (
    ("seconds", "octavo_step_time_seconds", "How long a step took in the backend."),
    ("sequences", "octavo_step_sequences", "Sequences in a step: the batch size."),
    ("tokens", "octavo_step_tokens", "Tokens computed in a step."),
)


def _histogram(name: str, text: str, model_name: str, values: dict[str, Any]) -> Metric:
    """Of counts between bounds, as octavo.server.step_metrics.Counts and octavo.explain have them."""
    bounds = [*map(str, values["bounds"]), "+Inf"]
    metric = HistogramMetricFamily(name, text, labels=("model_name",))
    buckets = list(zip(bounds, accumulate(values["counts"]), strict=True))
    metric.add_metric([model_name], buckets, values["total"])
    return metric


class _KeyCollector:
    """What each API key has used; its sums outlive the server."""

    def __init__(self, model_name: str, accounts: Accounts) -> None:
        self._model_name = model_name
        self._accounts = accounts

    def collect(self) -> Iterable[Metric]:
        requests = CounterMetricFamily("octavo_key_requests", "Requests, by key.", labels=("key", "model_name"))
        tokens = CounterMetricFamily("octavo_key_tokens", "Tokens, by key.", labels=("key", "kind", "model_name"))
        for name, usage in self._accounts.all():
            requests.add_metric([name, self._model_name], usage.num_requests)
            tokens.add_metric([name, "prompt", self._model_name], usage.num_prompt_tokens)
            tokens.add_metric([name, "generation", self._model_name], usage.num_generated_tokens)
        yield from (requests, tokens)


class _EngineCollector:
    """Turns the latest EngineStats into metrics whenever Prometheus asks."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self.stats: dict[str, Any] = {}
        self.num_restarts = 0
        self.num_in_flight = 0

    def collect(self) -> Iterable[Metric]:
        stats, labels = self.stats, ("model_name",)
        restarts = CounterMetricFamily("octavo_engine_restarts", "Engine processes started anew.", labels=labels)
        restarts.add_metric([self._model_name], self.num_restarts)
        yield restarts
        in_flight = GaugeMetricFamily(
            "octavo_http_requests_in_flight", "Generation requests that are being answered.", labels=labels
        )
        in_flight.add_metric([self._model_name], self.num_in_flight)
        yield in_flight
        for key, name, text in _GAUGES:
            if key in stats:
                gauge = GaugeMetricFamily(name, text, labels=labels)
                gauge.add_metric([self._model_name], stats[key])
                yield gauge
        if stats.get("num_blocks"):
            usage = GaugeMetricFamily("octavo_kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", labels=labels)
            usage.add_metric([self._model_name], 1 - stats["num_free_blocks"] / stats["num_blocks"])
            yield usage
        for key, name, text in _COUNTERS:
            if key in stats:
                counter = CounterMetricFamily(name, text, labels=labels)
                counter.add_metric([self._model_name], stats[key])
                yield counter
        if stats.get("step"):
            for key, name, text in _STEP_HISTOGRAMS:
                yield _histogram(name, text, self._model_name, stats["step"][key])
        if stats.get("observed"):
            yield from self._observed(stats["observed"])

    def _observed(self, totals: dict[str, Any]) -> Iterable[Metric]:
        """What octavo.explain.Recorder adds up from the events that explanations are made of."""
        for key, label, name, text in _OBSERVED_COUNTERS:
            counter = CounterMetricFamily(name, text, labels=(label, "model_name"))
            for reason, value in totals[key].items():
                counter.add_metric([reason, self._model_name], value)
            yield counter
        for key, name, text in _OBSERVED_HISTOGRAMS:
            yield _histogram(name, text, self._model_name, {"bounds": totals["bounds"], **totals[key]})
