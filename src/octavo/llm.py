"""Offline use: LLM.generate, LLM.chat and LLM.embed, with vLLM's names, arguments and results."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

from octavo.assemble import Assembly, assemble
from octavo.config import EngineOptions
from octavo.embedding import vector
from octavo.errors import ConfigError, EngineError, RequestError
from octavo.interrupt import catch_interrupt
from octavo.offline import Job, OfflineDriver
from octavo.request import Pooling, SamplingParams
from octavo.results import (
    BeamSearchOutput,
    BeamSearchParams,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    RequestOutput,
    beam_search_output,
)
from octavo.units import shorten

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.progress import Progress

    from octavo.text.tokenizer import Tokenizer

Prompt = str | Mapping[str, Any]
"""Text, {"prompt": text} or {"prompt_token_ids": [...]}; the mappings may add "cache_salt"."""

Messages = list[dict[str, Any]]

_PROMPT_KEYS = {"prompt", "prompt_token_ids", "cache_salt"}
_ALIASES = {"gpu_memory_utilization": "memory_utilization", "kv_cache_memory_bytes": "kv_cache_memory"}
# vLLM's, and true or pointless here: no model brings code, and there is no graph to capture.
_WITHOUT_EFFECT = {"trust_remote_code", "enforce_eager", "disable_log_stats"}
_SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def options_from(arguments: Mapping[str, Any]) -> EngineOptions:
    """Keyword arguments of LLM as EngineOptions. Raises ConfigError that names an unknown one."""
    known = [f.name for f in dataclasses.fields(EngineOptions)]
    values = {_ALIASES.get(name, name): v for name, v in arguments.items() if name not in _WITHOUT_EFFECT}
    for name in values.keys() - set(known):
        near = difflib.get_close_matches(name, known, n=1)
        raise ConfigError(f"unknown argument {shorten(name)}" + (f"; did you mean {near[0]}?" if near else ""))
    return EngineOptions(**values)


class LLM:
    """A model in this process, for lists of prompts.

    `model` is an alias, a .gguf file, a directory or a Hugging Face repository id (or an Assembly
    that was built before); keyword arguments are the flags of `octavo serve` (see EngineOptions).
    One thread at a time may generate; others wait. Usable as a context manager.
    """

    def __init__(
        self, model: str | Assembly = "smollm2-135m", *, use_tqdm_on_load: bool = True, **options: Any
    ) -> None:
        if isinstance(model, Assembly):
            if options:
                raise ConfigError("an Assembly is already configured: pass no options with it")
            self.assembly = model
        else:
            engine_options = options_from(options)
            with _load_progress(use_tqdm_on_load) as progress:
                self.assembly = assemble(model, engine_options, progress=progress)
        self.engine = self.assembly.engine
        self.driver = OfflineDriver(self.engine, self.assembly.tokenizer)
        self._ids = itertools.count()
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Gives back the model's memory; the LLM cannot be used afterwards."""
        self.assembly.close()

    def get_tokenizer(self) -> Tokenizer:
        tokenizer = self.assembly.tokenizer
        if tokenizer is None:
            raise RequestError("the model has no tokenizer: give prompts as prompt_token_ids", param="prompt")
        return tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's authors recommend (generation_config.json), else the defaults of SamplingParams."""
        return SamplingParams(**sampling_defaults(self.assembly.model.generation_config))

    # ------------------------------------------------------------------ generate

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Completes every prompt; results come in the order of the prompts.

        `sampling_params` is one for all or one per prompt. All prompts are checked before anything
        runs: RequestError names the first bad one. Ctrl-C raises KeyboardInterrupt after the current
        step; the LLM stays usable.
        """
        many = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        params = self._params_for(len(many), sampling_params)
        if priority is not None and len(priority) != len(many):
            raise RequestError(f"{len(priority)} priorities for {len(many)} prompts", param="priority")
        with self._lock:
            jobs = []
            for number, (prompt, one) in enumerate(zip(many, params, strict=True)):
                with _numbered(number, len(many)):
                    jobs.append(self.prompt_job(prompt, one, priority=priority[number] if priority else 0))
            return self._run(jobs, use_tqdm)

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, *, use_tqdm: bool = False
    ) -> list[BeamSearchOutput]:
        """The `beam_width` most probable continuations of every prompt, best first (names and shapes are vLLM's).

        The same as `generate` with `use_beam_search` in SamplingParams, which has more to set.
        """
        results = self.generate(prompts, params.sampling_params(), use_tqdm=use_tqdm)
        return [beam_search_output(result) for result in results]

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation, or each of a list of them, through the model's chat template."""
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        params = self._params_for(len(conversations), sampling_params)
        with self._lock:
            jobs = []
            for number, (conversation, one) in enumerate(zip(conversations, params, strict=True)):
                with _numbered(number, len(conversations)):
                    job = self.chat_job(
                        conversation,  # type: ignore[arg-type]
                        one,
                        chat_template=chat_template,
                        add_generation_prompt=add_generation_prompt,
                        continue_final_message=continue_final_message,
                        tools=tools,
                        chat_template_kwargs=chat_template_kwargs,
                    )
                    jobs.append(job)
            return self._run(jobs, use_tqdm)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: str = "last",
        normalize: bool = True,
        use_tqdm: bool = True,
    ) -> list[EmbeddingRequestOutput]:
        """The embedding of every prompt: its tokens' final hidden states, pooled ("last" or "mean").

        With `normalize` of length 1. RequestError for a bad prompt, EngineError if one could not be computed.
        """
        if pooling not in list(Pooling):
            raise RequestError("must be 'last' or 'mean'", param="pooling")
        many = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        params = SamplingParams(max_tokens=0, pooling=Pooling(pooling))
        with self._lock:
            jobs = []
            for number, prompt in enumerate(many):
                with _numbered(number, len(many)):
                    jobs.append(self.prompt_job(prompt, params))
            self._run(jobs, use_tqdm)
        return [_embedded(job, normalize) for job in jobs]

    def chat_job(
        self,
        messages: Messages,
        params: SamplingParams,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> Job:
        """One conversation as a job for `driver.steps`, which streams its answer. Raises RequestError."""
        from octavo.text.chat import render_chat

        tokenizer = self.get_tokenizer()
        token_ids = render_chat(
            tokenizer,
            messages,
            add_generation_prompt=add_generation_prompt and not continue_final_message,
            continue_final_message=continue_final_message,
            chat_template=chat_template or self.assembly.chat_template,
            tools=tools,
            template_kwargs=chat_template_kwargs,
        )
        return self._job(tokenizer.decode(token_ids, skip_special_tokens=False), token_ids, params)

    def prompt_job(self, prompt: Prompt, params: SamplingParams, *, priority: int = 0) -> Job:
        """One prompt as a job for `driver.steps`. Raises RequestError."""
        text, token_ids, salt = self._read_prompt(prompt)
        return self._job(text, token_ids, params, salt, priority)

    # ------------------------------------------------------------------ parts

    def _params_for(
        self, num_prompts: int, params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        if params is None:
            params = self.get_default_sampling_params()
        if isinstance(params, SamplingParams):
            return [params] * num_prompts
        if len(params) != num_prompts:
            raise RequestError(f"{len(params)} sampling_params for {num_prompts} prompts", param="sampling_params")
        return list(params)

    def _read_prompt(self, prompt: Prompt) -> tuple[str | None, list[int], str]:
        """(text or None, token ids, cache salt) of one prompt in any of its forms."""
        if isinstance(prompt, str):
            return prompt, self.get_tokenizer().encode(prompt), ""
        if not isinstance(prompt, Mapping) or ("prompt" in prompt) == ("prompt_token_ids" in prompt):
            raise RequestError('must be text, {"prompt": ...} or {"prompt_token_ids": [...]}', param="prompt")
        if unknown := prompt.keys() - _PROMPT_KEYS:
            raise RequestError(f"has an unknown key {shorten(str(min(unknown)))}", param="prompt")
        salt = prompt.get("cache_salt") or ""
        if "prompt" in prompt:
            return prompt["prompt"], self.get_tokenizer().encode(prompt["prompt"]), salt
        return None, list(prompt["prompt_token_ids"]), salt

    def _job(
        self, text: str | None, token_ids: list[int], params: SamplingParams, salt: str = "", priority: int = 0
    ) -> Job:
        tokenizer = self.assembly.tokenizer
        request = self.engine.make_request(
            str(next(self._ids)),
            token_ids,
            params,
            eos_token_ids=tokenizer.eos_token_ids if tokenizer else frozenset(),
            cache_salt=salt,
            priority=priority,
        )
        return self.driver.job(request, text)

    def _run(self, jobs: list[Job], use_tqdm: bool) -> list[RequestOutput]:
        with catch_interrupt() as interrupt, _run_progress(use_tqdm, len(jobs)) as bar:
            done, steps = set[str](), self.driver.steps(jobs)
            for news in steps:
                done.update(item.job.request.request_id for item in news if item.job.finished)
                bar.update(len(done), sum(item.num_tokens for item in news))
                if interrupt.requested:
                    steps.close()  # aborts what is unfinished
                    raise KeyboardInterrupt
        return [self.driver.result(job) for job in jobs]


def _embedded(job: Job, normalize: bool) -> EmbeddingRequestOutput:
    request = job.request
    if job.embedding is None:
        raise EngineError(f"request {request.request_id} ended with an error: {job.error}")
    output = EmbeddingOutput(vector(job.embedding, normalize=normalize).tolist())
    return EmbeddingRequestOutput(request.request_id, output, request.prompt_token_ids, True, job.num_cached)


def sampling_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling fields of a generation_config.json that SamplingParams knows."""
    values = {name: generation_config[name] for name in _SAMPLING_DEFAULTS if generation_config.get(name) is not None}
    if isinstance(generation_config.get("max_new_tokens"), int):
        values["max_tokens"] = generation_config["max_new_tokens"]
    return values


@contextmanager
def _numbered(number: int, total: int) -> Iterator[None]:
    """A request error among many prompts says which one."""
    try:
        yield
    except RequestError as error:
        where = f"prompt {number}: " if total > 1 else ""
        raise RequestError(f"{where}{error.message}", param=error.param, code=error.code) from error


# ---------------------------------------------------------------------- progress


class _Bar:
    """Requests done and output tokens per second, on stderr."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress = progress
        self._task = progress.add_task("Generating", total=total, rate="") if progress else None
        self._num_tokens = 0
        self._start = time.monotonic()

    def update(self, num_done: int, num_new_tokens: int) -> None:
        if self._progress is None or self._task is None:
            return
        self._num_tokens += num_new_tokens
        seconds = max(time.monotonic() - self._start, 1e-6)
        self._progress.update(self._task, completed=num_done, rate=f"{self._num_tokens / seconds:,.0f} tok/s")


@contextmanager
def _run_progress(enabled: bool, total: int) -> Iterator[_Bar]:
    if not enabled:
        yield _Bar(None, total)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"))
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as progress:
        yield _Bar(progress, total)


@contextmanager
def _load_progress(enabled: bool) -> Iterator[Any]:
    if not enabled:
        yield None
        return
    from octavo.progress import StageProgress

    with StageProgress() as progress:
        yield progress
