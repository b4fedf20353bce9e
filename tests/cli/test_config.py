"""From options to values: defaults, precedence, refusals, and the KV pool's size."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.config import (
    EngineConfig,
    EngineOptions,
    Environment,
    Resolved,
    describe,
    dummy_weight_format,
    fit_model_len,
    pool_blocks,
    read_environment,
    resolve,
)
from octavo.errors import ConfigError
from octavo.models.spec import ModelSpec
from octavo.system import CpuInfo
from octavo.units import parse_bytes

MIB, GIB = 1 << 20, 1 << 30
CPU = CpuInfo(cores=((0,), (1,), (2,), (3,)), quota=None)


def spec(max_position: int = 4096) -> ModelSpec:
    return ModelSpec(
        architecture="llama",
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_position=max_position,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
    )


def resolved(environment: Environment | None = None, *, max_position: int = 4096, **options: Any) -> Resolved:
    return resolve(EngineOptions(**options), spec(max_position), environment or Environment(), CPU)


# ---------------------------------------------------------------------------- sizes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (1, 1),
        ("4096", 4096),
        ("2GiB", 2 * GIB),
        ("2gib", 2 * GIB),
        ("512M", 512 * MIB),
        ("1.5G", 3 * GIB // 2),
        ("2GB", 2 * 10**9),
        (" 1 KiB ", 1024),
        ("7B", 7),
    ],
)
def test_sizes(text: int | str, size: int) -> None:
    assert parse_bytes(text, "x") == size


@pytest.mark.parametrize("text", ["", "0", "-1", "2XB", "GiB", "1e9", "1.2.3G", 0, -5, True, "٣GiB", "9" * 10_000])
def test_bad_sizes_are_one_short_line(text: int | str) -> None:
    with pytest.raises(ConfigError, match="kv_cache_memory") as caught:
        parse_bytes(text, "kv_cache_memory")
    assert len(str(caught.value)) < 200
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_model_len", 0),
        ("max_model_len", 1.5),
        ("max_model_len", True),
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", -3),
        ("max_num_waiting", 0),
        ("threads", 0),
        ("seed", -1),
        ("block_size", 15),
        ("load_format", "pickle"),
        ("dtype", "float16"),
        ("kv_cache_dtype", "fp8"),
        ("scheduling_policy", "lottery"),
        ("memory_utilization", 0),
        ("memory_utilization", 1.1),
        ("kv_cache_memory", "much"),
        ("tensor_parallel_size", 2),
    ],
)
def test_options_out_of_range_name_themselves(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        EngineOptions(**{name: value})


def test_two_ways_to_size_the_pool_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="exclude"):
        EngineOptions(kv_cache_memory="1GiB", memory_utilization=0.5)


# ---------------------------------------------------------------------------- environment


def test_environment() -> None:
    environment = read_environment(
        {"OCTAVO_CACHE": "/c", "OCTAVO_ISA": "avx2", "OCTAVO_THREADS": "3", "OCTAVO_API_KEY": "k", "HOME": "/h"}
    )
    assert environment == Environment(cache="/c", isa="avx2", threads=3, api_key="k")
    assert "k'" not in repr(environment)


def test_empty_variables_are_unset() -> None:
    assert read_environment({"OCTAVO_THREADS": "", "OCTAVO_ISA": ""}) == Environment()


def test_unknown_variable_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"OCTAVO_THREAD'; known are .*OCTAVO_THREADS"):
        read_environment({"OCTAVO_THREAD": "4"})


@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5", "9" * 5000])
def test_bad_thread_count_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="OCTAVO_THREADS") as caught:
        read_environment({"OCTAVO_THREADS": value})
    assert len(str(caught.value)) < 200


# ---------------------------------------------------------------------------- resolution


def test_every_auto_has_a_value_and_a_source() -> None:
    values = resolved()
    assert (values.max_model_len, values.kv_cache_dtype, values.threads, values.isa, values.backend) == (
        4096,
        "bfloat16",
        4,
        "auto",
        "cpu",
    )
    assert values.model_len_is_auto
    assert values.sources["max_model_len"] == "model"
    assert values.sources["threads"] == "4 cores, 4 logical CPUs"


def test_argument_beats_environment_beats_default() -> None:
    environment = Environment(threads=3, isa="avx2")
    assert (resolved(environment).threads, resolved(environment).isa) == (3, "avx2")
    given = resolved(environment, threads=1, isa="scalar")
    assert (given.threads, given.isa) == (1, "scalar")
    assert given.sources["threads"] == "given"


def test_threads_are_pinned_on_request_and_each_to_a_core() -> None:
    assert resolved().pins == ()
    assert resolved(pin_threads=True).pins == CPU.cores
    assert resolved(pin_threads=True, threads=3).pins == CPU.cores[:3]
    options = EngineOptions(pin_threads=True)
    siblings = CpuInfo(cores=((0, 2), (1, 3)), quota=None)
    assert resolve(options, spec(), Environment(), siblings).pins == ((0, 2), (1, 3))
    with pytest.raises(ConfigError, match=r"pin_threads .* 5 threads and 4 cores, 4 logical CPUs"):
        resolved(pin_threads=True, threads=5)


def test_dtype_decides_kv_and_dummy_weights() -> None:
    assert resolved(dtype="float32").kv_cache_dtype == "float32"
    assert resolved(dtype="float32", kv_cache_dtype="bfloat16").kv_cache_dtype == "bfloat16"
    assert dummy_weight_format(EngineOptions(dtype="float32")) == "F32"
    assert dummy_weight_format(EngineOptions()) == "BF16"
    assert dummy_weight_format(EngineOptions(dtype="float32", dummy_format="q4_1")) == "Q4_1"


def test_context_beyond_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="8192 is more than the 4096 positions"):
        resolved(max_model_len=8192)


# ---------------------------------------------------------------------------- KV pool

BLOCK_BYTES = 16 * 1024  # 1 KiB per token


def blocks(available: int, *, max_position: int = 4096, **options: Any) -> int:
    chosen = EngineOptions(**options)
    values = resolve(chosen, spec(max_position), Environment(), CPU)
    return pool_blocks(chosen, values, available=available, bytes_per_block=BLOCK_BYTES, limit="test")[0]


def test_given_memory_is_rounded_down_to_blocks() -> None:
    assert blocks(GIB, kv_cache_memory=10 * BLOCK_BYTES + 5) == 10


def test_share_of_the_memory_left() -> None:
    assert blocks(100 * BLOCK_BYTES, memory_utilization=0.25) == 25


def test_default_leaves_most_of_the_memory_alone() -> None:
    assert blocks(GIB) * BLOCK_BYTES == GIB // 4


def test_default_holds_no_more_than_could_be_used() -> None:
    assert blocks(64 * GIB, max_num_seqs=2) * 16 == 2 * 4096


def test_default_is_at_most_four_gibibytes() -> None:
    assert blocks(64 * GIB, max_position=65536) * BLOCK_BYTES == 4 * GIB


def test_automatic_context_takes_at_most_half_of_the_memory() -> None:
    # 65536 tokens would need 64 MiB of 80 MiB.
    assert blocks(80 * MIB, max_position=65536) * BLOCK_BYTES == 40 * MIB


def test_demanded_context_may_take_more() -> None:
    assert blocks(80 * MIB, max_position=65536, max_model_len=65536) * BLOCK_BYTES == 64 * MIB


def test_more_than_there_is_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"asks for 2.00 GiB, but only 1.00 GiB are left \(test\)"):
        blocks(GIB, kv_cache_memory="2GiB")


def test_less_than_one_block_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"hold no KV block; one block of 16 tokens takes 16\.0 KiB"):
        blocks(GIB, kv_cache_memory="1KiB")


def test_context_larger_than_the_pool_is_refused_with_the_largest_possible() -> None:
    options = EngineOptions(max_model_len=4096)
    values = resolve(options, spec(), Environment(), CPU)
    with pytest.raises(ConfigError, match=r"4096 .* 1024 tokens .* largest possible max_model_len is 1024, .*4.0 MiB"):
        fit_model_len(options, values, num_blocks=64, bytes_per_block=BLOCK_BYTES)


def test_automatic_context_is_lowered_to_the_pool() -> None:
    options = EngineOptions()
    values = resolve(options, spec(), Environment(), CPU)
    assert fit_model_len(options, values, num_blocks=64, bytes_per_block=BLOCK_BYTES) == 1024
    assert fit_model_len(options, values, num_blocks=256, bytes_per_block=BLOCK_BYTES) == 4096


def test_table_says_where_values_come_from() -> None:
    options = EngineOptions(max_num_seqs=8)
    values = resolve(options, spec(), Environment(threads=2), CPU)
    config = EngineConfig(max_model_len=1024, num_blocks=64, max_num_seqs=8)
    table = {s.name: (s.value, s.source) for s in describe(options, values, config, "kv_cache_memory")}
    assert table["max_model_len"] == ("1024", "lowered to what the KV pool holds")
    assert table["num_blocks"] == ("64", "kv_cache_memory")
    assert table["max_num_seqs"] == ("8", "given")
    assert table["block_size"] == ("16", "default")
    assert table["threads"] == ("2", "OCTAVO_THREADS")
