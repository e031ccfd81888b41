"""Arguments and results of calls: what is packed is unpacked as the receiver's annotations say, or refused."""

from __future__ import annotations

import dataclasses
import enum
import functools
import struct
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from msgspec.msgpack import Ext
from tests.support.in_turn import in_turn

from covey.base.arithmetic import BFLOAT16, DTYPES, dtype_code
from covey.base.errors import ConfigError, RemoteProtocolError
from covey.lab.fuzz.call_targets import HandleDouble, PlainConverter
from covey.wire import calls as wire
from covey.wire.call_values import ANY_VALUE, PART_BYTES, Signature, ValueDecoder, decoded, pack

CONVERTER = PlainConverter()


class Color(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Record:
    color: Color
    array: npt.NDArray[np.float32]
    numbers: set[int]


def there(value: Any, wanted: Any = Any) -> Any:
    """Return what a receiver that wants a type gets; its memory is its own."""
    parts = [bytearray(part) for part in pack(value, CONVERTER)]
    return ValueDecoder(wanted).decode(parts[0], parts, CONVERTER)


def called(function: Any, *args: Any, **named: Any) -> Any:
    """Call a function with what arrives."""
    parts = [bytearray(part) for part in pack((args, named), CONVERTER)]
    got, got_named = decoded(Signature(function, "function").arguments, parts[0], parts, CONVERTER)
    return function(*got, **got_named)


@in_turn(dtype=DTYPES)
@in_turn(shape=[(), (0,), (7,), (3, 5), (PART_BYTES,), (2, 0, 3)])
def test_arrays_of_every_dtype_and_shape_arrive_equal_and_writable(
    dtype: np.dtype[Any], shape: tuple[int, ...]
) -> None:
    chance = np.random.default_rng(1)
    array = (chance.integers(0, 2, shape) if dtype.kind == "b" else chance.integers(-100, 100, shape)).astype(dtype)
    got = there([array, {"a": array.T}])
    for wanted, found in ((array, got[0]), (array.T, got[1]["a"])):
        assert (found.dtype, found.shape) == (dtype, wanted.shape)
        assert np.array_equal(found, wanted)
        assert found.flags.writeable
        assert found.flags.aligned


def test_large_arrays_are_parts_that_are_not_copied_and_small_ones_are_in_the_body() -> None:
    large, small = np.arange(PART_BYTES, dtype=np.int64), np.arange(3)
    parts = pack([large, small, large[::2]], CONVERTER)
    assert len(parts) == 3
    assert np.shares_memory(np.frombuffer(parts[1], np.uint8), large)
    assert not np.shares_memory(np.frombuffer(parts[2], np.uint8), large)
    assert len(parts[0]) < 500
    assert wire.payload_of([b"x" * wire.CALL_INLINE_BYTES]).inline
    assert wire.payload_of([b"x", b"y" * wire.CALL_INLINE_BYTES]).sizes == (1, wire.CALL_INLINE_BYTES)


def test_an_array_has_the_documented_bytes() -> None:
    array = np.arange(6, dtype=np.int16).reshape(2, 3)
    (body,) = pack(array, CONVERTER)
    wanted = struct.pack("<BBB2Q", 0, dtype_code(array.dtype), 2, 2, 3) + array.tobytes()
    assert msgspec.msgpack.decode(body) == Ext(1, wanted)
    (body,) = pack(np.float32(1.5), CONVERTER)
    assert msgspec.msgpack.decode(body) == Ext(
        1, bytes((1, dtype_code(np.dtype(np.float32)), 0)) + struct.pack("<f", 1.5)
    )
    large = np.zeros(PART_BYTES, np.uint8)
    body, _ = pack(large, CONVERTER)
    wanted = struct.pack("<BBBQI", 0, dtype_code(large.dtype), 1, PART_BYTES, 1)
    assert msgspec.msgpack.decode(body) == Ext(2, wanted)
    (body,) = pack(HandleDouble(), CONVERTER)
    assert msgspec.msgpack.decode(body) == Ext(3, struct.pack("<BQ", 1, 7) + b"Double")
    (body,) = pack(((1, 2), {"a": 3}), CONVERTER)
    assert msgspec.msgpack.decode(body) == [[1, 2], {"a": 3}]


def test_the_receiver_decides_what_a_value_becomes() -> None:
    record = Record(Color.RED, np.arange(3, dtype=np.float32), {1, 2})
    got = there(record, Record)
    assert (got.color, got.numbers, got.array.tolist()) == (Color.RED, {1, 2}, [0.0, 1.0, 2.0])
    plain = there(record)
    assert (plain["color"], sorted(plain["numbers"])) == ("red", [1, 2])
    assert there(datetime(2026, 1, 2)) == "2026-01-02T00:00:00"
    assert there(datetime(2026, 1, 2, tzinfo=UTC)) == datetime(2026, 1, 2, tzinfo=UTC)
    assert [there(Decimal("1.50")), there(UUID(int=5))] == ["1.50", "00000000-0000-0000-0000-000000000005"]
    assert there(Decimal("1.50"), Decimal) == Decimal("1.50")
    assert there(np.float64(2.5)) == 2.5
    assert there(3, np.int8) == np.int8(3)
    assert isinstance(there(3, np.int8), np.int8)
    assert there(np.zeros(2, BFLOAT16)).dtype == BFLOAT16
    assert isinstance(there(HandleDouble(), HandleDouble), HandleDouble)


def test_an_array_of_any_dtype_is_what_its_annotation_says() -> None:
    for dtype in DTYPES:
        assert there(np.ones(2, dtype), npt.NDArray[Any]).dtype == dtype
        assert there(np.ones(2, dtype), np.ndarray[Any, np.dtype[Any]]).dtype == dtype
        assert there(np.ones(2, dtype), npt.NDArray[np.generic]).dtype == dtype
    assert there(np.ones(2, np.float32), npt.NDArray[np.floating[Any]]).dtype == np.float32


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (1, str),
        (1, np.ndarray),
        ([1], npt.NDArray[np.float64]),
        (np.arange(3), npt.NDArray[np.float64]),
        ({"color": "blue", "array": np.zeros(1, np.float32), "numbers": []}, Record),
        ("x", np.float32),
        (1, HandleDouble),
    ],
)
def test_a_value_of_another_type_is_refused(value: Any, wanted: Any) -> None:
    with pytest.raises(TypeError, match=r"(?i)expected|invalid"):
        there(value, wanted)


def test_what_cannot_be_sent_is_refused_with_a_remedy() -> None:
    loop: list[Any] = []
    loop.append(loop)
    for value, words in (
        (object(), "node.export"),
        (lambda: 1, "function"),
        (loop, "contains itself"),
        (1 << 80, "cannot send"),
        (np.zeros(2, "datetime64[s]"), "cannot move"),
        (np.zeros((1,) * 33), "33 dimensions"),
    ):
        with pytest.raises(TypeError, match=words):
            pack(value, CONVERTER)


def test_bytes_that_no_sender_makes_are_an_error_of_the_protocol() -> None:
    for body in (b"", b"\xc1", msgspec.msgpack.encode(Ext(1, b"abc")), msgspec.msgpack.encode(Ext(9, b"abc"))):
        with pytest.raises(RemoteProtocolError):
            ANY_VALUE.decode(body, [body], CONVERTER)


def test_arguments_are_bound_as_python_binds_them() -> None:
    def function(a: int, /, b: str = "b", *rest: float, c: bool = False, d=None, **named: int) -> Any:
        return a, b, rest, c, d, named

    assert called(function, 1) == (1, "b", (), False, None, {})
    assert called(function, 1, "x", 2, 3.5, c=True, d=[1], e=5) == (1, "x", (2.0, 3.5), True, [1], {"e": 5})
    for args, named, words in (
        ((), {}, "missing a required argument: 'a'"),
        ((1, "b"), {"b": "c"}, "multiple values for argument 'b'"),
        (("1",), {}, "'a': Expected `int`, got `str`"),
        ((1, "b", "c"), {}, "'rest': Expected `float`, got `str`"),
        ((1,), {"e": "f"}, "'e': Expected `int`, got `str`"),
    ):
        with pytest.raises(TypeError, match=words):
            called(function, *args, **named)


def test_methods_partial_functions_and_objects_have_signatures_too() -> None:
    class Adder:
        def add(self, a: int, b: int = 1) -> int:
            return a + b

        def __call__(self, a: int) -> int:
            return a + 100

    assert called(Adder().add, 1) == 2
    assert called(Adder(), 1) == 101
    assert called(functools.partial(Adder().add, b=5), 1) == 6
    with pytest.raises(TypeError, match="Expected `int`"):
        called(Adder(), "x")


def test_annotations_that_cannot_be_used_are_refused_when_they_are_read() -> None:
    def odd(x: int | np.ndarray[Any, Any]) -> None: ...

    def missing(x: NoSuchName) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(ConfigError, match="annotates 'x'"):
        Signature(odd, "odd")
    with pytest.raises(ConfigError, match="NoSuchName"):
        Signature(missing, "missing")
