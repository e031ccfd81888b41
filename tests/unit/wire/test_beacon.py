"""Announcements: nodes with the key recognise them as they were made; they tell other nodes nothing."""

from __future__ import annotations

import ipaddress

from hypothesis import given
from hypothesis import strategies as st
from tests.support.in_turn import in_turn

from covey.wire import beacon

KEY, OTHER = b"k" * 32, b"o" * 32
NONCE = bytes(range(16))
IPS = ("10.0.0.1", "fe80::1")
keys = st.binary(min_size=32, max_size=32)
nonces = st.binary(min_size=16, max_size=16)
ports = st.integers(1, 65535)
ips = st.lists(st.ip_addresses().map(str), min_size=1, max_size=beacon.ANNOUNCED_ADDRESSES)


def encoded(properties: dict[bytes, bytes]) -> bytes:
    """Return properties as a TXT record has them."""
    strings = (name + b"=" + value for name, value in properties.items())
    return b"".join(bytes((len(string),)) + string for string in strings)


@given(keys, nonces, ports, ips)
def test_a_node_that_holds_the_key_reads_what_was_announced(
    key: bytes, nonce: bytes, port: int, given_ips: list[str]
) -> None:
    text = encoded(beacon.make(key, nonce, port, given_ips))
    assert len(text) < 400
    said = beacon.read(key, beacon.split_txt(text))
    assert said is not None
    assert said.is_ours
    assert (said.port, said.nonce, sorted(said.ips)) == (port, nonce, sorted(given_ips))
    assert [ipaddress.ip_address(ip).version for ip in said.ips] == sorted(
        ipaddress.ip_address(ip).version for ip in given_ips
    )


@given(keys, keys, nonces, ports)
def test_with_another_key_it_belongs_to_another_cluster(key: bytes, other: bytes, nonce: bytes, port: int) -> None:
    said = beacon.read(other, dict(beacon.make(key, nonce, port, IPS)))
    assert said is not None
    assert said.is_ours == (key == other)


@given(st.sampled_from([b"n", b"p", b"4", b"6", b"t"]), st.binary(max_size=64))
def test_no_part_of_an_announcement_can_be_exchanged(name: bytes, value: bytes) -> None:
    made: dict[bytes, bytes | None] = dict(beacon.make(KEY, NONCE, 47700, IPS))
    said = beacon.read(KEY, {**made, name: value})
    assert said is None or said.is_ours == (value == made[name])


def test_an_address_can_neither_be_added_nor_taken_away_nor_moved_to_another_family() -> None:
    made: dict[bytes, bytes | None] = dict(beacon.make(KEY, NONCE, 9, ("10.0.0.1", "10.0.0.2", "fd00::1")))
    four, six = made[b"4"], made[b"6"]
    assert four is not None
    assert six is not None
    for changed in (
        {b"4": four + bytes((10, 0, 0, 3))},
        {b"4": four[:4]},
        {b"4": four[4:] + four[:4]},
        {b"4": b""},
        {b"6": b""},
        {b"4": four + six, b"6": b""},
        {b"4": b"", b"6": four + four + six[:16]},
    ):
        said = beacon.read(KEY, {**made, **changed})
        assert said is None or not said.is_ours


def test_of_many_addresses_the_first_are_announced_those_of_ipv4_before_all() -> None:
    many = [f"fd00::{n}" for n in range(1, 20)] + ["10.0.0.1"]
    said = beacon.read(KEY, dict(beacon.make(KEY, NONCE, 9, many)))
    assert said is not None
    assert said.ips == ("10.0.0.1", *(f"fd00::{n}" for n in range(1, beacon.ANNOUNCED_ADDRESSES)))


def test_an_announcement_shows_nothing_that_two_of_them_have_in_common_but_port_and_addresses() -> None:
    one, two = beacon.make(KEY, NONCE, 1, IPS), beacon.make(KEY, b"n" * 16, 1, IPS)
    assert {name for name in one if one[name] == two[name]} == {b"v", b"p", b"4", b"6"}
    assert set(one) == {b"v", b"n", b"p", b"4", b"6", b"t"}
    assert one[b"n"] == NONCE.hex().encode()
    assert len(bytes.fromhex(one[b"t"].decode())) == beacon.BEACON_TAG_BYTES
    assert KEY not in b"".join(one.values())


@given(
    st.dictionaries(
        st.sampled_from([b"v", b"n", b"p", b"4", b"6", b"t", b"x"]) | st.binary(max_size=4),
        st.none()
        | st.sampled_from([b"1", b"", b"a" * 32, b"A" * 32, b"65536", b"\0" * 16, "é".encode() * 16])
        | st.binary(max_size=255),
    )
)
def test_junk_is_never_ours(properties: dict[bytes, bytes | None]) -> None:
    said = beacon.read(KEY, properties)
    assert said is None or not said.is_ours


@given(st.binary(max_size=600))
def test_any_bytes_are_properties_of_a_txt_record(text: bytes) -> None:
    properties = beacon.split_txt(text)
    assert sum(map(len, properties)) <= len(text)


def test_of_a_property_that_comes_twice_the_first_counts() -> None:
    made = beacon.make(KEY, NONCE, 9, IPS)
    forged = encoded(made) + encoded({b"p": b"10", b"4": bytes((10, 0, 0, 9))})
    said = beacon.read(KEY, beacon.split_txt(forged))
    assert said is not None
    assert (said.is_ours, said.port, said.ips) == (True, 9, IPS)


@in_turn(
    damage=[
        *({b"v": b"2"}, {b"v": None}, {b"n": None}, {b"t": b""}, {b"t": b"0" * 31}, {b"n": b"G" * 32}),
        *({b"p": b"0"}, {b"p": b"65536"}, {b"p": b"-1"}, {b"p": b"1e3"}, {b"p": b"\xd9\xa1"}, {b"p": None}),
        *({b"4": b"abc"}, {b"6": b"a" * 15}, {b"4": b"", b"6": b""}, {b"4": b"abcd" * 9}, {b"4": None, b"6": None}),
    ]
)
def test_what_is_not_well_formed_is_nobodys(damage: dict[bytes, bytes | None]) -> None:
    assert beacon.read(OTHER, {**beacon.make(OTHER, NONCE, 7, IPS), **damage}) is None
