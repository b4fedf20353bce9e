"""Mistral: Llama with sliding-window attention where the configuration sets it.

What differs from Llama is told by the spec's fields, which `octavo.models.spec_from` reads from the files.
"""

from octavo.models.blocks import decoder as forward

__all__ = ["forward"]
