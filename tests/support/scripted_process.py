"""Engines on a scripted backend for the engine process, which finds them by import path."""

from __future__ import annotations

import logging
import os
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.config import EngineConfig, EngineOptions
from octavo.constraint import StructuredOutputsParams
from octavo.engine import Engine
from octavo.errors import CorruptFileError
from octavo.plan import StepPlan, StepResult
from octavo.text.constraints import CompiledGrammar, ConstraintCompiler
from octavo.text.tokenizer import Tokenizer
from support.live_server import ScriptedModel
from support.script_backend import HashBackend, digest

STEP_SECONDS = 0.005


@dataclass
class FakeModel:
    tokenizer_source: Path
    name: str = "fake"
    generation_config: dict[str, Any] = field(default_factory=lambda: {"temperature": 0.5, "top_k": -7, "x": "y"})


@dataclass
class FakeAssembly:
    engine: Engine
    model: FakeModel
    config: EngineConfig
    report: list[str]
    chat_template: str | None = None

    def close(self) -> None:
        self.engine.backend.close()


def assemble(model: str, options: EngineOptions, *, progress: Any = None, opened: Any) -> FakeAssembly:
    """`model` is a directory with a tokenizer; every answer is "aaa…", 5 ms per token."""
    if progress is not None:
        progress("Loading", 1.0)
    directory = Path(model)
    opened(FakeModel(directory))
    backend = ScriptedModel(vocab_size=Tokenizer.from_directory(directory).vocab_size, delay=STEP_SECONDS)
    config = EngineConfig(max_model_len=options.max_model_len or 256, num_blocks=512)
    grammars = ConstraintCompiler(lambda: Tokenizer.from_directory(directory), backend.vocab_size)
    return FakeAssembly(Engine(config, backend, grammars=grammars), FakeModel(directory), config, ["Weights: none"])


@dataclass
class DeadlyModel(HashBackend):
    """Tokens that depend on the whole context, the seed and the sample; and prompts that are bad for the engine.

    A prompt with the text KILL ends the process when its third token is due; ONCE and a digit before it: only so
    many times. HANG stops the step for ever, the first time.
    """

    directory: Path = Path()
    delay: float = STEP_SECONDS

    def execute(self, plan: StepPlan) -> StepResult:
        time.sleep(self.delay)
        for row in plan.rows:
            spec = row.sample
            if spec is not None and len(spec.token_ids) - spec.num_prompt == 2:
                self._harm(bytes(t for t in spec.token_ids[: spec.num_prompt] if t < 256).decode("latin-1"))
        return super().execute(plan)

    def _harm(self, prompt: str) -> None:
        if "HANG" in prompt and self._first_times(prompt, 1):
            time.sleep(1000)
        if "KILL" in prompt:
            times = re.search(r"ONCE(\d)KILL", prompt)
            if times is None or self._first_times(prompt, int(times[1])):
                os._exit(9)

    def _first_times(self, prompt: str, times: int) -> bool:
        """Over all processes; a file per prompt counts."""
        mark = self.directory / f"seen-{digest(prompt).hex()}"
        seen = len(mark.read_bytes()) if mark.exists() else 0
        mark.write_bytes(b"x" * (seen + 1))
        return seen < times


def deadly(model: str, options: EngineOptions, *, progress: Any = None, opened: Any) -> FakeAssembly:
    """Like `assemble`, with DeadlyModel; a file `refuse` in the directory makes loading fail."""
    directory = Path(model)
    if (directory / "refuse").exists():
        raise CorruptFileError("model.gguf: gone")
    opened(FakeModel(directory))
    backend = DeadlyModel(
        vocab_size=Tokenizer.from_directory(directory).vocab_size, directory=directory, keep_trace=False
    )
    config = EngineConfig(max_model_len=options.max_model_len or 512, num_blocks=512)
    return FakeAssembly(Engine(config, backend), FakeModel(directory), config, ["Weights: none"])


class SlowCompiler(ConstraintCompiler):
    """The first engine process never gets a grammar ready; a file `compiling` tells that it tries."""

    directory: Path

    def compile(self, wish: StructuredOutputsParams) -> CompiledGrammar:
        mark = self.directory / "compiling"
        if not mark.exists():
            mark.touch()
            time.sleep(1000)
        return super().compile(wish)


def slow_grammars(model: str, options: EngineOptions, *, progress: Any = None, opened: Any) -> FakeAssembly:
    """Like `assemble`, with a SlowCompiler."""
    made = assemble(model, options, progress=progress, opened=opened)
    compiler = made.engine.grammars = SlowCompiler(
        lambda: Tokenizer.from_directory(Path(model)), made.engine.backend.capabilities.vocab_size
    )
    compiler.directory = Path(model)
    return made


def crowded(model: str, options: EngineOptions, *, progress: Any = None, opened: Any) -> FakeAssembly:
    """Like `deadly`, but quick, and with so few blocks that sequences are preempted all the time."""
    directory = Path(model)
    opened(FakeModel(directory))
    backend = DeadlyModel(
        vocab_size=Tokenizer.from_directory(directory).vocab_size, directory=directory, keep_trace=False, delay=0.001
    )
    config = EngineConfig(
        max_model_len=options.max_model_len or 512, num_blocks=96, max_num_seqs=12, max_num_batched_tokens=64
    )
    grammars = ConstraintCompiler(lambda: Tokenizer.from_directory(directory), backend.vocab_size)
    return FakeAssembly(Engine(config, backend, grammars=grammars), FakeModel(directory), config, ["Weights: none"])


def talkative(model: str, options: EngineOptions, *, progress: Any = None, opened: Any) -> FakeAssembly:
    logging.getLogger("octavo").warning("several\nlines")
    return assemble(model, options, progress=progress, opened=opened)


def corrupt(model: str, options: EngineOptions, *, progress: Any = None, opened: Any) -> FakeAssembly:
    raise CorruptFileError("model.gguf: tensor blk.0 ends after the file")


def broken(model: str, options: EngineOptions, *, progress: Any = None, opened: Any) -> FakeAssembly:
    raise RuntimeError("surprise")


def vanish(model: str, options: EngineOptions, *, progress: Any = None, opened: Any) -> FakeAssembly:
    os._exit(7)
