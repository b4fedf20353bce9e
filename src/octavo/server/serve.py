"""`octavo serve`: bind the port, start the engine process, serve, and stop cleanly."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
import re
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette

from octavo.config import EngineOptions, read_environment
from octavo.errors import ConfigError, EngineError, RequestError, UnsupportedError
from octavo.request import SamplingParams
from octavo.server.app import ServerSettings, ServerState, create_app
from octavo.server.keys import load_keys
from octavo.server.ledger import Ledger
from octavo.server.process import DEFAULT_ASSEMBLE, StageProgress
from octavo.server.protocol import OctavoProtocol
from octavo.server.quotas import Accounts
from octavo.server.schema import PRESET_FIELDS
from octavo.server.supervisor import SupervisedEngineClient, SupervisorOptions
from octavo.server.tenants import DEFAULT_STATE_DIR, load_secret
from octavo.server.tracing import Tracer
from octavo.server.wire import Ready
from octavo.text.tokenizer import Tokenizer
from octavo.units import shorten

logger = logging.getLogger(__name__)


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
    options: EngineOptions,
    served_model_name: str | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    api_key: str | None = None,
    api_key_file: str | None = None,
    usage_db: str | None = None,
    cors_origins: Sequence[str] = (),
    ssl_certfile: str | None = None,
    ssl_keyfile: str | None = None,
    request_timeout: float | None = None,
    write_timeout: float = 60.0,
    metrics_alias: str | None = None,
    log_format: str = "text",
    otlp_traces_endpoint: str | None = None,
    max_body_bytes: int = 32 * 1024 * 1024,
    ignore_unknown_fields: bool = False,
    sse_keep_alive: float | None = None,
    shutdown_timeout: float = 5.0,
    trust_special_tokens: bool = False,
    tool_call_parser: str = "auto",
    reasoning_parser: str = "auto",
    explain: bool = True,
    isolate_tenants: bool = True,
    state_dir: str | None = None,
    pooling: str = "last",
    supervision: SupervisorOptions | None = None,
    on_ready: Callable[[ReadyInfo], None] = lambda info: None,
    progress: StageProgress | None = None,
    assemble: str = DEFAULT_ASSEMBLE,
) -> int:
    """Serve until SIGINT or SIGTERM; returns the exit code 0.

    Prints nothing. Raises ConfigError (bad port, bad option), ModelError, and EngineError if the engine
    could not start or died more often than `supervision` allows. Whatever happens, no process stays
    behind and the port is free.
    """
    begun = time.monotonic()
    check_origins(cors_origins)
    check_certificate(ssl_certfile, ssl_keyfile)
    listener = bind_socket(host, port)
    client: SupervisedEngineClient | None = None
    accounts: Accounts | None = None
    salt_secret: bytes | None = None
    tracer: Tracer | None = None
    try:
        tracer = Tracer(otlp_traces_endpoint) if otlp_traces_endpoint else None
        accounts = open_accounts(api_key, api_key_file, usage_db)
        if accounts is not None and isolate_tenants:
            salt_secret = load_secret(state_dir or read_environment().state or DEFAULT_STATE_DIR)
        with _exit_on_sigterm():
            client = SupervisedEngineClient(
                model, options, assemble=assemble, supervision=supervision, log_format=log_format
            )
            ready = client.wait_ready(progress)
            tokenizer = _tokenizer(ready, options)
        settings = ServerSettings(
            model_name=served_model_name or default_model_name(model, ready.model_name),
            model_root=model,
            max_model_len=ready.max_model_len,
            vocab_size=ready.vocab_size,
            accounts=accounts,
            cors_origins=tuple(cors_origins),
            request_timeout=request_timeout,
            metrics_alias=metrics_alias,
            tracer=tracer,
            max_body_bytes=max_body_bytes,
            ignore_unknown_fields=ignore_unknown_fields,
            sse_keep_alive=sse_keep_alive,
            chat_template=ready.chat_template,
            trust_special_tokens=trust_special_tokens,
            tool_call_parser=tool_call_parser,
            reasoning_parser=reasoning_parser,
            explain=explain,
            salt_secret=salt_secret,
            pooling=pooling,
            presets=sampling_presets(ready.generation_config),
        )
        if tracer is not None:
            tracer.model_name = settings.model_name
        app = create_app(client, tokenizer, settings)
        bound_port = listener.getsockname()[1]
        info = ReadyInfo(
            url=f"{'https' if ssl_certfile else 'http'}://{f'[{host}]' if ':' in host else host}:{bound_port}",
            host=host,
            port=bound_port,
            model_name=settings.model_name,
            max_model_len=ready.max_model_len,
            report=ready.report,
            seconds=time.monotonic() - begun,
        )
        server = OctavoServer(
            app,
            shutdown_timeout=shutdown_timeout,
            write_timeout=write_timeout,
            ssl_certfile=ssl_certfile,
            ssl_keyfile=ssl_keyfile,
            on_started=lambda: on_ready(info),
        )
        server.serve_on(listener)
    finally:
        listener.close()
        if client is not None:
            client.kill()
        if accounts is not None:
            accounts.close()
        if tracer is not None:
            tracer.close()
    if server.failure is not None:
        raise server.failure
    return 0


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


def check_origins(origins: Sequence[str]) -> None:
    """Raises ConfigError unless each is "*" or what a browser sends as Origin."""
    for origin in origins:
        if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s*?#@]{1,255}", origin):
            raise ConfigError(f"cors_origin: {shorten(origin)} is not an origin such as https://example.org, nor *")


def check_certificate(certfile: str | None, keyfile: str | None) -> None:
    """Raises ConfigError, before any model is loaded, if TLS cannot work with these files (PEM)."""
    if certfile is None:
        if keyfile is not None:
            raise ConfigError("ssl_keyfile needs ssl_certfile")
        return

    def refuse_password() -> str:
        raise ConfigError("ssl_keyfile: the private key has a password; give one without")

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile, refuse_password)
    except ssl.SSLError as e:
        raise ConfigError(f"ssl_certfile: no certificate and private key that match: {e.reason or e}") from None
    except OSError as e:
        raise ConfigError(f"ssl_certfile or ssl_keyfile cannot be read: {e.strerror}") from None


def bind_socket(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet. Raises ConfigError, before any model is loaded."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        made = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError, OverflowError) as e:
        raise ConfigError(f"host: cannot resolve {host[:100]!r}: {getattr(e, 'strerror', None) or e}") from None
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # inherited: peers that vanish are noticed
        if hasattr(socket, "TCP_KEEPIDLE"):
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
        made.bind(address)
    except (OSError, OverflowError) as e:
        made.close()
        raise _cannot_listen(host, port, e) from None
    return made


def _cannot_listen(host: str, port: int, error: Exception) -> ConfigError:
    return ConfigError(f"port: cannot listen on {host[:100]}:{port}: {getattr(error, 'strerror', None) or error}")


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


def _tokenizer(ready: Ready, options: EngineOptions) -> Tokenizer:
    from octavo.assemble import load_tokenizer

    @dataclass
    class Source:
        tokenizer_source: Any

    source: Any = Source(pickle.loads(ready.tokenizer_source))
    tokenizer = load_tokenizer(source, options)
    if tokenizer is None:
        raise UnsupportedError("the model comes without a tokenizer; give one with --tokenizer")
    return tokenizer


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


class OctavoServer(uvicorn.Server):
    """uvicorn with our way to stop.

    First signal: new requests get 503, those in flight may end within `shutdown_timeout` seconds, the
    rest get a terminal error. Second signal: at once. If the engine is gone for good, the server stops
    with `failure` set.
    """

    def __init__(
        self,
        app: Starlette,
        *,
        shutdown_timeout: float = 5.0,
        write_timeout: float = 60.0,
        ssl_certfile: str | None = None,
        ssl_keyfile: str | None = None,
        on_started: Callable[[], None] = lambda: None,
    ) -> None:
        config = uvicorn.Config(
            app,
            log_config=None,
            log_level="error",
            access_log=False,
            server_header=False,
            ws="none",
            lifespan="on",
            timeout_graceful_shutdown=2,  # for clients that do not read their last frames
            proxy_headers=False,
            http=type("Protocol", (OctavoProtocol,), {"write_timeout": write_timeout}),
            timeout_keep_alive=60,  # longer than clients keep idle connections, so that they close first
            ssl_certfile=ssl_certfile,
            ssl_keyfile=ssl_keyfile,
        )
        super().__init__(config)
        self._state: ServerState = app.state.server
        self._shutdown_timeout = shutdown_timeout
        self._on_started = on_started
        self._num_signals = 0
        self._deadline: float | None = None
        self.failure: EngineError | None = None

    def serve_on(self, listener: socket.socket) -> None:
        """Blocks until the server has stopped. Raises ConfigError if the port was taken in the meantime."""
        self.run(sockets=[listener])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except OSError as e:
            host, port = (sockets or [])[0].getsockname()[:2]
            await self.lifespan.shutdown()
            raise _cannot_listen(host, port, e) from None
        self._on_started()

    def stop(self) -> None:
        """What a signal does; may be called from any thread."""
        self._num_signals += 1

    async def on_tick(self, counter: int) -> bool:
        """Every 0.1 s: is it time to leave the main loop?"""
        client = self._state.client
        if not client.healthy:
            self.failure = EngineError(str(client.failure))
            return True
        if self._num_signals and self._deadline is None:
            self._state.draining = True
            self._deadline = time.monotonic() + self._shutdown_timeout
        if self._num_signals > 1:
            self.force_exit = True
            return True
        if self._deadline is not None and self._state.num_in_flight == 0:
            return True
        if self._deadline is not None and time.monotonic() >= self._deadline:
            client.fail_all(EngineError("the server is shutting down"))
            return True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # cancelled tasks are meant to be
        await asyncio.sleep(0)
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, but a handled signal is not raised again afterwards."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.stop()
