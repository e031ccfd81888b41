"""What the ranks of a run have measured of the links between them, as a node tells it to a command that asks."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from covey.wire.decoding import read_from_peer
from covey.wire.messages import Bytes, Name, Seconds, Text, Worded

Speed = Annotated[float, msgspec.Meta(ge=0, le=1e15)]
"""Bytes per second; 0 if it is not limited, or not known."""
NETWORK_LIMIT: Final = 256
"""Members of a network that is told: it has two figures for each pair of them, and fits into one control frame."""
Number = Annotated[int, msgspec.Meta(ge=0, lt=NETWORK_LIMIT)]


class NetworkMember(Worded, frozen=True, array_like=True):
    """A member, and the links from it."""

    id: Bytes
    """Its public key; empty in a run that uses a launcher's token."""
    name: Text
    host_name: Text
    host: Number
    """Equal for members on one machine."""
    site: Number
    up: Speed
    """What its machine can send to others in all."""
    down: Speed
    rates: Annotated[tuple[Speed, ...], msgspec.Meta(max_length=NETWORK_LIMIT)]
    """What it sends to each member."""
    round_trips: Annotated[tuple[Seconds, ...], msgspec.Meta(max_length=NETWORK_LIMIT)]
    ages: Annotated[tuple[Seconds, ...], msgspec.Meta(max_length=NETWORK_LIMIT)] = ()
    """How much older than the network, or younger, the figures of the link to each member are; empty if none is."""


class MeasuredNetwork(Worded, frozen=True, array_like=True):
    """The figures that the members of one group have agreed on."""

    members: Annotated[tuple[NetworkMember, ...], msgspec.Meta(max_length=NETWORK_LIMIT)]
    trunks: Annotated[
        tuple[Annotated[tuple[Speed, ...], msgspec.Meta(max_length=NETWORK_LIMIT)], ...],
        msgspec.Meta(max_length=NETWORK_LIMIT),
    ]
    """What all members of a site together send to another one."""
    age: Seconds
    """Seconds since they were measured."""
    sender: Text
    """The name of the sender."""
    medium: Name
    """How the sender's machine is connected: `wired`, `wireless`, `virtual` or `unknown`."""
    plan: Text
    """The plan that was chosen last, and why; empty if none was."""


_network: msgspec.msgpack.Decoder[MeasuredNetwork] = msgspec.msgpack.Decoder(MeasuredNetwork)
_encode = msgspec.msgpack.Encoder().encode


def encode_network(network: MeasuredNetwork, age: float, medium: str) -> bytes:
    """Encode what was measured so many seconds ago, for a sender whose machine is connected like this."""
    return _encode(msgspec.structs.replace(network, age=age, medium=medium))


def decode_network(data: bytes) -> MeasuredNetwork:
    """Decode what was measured of a network; raise RemoteProtocolError for anything else."""
    return read_from_peer(_network, data, "a measured network")
