"""Tenants: who asks, and the salt that keeps their cached prefixes apart."""

from __future__ import annotations

from starlette.types import Scope


def tenant_of(scope: Scope) -> str:
    """The name that the envelope gave to whoever sent this; "" where everyone is the same."""
    tenant = scope.get("state", {}).get("tenant", "")
    assert isinstance(tenant, str)
    return tenant
