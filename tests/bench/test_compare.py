"""bench/compare.py: its arithmetic, its books, the model it writes for others, and a whole run with Octavo alone."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from support.tiny_gguf import tiny_gguf

from comparison import models, table
from comparison.environments import Environment, Unavailable, last_line
from comparison.workers import Worker
from octavo.models.loading import load_model
from octavo.text.tokenizer import Tokenizer
from octavo.weights.files import ModelFiles
from octavo.weights.formats import FORMATS

ROOT = Path(__file__).resolve().parent.parent.parent
compare: Any = importlib.import_module("compare")


def run(engine: str, size: str, repeat: int, speed: float) -> dict[str, Any]:
    return {"engine": engine, "size": size, "repeat": repeat, "tokens_per_s": speed}


RUNS = [
    *(run("octavo", "8", i, v) for i, v in enumerate([30.0, 10.0, 20.0])),
    *(run("llama.cpp:Q4_0", "8", i, v) for i, v in enumerate([10.0, 10.0, 10.0])),
    *(run("openvino:int8", "8", i, v) for i, v in enumerate([20.0, 5.0, 4.0])),
    run("octavo", "64", 0, 50.0),
]
ENGINES = ["octavo", "llama.cpp:Q4_0", "openvino:int8", "vllm:bf16"]


def test_summary_takes_medians_and_ratios_of_pairs() -> None:
    summary = table.summarise(RUNS, ENGINES, ["8", "64"])
    assert summary["tokens_per_s"]["octavo"]["8"] == {"median": 20.0, "min": 10.0, "max": 30.0, "repeats": 3}
    assert summary["tokens_per_s"]["vllm:bf16"] == {}
    assert summary["ratio_to_best_peer"] == {"8": {"best_peer": "llama.cpp:Q4_0", "octavo": 2.0}}
    shown = table.markdown(summary, ENGINES, ["8", "64"], {"octavo": 0.5})
    assert "| octavo | 20 | 50 | 0.5 s |" in shown
    assert "| vllm, bf16 | - | - | - |" in shown
    assert "| octavo: ratio to the best peer | 2.00x | - | |" in shown


def test_octavo_limited_to_avx2_is_no_peer() -> None:
    engines = ["octavo-avx2", "llama.cpp-avx2:Q4_0"]
    runs = [
        {"engine": engine, "size": "1", "repeat": 0, "tokens_per_s": rate}
        for engine, rate in zip(engines, (30.0, 20.0), strict=True)
    ]
    summary = table.summarise(runs, engines, ["1"])
    assert summary["ratio_to_best_peer"]["1"] == {"best_peer": "llama.cpp-avx2:Q4_0", "octavo-avx2": 1.5}


def test_sizes() -> None:
    size = compare.Size.parse
    assert size("8") == compare.Size("8", 8, 128, 128)
    assert size("16:4096+64") == compare.Size("16:4096+64", 16, 4096, 64)
    assert size("prefill") == compare.Size("prefill", 1, 512, 1, count_prompt=True)
    for text in ("0", "x", "8:0+1", "8:1", "-1", ""):
        with pytest.raises(click.BadParameter):
            size(text)
    prompts = size("5:300+1").prompts(list(range(100)))
    assert [len(prompt) for prompt in prompts] == [300] * 5
    assert len({prompt[0] for prompt in prompts}) == 5
    assert prompts == size("5:300+1").prompts(list(range(100)))


def test_engines() -> None:
    choose = compare.choose_engines
    assert choose(None, "", avx2=False) == compare.ENGINES
    assert choose("openvino,llama.cpp:Q8_0", "", avx2=False) == [
        "octavo", "llama.cpp:Q8_0", "openvino:fp16", "openvino:int8",
    ]  # fmt: skip
    assert choose("", "Q4_0,Q8_0", avx2=False) == ["octavo:Q4_0", "octavo:Q8_0"]
    assert choose(None, "", avx2=True)[0] == "octavo-avx2"
    with pytest.raises(click.BadParameter):
        choose("llama", "", avx2=False)


def test_runs_are_kept_and_those_of_other_settings_refused(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    runs = compare.Runs(path, {"threads": 2})
    runs.add(run("octavo", "8", 0, 1.0))
    with path.open("a") as output:
        output.write('{"engine": "octavo", "si')  # cut off in the middle of a line
    again = compare.Runs(path, {"threads": 2})
    assert again.has("octavo", "8", 0)
    assert not again.has("octavo", "8", 1)
    with pytest.raises(click.UsageError):
        compare.Runs(path, {"threads": 3})


def test_what_cannot_be_installed_is_said(tmp_path: Path) -> None:
    wanted = Environment("none", ("--no-index", "no-such-package-of-octavo"), ("none",))
    with pytest.raises(Unavailable, match=r"not installable: ERROR: .*no-such-package-of-octavo"):
        wanted.ensure(tmp_path, lambda text: None)


def test_last_words_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("a\nValueError: wrong\nWARNING: an error of no interest\nbye\n\n")
    assert last_line(log) == "ValueError: wrong"
    log.write_text("")
    assert last_line(log) == "no output"


def test_directory_for_others_holds_the_same_model(tmp_path: Path) -> None:
    files = ModelFiles("tiny", tiny_gguf(tmp_path / "tiny.gguf"))
    made = models.hugging_face_directory(files, tmp_path, lambda text: None)
    ours, theirs = load_model(files), load_model(ModelFiles("made", made))
    assert theirs.spec == ours.spec
    assert theirs.tensors.keys() == ours.tensors.keys()
    for name, view in ours.tensors.items():
        values = FORMATS[view.format].unpack(view.data)
        assert np.array_equal(FORMATS[theirs.tensors[name].format].unpack(theirs.tensors[name].data), values), name
    assert isinstance(ours.tokenizer_source, dict)
    text = "Some text, 1 2 3."
    assert Tokenizer.from_directory(made).encode(text) == Tokenizer.from_gguf(ours.tokenizer_source).encode(text)


def test_main_type_is_that_of_most_bytes(tmp_path: Path) -> None:
    files = ModelFiles("tiny", tiny_gguf(tmp_path / "tiny.gguf"))
    assert models.main_type(files) == "F32"
    with pytest.raises(Unavailable):
        models.gguf_of_type(ModelFiles("d", tmp_path), "Q4_0", tmp_path, Path("python"), lambda text: None)


def test_worker_that_fails_or_lies(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="no such file"):
        Worker("x", Path(sys.executable), "octavo_worker.py", {
            "model": "./none.gguf", "threads": 1, "max_len": 64, "max_seqs": 4,
        }, tmp_path / "log")  # fmt: skip
    with pytest.raises(Unavailable, match="the worker ended with"):
        Worker("x", Path(sys.executable), "no_such_worker.py", {}, tmp_path / "log")


def test_whole_run_with_octavo_alone_goes_on_where_it_stopped(tmp_path: Path) -> None:
    model, output = tiny_gguf(tmp_path / "tiny.gguf"), tmp_path / "out"
    argv = [sys.executable, str(ROOT / "bench" / "compare.py"), "--model", str(model), "--peers", "", "--threads", "1"]
    argv += ["--output", str(output), "--sizes", "1:8+4,3:8+4", "--cache", str(tmp_path / "cache")]
    subprocess.run([*argv, "--repeats", "1"], check=True, timeout=120, capture_output=True)
    done = subprocess.run([*argv, "--repeats", "2"], check=True, timeout=120, capture_output=True, text=True)
    assert "repeat 1/2" not in done.stderr
    assert "repeat 2/2" in done.stderr
    result = json.loads((output / "result.json").read_text())
    assert result["tokens_per_s"]["octavo"]["3:8+4"]["repeats"] == 2
    assert result["failures"] == {}
    assert all(len(prints) == 1 for prints in result["engines"]["octavo"]["fingerprints"].values())
    assert done.stdout == (output / "result.md").read_text() + "\n"
    assert "total time" in done.stdout
