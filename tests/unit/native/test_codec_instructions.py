"""The loops of the codecs give the same bits with every instruction set that this processor has, not only the best."""

from __future__ import annotations

import ctypes
import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
from tests.support.codec_inputs import FORMATS, KEYS, inputs, normal, same
from tests.support.compiled import needs_compiler, shared_library

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

pytestmark = needs_compiler

SETS = range(3)

QUANTISE = """
#include "quantise.c"
__attribute__((visibility("default")))
int run(int set, int is_packed, int64_t block, const uint32_t *key, const float *x, int64_t count, uint8_t *wire,
        float *residual, float *out)
{
    struct quantiser quantiser = is_packed ? INT4 : INT8;
    struct dither dither = {.key = key == NULL ? 0 : *key, .first = 0xfffffff0};
    quantiser.block = block;
    if (set > (int)instructions_here())
        return 0;
    quantise_with((enum instructions)set, &quantiser, x, count, wire, residual, key == NULL ? NULL : &dither);
    dequantise_with((enum instructions)set, &quantiser, wire, out, count, true);
    return 1;
}
"""
CAST = """
#include "cast.c"
__attribute__((visibility("default")))
int run(int set, int is_bfloat16, const float *x, int64_t count, uint8_t *wire, float *residual, float *out)
{
    if (set > (int)instructions_here())
        return 0;
    loops_for((enum instructions)set).encode(is_bfloat16, x, count, wire, residual);
    loops_for((enum instructions)set).decode(is_bfloat16, wire, out, count, true);
    return 1;
}

__attribute__((visibility("default")))
int decode(int set, int is_bfloat16, const uint8_t *wire, float *out, int64_t count)
{
    if (set > (int)instructions_here())
        return 0;
    loops_for((enum instructions)set).decode(is_bfloat16, wire, out, count, false);
    return 1;
}
"""
TOPK = """
#include "topk.c"
__attribute__((visibility("default")))
int run(int set, const float *x, uint32_t count, uint32_t kept, int64_t *indices)
{
    return set <= (int)instructions_here() && select_with((enum instructions)set, x, count, kept, indices);
}
"""


def pointer(array: NDArray[Any]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def check_all_same(results: list[list[NDArray[Any]]], what: object) -> None:
    """Fail unless all instruction sets have written the same arrays."""
    assert results
    for arrays in results[1:]:
        for got, expected in zip(arrays, results[0], strict=True):
            same(got, expected, what)


def test_quantisers(tmp_path: Path) -> None:
    run = ctypes.PyDLL(str(shared_library(tmp_path, QUANTISE))).run
    for (name, x), form, block, key in itertools.product(inputs(), FORMATS[:2], (24, 256), KEYS):
        how = (int(form.name == "int4"), ctypes.c_int64(block))
        word = None if key is None else ctypes.byref(ctypes.c_uint32(key))
        results = []
        for instructions in SETS:
            wire = np.zeros(form.wire_bytes(x.size, block), np.uint8)
            written: list[NDArray[Any]] = [wire, np.zeros_like(x), normal(x.size, 1)]
            arrays = (pointer(x), ctypes.c_int64(x.size), *(pointer(each) for each in written))
            if run(instructions, *how, word, *arrays):
                results.append(written)
        check_all_same(results, (name, form, block, key))


def test_casts(tmp_path: Path) -> None:
    run = ctypes.PyDLL(str(shared_library(tmp_path, CAST))).run
    every = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)
    more = [("every bfloat16", every.view(np.float32)), ("above the ties", (every + 0x8001).view(np.float32))]
    for (name, x), form in itertools.product([*inputs(), *more], FORMATS[2:]):
        results = []
        for instructions in SETS:
            written: list[NDArray[Any]] = [np.zeros(2 * x.size, np.uint8), np.zeros_like(x), normal(x.size, 1)]
            arrays = (pointer(x), ctypes.c_int64(x.size), *(pointer(each) for each in written))
            if run(instructions, int(form.name == "bf16"), *arrays):
                results.append(written)
        check_all_same(results, (name, form))


def test_every_half_is_decoded_alike(tmp_path: Path) -> None:
    decode = ctypes.PyDLL(str(shared_library(tmp_path, CAST))).decode
    every = np.arange((1 << 16) + 5, dtype=np.int64).astype("<u2")
    for form in FORMATS[2:]:
        results = []
        for instructions in SETS:
            out = np.zeros(every.size, np.float32)
            how = (int(form.name == "bf16"), pointer(every), pointer(out), ctypes.c_int64(every.size))
            if decode(instructions, *how):
                results.append([out])
        check_all_same(results, form)


def test_selections(tmp_path: Path) -> None:
    run = ctypes.PyDLL(str(shared_library(tmp_path, TOPK))).run
    for (name, x), part in itertools.product(inputs(), (50, 2, 1)):
        kept = x.size // part
        results = []
        for instructions in SETS:
            indices = np.zeros(kept, np.int64)
            if run(instructions, pointer(x), ctypes.c_uint32(x.size), ctypes.c_uint32(kept), pointer(indices)):
                results.append([indices])
        check_all_same(results, (name, kept))
