"""What the tests of the compiled codecs share: inputs that are likely to go wrong, and the loops under test."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest

from covey.compress import kernels

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from covey.compress.codec import Bytes, Floats

SIZES = [0, 1, 7, 8, 255, 256, 257, 1003, 100_000]
BLOCKS = [8, 24, 200, 256, 1 << 16]
KEYS = [None, 0, 0xDEADBEEF]
FLT_MAX = np.finfo(np.float32).max
# Zero, the smallest and the greatest denormal, the smallest normal number, a third, one and its neighbours, numbers
# around the smallest and the greatest of float16 and the greatest of bfloat16, the greatest of all, infinity, and NaNs
# that signal or do not, with and without payload. Each also with the other sign.
SPECIAL_BITS = [0x00000000, 0x00000001, 0x007FFFFF, 0x00800000, 0x3EAAAAAB, 0x3F7FFFFF, 0x3F800000, 0x3F800001,
                0x33000000, 0x33000001, 0x387FFFFF, 0x38800000, 0x477FEFFF, 0x477FF000, 0x47800000,
                0x7F7F0000, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7F802000, 0x7FA00000,
                0x7FBFFFFF, 0x7FC00000, 0x7FC00001, 0x7FC12345, 0x7FFFFFFF]  # fmt: skip
SPECIALS = np.array([bits | sign for bits in SPECIAL_BITS for sign in (0, 1 << 31)], np.uint32).view(np.float32)


class Format(NamedTuple):
    """A codec with compiled loops."""

    name: str
    has_blocks: bool

    def wire_bytes(self, count: int, block: int) -> int:
        if not self.has_blocks:
            return 2 * count
        level_bytes = kernels.int8_bytes if self.name == "int8" else kernels.int4_bytes
        return sum(4 + level_bytes(min(block, count - start)) for start in range(0, count, block))

    def loop(self, module: Any, action: str) -> Callable[..., Any]:
        """Return the loop "encode", "decode" or "decode_add" of `kernels` (numpy's) or `compiled`."""
        found: Callable[..., Any] = getattr(module, f"{action}_{self.name}")
        return found.__wrapped__ if module is kernels else found  # type: ignore[attr-defined]


FORMATS = [Format("int8", True), Format("int4", True), Format("fp16", False), Format("bf16", False)]
each_format = pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)


def any_bits(count: int, seed: int) -> Floats:
    """Return floats of all classes: most are numbers of any magnitude, one of 256 is infinite or NaN."""
    return np.frombuffer(np.random.default_rng([seed, count]).bytes(4 * count), np.float32).copy()


def normal(count: int, seed: int) -> Floats:
    return np.random.default_rng([seed, count]).standard_normal(count, np.float32)


def inputs() -> Iterator[tuple[str, Floats]]:
    for size in SIZES:
        yield f"normal {size}", normal(size, 1)
        yield f"any bits {size}", any_bits(size, 2)
    rng = np.random.default_rng(3)
    yield "specials", SPECIALS
    yield "a few specials", np.where(rng.random(5000) < 0.002, rng.choice(SPECIALS, 5000), normal(5000, 4))
    for name, value in (("one infinity", -np.inf), ("one NaN", np.nan)):
        x = normal(601, 5)
        x[300] = value
        yield name, x
    yield "zeros of both signs", np.tile(np.array([0.0, -0.0], np.float32), 300)
    yield "denormals", rng.integers(-(1 << 22), 1 << 22, 1003).astype(np.float32) * np.float32(2.0**-149)
    yield "around the smallest scale", normal(1003, 7) * np.float32(2.0**-120)
    yield "around the greatest number", np.tile(np.array([FLT_MAX, -FLT_MAX, FLT_MAX / 3, 1], np.float32), 300)
    # With blocks of 256 the scale is 1, so that every second element is a tie of the rounding.
    yield "ties of int8", np.arange(254, -255, -1).astype(np.float32) / np.float32(2)
    yield "ties of int4", np.arange(14, -15, -1).astype(np.float32) / np.float32(2)
    yield "ties of float16", (1 + np.arange(4001, dtype=np.float32) * np.float32(2.0**-11)).astype(np.float32)
    yield "ties of bfloat16", (1 + np.arange(4001, dtype=np.float32) * np.float32(2.0**-8)).astype(np.float32)


def options(form: Format) -> list[tuple[int, ...]]:
    """Return the arguments of a decoder besides the arrays: none for a cast, the block for a quantiser."""
    return [(block,) for block in BLOCKS] if form.has_blocks else [()]


def same(got: Any, expected: Any, what: object) -> None:
    """Fail unless two arrays have the same bits; say where they differ first."""
    words = got.view(f"u{got.itemsize}"), expected.view(f"u{got.itemsize}")
    wrong = np.flatnonzero(words[0] != words[1])
    assert not wrong.size, (what, wrong.size, wrong[0], *(hex(each[wrong[0]]) for each in words))


def encoded(form: Format, module: Any, x: Floats, *how: Any) -> Bytes:
    """Return what a loop writes. Bytes that it forgets are 0xa5."""
    wire = np.full(form.wire_bytes(x.size, how[0] if how else 1), 0xA5, np.uint8)
    form.loop(module, "encode")(x, wire, *how)
    return wire


def bytes_at(address: int, length: int) -> Bytes:
    """Return `length` bytes that begin at `address` modulo 64."""
    memory = np.zeros(length + 128, np.uint8)
    start = (address - memory.ctypes.data) % 64
    return memory[start : start + length]


def floats_at(address: int, count: int) -> Floats:
    return bytes_at(address, 4 * count).view(np.float32)
