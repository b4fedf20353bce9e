"""Shows metrics under the names that another server gives them, so that its dashboards work."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

# Families of vLLM (version 1 of its engine; where it renamed one, the older name too), by ours.
VLLM = {
    "octavo_num_requests_running": ("vllm:num_requests_running",),
    "octavo_num_requests_waiting": ("vllm:num_requests_waiting",),
    "octavo_kv_cache_usage_perc": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    "octavo_num_preemptions": ("vllm:num_preemptions",),
    "octavo_prefix_cache_queries": ("vllm:prefix_cache_queries", "vllm:gpu_prefix_cache_queries"),
    "octavo_prefix_cache_hits": ("vllm:prefix_cache_hits", "vllm:gpu_prefix_cache_hits"),
    "octavo_prompt_tokens": ("vllm:prompt_tokens",),
    "octavo_generation_tokens": ("vllm:generation_tokens",),
    "octavo_request_success": ("vllm:request_success",),
    "octavo_time_to_first_token_seconds": ("vllm:time_to_first_token_seconds",),
    "octavo_inter_token_latency_seconds": (
        "vllm:inter_token_latency_seconds",
        "vllm:time_per_output_token_seconds",
    ),
    "octavo_request_time_per_output_token_seconds": ("vllm:request_time_per_output_token_seconds",),
    "octavo_e2e_request_latency_seconds": ("vllm:e2e_request_latency_seconds",),
    "octavo_request_queue_time_seconds": ("vllm:request_queue_time_seconds",),
    "octavo_request_prefill_time_seconds": ("vllm:request_prefill_time_seconds",),
    "octavo_request_decode_time_seconds": ("vllm:request_decode_time_seconds",),
    "octavo_request_prompt_tokens": ("vllm:request_prompt_tokens",),
    "octavo_request_generation_tokens": ("vllm:request_generation_tokens",),
    "octavo_request_max_num_generation_tokens": ("vllm:request_max_num_generation_tokens",),
    "octavo_step_tokens": ("vllm:iteration_tokens_total",),
}

ALIASES: dict[str, dict[str, tuple[str, ...]]] = {"vllm": VLLM}


class Aliased:
    """A registry whose families appear a second time under other names."""

    def __init__(self, registry: CollectorRegistry, aliases: Mapping[str, tuple[str, ...]]) -> None:
        self._registry = registry
        self._aliases = aliases

    def collect(self) -> Iterable[Metric]:
        for family in self._registry.collect():
            yield family
            for name in self._aliases.get(family.name, ()):
                yield _renamed(family, name)


def _renamed(family: Metric, name: str) -> Metric:
    """With the label that tells vLLM's engines apart, of which there is one here."""
    made = Metric(name, family.documentation, family.type)
    for sample in family.samples:
        suffix = sample.name.removeprefix(family.name)
        made.add_sample(name + suffix, {**sample.labels, "engine": "0"}, sample.value)
    return made
