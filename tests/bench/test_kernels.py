"""`octavo bench kernels`: that every op of a model is timed, with the right work and the machine's limits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.tiny_gguf import tiny_gguf

from octavo import _native
from octavo.backends.cpu.sites import site_program, sites_of
from octavo.benchmarks.kernels import arithmetic_of, cost, time_site, works
from octavo.cli import main
from octavo.models.loading import LoadedModel, load_model
from octavo.weights.files import ModelFiles


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(ModelFiles("tiny", tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")))


def bench(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(["bench", "kernels", *argv])
    captured = capsys.readouterr()
    return int(caught.value.code or 0), captured.out, captured.err


def test_sites_are_all_ops_of_the_model(model: LoadedModel) -> None:
    sites = {(site.label, site.shape, site.weight_format): site for site in sites_of(model)}
    assert sites["q+k+v", "32 -> 64", "F32"].num_ops == 2
    # One layer's up projection is Q8_0.
    assert [key for key in sites if key[0] == "gate+up"] == [
        ("gate+up", "32 -> 64", "F32+Q8_0"),
        ("gate+up", "32 -> 64", "F32"),
    ]
    assert sites["head", f"32 -> {model.spec.vocab_size}", "F32"].num_ops == 1
    assert {site.method for site in sites.values()} == {
        "linear", "gated_linear", "attention", "rms_norm", "add_rms_norm", "rope", "sample",
    }  # fmt: skip
    matrices = frozenset().union(*(site.matrices for site in sites.values()))
    assert matrices == {name for name, view in model.tensors.items() if len(view.shape) == 2} - {
        "model.embed_tokens.weight"
    }


@pytest.mark.parametrize("isa", _native.available_isas())
def test_every_site_runs_with_every_work(model: LoadedModel, isa: str) -> None:
    all_work = works([1, 3], 20, 40)
    assert [work.name for work in all_work] == ["decode 1", "decode 3", "prefill 20"]
    for site in sites_of(model):
        program = site_program(model, site, isa=isa, threads=1, max_tokens=20, num_blocks=9, max_len=48)
        for work in all_work:
            assert time_site(program, work, 0.0) > 0.0


def test_costs(model: LoadedModel) -> None:
    spec = model.spec  # 4 heads of 8, 2 of KV
    decode, prefill = works([3], 20, 40)
    sites = {site.label: site for site in sites_of(model) if site.weight_format in ("", "F32")}
    assert cost(sites["down"], spec, decode, 1000) == (2.0 * 3 * 64 * 32, 1000 + 4.0 * 3 * 96)
    assert cost(sites["gate+up"], spec, decode, 1000) == (4.0 * 3 * 32 * 64 + 5.0 * 3 * 64, 1000 + 4.0 * 3 * 96)
    assert cost(sites["head"], spec, prefill, 0)[0] == 2.0 * 1 * 32 * spec.vocab_size
    assert cost(sites["attention"], spec, decode, 0) == (4.0 * 32 * 3 * 41, 2.0 * 3 * 41 * 16 * 2 + 4.0 * 3 * 64)
    assert cost(sites["attention"], spec, prefill, 0) == (4.0 * 32 * 210, 2.0 * 20 * 16 * 2 + 4.0 * 20 * 64)
    assert arithmetic_of(sites["down"], "amx") == "fma_f32"  # float32 weights


def test_limits_of_every_instruction_set() -> None:
    for isa in _native.available_isas():
        limits = _native.measure_limits(isa, 2, 0.01, 16 << 20)
        assert {"dram_read", "cache_read", "fma_f32"} <= limits.keys()
        assert all(rate > 0 for rate in limits.values())
    for wrong in [
        ("auto", 1, 1.0, 1 << 30),
        ("avx2", 0, 1.0, 1 << 30),
        ("scalar", 1, 0.0, 1 << 30),
        ("scalar", 2, 1, 9),
    ]:
        with pytest.raises(ValueError):
            _native.measure_limits(*wrong)


def test_reading_memory_again_and_again() -> None:
    for isa in _native.available_isas():
        reader = _native.MemoryReader(isa, 2, 16 << 20)
        assert all(reader.rate(0.005) > 1e6 for _ in range(3))
        with pytest.raises(ValueError, match="seconds"):
            reader.rate(0.0)
    for wrong in [("auto", 1, 1 << 30), ("scalar", 0, 1 << 30), ("scalar", 2, 9)]:
        with pytest.raises(ValueError):
            _native.MemoryReader(*wrong)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"dram_read": 1e9, "cache_read": 2e9, "fma_f32": 1e9, "dot_bf16": 1e9, "dot_int8": 1e9, "amx_bf16": 1e9}
    monkeypatch.setattr("octavo.benchmarks.limits.measure_limits", lambda *args: limits)
    monkeypatch.setattr("octavo.benchmarks.limits.dram_bytes", lambda threads: threads * (4 << 20))
    monkeypatch.setattr("octavo.cli.bench_kernels.READ_SECONDS", 0.001)


def test_command(capsys: pytest.CaptureFixture[str], tmp_path: Path, quick: Any) -> None:
    argv = (str(tiny_gguf(tmp_path / "m.gguf")), "--rows", "1,2", "--prefill", "18", "--context", "5", "--seconds", "0")
    code, out, err = bench(capsys, *argv, "--json", "--threads", "1")
    assert (code, err) == (0, "")
    result = json.loads(out)
    assert {line["work"] for line in result["kernels"]} == {"decode 1", "decode 2", "prefill 18"}
    for line in result["kernels"]:
        assert line["us"] > 0
        assert line["gflop_per_s"] >= 0
        assert line["share_of_dram"] >= 0
        assert line["dram_read_gb_per_s"] > 0
    code, out, _ = bench(capsys, *argv)
    assert code == 0
    for text in (
        "Limits of this machine",
        "dram_read",
        "decode 1: ",
        "gate+up",
        "prefill 18: ",
        "% of DRAM",
        "of peak",
    ):
        assert text in out


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (("--rows", "0"), "--rows"),
        (("--rows", "1,x"), "--rows"),
        (("--rows", "", "--prefill", "0"), "nothing to do"),
        (("--isa", "mmx"), "--isa: 'mmx' is none of"),
        (("--context", "5000"), "5001 tokens are more than the 1024 positions"),
        (("--prefill", "2000"), "2000 tokens are more than the 1024 positions"),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], tmp_path: Path, argv: tuple[str, ...], text: str) -> None:
    code, out, err = bench(capsys, str(tiny_gguf(tmp_path / "m.gguf")), *argv)
    assert (code, out) == (2, "")
    assert err.startswith("octavo: error: ")
    assert text in err
