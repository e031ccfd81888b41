"""Lists everything that reads foreign bytes: how to call it, what it may raise, and inputs to begin with.

Decoders of messages are found in `covey.wire`: a function `decode_...(data: bytes)` whose type says what it returns and
whose docstring says what it raises "for anything else". The others are listed by hand.
"""

from __future__ import annotations

import datetime
import decimal
import enum
import hmac
import importlib
import pickle
import pkgutil
import random
import re
import struct
import typing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from covey import wire
from covey.base import errors
from covey.base.arithmetic import BYTE_CODE, DTYPES
from covey.base.errors import AuthError, ConfigError, MismatchError, RemoteProtocolError
from covey.lab.fuzz import call_targets, upnp_targets, values
from covey.lab.fuzz.values import Maker
from covey.net.discovery import sieve
from covey.net.discovery.responder import InterfaceResponder
from covey.wire import (
    beacon,
    decoding,
    door,
    header,
    message_header,
    messages,
    objects,
    pairing,
    port_mapping,
    quic,
    seal,
    secret,
    signed,
)
from covey.wire.manifest import STATE_TAG_BYTES, Manifest, ManifestEntry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

KEY: Final = bytes(range(32))
CHALLENGE: Final = bytes(range(16))
LANE: Final = bytes(16)
REKEY_EVERY: Final = 2
"""Records under one key, so that a short stream has several."""
FRAME_LIMIT: Final = 256
MAKER: Final = Maker(random.Random("targets"), at_bounds=0.0)
_VALUES_OF_EACH: Final = 3


@dataclass(frozen=True, kw_only=True)
class Target:
    """One reader of bytes. It may raise only `promised` exceptions, and its values must survive being written."""

    name: str
    read: Callable[[bytes], Any]
    promised: tuple[type[Exception], ...]
    write: Callable[[Any], bytes] | None
    """Encodes a value to bytes that are read as the same value; None if `read` itself compares."""
    seeds: Callable[[], list[bytes]]
    """Valid inputs, and some invalid ones that random mutation would not find."""
    prefix: int = -1
    """Bytes in front of a msgpack message; -1 if the input is not msgpack."""


def modules() -> Iterator[ModuleType]:
    """Yield every module of `covey.wire`."""
    for found in pkgutil.iter_modules(wire.__path__):
        yield importlib.import_module(f"{wire.__name__}.{found.name}")


def all_targets() -> dict[str, Target]:
    """Return every target by name."""
    found = [_message_target(read) for read in message_decoders()]
    return {target.name: target for target in (*found, *BY_HAND)}


def message_decoders() -> list[Callable[[bytes], Any]]:
    """Return the functions of `covey.wire` that decode messages."""
    functions = (value for module in modules() for name, value in vars(module).items() if name.startswith("decode_"))
    return [each for each in dict.fromkeys(functions) if typing.get_type_hints(each).get("data") is bytes]


def _message_target(read: Callable[[bytes], Any]) -> Target:
    said = re.search(r"(\w+Error) for anything else", read.__doc__ or "")
    if said is None:
        raise TypeError(f"the docstring of {read.__qualname__} does not say what it raises for anything else")
    promised = getattr(errors, said[1], ValueError)

    def seeds() -> list[bytes]:
        maker = Maker(random.Random(read.__name__))
        kinds = values.variants(values.return_type(read))
        valid = [data for kind in kinds for data in values.examples(kind, maker, read, _VALUES_OF_EACH)]
        refused = [data for kind in kinds for data in values.refused(kind, maker, read)]
        return [*valid, *refused, *OF_LATER_RELEASES, *map(msgspec.msgpack.encode, _odd(read.__name__))]

    return Target(
        name=read.__name__.removeprefix("decode_"),
        read=read,
        promised=(promised,),
        write=msgspec.msgpack.encode,
        seeds=seeds,
        prefix=0,
    )


OF_LATER_RELEASES: Final = (
    *(
        b"\x91\x63",
        b"\x91\xcc\xff",
        b"\x91\xcd\x03\xe8",
        b"\xdc\x00\x01\xce\x00\x01\x00\x00",
        b"\xdd\x00\x00\x00\x01\x63",
    ),
    *(b"", b"\x91", b"\x91\xc0", b"\x91\xcd\x03", b"\xdd\x00", b"\x80"),
)
"""Messages of types that are not known, and the starts of some."""
ODD_VERSIONS: Final[tuple[list[Any], ...]] = (
    *([4, 3], [0, 3], [3, 1 << 16], [3, 1 << 64 - 1], [3.5, 4], [float("nan"), 4], [None, 4], []),
    *([3, 4, ["a", "a"]], [3, 4, ["b", "a"]], [3, 4, ["A"]], [3, 4, [f"f{n:04}" for n in range(4000)]]),
    *([3, 4, ["a"], ["b"]], [3, 4, ["a"], ["a", "a"]], [3, 4, ["a"], ["a"]]),
)
"""What a hostile process may claim to speak; only the last one can be."""


def _odd(name: str) -> list[Any]:
    """Return messages with odd values that random ones seldom have."""
    card = [b"", b"", "", "", 0, ["", [], ""]]
    hello = [1, 3, b"", "", "", 0, 0, "", card, "raise", None, "", None]
    member = [bytes(32), bytes(16), "", "", b""]
    odd: dict[str, list[Any]] = {
        "decode_control": [[3, "why", False], [3]],
        "decode_handshake": [[*hello, versions] for versions in ODD_VERSIONS],
        "decode_formation": [
            [1, ["run", "program", size, 1, 2, version, "auto"], member, [], 0]
            for size, version in ((0, "3"), (2, "x"))
        ],
    }
    return odd.get(name, [])


# QUIC.


def _read_datagram(data: bytes) -> quic.FirstPacket:
    """Look at a datagram in all ways that covey does: only the last may refuse it."""
    cid = quic.destination_of(data)
    assert cid == b"" or cid in data
    if quic.is_about_path(data) and (answer := quic.answer_path_probe(KEY, data)):
        assert len(answer) == len(data), "an answer is as long as the question"
    first = quic.read_first(data)
    assert quic.is_proof(KEY, first.source) == (first.source == _cid())
    return first


def _cid() -> bytes:
    return quic.proving_cid(KEY, bytes(quic.CID_NONCE_BYTES))


def _write_datagram(first: quic.FirstPacket) -> bytes:
    sizes = bytes((len(first.destination),)), bytes((len(first.source),))
    head = b"\xc0\0\0\0\1" + sizes[0] + first.destination + sizes[1] + first.source
    return (head + (0x4000 | len(first.token)).to_bytes(2, "big") + first.token).ljust(1400, b"\0")


def _datagram_seeds() -> list[bytes]:
    whole = _write_datagram(quic.FirstPacket(bytes(20), _cid(), bytes(80)))
    short = b"\x40" + bytes(40)
    probe = quic.path_probe(KEY, bytes(16))
    other = _write_datagram(quic.FirstPacket(b"\1" * 8, b"\2" * 20, b""))
    shorter, longer = (_write_datagram(quic.FirstPacket(bytes(20), bytes(size), b"")) for size in (8, 21))
    lengths = [
        shorter,
        longer,
        whole[:5] + b"\xff" + whole[6:],
        whole[:47] + b"\xff" * 8 + whole[55:],
        b"\xc0\0\0\0\2" + whole[5:],
    ]
    return [whole, other, short, short[:9], probe, probe[:1] + bytes(32), b"\xc0\0\0", b"\xc0" + bytes(5), *lengths]


def _read_token(data: bytes) -> bytes:
    return quic.read_token(KEY, b"address", data, bytes(20), 1000)


def _token_seeds() -> list[bytes]:
    made = [quic.address_token(KEY, b"address", b"original", bytes(20), now) for now in (1000, 900)]
    return [*made, quic.address_token(KEY, b"address", b"", b"\1" * 20, 1000), made[0][:-1], b""]


def _read_limits(data: bytes) -> int:
    reader = quic.LimitReader()
    for at in range(0, len(data), 5):
        reader.feed(data[at : at + 5])
    return reader.limit


# Frames and headers.


def _cut_frames(data: bytes) -> list[bytes]:
    framer, frames = decoding.Framer(FRAME_LIMIT), []
    for at in range(0, len(data), 7):
        frames += framer.feed(data[at : at + 7])
        assert len(framer._buffer) <= FRAME_LIMIT + decoding.FRAME_LENGTH.size + 7, "a frame is kept beyond the limit"
    return frames


def _frame_seeds() -> list[bytes]:
    bodies = [b"", b"one", bytes(FRAME_LIMIT), bytes(FRAME_LIMIT + 1)]
    return [*map(decoding.frame, bodies), b"".join(map(decoding.frame, bodies[:3])), decoding.frame(b"cut off")[:-3]]


def _header_seeds() -> list[bytes]:
    chance = random.Random("header")
    return [
        header.TransferHeader(*(chance.randrange(256) for _ in header.TransferHeader._fields)).pack() for _ in range(4)
    ]


def _message_header_seeds() -> list[bytes]:
    kinds = [value for value in vars(message_header).values() if isinstance(value, int) and 0 < value < 16]
    plain = [message_header.encode(message_header.MessageHeader(kind, 7, 0)) for kind in sorted(set(kinds))]
    shapes = [(), (0,), (3, 4), (2,) * 8, (1,) * message_header.MAX_MESSAGE_NDIM, (1 << 62, 4), (1 << 62, 0)]
    of = message_header.MessageHeader
    arrays = [
        message_header.encode(of(kind, 7, int(np.prod(shape)) * DTYPES[3].itemsize % (1 << 63), 5, False, 3, shape))
        for kind in (message_header.EAGER, message_header.RTS)
        for shape in shapes
    ]
    things = [message_header.encode(of(kind, 7, 20, 5, True)) for kind in (message_header.EAGER, message_header.RTS)]
    impossible = [
        message_header.encode(of(message_header.EAGER, 7, 20, 5, True, 3)),
        message_header.encode(of(message_header.EAGER, 7, 20, 5, True, 0, (20,))),
        message_header.encode(of(message_header.EAGER, 7, 20, -5)),
        message_header.encode(of(message_header.EAGER, 7, 1 << 63, 5)),
        message_header.encode(of(message_header.CTS, 7, 20, 5)),
        message_header.encode(of(message_header.CTS, 7, 20, 0, True)),
        message_header.encode(of(message_header.CTS, 7, 20, 0, False, 3)),
        message_header.encode(of(message_header.CTS, 7, 20, 0, False, 0, (20,))),
        message_header.encode(of(message_header.EAGER, 7, 20, 0, False, len(DTYPES))),
        message_header.encode(of(200, 7, 20)),
    ]
    many = bytearray(arrays[0] + bytes(8 * 256))
    many[6] = message_header.MAX_MESSAGE_NDIM + 8
    return [*plain, *arrays, *things, *impossible, bytes(many), *(each[:-1] for each in arrays)]


def _read_message_header(data: bytes) -> message_header.MessageHeader | None:
    found = message_header.decode(data, 0, len(data))
    assert found is None or found[1] <= len(data), "a header ends after its bytes"
    return None if found is None else found[0]


def _write_message_header(value: message_header.MessageHeader | None) -> bytes:
    return b"" if value is None else message_header.encode(value)


# The door, proofs and sealed records.


def _door_seeds() -> list[bytes]:
    def answer(purpose: int) -> bytes:
        said = bytes((purpose,)) + bytes(door.BOUND_BYTES)
        return said + hmac.digest(KEY, door._DOOR_LABEL + CHALLENGE + said, "sha256")

    return [answer(purpose) for purpose in (*door.Purpose, 0, 255)]


def _write_answer(purpose: door.Purpose) -> bytes:
    return door.answer(KEY, CHALLENGE, purpose, bytes(door.BOUND_BYTES))


def _signature_seeds() -> list[bytes]:
    key = Ed25519PrivateKey.from_private_bytes(KEY)
    return [signed.public_half(key) + key.sign(b"words"), bytes(96), KEY + bytes(64), KEY, b""]


def _read_machine(data: bytes) -> list[bytes]:
    """Return the machine of each card."""
    return [signed.machine_of(card) for card in messages.decode_cards(data)]


def _machine_seeds() -> list[bytes]:
    key = Ed25519PrivateKey.from_private_bytes(KEY)
    (card,) = messages.decode_cards(
        values.valid(values.variants(tuple[messages.Card])[0], MAKER, messages.decode_cards)
    )
    plain = msgspec.structs.replace(card, machine=b"", endorsement=b"")
    endorsement = key.sign(signed.machine_words(card.id))
    endorsed = msgspec.structs.replace(card, machine=signed.public_half(key), endorsement=endorsement)
    forged = msgspec.structs.replace(endorsed, endorsement=bytes(64))
    return [msgspec.msgpack.encode([each]) for each in (plain, endorsed, forged)]


def _read_proof(data: bytes) -> bool:
    proof, said = data[: door.PROOF_BYTES], data[door.PROOF_BYTES :]
    made = [
        door.dial_proof(KEY, CHALLENGE, said),
        door.accept_proof(KEY, CHALLENGE, LANE, said),
        door.lane_proof(KEY, b"dial", LANE, 1),
    ]
    return any(door.proofs_equal(each, proof) for each in made)


def _open_records(data: bytes) -> list[bytes]:
    opener, view, opened = seal.Opener(KEY[:16], LANE, 0, 0, rekey_every=REKEY_EVERY), memoryview(data), []
    at = 0
    while at + seal.RECORD_OVERHEAD_BYTES < len(data):
        end = at + seal.record_length(data, at) + seal.RECORD_OVERHEAD_BYTES
        if end > len(data):
            break
        into = bytearray(end - at - seal.RECORD_OVERHEAD_BYTES)
        opener.open(view[at:end], into)
        opened.append(bytes(into))
        at = end
    return opened


def _seal_records(bodies: list[bytes]) -> bytes:
    sealer, sealed = seal.Sealer(KEY[:16], LANE, 0, 0, rekey_every=REKEY_EVERY), b""
    for body in bodies:
        into = bytearray(len(body) + seal.RECORD_OVERHEAD_BYTES)
        sealer.seal(body, memoryview(into))
        sealed += bytes(into)
    return sealed


def _sealed_seeds() -> list[bytes]:
    streams = [_seal_records([bytes((index,)) * index for index in range(1, count)]) for count in (2, 3, 6)]
    never_renewed = seal.Sealer(KEY[:16], LANE, 0, 0)
    late = b""
    for _ in range(2 * REKEY_EVERY):
        into = bytearray(seal.RECORD_OVERHEAD_BYTES + 4)
        never_renewed.seal(b"late", memoryview(into))
        late += bytes(into)
    return [*streams, late, streams[2][25:], struct.pack("<I", 0) + bytes(40), struct.pack("<I", 1 << 30) + bytes(40)]


# Objects and manifests.


def _object_seeds() -> list[bytes]:
    plain: list[Any] = [None, True, -1, 1.5, "text", b"bytes", [1, [2, {"key": ()}]], {1: 2, "a": None}]
    arrays: list[Any] = [np.arange(6, dtype=np.float32).reshape(2, 3), np.zeros((0, 3)), np.array(5)]
    scalars: list[Any] = [np.float64(1.5), np.bool_(True), np.int8(-1), np.array([True, False])]
    forged = [
        bytes((3, 1)) + struct.pack("<Q", 1 << 61) + bytes(8),
        bytes((3, 40)) + bytes(400),
        bytes((250, 0)),
        b"\x03",
        bytes((3, 3)) + bytes(8),
        bytes((3, 1)) + struct.pack("<Q", 5) + bytes(24),
    ]
    extensions = [msgspec.msgpack.Ext(kind, body) for kind in (1, 2) for body in forged]
    timestamps = [msgspec.msgpack.Ext(kind, bytes(size)) for kind, size in ((-1, 4), (-1, 3), (7, 4))]
    nested = [[1, [None, timestamps[0]]], {"a": timestamps[0]}, {"a": b"\xd6\xff", "b": [1.5, "x"]}, b"\xd6\xff"]
    packed = [b"\x01" + msgspec.msgpack.encode(each) for each in (*extensions, *timestamps, *nested)]
    keyed = b"\x01\x81" + msgspec.msgpack.encode(extensions[0]) + b"\x01"
    array_key = b"\x01\x81" + objects.encode(arrays[0])[1:] + b"\x01"
    whole = [objects.encode(value) for value in (*plain, *arrays, *scalars, [arrays[0], {"a": scalars[0]}])]
    return [
        *whole,
        *packed,
        keyed,
        array_key,
        objects.encode_failure("no value"),
        b"\x02\x80\x04N.",
        b"\x04",
        b"",
        b"\x09",
    ]


class Colour(enum.Enum):
    """One of few values."""

    RED = "red"


@dataclass(slots=True)
class Point:
    """What the receiver of a value asks for. Its defaults take no memory, which a short message could multiply."""

    x: int = 0
    weights: np.ndarray[Any, Any] | None = None
    tags: set[str] | None = None
    when: datetime.datetime | None = None
    colour: Colour = Colour.RED
    inner: dict[str, Point] | None = None
    price: decimal.Decimal | None = None


def _read_typed(data: bytes) -> Any:
    return objects.decode(data, type=list[Point])


def _typed_seeds() -> list[bytes]:
    """Return points, values that are none, and pickles, which are never opened."""
    inner = Point(2, np.ones((2, 2)), {"a", "b"}, datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC))
    outer = Point(1, inner={"in": inner}, price=decimal.Decimal("1.5"))
    values: list[Any] = [[], [inner], [outer, Point()], {"x": 1}, [{"x": "one"}], [{"inner": {"a": 1}}]]
    typed = [objects.encode(value, type=list[Point]) for value in values]
    pickles = [b"\x02" + pickle.dumps(value, protocol) for value in ([outer], print) for protocol in (2, 5)]
    return [*typed, *pickles, objects.encode_failure("no value"), b"\x01", b""]


UNLIKE: Final = ManifestEntry(name="unlike", is_array=True, dtype_code=1, shape=(7,), tags=bytes(STATE_TAG_BYTES))
OWN_MANIFEST: Final = Manifest(
    is_fresh=False,
    entries=(
        ManifestEntry(name="a", is_array=True, dtype_code=3, shape=(2, 3), tags=b"o" * STATE_TAG_BYTES),
        ManifestEntry(name="c", is_array=False, dtype_code=BYTE_CODE, shape=(5,), tags=b"o" * STATE_TAG_BYTES),
        ManifestEntry(name="d", is_array=True, dtype_code=3, shape=(2, 3), tags=b"o" * STATE_TAG_BYTES),
        ManifestEntry(name="e", is_array=True, dtype_code=3, shape=(2, 3), tags=b"o" * STATE_TAG_BYTES),
        ManifestEntry(name="f", is_array=False, dtype_code=BYTE_CODE, shape=(5,), tags=b"o" * STATE_TAG_BYTES),
    ),
)
"""The manifest that a claimed one is compared with."""


def _read_manifest(data: bytes) -> Manifest:
    """Decode a manifest, check it, and use it: no claim of a member may break a reader."""
    manifest: Manifest = objects.decode(data, type=Manifest)
    manifest.check()
    for chunk in manifest.chunks():
        assert not manifest.lacks(chunk, manifest), "a state lacks what it has"
        OWN_MANIFEST.lacks(chunk, manifest)
    assert len(manifest.digest) == 16
    for name, entry in manifest.by_name.items():
        assert entry.kind
        assert entry.is_same(entry)
        assert not entry.is_same(OWN_MANIFEST.by_name.get(name, UNLIKE))
    return manifest


def _manifest_seeds() -> list[bytes]:
    def entry(name: str, code: int, shape: list[int], tags: bytes, **more: Any) -> dict[str, Any]:
        return {"name": name, "is_array": True, "dtype_code": code, "shape": shape, "tags": tags} | more

    one, two = entry("a", 3, [2, 3], bytes(16)), entry("b", 3, [0], b"")
    byte = BYTE_CODE
    large = entry("large", byte, [(8 << 20) + 1], bytes(range(32)))
    value = entry("c", byte, [5], bytes(16), is_array=False)
    made = [
        {"is_fresh": True},
        {"is_fresh": False, "entries": [one, two, value]},
        {"is_fresh": False, "entries": [large]},
        {"is_fresh": False, "entries": [value, one | {"name": "d", "shape": [3, 2]}, value | {"name": "e"}]},
        {"is_fresh": False, "entries": [value | {"shape": [6]}, one | {"name": "f"}, one | {"name": "g"}]},
        {"is_fresh": False, "failure": "no room"},
        {"is_fresh": False, "failure": "no room", "entries": [one]},
        {"is_fresh": False, "failure": "x" * 100_000},
        {"is_fresh": False, "failure": "\x1b"},
        {"is_fresh": False, "entries": [two, one]},
        {"is_fresh": False, "entries": [one, one]},
        {"is_fresh": False, "entries": [one | {"name": "\x1b"}]},
        {"is_fresh": False, "entries": [one | {"name": "x" * 5000}]},
        {"is_fresh": False, "entries": [one | {"dtype_code": -1}]},
        {"is_fresh": False, "entries": [one | {"dtype_code": 200}]},
        {"is_fresh": False, "entries": [one | {"shape": [-1]}]},
        {"is_fresh": False, "entries": [one | {"shape": [1] * 33}]},
        {"is_fresh": False, "entries": [one | {"shape": [1 << 62, 1 << 62]}]},
        {"is_fresh": False, "entries": [one | {"tags": b""}]},
        {"is_fresh": False, "entries": [value | {"dtype_code": byte + 1, "tags": bytes(16)}]},
        {"is_fresh": False, "entries": [value | {"shape": [5, 1]}]},
        {"is_fresh": False, "entries": [entry(f"{index:06}", byte, [0], b"") for index in range((1 << 16) + 1)]},
        {"is_fresh": False, "entries": [entry(f"{index}", byte, [0, 1 << 62], b"") for index in range(3)]},
    ]
    return [b"\x01" + msgspec.msgpack.encode(each) for each in made]


# Multicast packets, and what people type.


def _read_text_record(data: bytes) -> beacon.Announcement | None:
    said = beacon.read(KEY, beacon.split_txt(data))
    if said is not None:
        again = beacon.read(KEY, typing.cast("Any", beacon.make(KEY, said.nonce, said.port, said.ips)))
        assert again is not None
        assert again.is_ours
        assert (again.port, again.ips, again.nonce) == (said.port, said.ips, said.nonce)
    return said


def _text_record(properties: dict[bytes, bytes]) -> bytes:
    texts = [name + b"=" + value for name, value in properties.items()]
    return b"".join(bytes((len(text),)) + text for text in texts)


def _text_record_seeds() -> list[bytes]:
    both = beacon.make(KEY, bytes(16), 4711, ["10.0.0.1", "fd00::1"])
    many = both | {b"4": bytes(4 * (beacon.ANNOUNCED_ADDRESSES + 1))}
    odd = [{b"v": b"2"}, {b"n": b"zz"}, {b"t": b""}, {b"p": b"0"}, {b"p": b"65536"}, {b"4": b"123"}, {b"6": b"1"}]
    none = both | {b"4": b"", b"6": b""}
    spoiled = [*(both | each for each in odd), many, none]
    without = [{name: value for name, value in both.items() if name != left_out} for left_out in both]
    return [*map(_text_record, [both, *spoiled, *without]), _text_record(both) + b"\x03v=1\x01x"]


def _read_packet(data: bytes) -> None:
    heard: list[beacon.Announcement | None] = []
    reader = object.__new__(InterfaceResponder)
    reader._hear = lambda _station, said: heard.append(beacon.read(KEY, said))
    filtered = sieve.Sieve()
    is_response = sieve.is_response(data)
    if filtered.passes(data, "10.0.0.1", 0.0) and is_response:
        reader._read(data)
    # One source has a burst, and all together have one; dropped packets are counted.
    for count in range(int(sieve.ALL_PACKETS_BURST) + 1 if sieve._COVEY_NAME in data and len(data) < 60 else 0):
        filtered.passes(data, f"10.0.0.{count % 8}", 0.0)
    assert len(heard) <= sieve.MOST_RECORDS


def _packet_seeds() -> list[bytes]:
    name = b"\x04node\x06_covey\x04_tcp\x05local\0"

    def packet(flags: int, records: int, name: bytes, data: bytes) -> bytes:
        answer = name + struct.pack("!HHIH", 16, 1, 120, len(data)) + data
        return struct.pack("!6H", 0, flags, 0, records, 0, 0) + answer

    text = _text_record_seeds()[0]
    return [
        packet(0x8400, 1, name, text),
        packet(0x8400, 1, b"\x05other\x04_tcp\x05local\0", text),
        packet(0x0000, 1, name, text),
        packet(0x8600, 1, name, text),
        packet(0x8400, 17, name, text),
        packet(0x8400, 1, name, text + bytes(sieve.MOST_BYTES)),
        struct.pack("!6H", 0, 0x8400, 0, 1, 0, 0) + name,
        name[6:][:3],
        struct.pack("!6H", 0, 0x8400, 0, 1, 0, 0) + sieve._COVEY_NAME,
    ]


def _read_join_code(data: bytes) -> secret.JoinCode:
    return secret.decode_join_code(data.decode("utf-8", "replace"))


def _write_join_code(value: secret.JoinCode) -> bytes:
    return secret.encode_join_code(*value).encode()


def _join_code_seeds() -> list[bytes]:
    def code(content: bytes) -> str:
        body = content + secret._checksum(content)
        return "covey1-" + secret._to_base32(bytes((len(body), len(body) ^ secret._LENGTH_MASK)) + body)

    cluster, four = secret.ClusterSecret("home", KEY), b"\x04\x0a\x00\x00\x01\x12\x34"
    good = secret.encode_join_code(cluster, ["10.0.0.1:47700", "[fd00::1]:47700"])
    start = b"\x04home" + KEY
    wrong = [b"\x04HOME" + KEY, b"\x04home", b"", b"\xff", start + b"\x05", start + four[:-1], start + four * 9]
    zero_port = start + four[:-2] + bytes(2)
    texts = [good, good[:-2], good[:9], good + "0", "covey1-", "else", good.replace(good[-1], "u"), *map(code, wrong)]
    of = bytes((secret._OWNER,)) + bytes(signed.OWNER_BYTES)
    owned = [code(start + of), code(start + of[:-1]), code(start + of + four)]
    relay = b"\x02\x07a.b.com\xba\x4a"
    bad_relays = [relay[:-1], relay * 3, b"\x02\xff" + bytes(300)[:100], b"\x02\x01-\x00\x01", relay[:-2] + bytes(2)]
    bad_relays += [relay + four, b"\x02", b"\x02\x41" + b"a" * 65 + b"\x12\x34"]
    owned += [secret.encode_join_code(cluster, relays=["a.b.com", "[fd00::1]:9"])]
    owned += [code(start + bad) for bad in bad_relays]
    padded = code(start)[:-1] + "z"
    return [text.encode() for text in (*texts, code(start), code(start + four * 8), code(zero_port), padded, *owned)]


def _read_arrays(data: bytes) -> list[tuple[str, tuple[int, ...], bytes]]:
    """Return what is in a list of arrays, in a form that can be compared."""
    arrays = message_header.unpack_arrays(np.frombuffer(data, np.uint8))
    return [(each.dtype.name, each.shape, each.tobytes()) for each in arrays]


def _write_arrays(read: list[tuple[str, tuple[int, ...], bytes]]) -> bytes:
    dtypes = {dtype.name: dtype for dtype in DTYPES}
    arrays = [np.frombuffer(content, dtypes[name]).reshape(shape) for name, shape, content in read]
    return bytes(message_header.pack_arrays(arrays))


def _array_seeds() -> list[bytes]:
    arrays: list[Any] = [np.arange(6, dtype=np.int16).reshape(2, 3), np.array(2.5), np.empty((0, 4), np.complex128)]
    packed = [bytes(message_header.pack_arrays(arrays[:count])) for count in range(4)]
    head = struct.pack("<B3xIBB6x", message_header.ARRAYS_FORM, 1, 0, 1)
    cut = struct.pack("<B3xIBB6x2Q", message_header.ARRAYS_FORM, 2, 0, 2, 0, 0)
    return [*packed, b"", packed[3] + b"\0", head, head + struct.pack("<Q", 1 << 40), cut]


def _gateway_seeds() -> list[bytes]:
    pcp = b"\x02\x81\0\0" + bytes(20) + bytes(12) + b"\x06\0\0\0\x12\x34\x56\x78"
    four, six = bytes(10) + b"\xff\xff\x0a\0\0\x01", b"\xfd" + bytes(15)
    pmp = [b"\0\x80" + bytes(10), b"\0\x82" + bytes(14), b"\0\x81\0\1" + bytes(4)]
    bad = [b"", b"\x02\x81\0\0", b"\0\x80" + bytes(6), b"\x02\x01" + pcp[2:] + four, b"\0\x02" + bytes(14)]
    return [pcp + four, pcp + six, *pmp, *bad]


_EXCHANGE: Final = pairing.CodeExchange(b"123456", b"channel", bytes(32), random=random.Random(1).randbytes)


def _read_share(data: bytes) -> bytes:
    return _EXCHANGE.key(data, pairing.Half(_EXCHANGE.share, bytes(300)), pairing.Half(data, b""))


def _share_seeds() -> list[bytes]:
    return [
        random.Random(2).randbytes(pairing.SHARE_BYTES),
        bytes(pairing.SHARE_BYTES),
        b"\1" + bytes(31),
        b"",
        bytes(200),
    ]


BY_HAND: Final = (
    *(
        Target(name=name, read=read, promised=(RemoteProtocolError,), write=None, seeds=seeds)
        for name, read, seeds in (
            ("upnp_search", upnp_targets.read_found, upnp_targets.found_seeds),
            ("upnp_description", upnp_targets.read_description, upnp_targets.description_seeds),
            ("upnp_reply", upnp_targets.read_reply, upnp_targets.reply_seeds),
            ("upnp_address", upnp_targets.read_external_ip, upnp_targets.reply_seeds),
            ("upnp_http", upnp_targets.read_http, upnp_targets.http_seeds),
            ("port_mapping", port_mapping.read_answer, _gateway_seeds),
        )
    ),
    Target(
        name="call_arguments",
        read=call_targets.read_arguments,
        promised=call_targets.PROMISED,
        write=None,
        seeds=call_targets.argument_seeds,
        prefix=0,
    ),
    Target(
        name="call_results",
        read=call_targets.read_result,
        promised=call_targets.PROMISED,
        write=None,
        seeds=call_targets.result_seeds,
        prefix=0,
    ),
    Target(
        name="frames",
        read=_cut_frames,
        promised=(RemoteProtocolError,),
        write=lambda frames: b"".join(map(decoding.frame, frames)),
        seeds=_frame_seeds,
    ),
    Target(
        name="quic_datagram",
        read=_read_datagram,
        promised=(RemoteProtocolError,),
        write=_write_datagram,
        seeds=_datagram_seeds,
    ),
    Target(name="quic_token", read=_read_token, promised=(RemoteProtocolError,), write=None, seeds=_token_seeds),
    Target(
        name="quic_limits",
        read=_read_limits,
        promised=(RemoteProtocolError,),
        write=quic.limit_bytes,
        seeds=lambda: [b"", *map(quic.limit_bytes, (0, 1, 1 << 63)), quic.limit_bytes(5) + quic.limit_bytes(4)],
    ),
    Target(name="pairing_share", read=_read_share, promised=(AuthError,), write=None, seeds=_share_seeds),
    Target(
        name="header",
        read=header.unpack,
        promised=(RemoteProtocolError,),
        write=header.TransferHeader.pack,
        seeds=_header_seeds,
    ),
    Target(
        name="message_header",
        read=_read_message_header,
        promised=(RemoteProtocolError,),
        write=_write_message_header,
        seeds=_message_header_seeds,
    ),
    Target(
        name="door",
        read=lambda data: door.check(KEY, CHALLENGE, data),
        promised=(AuthError,),
        write=_write_answer,
        seeds=_door_seeds,
    ),
    Target(
        name="proofs",
        read=_read_proof,
        promised=(),
        write=None,
        seeds=lambda: [door.dial_proof(KEY, CHALLENGE, b"hello") + b"hello"],
    ),
    Target(
        name="signatures",
        read=lambda data: signed.is_signed(data[:32], b"words", data[32:]),
        promised=(),
        write=None,
        seeds=_signature_seeds,
    ),
    Target(
        name="machines",
        read=_read_machine,
        promised=(AuthError, RemoteProtocolError),
        write=None,
        seeds=_machine_seeds,
        prefix=0,
    ),
    Target(
        name="sealed",
        read=_open_records,
        promised=(seal.ForgedError,),
        write=_seal_records,
        seeds=_sealed_seeds,
    ),
    Target(
        name="objects",
        read=objects.decode,
        promised=(TypeError, RemoteProtocolError),
        write=objects.encode,
        seeds=_object_seeds,
        prefix=1,
    ),
    Target(
        name="array_list",
        read=_read_arrays,
        promised=(RemoteProtocolError,),
        write=_write_arrays,
        seeds=_array_seeds,
    ),
    Target(
        name="typed_objects",
        read=_read_typed,
        promised=(TypeError, MismatchError, RemoteProtocolError),
        write=None,
        seeds=_typed_seeds,
        prefix=1,
    ),
    Target(
        name="manifest",
        read=_read_manifest,
        promised=(TypeError, MismatchError, RemoteProtocolError),
        write=objects.encode,
        seeds=_manifest_seeds,
        prefix=1,
    ),
    Target(name="text_record", read=_read_text_record, promised=(), write=None, seeds=_text_record_seeds),
    Target(name="packet", read=_read_packet, promised=(), write=None, seeds=_packet_seeds),
    Target(
        name="join_code",
        read=_read_join_code,
        promised=(ConfigError,),
        write=_write_join_code,
        seeds=_join_code_seeds,
    ),
)
