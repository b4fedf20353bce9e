"""Octavo side by side with other engines: the same weights, the same token ids, one after the other, repeated.

    python bench/compare.py                         # every peer that can be installed, 5 repeats
    python bench/compare.py --peers llama.cpp:Q4_0,openvino --sizes 1,64 --repeats 3
    python bench/compare.py --avx2                  # both sides limited to AVX2

A size is a number of sequences started together (each 128 prompt + 128 generated tokens), `N:IN+OUT` for other
lengths, or `prefill` (one sequence, 512 prompt tokens, 1 generated; the figure counts prompt tokens). All engines
are loaded at the start and stopped (SIGSTOP) while another one runs. Every run is appended to runs.jsonl in the
output directory; started again with the same --output, the command goes on where it was interrupted.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from comparison import environments as env
from comparison import models, table
from comparison.environments import Unavailable
from comparison.workers import Worker
from octavo.errors import OctavoError
from octavo.system import cpu_info, cpu_model
from octavo.weights.hub import cache_directory, resolve_model

TEXT = Path(__file__).resolve().parent.parent / "LICENSE"
GGUF_TYPES = ("Q4_0", "Q4_1", "Q8_0", "BF16")
ENGINES = ["octavo", *(f"llama.cpp:{t}" for t in GGUF_TYPES), "openvino:fp16", "openvino:int8", "vllm:bf16"]
AVX2_ENGINES = ["octavo-avx2", *(f"llama.cpp-avx2:{t}" for t in GGUF_TYPES)]
KV_GB = 2
MAX_SEQS = 64


@dataclass(frozen=True)
class Size:
    """A workload. `count_prompt`: its figure is prompt tokens per second."""

    name: str
    num_seqs: int
    input_len: int
    output_len: int
    count_prompt: bool = False

    @classmethod
    def parse(cls, text: str) -> Size:
        if text == "prefill":
            return cls(text, 1, 512, 1, count_prompt=True)
        match = re.fullmatch(r"(\d{1,4})(?::(\d{1,6})\+(\d{1,6}))?", text)
        if match is None or not all(int(n) for n in match.groups("1")):
            raise click.BadParameter(f"sizes: {text[:40]!r} is not N, N:IN+OUT or prefill")
        number, *lengths = match.groups("128")
        return cls(text, int(number), int(lengths[0]), int(lengths[1]))

    def prompts(self, token_ids: list[int]) -> list[list[int]]:
        """Pieces of a text from different places, so that no two share a prefix."""
        long = token_ids * (self.input_len // len(token_ids) + 2)
        rng = random.Random(self.name)
        starts = rng.sample(range(len(token_ids)), self.num_seqs)
        return [long[start : start + self.input_len] for start in starts]


@dataclass
class Comparison:
    """Everything about one call of the command."""

    files: Any
    cache: Path
    output: Path
    threads: int
    sizes: list[Size]
    isa: str

    def say(self, message: str) -> None:
        click.echo(f"{time.strftime('%H:%M:%S')} {message}", err=True)

    @property
    def model_directory(self) -> Path:
        stat = self.files.path.stat()
        content = f"{self.files.path.resolve()} {stat.st_size} {stat.st_mtime_ns}"
        return (
            self.cache
            / "models"
            / f"{self.files.name.replace('/', '--')}-{hashlib.sha256(content.encode()).hexdigest()[:8]}"
        )

    def start(self, engine: str) -> Worker:
        """Installs, converts and loads whatever the engine needs. Raises Unavailable."""
        kind, _, weights = engine.partition(":")
        longest = max(size.input_len + size.output_len for size in self.sizes)
        settings: dict[str, Any] = {
            "threads": self.threads,
            "max_len": longest + 16,
            "max_seqs": max(MAX_SEQS, *(size.num_seqs for size in self.sizes)),
            "kv_gb": KV_GB,
        }
        if kind.startswith("octavo"):
            python, script = Path(sys.executable), "octavo_worker.py"
            model = self._octavo_weights(weights)
            settings["isa"] = "avx2" if kind == "octavo-avx2" else self.isa
        elif kind.startswith("llama.cpp"):
            made = env.LLAMA_CPP_AVX2 if kind == "llama.cpp-avx2" else env.LLAMA_CPP
            python, script = made.ensure(self.cache, self.say), "llama_cpp_worker.py"
            model = models.gguf_of_type(self.files, weights, self.model_directory, python, self.say)
        elif kind == "openvino":
            python, script = env.OPENVINO.ensure(self.cache, self.say), "openvino_worker.py"
            model = models.openvino_directory(self.files, weights, self.model_directory, self.cache, self.say)
        else:
            python, script = env.VLLM.ensure(self.cache, self.say), "vllm_worker.py"
            model = models.hugging_face_directory(self.files, self.model_directory, self.say)
        self.say(f"loading {engine}")
        log = self.output / f"{engine.replace(':', '-')}.log"
        return Worker(engine, python, script, {**settings, "model": str(model)}, log)

    def _octavo_weights(self, weights: str) -> Path:
        """As the user gave them, or a file that llama.cpp requantised."""
        if not weights:
            return Path(self.files.path)
        python = env.LLAMA_CPP.ensure(self.cache, self.say)
        return models.gguf_of_type(self.files, weights, self.model_directory, python, self.say)


class Runs:
    """All runs so far, on disk as JSON lines. Runs of other settings in the same file are an error."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self._path = path
        self.all: list[dict[str, Any]] = []
        head = {"settings": settings}
        if path.is_file():
            first, *lines = path.read_text().splitlines() or [""]
            if json.loads(first or "{}") != head:
                raise click.UsageError(f"{path} is of another model, machine or thread count: give another --output")
            self.all = [json.loads(line) for line in lines if line.endswith("}")]
        else:
            path.write_text(json.dumps(head) + "\n")

    def has(self, engine: str, size: str, repeat: int) -> bool:
        return any((r["engine"], r["size"], r["repeat"]) == (engine, size, repeat) for r in self.all)

    def add(self, run: dict[str, Any]) -> None:
        self.all.append(run)
        with self._path.open("a") as output:
            output.write(json.dumps(run) + "\n")


def choose_engines(peers: str | None, weights: str, *, avx2: bool) -> list[str]:
    """Octavo with each of `weights` ("" = as published), then the peers that `peers` names, or all."""
    known = AVX2_ENGINES if avx2 else ENGINES
    ours = [f"{known[0]}:{w}".rstrip(":") for w in weights.split(",")]
    wanted = [p for p in (peers or "").split(",") if p]
    for name in wanted:
        if not any(name in (engine, engine.partition(":")[0]) for engine in known[1:]):
            raise click.BadParameter(f"peers: {name[:40]!r} is none of {', '.join(known[1:])}")
    chosen = [e for e in known[1:] if peers is None or e in wanted or e.partition(":")[0] in wanted]
    return ours + chosen


def load_all(comparison: Comparison, engines: list[str], failures: dict[str, str]) -> list[Worker]:
    workers = []
    for engine in engines:
        try:
            workers.append(comparison.start(engine))
        except (Unavailable, OctavoError) as error:
            failures[engine] = str(error)
            comparison.say(f"{engine} cannot be measured: {error}")
    return workers


def measure_all(
    comparison: Comparison,
    workers: list[Worker],
    runs: Runs,
    repeats: int,
    token_ids: list[int],
    failures: dict[str, str],
) -> None:
    """Repeat by repeat, size by size, engine after engine; each starts with a run that is thrown away."""
    warm: set[tuple[str, str]] = set()
    for repeat in range(repeats):
        for size in comparison.sizes:
            prompts = size.prompts(token_ids)
            turn = repeat % len(workers) if workers else 0
            for worker in workers[turn:] + workers[:turn]:
                if worker.name in failures or runs.has(worker.name, size.name, repeat):
                    continue
                try:
                    if (worker.name, size.name) not in warm:
                        worker.run(prompts, min(4, size.output_len))
                        warm.add((worker.name, size.name))
                    answer = worker.run(prompts, size.output_len)
                except Unavailable as error:
                    failures[worker.name] = f"failed at {size.name}: {error}"
                    comparison.say(f"{worker.name} {failures[worker.name]}")
                    continue
                runs.add(_record(worker, size, repeat, answer))
                comparison.say(
                    f"repeat {repeat + 1}/{repeats}  {size.name:>8}  {worker.name:<16} "
                    f"{runs.all[-1]['tokens_per_s']:>9,.1f} tok/s"
                )


def _record(worker: Worker, size: Size, repeat: int, answer: dict[str, Any]) -> dict[str, Any]:
    output_ids = answer["output_ids"]
    num_made = sum(map(len, output_ids))
    if num_made != size.num_seqs * size.output_len:
        raise Unavailable(f"{num_made} tokens came instead of {size.num_seqs * size.output_len}")
    counted = size.num_seqs * size.input_len if size.count_prompt else num_made
    return {
        "engine": worker.name,
        "size": size.name,
        "repeat": repeat,
        "seconds": round(answer["seconds"], 4),
        "first_s": answer["first_s"] and round(answer["first_s"], 4),
        "tokens_per_s": round(counted / answer["seconds"], 2),
        "peak_rss_bytes": answer["peak_rss_bytes"],
        "load_s": round(worker.load_seconds, 2),
        "version": worker.version,
        "first_ids": [ids[0] for ids in output_ids],
        "output_sha256": hashlib.sha256(json.dumps(output_ids).encode()).hexdigest(),
    }


def agreement(runs: list[dict[str, Any]], engine: str, reference: str) -> float | None:
    """Share of sequences whose first token is that of `reference`: a check that prompts and weights are the same."""
    same = total = 0
    for run in runs:
        other = next((r for r in runs if r["engine"] == reference and r["size"] == run["size"]), None)
        if run["engine"] == engine and other is not None:
            same += sum(a == b for a, b in zip(run["first_ids"], other["first_ids"], strict=True))
            total += len(run["first_ids"])
    return same / total if total else None


def report(comparison: Comparison, engines: list[str], runs: Runs, failures: dict[str, str], seconds: float) -> str:
    """Writes result.json and result.md; returns the latter."""
    sizes = [size.name for size in comparison.sizes]
    summary = table.summarise(runs.all, engines, sizes)
    facts: dict[str, dict[str, Any]] = {}
    for engine in engines:
        mine = [run for run in runs.all if run["engine"] == engine]
        if mine:
            same = agreement(runs.all, engine, engines[0])
            facts[engine] = {
                "version": mine[-1]["version"],
                "load_s": mine[-1]["load_s"],
                "peak_rss_bytes": max(run["peak_rss_bytes"] for run in mine),
                "first_tokens_as_octavo": same and round(same, 4),
                "fingerprints": {
                    size: sorted({r["output_sha256"] for r in mine if r["size"] == size}) for size in sizes
                },
            }
    result = {"cpu": cpu_model(), "threads": comparison.threads, "model": comparison.files.name, **summary}
    result |= {"engines": facts, "failures": failures, "total_s": round(seconds, 1)}
    (comparison.output / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    loads = {engine: facts[engine]["load_s"] for engine in facts}
    lines = [
        f"{comparison.files.name} on {result['cpu']}, {comparison.threads} threads; medians in tokens per second",
        "",
    ]
    lines += [table.markdown(summary, [e for e in engines if e in facts], sizes, loads), ""]
    for engine, fact in facts.items():
        same, peak = fact["first_tokens_as_octavo"], fact["peak_rss_bytes"] / 2**20
        share = "-" if same is None else f"{same:.0%}"
        lines.append(f"- {engine}: {fact['version']}; peak memory {peak:,.0f} MiB; first tokens as Octavo's: {share}")
    lines += [f"- {engine}: not measured: {reason}" for engine, reason in failures.items()]
    lines.append(f"- total time {seconds:.0f} s")
    text = "\n".join(lines) + "\n"
    (comparison.output / "result.md").write_text(text)
    return text


@click.command(help="Octavo side by side with other engines; the head of bench/compare.py says how.")
@click.option("--model", default="smollm2-135m", show_default=True, help="Alias, GGUF file or directory.")
@click.option("--peers", help=f"Comma-separated: {', '.join(ENGINES[1:])}, or a name before the colon. Default: all.")
@click.option("--octavo-weights", default="", help="Comma-separated GGUF types for Octavo; empty: as published.")
@click.option("--sizes", default="1,8,32,64,prefill", show_default=True, help="Comma-separated: N, N:IN+OUT, prefill.")
@click.option("--repeats", type=click.IntRange(1, 1000), default=5, show_default=True)
@click.option("--threads", type=click.IntRange(1), help="Default: the CPUs this process may use.")
@click.option("--isa", default="auto", show_default=True, help="Octavo's instruction set.")
@click.option("--avx2", is_flag=True, help="Octavo and llama.cpp limited to AVX2.")
@click.option(
    "--cache", type=click.Path(path_type=Path), help="Environments and converted models. Default: Octavo's cache."
)
@click.option("--output", type=click.Path(path_type=Path), default=Path("bench-results"), show_default=True)
@click.option("--install-only", is_flag=True, help="Install and convert everything, load it once, measure nothing.")
def main(
    model: str,
    peers: str | None,
    octavo_weights: str,
    sizes: str,
    repeats: int,
    threads: int | None,
    isa: str,
    avx2: bool,
    cache: Path | None,
    output: Path,
    install_only: bool,
) -> None:
    start = time.perf_counter()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that workers, which may be stopped, end too
    engines = choose_engines(peers, octavo_weights, avx2=avx2)
    parsed = [Size.parse(text) for text in sizes.split(",")]
    try:
        files = resolve_model(model)
        token_ids = read_text(files)
    except OctavoError as error:
        raise click.ClickException(str(error)) from None
    if max(size.num_seqs for size in parsed) > len(token_ids):
        raise click.BadParameter(f"sizes: at most {len(token_ids)} sequences")
    output.mkdir(parents=True, exist_ok=True)
    comparison = Comparison(
        files, cache or cache_directory() / "bench", output, threads or cpu_info().num_threads, parsed, isa
    )
    settings = {"model": str(files.path.resolve()), "cpu": cpu_model(), "threads": comparison.threads}
    runs = Runs(output / "runs.jsonl", settings)
    failures: dict[str, str] = {}
    workers: list[Worker] = []
    try:
        workers = load_all(comparison, engines, failures)
        if not install_only:
            measure_all(comparison, workers, runs, repeats, token_ids, failures)
    finally:
        for worker in workers:
            worker.close()
    click.echo(report(comparison, engines, runs, failures, time.perf_counter() - start))


def read_text(files: Any) -> list[int]:
    """Token ids of this project's licence text."""
    from octavo.models.loading import load_model
    from octavo.text.tokenizer import Tokenizer

    source = load_model(files).tokenizer_source
    tokenizer = Tokenizer.from_gguf(source) if isinstance(source, dict) else Tokenizer.from_directory(source)
    return tokenizer.encode(TEXT.read_text(), add_special_tokens=False)


if __name__ == "__main__":
    main()
