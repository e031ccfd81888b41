"""Announcements: recognised by who holds the key, telling everybody else nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.wire import beacon

KEY, OTHER = b"k" * 32, b"o" * 32
NONCE = bytes(range(16))
keys = st.binary(min_size=32, max_size=32)
nonces = st.binary(min_size=16, max_size=16)
ports = st.integers(1, 65535)


@given(keys, nonces, ports)
def test_who_holds_the_key_recognises_an_announcement(key: bytes, nonce: bytes, port: int) -> None:
    properties = beacon.make(key, nonce, port)
    assert beacon.matches(key, properties, port)
    assert not beacon.is_foreign_covey(key, properties, port)


@given(keys, keys, nonces, ports)
def test_with_another_key_it_is_foreign(key: bytes, other: bytes, nonce: bytes, port: int) -> None:
    properties = beacon.make(key, nonce, port)
    assert beacon.matches(other, properties, port) == (key == other)
    assert beacon.is_foreign_covey(other, properties, port) == (key != other)


@given(ports, ports, nonces)
def test_an_announcement_is_good_for_its_port_and_its_random_bytes_only(port: int, other: int, nonce: bytes) -> None:
    properties = beacon.make(KEY, NONCE, port)
    assert beacon.matches(KEY, properties, other) == (port == other)
    properties[b"n"] = nonce.hex().encode()
    assert beacon.matches(KEY, properties, port) == (nonce == NONCE)


@pytest.mark.parametrize("port", [0, -1, 65536, 1 << 40])
def test_what_is_no_port_matches_nothing(port: int) -> None:
    properties = beacon.make(KEY, NONCE, 1)
    assert not beacon.matches(KEY, properties, port)
    assert not beacon.is_foreign_covey(KEY, properties, port)


def test_an_announcement_shows_a_version_random_bytes_and_a_tag_that_differs_each_time() -> None:
    one, two = beacon.make(KEY, NONCE, 1), beacon.make(KEY, b"n" * 16, 1)
    assert set(one) == {b"v", b"n", b"t"}
    assert one[b"n"] == NONCE.hex().encode()
    assert len(bytes.fromhex(one[b"t"].decode())) == beacon.TAG_BYTES
    assert one[b"t"] != two[b"t"]
    assert KEY not in b"".join(one.values())


@given(
    st.dictionaries(
        st.sampled_from([b"v", b"n", b"t", b"x"]) | st.binary(max_size=4),
        st.none() | st.sampled_from([b"1", b"", b"a" * 32, b"A" * 32, "é".encode() * 16]) | st.binary(max_size=40),
    ),
    st.integers(-1, 70000),
)
def test_junk_never_matches(properties: dict[bytes, bytes | None], port: int) -> None:
    assert not beacon.matches(KEY, properties, port)
    assert beacon.is_foreign_covey(KEY, properties, port) in (True, False)


@pytest.mark.parametrize("damage", [{b"v": b"2"}, {b"n": None}, {b"t": b""}, {b"t": b"0" * 31}, {b"n": b"G" * 32}])
def test_what_is_not_well_formed_is_not_ours_and_not_foreign(damage: dict[bytes, bytes | None]) -> None:
    properties: dict[bytes, bytes | None] = {**beacon.make(OTHER, NONCE, 7), **damage}
    assert not beacon.is_foreign_covey(KEY, properties, 7)
    assert not beacon.matches(OTHER, properties, 7)
