"""Weight files on disk, opened: named views of tensors, whatever container they came from."""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from octavo.errors import CorruptFileError, ModelError, ModelNotFoundError

Progress = Callable[[str, int, int | None], None]
"""progress(description, done, total): called now and then during long work; total is None if unknown."""

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class TensorView:
    """One tensor as raw bytes.

    `shape` is Hugging Face's, row-major: (out, in) for a matrix. `format` is a name of
    `octavo.weights.formats.FORMATS`; any other name is a type that this version cannot compute with
    (then `data` may be empty). `data` is uint8, 1-D and contiguous, rows * row_bytes long, usually a
    read-only view of a mapped file. `source` names the file, for messages.
    """

    name: str
    shape: tuple[int, ...]
    format: str
    data: Bytes
    source: str


@dataclass(slots=True)
class Checkpoint:
    """All tensors of one model under the container's own names, with its metadata.

    `metadata` is the key-value section of a GGUF file, or `__metadata__` of safetensors files.
    `notes` are one-line remarks for the start-up log.
    """

    kind: Literal["gguf", "safetensors"]
    tensors: dict[str, TensorView]
    metadata: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Where a model lies on this machine: `path` is a GGUF file or a directory with config.json.

    `name` is what the user called it (alias, file stem, directory name or repository id).
    """

    name: str
    path: Path

    @property
    def kind(self) -> Literal["gguf", "directory"]:
        return "directory" if self.path.is_dir() else "gguf"


@dataclass(frozen=True, slots=True)
class MappedFile:
    """A file mapped read-only. The mapping lives as long as any array made from it."""

    name: str
    size: int
    buffer: mmap.mmap | bytes

    def view(self, offset: int, num_bytes: int) -> Bytes:
        """Bytes [offset, offset + num_bytes) without a copy; the caller has checked the range."""
        assert 0 <= offset <= offset + num_bytes <= self.size
        return np.frombuffer(self.buffer, dtype=np.uint8, count=num_bytes, offset=offset)


def clip(text: object, limit: int = 80) -> str:
    """`text` made safe for a one-line message: printable, quoted, at most about `limit` characters."""
    raw = str(text)
    return repr(raw if len(raw) <= limit else raw[:limit] + "…")


def map_file(path: Path) -> MappedFile:
    """Map a regular file.

    Raises ModelNotFoundError if there is no such file, CorruptFileError if it is empty, ModelError if
    it is no regular file or cannot be read.
    """
    try:
        # A FIFO would block in open(), so look before opening.
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise ModelError(f"{path}: not a regular file")
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size == 0:
                raise CorruptFileError(f"{path}: the file is empty")
            return MappedFile(path.name, size, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ))
    except FileNotFoundError:
        raise ModelNotFoundError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:  # ValueError: the file shrank while it was opened, or a NUL in its name
        raise ModelError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
