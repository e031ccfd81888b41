from __future__ import annotations

import contextlib
import hmac

import pytest
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given
from hypothesis import strategies as st

from covey.base.errors import RemoteProtocolError
from covey.wire.seal import (
    ACCEPTOR,
    DIALLER,
    NEXT_KEY,
    RECORD_OVERHEAD_BYTES,
    SEAL_KEY_BYTES,
    SEALED_RECORD_LIMIT,
    ForgedError,
    Opener,
    Sealer,
    lane_keys,
    record_length,
)

SECRET, LANE = b"s" * 32, b"lane 5"
KEY = lane_keys(SECRET, LANE, 0)[DIALLER]


def seal(sealer: Sealer, data: bytes) -> bytearray:
    record = bytearray(len(data) + RECORD_OVERHEAD_BYTES)
    assert sealer.seal(data, memoryview(record)) == len(record)
    return record


def opened(opener: Opener, record: bytes | bytearray) -> bytes:
    plain = bytearray(record_length(record))
    opener.open(memoryview(record), plain)
    return bytes(plain)


def pair(rekey_every: int = 1 << 24) -> tuple[Sealer, Opener]:
    return (
        Sealer(KEY, LANE, 0, DIALLER, rekey_every=rekey_every),
        Opener(KEY, LANE, 0, DIALLER, rekey_every=rekey_every),
    )


@pytest.mark.parametrize("size", [1, 15, 16, 17, 2047, 2048, SEALED_RECORD_LIMIT - 1, SEALED_RECORD_LIMIT])
def test_what_was_sealed_opens_and_is_not_in_the_record(size: int) -> None:
    sealer, opener = pair()
    for number in range(3):
        data = (bytes([65 + number]) + bytes(range(256)) * (size // 256 + 1))[:size]
        record = seal(sealer, data)
        assert record_length(record) == size
        assert size < 16 or data not in record
        assert opened(opener, record) == data


def test_the_format_is_the_one_that_is_written_down() -> None:
    """Another implementation, from the description: a change here breaks every lane between versions."""
    sealer = Sealer(KEY, LANE, 3, ACCEPTOR)
    seal(sealer, b"first")
    record = seal(sealer, b"second")
    nonce = bytes(11) + b"\x01"
    covered = LANE + b"\x00\x00\x00\x03" + b"\x01" + nonce + b"\x06\x00\x00\x00"
    assert record == b"\x06\x00\x00\x00" + AESGCM(KEY).encrypt(nonce, b"second", covered)


def test_every_lane_stream_and_direction_has_a_key_of_its_own() -> None:
    keys = [
        key
        for secret in (SECRET, b"t" * 32)
        for lane in (b"", b"lane 5", b"lane 55", b"\x00\x00\x00\x01")
        for stream in (0, 1, 256)
        for key in lane_keys(secret, lane, stream)
    ]
    assert len(set(keys)) == len(keys) == 48
    assert {len(key) for key in keys} == {SEAL_KEY_BYTES}


def test_equal_data_is_sealed_differently_each_time() -> None:
    sealer, _ = pair()
    assert len({bytes(seal(sealer, b"the same")) for _ in range(100)}) == 100


def test_a_change_of_any_bit_is_noticed() -> None:
    record = seal(pair()[0], b"abc")
    for bit in range(8 * len(record)):
        forged = bytearray(record)
        forged[bit // 8] ^= 1 << bit % 8
        with pytest.raises((ForgedError, ValueError)):  # a wrong length may not fit the buffer either
            opened(pair()[1], forged)


def test_a_length_that_was_changed_is_noticed_although_the_rest_fits() -> None:
    sealer = Sealer(KEY, LANE, 0, DIALLER)
    record = seal(sealer, b"abc")
    record[:4] = (4).to_bytes(4, "little")
    with pytest.raises(ForgedError):
        Opener(KEY, LANE, 0, DIALLER).open(memoryview(record), bytearray(3))


def test_records_that_are_repeated_left_out_or_out_of_order_do_not_open() -> None:
    sealer, _ = pair()
    first, second, third = (seal(sealer, data) for data in (b"one", b"two", b"three"))
    for wrong in ([second], [first, first], [first, third], [first, second, first]):
        _, opener = pair()
        for record in wrong[:-1]:
            opened(opener, record)
        with pytest.raises(ForgedError, match=f"altered on the way: record {len(wrong) - 1} of stream 0"):
            opened(opener, wrong[-1])


@pytest.mark.parametrize("scope", [(b"lane 6", 0, DIALLER), (LANE, 1, DIALLER), (LANE, 0, ACCEPTOR)])
def test_a_record_opens_in_its_own_place_only_even_under_the_same_key(scope: tuple[bytes, int, int]) -> None:
    record = seal(Sealer(KEY, LANE, 0, DIALLER), b"secret")
    with pytest.raises(ForgedError):
        opened(Opener(KEY, *scope), record)


@pytest.mark.parametrize("mark", [0, NEXT_KEY])
@pytest.mark.parametrize("length", [0, SEALED_RECORD_LIMIT + 1, 1 << 30, (1 << 31) - 1])
def test_a_length_that_no_record_has_is_refused_before_anything_else(length: int, mark: int) -> None:
    with pytest.raises(RemoteProtocolError, match=f"no record has {length} bytes"):
        record_length((length | mark).to_bytes(4, "little"))


@pytest.mark.parametrize("size", [0, SEALED_RECORD_LIMIT + 1])
def test_what_could_not_be_opened_is_not_sealed(size: int) -> None:
    with pytest.raises(ValueError, match=str(size)):
        pair()[0].seal(bytes(size), memoryview(bytearray(size + RECORD_OVERHEAD_BYTES)))


def test_both_ends_change_the_key_in_step_and_the_old_one_opens_nothing_new() -> None:
    sealer, opener = pair(rekey_every=3)
    records = [seal(sealer, b"record %d" % number) for number in range(10)]
    assert [opened(opener, record) for record in records] == [b"record %d" % number for number in range(10)]
    never, _ = pair()
    same = [bytes(seal(never, b"record %d" % number)) == record for number, record in enumerate(records)]
    assert same == [True] * 3 + [False] * 7
    for number, record in enumerate(records):
        nonce, head = number.to_bytes(12, "big"), bytes(record[:4])
        with pytest.raises(InvalidTag) if number >= 3 else contextlib.nullcontext():
            AESGCM(KEY).decrypt(nonce, bytes(record[4:]), LANE + bytes(5) + nonce + head)


def marks(records: list[bytearray]) -> list[bool]:
    return [bool(int.from_bytes(record[:4], "little") & NEXT_KEY) for record in records]


def test_a_record_that_begins_the_next_key_is_marked_and_the_opener_follows_the_mark() -> None:
    sealer, opener = pair(rekey_every=4)
    records = []
    for number in range(12):
        if number in (2, 3, 9):
            sealer.renew()
        records.append(seal(sealer, b"record %d" % number))
    assert [number for number, mark in enumerate(marks(records)) if mark] == [2, 3, 7, 9]
    assert [opened(opener, record) for record in records] == [b"record %d" % number for number in range(12)]


def test_a_key_that_was_left_behind_cannot_be_computed_from_the_one_in_use() -> None:
    """The format, from its description: key n+1 is HKDF-Expand of key n, and the counter goes on."""
    sealer, _ = pair()
    seal(sealer, b"first")
    sealer.renew()
    record = seal(sealer, b"second")
    next_key = hmac.digest(KEY, b"covey/1/lane/next\x01", "sha256")[:SEAL_KEY_BYTES]
    nonce, head = bytes(11) + b"\x01", b"\x06\x00\x00\x80"
    covered = LANE + b"\x00\x00\x00\x00" + b"\x00" + nonce + head
    assert record == head + AESGCM(next_key).encrypt(nonce, b"second", covered)


@pytest.mark.parametrize("number", [0, 1])
def test_a_mark_that_was_set_or_taken_away_on_the_way_is_noticed(number: int) -> None:
    sealer, opener = pair()
    first = seal(sealer, b"first")
    sealer.renew()
    records = [first, seal(sealer, b"second")]
    for record in records[:number]:
        opened(opener, record)
    records[number][3] ^= 0x80
    with pytest.raises(ForgedError):
        opened(opener, records[number])


def test_a_peer_that_keeps_a_key_for_too_long_is_cut_off() -> None:
    sealer, _ = pair()
    _, opener = pair(rekey_every=3)
    for _ in range(3):
        opened(opener, seal(sealer, b"fine"))
    with pytest.raises(ForgedError, match="one too many under one key"):
        opened(opener, seal(sealer, b"too many"))


@given(data=st.binary(min_size=RECORD_OVERHEAD_BYTES + 1, max_size=200))
def test_nothing_a_stranger_makes_up_opens(data: bytes) -> None:
    try:
        length = record_length(data)
    except ForgedError:
        return
    with pytest.raises((ForgedError, ValueError)):
        pair()[1].open(memoryview(data), bytearray(length))
    with pytest.raises(ForgedError):  # and not with a fitting length either
        opened(pair()[1], (len(data) - RECORD_OVERHEAD_BYTES).to_bytes(4, "little") + data[4:])
