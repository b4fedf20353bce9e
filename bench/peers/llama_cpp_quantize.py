"""Requantises a GGUF file with llama.cpp's own function: SOURCE TARGET TYPE."""

from __future__ import annotations

import ctypes
import os
import sys

import llama_cpp

FTYPES = {
    "Q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
    "Q4_1": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_1,
    "Q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
    "BF16": llama_cpp.LLAMA_FTYPE_MOSTLY_BF16,
}

source, target, name = sys.argv[1:]
params = llama_cpp.llama_model_quantize_default_params()
params.ftype = FTYPES[name]
params.allow_requantize = True
partial = target + ".partial"
status = llama_cpp.llama_model_quantize(source.encode(), partial.encode(), ctypes.byref(params))
if status != 0:
    sys.exit(f"llama_model_quantize to {name} failed with {status}")
os.replace(partial, target)
