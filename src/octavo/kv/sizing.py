"""The KV arithmetic: how many bytes a token costs, what a memory budget holds, what to take by default.

Pure numbers in, pure numbers out; whoever calls asks the machine how much memory there is.
"""

from __future__ import annotations

from octavo.errors import NeverFitsError

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

DEFAULT_MAX_KV_BYTES = 4 * GIB  # without being asked, never more than this ...
DEFAULT_MEMORY_FRACTION = 4  # ... nor more than one part in this many of the available memory


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` tokens of one sequence."""
    return -(-num_tokens // block_size)


def kv_bytes_per_token(*, num_layers: int, num_kv_heads: int, head_dim: int, bytes_per_value: int) -> int:
    """Keys and values of one token in all layers, in bytes."""
    return 2 * num_layers * num_kv_heads * head_dim * bytes_per_value


def num_blocks_in(budget_bytes: int, bytes_per_block: int) -> int:
    """Whole blocks that fit in a budget; may be 0."""
    return max(0, budget_bytes) // bytes_per_block


def default_kv_bytes(
    *,
    available_bytes: int,
    weight_bytes: int,
    bytes_per_block: int,
    block_size: int,
    max_num_seqs: int,
    max_model_len: int,
) -> int:
    """Bytes of KV to take when nobody said how much; a whole number of blocks, at least one.

    `available_bytes` is the memory that this process may still take (cgroup limit included),
    `weight_bytes` what of it the weights will take. The result is the least of 4 GiB, a quarter of what
    remains, and what `max_num_seqs` requests of full length need, but enough for one request of full
    length wherever that fits in what remains.
    """
    free = max(0, available_bytes - weight_bytes)
    one_request = blocks_for(max_model_len, block_size) * bytes_per_block
    budget = min(DEFAULT_MAX_KV_BYTES, free // DEFAULT_MEMORY_FRACTION, max_num_seqs * one_request)
    if one_request <= free:
        budget = max(budget, one_request)
    return max(1, num_blocks_in(budget, bytes_per_block)) * bytes_per_block


def check_fits(num_prompt: int, max_tokens: int, num_blocks: int, block_size: int, num_sequences: int = 1) -> None:
    """Raise NeverFitsError if the pool cannot hold the prompt and one token of each answer, with nobody else in it.

    The sequences of a request share the full blocks of their prompt; the block that an answer starts in
    is each one's own.
    """
    if max_tokens:
        shared = num_prompt // block_size
        needed = shared + num_sequences * (blocks_for(num_prompt + 1, block_size) - shared)
    else:
        needed = blocks_for(num_prompt, block_size)
    if needed > num_blocks:
        answers = "the answer" if num_sequences == 1 else f"each of {num_sequences} answers"
        answer = f" and one token of {answers}" if max_tokens else ""
        raise NeverFitsError(
            f"the prompt of {num_prompt} tokens{answer} needs {needed} KV blocks of {block_size} tokens, "
            f"but the KV pool has only {num_blocks} ({num_blocks * block_size} tokens)",
            param="n" if num_sequences > 1 and blocks_for(num_prompt + 1, block_size) <= num_blocks else "prompt",
        )


def format_bytes(num_bytes: int) -> str:
    """For people: 4.00 GiB, 360.0 KiB, 512 B."""
    for unit, name, digits in ((GIB, "GiB", 2), (MIB, "MiB", 1), (KIB, "KiB", 1)):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.{digits}f} {name}"
    return f"{num_bytes} B"


def beam_tokens_that_fit(num_prompt: int, width: int, num_blocks: int, block_size: int) -> int:
    """The most tokens that a beam search can generate with the whole pool for itself.

    Its beams share the full blocks of the prompt; what comes after is counted as if they shared nothing.
    The last token of a beam needs no KV. 0 if not even the prompt fits; 1 needs no more than the prompt.
    """
    num_shared = num_prompt // block_size
    if blocks_for(num_prompt, block_size) > num_blocks:
        return 0
    per_beam = (num_blocks - num_shared) // width * block_size
    return max(1, num_shared * block_size + per_beam - num_prompt + 1)


def startup_lines(*, num_blocks: int, block_size: int, bytes_per_block: int, max_model_len: int) -> list[str]:
    """What the KV pool holds, one fact per line, for the start-up log and `octavo doctor`."""
    num_tokens = num_blocks * block_size
    num_requests = num_blocks // blocks_for(max_model_len, block_size)
    lines = [
        f"KV cache: {bytes_per_block // block_size:,} bytes per token, "
        f"{format_bytes(bytes_per_block)} per block of {block_size} tokens",
        f"KV pool: {num_blocks:,} blocks = {num_tokens:,} tokens in {format_bytes(num_blocks * bytes_per_block)}",
        f"Requests of full length ({max_model_len:,} tokens) that fit at once: {num_requests:,}",
    ]
    if num_requests == 0:
        lines.append(f"No request of full length fits: the longest that does has {num_tokens:,} tokens")
    return lines
