"""Questions to a key-value store and their answers, and what the members that hold copies of it tell each other.

The process that asks numbers its questions in the order in which it sends them; the answer has the same number. Tags
and fields are only added, at the end. `proto.replication` has the protocol between the copies.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from covey.wire.decoding import read_from_peer
from covey.wire.messages import MAX_MEMBERS, Text, Worded

KEY_LIMIT: Final = 1000
"""Characters of a key."""
KEYS_LIMIT: Final = 4096
"""Keys in one question."""
PLAIN_VALUE_LIMIT: Final = 1 << 18
"""Bytes of a value in a run whose members do not all know the feature `WIDE_STORE`."""
VALUE_LIMIT: Final = 1 << 24
"""Bytes of a value."""
RECEIVED_LIMIT: Final = 256
"""Answers that one question acknowledges."""
BODY_LIMIT: Final = (1 << 20) - 256
"""Bytes of a question or an answer that travels in one frame; a larger one travels as `BodyPiece`s."""
LARGE_BODY_LIMIT: Final = VALUE_LIMIT + (1 << 20)
"""Bytes of a question or an answer."""
BODY_PIECE_BYTES: Final = 1 << 18
MILLISECONDS_LIMIT: Final = 1 << 42
"""Of the time after which an entry ends: more than a hundred years."""

Key = Annotated[str, msgspec.Meta(max_length=KEY_LIMIT)]
Keys = Annotated[tuple[Key, ...], msgspec.Meta(max_length=KEYS_LIMIT)]
Value = Annotated[bytes, msgspec.Meta(max_length=VALUE_LIMIT)]
Number = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Versions = Annotated[tuple[Number, ...], msgspec.Meta(max_length=KEYS_LIMIT)]
Milliseconds = Annotated[int, msgspec.Meta(ge=0, le=MILLISECONDS_LIMIT)]


class Put(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Set entries, all at once."""

    entries: Annotated[tuple[tuple[Key, Value], ...], msgspec.Meta(max_length=KEYS_LIMIT)]
    ends_with_member: bool = False
    """Whether the entries end when the process that asks is no member any more."""
    milliseconds: Milliseconds = 0
    """After how long they end; 0 for never."""


class Get(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Wait until all of these keys exist, and return their values, or as many as fit into one message."""

    keys: Keys
    seen: Versions = ()
    """By key: the version that the sender has the value of, which is not sent again; 0 if it has none."""


class Await(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Wait until all of these keys exist."""

    keys: Keys


class HasKeys(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Return whether all of these keys exist."""

    keys: Keys


class Add(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Add to a number, which is 0 if the key does not exist, and return the sum."""

    key: Key
    amount: Number


class Swap(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Set an entry if it has the expected value; a missing entry counts as empty.

    Return its value now, none if it does not exist, and the number 1 if it was set.
    """

    key: Key
    expected: Value
    desired: Value
    if_missing: bool = False
    """Set the entry only if it does not exist, whatever is expected."""
    ends_with_member: bool = False
    milliseconds: Milliseconds = 0
    """As in a Put, if the entry is set."""


class Append(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Add bytes at the end of a value."""

    key: Key
    value: Value


class Delete(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """Remove an entry, and return whether it existed."""

    key: Key


class Names(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """Return the keys of all entries, sorted: as many as fit into one message, and the number 1 if there are more."""

    after: Key | None = None
    """Only keys behind this one."""
    prefix: Key = ""
    """Only keys that begin so."""


class Count(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """Return the number of entries."""


class Push(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """Add a value at the end of a queue."""

    key: Key
    value: Value


class Pop(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """Take the first value of a queue."""

    key: Key
    waits: bool
    """Whether to wait until there is one. If not, the answer of an empty queue has no value."""


class Length(msgspec.Struct, frozen=True, array_like=True, tag=13):
    """Return the number of values in a queue."""

    key: Key


class Withdraw(msgspec.Struct, frozen=True, array_like=True, tag=14):
    """Drop the question of this number, if it waits: its caller does not. The answer may be that of the question."""


class Done(msgspec.Struct, frozen=True, array_like=True, tag=15):
    """The answer."""

    values: tuple[Value, ...] = ()
    number: Number = 0
    versions: Versions = ()
    """Of a Get whose values are not all here: by key. The values are the first ones of the keys that were not seen."""


class Refused(Worded, frozen=True, array_like=True, tag=16):
    """The question is refused, with the reason."""

    reason: Text


class Open(msgspec.Struct, frozen=True, array_like=True, tag=17):
    """Begin an empty store; the oldest one is dropped if there are too many."""


class Forget(msgspec.Struct, frozen=True, array_like=True, tag=18):
    """Drop all questions that wait: after a change of members, processes repeat those that they still wait for."""

    members: Annotated[tuple[Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)], ...], msgspec.Meta(max_length=4096)] = ()
    """Drop the answers for other processes as well, unless it is empty."""


class Observe(msgspec.Struct, frozen=True, array_like=True, tag=19):
    """Wait until an entry has another version than this one; return its value and version, 0 if it does not exist."""

    key: Key
    version: Number


class Expire(msgspec.Struct, frozen=True, array_like=True, tag=20):
    """Remove entries that have ended, each if it still has this version. The member that orders the changes says so."""

    entries: Annotated[tuple[tuple[Key, Number], ...], msgspec.Meta(max_length=KEYS_LIMIT)]


class Read(msgspec.Struct, frozen=True, array_like=True, tag=21):
    """Return the values of those of these keys that exist, and the versions of all of them, 0 for the others."""

    keys: Keys


class Scan(msgspec.Struct, frozen=True, array_like=True, tag=22):
    """Return all entries whose keys begin so, once their number and the highest of their versions are not these.

    The answer has the keys and their values in turn, sorted, and the highest version, 0 without an entry. A change of
    one of the entries changes its version, and without one only fewer can be left: so any change is noticed.
    """

    prefix: Key
    count: Number = -1
    version: Number = 0


Question = (
    Put | Get | Await | HasKeys | Add | Swap | Append | Delete | Names | Count | Push | Pop | Length | Observe | Read
    | Scan
)  # fmt: skip
Answer = Done | Refused
Asked = Question | Withdraw | Open
"""What a process asks for."""
Change = Asked | Forget | Expire
"""What is ordered, and applied to every copy in this order."""
Count64 = Annotated[int, msgspec.Meta(ge=-1, lt=1 << 62)]
Received = Annotated[tuple[Count64, ...], msgspec.Meta(max_length=RECEIVED_LIMIT)]


class Submit(msgspec.Struct, frozen=True, array_like=True, tag=32):
    """A question to the member that orders the changes."""

    config: Count64
    """The members that hold copies, as the sender knows them: the number of their view in the run."""
    settled: Count64
    """The sender has the answers to all of its questions with lower numbers."""
    change: Asked
    received: Received = ()
    """Further questions whose answers the sender has: the one that `settled` names may wait for long."""
    confirms: bool = False
    """Whether the sender had accepted no view after the configuration when it sent this: it counts as `Confirmed`."""


class Entry(msgspec.Struct, frozen=True, array_like=True, tag=33):
    """A change with its place in the order."""

    config: Count64
    index: Count64
    stable: Count64
    """All copies have the changes up to this one."""
    asker: Count64
    settled: Count64
    change: Change
    received: Received = ()


class Ack(msgspec.Struct, frozen=True, array_like=True, tag=34):
    """The sender's copy has all changes up to this one."""

    config: Count64
    index: Count64


class Recover(msgspec.Struct, frozen=True, array_like=True, tag=35):
    """The sender orders the changes from now on, and lacks those after `index`: send them, then `Last`.

    With -1 it lacks a whole copy.
    """

    config: Count64
    index: Count64


class Last(msgspec.Struct, frozen=True, array_like=True, tag=36):
    """The sender's copy has the changes up to this one, -1 if it has no copy, and lacks what follows."""

    config: Count64
    index: Count64
    least: Annotated[int, msgspec.Meta(ge=1, le=MAX_MEMBERS)] = 1
    """The sender proposes no view of fewer members."""


class Load(msgspec.Struct, frozen=True, array_like=True, tag=37):
    """A part of a copy for a member that has none: something to apply to the empty store of this number."""

    config: Count64
    change: Put | Push | Open | Get | Await | Pop | Observe | Scan
    asker: Count64 = -1
    """Of a question that waits, or of entries that end with it."""
    versions: Versions = ()
    """Of the entries of a Put; of an Open: the number of changes to entries so far."""
    part: Count64 = 0
    """Parts are numbered from 0: a receiver takes each in its turn."""
    index: Count64 = -1
    """The copy has the changes up to this one: parts of different copies do not fit together."""


class LoadAnswer(msgspec.Struct, frozen=True, array_like=True, tag=38):
    """A part of a copy: an answer that a process may not have received."""

    config: Count64
    asker: Count64
    answer: Done | Refused
    part: Count64 = 0
    index: Count64 = -1


class Loaded(msgspec.Struct, frozen=True, array_like=True, tag=39):
    """The copy is complete, and has the changes up to this one."""

    config: Count64
    index: Count64
    parts: Count64 = 0
    """How many there were. A receiver that has not got all of them in their turn asks for the whole copy again."""


class BodyPiece(msgspec.Struct, frozen=True, array_like=True, tag=40):
    """A part of a body that is too large for one frame. The pieces of one body follow each other on a link."""

    body: Count64
    """The sender counts its large bodies, so that a late piece of an earlier one fits to none."""
    at: Count64
    size: Annotated[int, msgspec.Meta(ge=1, le=LARGE_BODY_LIMIT)]
    """Of the whole body."""
    data: Annotated[bytes, msgspec.Meta(max_length=BODY_PIECE_BYTES)]


class Confirm(msgspec.Struct, frozen=True, array_like=True, tag=41):
    """The sender orders the changes, and asks whether the receiver has accepted no view after the configuration."""

    config: Count64
    round: Count64
    asks_again: bool = False
    """Whether the sender has a new link: the receiver repeats what it wants to read, because that is not kept."""


class Confirmed(msgspec.Struct, frozen=True, array_like=True, tag=42):
    """The sender has accepted none. One that has does not answer."""

    config: Count64
    round: Count64


def only_reads(change: Change) -> bool:
    """Tell whether a question changes nothing and never waits, so that it may be answered again and again."""
    match change:
        case HasKeys() | Read() | Names() | Count() | Length():
            return True
        case Observe(_, version):
            return version < 0  # which no entry has
        case Scan(_, count):
            return count < 0
    return False


def is_wide(change: Question | Withdraw | Open) -> bool:
    """Tell whether members of a run without the feature `WIDE_STORE` do not know a question as it is."""
    match change:
        case Read() | Scan():
            return True
        case Names(_, prefix):
            return bool(prefix)
        case Get(keys) | Await(keys) | HasKeys(keys):
            return 4 * sum(map(len, keys)) + 8 * len(keys) > BODY_LIMIT
        case Put(entries, ends_with_member, milliseconds):
            is_large = any(len(value) > PLAIN_VALUE_LIMIT for _, value in entries)
            size = sum(4 * len(key) + len(value) + 16 for key, value in entries)
            return ends_with_member or milliseconds > 0 or is_large or size > BODY_LIMIT
        case Swap(_, expected, desired, _, ends_with_member, milliseconds):
            return ends_with_member or milliseconds > 0 or max(len(expected), len(desired)) > PLAIN_VALUE_LIMIT
        case Append(_, value) | Push(_, value):
            return len(value) > PLAIN_VALUE_LIMIT
    return False


def placed(part: Load | LoadAnswer, config: int, number: int, index: int) -> Load | LoadAnswer:
    """Return a part with its place: the configuration, its number, and the index of the copy."""
    return msgspec.structs.replace(part, config=config, part=number, index=index)


def bytes_of(change: Change) -> int:
    """Return about how many bytes a change has."""
    match change:
        case Put(entries):
            return sum(4 * len(key) + len(value) + 16 for key, value in entries)
        case Swap(_, expected, desired):
            return len(expected) + len(desired)
        case Append(_, value) | Push(_, value):
            return len(value)
    return 0


Replication = Submit | Entry | Ack | Recover | Last | Load | LoadAnswer | Loaded | Confirm | Confirmed
Body = Answer | Replication | BodyPiece

_bodies: msgspec.msgpack.Decoder[Body] = msgspec.msgpack.Decoder(Body)
encode_body = msgspec.msgpack.Encoder().encode


def decode_body(data: bytes) -> Body:
    """Decode a question or an answer; RemoteProtocolError for anything else."""
    return read_from_peer(_bodies, data, "a message about a store")
