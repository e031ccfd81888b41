"""Everything that reads bytes of others: whatever they are, the answer is a value or one of the errors it promises."""

from __future__ import annotations

import contextlib
import ipaddress
import struct
import time
import typing
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.security.attackers import card_of, new_cluster

from covey.base.errors import AuthError, ConfigError, RemoteProtocolError
from covey.net import clusters, neighbours
from covey.net.identity import NodeIdentity
from covey.net.interfaces import to_dial, usable_interfaces
from covey.net.neighbours import Neighbours
from covey.net.station import Station
from covey.wire import beacon, board, door, formation, frame, messages
from covey.wire.seal import RECORD_LIMIT, ForgedError, Opener, Sealer, record_length
from covey.wire.secret import decode_join_code, encode_join_code

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

KEY, LANE = bytes(range(32)), bytes(16)
IDENTITY = NodeIdentity.ephemeral()
CARD = card_of(IDENTITY)
TERMS = formation.Terms("run", "program", None, 2, None, "1", "auto")
MEMBER = formation.Member(bytes(32), bytes(16), "name", "host", b"")
PEER = messages.PeerState(CARD, 0, "secure", "a", "b", "eth0", 0.1, 0.0)
ADDRESS = messages.Address("10.0.0.1", 1)
VALID: list[Any] = [
    messages.Hello(1, bytes(32), "candidate", "run", 0, 2, "auto", CARD),
    messages.Welcome(0, CARD, "candidate"),
    messages.Refusal("no", retry=True),
    messages.Roster((CARD.contact,)),
    messages.Ready(),
    messages.Goodbye(),
    messages.Dial(1, "messages", 2),
    messages.Announce(1, 2, 3, "call"),
    messages.Position(1, 2, 3, 4, "call"),
    messages.Revoke(1, "PeerLostError", "text", (1, 2)),
    messages.NoLane(1, "messages", "no"),
    messages.Offer(bytes(16), bytes(32), 1, "collectives", "secure", 0, 1),
    messages.Expect(bytes(16)),
    messages.Known((CARD,)),
    messages.Ping(1),
    messages.Pong(1, 1.0),
    messages.Forming(b"x"),
    messages.Ask(),
    messages.Tell("run", "joining", b"", b"", 0.0, (PEER,)),
    messages.Reach((ADDRESS,)),
    messages.Reached((0.1,), ("",)),
    messages.NewSecret(bytes(32), 1, 600, bytes(64)),
    messages.SecretKept(""),
    messages.Agreeing(1, b"x"),
    messages.Vouch(((bytes(16), 1),)),
    messages.Founded(1, bytes(16), True, (messages.SeatedMember(0, CARD),)),
    messages.Posting(1, 2, b"x"),
    messages.Ended("run", bytes(16), True),
    messages.Charter(1, "node", (bytes(32),), (bytes(32),), bytes(64)),
    board.Put((("key", b"value"),)),
    board.Get(("key",)),
    board.Await(("key",)),
    board.Check(("key",)),
    board.Add("key", 1),
    board.Swap("key", b"", b"value"),
    board.Append("key", b"value"),
    board.Delete("key"),
    board.Names(),
    board.Count(),
    board.Push("key", b"value"),
    board.Pop("key", True),
    board.Length("key"),
    board.Withdraw(),
    board.Done((b"value",), 1),
    board.Refused("no"),
    CARD,
    formation.Here(TERMS, MEMBER, (bytes(16),), formation.Phase.GATHERING),
    formation.Propose(bytes(16), (MEMBER,)),
    formation.Standing(bytes(16), (formation.Row(),), formation.Outcome.OPEN),
]
fuzzed = settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def mutations(valid: list[bytes]) -> st.SearchStrategy[bytes]:
    """Random bytes, and valid ones with a few changed, cut off or added."""

    def change(data: bytes, at: int, new: bytes, cut: int) -> bytes:
        at %= len(data) + 1
        return (data[:at] + new + data[at + len(new) :])[: max(0, len(data) - cut)]

    changed = st.builds(change, st.sampled_from(valid), st.integers(0, 500), st.binary(max_size=8), st.integers(0, 9))
    return st.binary(max_size=300) | changed


DECODERS: list[Callable[[bytes], Any]] = [
    messages.decode_greeting,
    messages.decode_control,
    formation.decode_formation,
    board.decode_body,
]


@pytest.mark.parametrize("decode", DECODERS, ids=lambda decode: decode.__name__)
@fuzzed
@given(data=mutations([messages.encode(value) for value in VALID]))
def test_a_decoder_of_messages_returns_what_can_be_sent_again_or_raises_its_error(
    decode: Callable[[bytes], Any], data: bytes
) -> None:
    with contextlib.suppress(RemoteProtocolError):
        decoded = decode(data)
        again = decode(messages.encode(decoded))
        assert messages.encode(again) == messages.encode(decoded)


@pytest.mark.parametrize("decode", DECODERS, ids=lambda decode: decode.__name__)
@pytest.mark.parametrize(
    "bomb",
    [
        b"\x91" * 200_000,
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff" + b"x" * 1000,
        b"\x92\x0e\xdd\x7f\xff\xff\xff",
        b"\xdd\x00\x03\xff\xff" + b"\x90" * 262_143,
        b"\x92\x0a" + b"\xc0" * 262_000,
    ],
)
def test_lengths_that_promise_gigabytes_and_depths_that_never_end_cost_nothing(
    decode: Callable[[bytes], Any], bomb: bytes
) -> None:
    began = time.monotonic()
    with pytest.raises(RemoteProtocolError):
        decode(bomb)
    assert time.monotonic() - began < 1


@fuzzed
@given(size=st.none() | st.integers(-3, 200), low=st.integers(-3, 200), high=st.none() | st.integers(-3, 2**63 - 1))
def test_terms_that_cannot_be_are_a_protocol_error_and_not_a_setting_of_ours(
    size: int | None, low: int, high: int | None
) -> None:
    body = messages.encode([1, ["run", "p", size, low, high, "1", "auto"], MEMBER, [], 0, []])
    with contextlib.suppress(RemoteProtocolError):
        assert isinstance(formation.decode_formation(body), formation.Here)


@fuzzed
@given(given_answer=st.binary(max_size=100), challenge=st.binary(min_size=16, max_size=16))
def test_the_door_opens_to_nobody_who_guesses(given_answer: bytes, challenge: bytes) -> None:
    with pytest.raises(AuthError):
        door.check(KEY, challenge, given_answer)


@fuzzed
@given(st.binary(min_size=16, max_size=16), st.integers(0, 255), st.integers(0, 8 * door.ANSWER_BYTES - 1))
def test_the_door_notices_every_flipped_bit(challenge: bytes, purpose: int, bit: int) -> None:
    good = door.answer(KEY, challenge, purpose, bytes(15))  # type: ignore[arg-type]
    flipped = bytearray(good)
    flipped[bit // 8] ^= 1 << bit % 8
    with pytest.raises(AuthError):
        door.check(KEY, challenge, bytes(flipped))
    if purpose in set(door.Purpose):
        assert door.check(KEY, challenge, good) == purpose
    else:
        with pytest.raises(AuthError):
            door.check(KEY, challenge, good)


@fuzzed
@given(st.lists(st.binary(max_size=40), max_size=10))
def test_frames_are_bounded_however_the_bytes_arrive(pieces: list[bytes]) -> None:
    framer, taken = frame.Framer(64), 0
    with contextlib.suppress(RemoteProtocolError):
        for piece in pieces:
            taken += sum(len(body) + 4 for body in framer.feed(piece))
            assert len(framer._buffer) <= 64 + 4 + 40
    assert taken <= sum(map(len, pieces))


@fuzzed
@given(st.binary(max_size=70))
def test_no_record_opens_but_the_one_that_was_sealed(data: bytes) -> None:
    sealed = bytearray(70)
    Sealer(KEY, LANE, 0, 0).seal(b"x" * 50, memoryview(sealed))
    opener = Opener(KEY, LANE, 0, 0)
    with contextlib.suppress(ForgedError):
        if len(data) >= 4:
            length = record_length(data)
            assert 0 < length <= RECORD_LIMIT
    forged = bytearray(sealed)
    for at, byte in enumerate(data[:70]):
        forged[at] ^= byte
    if forged != sealed:
        with pytest.raises(ForgedError):
            opener.open(memoryview(forged), bytearray(50))


properties = st.dictionaries(
    st.sampled_from([b"v", b"n", b"p", b"4", b"6", b"t", b"x", b""]),
    st.none() | st.binary(max_size=40) | st.just(b"1"),
    max_size=5,
)


@fuzzed
@given(properties)
def test_no_announcement_matches_that_no_member_made(said: dict[bytes, bytes | None]) -> None:
    invented = beacon.read(KEY, said)
    assert invented is None or not invented.is_ours
    made: dict[bytes, bytes | None] = dict(beacon.make(KEY, bytes(16), 4711, ["10.0.0.1", "fd00::1"]))
    altered = made | {name: value for name, value in said.items() if name in made}
    read = beacon.read(KEY, altered)
    assert (read is not None and read.is_ours) == (altered == made)


PACKET = (
    struct.pack("!6H", 0, 0x8400, 0, 1, 0, 0)
    + b"\x04node\x06_covey\x04_tcp\x05local\0"
    + struct.pack("!HHIH", 16, 1, 120, 4)
    + b"\x03v=1"
)


@fuzzed
@given(data=mutations([PACKET]))
def test_any_packet_about_covey_is_read_or_passed_over(data: bytes) -> None:
    heard: list[object] = []
    reader = object.__new__(Station)
    reader._hear = lambda _station, said: heard.append(beacon.read(KEY, said))
    reader._read(data)
    assert len(heard) <= 4
    assert set(heard) <= {None}


def test_the_packet_of_the_fuzz_is_read() -> None:
    heard: list[dict[bytes, bytes | None]] = []
    reader = object.__new__(Station)
    reader._hear = lambda _station, said: heard.append(said)
    reader._read(PACKET)
    assert heard == [{b"v": b"1"}]


@fuzzed
@given(st.binary(max_size=300))
def test_the_text_of_a_record_is_read_or_passed_over(text: bytes) -> None:
    said = beacon.read(KEY, beacon.split_txt(text))
    assert said is None or not said.is_ours


@fuzzed
@given(st.data())
def test_a_join_code_with_any_slip_is_recognised(data: st.DataObject) -> None:
    code = encode_join_code(new_cluster("home").secret, ["10.0.0.1:47700", "[fd00::1]:47700"])
    at = data.draw(st.integers(0, len(code) - 1))
    letter = data.draw(st.characters(codec="utf-8"))
    spoiled = code[:at] + letter + code[at + 1 :]
    with contextlib.suppress(ConfigError):
        assert decode_join_code(spoiled) == decode_join_code(code)


@fuzzed
@given(st.text(max_size=400) | st.text(alphabet="covey1-0123456789abcdefghjkmnpqrstvwxyz", max_size=400))
def test_any_text_as_a_join_code_is_an_error_that_says_so(text: str) -> None:
    for whole in (text, f"covey1-{text}"):
        with pytest.raises(ConfigError):
            decode_join_code(whole)


@fuzzed
@given(st.text(max_size=60) | st.binary(max_size=60))
def test_any_secret_is_taken_or_refused_for_a_reason(secret: str | bytes) -> None:
    if isinstance(secret, str):
        secret = secret[:14]  # what could pass as a passphrase takes half a second of scrypt
    with contextlib.suppress(ConfigError):
        clusters.parse_secret(secret, "prey")


@fuzzed
@given(data=mutations([b'{"port":1,"socket":"/s","pid":1}']))
def test_a_neighbours_file_is_read_or_passed_over(data: bytes) -> None:
    reader = object.__new__(Neighbours)
    reader._host = "host"
    found = reader._parse(f"host-1{neighbours._SUFFIX}", data)
    assert found is None or 0 < found.port < 65536


@fuzzed
@given(data=st.data())
def test_a_damaged_cluster_file_is_an_error_that_says_what_to_do(home: Path, data: st.DataObject) -> None:
    path = clusters.save(new_cluster())
    path.write_bytes(data.draw(mutations([path.read_bytes()])))
    try:
        with contextlib.suppress(ConfigError):
            assert clusters.load("prey").name == "prey"
            clusters.known("prey")
    finally:
        path.unlink()


ips = (
    st.sampled_from(["127.0.0.1", "10.0.0.1", "::1", "fe80::1%x", "::ffff:127.0.0.1", "0.0.0.0", "1e9", ""]) | st.text()
)


@fuzzed
@given(st.lists(st.builds(messages.Address, ips, st.integers(-(2**63), 2**63 - 1), st.text(max_size=5)), max_size=8))
def test_addresses_of_others_are_numbers_and_never_names_to_look_up(addresses: list[messages.Address]) -> None:
    for same_host in (False, True):
        for ip, port, *_ in to_dial(usable_interfaces(), addresses, same_host):
            ipaddress.ip_address(ip)
            assert 0 < port < 65536
            assert same_host or not ipaddress.ip_address(ip).is_loopback


def test_every_message_is_in_the_fuzz() -> None:
    known = {type(value) for value in VALID}
    for union in (messages.Greeting, messages.Control, formation.Formation, board.Body):
        assert set(typing.get_args(union)) <= known
    assert all(isinstance(value, msgspec.Struct) for value in VALID)
