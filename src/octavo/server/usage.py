"""The `usage` object: every prompt once, whatever n; every generated token of every sample.

Extensions: `truncated_tokens`, and `shared_tokens`: prompt tokens that samples did not compute because a
sibling had, summed over the samples (300 for a prompt of 100 tokens and n = 4).
"""

from __future__ import annotations

from typing import Any

from octavo.server.generation import Generation


def usage_of(generation: Generation) -> dict[str, Any]:
    num_prompt = sum(len(p.token_ids) for p in generation.prompts)
    num_generated = sum(c.num_tokens for c in generation.choices)
    details = {"cached_tokens": sum(p.num_cached for p in generation.prompts)}
    num_truncated = sum(p.num_truncated for p in generation.prompts)
    num_shared = sum(c.num_shared for c in generation.choices)
    if num_shared:
        details["shared_tokens"] = num_shared
    if num_truncated:
        details["truncated_tokens"] = num_truncated
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
        "prompt_tokens_details": details,
    }


def last_chunk(content: dict[str, Any], generation: Generation, *, with_usage: bool) -> list[dict[str, Any]]:
    """The chunk without choices that ends a stream, if usage or an explanation was asked for."""
    if with_usage:
        content["usage"] = usage_of(generation)
    if generation.extension is not None:
        content["octavo"] = generation.extension
    return [content] if with_usage or generation.extension is not None else []
