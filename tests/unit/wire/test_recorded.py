"""Messages that earlier releases sent are still read, and so are those of a later release that has added fields.

`recorded.txt` has messages of every type that nodes of protocol version `messages.VERSION` send: the reader, the type
and the bytes. A type may get new last fields with defaults. A change that makes this test fail needs a new version, and
machines cannot be upgraded one at a time: empty the file then, and write it anew with COVEY_RECORD_MESSAGES=1, which
otherwise only adds the types that the file does not have.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from tests.support.in_turn import in_turn

from covey.base.errors import CoveyError
from covey.lab.fuzz import values
from covey.lab.fuzz.targets import message_decoders
from covey.wire import messages

if TYPE_CHECKING:
    from collections.abc import Callable

FILE = Path(__file__).with_name("recorded.txt")
MOST_BYTES = 600
"""Longer examples say nothing that shorter ones do not."""
READERS = {read.__name__: read for read in message_decoders()}


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


def example(name: str, type_name: str) -> bytes:
    """Return a message whose texts are printable, so that it is read as it was sent."""
    read, chance = READERS[name], random.Random(f"{name} {type_name}")
    maker = values.Maker(chance, at_bounds=0.0)
    for _ in range(10_000):
        data = msgspec.msgpack.encode(maker.plain(types_of(read)[type_name]))
        try:
            if len(data) <= MOST_BYTES and sent_again(read, data) == plain(data):
                return data
        except (CoveyError, ValueError):
            continue
    raise AssertionError(f"no example of {type_name} is read as it was sent")


def recorded() -> dict[tuple[str, str], bytes]:
    lines = FILE.read_text().splitlines() if FILE.exists() else []
    version, *rest = lines or [f"version {messages.VERSION}"]
    assert version == f"version {messages.VERSION}", "the file has messages of another version: see above"
    return {(name, kind): bytes.fromhex(data) for name, kind, data in (line.split() for line in rest)}


def test_messages_of_every_type_are_recorded() -> None:
    found = recorded()
    missing = [(name, kind) for name, read in READERS.items() for kind in types_of(read) if (name, kind) not in found]
    if os.environ.get("COVEY_RECORD_MESSAGES") == "1":
        found |= {key: example(*key) for key in missing}
        lines = [f"{name} {kind} {data.hex()}" for (name, kind), data in sorted(found.items())]
        FILE.write_text("\n".join([f"version {messages.VERSION}", *lines]) + "\n")
    assert not missing


@in_turn(name=READERS)
def test_recorded_messages_are_read_as_they_were_sent(name: str) -> None:
    read = READERS[name]
    for (reader, kind), data in recorded().items():
        if reader == name:
            assert begins_with(sent_again(read, data), plain(data)), kind


@in_turn(name=READERS)
def test_fields_that_a_later_release_adds_are_passed_over(name: str) -> None:
    read = READERS[name]
    for (reader, kind), data in recorded().items():
        if reader == name and kind != "all":
            longer = msgspec.msgpack.encode([*sent_again(read, data), "a field of a later release"])
            assert read(longer) == read(data), kind
