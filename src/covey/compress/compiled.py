"""The loops of the codecs in C (`covey._native`), under the names and with the arguments of `kernels.py`.

They give the bytes and bits of numpy's loops, with one exception: the sum of two NaNs is one of the two, and which one
it is may differ. They run without the GIL.
"""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any, Final, Literal, ParamSpec, TypeVar

import numpy as np

from covey.base.native import native

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.compress.codec import Bytes, Floats
    from covey.compress.kernels import Indices

    Parameters = ParamSpec("Parameters")
    Result = TypeVar("Result")

COMPILED_ELEMENTS_LIMIT: Final = (1 << 32) - 1
"""Elements of the longest array that is given to C, where `top_indices` counts in 32 bits."""


def is_usable(*arguments: Any) -> bool:
    """Tell whether the extension is there and can work on these arrays, which must be aligned."""
    return native().module is not None and all(
        each.flags.aligned and each.size <= COMPILED_ELEMENTS_LIMIT
        for each in arguments
        if isinstance(each, np.ndarray)
    )


def or_compiled(
    compiled: Callable[Parameters, Result],
) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Return a decorator of a numpy function, with which `compiled` is called instead where it can be.

    The numpy function is `__wrapped__` of the result.
    """

    def decorate(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        @wraps(function)
        def chosen(*args: Parameters.args, **keywords: Parameters.kwargs) -> Result:
            return (compiled if is_usable(*args) else function)(*args, **keywords)

        return chosen

    return decorate


def encode_int8(x: Floats, wire: Bytes, block: int, key: int | None = None) -> None:
    """Write levels from -127 to 127, one byte each."""
    native().module.int8_encode(x, wire, block, None, key, 0)


def decode_int8(wire: Bytes, out: Floats, block: int) -> None:
    """Overwrite `out` with what `encode_int8` wrote."""
    native().module.int8_decode(wire, out, block, False)


def decode_add_int8(wire: Bytes, out: Floats, block: int) -> None:
    """Add what `encode_int8` wrote to `out`."""
    native().module.int8_decode(wire, out, block, True)


def encode_int4(x: Floats, wire: Bytes, block: int, key: int | None = None) -> None:
    """Write levels from -7 to 7, plus 8, two in a byte."""
    native().module.int4_encode(x, wire, block, None, key, 0)


def decode_int4(wire: Bytes, out: Floats, block: int) -> None:
    """Overwrite `out` with what `encode_int4` wrote."""
    native().module.int4_decode(wire, out, block, False)


def decode_add_int4(wire: Bytes, out: Floats, block: int) -> None:
    """Add what `encode_int4` wrote to `out`."""
    native().module.int4_decode(wire, out, block, True)


def encode_fp16(x: Floats, wire: Bytes) -> None:
    """Write elements as float16."""
    native().module.fp16_encode(x, wire, None)


def decode_fp16(wire: Bytes, out: Floats) -> None:
    """Overwrite `out` with what `encode_fp16` wrote."""
    native().module.fp16_decode(wire, out, False)


def decode_add_fp16(wire: Bytes, out: Floats) -> None:
    """Add what `encode_fp16` wrote to `out`."""
    native().module.fp16_decode(wire, out, True)


def encode_bf16(x: Floats, wire: Bytes) -> None:
    """Write elements as bfloat16."""
    native().module.bf16_encode(x, wire, None)


def decode_bf16(wire: Bytes, out: Floats) -> None:
    """Overwrite `out` with what `encode_bf16` wrote."""
    native().module.bf16_decode(wire, out, False)


def decode_add_bf16(wire: Bytes, out: Floats) -> None:
    """Add what `encode_bf16` wrote to `out`."""
    native().module.bf16_decode(wire, out, True)


def top_indices(x: Floats, k: int) -> Indices:
    """Return the indices of the `k` greatest magnitudes, ascending."""
    indices = np.empty(min(k, x.size), np.int64)
    native().module.topk(x, indices.size, indices)
    return indices


def encode_fused_blocks(
    name: Literal["int8", "int4"], x: Floats, wire: Bytes, residual: Floats, block: int, key: int | None
) -> bool:
    """Encode, and write the residual, in one pass. Without the extension do nothing, and return False."""
    if not is_usable(x, residual):
        return False
    encode = native().module.int8_encode if name == "int8" else native().module.int4_encode
    encode(x, wire, block, residual, key, 0)
    return True


def encode_fused_cast(name: str, x: Floats, wire: Bytes, residual: Floats) -> bool:
    """Encode, and write the residual, in one pass. Without the extension do nothing, and return False."""
    if not is_usable(x, residual):
        return False
    encode = native().module.fp16_encode if name == "fp16" else native().module.bf16_encode
    encode(x, wire, residual)
    return True
