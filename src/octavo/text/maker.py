"""Which tokenizer the options ask for. Light to import: the tokenizer itself is read when it is made."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.config import EngineOptions
from octavo.errors import ConfigError
from octavo.units import shorten

if TYPE_CHECKING:
    from octavo.text.tokenizer import Tokenizer


def tokenizer_maker(source: Path | dict[str, Any], options: EngineOptions) -> Callable[[], Tokenizer] | None:
    """Makes the tokenizer of the options, else that of `source` (a directory or GGUF metadata), on the first call.

    None only for dummy weights that come without one. Raises ConfigError; what is made may raise ModelError.
    """
    if options.tokenizer is not None:
        source = _given(options.tokenizer)
    elif options.load_format == "dummy" and isinstance(source, Path) and not (source / "tokenizer.json").is_file():
        return None

    @cache
    def make() -> Tokenizer:
        from octavo.text.tokenizer import Tokenizer

        return Tokenizer.from_directory(source) if isinstance(source, Path) else Tokenizer.from_gguf(source)

    return make


def _given(value: str) -> Path | dict[str, Any]:
    path = Path(value).expanduser()
    if path.is_dir():
        return path
    if path.suffix.lower() == ".gguf" and path.is_file():
        from octavo.weights.gguf import read_gguf

        return read_gguf(path).metadata
    raise ConfigError(f"tokenizer: {shorten(value, 200)} is neither a directory nor a .gguf file")
