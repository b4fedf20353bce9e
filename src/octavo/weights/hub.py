"""Where models come from: an alias, a file, a directory or a Hugging Face repository becomes local files."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError, ModelError, ModelNotFoundError
from octavo.weights.alias import ALIASES, cache_directory, directory_bytes, fetch_alias
from octavo.weights.files import ModelFiles, Progress, clip

__all__ = ["ALIASES", "ModelFiles", "cache_directory", "resolve_model"]

REPOSITORY_ID = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}", re.ASCII)
GGUF_PART = re.compile(r"(.*)-\d{5}-of-\d{5}\.gguf")
# What is taken from a repository with safetensors. Subdirectories hold other copies of the weights
# (original/, onnx/), and so does Mistral's consolidated.safetensors.
CONFIG_PATTERNS = ["*.json", "tokenizer.model", "*.jinja", "merges.txt", "vocab.txt"]
WEIGHT_PATTERNS = [*CONFIG_PATTERNS, "*.safetensors"]
IGNORE_PATTERNS = ["*/*", "consolidated*"]
POLL_SECONDS = 0.1


def resolve_model(model: str, *, load_format: str = "auto", progress: Progress | None = None) -> ModelFiles:
    """Local files of a model, downloaded if need be.

    `model` is an alias, a GGUF file, a directory, a Hugging Face repository id, or REPOSITORY:FILE.gguf. `load_format`
    "gguf" or "safetensors" settles which to take where both are; "dummy" leaves the weights out. `progress` is called
    with byte counts. HF_ENDPOINT, HF_TOKEN, HF_HOME and HF_HUB_OFFLINE are those of huggingface_hub. Raises
    ModelNotFoundError, ModelError or ConfigError, in one line.
    """
    if not model:
        raise ConfigError("model: must not be empty")
    if model in ALIASES:
        return ModelFiles(model, fetch_alias(model, progress))
    with contextlib.suppress(OSError, ValueError, RuntimeError):  # names that no file system takes, no home
        path = Path(model).expanduser()
        if path.is_dir():
            return ModelFiles(path.resolve().name or model, _in_directory(path, load_format))
        if path.suffix == ".safetensors":
            raise ModelError(f"model {clip(model, 200)}: pass the directory that holds it, with its config.json")
        if path.exists():
            return ModelFiles(path.stem, path)
    repository, _, file_name = model.partition(":")
    looks_like_path = model.startswith(("/", "./", "../", "~")) or (not file_name and model.endswith(".gguf"))
    if looks_like_path or not REPOSITORY_ID.fullmatch(repository):
        what = "no such file or directory" if looks_like_path else "no alias, file, directory or repository id"
        raise ModelNotFoundError(f"model {clip(model, 200)}: {what} (aliases: {', '.join(ALIASES)})")
    if file_name and not file_name.endswith(".gguf"):
        raise ConfigError(f"model {clip(model, 200)}: the part after ':' must name a .gguf file")
    return ModelFiles(model, _from_repository(repository, file_name, load_format, progress))


def _in_directory(directory: Path, load_format: str) -> Path:
    """The directory itself, or the one GGUF model in it."""
    has_config = (directory / "config.json").is_file()
    models = _gguf_models([path.name for path in directory.glob("*.gguf")])
    if load_format == "gguf" or not has_config:
        prefer_gguf = bool(models)
    else:
        prefer_gguf = load_format == "auto" and len(models) == 1 and not any(directory.glob("*.safetensors"))
    if not prefer_gguf:
        if not has_config:
            raise ModelNotFoundError(f"{directory}: holds neither config.json nor a GGUF file")
        return directory
    if len(models) > 1:
        raise ModelNotFoundError(f"{directory}: holds {len(models)} GGUF models; name one: {_listed(models)}")
    return directory / models[0][0]


def _gguf_models(names: list[str]) -> list[list[str]]:
    """GGUF file names, the parts of a split model taken together, in order."""
    groups: dict[str, list[str]] = {}
    for name in sorted(name for name in names if name.endswith(".gguf")):
        match = GGUF_PART.fullmatch(name)
        groups.setdefault(match[1] if match else name, []).append(name)
    return list(groups.values())


def _listed(models: list[list[str]]) -> str:
    return ", ".join(clip(group[0]) for group in models[:5]) + (", …" if len(models) > 5 else "")


# --- Hugging Face ----------------------------------------------------------------------------------------------------


def _from_repository(repository: str, file_name: str, load_format: str, progress: Progress | None) -> Path:
    import huggingface_hub  # slow to import, and it reads the environment then
    from huggingface_hub import constants

    problem: Exception | None = None
    sizes: dict[str, int] | None = None
    if not constants.HF_HUB_OFFLINE:
        try:
            info = huggingface_hub.HfApi().model_info(repository, files_metadata=True)
            sizes = {item.rfilename: item.size or 0 for item in info.siblings or []}
        except Exception as error:  # the client's network errors changed class over its versions
            problem = error
    if sizes is None:
        return _from_cache(repository, file_name, load_format, problem)
    wanted = _choose(repository, list(sizes), file_name, load_format)

    def fetch() -> Path:
        if isinstance(wanted, list):
            paths = [huggingface_hub.hf_hub_download(repository, name) for name in wanted]
            return Path(paths[0])
        return Path(_snapshot(repository, load_format, local_files_only=False))

    chosen = wanted if isinstance(wanted, list) else [name for name in sizes if _is_wanted(name, load_format)]
    cache = Path(constants.HF_HUB_CACHE) / ("models--" + repository.replace("/", "--")) / "blobs"
    try:
        with _watching(cache, sum(sizes[name] for name in chosen), f"Downloading {repository}", progress):
            return fetch()
    except Exception as error:
        raise _explain(repository, error) from None


def _snapshot(repository: str, load_format: str, *, local_files_only: bool) -> str:
    import huggingface_hub

    patterns = CONFIG_PATTERNS if load_format == "dummy" else WEIGHT_PATTERNS
    path = huggingface_hub.snapshot_download(
        repository, allow_patterns=patterns, ignore_patterns=IGNORE_PATTERNS, local_files_only=local_files_only
    )
    return str(path)


def _is_wanted(name: str, load_format: str) -> bool:
    patterns = CONFIG_PATTERNS if load_format == "dummy" else WEIGHT_PATTERNS
    return any(fnmatch(name, p) for p in patterns) and not any(fnmatch(name, p) for p in IGNORE_PATTERNS)


def _choose(repository: str, names: list[str], file_name: str, load_format: str) -> list[str] | None:
    """The GGUF files to take from a repository; None for config.json with or without safetensors."""
    models = _gguf_models(names)
    if file_name:
        for group in models:
            if file_name in group:
                return group
        raise ModelNotFoundError(f"{repository}: holds no file {clip(file_name)}")
    if load_format == "dummy" and "config.json" in names:
        return None
    has_weights = any(name.endswith(".safetensors") and _is_wanted(name, load_format) for name in names)
    if load_format != "gguf" and has_weights:
        if "config.json" not in names:
            raise ModelNotFoundError(f"{repository}: holds no config.json")
        return None
    if load_format == "safetensors" or not models:
        kind = {"safetensors": "safetensors", "gguf": "GGUF"}.get(load_format, "safetensors or GGUF")
        raise ModelNotFoundError(f"{repository}: holds no {kind} weights")
    if len(models) > 1:
        raise ModelNotFoundError(
            f"{repository}: holds {len(models)} GGUF models; name one as {repository}:FILE.gguf: {_listed(models)}"
        )
    return models[0]


def _from_cache(repository: str, file_name: str, load_format: str, problem: Exception | None) -> Path:
    """What an earlier download left in huggingface_hub's cache; else `problem` (None: offline mode) as an error."""
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def whole_snapshot() -> Path:
        return _in_directory(Path(_snapshot(repository, load_format, local_files_only=True)), load_format)

    def only_gguf() -> Path:
        path = huggingface_hub.snapshot_download(repository, allow_patterns=["*.gguf"], local_files_only=True)
        return _in_directory(Path(path), "gguf")

    def named_file() -> Path:
        match = GGUF_PART.fullmatch(file_name)
        count = int(file_name.removesuffix(".gguf")[-5:]) if match else 1
        names = [f"{match[1]}-{i:05}-of-{count:05}.gguf" for i in range(1, count + 1)] if match else [file_name]
        paths = [huggingface_hub.hf_hub_download(repository, name, local_files_only=True) for name in names]
        return Path(paths[0])

    attempts: list[Callable[[], Path]] = [named_file] if file_name else [whole_snapshot, only_gguf]
    for attempt in attempts:
        try:
            return attempt()
        except (LocalEntryNotFoundError, ModelNotFoundError):
            continue
        except Exception as error:
            raise _explain(repository, error) from None
    if problem is not None:
        raise _explain(repository, problem) from None
    raise ModelNotFoundError(f"{repository}: not in the local cache, and HF_HUB_OFFLINE forbids to download it")


def _explain(repository: str, error: Exception) -> ModelError:
    """One line for whatever huggingface_hub raised."""
    from huggingface_hub import errors

    if isinstance(error, ModelError):
        return error
    if isinstance(error, errors.GatedRepoError):
        return ModelError(
            f"{repository}: gated; accept its terms on the hub and set HF_TOKEN to a token that may read it"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return ModelNotFoundError(f"{repository}: no such repository on the hub, or private (then set HF_TOKEN)")
    if isinstance(error, errors.HFValidationError):
        return ModelNotFoundError(f"{repository}: not a valid repository id")
    if isinstance(error, errors.HfHubHTTPError):
        status: Any = getattr(error.response, "status_code", "an error")
        hint = "; check HF_TOKEN" if status in (401, 403) else ""
        return ModelError(f"{repository}: the hub answered with status {status}{hint}")
    if isinstance(error, errors.LocalEntryNotFoundError):
        return ModelError(f"{repository}: not in the local cache, and the hub cannot be reached")
    if isinstance(error, OSError) and error.errno is not None and error.filename is not None:
        return ModelError(f"{repository}: {error.strerror}: {clip(error.filename, 200)}")
    return ModelError(
        f"{repository}: not in the local cache, and the hub cannot be reached "
        f"({type(error).__name__}: {clip(error, 120)})"
    )


@contextlib.contextmanager
def _watching(directory: Path, total: int, description: str, progress: Progress | None) -> Iterator[None]:
    """Report the growth of a directory while the body runs; the client's own bars are off meanwhile.

    Watching the files works with every version of the client and every way it transfers.
    """
    if progress is None:
        yield
        return
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    done = threading.Event()

    def watch() -> None:
        while not done.wait(POLL_SECONDS):
            progress(description, min(directory_bytes(directory), total), total)

    watcher = threading.Thread(target=watch, name="download-progress", daemon=True)
    were_disabled = are_progress_bars_disabled()
    disable_progress_bars()
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
        if not were_disabled:
            enable_progress_bars()
    progress(description, total, total)
