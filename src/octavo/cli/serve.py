"""`octavo serve MODEL`: an OpenAI-compatible server."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from octavo import logs
from octavo.cli.options import DEFAULT_MODEL, GroupedCommand, engine_options, option, take_engine_options
from octavo.collector import collector_paused, resume_collector
from octavo.config import EngineOptions, read_environment
from octavo.units import parse_bytes

if TYPE_CHECKING:
    from octavo.server.serve import ReadyInfo

SERVER = "Server"


@click.command(cls=GroupedCommand)
@click.argument("model", default=DEFAULT_MODEL)
@option("--host", default="127.0.0.1", group=SERVER, help="Address to listen on.")
@option("--port", type=click.IntRange(0, 65535), default=8000, group=SERVER, help="Port; 0 takes a free one.")
@option("--api-key", metavar="KEY", group=SERVER, help="Demand this bearer key. Default: OCTAVO_API_KEY, else none.")
@option(
    "--api-key-file", metavar="FILE", group=SERVER, help="TOML with names, keys and limits; see docs/operations.md."
)
@option("--usage-db", metavar="FILE", group=SERVER, help="SQLite file of usage by key. Default: KEYFILE.usage.db.")
@option(
    "--cors-origin",
    "cors_origins",
    multiple=True,
    metavar="ORIGIN",
    group=SERVER,
    help="Let browser pages of this origin call; * for all; repeatable. Default: none.",
)
@option("--ssl-certfile", metavar="FILE", group=SERVER, help="Serve HTTPS with this certificate (PEM).")
@option("--ssl-keyfile", metavar="FILE", group=SERVER, help="Its private key, if not in the same file.")
@option(
    "--request-timeout",
    type=click.FloatRange(0.001, 86400),
    metavar="SECONDS",
    group=SERVER,
    help="Give an answer up after that time. Clients may ask for less with X-Request-Timeout.",
)
@option(
    "--write-timeout",
    type=click.FloatRange(0.1, 86400),
    default=60.0,
    metavar="SECONDS",
    group=SERVER,
    help="Close connections of clients that read nothing for that time.",
)
@option(
    "--metrics-alias",
    type=click.Choice(["vllm"]),
    group=SERVER,
    help="Show metrics also under the names of this server, for its dashboards.",
)
@option("--served-model-name", metavar="NAME", group=SERVER, help="Name in the API. Default: MODEL as given.")
@option("--ignore-unknown-fields", is_flag=True, group=SERVER, help="Ignore unknown request fields instead of 400.")
@option(
    "--tool-call-parser",
    type=click.Choice(["auto", "hermes", "llama3_json", "mistral", "json"]),
    default="auto",
    group=SERVER,
    help="How the model writes tool calls; auto: as its chat template does.",
)
@option(
    "--reasoning-parser",
    type=click.Choice(["auto", "none", "think", "deepseek_r1", "qwen3"]),
    default="auto",
    group=SERVER,
    help="Split <think>…</think> off as reasoning_content; auto: if the chat template knows it.",
)
@option("--trust-special-tokens", is_flag=True, group=SERVER, help="Let users' text contain special tokens.")
@option("--max-body-size", metavar="SIZE", default="32MiB", group=SERVER, help="Larger requests: 413.")
@option(
    "--shutdown-timeout",
    type=click.FloatRange(0, 3600),
    default=5.0,
    metavar="SECONDS",
    group=SERVER,
    help="How long answers may go on after SIGTERM or Ctrl-C.",
)
@option(
    "--sse-keep-alive",
    type=click.FloatRange(0.1, 3600),
    metavar="SECONDS",
    group=SERVER,
    help="Send a comment on silent streams, for impatient proxies.",
)
@option(
    "--isolate-tenants/--no-isolate-tenants",
    default=True,
    group=SERVER,
    help="With API keys: share cached prefixes only between requests of the same tenant.",
)
@option(
    "--state-dir",
    metavar="DIR",
    group=SERVER,
    help="Where the secret of the cache salts is kept. Default: OCTAVO_STATE, else ~/.local/state/octavo.",
)
@option(
    "--log-format",
    type=click.Choice(logs.FORMATS),
    default="text",
    group=SERVER,
    help="Of log lines on stderr; json: one object a line, with request ids.",
)
@option(
    "--otlp-traces-endpoint",
    metavar="URL",
    group=SERVER,
    help="Send a span per request to this OpenTelemetry collector; needs the extra [otel].",
)
@option("--log-requests", is_flag=True, group=SERVER, help="One line per request on stderr: waits, hits, TTFT, its id.")
@option(
    "--explain/--no-explain",
    default=True,
    group=SERVER,
    help='Let clients ask why a request was slow ("explain": true, GET /v1/requests/ID).',
)
@option(
    "--pooling",
    type=click.Choice(["last", "mean"]),
    default="last",
    group=SERVER,
    help="What /v1/embeddings makes of the tokens' final hidden states, unless a request says.",
)
@option(
    "--max-engine-restarts",
    type=click.IntRange(0, 10_000),
    default=16,
    metavar="N",
    group=SERVER,
    help="How often in a row a dead engine process is replaced; unfinished answers go on.",
)
@option(
    "--engine-timeout",
    type=click.FloatRange(1, 86400),
    default=300.0,
    metavar="SECONDS",
    group=SERVER,
    help="An engine whose step takes longer hangs, and is replaced.",
)
@engine_options
def serve(model: str, **values: Any) -> int:
    """Serve MODEL over HTTP: /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages (Anthropic's),
    /v1/embeddings, /tokenize; /docs describes them all.

    \b
      octavo serve                                   the default model, smollm2-135m
      octavo serve ./model.gguf --max-model-len 4096 --kv-cache-memory 2GiB
    """
    options = take_engine_options(values)
    logs.use(values["log_format"], "server")
    if values.pop("log_requests"):
        logging.getLogger("octavo.requests").setLevel(logging.INFO)
    logging.getLogger("octavo.keys").setLevel(logging.INFO)  # whoever sends SIGHUP wants to hear of it
    environment = read_environment()
    values["max_body_bytes"] = parse_bytes(values.pop("max_body_size"), "max_body_size")
    values["api_key"] = values["api_key"] or environment.api_key

    with collector_paused():
        return _run(model, options, values)


def _run(model: str, options: EngineOptions, values: dict[str, Any]) -> int:
    from octavo.progress import StageProgress
    from octavo.server.serve import ServeOptions, run_server
    from octavo.server.supervisor import SupervisorOptions

    values["supervision"] = SupervisorOptions(
        max_restarts=values.pop("max_engine_restarts"),
        step_timeout=values.pop("engine_timeout"),
        max_held=options.max_num_waiting,
    )
    with StageProgress() as progress:

        def show_ready(info: ReadyInfo) -> None:
            progress.close()
            _announce(info)
            resume_collector()

        serve_options = ServeOptions(**values)
        return run_server(
            model=model,
            engine=options,
            serve=serve_options,
            on_ready=show_ready,
            progress=progress,
            begun=time.monotonic() - _age(),
        )


def _age() -> float:
    """Seconds since this process was started: who waits for the server has waited for its imports, too."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])  # since boot
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, AttributeError, ValueError, IndexError):  # not on Linux
        return 0.0


def _announce(info: ReadyInfo) -> None:
    """What the memory holds, then the one line that says where to ask."""
    for line in info.report:
        click.echo(line)
    host = info.host if info.host not in ("0.0.0.0", "::") else "127.0.0.1"
    # "What is the capital of France?" hangs on 0.1 nats between two first words of the default model: 8-bit products
    # have it answered in French, and without an end. This one is won by 0.6.
    question = '[{"role":"user","content":"Tell me the capital of France."}]'
    body = f'{{"model":"{info.model_name}","temperature":0,"messages":{question}}}'
    click.echo(
        f"Ready in {info.seconds:.1f} s. Try: curl http://{host}:{info.port}/v1/chat/completions "
        f"-H 'Content-Type: application/json' -d '{body}'"
    )
