"""Octavo: serves language models from a paged KV cache. The names here load what they need on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.constraint import StructuredOutputsParams
    from octavo.engine import Engine
    from octavo.llm import LLM
    from octavo.request import Request, SamplingParams
    from octavo.results import BeamSearchParams

__version__ = "0.1.0"

__all__ = ["LLM", "BeamSearchParams", "Engine", "Request", "SamplingParams", "StructuredOutputsParams", "__version__"]

_HOMES = {
    "LLM": "octavo.llm",
    "BeamSearchParams": "octavo.results",
    "Engine": "octavo.engine",
    "Request": "octavo.request",
    "SamplingParams": "octavo.request",
    "StructuredOutputsParams": "octavo.constraint",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
