"""A real HTTP server on a scripted model: uvicorn on a loopback port, the engine in a thread."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from octavo.config import EngineConfig
from octavo.engine import Engine
from octavo.plan import SampleSpec, StepPlan, StepResult
from octavo.server.app import ServerSettings, create_app
from octavo.server.client import ThreadEngineClient
from octavo.server.http_server import OctavoServer
from octavo.server.listen import bind_socket
from octavo.text.constraints import ConstraintCompiler
from octavo.text.tokenizer import Tokenizer
from support.script_backend import ScriptBackend

MODEL = "org/tiny:v1.0"
SPECIALS = ("<|im_start|>", "<|im_end|>")
PIECES = ("Ġred", "Ġgreen", "Ġblue", "Ġone", "mno", "PQR", "TU", "END", "Hello", "Paris")
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'forbidden' %}{{ raise_exception('no such role here') }}{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_alphabet() -> list[str]:
    """GPT-2's character for each byte value."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(b) if b in printable else chr(next(others)) for b in range(256)]


def write_tokenizer(
    directory: Path,
    *,
    chat_template: str | None = TEMPLATE,
    pieces: Sequence[str] = (),
    specials: Sequence[str] = (),
    eos: str | None = "<|im_end|>",
) -> Path:
    """A byte-level tokenizer without merges: id b is the byte b, then PIECES, then `pieces` (texts), then SPECIALS."""
    vocab = {c: b for b, c in enumerate(byte_alphabet())}
    alphabet = byte_alphabet()
    for piece in (*PIECES, *("".join(alphabet[b] for b in text.encode()) for text in pieces)):
        vocab.setdefault(piece, len(vocab))
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in (*SPECIALS, *specials)])
    backend.save(str(directory / "tokenizer.json"))
    config: dict[str, Any] = {"eos_token": eos} if eos is not None else {}
    if chat_template is not None:
        config["chat_template"] = chat_template
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


@dataclass
class ScriptedModel(ScriptBackend):
    """Answers prompts by a table that tests fill; other prompts get "a" for ever.

    `delay` is in seconds per step. While `gate` is not set, steps wait.
    """

    table: dict[tuple[int, ...], Sequence[Sequence[int]]] = field(default_factory=dict)
    delay: float = 0.0
    gate: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.script = self.next_token
        self.keep_trace = False
        self.gate.set()

    def next_token(self, spec: SampleSpec) -> int:
        samples = self.table.get(tuple(spec.token_ids[: spec.num_prompt]))
        if samples is None:
            return ord("a")
        script = samples[spec.sample_index % len(samples)]
        done = len(spec.token_ids) - spec.num_prompt
        return script[done] if done < len(script) else ord("a")

    def execute(self, plan: StepPlan) -> StepResult:
        self.gate.wait()
        if self.delay:
            time.sleep(self.delay)
        return super().execute(plan)


@dataclass
class LiveServer:
    """A running server and ways to talk to it."""

    url: str
    engine: Engine
    model: ScriptedModel
    tokenizer: Tokenizer
    client: ThreadEngineClient
    server: OctavoServer
    http: httpx.Client

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return host, int(port)

    @property
    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    @property
    def async_openai(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def token_id(self, piece: str | int) -> int:
        """A token by its text; an int is a byte or an id already."""
        if isinstance(piece, int):
            return piece
        found = self.tokenizer.token_id(piece.replace(" ", "Ġ").replace("\n", "Ċ"))
        assert found is not None, piece
        return found

    def script(self, prompt: str, *samples: Sequence[str | int]) -> str:
        """From now on `prompt` is answered with these tokens, one list per sample."""
        key = tuple(self.tokenizer.encode(prompt))
        self.model.table[key] = [[self.token_id(p) for p in sample] for sample in samples]
        return prompt

    def chat_script(self, text: str, *samples: Sequence[str | int]) -> list[dict[str, str]]:
        """The same for a conversation of one user message."""
        from octavo.text.chat import render_chat

        messages = [{"role": "user", "content": text}]
        key = tuple(render_chat(self.tokenizer, messages))
        self.model.table[key] = [[self.token_id(p) for p in sample] for sample in samples]
        return messages

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        """`body` is bytes as they are, or a dict that gets the model's name."""
        if isinstance(body, dict):
            body = json.dumps({"model": MODEL, "temperature": 0, **body}).encode()
        return self.http.post(f"{self.url}{path}", content=body, headers=headers)

    def complete(self, **body: Any) -> dict[str, Any]:
        response = self.post("/v1/completions", body)
        assert response.status_code == 200, response.text
        return response.json()  # type: ignore[no-any-return]

    def stream(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """All frames of a stream but [DONE], which must be the last."""
        response = self.post(path, {**body, "stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        frames = [f for f in response.text.split("\n\n") if f and not f.startswith(":")]
        assert frames[-1] == "data: [DONE]"
        return [json.loads(f.removeprefix("data: ")) for f in frames[:-1]]

    def send_raw(self, path: str, body: dict[str, Any]) -> socket.socket:
        """A request on a socket of its own, not yet answered."""
        content = json.dumps({"model": MODEL, "temperature": 0, **body}).encode()
        made = socket.create_connection(self.address, timeout=10)
        made.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)
        return made

    def wait_until(self, condition: Any, seconds: float = 10.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "the condition never came true"
            time.sleep(0.005)

    @property
    def idle(self) -> bool:
        scheduler = self.engine.scheduler
        return (
            not scheduler.requests
            and scheduler.tables.pool.num_free == self.engine.config.num_blocks
            and self.client.num_open == 0
        )

    def check_idle_and_live(self) -> None:
        self.wait_until(lambda: self.idle)
        answer = self.complete(prompt="hi", max_tokens=4)
        assert answer["usage"]["completion_tokens"] == 4

    def metric(self, name: str) -> float:
        """A sample of /metrics; `name` may be followed by one label, as in `x{finished_reason="stop"`."""
        for line in self.http.get(f"{self.url}/metrics").text.splitlines():
            if line.startswith(name):
                return float(line.rpartition(" ")[2])
        raise AssertionError(f"no metric {name}")


@contextmanager
def live_server(
    directory: Path,
    *,
    chat_template: str | None = TEMPLATE,
    specials: Sequence[str] = (),
    settings: dict[str, Any] | None = None,
    shutdown_timeout: float = 0.0,
    write_timeout: float = 60.0,
    vanished_after: float = 60.0,
    **config: Any,
) -> Iterator[LiveServer]:
    """Keyword arguments: those of EngineConfig; `settings`: those of ServerSettings."""
    tokenizer = Tokenizer.from_directory(write_tokenizer(directory, chat_template=chat_template, specials=specials))
    model = ScriptedModel(vocab_size=tokenizer.vocab_size)
    grammars = ConstraintCompiler(lambda: tokenizer, tokenizer.vocab_size)
    engine = Engine(
        EngineConfig(**{"max_model_len": 256, "num_blocks": 512, **config}), model, seed=0, grammars=grammars
    )
    client = ThreadEngineClient(engine)
    app = create_app(
        client,
        tokenizer,
        ServerSettings(
            **{
                "model_name": MODEL,
                "max_model_len": engine.config.max_model_len,
                "vocab_size": tokenizer.vocab_size,
                **(settings or {}),
            }
        ),
    )
    listener = bind_socket("127.0.0.1", 0, vanished_after)
    started = threading.Event()
    server = OctavoServer(app, shutdown_timeout=shutdown_timeout, write_timeout=write_timeout, on_started=started.set)
    thread = threading.Thread(target=server.serve_on, args=(listener,))
    thread.start()
    try:
        assert started.wait(10)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with httpx.Client(timeout=20) as http:
            yield LiveServer(url, engine, model, tokenizer, client, server, http)
    finally:
        model.gate.set()
        model.delay = 0.0
        server.stop()
        thread.join(20)
        assert not thread.is_alive()
