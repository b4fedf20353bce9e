"""Which of several samples are the best: `best_of`."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.plan import TokenLogprobs


def mean_logprob(entries: Sequence[TokenLogprobs]) -> float:
    """Mean log-probability per generated token, the one that ended the sample included; 0 for no tokens."""
    return sum(entry.logprob for entry in entries) / len(entries) if entries else 0.0


def rank(samples: Sequence[Sequence[TokenLogprobs]]) -> list[int]:
    """Indexes of the samples, the highest mean log-probability first; of equals the lowest index.

    The mean and not the sum, which would prefer short answers; "highest log probability per token" is
    OpenAI's definition.
    """
    return sorted(range(len(samples)), key=lambda i: (-mean_logprob(samples[i]), i))
