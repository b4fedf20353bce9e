"""`octavo run MODEL [PROMPT]`: one answer, or a chat in the terminal that streams."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import click

from octavo.cli.options import (
    GroupedCommand,
    engine_options,
    option,
    sampling_options,
    take_engine_options,
    take_sampling,
)
from octavo.errors import ConfigError, EngineError, RequestError
from octavo.request import FinishReason, SamplingParams

if TYPE_CHECKING:
    from octavo.llm import LLM
    from octavo.offline import Job

# Where a model's authors recommend nothing: careful sampling, which small models need.
FALLBACK_SAMPLING = {"temperature": 0.2, "top_p": 0.9}
CHAT = "Chat"


@click.command(cls=GroupedCommand)
@click.argument("model")
@click.argument("prompt", required=False)
@option("--system", metavar="TEXT", group=CHAT, help="System message that opens the conversation.")
@option("--raw", is_flag=True, group=CHAT, help="Continue PROMPT as plain text, without the chat template.")
@option("--stats", is_flag=True, group=CHAT, help="Print tokens and tokens/s after each answer, on stderr.")
@sampling_options
@engine_options
def run(model: str, prompt: str | None, system: str | None, raw: bool, stats: bool, **values: Any) -> int:
    """Answer PROMPT, or chat in the terminal when there is none.

    PROMPT - (or no PROMPT and a pipe) reads the prompt from stdin. In a chat, Ctrl-C stops the answer; Ctrl-C at
    the prompt twice, Ctrl-D or /exit ends the chat; /reset forgets the conversation.
    """
    fields = take_sampling(values)
    options = take_engine_options(values)
    if raw and system:
        raise ConfigError("--system needs the chat template: it does not go with --raw")
    interactive = prompt is None and sys.stdin.isatty()
    if prompt == "-" or (prompt is None and not interactive):
        prompt = sys.stdin.read().rstrip("\n")
    if prompt is not None and not prompt:
        raise ConfigError("the prompt is empty")

    from octavo.assemble import assemble
    from octavo.llm import LLM, sampling_defaults
    from octavo.progress import StageProgress

    with StageProgress() as progress:
        assembly = assemble(model, options, progress=progress)
    recommended = sampling_defaults(assembly.model.generation_config) or FALLBACK_SAMPLING
    params = SamplingParams(**{"max_tokens": None, **recommended, **fields})
    with LLM(assembly) as llm:
        chat = _Chat(llm, params, system=system, raw=raw or _has_no_template(llm), stats=stats)
        if interactive:
            return chat.loop()
        assert prompt is not None
        stopped = not chat.answer(prompt)
        return 130 if stopped else 0


def _has_no_template(llm: LLM) -> bool:
    return llm.assembly.chat_template is None and llm.get_tokenizer().chat_template is None


class _Chat:
    """A conversation: its messages so far and how to go on."""

    def __init__(self, llm: LLM, params: SamplingParams, *, system: str | None, raw: bool, stats: bool) -> None:
        self._llm = llm
        self._params = params
        self._raw = raw
        self._stats = stats
        self._opening = [{"role": "system", "content": system}] if system else []
        self._messages: list[dict[str, Any]] = list(self._opening)

    def answer(self, prompt: str) -> bool:
        """Streams the answer to stdout; False if Ctrl-C cut it short. The exchange joins the conversation."""
        if self._raw:
            job = self._llm.prompt_job(prompt, self._params)
        else:
            messages = [*self._messages, {"role": "user", "content": prompt}]
            job = self._llm.chat_job(messages, self._params)
            self._messages = messages
        complete = self._stream(job)
        if not self._raw:
            self._messages.append({"role": "assistant", "content": job.outputs[0].text})
        return complete

    def _stream(self, job: Job) -> bool:
        from octavo.interrupt import catch_interrupt

        start = time.monotonic()
        with catch_interrupt() as interrupt:
            steps = self._llm.driver.steps([job])
            for news in steps:
                click.echo("".join(item.text for item in news if item.index == 0), nl=False)
                if interrupt.requested:
                    steps.close()
                    break
        output = job.outputs[0]
        if not output.text.endswith("\n"):
            click.echo()
        if output.finish_reason is FinishReason.ERROR:
            raise EngineError("the answer ended with an error; see the message above")
        if self._stats:
            seconds, count = time.monotonic() - start, len(output.token_ids)
            click.echo(f"{count} tokens in {seconds:.2f} s ({count / max(seconds, 1e-9):.1f} tok/s)", err=True)
        return not interrupt.requested

    def loop(self) -> int:
        """Reads prompts from the terminal until the user leaves."""
        import readline  # noqa: F401 - gives input() its editing and history

        click.echo(
            f"{self._llm.assembly.model.name}. Ctrl-C stops an answer, Ctrl-D leaves, /reset starts anew.", err=True
        )
        interrupts = 0
        while interrupts < 2:
            try:
                line = input("> ").strip()
            except EOFError:
                click.echo()
                return 0
            except KeyboardInterrupt:
                interrupts += 1
                click.echo("\nCtrl-C again, Ctrl-D or /exit to leave" if interrupts < 2 else "", err=True)
                continue
            interrupts = 0
            if line in ("/exit", "/quit", "/bye"):
                return 0
            if line == "/reset":
                self._messages = list(self._opening)
            elif line:
                self._answer_or_explain(line)
        return 130

    def _answer_or_explain(self, line: str) -> None:
        try:
            self.answer(line)
        except RequestError as error:
            hint = " (/reset starts a new conversation)" if error.code == "context_length_exceeded" else ""
            click.echo(f"octavo: {error}{hint}", err=True)
