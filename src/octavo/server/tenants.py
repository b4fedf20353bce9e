"""Tenants: who asks, and the salt that keeps their cached prefixes apart."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import secrets
import stat
from pathlib import Path

from starlette.types import Scope

from octavo.errors import ConfigError
from octavo.units import shorten

logger = logging.getLogger(__name__)

SECRET_FILE = "cache-salt.key"
SECRET_BYTES = 32
DEFAULT_STATE_DIR = "~/.local/state/octavo"


def tenant_of(scope: Scope) -> str:
    """The name that the envelope gave to whoever sent this; "" where everyone is the same."""
    tenant = scope.get("state", {}).get("tenant", "")
    assert isinstance(tenant, str)
    return tenant


class TenantSalts:
    """The salt of a request: the client's own, kept apart from those of other tenants.

    HMAC-SHA256 with a secret that only this installation knows, so no tenant can compute another's salt,
    whatever it sends as `cache_salt`. Without a secret (no keys, or opted out) the client's salt counts
    as it is.
    """

    def __init__(self, secret: bytes | None) -> None:
        self._secret = secret

    def salt(self, tenant: str, client_salt: str) -> str:
        if self._secret is None:
            return client_salt
        name = tenant.encode()
        message = len(name).to_bytes(8, "little") + name + client_salt.encode("utf-8", "surrogatepass")
        return "tenant " + hmac.new(self._secret, message, hashlib.sha256).hexdigest()


def load_secret(state_dir: str | Path) -> bytes:
    """The secret of this installation; made on first use, readable by its owner only (0600).

    Where nothing can be written (a read-only container) it lives as long as this process, which is as long
    as anything cached. Raises ConfigError for a file that others can read or that is not such a secret.
    """
    path = Path(state_dir).expanduser() / SECRET_FILE
    fresh = secrets.token_bytes(SECRET_BYTES)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Written aside and linked: of several servers that start together one wins, and none reads half a file.
        aside = path.with_name(f"{SECRET_FILE}.{os.getpid()}.{secrets.token_hex(4)}")
        try:
            with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(fresh)
            os.link(aside, path)
        finally:
            aside.unlink(missing_ok=True)
    except FileExistsError:
        return _read(path)
    except OSError as e:
        if path.exists():
            return _read(path)
        logger.warning("state_dir: %s; tenants' cache salts last until this process ends", e.strerror)
    return fresh


def _read(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            secret = file.read(SECRET_BYTES + 1)
    except OSError as e:
        raise ConfigError(f"state_dir: cannot read {shorten(str(path), 200)}: {e.strerror}") from None
    if not stat.S_ISREG(mode) or stat.S_IMODE(mode) & 0o077:
        raise ConfigError(f"state_dir: {shorten(str(path), 200)} must be a file that only its owner can read (0600)")
    if len(secret) != SECRET_BYTES:
        raise ConfigError(
            f"state_dir: {shorten(str(path), 200)} must hold {SECRET_BYTES} bytes; delete it for a new one"
        )
    return secret
