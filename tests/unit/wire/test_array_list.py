"""Several arrays in one message: they come back as they were, and nothing else is read as such a list."""

from __future__ import annotations

import struct
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from covey.base.errors import ConfigError, RemoteProtocolError
from covey.wire import array_list, objects

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
    message = array_list.pack(ARRAYS[:count])
    assert array_list.is_packed(message)
    found = array_list.unpack(message)
    assert len(found) == count
    for got, expected in zip(found, ARRAYS, strict=False):
        assert (got.dtype, got.shape, got.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())
        assert got.flags.aligned
        assert np.may_share_memory(got, message) or not got.size


def test_no_shorter_or_longer_message_is_read() -> None:
    message = array_list.pack(ARRAYS)
    for length in range(message.size):
        with pytest.raises(RemoteProtocolError):
            array_list.unpack(message[:length])
    with pytest.raises(RemoteProtocolError, match="1 bytes follow"):
        array_list.unpack(np.append(message, np.uint8(0)))


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
        array_list.unpack(np.frombuffer(data, np.uint8))


def test_what_cannot_be_sent_is_refused() -> None:
    with pytest.raises(ConfigError, match="up to 65536"):
        array_list.pack([np.empty(0)] * 65537)


def test_it_is_no_object() -> None:
    with pytest.raises(RemoteProtocolError, match="not an encoded object"):
        objects.decode(array_list.pack(ARRAYS[:1]).tobytes())
    assert not array_list.is_packed(np.frombuffer(objects.encode([1]), np.uint8))


def test_the_first_byte_tells_the_forms_of_a_payload_apart() -> None:
    forms = [
        objects.encode([1]),
        objects.encode({1, 2}, allow_pickle=True),
        objects.encode_failure("why"),
        array_list.pack(ARRAYS[:1]).tobytes(),
    ]
    assert [form[0] for form in forms] == [1, 2, 3, 4]
