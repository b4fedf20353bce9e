"""bench/python_share.py runs on a tiny model and names every part."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from support.tiny_gguf import tiny_gguf

ROOT = Path(__file__).resolve().parent.parent.parent


def test_all_parts_are_measured(tmp_path: Path) -> None:
    argv = ["--model", str(tiny_gguf(tmp_path / "tiny.gguf")), "--num-seqs", "3", "--input-len", "9", "--steps", "6"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "bench" / "python_share.py"), *argv, "--json"],
        check=True, timeout=120, capture_output=True, text=True,
    )  # fmt: skip
    result = json.loads(done.stdout)
    parts = {"plan", "arrays", "results", "commit", "encode", "decode", "text", "frames", "native"}
    assert result["seconds"].keys() == parts
    assert all(seconds > 0 for seconds in result["seconds"].values())
    assert 0 < result["engine_share"] < 1
