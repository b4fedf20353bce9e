"""What must be right before a model is loaded: the address to listen on, the certificate, the origins of browsers."""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import Sequence

from octavo.errors import ConfigError
from octavo.units import shorten

VANISHED_AFTER = 60.0
MAX_KEEPIDLE = 32767  # seconds; Linux refuses more


def check_origins(origins: Sequence[str]) -> None:
    """Raises ConfigError unless each is "*" or what a browser sends as Origin."""
    for origin in origins:
        if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s*?#@]{1,255}", origin):
            raise ConfigError(f"cors_origin: {shorten(origin)} is not an origin such as https://example.org, nor *")


def check_certificate(certfile: str | None, keyfile: str | None) -> None:
    """Raises ConfigError, before any model is loaded, if TLS cannot work with these files (PEM)."""
    if certfile is None:
        if keyfile is not None:
            raise ConfigError("ssl_keyfile needs ssl_certfile")
        return

    def refuse_password() -> str:
        raise ConfigError("ssl_keyfile: the private key has a password; give one without")

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile, refuse_password)
    except ssl.SSLError as e:
        raise ConfigError(f"ssl_certfile: no certificate and private key that match: {e.reason or e}") from None
    except OSError as e:
        raise ConfigError(f"ssl_certfile or ssl_keyfile cannot be read: {e.strerror}") from None


def bind_socket(host: str, port: int, vanished_after: float = VANISHED_AFTER) -> socket.socket:
    """A bound socket that does not listen yet. Raises ConfigError, before any model is loaded.

    Connections from which nothing was heard for `vanished_after` seconds, though they owe an acknowledgement, end.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        made = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError, OverflowError) as e:
        raise ConfigError(f"host: cannot resolve {host[:100]!r}: {getattr(e, 'strerror', None) or e}") from None
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _notice_vanished_peers(made, vanished_after)
        made.bind(address)
    except (OSError, OverflowError) as e:
        made.close()
        raise cannot_listen(host, port, e) from None
    return made


def _notice_vanished_peers(listening: socket.socket, seconds: float) -> None:
    """Connections inherit it. By itself Linux would repeat data for a quarter of an hour, and probe after two hours."""
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    whole = min(max(1, int(seconds)), MAX_KEEPIDLE)
    for name, value in (
        ("TCP_USER_TIMEOUT", int(seconds * 1000)),  # for data under way, a closed window included
        ("TCP_KEEPIDLE", whole),  # where none is: probes
        ("TCP_KEEPINTVL", max(1, whole // 6)),
        ("TCP_KEEPCNT", 3),
    ):
        if hasattr(socket, name):
            listening.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def cannot_listen(host: str, port: int, error: Exception) -> ConfigError:
    """The error that says so."""
    return ConfigError(f"port: cannot listen on {host[:100]}:{port}: {getattr(error, 'strerror', None) or error}")
