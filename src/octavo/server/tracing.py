"""OpenTelemetry spans of requests: one for each, with its queue, prefill and decode below it.

Needs the extra [otel]. Names of attributes are those of the semantic conventions for generative AI.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

import octavo
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

    from octavo.server.explained import Entry

CLOSE_SECONDS = 2.0

_NANO = 1_000_000_000


class Tracer:
    """Hands spans to an exporter in the background."""

    def __init__(self, endpoint: str, model_name: str = "", *, exporter: SpanExporter | None = None) -> None:
        """`endpoint` is the URL of an OTLP collector (HTTP, protobuf), `exporter` for tests. Raises ConfigError."""
        if exporter is None and not endpoint.startswith(("http://", "https://")):
            raise ConfigError("otlp_traces_endpoint must be a URL such as http://localhost:4318/v1/traces")
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor

            if exporter is None:
                from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

                processor: Any = BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint))
            else:
                processor = SimpleSpanProcessor(exporter)
        except ImportError:
            raise ConfigError("otlp_traces_endpoint needs the extra: pip install 'octavo[otel]'") from None
        resource = Resource.create({"service.name": "octavo", "service.version": octavo.__version__})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("octavo", octavo.__version__)
        self.model_name = model_name

    def record(self, told: dict[str, Any], entry: Entry) -> None:
        """A request has ended; `told` is what GET /v1/requests/ID tells of it."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        parent = TraceContextTextMapPropagator().extract({"traceparent": entry.traceparent})
        begun = entry.began_ns
        span = self._tracer.start_span(
            f"POST {told['route']}",
            context=parent,
            kind=SpanKind.SERVER,
            start_time=begun,
            attributes=self._attributes(told),
        )
        if told["status"] == "failed":
            span.set_status(Status(StatusCode.ERROR))
        below = set_span_in_context(span)
        for number, prompt in enumerate(told["prompts"]):
            for name, start, end in _phases(prompt, told["seconds"]):
                child = self._tracer.start_span(
                    name, context=below, start_time=begun + int(start * _NANO), attributes={"octavo.prompt": number}
                )
                child.end(begun + int(end * _NANO))
        span.end(begun + int(told["seconds"] * _NANO))

    def _attributes(self, told: dict[str, Any]) -> dict[str, Any]:
        attributes: dict[str, Any] = {
            "gen_ai.system": "octavo",
            "gen_ai.operation.name": "chat" if "chat" in told["route"] or "messages" in told["route"] else "generate",
            "gen_ai.request.model": self.model_name,
            "gen_ai.response.model": self.model_name,
            "gen_ai.response.id": told["id"],
            "gen_ai.response.finish_reasons": [reason or "none" for reason in told["finish_reasons"]],
            "gen_ai.usage.input_tokens": told["num_prompt_tokens"],
            "gen_ai.usage.output_tokens": told["num_generated_tokens"],
            "octavo.status": told["status"],
        }
        first = told["prompts"][0]["ttft"] if told["prompts"] else None
        if first is not None:
            attributes["octavo.time_to_first_token_seconds"] = first["total_seconds"]
        return attributes

    def close(self) -> None:
        """Sends what is left; a collector that does not answer holds nobody up for longer than CLOSE_SECONDS."""

        def work() -> None:
            with contextlib.suppress(Exception):
                self._provider.shutdown()

        thread = threading.Thread(target=work, name="octavo-traces", daemon=True)
        thread.start()
        thread.join(CLOSE_SECONDS)


def _phases(prompt: dict[str, Any], total: float) -> list[tuple[str, float, float]]:
    """Name, start and end in seconds from arrival. The part of TTFT outside the engine is put before the queue."""
    ttft = prompt["ttft"]
    if ttft is None:
        return []
    queue = ttft["rest_seconds"]
    prefill = queue + ttft["queue_seconds"]
    decode = prefill + ttft["prefill_seconds"]
    return [("queue", queue, prefill), ("prefill", prefill, decode), ("decode", decode, max(decode, total))]
