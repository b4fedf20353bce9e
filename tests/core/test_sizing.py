"""kv.sizing: the arithmetic that users see and that admission uses."""

import pytest

from octavo.errors import NeverFitsError
from octavo.kv import sizing
from octavo.kv.sizing import GIB, MIB


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((32, 8, 128, 2), 131_072),  # Llama-3.1-8B, bf16
        ((40, 40, 128, 2), 819_200),  # Llama-2-13B
        ((30, 3, 64, 2), 23_040),  # SmolLM2-135M
    ],
)
def test_bytes_per_token_of_known_models(shape, expected):
    names = ("num_layers", "num_kv_heads", "head_dim", "bytes_per_value")
    assert sizing.kv_bytes_per_token(**dict(zip(names, shape, strict=True))) == expected


def test_blocks_for_rounds_up():
    assert [sizing.blocks_for(n, 16) for n in (0, 1, 15, 16, 17, 160)] == [0, 1, 1, 1, 2, 10]


def test_num_blocks_in_a_budget():
    assert [sizing.num_blocks_in(b, 100) for b in (-5, 0, 99, 100, 1000)] == [0, 0, 0, 1, 10]


SMOL = {"bytes_per_block": 16 * 23_040, "block_size": 16, "weight_bytes": 0}


def default(**kwargs):
    return sizing.default_kv_bytes(**{**SMOL, "max_num_seqs": 128, "max_model_len": 8192, **kwargs})


def test_default_is_at_most_4_gib():
    block = SMOL["bytes_per_block"]
    assert default(available_bytes=256 * GIB) == 4 * GIB // block * block


def test_default_is_at_most_a_quarter_of_what_remains_beside_the_weights():
    block = SMOL["bytes_per_block"]
    assert default(available_bytes=4 * GIB) == GIB // block * block
    assert default(available_bytes=5 * GIB, weight_bytes=GIB) == GIB // block * block


def test_default_is_at_most_what_all_requests_at_full_length_need():
    assert default(available_bytes=256 * GIB, max_num_seqs=2, max_model_len=1024) == 2 * 64 * SMOL["bytes_per_block"]


def test_default_holds_one_request_of_full_length_where_that_is_possible():
    one = 512 * SMOL["bytes_per_block"]  # 180 MiB
    assert default(available_bytes=300 * MIB) == one
    assert default(available_bytes=one) == one
    assert default(available_bytes=100 * MIB) == 25 * MIB // SMOL["bytes_per_block"] * SMOL["bytes_per_block"]
    assert default(available_bytes=0) == SMOL["bytes_per_block"]  # never nothing


def test_startup_lines_say_what_the_pool_holds():
    lines = sizing.startup_lines(num_blocks=1000, block_size=16, bytes_per_block=368_640, max_model_len=2048)
    text = "\n".join(lines)
    for fact in ("23,040 bytes per token", "360.0 KiB per block of 16", "1,000 blocks = 16,000 tokens", "351.6 MiB"):
        assert fact in text
    assert lines[2].endswith("(2,048 tokens) that fit at once: 7")


def test_startup_lines_when_not_even_one_fits():
    lines = sizing.startup_lines(num_blocks=10, block_size=16, bytes_per_block=368_640, max_model_len=2048)
    assert "the longest that does has 160 tokens" in lines[-1]


def test_format_bytes():
    assert [sizing.format_bytes(n) for n in (0, 512, 1024, 3 * MIB // 2, 4 * GIB)] == [
        "0 B",
        "512 B",
        "1.0 KiB",
        "1.5 MiB",
        "4.00 GiB",
    ]


def test_check_fits_shows_the_arithmetic():
    sizing.check_fits(159, 1, 10, 16)
    sizing.check_fits(160, 0, 10, 16)  # scoring only: no token follows
    with pytest.raises(NeverFitsError, match=r"200 tokens and one token .* 13 KV blocks of 16 .* only 10 \(160 tokens"):
        sizing.check_fits(200, 5, 10, 16)
    with pytest.raises(NeverFitsError):
        sizing.check_fits(160, 1, 10, 16)


def test_check_fits_counts_all_sequences():
    """Four answers after 100 tokens: 6 shared blocks and 4 that each one starts in."""
    sizing.check_fits(100, 5, 10, 16, num_sequences=4)
    with pytest.raises(NeverFitsError, match=r"each of 4 answers needs 10 KV blocks .* only 9 ") as refused:
        sizing.check_fits(100, 5, 9, 16, num_sequences=4)
    assert refused.value.param == "n"
    sizing.check_fits(96, 5, 10, 16, num_sequences=4)
    sizing.check_fits(100, 0, 7, 16, num_sequences=4)
    with pytest.raises(NeverFitsError) as refused:
        sizing.check_fits(200, 5, 9, 16, num_sequences=4)
    assert refused.value.param == "prompt"
