"""None"""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import pickle
import struct
import uuid
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.in_turn import in_turn
from tests.support.seeds import examples

from covey.base.arithmetic import BFLOAT16, DTYPES
from covey.base.errors import ConfigError, MismatchError, RemoteProtocolError
from covey.wire import message_header, objects

unhurried = settings(max_examples=examples(80), deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""A busy machine is no failure."""

SHAPES: list[tuple[int, ...]] = [(), (0,), (1,), (7,), (2, 3, 4), (3, 0, 2), (1,) * 32]


def sample(dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Values that differ by position, some of them at the ends of what the dtype can hold."""
    count = int(np.prod(shape))
    raw = np.random.default_rng(count).integers(0, 256, count * dtype.itemsize, dtype=np.uint8)
    if dtype.kind == "b":
        raw %= 2
    return raw.view(dtype).reshape(shape)


def assert_same_array(actual: Any, expected: np.ndarray[Any, Any]) -> None:
    assert type(actual) is np.ndarray
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    assert actual.tobytes() == expected.tobytes()
    assert actual.flags.writeable


json_like = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]))
    | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner),
)


@unhurried
@given(json_like)
def test_json_like_values_come_back_equal(value: Any) -> None:
    assert objects.decode(objects.encode(value)) == value


@in_turn(shape=SHAPES)
@in_turn(dtype=DTYPES)
def test_arrays_of_every_dtype_and_shape_come_back_bit_for_bit(dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    array = sample(dtype, shape)
    back = objects.decode(objects.encode({"deep": [1, {"er": array}]}))
    assert_same_array(back["deep"][1]["er"], array)


@in_turn(dtype=DTYPES)
def test_numpy_scalars_keep_their_type(dtype: np.dtype[Any]) -> None:
    scalar = dtype.type(1)
    back = objects.decode(objects.encode([scalar]))[0]
    assert type(back) is type(scalar)
    assert back == scalar


@pytest.mark.parametrize(
    "array",
    [
        np.arange(24).reshape(4, 6)[::2, ::-1],
        np.asfortranarray(np.arange(24.0).reshape(4, 6)),
        np.arange(24, dtype=np.int16).reshape(2, 3, 4).transpose(2, 0, 1),
        np.broadcast_to(np.float32(3), (5, 2)),
    ],
    ids=["strided", "fortran", "transposed", "broadcast"],
)
def test_arrays_in_any_memory_order_come_back_equal(array: np.ndarray[Any, Any]) -> None:
    assert_same_array(objects.decode(objects.encode(array)), array)


def test_arrays_in_foreign_byte_order_come_back_native() -> None:
    assert_same_array(objects.decode(objects.encode(np.arange(5, dtype=">i4"))), np.arange(5, dtype=np.int32))


def test_decoded_arrays_do_not_share_memory_with_the_bytes() -> None:
    data = bytearray(objects.encode(np.arange(5)))
    first, second = objects.decode(data), objects.decode(data)
    first[:] = -1
    assert second.tolist() == [0, 1, 2, 3, 4]
    assert objects.decode(data).tolist() == [0, 1, 2, 3, 4]


@dataclasses.dataclass
class Layer:
    name: str
    weights: np.ndarray[Any, Any]


@dataclasses.dataclass
class Model:
    step: int
    layers: list[Layer]


def test_a_dataclass_arrives_as_a_dict_unless_the_receiver_asks_for_its_type() -> None:
    data = objects.encode(Model(3, [Layer("a", np.arange(3)), Layer("b", np.ones((2, 2), BFLOAT16))]))
    plain = objects.decode(data)
    assert (plain["step"], plain["layers"][1]["name"]) == (3, "b")
    assert_same_array(plain["layers"][0]["weights"], np.arange(3))
    typed = objects.decode(data, type=Model)
    assert isinstance(typed.layers[1], Layer)
    assert_same_array(typed.layers[1].weights, np.ones((2, 2), BFLOAT16))


def test_a_value_that_does_not_fit_the_wanted_type_is_a_mismatch() -> None:
    with pytest.raises(MismatchError, match="step"):
        objects.decode(objects.encode({"step": "three", "layers": []}), type=Model)


class Colour(enum.Enum):
    RED = "red"


class Circle(msgspec.Struct, tag=True):
    radius: float


class Square(msgspec.Struct, tag=True):
    side: int


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ({2, 3}, set[int]),
        ({"a": frozenset(["x"])}, dict[str, frozenset[str]]),
        ((1, "a"), tuple[int, str]),
        (datetime.datetime(2026, 1, 2, 3, tzinfo=datetime.UTC), datetime.datetime),
        ([datetime.date(2026, 1, 2)], list[datetime.date]),
        (decimal.Decimal("1.50"), decimal.Decimal),
        (uuid.UUID(int=7), uuid.UUID),
        (Colour.RED, Colour),
        ([Circle(1.5), Square(2)], list[Circle | Square]),
    ],
    ids=str,
)
def test_a_receiver_chooses_the_types_of_what_it_gets(value: Any, kind: Any) -> None:
    data = objects.encode(value, type=kind)
    back = objects.decode(data, type=kind)
    assert back == value
    assert type(back) is type(value)
    with pytest.raises(MismatchError):
        objects.decode(data, type=Model)


PWNED: list[str] = []


def run() -> None:
    PWNED.append("run")


class Trap:
    def __reduce__(self) -> Any:
        return run, ()


def test_a_list_of_classes_is_an_error_and_no_pickle_is_opened() -> None:
    data = b"\x02" + pickle.dumps(Trap())
    allowed: Any
    for allowed in ([Model], ["collections.deque"], (), [], {Model}, 1, None, "True"):
        with pytest.raises(ConfigError, match=r"must be True or False.*type="):
            objects.decode(data, allow_pickle=allowed)
        with pytest.raises(ConfigError, match=r"must be True or False.*type="):
            objects.encode(1, allow_pickle=allowed)
    for kind in (None, Model, list[Model]):
        with pytest.raises(TypeError, match="allow_pickle=True"):
            objects.decode(data, type=kind)
    assert not PWNED
    objects.decode(data, allow_pickle=True)
    assert PWNED == ["run"]


class Custom:
    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Custom) and other.value == self.value

    __hash__ = None  # type: ignore[assignment]


RING: list[Any] = []
RING.append(RING)


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (Custom(1), "Custom"),
        ([1, {"a": {2, 3}}], "set"),
        ({1: datetime.date(2026, 1, 2)}, "date"),
        (2 + 1j, "complex"),
        (np.array(["a"]), "U1"),
        (np.ma.masked_array([1, 2], [False, True]), "MaskedArray"),
        ({Custom: 1}, "type"),
        (np.ones((1,) * 33), "33 dimensions"),
        (2**64, "ints"),
        ("\ud800", "surrogates"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isascii() else type(value).__name__,
)
def test_anything_else_is_refused_by_name_and_can_be_pickled_on_request(value: Any, named: str) -> None:
    with pytest.raises(TypeError, match=rf"(?s){named}.*allow_pickle=True"):
        objects.encode(value)
    data = objects.encode(value, allow_pickle=True)
    with pytest.raises(TypeError, match="allow_pickle=True"):
        objects.decode(data)
    back = objects.decode(data, allow_pickle=True)
    assert type(back) is type(value)
    assert np.all(back == value)


def test_a_value_that_contains_itself_is_refused() -> None:
    with pytest.raises(TypeError, match="contains itself"):
        objects.encode(RING)


def test_a_value_that_not_even_pickle_takes_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="neither"):
        objects.encode(lambda: None, allow_pickle=True)


def test_plain_values_are_not_pickled_even_when_they_may_be() -> None:
    value = {"a": [1, 2]}
    assert objects.decode(objects.encode(value, allow_pickle=True)) == value


def test_a_failure_arrives_as_a_type_error_with_its_text() -> None:
    with pytest.raises(TypeError, match="rank 2 cannot send a möbius strip"):
        objects.decode(objects.encode_failure("rank 2 cannot send a möbius strip"))


def test_a_pickle_that_cannot_be_loaded_is_a_protocol_error() -> None:
    with pytest.raises(RemoteProtocolError):
        objects.decode(b"\x02" + pickle.dumps([1, 2])[:-3], allow_pickle=True)


def extension(kind: int, body: bytes) -> bytes:
    return b"\x01" + msgspec.msgpack.encode(msgspec.msgpack.Ext(kind, body))


@in_turn(
    data=[
        b"",
        b"\x00",
        b"\x01",
        b"\x01" + b"\x91" * 100_000,
        b"\x01\xa1\xff",
        extension(1, b""),
        extension(1, bytes([4])),
        extension(1, bytes([200, 0]) + bytes(8)),
        extension(1, bytes([4, 33]) + bytes(8 * 33)),
        extension(1, struct.pack("<BBQ", 4, 1, 2) + bytes(15)),
        extension(1, struct.pack("<BBQQ", 4, 2, 2**63, 2) + bytes(0)),
        extension(1, struct.pack("<BBQQ", 4, 2, 2**62, 0)),
        extension(2, struct.pack("<BBQ", 4, 1, 1) + bytes(8)),
        extension(3, bytes(8)),
    ]
)
def test_malformed_bytes_are_a_protocol_error(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        objects.decode(data)


def test_bytes_that_are_not_bools_become_bools() -> None:
    back = objects.decode(extension(1, struct.pack("<BBQ", 0, 1, 3) + bytes([0, 1, 7])))
    assert back.tobytes() == bytes([0, 1, 1])


def decodes_or_is_refused(data: bytes) -> None:
    try:
        objects.decode(data)
    except RemoteProtocolError:
        pass
    except TypeError:
        assert data[:1] in (b"\x02", b"\x03")


@unhurried
@given(st.binary())
def test_decoding_any_bytes_gives_a_value_or_a_protocol_error(data: bytes) -> None:
    decodes_or_is_refused(data)
    decodes_or_is_refused(b"\x01" + data)
    decodes_or_is_refused(extension(1, data))


@unhurried
@given(st.data())
def test_flipping_bytes_of_a_valid_object_never_does_worse_than_a_protocol_error(data: st.DataObject) -> None:
    valid = bytearray(objects.encode({"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": [np.int8(4), "text"]}))
    for at in data.draw(st.lists(st.integers(1, len(valid) - 1), max_size=4)):
        valid[at] = data.draw(st.integers(0, 255))
    decodes_or_is_refused(bytes(valid[: data.draw(st.integers(0, len(valid)))]))


ARRAYS: list[Any] = [
    np.arange(6, dtype=np.int16).reshape(2, 3),
    np.array(2.5),
    np.empty((0, 4), np.complex128),
    np.arange(5, dtype=np.float32).astype(ml_dtypes.bfloat16),
    np.array([True, False, True]),
    np.arange(20.0)[::3],
]


@pytest.mark.parametrize("count", range(len(ARRAYS) + 1))
def test_arrays_come_back_as_they_were(count: int) -> None:
    message = message_header.pack_arrays(ARRAYS[:count])
    assert message_header.holds_arrays(message)
    found = message_header.unpack_arrays(message)
    assert len(found) == count
    for got, expected in zip(found, ARRAYS, strict=False):
        assert (got.dtype, got.shape, got.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())
        assert got.flags.aligned
        assert np.may_share_memory(got, message) or not got.size


def test_no_shorter_or_longer_message_is_read() -> None:
    message = message_header.pack_arrays(ARRAYS)
    for length in range(message.size):
        with pytest.raises(RemoteProtocolError):
            message_header.unpack_arrays(message[:length])
    with pytest.raises(RemoteProtocolError, match="1 bytes follow"):
        message_header.unpack_arrays(np.append(message, np.uint8(0)))


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<B3xI", 4, 1 << 31),
        struct.pack("<B3xI", 5, 0),
        struct.pack("<B3xIBB6x", 4, 1, 200, 0),
        struct.pack("<B3xIBB6x", 4, 1, 0, 33),
        struct.pack("<B3xIBB6x", 4, 1, 0, 1),
        struct.pack("<B3xIBB6x2Q", 4, 1, 0, 2, 1 << 62, 1 << 62),
        struct.pack("<B3xIBB6xQ", 4, 1, 0, 1, 1 << 40),
        struct.pack("<B3xIBB6xQBB6x", 4, 3, 0, 1, 0, 0, 0),
    ],
)
def test_claims_that_cannot_be_are_refused_before_memory_is_used(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        message_header.unpack_arrays(np.frombuffer(data, np.uint8))


def test_what_cannot_be_sent_is_refused() -> None:
    with pytest.raises(ConfigError, match="up to 65536"):
        message_header.pack_arrays([np.empty(0)] * 65537)


def test_it_is_no_object() -> None:
    with pytest.raises(RemoteProtocolError, match="not an encoded object"):
        objects.decode(message_header.pack_arrays(ARRAYS[:1]).tobytes())
    assert not message_header.holds_arrays(np.frombuffer(objects.encode([1]), np.uint8))


def test_the_first_byte_tells_the_forms_of_a_payload_apart() -> None:
    forms = [
        objects.encode([1]),
        objects.encode({1, 2}, allow_pickle=True),
        objects.encode_failure("why"),
        message_header.pack_arrays(ARRAYS[:1]).tobytes(),
    ]
    assert [form[0] for form in forms] == [1, 2, 3, 4]
