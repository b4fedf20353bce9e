"""Coverage-guided fuzzing of what reads untrusted bytes: `make fuzz`, or TARGET and flags of libFuzzer.

Whatever the bytes are, the readers return or raise an OctavoError with a short message; anything else stops the run
with the input in a file `crash-…`.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["octavo"]):
    from octavo.errors import OctavoError
    from octavo.models.loading import load_model
    from octavo.server.messages import MessagesBody
    from octavo.server.responses import ResponsesBody
    from octavo.server.schema import ChatBody, CompletionBody, check_supported, decode_body, prompts_of, sampling_params
    from octavo.weights.files import ModelFiles
    from octavo.weights.gguf import read_gguf
    from octavo.weights.safetensors import read_file

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

MAX_MESSAGE = 1000

Target = Callable[[bytes], object]


def on_file(name: str, read: Callable[[Path], object]) -> Target:
    """A reader of paths as one of bytes; the file is in memory where the system has such a place."""
    shm = Path("/dev/shm")
    path = Path(tempfile.mkdtemp(prefix="octavo-fuzz-", dir=shm if shm.is_dir() else None)) / name

    def run(data: bytes) -> object:
        path.write_bytes(data)
        return read(path)

    return run


def read_model(path: Path) -> object:
    return load_model(ModelFiles("fuzz", path))


def read_bodies(data: bytes) -> None:
    """One body, taken for each kind of request."""
    for kind in (CompletionBody, ChatBody, MessagesBody, ResponsesBody):
        try:
            body = decode_body(data, kind)
            if isinstance(body, CompletionBody | ChatBody):
                check_supported(body)
                sampling_params(body, {})
            if isinstance(body, CompletionBody):
                prompts_of(body)
        except OctavoError as e:
            check(e)


def check(error: OctavoError) -> None:
    message = str(error)
    assert message and len(message) <= MAX_MESSAGE and "\n" not in message, repr(message[:2000])


def seeds(target: str) -> list[bytes]:
    """Sound inputs to begin with: what the tests of the readers use."""
    corrupt = importlib.import_module("weights.test_corrupt_files")
    messages = [{"role": "user", "content": "hi"}]
    bodies = [
        {"model": "m", "prompt": ["a", [1, 2]], "n": 2, "stop": ["x"], "logit_bias": {"5": 1.5}, "logprobs": 3},
        {"model": "m", "messages": messages, "stream": True, "stream_options": {"include_usage": True}},
        {"model": "m", "messages": messages, "max_tokens": 3, "system": [{"type": "text", "text": "s"}]},
        {"model": "m", "input": messages, "max_output_tokens": 3, "temperature": 0.5},
    ]
    found: dict[str, list[bytes]] = {
        "gguf": [corrupt.SMALL, corrupt.MODEL],
        "model": [corrupt.MODEL],
        "safetensors": [corrupt.safetensors_bytes()],
        "bodies": [json.dumps(body).encode() for body in bodies],
    }
    return found[target]


def main(argv: list[str]) -> None:
    targets: dict[str, Callable[[], Target]] = {
        "gguf": lambda: on_file("m.gguf", read_gguf),
        "model": lambda: on_file("m.gguf", read_model),
        "safetensors": lambda: on_file("m.safetensors", read_file),
        "bodies": lambda: read_bodies,
    }
    name = argv[1] if len(argv) > 1 else ""
    if name not in targets:
        sys.exit(f"usage: fuzz.py {{{','.join(targets)}}} [flags of libFuzzer, such as -max_total_time=60]")
    run = targets[name]()

    def one_input(data: bytes) -> None:
        try:
            run(data)
        except OctavoError as e:
            check(e)

    corpus = Path(tempfile.mkdtemp(prefix="octavo-corpus-"))
    for number, seed in enumerate(seeds(name)):
        (corpus / str(number)).write_bytes(seed)
    limits = ["-max_len=16384", "-rss_limit_mb=2048", "-timeout=10"]
    atheris.Setup([argv[0], *limits, *argv[2:], str(corpus)], one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv)
