"""What nodes and a relay say to each other, before the relay copies bytes between two connections.

    relay -> client     RelayChallenge: a challenge
    client -> relay     one of three:
      RegisterToken       "connections for this token are for me": the connection stays open; the relay answers
                          TokenRegistered and ListedTokens, then says ListedTokens for each new token of the cluster,
                          IncomingCall for each dial, and StillThere now and then, which the client repeats; it
                          repeats RelayEcho, with which the client measures the round trip
      CallToken           "connect me with the node of this token": the relay answers CallJoined or RelayRefusal
      TakeCall            "this connection is for that call": the relay answers CallJoined or RelayRefusal

After CallJoined, the relay copies what each side sends to the other, and the two nodes shake hands as on any other
connection. Each message is a frame of at most RELAY_LIMIT bytes.

A relay has no secret. A cluster has a key pair that is derived from its secret, and the relay knows the cluster by the
public half. Registrations and calls are signed, together with the relay's challenge. So only nodes that hold the secret
can register a token of the cluster, learn its tokens, or call one. Tokens are random, one for each process.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from covey.wire.decoding import read_from_peer
from covey.wire.signed import is_signed, public_half
from covey.wire.versions import RELEASE_LIMIT, Agreement, Versions, agree, only

if TYPE_CHECKING:
    from covey.wire.secret import ClusterSecret

RELAY_SPEAKS: Final = Versions(2, 2)
"""The versions of the protocol between nodes and relays that this release speaks."""
RELAY_LIMIT: Final = 8192
"""Bytes of a frame: a whole list of tokens fits."""
TOKEN_BYTES: Final = 16
CALL_ID_BYTES: Final = 16
RELAY_CHALLENGE_BYTES: Final = 32
RELAY_ID_BYTES: Final = 16
LISTED_TOKENS_LIMIT: Final = 256
"""Tokens that one message names; nodes of larger clusters hear of the others from each other."""
_RELAY_LABEL: Final = b"covey/1/relay"
_REGISTER, _CALL_FORM = b"R", b"C"

ClusterKey = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Token = Annotated[bytes, msgspec.Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]
CallId = Annotated[bytes, msgspec.Meta(min_length=CALL_ID_BYTES, max_length=CALL_ID_BYTES)]
Proof = Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)]
ReleaseName = Annotated[str, msgspec.Meta(pattern=rf"^[ -~]{{0,{RELEASE_LIMIT}}}\Z")]
RefusalText = Annotated[str, msgspec.Meta(pattern=r"^[ -~]{0,100}\Z")]


class RelayChallenge(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The first message on every connection, from the relay."""

    version: int
    """The oldest version that the relay speaks; `versions` has the others."""
    challenge: Annotated[bytes, msgspec.Meta(min_length=RELAY_CHALLENGE_BYTES, max_length=RELAY_CHALLENGE_BYTES)]
    relay: Annotated[bytes, msgspec.Meta(max_length=RELAY_ID_BYTES)] = b""
    """Random for each start of a relay: it may have another address on each network."""
    versions: Versions | None = None
    """What the relay speaks; None: only `version`."""
    release: ReleaseName = ""
    """Its release of covey, for messages."""

    @property
    def speaks(self) -> Versions:
        """What the relay speaks."""
        return self.versions if self.versions is not None else only(self.version)


class RegisterToken(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Asks for calls to a token of a cluster. A later registration of the same token replaces this one."""

    cluster: ClusterKey
    token: Token
    is_listed: bool
    """Whether other nodes of the cluster are told of the token."""
    signature: Proof
    versions: Versions | None = None
    """What the node speaks; None: version 1, which bound nothing of this."""


class CallToken(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Asks for a connection with the node that has registered a token."""

    cluster: ClusterKey
    token: Token
    signature: Proof
    versions: Versions | None = None
    """As in RegisterToken."""


class TakeCall(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Makes this connection the other side of a call."""

    call: CallId


class TokenRegistered(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The token is registered."""


class ListedTokens(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Other tokens of the cluster that are registered."""

    tokens: Annotated[tuple[Token, ...], msgspec.Meta(max_length=LISTED_TOKENS_LIMIT)]


class IncomingCall(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """A node calls the token: open another connection and send TakeCall there."""

    call: CallId


class CallJoined(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """The other side is connected: everything that follows comes from there."""


class RelayRefusal(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """The relay does not do what it was asked for, and closes the connection."""

    reason: RefusalText


class StillThere(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """Keeps a registration alive, and shows that the other end is."""


class RelayEcho(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """Asks a relay to send the same back, on a registration."""

    number: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class RelayMismatch(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """A node says what it speaks to a relay that speaks something else, and ends the connection."""

    versions: Versions
    release: ReleaseName


RelayMessage = (
    RelayChallenge
    | RegisterToken
    | CallToken
    | TakeCall
    | TokenRegistered
    | ListedTokens
    | IncomingCall
    | CallJoined
    | RelayRefusal
    | StillThere
    | RelayEcho
    | RelayMismatch
)
_decoder: msgspec.msgpack.Decoder[RelayMessage] = msgspec.msgpack.Decoder(RelayMessage)
_encoder = msgspec.msgpack.Encoder()


def encode_relay(message: RelayMessage) -> bytes:
    """Return the bytes of a message, without its frame."""
    return _encoder.encode(message)


def decode_relay(data: bytes) -> RelayMessage:
    """Decode a message between a node and a relay; raise RemoteProtocolError for anything else."""
    return read_from_peer(_decoder, data, "a message of a relay")


class RelayKey:
    """The key pair by which a relay knows a cluster: only holders of the secret can make its private half."""

    __slots__ = ("_private", "cluster")

    def __init__(self, secret: ClusterSecret) -> None:
        self._private = Ed25519PrivateKey.from_private_bytes(secret.derive("relay"))
        self.cluster = public_half(self._private)

    def register(
        self, challenge: bytes, token: bytes, *, is_listed: bool, heard: Versions = RELAY_SPEAKS
    ) -> RegisterToken:
        """Return a registration for the relay that sent `challenge`, and said that it speaks what was `heard`."""
        words = _registration(challenge, self.cluster, token, is_listed=is_listed) + _spoken(heard, RELAY_SPEAKS)
        return RegisterToken(self.cluster, token, is_listed, self._private.sign(words), RELAY_SPEAKS)

    def call(self, challenge: bytes, token: bytes, *, heard: Versions = RELAY_SPEAKS) -> CallToken:
        """Return a call for the relay that sent `challenge`, and said that it speaks what was `heard`."""
        words = _call(challenge, self.cluster, token) + _spoken(heard, RELAY_SPEAKS)
        return CallToken(self.cluster, token, self._private.sign(words), RELAY_SPEAKS)


def relay_objection(relay: Versions, relay_release: str, node: Versions, node_release: str) -> str:
    """Return why a relay and a node cannot talk, with both releases and which to update; empty if they can."""
    found = agree(relay, node)
    if isinstance(found, Agreement):
        return ""
    older = "the relay" if found.mine_is_old else "the node"
    return f"relay protocol {relay} (covey {relay_release}), node {node} (covey {node_release}): update {older}"


def is_proved(message: RegisterToken | CallToken, challenge: bytes) -> bool:
    """Tell whether a registration or a call was signed for this challenge with the key of its cluster.

    The signature also covers what both sides speak, so that nothing on the way can make them speak less.
    """
    if message.versions is None:
        return False
    if isinstance(message, RegisterToken):
        words = _registration(challenge, message.cluster, message.token, is_listed=message.is_listed)
    else:
        words = _call(challenge, message.cluster, message.token)
    return is_signed(message.cluster, words + _spoken(RELAY_SPEAKS, message.versions), message.signature)


def _spoken(relay: Versions, node: Versions) -> bytes:
    """Return what both sides speak, as it is signed: each follows its length."""
    packed = (_encoder.encode(each) for each in (relay, node))
    return b"".join(struct.pack(">I", len(each)) + each for each in packed)


def _registration(challenge: bytes, cluster: bytes, token: bytes, *, is_listed: bool) -> bytes:
    return _begin(_REGISTER, challenge, cluster, token) + bytes((is_listed,))


def _call(challenge: bytes, cluster: bytes, token: bytes) -> bytes:
    return _begin(_CALL_FORM, challenge, cluster, token)


def _begin(kind: bytes, challenge: bytes, cluster: bytes, token: bytes) -> bytes:
    """Return the start of what is signed: every part has a fixed length or follows its length."""
    return struct.pack(">I", len(_RELAY_LABEL)) + _RELAY_LABEL + kind + challenge + cluster + token
