"""Control messages: what ranks say to each other beside the tensor bytes.

Tags and fields are only ever added, at the end.
"""

from __future__ import annotations

from typing import Final

import msgspec

from covey.base.errors import RemoteProtocolError

VERSION: Final = 1


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The first words of whoever opens a connection, authenticated with the run's token."""

    version: int
    nonce: bytes
    run: str
    rank: int
    size: int
    life: bytes
    """Random per process: a restarted rank is a different life."""
    purpose: str
    """control, collectives or messages."""
    host: str
    """Equal for processes that can share memory."""
    host_name: str
    pid: int
    lanes: str
    address: tuple[str, int] | None
    """Where this rank accepts TCP connections."""
    socket: str
    """Path of the unix socket where this rank accepts connections, or empty."""
    group: int = 0
    lane: str = ""
    capacity: int = 0


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The answer to a Hello that is in order; who answers."""

    rank: int
    life: bytes
    host: str
    host_name: str
    pid: int
    address: tuple[str, int] | None
    socket: str


class Refusal(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """The answer to a Hello that is not."""

    reason: str
    retry: bool
    """Whether trying again can help."""


class Contact(msgspec.Struct, frozen=True, array_like=True):
    """How to reach a rank."""

    host: str
    address: tuple[str, int] | None
    socket: str


class Roster(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Rank 0 tells where everyone is, once everyone has come."""

    contacts: tuple[Contact, ...]


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The sender is connected to everyone."""


class Goodbye(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """The sender leaves in good order; what it sent before still counts."""


class Dial(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Please open this lane: the higher rank of a pair dials."""

    group: int
    purpose: str


class Announce(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """The sender's operation `sequence` does not move; where is everyone?"""

    group: int
    sequence: int
    fingerprint: int
    call: str


class Position(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """Answer to Announce: the last operation entered here, and what was called at the announced sequence."""

    group: int
    entered: int
    sequence: int
    fingerprint: int
    call: str
    """Empty if this rank has not come to that sequence, or passed it long ago."""


class Revoke(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """The group has failed on the sender; the first cause."""

    group: int
    kind: str
    text: str
    ranks: tuple[int, ...]
    """The ranks to blame: lost or late, in the group's numbering."""


class NoLane(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """Answer to Dial: the sender has closed that group."""

    group: int
    purpose: str


Greeting = Hello | Welcome | Refusal
Control = Roster | Ready | Goodbye | Dial | Announce | Position | Revoke | NoLane

_greetings: msgspec.msgpack.Decoder[Greeting] = msgspec.msgpack.Decoder(Greeting)
_controls: msgspec.msgpack.Decoder[Control] = msgspec.msgpack.Decoder(Control)
encode = msgspec.msgpack.Encoder().encode


def decode_greeting(data: bytes) -> Greeting:
    """Decode a message of the handshake; RemoteProtocolError for anything else."""
    try:
        return _greetings.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"not a greeting: {error}") from error


def decode_control(data: bytes) -> Control:
    """Decode a message of a control connection; RemoteProtocolError for anything else."""
    try:
        return _controls.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"not a control message: {error}") from error
