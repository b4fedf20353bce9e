"""Nothing in the front end or the engine loop grows with the number of requests (C178), restarts included."""

import asyncio
import gc
import logging
import random
from types import SimpleNamespace

from support.tables import table_sizes

from octavo.clock import VirtualClock
from octavo.config import EngineConfig
from octavo.engine import Engine
from octavo.errors import EngineError
from octavo.request import SamplingParams
from octavo.server.heart import Pulse
from octavo.server.loop import EngineLoop
from octavo.server.supervisor import SupervisedEngineClient, SupervisorOptions
from octavo.server.wire import SubmitSpec
from octavo.virtual import StepCost, VirtualBackend

KINDS = (
    *[SamplingParams(temperature=0, max_tokens=1)] * 8,
    SamplingParams(n=3, max_tokens=3),
    SamplingParams(n=2, best_of=3, use_beam_search=True, temperature=0, max_tokens=3),
    SamplingParams(max_tokens=12),
)


class Process:
    """The engine process without a process: an engine loop that the event loop drives, a step at a time."""

    pid = 0
    heart = SimpleNamespace(pulse=Pulse)

    def __init__(self):
        clock = VirtualClock()
        config = EngineConfig(max_model_len=256, num_blocks=64, max_num_seqs=16)
        engine = Engine(config, VirtualBackend(clock, StepCost()), clock=clock, seed=0)
        self.messages = []
        self.engine_loop = EngineLoop(engine, SimpleNamespace(wake=lambda: None), self.messages.append)
        self.engine = engine
        self.dead = self.stepping = False

    def start_reader(self, on_messages, on_end):
        self.on_messages, self.on_end = on_messages, on_end

    def send(self, command):
        self.engine_loop._apply(command)
        if not self.stepping:
            self.stepping = True
            asyncio.get_running_loop().call_soon(self.step)

    def step(self):
        self.stepping = False
        if self.dead:
            return
        self.engine_loop._step()
        messages, self.messages[:] = list(self.messages), []
        self.on_messages(messages)
        if self.engine.has_unfinished:
            self.stepping = True
            asyncio.get_running_loop().call_soon(self.step)

    def die(self):
        self.dead = True
        self.on_end(EngineError("the engine process ended"))

    def wait_ready(self, progress=None):
        return SimpleNamespace(max_model_len=256, kv_cache_bytes=64)

    def kill(self):
        self.dead = True

    def end(self, seconds):
        self.dead = True


class Client(SupervisedEngineClient):
    def _new_process(self):
        return Process()


async def ask(client, i, rng):
    """One request: answered, left in the midst, or stopped by its text."""
    params = rng.choice(KINDS)
    ids = [1 + i % 4000, 1 + i // 4000, *range(5, 5 + rng.randint(0, 50))]
    tenant = f"tenant {i}"
    spec = SubmitSpec(request_id=f"r{i}", prompt_token_ids=ids, params=params, cache_salt=tenant, tenant=tenant)
    handle = await client.submit([spec])
    left = params.num_outputs
    while left and i % 13:
        for event in await handle.next_events():
            left -= event.finish_reason is not None
        if i % 17 == 0 and not params.use_beam_search:
            client.finish_sequence(f"r{i}", 0)
            break
    if not left:
        handle.finished(f"r{i}")
    handle.close()


def die(client):
    client._num_in_a_row = 0  # as if the last one had lived for a while: the next one starts at once
    client._process.die()


async def serve(client, first, last):
    numbers, rng = iter(range(first, last)), random.Random(first)

    async def work():
        for i in numbers:
            if i % 2500 == 1000:
                die(client)
            await ask(client, i, rng)

    await asyncio.gather(*(work() for _ in range(12)))


async def at_rest(client):
    """Table sizes with nothing in flight: of the front end as it is, of the engine after a restart, when it is new."""
    of_the_front = {path: n for path, n in table_sizes(client).items() if path.startswith(("Client.", "Suspects."))}
    num_restarts = client.num_restarts
    die(client)
    while client.num_restarts == num_restarts or not client._up:
        await asyncio.sleep(0.001)
    client._starter.join()
    assert client._process.engine.stats().num_free_blocks == 64
    gc.collect()
    return table_sizes(client) | {f"{path} before the restart": n for path, n in of_the_front.items()}


def test_twenty_thousand_submissions_leave_every_table_as_it_was(caplog):
    caplog.set_level(logging.CRITICAL)

    async def run():
        client = Client("model", None, supervision=SupervisorOptions(max_restarts=100))
        client.wait_ready()
        await client.start()
        await serve(client, 0, 200)
        start = await at_rest(client)
        await serve(client, 200, 10_000)
        half, num_objects = await at_rest(client), len(gc.get_objects())
        await serve(client, 10_000, 20_000)
        end = await at_rest(client)
        assert len(gc.get_objects()) < num_objects + 1000
        assert client.num_restarts == 3 + 8
        assert start == half == end
        assert end["Client._submissions"] == end["Client._by_request"] == end["Client._tickets"] == 0
        await client.close()

    asyncio.run(asyncio.wait_for(run(), 120))
