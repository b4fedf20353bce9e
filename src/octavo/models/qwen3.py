"""Qwen3 (dense): Llama with an RMS norm over each head of q and k.

What differs from Llama is told by the spec's fields, which `octavo.models.spec_from` reads from the files.
"""

from octavo.models.blocks import decoder as forward

__all__ = ["forward"]
