from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.base.errors import RemoteProtocolError
from covey.wire.header import HEADER_PREFIX, HEADER_SUFFIX, MAGIC, TRANSFER_HEADER_BYTES, TransferHeader, unpack

U8, U16, U32, U64 = (st.integers(0, (1 << bits) - 1) for bits in (8, 16, 32, 64))
HEADERS = st.builds(TransferHeader, U8, U8, U16, U32, U8, U64, U64, U64, U64, U64)


@given(HEADERS)
def test_a_header_comes_back_as_it_was(header: TransferHeader) -> None:
    data = header.pack()
    assert len(data) == TRANSFER_HEADER_BYTES == 64
    assert unpack(data) == header
    assert unpack(memoryview(data)) == header


@given(HEADERS, HEADERS)
def test_different_headers_have_different_bytes(one: TransferHeader, other: TransferHeader) -> None:
    assert (one.pack() == other.pack()) == (one == other)


def test_what_transfers_of_one_plan_share_stands_in_front() -> None:
    first, second = TransferHeader(1, 2, 3, 4, 0, 5, 6, 7, 0, 80), TransferHeader(1, 2, 3, 4, 0, 5, 6, 7, 1, 90)
    prefix = HEADER_PREFIX.pack(MAGIC, 1, 2, 3, 4, 0, 5, 6)
    assert first.pack() == prefix + HEADER_SUFFIX.pack(7, 0, 80)
    assert second.pack() == prefix + HEADER_SUFFIX.pack(7, 1, 90)


@given(st.binary(max_size=100))
def test_other_bytes_are_a_protocol_error(data: bytes) -> None:
    if len(data) == TRANSFER_HEADER_BYTES and data.startswith(MAGIC):
        unpack(data)
    else:
        with pytest.raises(RemoteProtocolError):
            unpack(data)
