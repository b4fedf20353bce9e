"""From engine events to text: stop strings, stop tokens, limits, special tokens."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text.vocabularies import byte_level, sentencepiece

from octavo.events import OutputEvent
from octavo.plan import TokenLogprobs
from octavo.request import FinishReason, SamplingParams
from octavo.text.output import SequenceOutput, TextDelta
from octavo.text.tokenizer import Tokenizer

WORDS = ["mno", "PQR", "S", "TU", "V", "w", "red", " green", " blue", " alpha beta gamma", "END", "Hello", "Hi", "4"]


def _tokenizer() -> Tokenizer:
    metadata = byte_level()
    metadata["tokenizer.ggml.tokens"] += [w.replace(" ", "Ġ") for w in WORDS]
    metadata["tokenizer.ggml.token_type"] += [1] * len(WORDS)
    return Tokenizer.from_gguf(metadata)


TOKENIZER = _tokenizer()
ID_OF = {TOKENIZER.token_bytes(i): i for i in range(TOKENIZER.vocab_size)}
EOS = 2  # <|im_end|>
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def ids_of(*texts: str | bytes) -> list[int]:
    return [ID_OF[t.encode() if isinstance(t, str) else t] for t in texts]


def run(
    ids: list[int], end: FinishReason | None = LENGTH, *, prompt: list[int] | None = None, group: int = 1, **params: Any
) -> tuple[SequenceOutput, list[TextDelta]]:
    """Plays the tokens as events of `group` tokens; the last one carries `end`."""
    output = SequenceOutput(TOKENIZER, SamplingParams(**params), prompt or ids_of("a"))
    deltas = []
    for start in range(0, len(ids), group):
        part = ids[start : start + group]
        last = start + group >= len(ids)
        logprobs = tuple(TokenLogprobs(i, -1.0, 1) for i in part)
        reason = part[-1] if last and end is STOP else None
        event = OutputEvent("r", 0, tuple(part), logprobs, finish_reason=end if last else None, stop_reason=reason)
        deltas.append(output.push(event))
        if output.finish_reason is not None:
            break
    assert "".join(d.text for d in deltas) == output.text
    assert [i for d in deltas for i in d.token_ids] == output.token_ids
    assert [p.token_id for p in output.logprobs] == output.token_ids
    assert [d.finish_reason for d in deltas] == [None] * (len(deltas) - 1) + [output.finish_reason]
    return output, deltas


def test_long_stop_string_never_leaks() -> None:
    output, deltas = run(ids_of("mno", "PQR", "S", "TU", "V", "w"), stop="PQRSTUV")
    assert [d.text for d in deltas] == ["mno", "", "", "", ""]
    assert (output.text, output.finish_reason, output.stop_reason) == ("mno", STOP, "PQRSTUV")
    assert deltas[-1].stopped_by_text
    assert len(output.token_ids) == 5


@pytest.mark.parametrize(("last", "end"), [([EOS], STOP), ([], LENGTH)])
def test_held_text_comes_at_the_end(last: list[int], end: FinishReason) -> None:
    output, deltas = run(ids_of("red", " green", " blue") + last, end, stop=" blue\n#end")
    assert output.text == "red green blue"
    assert output.finish_reason is end
    assert not deltas[-1].stopped_by_text
    assert deltas[-1].text == " blue"


@pytest.mark.parametrize(("include", "text"), [(False, "4."), (True, "4.\n")])
def test_include_stop_string(include: bool, text: str) -> None:
    output, _ = run(ids_of("4", ".", "\n", "x"), stop="\n", include_stop_str_in_output=include)
    assert (output.text, output.stop_reason, len(output.token_ids)) == (text, "\n", 3)


@pytest.mark.parametrize("stop", [("gamma", "beta"), ("beta", "gamma")])
@pytest.mark.parametrize("ids", [ids_of(" alpha beta gamma"), ids_of(*" alpha beta gamma")])
def test_leftmost_stop_string_wins(stop: tuple[str, ...], ids: list[int]) -> None:
    output, _ = run(ids, stop=stop)
    assert (output.text, output.stop_reason) == (" alpha ", "beta")


def test_stop_string_before_min_tokens_is_text() -> None:
    output, _ = run(ids_of("a", "\n", "b", "c", "\n", "d"), stop="\n", min_tokens=4)
    assert (output.text, output.finish_reason, len(output.token_ids)) == ("a\nbc", STOP, 5)
    output, _ = run(ids_of("a", "\n", "b", "\n", "c"), stop="\n", min_tokens=4)
    assert (output.text, len(output.token_ids)) == ("a\nb", 4)


@pytest.mark.parametrize(
    ("skip", "include", "listed", "text"),
    [
        (True, False, True, "Hello"),
        (True, True, True, "Hello"),
        (False, False, True, "Hello"),
        (False, True, True, "Hello<|im_end|>"),
        (False, True, False, "Hello"),  # EOS of the model, not asked for by the client
    ],
)
def test_stop_token_text(skip: bool, include: bool, listed: bool, text: str) -> None:
    output, _ = run(
        [*ids_of("Hello"), EOS],
        STOP,
        stop_token_ids=[EOS] if listed else [],
        skip_special_tokens=skip,
        include_stop_str_in_output=include,
    )
    assert (output.text, output.finish_reason, output.stop_reason) == (text, STOP, EOS)
    assert output.token_ids[-1] == EOS


def test_ordinary_stop_token() -> None:
    ids = ids_of("4", ".")
    assert run(ids, STOP, stop_token_ids=[ids[-1]])[0].text == "4"
    assert run(ids, STOP, stop_token_ids=[ids[-1]], include_stop_str_in_output=True)[0].text == "4."


def test_stop_beats_the_limit_on_the_same_token() -> None:
    output, deltas = run(ids_of("a", "b", "END"), LENGTH, stop="END", max_tokens=3)
    assert (output.text, output.finish_reason, output.stop_reason) == ("ab", STOP, "END")
    assert not deltas[-1].stopped_by_text  # the engine has ended the sequence already
    output, _ = run([*ids_of("a", "b"), EOS], STOP, max_tokens=3)
    assert (output.text, output.finish_reason) == ("ab", STOP)


@pytest.mark.parametrize(("last", "end"), [([EOS], STOP), ([], LENGTH)])
def test_cut_character_at_the_end(last: list[int], end: FinishReason) -> None:
    output, deltas = run(ids_of("a", b"\xf0", b"\x9f") + last, end)
    assert output.text == "a\ufffd"
    assert [d.text for d in deltas][:3] == ["a", "", "" if last else "\ufffd"]


def test_prompt_that_ends_in_half_a_character_stays_out() -> None:
    prompt = TOKENIZER.encode("good day ") + ids_of(b"\xe2", b"\x82")
    output, _ = run(ids_of(b"\xac", "x"), prompt=prompt)
    assert output.text == "\ufffdx"


def test_invalid_bytes_are_replaced() -> None:
    assert run(ids_of(b"\xff", b"\xfe", "\\"))[0].text == "\ufffd\ufffd\\"


def test_special_tokens_inside_the_text() -> None:
    ids = [*ids_of("Hi"), 1, EOS]
    assert run(ids, STOP)[0].text == "Hi"
    assert run(ids, STOP, skip_special_tokens=False)[0].text == "Hi<|im_start|>"


def test_stop_in_the_middle_of_an_event_cuts_tokens_and_logprobs() -> None:
    output, deltas = run(ids_of("a", "\n", "b", "c"), group=4, stop="\n")
    assert (output.text, output.token_ids) == ("a", ids_of("a", "\n"))
    assert len(deltas[0].logprobs) == 2
    assert not deltas[0].stopped_by_text


def test_events_after_the_end_are_ignored() -> None:
    output, _ = run(ids_of("END"), None, stop="END")
    assert output.push(OutputEvent("r", 0, tuple(ids_of("a")))) == TextDelta()
    assert (output.text, len(output.token_ids)) == ("", 1)


def test_events_without_tokens() -> None:
    output = SequenceOutput(TOKENIZER, SamplingParams(stop="END"), ids_of("a"))
    assert output.push(OutputEvent("r", 0)) == TextDelta()
    output.push(OutputEvent("r", 0, tuple(ids_of("E"))))
    delta = output.push(OutputEvent("r", 0, finish_reason=FinishReason.ABORT))
    assert (delta.text, delta.finish_reason, delta.stopped_by_text) == ("E", FinishReason.ABORT, False)


def test_sentencepiece_answer_keeps_its_space_after_a_prompt() -> None:
    tokenizer = Tokenizer.from_gguf(sentencepiece())
    answer = tuple(tokenizer.encode("hello world", add_special_tokens=False))
    for prompt, text in ((tokenizer.encode("world"), " hello world"), ([1], "hello world")):
        output = SequenceOutput(tokenizer, SamplingParams(), prompt)
        output.push(OutputEvent("r", 0, answer, finish_reason=LENGTH))
        assert output.text == text


@settings(max_examples=300)
@given(
    st.lists(st.sampled_from(sorted(ID_OF.values())), max_size=30),
    st.lists(st.text(alphabet="abc \n世界é", min_size=1, max_size=3), max_size=3),
    st.integers(0, 5),
    st.booleans(),
)
def test_text_is_the_decoded_tokens_up_to_the_stop(
    ids: list[int], stop: list[str], min_tokens: int, skip: bool
) -> None:
    if not ids:
        return
    output, _ = run(ids, stop=stop, min_tokens=min_tokens, skip_special_tokens=skip)
    text = TOKENIZER.decode(output.token_ids, skip_special_tokens=skip)
    if output.finish_reason is STOP:
        assert text.startswith(output.text + str(output.stop_reason))
        assert len(output.token_ids) >= min(min_tokens, len(ids))
    else:
        assert output.text == text
        assert len(output.token_ids) == len(ids)
        assert min_tokens or not any(s in text for s in stop)
