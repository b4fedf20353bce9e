"""From the flags a user gives (EngineOptions) to one value for each (EngineConfig): every "auto" ends here.

`read_environment` is the only place that reads OCTAVO_* variables. Precedence: argument, environment, default.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from octavo.errors import ConfigError
from octavo.kv.sizing import blocks_for, default_kv_bytes, format_bytes, num_blocks_in
from octavo.units import parse_bytes, shorten

if TYPE_CHECKING:
    from octavo.models.spec import ModelSpec
    from octavo.system import CpuInfo

T = TypeVar("T")

LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
DTYPES = ("auto", "bfloat16", "float32")
KV_CACHE_DTYPES = (*DTYPES, "int8")
SCHEDULING_POLICIES = ("fcfs", "priority")
ADMISSIONS = ("foresight", "greedy")
PREEMPTION_MODES = ("full", "tail")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What the scheduler needs to know, all "auto" already resolved. Counts are in tokens or blocks."""

    max_model_len: int
    num_blocks: int
    block_size: int = 16
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 512
    max_num_waiting: int = 1024
    enable_prefix_caching: bool = True
    scheduling_policy: str = "fcfs"
    admission: str = "foresight"
    max_preemptions: int = 4
    preemption_mode: str = "tail"
    long_prefill_token_threshold: int = 0  # 0: off
    cache_pin_limit: float = 0.5  # share of the blocks that pins may hold
    tenant_cache_quota: float = 1.0  # share of the blocks that one tenant may keep cached while nobody uses them

    def __post_init__(self) -> None:
        assert self.block_size > 0 and self.num_blocks > 0 and self.max_model_len > 0
        assert self.max_num_batched_tokens >= 1 and self.max_num_seqs >= 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Every flag of `octavo serve` and argument of `LLM` that concerns the engine; None and "auto" mean: choose.

    Raises ConfigError that names the option when a value is out of range.
    """

    # What is served
    tokenizer: str | None = None  # directory, .gguf or repository to take the tokenizer from
    load_format: str = "auto"
    chat_template: str | None = None  # a file, or the template itself
    dtype: str = "auto"  # of KV and dummy weights; stored weights keep their own format
    dummy_format: str = "auto"  # weight format of --load-format dummy
    seed: int | None = None  # of dummy weights, and of requests that bring none

    # What one step and the queue hold
    max_model_len: int | None = None
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 512
    max_num_waiting: int = 1024
    scheduling_policy: str = "fcfs"
    admission: str = "foresight"
    max_preemptions: int = 4
    preemption_mode: str = "tail"
    long_prefill_token_threshold: int = 0  # most tokens of one prompt in a step; 0: no limit but the step's

    # Memory
    block_size: int = 16
    enable_prefix_caching: bool = True
    cache_pin_limit: float = 0.5  # share of the KV pool that pinned prefixes may hold
    tenant_cache_quota: float = 1.0  # share of it that one tenant may keep cached, unused
    kv_cache_memory: int | str | None = None  # bytes, or text such as "2GiB"
    kv_cache_dtype: str = "auto"
    memory_utilization: float | None = None  # share of the memory still available that KV may take

    # The machine
    backend: str = "auto"
    threads: int | None = None
    pin_threads: bool = False  # each to a core of its own
    isa: str = "auto"
    tensor_parallel_size: int = 1

    def __post_init__(self) -> None:
        for name, low, high in (
            ("max_model_len", 2, 2**24),
            ("max_num_seqs", 1, 4096),
            ("max_num_batched_tokens", 1, 2**20),
            ("max_num_waiting", 1, 2**20),
            ("max_preemptions", 1, 2**20),
            ("long_prefill_token_threshold", 0, 2**20),
            ("threads", 1, 1024),
            ("seed", 0, 2**63 - 1),
        ):
            value = getattr(self, name)
            if value is not None and not (_is_int(value) and low <= value <= high):
                raise ConfigError(f"{name} must be an integer from {low} to {high}")
        for name, allowed in (
            ("load_format", LOAD_FORMATS),
            ("dtype", DTYPES),
            ("kv_cache_dtype", KV_CACHE_DTYPES),
            ("scheduling_policy", SCHEDULING_POLICIES),
            ("admission", ADMISSIONS),
            ("preemption_mode", PREEMPTION_MODES),
        ):
            value = getattr(self, name)
            if value not in allowed:
                raise ConfigError(f"{name} must be one of {', '.join(allowed)}, not {shorten(str(value))}")
        self._check_memory()
        if self.tensor_parallel_size != 1:
            raise ConfigError("tensor_parallel_size must be 1: this version runs a model on one machine's CPU")

    def _check_memory(self) -> None:
        if not (_is_int(self.block_size) and self.block_size in (8, 16, 32, 64, 128)):
            raise ConfigError("block_size must be 8, 16, 32, 64 or 128 tokens")
        if self.kv_cache_memory is not None:
            parse_bytes(self.kv_cache_memory, "kv_cache_memory")
        for name in ("cache_pin_limit", "tenant_cache_quota"):
            value = getattr(self, name)
            if not (isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1):
                raise ConfigError(f"{name} must be a number from 0 to 1")
        share = self.memory_utilization
        if share is not None:
            if not (isinstance(share, int | float) and not isinstance(share, bool) and 0 < share <= 1):
                raise ConfigError("memory_utilization must be a number above 0 and at most 1")
            if self.kv_cache_memory is not None:
                raise ConfigError("kv_cache_memory and memory_utilization exclude each other: give one of them")


def _is_int(x: object) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


# ---------------------------------------------------------------------------- environment


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The OCTAVO_* variables, by name: OCTAVO_CACHE is `cache` and so on."""

    cache: str | None = None  # directory of downloaded models
    isa: str | None = None
    threads: int | None = None
    api_key: str | None = field(default=None, repr=False)
    state: str | None = None  # directory of what an installation keeps, such as the secret of its cache salts


def read_environment(environ: Mapping[str, str] | None = None) -> Environment:
    """Reads the known OCTAVO_* variables; empty ones count as unset.

    Raises ConfigError for an unknown OCTAVO_* name, so that a typing error never goes unnoticed.
    """
    values = {k: v for k, v in (os.environ if environ is None else environ).items() if k.startswith("OCTAVO_") and v}
    known = ("OCTAVO_API_KEY", "OCTAVO_CACHE", "OCTAVO_ISA", "OCTAVO_STATE", "OCTAVO_THREADS")
    for name in sorted(values.keys() - set(known)):
        raise ConfigError(f"unknown environment variable {shorten(name)}; known are {', '.join(known)}")
    threads = values.get("OCTAVO_THREADS")
    if threads is not None and not (threads.isascii() and threads.isdigit() and 1 <= int(threads[:9]) <= 1024):
        raise ConfigError(f"OCTAVO_THREADS must be an integer from 1 to 1024, not {shorten(threads)}")
    return Environment(
        cache=values.get("OCTAVO_CACHE"),
        isa=values.get("OCTAVO_ISA"),
        threads=int(threads) if threads else None,
        api_key=values.get("OCTAVO_API_KEY"),
        state=values.get("OCTAVO_STATE"),
    )


# ---------------------------------------------------------------------------- resolution


@dataclass(frozen=True, slots=True)
class Setting:
    """One resolved value and where it came from, for people to read."""

    name: str
    value: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """All values that are known before the weights are in memory. `model_len_is_auto`: the pool may lower it."""

    max_model_len: int
    model_len_is_auto: bool
    kv_cache_dtype: str
    backend: str
    threads: int
    pins: tuple[tuple[int, ...], ...]  # CPUs of each thread; none: any of the process's
    isa: str
    sources: Mapping[str, str]


def resolve(options: EngineOptions, spec: ModelSpec, environment: Environment, cpu: CpuInfo) -> Resolved:
    """Turns every "auto" into a value. Raises ConfigError where an option contradicts the model."""
    sources: dict[str, str] = {}

    def choose(name: str, *candidates: tuple[T | None, str]) -> T:
        for value, source in candidates:
            if value is not None:
                sources[name] = source
                return value
        raise AssertionError(name)

    given, default = "given", "default"
    if options.max_model_len is not None and options.max_model_len > spec.max_position:
        raise ConfigError(
            f"max_model_len {options.max_model_len} is more than the {spec.max_position} positions "
            f"that the model was made for"
        )
    dtype = _not_auto(options.dtype)
    kv_cache_dtype = choose(
        "kv_cache_dtype", (_not_auto(options.kv_cache_dtype), given), (dtype, "dtype"), ("bfloat16", default)
    )
    threads = choose(
        "threads", (options.threads, given), (environment.threads, "OCTAVO_THREADS"), (cpu.num_threads, cpu.source)
    )
    if options.pin_threads and threads > cpu.num_cores:
        raise ConfigError(f"pin_threads wants a core for every thread; there are {threads} threads and {cpu.source}")
    pins = cpu.cores[:threads] if options.pin_threads else ()
    sources["pin_threads"] = given if options.pin_threads else default
    return Resolved(
        max_model_len=choose("max_model_len", (options.max_model_len, given), (spec.max_position, "model")),
        model_len_is_auto=options.max_model_len is None,
        kv_cache_dtype=kv_cache_dtype,
        backend=choose("backend", (_not_auto(options.backend), given), ("cpu", default)),
        threads=threads,
        pins=pins,
        isa=choose(
            "isa", (_not_auto(options.isa), given), (environment.isa, "OCTAVO_ISA"), ("auto", "best of this CPU")
        ),
        sources=sources,
    )


def dummy_weight_format(options: EngineOptions) -> str:
    """The weight format of `load_format="dummy"`: as given, else that of `dtype`, else bfloat16."""
    if options.dummy_format != "auto":
        return options.dummy_format.upper()
    return "F32" if options.dtype == "float32" else "BF16"


def _not_auto(value: str) -> str | None:
    return None if value == "auto" else value


def pool_blocks(
    options: EngineOptions, resolved: Resolved, *, available: int, bytes_per_block: int, limit: str
) -> tuple[int, str]:
    """How many KV blocks to hold, and why. `available` is counted after the weights are in memory.

    The default is octavo.kv.sizing.default_kv_bytes, which leaves a laptop usable; where nobody asked for
    a context length, one request of full length is not worth more than half of what is left.
    Raises ConfigError where the budget is more than there is, or less than one block.
    """
    if options.kv_cache_memory is not None:
        budget, source = parse_bytes(options.kv_cache_memory, "kv_cache_memory"), "kv_cache_memory"
        if budget > available:
            raise ConfigError(
                f"kv_cache_memory asks for {format_bytes(budget)}, "
                f"but only {format_bytes(available)} are left ({limit})"
            )
    elif options.memory_utilization is not None:
        budget, source = int(available * options.memory_utilization), "memory_utilization"
    else:
        max_model_len, source = resolved.max_model_len, f"default share of {format_bytes(available)} left"
        if resolved.model_len_is_auto:
            most = num_blocks_in(available // 2, bytes_per_block) * options.block_size
            max_model_len = min(max_model_len, max(most, options.block_size))
        budget = default_kv_bytes(
            available_bytes=available,
            weight_bytes=0,
            bytes_per_block=bytes_per_block,
            block_size=options.block_size,
            max_num_seqs=options.max_num_seqs,
            max_model_len=max_model_len,
        )
    num_blocks = num_blocks_in(budget, bytes_per_block)
    if num_blocks < 1:
        raise ConfigError(
            f"{source}: {format_bytes(budget)} hold no KV block; one block of {options.block_size} tokens "
            f"takes {format_bytes(bytes_per_block)}"
        )
    return num_blocks, source


def fit_model_len(options: EngineOptions, resolved: Resolved, *, num_blocks: int, bytes_per_block: int) -> int:
    """The context length that the pool can hold: lowered where it was automatic, else ConfigError."""
    num_tokens = num_blocks * options.block_size
    if resolved.max_model_len <= num_tokens:
        return resolved.max_model_len
    if resolved.model_len_is_auto:
        return num_tokens
    needed = blocks_for(resolved.max_model_len, options.block_size) * bytes_per_block
    raise ConfigError(
        f"max_model_len {resolved.max_model_len} is more than the KV pool holds: {num_tokens} tokens in {num_blocks} "
        f"blocks; the largest possible max_model_len is {num_tokens}, "
        f"or raise kv_cache_memory to {format_bytes(needed)}"
    )


def describe(options: EngineOptions, resolved: Resolved, config: EngineConfig, pool_source: str) -> list[Setting]:
    """The resolved configuration as a table: every name, its value, where it came from."""
    defaults = EngineOptions()
    rows = []
    for name in (
        "max_model_len",
        "block_size",
        "num_blocks",
        "max_num_seqs",
        "max_num_batched_tokens",
        "max_num_waiting",
        "enable_prefix_caching",
        "scheduling_policy",
        "admission",
        "max_preemptions",
        "preemption_mode",
        "long_prefill_token_threshold",
        "cache_pin_limit",
        "tenant_cache_quota",
    ):
        source = "given" if getattr(options, name, None) != getattr(defaults, name, None) else "default"
        rows.append(Setting(name, str(getattr(config, name)), resolved.sources.get(name, source)))
    if config.max_model_len != resolved.max_model_len:
        rows[0] = Setting("max_model_len", str(config.max_model_len), "lowered to what the KV pool holds")
    rows[2] = Setting("num_blocks", str(config.num_blocks), pool_source)
    for name in ("kv_cache_dtype", "backend", "threads", "isa"):
        rows.append(Setting(name, str(getattr(resolved, name)), resolved.sources[name]))
    rows.append(Setting("pin_threads", str(bool(resolved.pins)), resolved.sources["pin_threads"]))
    return rows
