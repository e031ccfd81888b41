"""The compiled loops of the codecs give the bytes and bits of numpy's."""

from __future__ import annotations

import functools
import sys
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.support.codec_inputs import (
    FORMATS,
    KEYS,
    SIZES,
    SPECIALS,
    Format,
    any_bits,
    each_format,
    encoded,
    floats_at,
    inputs,
    normal,
    options,
    same,
)
from tests.support.compiled import needs_native
from tests.support.waiting import DEADLINE

from covey.base.native import Native, native
from covey.compress import compiled, kernels
from covey.compress.codec import encode_with_residual
from covey.compress.quantisers import BF16, FP16, Int4, Int8

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.compress.codec import Bytes, Codec, Floats

pytestmark = needs_native

CODECS: list[Codec] = [
    *(FP16(), BF16(), Int8(), Int4(), Int8(block=24), Int4(block=200), Int8(block=1 << 16)),
    *(Int8(stochastic=True, seed=7), Int4(block=40, stochastic=True)),
]


@each_format
def test_encoding_gives_the_bytes_of_numpy(form: Format) -> None:
    for name, x in inputs():
        for how in options(form):
            for key in KEYS if form.has_blocks else [None]:
                arguments = (*how, key) if form.has_blocks else ()
                same(encoded(form, compiled, x, *arguments), encoded(form, kernels, x, *arguments), (name, arguments))


def check_decoding(form: Format, wire: Bytes, out: Floats, how: tuple[int, ...], name: str) -> None:
    """Decode into `out` and add to `out`, in C and in numpy. Of the sum of two NaNs, which one it is may differ."""
    results = []
    for module in (compiled, kernels):
        decoded, added = np.full_like(out, 123.0), out.copy()
        form.loop(module, "decode")(wire, decoded, *how)
        form.loop(module, "decode_add")(wire, added, *how)
        results.append((decoded, added))
    (decoded, added), (expected, expected_sum) = results
    same(decoded, expected, (name, how))
    is_pair = np.isnan(out) & np.isnan(expected)
    assert np.isnan(added[is_pair]).all()
    same(added[~is_pair], expected_sum[~is_pair], (name, how, "added"))


@each_format
def test_decoding_gives_the_bits_of_numpy(form: Format) -> None:
    for name, x in inputs():
        for how in options(form):
            wire = encoded(form, kernels, x, *how)
            check_decoding(form, wire, normal(x.size, 8), how, name)
            check_decoding(form, wire, any_bits(x.size, 9), how, name)


@each_format
def test_any_bytes_of_a_peer_are_decoded_to_the_bits_of_numpy(form: Format) -> None:
    for size in SIZES:
        for how in options(form):
            wire = np.random.default_rng([10, size]).integers(0, 256, form.wire_bytes(size, *(how or (1,))), np.uint8)
            check_decoding(form, wire, normal(size, 11), how, f"noise {size}")


@pytest.mark.parametrize("form", FORMATS[2:], ids=lambda form: form.name)
def test_every_half_is_decoded_to_the_bits_of_numpy(form: Format) -> None:
    every = np.arange(1 << 16, dtype="<u2").view(np.uint8)
    check_decoding(form, every, normal(1 << 16, 12), (), "every half")
    unaligned = np.zeros(every.size + 1, np.uint8)[1:]
    unaligned[:] = every
    check_decoding(form, unaligned, normal(1 << 16, 12), (), "every half, not aligned")


@pytest.mark.parametrize("form", FORMATS[2:], ids=lambda form: form.name)
def test_every_half_and_its_neighbours_are_encoded_to_the_bytes_of_numpy(form: Format) -> None:
    every = np.zeros(1 << 16, np.float32)
    form.loop(kernels, "decode")(np.arange(1 << 16, dtype="<u2").view(np.uint8), every)
    halfway = every.view(np.uint32) + np.uint32(0x1000 if form.name == "fp16" else 0x8000)
    for bits in (every.view(np.uint32), halfway, halfway - np.uint32(1), halfway + np.uint32(1)):
        x = bits.view(np.float32)
        same(encoded(form, compiled, x), encoded(form, kernels, x), "every half")


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_the_residual_is_what_the_encoding_lost(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop that encodes and writes the residual in one pass does what numpy does in three."""
    for name, x in inputs():
        wire, expected = np.full(codec.wire_bytes(x.size), 0xA5, np.uint8), np.full_like(x, np.nan)
        with monkeypatch.context() as patched:
            patched.setattr(compiled, "native", lambda: Native(None, "this is the reference"))
            encode_with_residual(codec, x, wire, expected, 33)
        in_place = x.copy()
        for source, residual in ((x, np.full_like(x, np.nan)), (in_place, in_place)):
            got = np.full_like(wire, 0xA5)
            assert codec.encode_fused(source, got, residual, 33)
            same(got, wire, name)
            same(residual, expected, name)


def test_random_rounding_depends_on_the_index_of_an_element_and_not_on_its_block() -> None:
    """The encoding of a part is that part of the encoding, if the first index says where it begins."""
    x, block = normal(2000, 13), 256
    for form in FORMATS[:2]:
        encode = getattr(native().module, f"{form.name}_encode")
        whole = encoded(form, compiled, x, block, 77)
        for first in (block, 3 * block):
            part = np.zeros(form.wire_bytes(x.size - first, block), np.uint8)
            encode(x[first:], part, block, None, 77, first)
            same(part, whole[form.wire_bytes(first, block) :], (form, first))
            wrapped = np.zeros_like(part)
            encode(x[first:], wrapped, block, None, 77, first + (1 << 32))
            same(wrapped, part, "the lower 32 bits of the index count")


def test_the_greatest_elements_are_those_that_numpy_selects() -> None:
    rng = np.random.default_rng(14)
    few = np.array([1.0, -1.0, 2.0, 0.0, -0.0], np.float32)
    arrays = [*inputs(), ("few values", rng.choice(few, 5003)), ("all equal", np.full(1003, -2.5, np.float32))]
    arrays += [("ascending", np.arange(5003, dtype=np.float32)), ("NaNs", rng.choice(SPECIALS[-16:], 1003))]
    arrays += [("digits", rng.integers(0x3F800000, 0x3F800000 + (1 << span), 5003).astype(np.uint32).view(np.float32))
               for span in (3, 9, 10, 12, 19, 20, 23)]  # fmt: skip
    for name, x in arrays:
        order = np.lexsort((np.arange(x.size), -kernels.magnitudes(x).astype(np.int64)))
        for kept in {0, min(1, x.size), x.size // 100, x.size // 3, max(0, x.size - 1), x.size}:
            got = compiled.top_indices(x, kept)
            same(got, np.sort(order[:kept]), (name, kept))
            if kept:
                same(got, kernels.top_indices.__wrapped__(x, kept), (name, kept))  # type: ignore[attr-defined]


def test_the_greatest_elements_are_found_where_a_sample_misleads() -> None:
    """Every 67th element is sampled. Here these are greater or smaller than the rest, or the order is not random."""
    rng, count = np.random.default_rng(20), 70_001
    sampled_large, sampled_small, some_equal = normal(count, 21), normal(count, 22), normal(count, 23)
    sampled_large[::67] = 100 + rng.random(sampled_large[::67].size, np.float32)
    sampled_small[::67] = 0
    some_equal[rng.random(count) < 0.02] = -50
    few_large = np.zeros(count, np.float32)
    few_large[5:count:7919] = np.nan
    arrays = [
        sampled_large,
        sampled_small,
        some_equal,
        few_large,
        np.sort(normal(count, 24)),
        np.ones(count, np.float32),
    ]
    arrays += [any_bits(count, 25), normal(1 << 15, 26), normal((1 << 15) - 1, 27)]
    for position, x in enumerate(arrays):
        order = np.lexsort((np.arange(x.size), -kernels.magnitudes(x).astype(np.int64)))
        for kept in (1, 9, 10, 700, 1044, 1045, 1046, 5000, x.size // 4, x.size // 4 + 1):
            same(compiled.top_indices(x, kept), np.sort(order[:kept]), (position, kept))


def test_other_threads_run_while_a_loop_works() -> None:
    """No thread is told to give the lock up here, so the others run only if the loop does without it."""
    module, count = native().module, 1 << 20
    x, out = normal(count, 17), np.zeros(count, np.float32)
    calls = [functools.partial(module.topk, x, 9, np.zeros(9, np.int64))]
    for form in FORMATS:
        wire = np.zeros(form.wire_bytes(count, 256), np.uint8)
        encode, decode = (getattr(module, f"{form.name}_{action}") for action in ("encode", "decode"))
        block, dither = ((256,), (None, 0)) if form.has_blocks else ((), ())
        calls.append(functools.partial(encode, x, wire, *block, None, *dither))
        calls.append(functools.partial(decode, wire, out, *block, True))
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        for call in calls:
            ends: list[bool] = []

            def work(call: Callable[[], Any] = call, ends: list[bool] = ends) -> None:
                while not ends:
                    call()

            thread = threading.Thread(target=work)
            thread.start()
            ends.append(True)
            thread.join(DEADLINE)
            assert not thread.is_alive()
    finally:
        sys.setswitchinterval(before)


def test_the_kernels_choose_the_compiled_loops_and_numpy_for_arrays_that_are_not_aligned() -> None:
    aligned, unaligned = floats_at(0, 1003), floats_at(1, 1003)
    aligned[:] = unaligned[:] = normal(1003, 18)
    results = []
    for x in (aligned, unaligned):
        wire = np.zeros(FORMATS[0].wire_bytes(x.size, 256), np.uint8)
        kernels.encode_int8(x, wire, 256, 5)
        kernels.decode_add_int8(wire, x, 256)
        results.append((wire, x.copy(), kernels.top_indices(x, 10)))
    for one, other in zip(*results, strict=True):
        same(one, other, "aligned or not")
    with pytest.raises(ValueError, match="overlap"):  # which numpy's loop would not notice
        kernels.decode_int8(aligned.view(np.uint8)[: 4 + 1003 // 4], aligned[: 1003 // 4], 256)
