"""Settings of all tests: no assertion depends on how fast the machine is."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("octavo", deadline=None)
settings.load_profile("octavo")
