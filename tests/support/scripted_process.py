"""Engines on a scripted backend for the engine process, which finds them by import path."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.config import EngineConfig, EngineOptions
from octavo.engine import Engine
from octavo.errors import CorruptFileError
from octavo.text.tokenizer import Tokenizer
from support.live_server import ScriptedModel

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


def assemble(model: str, options: EngineOptions, *, progress: Any = None) -> FakeAssembly:
    """`model` is a directory with a tokenizer; every answer is "aaa…", 5 ms per token."""
    if progress is not None:
        progress("Loading", 1.0)
    directory = Path(model)
    backend = ScriptedModel(vocab_size=Tokenizer.from_directory(directory).vocab_size, delay=STEP_SECONDS)
    config = EngineConfig(max_model_len=options.max_model_len or 256, num_blocks=512)
    return FakeAssembly(Engine(config, backend), FakeModel(directory), config, ["Weights: none"])


def corrupt(model: str, options: EngineOptions, *, progress: Any = None) -> FakeAssembly:
    raise CorruptFileError("model.gguf: tensor blk.0 ends after the file")


def broken(model: str, options: EngineOptions, *, progress: Any = None) -> FakeAssembly:
    raise RuntimeError("surprise")


def vanish(model: str, options: EngineOptions, *, progress: Any = None) -> FakeAssembly:
    os._exit(7)
