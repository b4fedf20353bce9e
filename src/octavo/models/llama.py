"""Llama 2, 3, 3.1, 3.2, SmolLM2, TinyLlama: the plain decoder; Llama 3.1 scales its rotary frequencies.

What differs from Llama is told by the spec's fields, which `octavo.models.spec_from` reads from the files.
"""

from octavo.models.blocks import decoder as forward

__all__ = ["forward"]
