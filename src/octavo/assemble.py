"""Puts an engine together from a model name and options: fetch, load, backend, KV pool, tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.config import (
    EngineConfig,
    EngineOptions,
    Resolved,
    Setting,
    describe,
    dummy_weight_format,
    fit_model_len,
    pool_blocks,
    read_environment,
    resolve,
)
from octavo.engine import Engine
from octavo.errors import ConfigError
from octavo.kv.sizing import format_bytes, startup_lines
from octavo.progress import Progress, by_fraction
from octavo.system import MemoryInfo, cpu_info, memory_info
from octavo.text.maker import tokenizer_maker
from octavo.units import shorten

if TYPE_CHECKING:
    from octavo.backends.base import Backend
    from octavo.models.loading import LoadedModel
    from octavo.text.constraints import ConstraintCompiler
    from octavo.text.tokenizer import Tokenizer

MAX_TEMPLATE_BYTES = 1 << 20


@dataclass(slots=True)
class Assembly:
    """An engine with all that surrounds it.

    `report` are the lines to show at start: what the memory holds, then warnings. `settings` is the
    resolved configuration. `chat_template` is the override given in the options, if any.
    """

    engine: Engine
    make_tokenizer: Callable[[], Tokenizer] | None
    model: LoadedModel
    config: EngineConfig
    backend: Backend
    report: list[str]
    settings: list[Setting] = field(default_factory=list)
    chat_template: str | None = None

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Made when it is first asked for, which takes some tenths of a second. Raises ModelError."""
        return None if self.make_tokenizer is None else self.make_tokenizer()

    def close(self) -> None:
        self.backend.close()


def assemble(
    model: str,
    options: EngineOptions,
    *,
    progress: Progress | None = None,
    opened: Callable[[LoadedModel], None] = lambda model: None,
) -> Assembly:
    """From a model name to a running engine. Raises ConfigError and ModelError.

    `opened` is called once the model's files are read, before the weights are made ready.
    """
    environment = read_environment()
    chat_template = read_chat_template(options.chat_template)
    loaded = load(model, options, progress=progress)
    resolved = resolve(options, loaded.spec, environment, cpu_info())
    make_tokenizer = tokenizer_maker(loaded.tokenizer_source, options)
    opened(loaded)
    backend = create_backend(loaded, options, resolved, progress=progress)
    return put_together(loaded, make_tokenizer, backend, options, resolved, memory_info(), chat_template=chat_template)


def load(model: str, options: EngineOptions, *, progress: Progress | None = None) -> LoadedModel:
    """Fetches the model if need be and maps its weights."""
    from octavo.models.loading import load_model
    from octavo.weights.hub import resolve_model

    files = resolve_model(model, load_format=options.load_format, progress=by_fraction(progress))
    return load_model(
        files,
        load_format=options.load_format,
        seed=options.seed or 0,
        dummy_format=dummy_weight_format(options),
        progress=by_fraction(progress),
    )


def create_backend(
    model: LoadedModel, options: EngineOptions, resolved: Resolved, *, progress: Progress | None = None
) -> Backend:
    """The one place that picks a backend, by name."""
    from octavo import backends

    return backends.create(
        resolved.backend,
        model,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_model_len=resolved.max_model_len,
        block_size=options.block_size,
        threads=resolved.threads,
        pins=resolved.pins,
        isa=resolved.isa,
        kv_cache_dtype=resolved.kv_cache_dtype,
        progress=_for_backend(progress),
    )


def put_together(
    model: LoadedModel,
    make_tokenizer: Callable[[], Tokenizer] | None,
    backend: Backend,
    options: EngineOptions,
    resolved: Resolved,
    memory: MemoryInfo,
    *,
    chat_template: str | None = None,
) -> Assembly:
    """Sizes the KV pool by the memory that is left once the weights are loaded, and builds the engine."""
    capabilities = backend.capabilities
    bytes_per_block = capabilities.kv_bytes_per_block
    num_blocks, pool_source = pool_blocks(
        options, resolved, available=memory.available, bytes_per_block=bytes_per_block, limit=memory.source
    )
    config = EngineConfig(
        max_model_len=fit_model_len(options, resolved, num_blocks=num_blocks, bytes_per_block=bytes_per_block),
        num_blocks=num_blocks,
        block_size=options.block_size,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_num_waiting=options.max_num_waiting,
        enable_prefix_caching=options.enable_prefix_caching,
        scheduling_policy=options.scheduling_policy,
        admission=options.admission,
        max_preemptions=options.max_preemptions,
        preemption_mode=options.preemption_mode,
        long_prefill_token_threshold=options.long_prefill_token_threshold,
        cache_pin_limit=options.cache_pin_limit,
        tenant_cache_quota=options.tenant_cache_quota,
    )
    report = [
        f"Weights: {format_bytes(capabilities.weight_bytes)} ({model.name})",
        *startup_lines(
            num_blocks=num_blocks,
            block_size=options.block_size,
            bytes_per_block=bytes_per_block,
            max_model_len=config.max_model_len,
        ),
        f"Memory available once the weights are loaded: {format_bytes(memory.available)} ({memory.source})",
        *(f"Note: {note}" for note in model.notes),
    ]
    if config.max_model_len < resolved.max_model_len:
        report.append(
            f"Warning: max_model_len lowered from {resolved.max_model_len} to {config.max_model_len}, "
            f"which is what the KV pool holds; raise kv_cache_memory for more"
        )
    return Assembly(
        engine=Engine(
            config, backend, seed=options.seed, grammars=grammar_compiler(make_tokenizer, capabilities.vocab_size)
        ),
        make_tokenizer=make_tokenizer,
        model=model,
        config=config,
        backend=backend,
        report=report,
        settings=describe(options, resolved, config, pool_source),
        chat_template=chat_template,
    )


def grammar_compiler(make_tokenizer: Callable[[], Tokenizer] | None, vocab_size: int) -> ConstraintCompiler | None:
    """What compiles the forms that requests ask for; None without a tokenizer."""
    if make_tokenizer is None:
        return None
    from octavo.text.constraints import ConstraintCompiler

    return ConstraintCompiler(make_tokenizer, vocab_size)


def read_chat_template(value: str | None) -> str | None:
    """The template itself, or the file that holds it. Raises ConfigError if it is neither."""
    if value is None or "{{" in value or "{%" in value:
        return value
    path = Path(value)
    try:
        if path.stat().st_size > MAX_TEMPLATE_BYTES:
            raise ConfigError(f"chat_template: {shorten(value, 200)} is larger than {format_bytes(MAX_TEMPLATE_BYTES)}")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ConfigError(f"chat_template: cannot read {shorten(value, 200)}: {reason}") from None


def _for_backend(progress: Progress | None) -> Callable[[float], None] | None:
    if progress is None:
        return None
    report = progress
    return lambda fraction: report("Preparing", fraction)
