"""From the engine's bytes to a vector for people."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def vector(embedding: bytes, *, normalize: bool) -> npt.NDArray[np.float32]:
    """float32 [hidden]; with `normalize` of length 1 (a vector of zeros stays as it is)."""
    values = np.frombuffer(embedding, dtype="<f4").astype(np.float32)
    if not normalize:
        return values
    length = float(np.sqrt(np.sum(values.astype(np.float64) ** 2)))
    return values if length == 0 else np.asarray(values / length, dtype=np.float32)
