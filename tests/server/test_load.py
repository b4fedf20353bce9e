"""Many clients at once, some of which leave: everyone who stays gets their own answer, and nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

from support.live_server import MODEL, LiveServer, live_server

CROWD = 40  # requests that wait when the first step begins
WORDS = ("Hello", " red", " green", " blue", "END", "Paris", "mno")


async def ask(live: LiveServer, path: str, body: dict[str, Any], leave: bool) -> bytes | None:
    """The raw answer, or None for a client that leaves after the first bytes (or before any)."""
    reader, writer = await asyncio.open_connection(*live.address)
    content = json.dumps({"model": MODEL, **body}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(content)}\r\n\r\n"
    writer.write(head.encode() + content)
    await writer.drain()
    try:
        if not leave:
            return await reader.read()
        if body["stream"]:
            await reader.read(10)
        return None
    finally:
        writer.close()


def text_of(raw: bytes, stream: bool) -> list[str]:
    """Text per index."""
    head, _, body = raw.partition(b"\r\n\r\n")
    assert b"200 OK" in head, raw[:500]
    if not stream:
        return [c["text"] for c in json.loads(body)["choices"]]
    texts: dict[int, str] = {}
    for line in body.decode().splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return [texts[i] for i in sorted(texts)]


def test_mixed_load(tmp_path: Path) -> None:
    """C032, C169, C170 together, in a pool so small that preemptions happen."""
    rng = random.Random(7)
    with live_server(tmp_path, num_blocks=32, max_num_seqs=16, max_num_batched_tokens=64, admission="greedy") as live:
        live.model.gate.clear()  # until a crowd has come
        jobs = []
        for i in range(200):
            n = rng.choice((1, 1, 1, 3))
            # The crowd stays and writes more than a block, so the pool is too small for it however fast clients are.
            crowd = i < CROWD
            length = 20 if crowd else rng.randrange(1, 20)
            answers = [[rng.choice(WORDS) for _ in range(length)] for _ in range(n)]
            prompt = live.script(f"prompt {i} " + "x" * rng.randrange(60), *([*a, "<|im_end|>"] for a in answers))
            stream, leave = rng.random() < 0.5, not crowd and rng.random() < 0.25
            # Every other prompt goes as token ids.
            given: Any = prompt if i % 2 else live.tokenizer.encode(prompt)
            body = {"prompt": given, "n": n, "stream": stream, "max_tokens": 30}
            jobs.append((body, leave, ["".join(a) for a in answers]))

        async def everyone() -> list[bytes | None]:
            gate = asyncio.Semaphore(50)

            async def one(body: dict[str, Any], leave: bool) -> bytes | None:
                async with gate:
                    return await ask(live, "/v1/completions", body, leave)

            async def open_the_gate() -> None:
                while live.client.num_open < CROWD:
                    await asyncio.sleep(0.001)
                live.model.gate.set()

            _, *answers = await asyncio.gather(open_the_gate(), *(one(body, leave) for body, leave, _ in jobs))
            return answers

        for raw, (body, leave, expected) in zip(asyncio.run(everyone()), jobs, strict=True):
            if not leave:
                assert raw is not None and text_of(raw, body["stream"]) == expected
        live.wait_until(lambda: live.idle)
        assert live.engine.stats().num_preemptions > 0
        live.check_idle_and_live()
        ended = sum(
            live.metric(f'octavo_request_success_total{{finished_reason="{r}"') for r in ("stop", "length", "abort")
        )
        assert ended <= 201 and live.metric('octavo_request_success_total{finished_reason="error"') == 0
        assert live.server._state.num_in_flight == 0
