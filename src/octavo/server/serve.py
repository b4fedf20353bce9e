"""`octavo serve`: bind the port, start the engine process, serve, and stop cleanly."""

from __future__ import annotations

import contextlib
import logging
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from octavo.config import EngineOptions, read_environment
from octavo.errors import ConfigError, RequestError, UnsupportedError
from octavo.interrupt import Interrupt, catch_interrupt
from octavo.request import SamplingParams
from octavo.server.keys import load_keys
from octavo.server.ledger import Ledger
from octavo.server.listen import VANISHED_AFTER, bind_socket, check_certificate, check_origins
from octavo.server.process import DEFAULT_ASSEMBLE, StageProgress
from octavo.server.quotas import Accounts
from octavo.server.schema import PRESET_FIELDS
from octavo.server.supervisor import SupervisedEngineClient, SupervisorOptions
from octavo.server.tenants import DEFAULT_STATE_DIR, load_secret
from octavo.server.tracing import Tracer
from octavo.server.wire import Opened, Ready
from octavo.text.maker import tokenizer_maker

if TYPE_CHECKING:
    from octavo.server.app import ServerSettings
    from octavo.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """The flags of `octavo serve` that are not the engine's (docs/operations.md). Times in seconds.

    `assemble` is "module:function" to build the engine with.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None
    api_key: str | None = field(default=None, repr=False)
    api_key_file: str | None = None
    usage_db: str | None = None
    cors_origins: tuple[str, ...] = ()
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    request_timeout: float | None = None
    write_timeout: float = 60.0
    metrics_alias: str | None = None
    log_format: str = "text"
    otlp_traces_endpoint: str | None = None
    max_body_bytes: int = 32 * 1024 * 1024
    ignore_unknown_fields: bool = False
    sse_keep_alive: float | None = None
    shutdown_timeout: float = 5.0
    trust_special_tokens: bool = False
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    explain: bool = True
    isolate_tenants: bool = True
    state_dir: str | None = None
    pooling: str = "last"
    supervision: SupervisorOptions = field(default_factory=SupervisorOptions)
    assemble: str = DEFAULT_ASSEMBLE


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyInfo:
    """What can be said once the server answers. `report` are the engine's start-up lines."""

    url: str
    host: str
    port: int
    model_name: str
    max_model_len: int
    report: list[str]
    seconds: float


def run_server(
    *,
    model: str,
    engine: EngineOptions,
    serve: ServeOptions,
    on_ready: Callable[[ReadyInfo], None] = lambda info: None,
    progress: StageProgress | None = None,
    begun: float | None = None,
) -> int:
    """Serve until SIGINT or SIGTERM; returns the exit code 0.

    `begun` is when the time until ready starts to count, on time.monotonic(); now, if it is not given.
    Prints nothing. Raises ConfigError (bad port, bad option), ModelError, and EngineError if the engine
    could not start or died more often than `serve.supervision` allows. Whatever happens, no process stays
    behind and the port is free.
    """
    begun = time.monotonic() if begun is None else begun
    check_origins(serve.cors_origins)
    check_certificate(serve.ssl_certfile, serve.ssl_keyfile)
    vanished_after = max(VANISHED_AFTER, serve.write_timeout)  # a slow reader has all its write timeout
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(bind_socket(serve.host, serve.port, vanished_after))
        tracer = None
        if serve.otlp_traces_endpoint:
            tracer = stack.enter_context(contextlib.closing(Tracer(serve.otlp_traces_endpoint)))
        hangup = _hangup(stack) if serve.api_key_file is not None else Interrupt()
        accounts = open_accounts(serve.api_key, serve.api_key_file, serve.usage_db)
        if accounts is not None:
            stack.callback(accounts.close)
        salt_secret = None
        if accounts is not None and serve.isolate_tenants:
            salt_secret = load_secret(serve.state_dir or read_environment().state or DEFAULT_STATE_DIR)
        client, ready, tokenizer = _start_engine(stack, model, engine, serve, progress)

        from octavo.server.app import create_app
        from octavo.server.http_server import OctavoServer

        settings = _settings(model, serve, ready, accounts, salt_secret, tracer)
        if tracer is not None:
            tracer.model_name = settings.model_name

        def started() -> None:
            on_ready(_ready_info(serve, listener.getsockname()[1], settings, ready, time.monotonic() - begun))

        server = OctavoServer(
            create_app(client, tokenizer, settings),
            shutdown_timeout=serve.shutdown_timeout,
            write_timeout=serve.write_timeout,
            ssl_certfile=serve.ssl_certfile,
            ssl_keyfile=serve.ssl_keyfile,
            on_started=started,
            hangup=hangup,
            read_keys=lambda: load_keys(serve.api_key, serve.api_key_file),
        )
        server.serve_on(listener)
    if server.failure is not None:
        raise server.failure
    return 0


def _hangup(stack: contextlib.ExitStack) -> Interrupt:
    """Set by SIGHUP (where there is one), already while the model loads."""
    if not hasattr(signal, "SIGHUP"):
        return Interrupt()
    return stack.enter_context(catch_interrupt(signal.SIGHUP))


def _start_engine(
    stack: contextlib.ExitStack, model: str, engine: EngineOptions, serve: ServeOptions, progress: StageProgress | None
) -> tuple[SupervisedEngineClient, Ready, Tokenizer]:
    """Blocks until the model is loaded. The process ends with `stack`."""
    with _exit_on_sigterm():
        client = SupervisedEngineClient(
            model, engine, assemble=serve.assemble, supervision=serve.supervision, log_format=serve.log_format
        )
        stack.callback(client.kill)
        # Half a second of imports, on another core while the engine process loads the model.
        for module in ("octavo.server.app", "octavo.server.http_server", "octavo.text.tokenizer"):
            import_module(module)
        # Nor need the weights be ready for the tokenizer.
        tokenizer = _tokenizer(client.wait_opened(progress), engine)
        return client, client.wait_ready(progress), tokenizer


def _settings(
    model: str,
    serve: ServeOptions,
    ready: Ready,
    accounts: Accounts | None,
    salt_secret: bytes | None,
    tracer: Tracer | None,
) -> ServerSettings:
    from octavo.server.app import ServerSettings

    return ServerSettings(
        model_name=serve.served_model_name or default_model_name(model, ready.model_name),
        model_root=model,
        max_model_len=ready.max_model_len,
        vocab_size=ready.vocab_size,
        accounts=accounts,
        cors_origins=serve.cors_origins,
        request_timeout=serve.request_timeout,
        metrics_alias=serve.metrics_alias,
        tracer=tracer,
        max_body_bytes=serve.max_body_bytes,
        ignore_unknown_fields=serve.ignore_unknown_fields,
        sse_keep_alive=serve.sse_keep_alive,
        chat_template=ready.chat_template,
        trust_special_tokens=serve.trust_special_tokens,
        tool_call_parser=serve.tool_call_parser,
        reasoning_parser=serve.reasoning_parser,
        explain=serve.explain,
        salt_secret=salt_secret,
        pooling=serve.pooling,
        presets=sampling_presets(ready.generation_config),
    )


def _ready_info(serve: ServeOptions, port: int, settings: ServerSettings, ready: Ready, seconds: float) -> ReadyInfo:
    host = f"[{serve.host}]" if ":" in serve.host else serve.host
    return ReadyInfo(
        url=f"{'https' if serve.ssl_certfile else 'http'}://{host}:{port}",
        host=serve.host,
        port=port,
        model_name=settings.model_name,
        max_model_len=ready.max_model_len,
        report=ready.report,
        seconds=seconds,
    )


def open_accounts(api_key: str | None, api_key_file: str | None, usage_db: str | None) -> Accounts | None:
    """None without keys. Usage is kept beside the key file unless `usage_db` says where. Raises ConfigError."""
    ring = load_keys(api_key, api_key_file)
    if ring is None:
        if usage_db is not None:
            raise ConfigError("usage_db needs keys: give --api-key-file or --api-key")
        return None
    if usage_db is None and api_key_file is not None:
        usage_db = f"{Path(api_key_file).expanduser()}.usage.db"
    return Accounts(ring, Ledger(usage_db))


def default_model_name(model: str, loaded_name: str) -> str:
    """The name clients use unless --served-model-name says otherwise: as given, but no local paths."""
    return loaded_name if Path(model).expanduser().exists() else model


def sampling_presets(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """The usable sampling values of a generation_config; an odd one is left out with a warning."""
    presets: dict[str, Any] = {}
    for name in PRESET_FIELDS:
        value = generation_config.get(name)
        if value is None:
            continue
        try:
            SamplingParams(**{name: value})
        except RequestError as e:
            logger.warning("generation_config is partly ignored: %s", e)
        else:
            presets[name] = value
    return presets


def _tokenizer(opened: Opened, options: EngineOptions) -> Tokenizer:
    make = tokenizer_maker(pickle.loads(opened.tokenizer_source), options)
    if make is None:
        raise UnsupportedError("the model comes without a tokenizer; give one with --tokenizer")
    return make()


@contextlib.contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """While the model loads, SIGTERM unwinds the stack like Ctrl-C does, so that the engine process is ended."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
