"""Repository ids through the real huggingface_hub client, against a loopback hub; local paths without any."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.gguf_writer import GgufFile, float_tensor
from support.hub_server import Hub, running_hub

from octavo.errors import ConfigError, ModelError, ModelNotFoundError
from octavo.weights.hub import resolve_model

SOURCE = Path(__file__).parents[2] / "src"
GGUF = b"GGUF" + bytes(100)
SAFE = {"config.json": b"{}", "model.safetensors": b"s" * 5000, "tokenizer.json": b"{}", "tokenizer_config.json": b"{}"}
EXTRA = {
    "README.md": b"x",
    "pytorch_model.bin": b"x",
    "original/model.safetensors": b"x",
    "consolidated.safetensors": b"x",
}

# huggingface_hub reads its environment when it is imported, so each case runs in a process of its own.
PROGRAM = """
import json, sys
from octavo.errors import OctavoError
from octavo.weights.hub import resolve_model
calls = []
for model, load_format in json.loads(sys.argv[1]):
    try:
        files = resolve_model(model, load_format=load_format, progress=lambda *call: calls.append(call))
        found = sorted(p.name for p in files.path.iterdir()) if files.path.is_dir() else None
        print(json.dumps({"name": files.name, "path": str(files.path), "files": found, "calls": calls[-1:]}))
    except OctavoError as error:
        print(json.dumps({"error": type(error).__name__, "message": str(error)}))
"""


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    repositories = {
        "org/safe": {**SAFE, **EXTRA},
        "org/both": {**SAFE, "m.Q4_0.gguf": GGUF},
        "org/one-gguf": {"m.Q4_0.gguf": GGUF, "README.md": b"x"},
        "org/two-gguf": {"m.Q4_0.gguf": GGUF, "m.Q8_0.gguf": GGUF + b"8"},
        "org/split": {f"m-{i:05}-of-00002.gguf": GGUF + bytes([i]) for i in (1, 2)},
        "org/nothing": {"config.json": b"{}", "pytorch_model.bin": b"x"},
        "org/private": SAFE,
        "org/gated": SAFE,
        "org/broken": SAFE,
        "org/cut": {**SAFE, "cut.safetensors": b"c" * 100_000},
    }
    with running_hub(Hub(repositories, private={"org/private"}, gated={"org/gated"}, broken={"org/broken"})) as server:
        server.cut.add("cut.safetensors")
        yield server


def resolve(
    hub: Hub | str, home: Path, *models: str, load_format: str = "auto", **environment: str
) -> list[dict[str, Any]]:
    """What resolve_model says about each model, asked in order in a fresh process."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps([(model, load_format) for model in models])],
        env={
            **kept,
            "PYTHONPATH": str(SOURCE),
            "HF_ENDPOINT": hub if isinstance(hub, str) else hub.url,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "NO_PROXY": "127.0.0.1",
            **environment,
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_safetensors_and_gguf_repositories(hub: Hub, tmp_path: Path) -> None:
    safe, both, one, named, split, part = resolve(
        hub, tmp_path, "org/safe", "org/both", "org/one-gguf", "org/two-gguf:m.Q8_0.gguf", "org/split",
        "org/split:m-00002-of-00002.gguf",
    )  # fmt: skip
    assert safe["name"] == "org/safe"
    assert safe["files"] == sorted(SAFE)
    total = sum(len(data) for data in SAFE.values())
    assert safe["calls"] == [["Downloading org/safe", total, total]]
    assert both["files"] == sorted(SAFE)
    assert Path(one["path"]).name == "m.Q4_0.gguf"
    assert Path(named["path"]).read_bytes() == GGUF + b"8"
    assert named["name"] == "org/two-gguf:m.Q8_0.gguf"
    for found in (split, part):
        assert Path(found["path"]).name == "m-00001-of-00002.gguf"
        assert Path(found["path"]).with_name("m-00002-of-00002.gguf").exists()


def test_load_format_chooses(hub: Hub, tmp_path: Path) -> None:
    (both,) = resolve(hub, tmp_path, "org/both", load_format="gguf")
    assert both["path"].endswith("m.Q4_0.gguf")
    (both, one) = resolve(hub, tmp_path, "org/both", "org/one-gguf", load_format="safetensors")
    assert "model.safetensors" in both["files"]
    assert one["message"] == "org/one-gguf: holds no safetensors weights"
    (safe,) = resolve(hub, tmp_path / "dummy", "org/safe", load_format="dummy")
    assert safe["files"] == sorted(set(SAFE) - {"model.safetensors"})


def test_what_cannot_be_found(hub: Hub, tmp_path: Path) -> None:
    missing, private, nothing, two, name, broken, gated = resolve(
        hub, tmp_path, "org/missing", "org/private", "org/nothing", "org/two-gguf", "org/two-gguf:x.gguf", "org/broken",
        "org/gated",
    )  # fmt: skip
    assert missing["error"] == private["error"] == "ModelNotFoundError"
    assert missing["message"].startswith("org/missing: no such repository on the hub, or private")
    assert private["message"].startswith("org/private: no such repository on the hub, or private")
    assert nothing["message"] == "org/nothing: holds no safetensors or GGUF weights"
    assert "holds 2 GGUF models; name one as org/two-gguf:FILE.gguf: 'm.Q4_0.gguf', 'm.Q8_0.gguf'" in two["message"]
    assert name["message"] == "org/two-gguf: holds no file 'x.gguf'"
    assert broken["message"] == "org/broken: the hub answered with status 500"
    assert gated["message"].startswith("org/gated: gated; accept its terms")


def test_the_token_is_used(hub: Hub, tmp_path: Path) -> None:
    for found in resolve(hub, tmp_path, "org/private", "org/gated", HF_TOKEN="hf_secret"):
        assert found["files"] == sorted(SAFE)
    (refused,) = resolve(hub, tmp_path / "other", "org/private", HF_TOKEN="hf_wrong")
    assert refused["error"] == "ModelNotFoundError"


def test_offline_uses_what_is_cached(hub: Hub, tmp_path: Path) -> None:
    models = ("org/safe", "org/one-gguf", "org/two-gguf:m.Q8_0.gguf", "org/split:m-00001-of-00002.gguf")
    online = resolve(hub, tmp_path, *models)
    asked = len(hub.requests)
    offline = resolve(hub, tmp_path, *models, "org/both", HF_HUB_OFFLINE="1")
    assert len(hub.requests) == asked
    assert [found["path"] for found in offline[:-1]] == [found["path"] for found in online]
    assert offline[-1] == {
        "error": "ModelNotFoundError",
        "message": "org/both: not in the local cache, and HF_HUB_OFFLINE forbids to download it",
    }
    # The same when the hub has gone away.
    gone = resolve("http://127.0.0.1:9", tmp_path, "org/safe", "org/both")
    assert gone[0]["path"] == online[0]["path"]
    assert gone[1]["error"] == "ModelError"
    assert gone[1]["message"].startswith("org/both: not in the local cache, and the hub cannot be reached")


def test_a_transfer_that_breaks_off_leaves_no_half_file(hub: Hub, tmp_path: Path) -> None:
    (first,) = resolve(hub, tmp_path, "org/cut")
    assert first["error"] == "ModelError"
    assert not list(tmp_path.rglob("snapshots/*/cut.safetensors"))
    (again,) = resolve(hub, tmp_path, "org/cut", HF_HUB_OFFLINE="1")
    assert "error" in again or "cut.safetensors" not in again["files"]


# --- local paths -----------------------------------------------------------------------------------------------------


def test_local_files_and_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = GgufFile({}, [float_tensor("a", np.zeros(4))]).write(tmp_path / "my-model.gguf")
    assert resolve_model(str(file)).name == "my-model"
    assert resolve_model(str(file)).path == file
    assert resolve_model(str(tmp_path)).path == file
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/my-model.gguf").path == file
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)).path == file
    assert resolve_model(str(tmp_path), load_format="dummy").path == tmp_path
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert resolve_model(str(tmp_path)).path == tmp_path
    assert resolve_model(str(tmp_path), load_format="gguf").path == file
    assert resolve_model(str(tmp_path)).name == tmp_path.name
    (tmp_path / "other.gguf").write_bytes(GGUF)
    with pytest.raises(ModelNotFoundError, match="holds 2 GGUF models; name one"):
        resolve_model(str(tmp_path), load_format="gguf")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelNotFoundError, match=r"neither config\.json nor a GGUF file"):
        resolve_model(str(tmp_path / "empty"))


@pytest.mark.parametrize(
    ("model", "error"),
    [
        ("", ConfigError),
        ("smollm2", ModelNotFoundError),
        ("/no/such/file.gguf", ModelNotFoundError),
        ("./nothing", ModelNotFoundError),
        ("model.gguf", ModelNotFoundError),
        ("a/b/c", ModelNotFoundError),
        ("dir/model.safetensors", ModelError),
        ("org/name:weights.bin", ConfigError),
        ("x\0y", ModelNotFoundError),
        ("x" * 5000, ModelNotFoundError),
        ("~nobody-of-this-name/x", ModelNotFoundError),
    ],
)
def test_names_that_mean_nothing(model: str, error: type[ModelError]) -> None:
    with pytest.raises(error) as caught:
        resolve_model(model)
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)
