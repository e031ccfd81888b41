"""The compiled loops of the codecs refuse arrays that do not fit, and write nowhere else than where they should."""

from __future__ import annotations

import contextlib
import threading

import numpy as np
import pytest
from tests.support.codec_inputs import Format, bytes_at, each_format, floats_at, normal
from tests.support.compiled import needs_native
from tests.support.waiting import DEADLINE

from covey.base.native import native

pytestmark = needs_native

ZEROS = np.zeros(300, np.float32)
WIRES = {"int8": 300 + 8, "int4": 150 + 8, "fp16": 600, "bf16": 600}


@each_format
def test_encoders_refuse_arrays_that_do_not_fit(form: Format) -> None:
    encode = getattr(native().module, f"{form.name}_encode")
    length = WIRES[form.name]
    how, tail = ((256,), (None, 0)) if form.has_blocks else ((), ())
    shared = bytes_at(0, 4096)
    read_only = np.zeros(length, np.uint8)
    read_only.flags.writeable = False
    constant = ZEROS.copy()
    constant.flags.writeable = False
    good = np.zeros(length, np.uint8)
    encode(constant, good, *how, None, *tail)
    for x, wire, residual in [
        (ZEROS, good[:-1], None),
        (ZEROS, np.zeros(length + 1, np.uint8), None),
        (ZEROS[:-2], good, None),
        (ZEROS, good.view(np.int8), None),
        (ZEROS, np.zeros(2 * length, np.uint8)[::2], None),
        (np.zeros(600, np.float32)[::2], good, None),
        (ZEROS.astype(np.float64)[:150], good, None),
        (ZEROS.view(np.uint32), good, None),
        (ZEROS.astype(">f4"), good, None),
        (floats_at(1, 300), good, None),
        (memoryview(bytearray(1201))[1:].cast("f"), good, None),
        (ZEROS, read_only, None),
        (shared[:1200].view(np.float32), shared[1199 : 1199 + length], None),
        (shared[1200:2400].view(np.float32), shared[1201 - length : 1201], None),
        (ZEROS, good, np.zeros(299, np.float32)),
        (ZEROS, good, np.zeros(300, np.float64)),
        (ZEROS, good, constant),
        (ZEROS, good, floats_at(2, 300)),
        (ZEROS, shared[1199 : 1199 + length], shared[:1200].view(np.float32)),
        (shared[4:1204].view(np.float32), good, shared[:1200].view(np.float32)),
    ]:
        with pytest.raises(ValueError, match=r"\w"):
            encode(x, wire, *how, residual, *tail)
    for wrong in [(None, good, *how, None, *tail), (ZEROS, "wire", *how, None, *tail), (ZEROS,), ()]:
        with pytest.raises(TypeError):
            encode(*wrong)
    assert not good.any() or form.has_blocks  # scales of zeros are not zero


@each_format
def test_decoders_refuse_arrays_that_do_not_fit(form: Format) -> None:
    decode = getattr(native().module, f"{form.name}_decode")
    length = WIRES[form.name]
    how = (256,) if form.has_blocks else ()
    shared = bytes_at(0, 4096)
    good, out = np.zeros(length, np.uint8), np.full(300, 5, np.float32)
    constant = ZEROS.copy()
    constant.flags.writeable = False
    for wire, target in [
        (good[:-1], out),
        (np.zeros(length + 1, np.uint8), out),
        (good, out[:-2]),
        (good.view(np.int8), out),
        (np.zeros(2 * length, np.uint8)[::2], out),
        (good, np.zeros(600, np.float32)[::2]),
        (good, np.zeros(300, np.float64)),
        (good, np.zeros(300, np.int32)),
        (good, floats_at(3, 300)),
        (good, memoryview(bytearray(1203))[3:].cast("f")),
        (good, constant),
        (shared[1199 : 1199 + length], shared[:1200].view(np.float32)),
        (shared[1201 - length : 1201], shared[1200:2400].view(np.float32)),
    ]:
        for adds in (False, True):
            with pytest.raises(ValueError, match=r"\w"):
                decode(wire, target, *how, adds)
    assert (out == 5).all()


def test_blocks_and_keys_out_of_range_are_refused() -> None:
    wire = np.zeros(304, np.uint8)
    for block in (0, -8, 7, 12, (1 << 16) + 8, 1 << 40):
        for call in (
            lambda block=block: native().module.int8_encode(ZEROS, wire, block, None, None, 0),
            lambda block=block: native().module.int4_decode(wire, ZEROS, block, False),
        ):
            with pytest.raises(ValueError, match="multiple of 8"):
                call()
    for key in (-1, 1 << 32, 1 << 80):
        with pytest.raises(ValueError, match="32 bits"):
            native().module.int8_encode(ZEROS, wire, 512, None, key, 0)
    with pytest.raises(TypeError):
        native().module.int8_encode(ZEROS, wire, 512, None, "key", 0)


def test_a_selection_that_does_not_fit_is_refused() -> None:
    topk = native().module.topk
    memory = bytes_at(0, 4096)
    constant = np.zeros(3, np.int64)
    constant.flags.writeable = False
    for x, kept, indices in [
        (ZEROS, 301, np.zeros(301, np.int64)),
        (ZEROS, -1, np.zeros(0, np.int64)),
        (ZEROS, 3, np.zeros(2, np.int64)),
        (ZEROS, 3, np.zeros(4, np.int64)),
        (ZEROS, 3, np.zeros(3, np.float64)),
        (ZEROS, 3, np.zeros(3, np.int32)),
        (ZEROS, 3, np.zeros(6, np.int64)[::2]),
        (ZEROS, 3, bytes_at(4, 24).view(np.int64)),
        (ZEROS, 3, constant),
        (ZEROS.astype(np.float64), 3, np.zeros(3, np.int64)),
        (floats_at(1, 300), 3, np.zeros(3, np.int64)),
        (memory[:1200].view(np.float32), 3, memory[1192:1216].view(np.int64)),
    ]:
        with pytest.raises(ValueError, match=r"\w"):
            topk(x, kept, indices)


def test_a_selection_from_an_array_that_changes_meanwhile_stays_in_its_memory() -> None:
    """While another thread writes to the array, the result is arbitrary, or an error; no other memory is written."""
    x, kept = normal(1 << 16, 15), 4000
    guarded = np.full(kept + 64, -7, np.int64)
    ends = threading.Event()

    def change() -> None:
        rng = np.random.default_rng(16)
        while not ends.is_set():
            np.copyto(x, rng.choice(np.array([0.0, 1e-30, 1.0, 1e30], np.float32)))
            np.copyto(x[::3], np.float32(2.0))

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(200):
            with contextlib.suppress(ValueError):
                native().module.topk(x, kept, guarded[32:-32])
            assert (guarded[:32] == -7).all()
            assert (guarded[-32:] == -7).all()
            assert ((guarded >= -7) & (guarded < x.size)).all()
    finally:
        ends.set()
        thread.join(DEADLINE)
