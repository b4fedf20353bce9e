"""API keys: who may ask, and how much. Only digests are kept, so nothing can log or leak a key."""

from __future__ import annotations

import hashlib
import hmac
import re
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError
from octavo.units import shorten

DEFAULT_NAME = "default"
MAX_FILE_BYTES = 4 * 1024 * 1024
MAX_LIMIT = 2**53

_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
_KEY = re.compile(r"[!-~]{8,512}")
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one key may use; None: no limit. Tokens are those of prompts (cached ones too) and answers."""

    max_concurrency: int | None = None  # requests at a time
    requests_per_minute: int | None = None
    tokens_per_day: int | None = None  # days of UTC
    tokens_total: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """`digest` is the SHA-256 of the key. Requests of one `tenant` share cached prefixes."""

    name: str
    digest: bytes
    tenant: str
    limits: Limits = Limits()


class KeyRing:
    """All keys of a server."""

    def __init__(self, keys: list[Key]) -> None:
        """Raises ConfigError if two entries have the same name or the same key."""
        self.keys = tuple(keys)
        for what in ("name", "digest"):
            seen = [getattr(key, what) for key in keys]
            if len(set(seen)) != len(seen):
                raise ConfigError(f"api_key_file: two entries have the same {'name' if what == 'name' else 'key'}")

    def find(self, presented: bytes) -> Key | None:
        """Takes the same time whichever key it is, and if it is none."""
        digest = hashlib.sha256(presented).digest()
        found = None
        for key in self.keys:
            if hmac.compare_digest(digest, key.digest):
                found = key
        return found


def load_keys(api_key: str | None, path: str | Path | None) -> KeyRing | None:
    """The keys of --api-key and --api-key-file; None if there are none. Raises ConfigError, never with a key in it."""
    keys = []
    if api_key is not None:
        keys.append(Key(name=DEFAULT_NAME, digest=hashlib.sha256(api_key.encode()).digest(), tenant=""))
    if path is not None:
        keys += _read_file(Path(path).expanduser())
    return KeyRing(keys) if keys else None


def _read_file(path: Path) -> list[Key]:
    try:
        with open(path, "rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except OSError as e:
        raise ConfigError(f"api_key_file: cannot read {shorten(str(path))}: {e.strerror}") from None
    if len(raw) > MAX_FILE_BYTES:
        raise ConfigError(f"api_key_file: {shorten(str(path))} has more than {MAX_FILE_BYTES} bytes")
    try:
        content = tomllib.loads(raw.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError):
        # The parser's message may quote a key.
        raise ConfigError(f"api_key_file: {shorten(str(path))} is not valid TOML") from None
    if set(content) != {"keys"} or not isinstance(content["keys"], dict) or not content["keys"]:
        raise ConfigError("api_key_file: expected tables [keys.NAME] and nothing else")
    return [_entry(name, entry) for name, entry in content["keys"].items()]


def _entry(name: str, entry: Any) -> Key:
    where = f"api_key_file: keys.{shorten(name)}"
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{where}: a name has 1 to 64 letters, digits and . _ @ -")
    if not isinstance(entry, dict):
        raise ConfigError(f"{where} is not a table")
    limit_names = [f.name for f in fields(Limits)]
    for field in entry:
        if field not in ("key", "sha256", "tenant", *limit_names):
            raise ConfigError(f"{where}: unknown field {shorten(field)}")
    limits = {}
    for field in limit_names:
        value = entry.get(field)
        if value is not None and not (type(value) is int and 0 <= value <= MAX_LIMIT):
            raise ConfigError(f"{where}.{field} must be an integer of at least 0")
        limits[field] = value
    tenant = entry.get("tenant", name)
    if not (isinstance(tenant, str) and _NAME.fullmatch(tenant)):
        raise ConfigError(f"{where}.tenant: a name has 1 to 64 letters, digits and . _ @ -")
    return Key(name=name, digest=_digest(where, entry), tenant=tenant, limits=Limits(**limits))


def _digest(where: str, entry: dict[str, Any]) -> bytes:
    if ("key" in entry) == ("sha256" in entry):
        raise ConfigError(f"{where} needs either key or sha256")
    if "key" in entry:
        key = entry["key"]
        if not (isinstance(key, str) and _KEY.fullmatch(key)):
            raise ConfigError(f"{where}.key must have 8 to 512 printable ASCII characters and no space")
        return hashlib.sha256(key.encode()).digest()
    digest = entry["sha256"]
    if not (isinstance(digest, str) and _SHA256.fullmatch(digest)):
        raise ConfigError(f"{where}.sha256 must have 64 hexadecimal digits")
    return bytes.fromhex(digest)
