"""Models, one file per architecture, each with a `forward(ops, weights, spec)` written against the op set."""

from __future__ import annotations

import importlib
from typing import Any

from octavo.errors import UnsupportedError

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")


def forward_of(architecture: str) -> Any:
    """The `forward` of an architecture. Raises UnsupportedError naming what is there."""
    if architecture not in ARCHITECTURES:
        raise UnsupportedError(f"architecture {architecture!r} is none of {', '.join(ARCHITECTURES)}")
    return importlib.import_module(f"octavo.models.{architecture}").forward
