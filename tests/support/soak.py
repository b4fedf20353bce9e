"""Random clients against a server in a process of its own, while its engine is killed now and then.

Every answer is compared with the one that the same request got alone; at the end nothing may be left behind.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from support.served_program import Program

ANSWER_SECONDS = 90.0  # no request may take longer, whatever happens to the engine
MAX_ERROR_BYTES = 4096

Body = dict[str, Any]


def make_requests(rng: random.Random, model: str, count: int) -> list[tuple[str, Body]]:
    """Of every kind: sampled, greedy, samples, stops, log-probabilities, scoring, forms, chats; half are streamed."""
    shared = "a shared beginning that fills more than one block of the cache, "
    made: list[tuple[str, Body]] = []
    for i in range(count):
        body: Body = {"model": model, "seed": i, "temperature": rng.choice((0, 0.7, 1.2)), "ignore_eos": True}
        body["max_tokens"] = rng.randrange(1, 40)
        text = (shared if rng.random() < 0.5 else "") + f"request {i} " + "x" * rng.randrange(80)
        if rng.random() < 0.3:
            body["messages"] = [{"role": "user", "content": text}]
            made.append(("/v1/chat/completions", body))
            continue
        body["prompt"] = text if rng.random() < 0.8 else [text, text + " too"]
        body |= rng.choice(
            (
                {}, {"n": rng.randrange(2, 5)}, {"n": 2, "best_of": 4}, {"logprobs": 2}, {"stop": ["a", "e", "Hello"]},
                {"prompt_logprobs": 1}, {"presence_penalty": 1.0}, {"echo": True}, {"min_tokens": 3, "stop": ["o"]},
                # New to each engine that is started.
                {"structured_outputs": {"regex": f"[a-f]{{3,{i + 9}}}[xyz]"}, "n": 2},
                {"structured_outputs": {"json": {"enum": [f"{i} apples", i]}}},
            )
        )  # fmt: skip
        made.append(("/v1/completions", body))
    return made


def visible(path: str, answer: Any) -> Any:
    """What must not change: all but ids, times, and what the cache happened to hold."""
    usage = {k: v for k, v in answer["usage"].items() if k != "prompt_tokens_details"}
    return path, answer["choices"], usage


def joined(path: str, frames: list[Any]) -> list[Any]:
    """Text and end per choice of a stream."""
    texts: dict[int, list[Any]] = {}
    for frame in frames:
        assert "error" not in frame, frame
        for choice in frame["choices"]:
            part = texts.setdefault(choice["index"], ["", None])
            part[0] += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            part[1] = choice["finish_reason"] or part[1]
    return [texts[i] for i in sorted(texts)]


class Soak:
    """One run. `report` counts what happened."""

    def __init__(self, served: Program, model: str, *, seed: int, num_requests: int = 40) -> None:
        self.served = served
        self.rng = random.Random(seed)
        self.requests = make_requests(self.rng, model, num_requests)
        self.report: Counter[str] = Counter()
        self.rss: list[tuple[float, int]] = []
        self.url = f"http://127.0.0.1:{served.port}"
        self._expected: list[Any] = []
        self._until = 0.0
        self._kills_wanted = 0

    # ------------------------------------------------------------------ running

    async def run(self, seconds: float, *, num_clients: int = 8, kill_every: float | None = None) -> None:
        async with httpx.AsyncClient(timeout=ANSWER_SECONDS) as http:
            for path, body in self.requests:  # alone
                answer = await http.post(self.url + path, json=body)
                assert answer.status_code == 200, answer.text
                self._expected.append(visible(path, answer.json()))
        self._until = time.monotonic() + seconds
        self._kills_wanted = 2 if kill_every is not None else 0
        async with asyncio.TaskGroup() as group:
            for number in range(num_clients):
                group.create_task(self._client(random.Random(self.rng.random() + number)))
            group.create_task(self._watch())
            if kill_every is not None:
                group.create_task(self._kill(kill_every))

    async def _client(self, rng: random.Random) -> None:
        behaviours = (self._whole, self._stream, self._slow, self._leave, self._half, self._garbage, self._deaf)
        weights = (5, 5, 1, 2, 1, 2, 1)
        async with httpx.AsyncClient(timeout=ANSWER_SECONDS) as http:
            while not self._over:
                (behave,) = rng.choices(behaviours, weights)
                await behave(rng, http)
                self.report[behave.__name__.strip("_")] += 1

    async def _watch(self) -> None:
        while not self._over:
            self.rss.append((time.monotonic(), self.rss_now()))
            await asyncio.sleep(0.5)

    async def _kill(self, seconds: float) -> None:
        """Not faster than answers come, so that a slow machine gets somewhere too."""
        while not self._over:
            answered = self._num_answered
            await asyncio.sleep(seconds * self.rng.uniform(0.7, 1.3))
            while self._num_answered < answered + 10 and not self._over:
                await asyncio.sleep(0.05)
            for child in self.served.children():
                os.kill(child, signal.SIGKILL)
                self.report["kill"] += 1

    @property
    def _num_answered(self) -> int:
        return sum(self.report[name] for name in ("whole", "stream", "slow"))

    @property
    def _over(self) -> bool:
        """The time is up, and the engine was killed often enough."""
        return time.monotonic() >= self._until and self.report["kill"] >= self._kills_wanted

    # ------------------------------------------------------------------ clients

    async def _whole(self, rng: random.Random, http: httpx.AsyncClient) -> None:
        i = rng.randrange(len(self.requests))
        path, body = self.requests[i]
        answer = await http.post(self.url + path, json=body)
        assert answer.status_code == 200, answer.text
        assert visible(path, answer.json()) == self._expected[i], f"another answer than alone: {body}"

    async def _stream(self, rng: random.Random, http: httpx.AsyncClient, pause: float = 0.0) -> None:
        i = rng.choice([i for i, (_, body) in enumerate(self.requests) if "best_of" not in body])
        path, body = self.requests[i]
        raw = b""
        async with http.stream("POST", self.url + path, json={**body, "stream": True}) as answer:
            assert answer.status_code == 200
            async for part in answer.aiter_raw():
                raw += part
                await asyncio.sleep(pause)
        *frames, done = [f.removeprefix("data: ") for f in raw.decode().split("\n\n") if f]
        assert done == "[DONE]"
        _, choices, _ = self._expected[i]
        alone = [[c["text"] if "text" in c else c["message"]["content"], c["finish_reason"]] for c in choices]
        assert joined(path, [json.loads(f) for f in frames]) == alone, f"another stream than alone: {body}"

    async def _slow(self, rng: random.Random, http: httpx.AsyncClient) -> None:
        await self._stream(rng, http, pause=0.03)

    async def _open(self, rng: random.Random, stream: bool) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, bytes]:
        path, body = rng.choice([r for r in self.requests if "best_of" not in r[1]])
        content = json.dumps({**body, "max_tokens": 300, "stream": stream}).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n".encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.served.port)
        return reader, writer, head + content

    async def _leave(self, rng: random.Random, http: httpx.AsyncClient) -> None:
        """After the first bytes, or before any."""
        reader, writer, request = await self._open(rng, rng.random() < 0.5)
        writer.write(request)
        await writer.drain()
        try:
            async with asyncio.timeout(rng.uniform(0, 0.2)):
                await reader.read(100)
        except TimeoutError:
            pass
        finally:
            writer.close()

    async def _half(self, rng: random.Random, http: httpx.AsyncClient) -> None:
        """Leaves in the middle of the request."""
        _, writer, request = await self._open(rng, False)
        writer.write(request[: rng.randrange(len(request))])
        await writer.drain()
        writer.close()

    async def _deaf(self, rng: random.Random, http: httpx.AsyncClient) -> None:
        """Asks for much, reads nothing, and leaves late."""
        _, writer, request = await self._open(rng, True)
        writer.write(request)
        await writer.drain()
        await asyncio.sleep(rng.uniform(0.2, 1.0))
        writer.transport.abort()

    async def _garbage(self, rng: random.Random, http: httpx.AsyncClient) -> None:
        path, body = rng.choice(self.requests)
        content = bytearray(json.dumps(body).encode())
        kind = rng.randrange(4)
        if kind == 0:
            for _ in range(rng.randrange(1, 6)):
                content[rng.randrange(len(content))] = rng.randrange(256)
        elif kind == 1:
            del content[rng.randrange(len(content)) :]
        elif kind == 2:
            content = bytearray(b"[" * rng.randrange(1, 5000))
        else:
            field = rng.choice([*body])
            wrong: Any = rng.choice(([], {}, "x" * 10_000, -1e308, [[[]]], True, 2**70))
            content = bytearray(json.dumps({**body, field: wrong}).encode())
        answer = await http.post(self.url + path, content=bytes(content))
        if answer.status_code != 200:  # a mutation may be harmless
            assert 400 <= answer.status_code < 500, answer.text[:500]
            assert len(answer.content) < MAX_ERROR_BYTES and answer.json()["error"]["message"]

    # ------------------------------------------------------------------ what is left

    def rss_now(self) -> int:
        """Bytes of the front end."""
        pages = int(Path(f"/proc/{self.served.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def num_files(self) -> int:
        return len(os.listdir(f"/proc/{self.served.process.pid}/fd"))

    def metrics(self) -> dict[str, float]:
        text = self.served.http.get(f"{self.url}/metrics").text
        lines = [line for line in text.splitlines() if not line.startswith("#")]
        return {line.rpartition(" ")[0].partition("{")[0]: float(line.rpartition(" ")[2]) for line in lines}

    def idle(self) -> bool:
        """No request, no sequence, no block in use: in the server and in the engine."""
        now = self.metrics()
        if "octavo_num_requests_running" not in now:
            return False  # the engine is being replaced and says nothing of itself
        return (
            now["octavo_http_requests_in_flight"] == 0
            and now["octavo_num_requests_running"] == now["octavo_num_requests_waiting"] == 0
            and now["octavo_kv_blocks_free"] == now["octavo_kv_blocks"]
        )

    def rss_growth(self) -> float:
        """Bytes per minute over the second half of the run: the slope of a line through all samples there."""
        half = self.rss[len(self.rss) // 2 :]
        xs, ys = [t for t, _ in half], [b for _, b in half]
        mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
        above = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
        return 60 * above / sum((x - mean_x) ** 2 for x in xs)
