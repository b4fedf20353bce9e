"""From the engine's bytes to a vector for people.

Without numpy: the front end would import it, which takes a tenth of a second, for this alone.
"""

from __future__ import annotations

import math
from array import array


def vector(embedding: bytes, *, normalize: bool) -> array[float]:
    """float32 [hidden]; with `normalize` of length 1 (a vector of zeros stays as it is)."""
    values = array("f", embedding)
    length = math.hypot(*values) if normalize else 0.0
    return values if length == 0 else array("f", [value / length for value in values])
