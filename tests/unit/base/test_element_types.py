from __future__ import annotations

import array

import ml_dtypes
import numpy as np
import pytest
from tests.support.in_turn import in_turn

from covey.base.arithmetic import BFLOAT16, DTYPES, dtype_code


def test_codes_on_the_wire_never_change() -> None:
    assert [dtype.name for dtype in DTYPES] == [
        "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
        "float16", "bfloat16", "float32", "float64", "complex64", "complex128",
    ]  # fmt: skip
    assert [dtype_code(dtype) for dtype in DTYPES] == list(range(15))
    assert ml_dtypes.bfloat16 == BFLOAT16


@in_turn(code="bBhHiIlLqQfd")
def test_every_spelling_of_a_c_type_has_the_code_of_its_size(code: str) -> None:
    dtype = np.asarray(array.array(code)).dtype
    assert DTYPES[dtype_code(dtype)] == dtype


@pytest.mark.parametrize("name", [">f4", ">i8", ">c16", ">u2"])
def test_the_other_byte_order_is_refused_with_a_hint(name: str) -> None:
    with pytest.raises(TypeError, match="native byte order"):
        dtype_code(np.dtype(name))


@pytest.mark.parametrize("name", ["O", "U3", "S3", "M8[s]", "m8[s]", "V4", "i4,f4", "longdouble"])
def test_other_dtypes_are_refused_with_the_list_of_those_that_work(name: str) -> None:
    with pytest.raises(TypeError, match=r"cannot move arrays of .*It moves bool, int8"):
        dtype_code(np.dtype(name))
