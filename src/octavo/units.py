"""Reads what people write: sizes such as "2GiB"; and quotes it back in bounded length."""

from __future__ import annotations

import re

from octavo.errors import ConfigError

_BINARY = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_SIZE = re.compile(r"\s*(\d{1,18}(?:\.\d{1,9})?)\s*([kmgt]?)(ib|b)?\s*", re.IGNORECASE | re.ASCII)


def shorten(text: str, limit: int = 40) -> str:
    """`text` quoted and cut, so that a message stays one bounded line."""
    return repr(text if len(text) <= limit else text[: limit - 1] + "…")


def parse_bytes(value: int | str, name: str) -> int:
    """A size in bytes: an integer, or text such as "2GiB", "512M" (both binary) or "2GB" (decimal).

    Raises ConfigError that names the setting `name`.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        if value > 0:
            return value
    elif isinstance(value, str) and (match := _SIZE.fullmatch(value)):
        number, prefix, suffix = match[1], match[2].lower(), (match[3] or "").lower()
        unit = _DECIMAL[prefix] if prefix and suffix == "b" else _BINARY[prefix]
        size = int(float(number) * unit) if "." in number else int(number) * unit
        if size > 0:
            return size
    raise ConfigError(
        f"{name}: {shorten(str(value))} is not a size; write for example 2GiB, 512MiB or a number of bytes"
    )
