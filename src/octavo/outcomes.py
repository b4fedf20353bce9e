"""What came of a row enters the books: computed tokens, the drawn one, and whether that ends the sequence."""

from __future__ import annotations

from collections.abc import Sequence as ListLike

from octavo.events import OutputEvent, news
from octavo.forks import Forks
from octavo.line import Line
from octavo.plan import PlanRow, RowResult, TokenLogprobs
from octavo.request import FinishReason, Sequence, SequenceStatus


class Outcomes:
    """`max_known`: a sequence that knows so many tokens ends, whatever it asked for."""

    def __init__(self, line: Line, forks: Forks, max_known: int) -> None:
        self._line = line
        self._forks = forks
        self._max_known = max_known

    def enter(self, seq: Sequence, planned: ListLike[Sequence], row: PlanRow, out: RowResult) -> list[OutputEvent]:
        """The events of a row's sequence and of its `planned` forks."""
        line = self._line
        forks: list[tuple[Sequence, RowResult]] = []
        if planned:
            pairs = zip(planned, out.forks or (out,) * len(planned), strict=True)
            forks = [(fork, drawn) for fork, drawn in pairs if fork.status is SequenceStatus.WAITING]
        search = line.searches.get(seq.request.request_id) if line.searches else None
        if out.error is not None:
            failed = search.sequences if search is not None else [seq, *(fork for fork, _ in forks)]
            return line.fail([one for one in failed if not one.finished], out.error)
        end = row.start + len(row.token_ids)
        if row.start < seq.num_prompt:
            line.counters.prompt_tokens_computed += min(end, seq.num_prompt) - row.start
        seq.num_computed = end
        line.tables.register(seq)
        if row.start < seq.num_prompt <= end:
            line.tables.register_tail(seq)
            line.tables.retention.pin(seq)
        scores = out.scores
        if row.score_ids:  # a recomputed row may score again what was already reported
            scores = scores[max(0, seq.prompt_logprobs_done - row.start) :]
            seq.prompt_logprobs_done += len(scores)
        for fork, _ in forks:
            self._forks.start(fork, seq)
        if search is not None and row.sample is not None:
            return [news(seq, scores)] if scores else []
        event = self._take(seq, out, scores)
        events = [] if event is None else [event]
        for fork, drawn in forks:
            if (event := self._take(fork, drawn, ())) is not None:
                events.append(event)
        return events

    def _take(self, seq: Sequence, out: RowResult, scores: tuple[TokenLogprobs, ...]) -> OutputEvent | None:
        """What a sequence drew, if anything, and whether that ends it."""
        line = self._line
        if out.error is not None:
            return line.fail([seq], out.error)[0]
        token_ids: tuple[int, ...] = ()
        reason = None
        if out.pooled is not None:
            seq.pooled = out.pooled
        if out.token_id is not None:
            token_ids = (out.token_id,)
            seq.token_ids.append(out.token_id)
            line.counters.generated_tokens += 1
            if line.observer is not None and len(seq.token_ids) == seq.num_prompt + 1:
                line.observer.first_token(seq)
            reason = self._reason_to_stop(seq, out.token_id)
        elif seq.num_computed == seq.num_known:
            # max_tokens 0: only the prompt was wanted
            reason = FinishReason.LENGTH if out.pooled is None else FinishReason.STOP
        if reason is not None:
            line.finish(seq, reason)
        elif not token_ids and not scores:
            return None
        logprobs = (out.logprobs,) if out.logprobs is not None else None
        embedding = out.pooled if reason is not None else None
        return news(seq, scores, token_ids, logprobs, embedding=embedding)

    def _reason_to_stop(self, seq: Sequence, token_id: int) -> FinishReason | None:
        """Stop wins over length on the same token. Before `min_tokens` only a grammar can end the text."""
        request = seq.request
        num_generated = len(seq.token_ids) - seq.num_prompt
        if seq.constraint is not None and seq.constraint.accept(token_id):
            return FinishReason.STOP
        if token_id in request.eos_token_ids and not request.params.ignore_eos:
            return FinishReason.STOP
        if token_id in request.params.stop_token_ids and num_generated > request.params.min_tokens:
            seq.stop_reason = token_id
            return FinishReason.STOP
        if num_generated >= request.max_tokens or len(seq.token_ids) >= self._max_known:
            return FinishReason.LENGTH
        return None
