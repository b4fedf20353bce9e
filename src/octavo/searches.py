"""Beam searches in the books: after each step the sequences of a search follow its beams, until it is settled."""

from __future__ import annotations

from octavo.beams import BeamSearch, Hypothesis, move
from octavo.events import OutputEvent, news
from octavo.line import Line
from octavo.request import FinishReason, Sequence

Top = tuple[tuple[int, float], ...]
"""The most probable next tokens of a beam with their log-probabilities, best first."""


def advance_search(line: Line, search: BeamSearch, tops: dict[Sequence, Top]) -> list[OutputEvent]:
    """Let the beams go on to their next tokens, or end the search; `tops` of those that have just been computed."""
    sequences = search.sequences
    assert not search.length or all(seq in tops for seq in sequences), "a beam was left behind"
    beams = search.advance([tops.get(seq, ()) for seq in sequences])
    line.counters.generated_tokens += len(beams)
    if line.observer is not None and search.length == 1:
        for seq in sequences:
            line.observer.first_token(seq)
    if search.settled:
        return _end_search(line, search)
    search.sequences = move(line.tables, sequences, beams)[: len(beams)]
    for seq in sequences:
        if seq not in search.sequences:  # too few continuations for all
            line.finish(seq, FinishReason.LENGTH)
    return []


def _end_search(line: Line, search: BeamSearch) -> list[OutputEvent]:
    """The n best results, in the places of the first n sequences."""
    samples = line.requests[search.request.request_id]
    line.experience.spread.observe(search.sequences, line.tables.block_size)
    results: list[Hypothesis] = search.finished[: search.request.params.n]
    if not results:
        return line.fail([seq for seq in samples if not seq.finished], "the search found no continuation")
    events = []
    for seq in samples:
        found = results[min(seq.index, len(results) - 1)]
        entries = found.path.entries()
        if not seq.finished:
            line.tables.drop(seq)
            seq.token_ids[seq.num_prompt :] = [entry.token_id for entry in entries]
            seq.stop_reason = found.stop_reason
            line.finish(seq, found.reason)
        if seq.index < search.request.params.n:
            seq.finish_reason = found.reason
            events.append(news(seq, (), tuple(seq.token_ids[seq.num_prompt :]), entries, found.score))
    return events
