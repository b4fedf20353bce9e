"""What all requests to one server share: its settings, its engine, its tokenizer, its counters."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from octavo.errors import EngineError
from octavo.server.client import EngineClient
from octavo.server.explained import RequestBook
from octavo.server.keys import load_keys
from octavo.server.ledger import Ledger
from octavo.server.metrics import ServerMetrics
from octavo.server.metrics_alias import ALIASES
from octavo.server.quotas import Accounts
from octavo.server.tenants import TenantSalts
from octavo.server.tracing import Tracer
from octavo.text.constraints import ConstraintCompiler
from octavo.text.tokenizer import Tokenizer

T = TypeVar("T")

# Below this size, work on a body takes less time than handing it to a thread is worth.
INLINE_BYTES = 8 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """What the application needs to know besides the engine. Sizes in bytes, times in seconds."""

    model_name: str
    max_model_len: int
    vocab_size: int
    model_root: str | None = None
    api_key: str | None = field(default=None, repr=False)  # a single key without limits, instead of accounts
    accounts: Accounts | None = None
    salt_secret: bytes | None = field(default=None, repr=False)  # with keys: tenants share no cached prefixes
    cors_origins: tuple[str, ...] = ()
    request_timeout: float | None = None
    tracer: Tracer | None = None
    metrics_alias: str | None = None  # one of metrics_alias.ALIASES
    max_body_bytes: int = 32 * 1024 * 1024
    ignore_unknown_fields: bool = False
    sse_keep_alive: float | None = None
    chat_template: str | None = None
    trust_special_tokens: bool = False
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    explain: bool = True
    pooling: str = "last"  # of embeddings, unless a request says otherwise
    # Sampling values of the model's generation_config.
    presets: Mapping[str, Any] = field(default_factory=dict)


class ServerState:
    """What all requests share. `draining`: no new generations; `num_in_flight`: those being answered."""

    def __init__(self, client: EngineClient, tokenizer: Tokenizer, settings: ServerSettings) -> None:
        self.client = client
        self.tokenizer = tokenizer
        self.settings = settings
        self.accounts = settings.accounts
        self.salts = TenantSalts(settings.salt_secret)
        if self.accounts is None and (ring := load_keys(settings.api_key, None)) is not None:
            self.accounts = Accounts(ring, Ledger(None))
        # To refuse what cannot be compiled before the engine, which has its own, sees it.
        self.grammars = ConstraintCompiler(lambda: tokenizer, settings.vocab_size)
        aliases = ALIASES[settings.metrics_alias] if settings.metrics_alias else None
        self.metrics = ServerMetrics(settings.model_name, accounts=self.accounts, aliases=aliases)
        self.book = RequestBook(client)
        if settings.tracer is not None:
            self.book.on_end = settings.tracer.record
        self.created = int(time.time())
        self.draining = False
        self.num_in_flight = 0
        self._workers = ThreadPoolExecutor(2, thread_name_prefix="octavo-text")

    def enter(self) -> None:
        self.num_in_flight += 1

    def leave(self) -> None:
        self.num_in_flight -= 1

    def check_open(self) -> None:
        if self.draining:
            raise EngineError("the server is shutting down")
        if not self.client.healthy:
            raise EngineError("the engine is not running")

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """Run `work` here if the body is small (`size` in bytes), else in a worker thread."""
        if size <= INLINE_BYTES:
            return work()
        return await self.in_worker(work)

    async def in_worker(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._workers, work)

    def close(self) -> None:
        self._workers.shutdown(wait=False, cancel_futures=True)
