"""Messages that earlier releases sent are still read, and so are those of a later release that has added fields.

`recorded-N.txt` has bytes of every message that processes of protocol N send, one a line: the reader, the type and the
bytes. Every release that speaks protocol N has to read them, so the files are only added to: a new type, or a new last
field of a type, is a new line. `MILESTONES` holds the digest of the first lines of each file at each such time, and is
only added to as well. COVEY_RECORD_MESSAGES=1 appends what is missing, and the test then prints the next milestone.

A change that makes these tests fail needs a new version of the protocol (docs/wire.md, "Versions"). A file goes when no
release speaks its protocol any more, and OLDEST is raised.
"""

from __future__ import annotations

import hashlib
import os
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from tests.support.in_turn import in_turn

from covey.base.errors import CoveyError
from covey.lab.fuzz import values
from covey.lab.fuzz.targets import BY_HAND, message_decoders
from covey.wire.versions import NEWEST, OLDEST

if TYPE_CHECKING:
    from collections.abc import Callable

MOST_BYTES = 600
"""Longer examples say nothing that shorter ones do not."""
MOST_SEED_BYTES = 1500
READERS = {read.__name__: read for read in message_decoders()}
BY_NAME = {target.name: target for target in BY_HAND}
VERSIONS = range(OLDEST, NEWEST + 1)
MILESTONES: dict[int, list[tuple[int, str]]] = {
    3: [
        (99, "bfc1ac377ac8936e2e8d3ae7b25c21590b8e9b227885b6bb6c39ee4f717e5e2a"),
        (148, "1aa3452186fe8057a8af767b3f359a829dc46b4c5b1c16c0873377abbc9f4e97"),
        (149, "53ccf8a86df29cf8e12095211403fe9fa124b49c1d7dc7b87dec3b058fd252b0"),
        (152, "914fb20926ad89e4c1cd3315c4f504ad9040f158c19299fe891121e72d0882b1"),
        (161, "2ba0b60132c51419d9fa5c99f766423b6b5dd90c8bdc25331171582919bde707"),
        (164, "27c77f9e270e6fcca94b9ceac4ece13afdffc552ec79bb9f79a101553c007249"),
        (165, "0eb8d8f4a048f1771a9aa7fac5a5b97de9c5f2305385b1cc2e44e48edeea96bc"),
        (166, "71dfaabb7012960fa18c7595b82dc262f4de558ef586b2df392a66eb445e7d50"),
        (167, "ec57b206800a4ca6b6806644f93ff57b98ac34a15ef495efaf9b3ce840a49bb8"),
        (168, "7eea2ba810c0c82288ea501bc5734ebcde94a7b1cf0c5c47dd34f325533f4160"),
        (171, "ddc2d531b84d304818b6899a67737081b93f0d0156755e700a8155007dfdebca"),
        (172, "842fa7589cec6af3223f806d4c4dc35327aaed460d6cdef531ba932ffd602519"),
        (173, "40b2b7216cfe2c2d53124690edea9e988a2c4b8fcafb8fd51785e9c881d5bf13"),
        (174, "417ed58ddb3acd361a1ae8ecb02bdfc50ccc292c7956ce5edb123878440f60c7"),
        (178, "ba33b7565621cdeb060b512b4b58294f26278e8a93d00f50732f079fbd7291b1"),
    ],
}
"""By protocol: numbers of lines, and the SHA-256 of so many first lines. Entries are never changed."""


def file_of(version: int) -> Path:
    return Path(__file__).with_name(f"recorded-{version}.txt")


def plain(data: bytes) -> Any:
    return msgspec.msgpack.decode(data)


def sent_again(read: Callable[[bytes], Any], data: bytes) -> Any:
    """Return what the value that was read looks like on the wire."""
    return plain(msgspec.msgpack.encode(read(data)))


def begins_with(longer: Any, shorter: Any) -> bool:
    """Tell whether two messages are equal but for fields that the longer one has at the end."""
    if isinstance(longer, list) and isinstance(shorter, list):
        return len(longer) >= len(shorter) and all(map(begins_with, longer, shorter))
    return bool(longer == shorter)


def types_of(read: Callable[[bytes], Any]) -> dict[str, Any]:
    kinds = values.variants(values.return_type(read))
    return {getattr(getattr(kind, "cls", None), "__name__", "all"): kind for kind in kinds}


def fields_of(kind: Any) -> int:
    """Return how many fields a message of a type has on the wire, its tag included; 0 for values without fields."""
    struct = getattr(kind, "cls", None)
    return 0 if struct is None else len(struct.__struct_fields__) + (struct.__struct_config__.tag is not None)


def example(name: str, type_name: str) -> bytes:
    """Return a message whose texts are printable, so that it is read as it was sent, with few fields left out."""
    read, chance = READERS[name], random.Random(f"{name} {type_name}")
    maker = values.Maker(chance, at_bounds=0.0)
    found: list[bytes] = []
    for _ in range(10_000):
        data = msgspec.msgpack.encode(maker.plain(types_of(read)[type_name]))
        try:
            if len(data) <= MOST_BYTES and sent_again(read, data) == plain(data):
                found.append(data)
        except (CoveyError, ValueError):
            continue
        if len(found) == 100:
            break
    assert found, f"no example of {type_name} is read as it was sent"
    return min(found, key=lambda data: str(plain(data)).count("None"))


def recorded(version: int) -> list[tuple[str, str, bytes]]:
    lines = file_of(version).read_text().splitlines()
    return [(name, kind, bytes.fromhex(data)) for name, kind, data in (line.split(" ") for line in lines)]


def missing(version: int) -> list[tuple[str, str]]:
    """Return the types of which no message is recorded with all its fields, and the readers without a message."""
    found = {(name, kind): 0 for name, kind, _ in recorded(version)}
    for name, kind, data in recorded(version):
        if name in READERS and kind != "all":
            found[name, kind] = max(found[name, kind], len(plain(data)))
    wanted = [(name, kind) for name, read in READERS.items() for kind in types_of(read)]
    whole = {key: fields_of(types_of(READERS[key[0]])[key[1]]) for key in wanted}
    lacking = [key for key in wanted if key not in found or (key[1] != "all" and found[key] < whole[key])]
    return lacking + [("target", name) for name in BY_NAME if ("target", name) not in found]


def seed_of(name: str) -> bytes:
    """Return a valid input of a reader that is listed by hand."""
    target = BY_NAME[name]
    for data in target.seeds():
        try:
            target.read(data)
        except target.promised:
            continue
        if len(data) <= MOST_SEED_BYTES:
            return data
    raise AssertionError(f"{name} has no valid input of up to {MOST_SEED_BYTES} bytes")


def digest(lines: list[str]) -> str:
    return hashlib.sha256("".join(f"{line}\n" for line in lines).encode()).hexdigest()


def test_messages_of_every_type_are_recorded_with_all_their_fields() -> None:
    if os.environ.get("COVEY_RECORD_MESSAGES") == "1":
        lines = [
            f"{name} {kind} {(seed_of(kind) if name == 'target' else example(name, kind)).hex()}"
            for name, kind in missing(NEWEST)
        ]
        with file_of(NEWEST).open("a") as file:
            file.writelines(f"{line}\n" for line in lines)
    assert missing(NEWEST) == []


def test_what_was_recorded_is_never_rewritten() -> None:
    assert sorted(MILESTONES) == list(VERSIONS)
    assert sorted(Path(__file__).parent.glob("recorded-*.txt")) == sorted(map(file_of, VERSIONS))
    for version, milestones in MILESTONES.items():
        lines = file_of(version).read_text().splitlines()
        for count, expected in milestones:
            assert digest(lines[:count]) == expected, f"the first {count} lines of recorded-{version}.txt have changed"
        last = milestones[-1][0] if milestones else 0
        assert last == len(lines), f"add to MILESTONES[{version}]: ({len(lines)}, {digest(lines)!r})"


@in_turn(name=READERS)
def test_recorded_messages_are_read_as_they_were_sent(name: str) -> None:
    read = READERS[name]
    for version in VERSIONS:
        for reader, kind, data in recorded(version):
            if reader == name:
                assert begins_with(sent_again(read, data), plain(data)), kind


@in_turn(name=BY_NAME)
def test_recorded_bytes_that_are_no_messages_are_still_read(name: str) -> None:
    for version in VERSIONS:
        for reader, kind, data in recorded(version):
            if (reader, kind) == ("target", name):
                BY_NAME[name].read(data)


@in_turn(name=READERS)
def test_fields_that_a_later_release_adds_are_passed_over(name: str) -> None:
    read = READERS[name]
    for reader, kind, data in recorded(NEWEST):
        if reader == name and kind != "all":
            longer = msgspec.msgpack.encode([*sent_again(read, data), "a field of a later release"])
            assert read(longer) == read(data), kind
