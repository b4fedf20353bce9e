"""One live server for most tests of the HTTP layer; the tests fill its script."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.live_server import LiveServer, live_server


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live_server(tmp_path_factory.mktemp("tokenizer")) as live:
        yield live


@pytest.fixture
def live(shared_server: LiveServer) -> Iterator[LiveServer]:
    """The shared server; after each test nothing may be in flight."""
    yield shared_server
    shared_server.model.gate.set()
    shared_server.model.delay = 0.0
    shared_server.model.row_error = None
    shared_server.wait_until(lambda: shared_server.idle)
