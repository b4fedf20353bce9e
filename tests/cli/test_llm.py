"""LLM over scripted backends: order, shapes, limits, interruption."""

from __future__ import annotations

import math
import os
import signal
import threading
from typing import Any

import pytest
from support.fake_assembly import EOS, VOCAB_SIZE, byte_tokenizer, fake_assembly, ids_of
from support.run import check_idle
from support.script_backend import HashBackend, ScriptBackend

from octavo import LLM, BeamSearchParams, SamplingParams
from octavo.config import EngineOptions
from octavo.errors import ConfigError, ContextLengthError, EngineError, RequestError
from octavo.llm import options_from, sampling_defaults
from octavo.plan import StepPlan, StepResult

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def make(**arguments: Any) -> LLM:
    return LLM(fake_assembly(**arguments))


def script(text: str, **arguments: Any) -> LLM:
    return make(backend=ScriptBackend(vocab_size=VOCAB_SIZE, script=ids_of(text), end_id=EOS), **arguments)


def generate(llm: LLM, prompts: Any, params: Any = GREEDY, **arguments: Any) -> Any:
    return llm.generate(prompts, params, use_tqdm=False, **arguments)


def test_results_come_in_the_order_of_the_prompts() -> None:
    llm = make()
    prompts = [f"prompt number {n}" * (1 + n % 3) for n in range(20)]
    params = [SamplingParams(temperature=0, max_tokens=1 + (7 * n) % 5, ignore_eos=True) for n in range(20)]
    results = generate(llm, prompts, params)
    assert [r.prompt for r in results] == prompts
    assert [len(r.outputs[0].token_ids) for r in results] == [p.max_tokens for p in params]
    assert all(r.finished and r.outputs[0].finish_reason == "length" for r in results)
    for prompt, result in zip(prompts, results, strict=True):
        assert result.prompt_token_ids == ids_of(prompt)
    check_idle(llm.engine)


def test_a_prompt_alone_gives_the_same_as_among_others() -> None:
    together = generate(make(), [f"p{n}" for n in range(12)])
    for n, result in enumerate(together):
        assert generate(make(), f"p{n}")[0].outputs[0].token_ids == result.outputs[0].token_ids


@pytest.mark.parametrize("form", ["text", {"prompt": "text"}, {"prompt_token_ids": ids_of("text")}])
def test_forms_of_a_prompt(form: Any) -> None:
    expected = generate(make(), "text")[0].outputs[0].token_ids
    assert generate(make(), form)[0].outputs[0].token_ids == expected
    assert generate(make(), [form])[0].outputs[0].token_ids == expected


def test_text_is_that_of_the_tokens() -> None:
    result = generate(script("Paris."), "x", SamplingParams(temperature=0, max_tokens=50))[0]
    output = result.outputs[0]
    assert (output.text, output.finish_reason, output.token_ids) == ("Paris.", "stop", [*ids_of("Paris."), EOS])
    assert result.request_id == "0"
    assert output.index == 0


def test_stop_string_ends_the_sequence_and_frees_its_blocks() -> None:
    llm = script("one two three")
    output = generate(llm, "x", SamplingParams(temperature=0, max_tokens=50, stop=["two"]))[0].outputs[0]
    assert (output.text, output.finish_reason, output.stop_reason) == ("one ", "stop", "two")
    assert output.token_ids == ids_of("one two")
    check_idle(llm.engine)


def test_samples_of_one_prompt() -> None:
    params = SamplingParams(n=3, seed=5, max_tokens=6, ignore_eos=True)
    result = generate(make(), "x", params)[0]
    assert [o.index for o in result.outputs] == [0, 1, 2]
    assert len({tuple(o.token_ids) for o in result.outputs}) == 3
    alone = generate(make(), "x", SamplingParams(seed=5, max_tokens=6, ignore_eos=True))[0]
    assert alone.outputs[0].token_ids == result.outputs[0].token_ids


def test_logprobs_have_vllms_shape() -> None:
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    result = generate(make(), "hello", params)[0]
    output = result.outputs[0]
    assert len(output.logprobs) == 3
    for token_id, entry in zip(output.token_ids, output.logprobs, strict=True):
        assert next(iter(entry)) == token_id
        assert len(entry) in (2, 3)
        assert all(-50 < value.logprob <= 0 for value in entry.values())
        assert entry[token_id].decoded_token == byte_tokenizer().token_text(token_id)
        assert min(value.rank for value in entry.values()) == 1
    assert output.cumulative_logprob == math.fsum(
        entry[token_id].logprob for token_id, entry in zip(output.token_ids, output.logprobs, strict=True)
    )
    assert result.prompt_logprobs[0] is None
    assert len(result.prompt_logprobs) == len(result.prompt_token_ids)
    for token_id, entry in zip(result.prompt_token_ids[1:], result.prompt_logprobs[1:], strict=True):
        assert token_id in entry


def test_without_logprobs_there_are_none() -> None:
    result = generate(make(), "x")[0]
    assert result.prompt_logprobs is None
    assert result.outputs[0].logprobs is None
    assert result.outputs[0].cumulative_logprob is None


def test_cached_tokens_of_a_second_run() -> None:
    llm, prompt = make(), "a prompt of more than thirty-two bytes, that is"
    assert generate(llm, prompt)[0].num_cached_tokens == 0
    assert generate(llm, prompt)[0].num_cached_tokens >= 32
    salted = generate(llm, {"prompt": prompt, "cache_salt": "mine"})[0]
    assert salted.num_cached_tokens == 0


def test_more_prompts_than_the_queue_holds() -> None:
    llm = make(max_num_seqs=2, max_num_waiting=1)
    results = generate(llm, [f"p{n}" for n in range(30)])
    assert len(results) == 30
    assert all(r.finished for r in results)
    check_idle(llm.engine)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings(pooling: str) -> None:
    llm = LLM(fake_assembly())
    prompts = ["Hello", {"prompt_token_ids": ids_of("you there")}, "Hello"]
    outputs = llm.embed(prompts, pooling=pooling, use_tqdm=False)
    assert [len(o.outputs.embedding) for o in outputs] == [4, 4, 4]
    assert [o.prompt_token_ids for o in outputs] == [ids_of("Hello"), ids_of("you there"), ids_of("Hello")]
    assert outputs[0].outputs == outputs[2].outputs != outputs[1].outputs
    for output in outputs:
        assert output.finished and math.hypot(*output.outputs.embedding) == pytest.approx(1)
    (raw,) = llm.embed("Hello", pooling=pooling, normalize=False, use_tqdm=False)
    length = math.hypot(*raw.outputs.embedding)
    assert [x / length for x in raw.outputs.embedding] == pytest.approx(outputs[0].outputs.embedding)
    check_idle(llm.engine)


def test_embeddings_refuse_and_fail() -> None:
    llm = LLM(fake_assembly())
    with pytest.raises(RequestError, match="'last' or 'mean'"):
        llm.embed("Hello", pooling="cls")
    with pytest.raises(RequestError, match="prompt 1: "):
        llm.embed(["Hello", {"prompt_token_ids": [VOCAB_SIZE]}])
    broken = LLM(fake_assembly(HashBackend(vocab_size=VOCAB_SIZE, row_error=lambda row: "NaN")))
    with pytest.raises(EngineError, match="NaN"):
        broken.embed("Hello", use_tqdm=False)


def test_chat_renders_the_template() -> None:
    llm = script("Hi!")
    messages = [{"role": "user", "content": "Hello"}]
    result = llm.chat(messages, SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)[0]
    assert result.outputs[0].text == "Hi!"
    assert result.prompt == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"


def test_chat_with_several_conversations() -> None:
    conversations = [[{"role": "user", "content": text}] for text in ("a", "b", "c")]
    results = make().chat(conversations, GREEDY, use_tqdm=False)
    assert [r.prompt.count(text) > 0 for r, text in zip(results, "abc", strict=True)] == [True] * 3


def test_chat_template_of_the_call() -> None:
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    result = make().chat([{"role": "user", "content": "x"}], GREEDY, use_tqdm=False, chat_template=template)[0]
    assert result.prompt == "[x]"


# ---------------------------------------------------------------------------- refusals


def test_bad_prompt_among_many_is_named_and_nothing_runs() -> None:
    backend = HashBackend(vocab_size=VOCAB_SIZE)
    llm = make(backend=backend)
    with pytest.raises(RequestError, match=r"prompt 1: .*token id from 0 to"):
        generate(llm, ["fine", {"prompt_token_ids": [1, VOCAB_SIZE]}])
    assert backend.num_steps == 0


@pytest.mark.parametrize("prompt", [{}, {"prompt": "a", "prompt_token_ids": [1]}, {"prompt": "a", "x": 1}, 7, None])
def test_odd_prompts_are_refused(prompt: Any) -> None:
    with pytest.raises(RequestError):
        generate(make(), [prompt])


def test_prompt_beyond_the_context() -> None:
    with pytest.raises(RequestError, match="600 tokens, but the context holds 512") as caught:
        generate(make(), {"prompt_token_ids": [5] * 600})
    assert caught.value.code == ContextLengthError(1, 1).code


@pytest.mark.parametrize("count", [1, 3])
def test_sampling_params_must_match_the_prompts(count: int) -> None:
    with pytest.raises(RequestError, match=f"{count} sampling_params for 2 prompts"):
        generate(make(), ["a", "b"], [GREEDY] * count)


def test_no_prompts_no_results() -> None:
    assert generate(make(), []) == []


def test_unknown_argument_suggests_the_right_one() -> None:
    with pytest.raises(ConfigError, match="'max_modle_len'; did you mean max_model_len"):
        LLM("any", max_modle_len=5)
    with pytest.raises(ConfigError, match="already configured"):
        LLM(fake_assembly(), threads=1)


def test_vllms_names_of_arguments() -> None:
    assert options_from({"gpu_memory_utilization": 0.5}).memory_utilization == 0.5
    assert options_from({"kv_cache_memory_bytes": 1024}).kv_cache_memory == 1024
    assert options_from({"enforce_eager": True, "trust_remote_code": True}) == EngineOptions()


def test_missing_model_is_an_error_of_one_line() -> None:
    with pytest.raises(Exception, match="no such file") as caught:
        LLM("./no/such/model.gguf")
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------------------- defaults


def test_recommended_sampling_of_the_model() -> None:
    llm = make(generation_config={"temperature": 0.6, "top_p": 0.9, "do_sample": True, "eos_token_id": [2]})
    params = llm.get_default_sampling_params()
    assert (params.temperature, params.top_p, params.max_tokens) == (0.6, 0.9, 16)
    assert sampling_defaults({"max_new_tokens": 5, "top_k": None}) == {"max_tokens": 5}


def test_engine_seed_makes_unseeded_requests_repeatable() -> None:
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    first, second = (
        [r.outputs[0].token_ids for r in generate(make(seed=7), ["a", "a", "b"], params)] for _ in range(2)
    )
    assert first == second
    assert first[0] != first[1]


def test_without_tokenizer_ids_go_in_and_out() -> None:
    llm = make(with_tokenizer=False)
    result = generate(llm, {"prompt_token_ids": [4, 5, 6]}, SamplingParams(temperature=0, max_tokens=4, logprobs=1))[0]
    assert (len(result.outputs[0].token_ids), result.outputs[0].text) == (4, "")
    with pytest.raises(RequestError, match="no tokenizer"):
        generate(llm, "text")


# ---------------------------------------------------------------------------- trouble


class InterruptingBackend(HashBackend):
    """Sends this process a SIGINT in the middle of a step, as Ctrl-C does."""

    interrupt_at = 3

    def execute(self, plan: StepPlan) -> StepResult:
        if self.num_steps == self.interrupt_at:
            os.kill(os.getpid(), signal.SIGINT)
        return super().execute(plan)


def test_interrupt_leaves_the_llm_usable() -> None:
    llm = make(backend=InterruptingBackend(vocab_size=VOCAB_SIZE))
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        generate(llm, ["a" * 40, "b" * 40], SamplingParams(temperature=0, max_tokens=300, ignore_eos=True))
    assert signal.getsignal(signal.SIGINT) is before
    result = generate(llm, "c")[0]
    assert result.outputs[0].token_ids == generate(make(), "c")[0].outputs[0].token_ids
    check_idle(llm.engine)


def test_a_failing_row_ends_only_its_request(caplog: pytest.LogCaptureFixture) -> None:
    bad = ids_of("bad")
    backend = HashBackend(vocab_size=VOCAB_SIZE, row_error=lambda row: "NaN" if row.token_ids == bad else None)
    good, failed = generate(make(backend=backend), ["good", "bad"])
    assert good.outputs[0].finish_reason == "length"
    assert failed.outputs[0].finish_reason == "error"
    assert "NaN" in caplog.text


def test_a_failing_step_ends_its_requests_and_no_others() -> None:
    llm = make(backend=HashBackend(vocab_size=VOCAB_SIZE, fail_steps={0}))
    assert generate(llm, "a")[0].outputs[0].finish_reason == "error"
    assert generate(llm, "a")[0].outputs[0].finish_reason == "length"


def test_two_threads_take_turns() -> None:
    llm = make()
    results: dict[str, Any] = {}

    def work(name: str) -> None:
        results[name] = generate(llm, [name] * 4)

    threads = [threading.Thread(target=work, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name in ("a", "b"):
        assert {tuple(r.outputs[0].token_ids) for r in results[name]} == {
            tuple(generate(make(), name)[0].outputs[0].token_ids)
        }


def test_progress_bar_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    make().generate(["a", "b"], GREEDY)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Generating" in captured.err
    assert "2/2" in captured.err


def test_best_of_returns_the_most_probable_per_token() -> None:
    """C068: all samples are drawn, the n best are returned, best first."""
    common = {"max_tokens": 6, "seed": 3, "ignore_eos": True}
    every = generate(make(), "best", SamplingParams(n=5, logprobs=0, **common))[0]
    best = generate(make(), "best", SamplingParams(n=2, best_of=5, **common))[0]
    ranked = sorted(every.outputs, key=lambda o: -o.cumulative_logprob / 6)
    assert [o.token_ids for o in best.outputs] == [o.token_ids for o in ranked[:2]]
    assert [o.index for o in best.outputs] == [0, 1]
    assert best.outputs[0].logprobs is None
    assert best.num_shared_tokens == 4 * len(ids_of("best"))


def test_beam_search_in_vllms_shape() -> None:
    llm = make()
    params = BeamSearchParams(beam_width=3, max_tokens=5, ignore_eos=True, length_penalty=0.0)
    found, other = llm.beam_search(["beams", {"prompt_token_ids": ids_of("other")}], params)
    assert len(found.sequences) == 3
    for sequence in found.sequences:
        assert sequence.tokens[:5] == ids_of("beams") and len(sequence.tokens) == 10
        assert sequence.text is not None and sequence.text.startswith("beams")
        assert sequence.score == pytest.approx(sequence.cum_logprob)
        assert len(sequence.logprobs) == 5
    sums = [s.cum_logprob for s in found.sequences]
    assert sums == sorted(sums, reverse=True)
    assert other.sequences[0].text is None
    same = generate(
        llm, "beams", SamplingParams(n=3, use_beam_search=True, temperature=0, max_tokens=5, ignore_eos=True)
    )
    assert {tuple(o.token_ids) for o in same[0].outputs} == {tuple(s.tokens[5:]) for s in found.sequences}
    assert same[0].outputs[0].cumulative_logprob == pytest.approx(same[0].outputs[0].score * 5)
    with pytest.raises(RequestError):
        llm.beam_search("x", BeamSearchParams(beam_width=100, max_tokens=5))
    check_idle(llm.engine)
