"""Clients that leave (C169, C170, C091), and what the metrics say of them and of everyone else (C175, C176)."""

from __future__ import annotations

import asyncio
import ctypes
import socket
import struct
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.live_server import LiveServer, live_server

from octavo.events import OutputEvent
from octavo.server.client import MAX_PENDING, RequestHandle
from octavo.server.listen import bind_socket

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LONG = {"max_tokens": 200, "ignore_eos": True}


def wait_for_data(connection: socket.socket, what: bytes) -> None:
    data = b""
    while what not in data:
        part = connection.recv(65536)
        assert part, data
        data += part


@pytest.mark.parametrize("fields", [{}, {"n": 8}, {"prompt": ["p1", "p2", "p3"]}])
def test_leaving_a_stream(live: LiveServer, fields: dict[str, Any]) -> None:
    """C169, C091: all of it ends, also samples that still wait."""
    live.model.delay = 0.005
    before = live.engine.stats().num_generated_tokens
    with live.send_raw(COMPLETIONS, {"prompt": "leave", **LONG, "stream": True, **fields}) as connection:
        wait_for_data(connection, b"data: ")
    live.wait_until(lambda: live.idle)
    assert live.engine.stats().num_generated_tokens - before < 8 * 200
    live.check_idle_and_live()


@pytest.mark.parametrize("fields", [{}, {"n": 4}, {"prompt": ["p1", "p2", "p3"]}])
def test_leaving_a_plain_request(live: LiveServer, fields: dict[str, Any]) -> None:
    """C170: nothing was sent yet, and still it is noticed."""
    live.model.delay = 0.005
    with live.send_raw(COMPLETIONS, {"prompt": "leave plain", **LONG, **fields}):
        live.wait_until(lambda: live.engine.scheduler.running)
    begun = live.engine.stats().num_steps
    live.wait_until(lambda: live.idle)
    assert live.engine.stats().num_steps - begun < 150
    live.check_idle_and_live()


def vanish(connection: socket.socket) -> None:
    """From now on the kernel drops what arrives here before TCP sees it: no acknowledgement, no FIN, no reset."""
    drop_all = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # BPF: return 0 bytes of the packet
    program = struct.pack("HP", 1, ctypes.addressof(drop_all))
    connection.setsockopt(socket.SOL_SOCKET, 26, program)  # SO_ATTACH_FILTER, which this module does not name


@pytest.mark.skipif(sys.platform != "linux", reason="packet filters on a socket are Linux's")
@pytest.mark.parametrize("stream", [True, False])
def test_vanishing(tmp_path: Path, stream: bool) -> None:
    """C169, half-open: a peer that is gone without a FIN is noticed though the buffers could hold the whole answer."""
    with live_server(tmp_path, vanished_after=1.0) as live:
        live.model.delay = 0.05
        with live.send_raw(COMPLETIONS, {"prompt": "vanish", **LONG, "stream": stream}) as connection:
            live.wait_until(lambda: live.engine.scheduler.running)
            if stream:
                wait_for_data(connection, b"data: ")
            vanish(connection)
            begun = live.engine.stats().num_steps
            live.wait_until(lambda: live.idle, 20)
            assert live.engine.stats().num_steps - begun < 150
        live.model.delay = 0.0
        live.check_idle_and_live()


@pytest.mark.parametrize("seconds", [0.1, 60.0, 86400.0])
def test_patience_with_vanished_peers_can_be_any(seconds: float) -> None:
    """What --write-timeout takes, the system takes."""
    with bind_socket("127.0.0.1", 0, seconds) as listening:
        assert listening.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1


def test_fifty_leave_at_once(live: LiveServer) -> None:
    live.model.delay = 0.005
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
    connections = [live.send_raw(CHAT, body) for _ in range(50)]
    for connection in connections:
        wait_for_data(connection, b"data: ")
        connection.close()
    live.wait_until(lambda: live.idle)
    live.check_idle_and_live()


def test_leaving_with_requests_in_the_pipe(live: LiveServer) -> None:
    """The one that runs ends, and the ones behind it never start."""
    live.model.delay = 0.005
    with live.send_raw(COMPLETIONS, {"prompt": "one", **LONG}) as connection:
        connection.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n" * 2)
        live.wait_until(lambda: live.engine.scheduler.running)
    begun = live.engine.stats().num_steps
    live.wait_until(lambda: live.idle)
    assert live.engine.stats().num_steps - begun < 150


def test_leaving_while_waiting(tmp_path: Path) -> None:
    """A request that was never scheduled leaves the queue."""
    with live_server(tmp_path, max_num_seqs=1) as live:
        live.model.delay = 0.005
        with live.send_raw(COMPLETIONS, {"prompt": "first", **LONG}):
            live.wait_until(lambda: live.engine.scheduler.running)
            with live.send_raw(COMPLETIONS, {"prompt": "second", **LONG, "stream": True}):
                live.wait_until(lambda: live.engine.scheduler.waiting)
            live.wait_until(lambda: not live.engine.scheduler.waiting)
            assert live.engine.scheduler.running
        live.check_idle_and_live()


def test_counts_by_reason(tmp_path: Path) -> None:
    """C175: 5 aborted, 3 cut, 2 stopped, 1 failed: the counters and the histogram say so."""
    with live_server(tmp_path) as live:
        live.model.delay = 0.002
        for _ in range(5):
            with live.send_raw(COMPLETIONS, {"prompt": "go", **LONG, "stream": True}) as connection:
                wait_for_data(connection, b"data: ")
            live.wait_until(lambda: live.idle)
        live.model.delay = 0.0
        for _ in range(3):
            live.complete(prompt="cut", max_tokens=3)
        live.script("stop", ["Hello", "<|im_end|>"])
        live.complete(prompt="stop")
        live.complete(prompt="stop strings", stop="aa", n=2)
        live.model.row_error = lambda row: "NaN"
        assert live.post(COMPLETIONS, {"prompt": "bad"}).status_code == 500
        live.model.row_error = None
        reasons = {"abort": 5, "length": 3, "stop": 2, "error": 1}
        for reason, count in reasons.items():
            assert live.metric(f'octavo_request_success_total{{finished_reason="{reason}"') == count
        assert live.metric("octavo_e2e_request_latency_seconds_count") == 11
        assert live.metric("octavo_time_to_first_token_seconds_count") == 10
        assert live.metric("octavo_prompt_tokens_total") == 5 * 2 + 3 * 3 + 4 + 12 + 3
        stats = live.engine.stats()
        assert live.metric("octavo_prompt_tokens_computed_total") == stats.num_prompt_tokens
        assert live.metric("octavo_num_requests_running") == 0
        assert live.metric("octavo_kv_cache_usage_perc") == 0
        assert live.metric("octavo_num_preemptions_total") == 0


def test_format_and_monotony(tmp_path: Path) -> None:
    """C176: scraped under load, the text parses, counters never fall, buckets add up; labels are escaped."""
    name = 'odd"name\\with\nall'
    with live_server(tmp_path, settings={"model_name": name}) as live:
        live.model.delay = 0.001
        threads = [
            threading.Thread(target=lambda: live.post(COMPLETIONS, {"model": name, "prompt": "m", "max_tokens": 100}))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        last: dict[Any, float] = {}
        while any(thread.is_alive() for thread in threads):
            response = live.http.get(f"{live.url}/metrics")
            assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
            for family in text_string_to_metric_families(response.text):
                for sample in family.samples:
                    assert sample.labels["model_name"] == name
                    if family.type in ("counter", "histogram"):
                        key = (sample.name, *sorted(sample.labels.items()))
                        assert sample.value >= last.get(key, 0.0)
                        last[key] = sample.value
            time.sleep(0.01)
        buckets = {k: v for k, v in last.items() if k[0] == "octavo_inter_token_latency_seconds_bucket"}
        count = next(v for k, v in last.items() if k[0] == "octavo_inter_token_latency_seconds_count")
        assert max(buckets.values()) == count


def test_idle_uses_no_cpu(live: LiveServer) -> None:
    """C179: the engine's thread blocks while there is nothing to do."""
    live.complete(prompt="before", max_tokens=2)
    live.wait_until(lambda: live.idle)
    steps = live.model.num_steps
    thread = live.client._thread.native_id
    used = []
    for _ in range(2):
        with open(f"/proc/self/task/{thread}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        used.append(int(fields[11]) + int(fields[12]))
        time.sleep(0.3)
    assert used[1] - used[0] <= 1  # in ticks of 10 ms
    assert live.model.num_steps == steps


def test_falling_behind_before_the_request_takes_notice() -> None:
    """Events may pile up between the engine's admission and the first look; they are given up all the same."""

    async def fall_behind(num: int) -> bool:
        handle = RequestHandle(["r"], lambda handle: None)
        gone: list[bool] = []
        for _ in range(num):
            handle.put(OutputEvent("r", 0, (1,)))
        handle.watch_overflow(lambda: gone.append(True))
        return bool(gone)

    assert asyncio.run(fall_behind(MAX_PENDING + 1)) and not asyncio.run(fall_behind(MAX_PENDING))
