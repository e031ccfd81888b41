"""What two machines say to each other to let one of them into a cluster, with a code of six digits that both know.

    inviter   -> applicant   PairingHello: who it is, fresh bytes, what it speaks
    applicant -> inviter     PairingRequest: who it is, fresh bytes, what it speaks, its share of the key
    inviter   -> applicant   PairingShare: its own share
    applicant -> inviter     PairingProof: that it has the key, and a signature of its machine's key, sealed
    inviter   -> applicant   PairingGrant: that it has the key; sealed, such a signature and the join code
    applicant -> inviter     PairingStored: that it has stored the secret, sealed

Instead of an answer, the inviter may send a PairingRefusal. Each message is a frame of at most PAIRING_LIMIT bytes.

The key depends on the code, on both machines' keys, on the fresh bytes, and on every byte of hello and request. The
applicant proves first: so the inviter knows of every code that was tried.

By CPace, two ends that know the same short code agree on a key that no other end can guess offline. The suite is
CPACE-X25519-SHA512 of draft-irtf-cfrg-cpace, in its initiator-responder form. A code of six digits has 20 bits: with
any other exchange, a machine that has recorded one, or taken part in one, could try all codes offline. Here each try
takes an exchange with an end that knows the code, and tells only whether one code was right.

X25519 is OpenSSL's, which takes the same time for all values. The map from the code to a point (Elligator 2) is our
own, on Python's integers, whose time depends on values: both costly steps work on numbers that a random factor hides.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import TYPE_CHECKING, Annotated, Final, Literal, NamedTuple

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from covey.base.errors import AuthError
from covey.base.text import printable
from covey.wire.decoding import read_from_peer
from covey.wire.signed import SIGNATURE_BYTES, is_signed
from covey.wire.versions import Speaker, Versions, objection

if TYPE_CHECKING:
    from collections.abc import Callable

SHARE_BYTES: Final = 32
CONFIRMATION_BYTES: Final = 64
_P: Final = 2**255 - 19
_A: Final = 486662
"""The coefficient A of Curve25519: v^2 = u^3 + A u^2 + u."""
_HALF: Final = pow(2, -1, _P)
_DSI: Final = b"CPace255"
_BLOCK_BYTES: Final = 128
"""Bytes of a block of SHA-512."""
PAIRING_SPEAKS: Final = Versions(1, 1)
"""The versions of this protocol that this release speaks."""
PAIRING_LIMIT: Final = 4096
"""Bytes of a frame."""
PAIRING_NONCE_BYTES: Final = 16
CODE_DIGITS: Final = 6
JOIN_CODE_LIMIT: Final = 1000
_PAIRING_LABEL: Final = b"covey/1/pairing"
PairingSide = Literal["applicant", "inviter"]
RefusalKind = Literal["later", "wrong-code", "no-code", "refused", "versions"]
MachineId = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
PairingNonce = Annotated[bytes, msgspec.Meta(min_length=PAIRING_NONCE_BYTES, max_length=PAIRING_NONCE_BYTES)]
Share = Annotated[bytes, msgspec.Meta(min_length=SHARE_BYTES, max_length=SHARE_BYTES)]
Confirmation = Annotated[bytes, msgspec.Meta(min_length=CONFIRMATION_BYTES, max_length=CONFIRMATION_BYTES)]
Sealed = Annotated[bytes, msgspec.Meta(max_length=2048)]
MachineName = Annotated[str, msgspec.Meta(pattern=r"^[ -~]{0,100}\Z")]
PairingText = Annotated[str, msgspec.Meta(max_length=400)]
_encoder = msgspec.msgpack.Encoder()


class Half(NamedTuple):
    """What one end has sent: its share, and the data that the exchange authenticates with it."""

    share: bytes
    data: bytes

    def packed(self) -> bytes:
        """Return both, each after its length."""
        return joined(self.share, self.data)


class CodeExchange:
    """One end of one exchange. Its share is sent; with that of the other end, it gives the key."""

    def __init__(self, code: bytes, channel: bytes, session: bytes, *, random: Callable[[int], bytes]) -> None:
        """Begin for a code; `channel` and `session` are what both ends know before: who they are, and fresh bytes."""
        self._scalar = X25519PrivateKey.from_private_bytes(random(SHARE_BYTES))
        self._session = session
        self.share = self._scalar.exchange(X25519PublicKey.from_public_bytes(generator(code, channel, session, random)))
        """What this end sends."""

    def key(self, share: bytes, first: Half, second: Half) -> bytes:
        """Return the key, from the share of the other end and what the initiator (`first`) and the responder have sent.

        Both ends have the same key if they know the same code and saw the same bytes; else the keys have nothing in
        common, and neither end knows yet: each has to see a `confirmation` of the other.

        Raises:
            AuthError: the share is none of those that depend on a code.
        """
        try:
            point = self._scalar.exchange(X25519PublicKey.from_public_bytes(share))
        except ValueError:  # of low order: the key would not depend on this end
            raise AuthError("the other end sent a point that is not valid") from None
        said = joined(_DSI + b"_ISK", self._session, point) + first.packed() + second.packed()
        return hashlib.sha512(said).digest()


def confirmation(key: bytes, session: bytes, half: Half) -> bytes:
    """Return what proves that the sender of `half` has the key."""
    return hmac.digest(hashlib.sha512(b"CPaceMac" + session + key).digest(), half.packed(), "sha512")


def joined(*parts: bytes) -> bytes:
    """Return parts, each after its length (LEB128)."""
    return b"".join(_length(len(part)) + part for part in parts)


def generator(code: bytes, channel: bytes, session: bytes, random: Callable[[int], bytes]) -> bytes:
    """Return the point that a code stands for in one session; `random` bytes hide it from a clock."""
    padding = bytes(max(0, _BLOCK_BYTES - 1 - len(joined(code)) - len(joined(_DSI))))
    text = joined(_DSI, code, padding, channel, session)
    return map_to_curve(hashlib.sha512(text).digest()[:SHARE_BYTES], random)


def map_to_curve(hashed: bytes, random: Callable[[int], bytes]) -> bytes:
    """Return the u-coordinate of the point to which Elligator 2 maps 32 bytes."""
    number = int.from_bytes(hashed, "little") & (1 << 255) - 1
    factor, other = (1 + int.from_bytes(random(SHARE_BYTES), "little") % (_P - 1) for _ in range(2))
    inverse = pow((1 + 2 * number * number) * factor % _P, -1, _P) * factor
    first = -_A * inverse % _P
    value = (pow(first, 3, _P) + _A * first * first + first) % _P
    sign = pow(value * other * other % _P, (_P - 1) // 2, _P)  # a square times a square is one, and else none
    return ((sign * first - (1 - sign) * _A * _HALF) % _P).to_bytes(SHARE_BYTES, "little")


def _length(count: int) -> bytes:
    packed = bytearray()
    while count > 127:
        packed.append(count & 127 | 128)
        count >>= 7
    return bytes([*packed, count])


class PairingHello(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The first message on every connection, from the machine that shows a code."""

    versions: Versions
    nonce: PairingNonce
    machine: MachineId
    name: MachineName
    release: MachineName


class PairingRequest(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Asks for the secret, with a code."""

    versions: Versions
    nonce: PairingNonce
    machine: MachineId
    name: MachineName
    release: MachineName
    share: Share


class PairingShare(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """The share of the inviter."""

    share: Share


class PairingProof(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """The applicant has the key; sealed: its signature."""

    confirmation: Confirmation
    sealed: Sealed


class PairingGrant(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The inviter has the key; sealed: a `Grant`."""

    confirmation: Confirmation
    sealed: Sealed


class PairingStored(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """The applicant has stored what it was given; sealed: nothing."""

    sealed: Sealed


class PairingRefusal(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """The inviter does not go on, and closes the connection. Not authenticated: a hint."""

    kind: RefusalKind
    text: PairingText = ""
    seconds: Annotated[float, msgspec.Meta(ge=0, le=60)] = 0.0
    """With "later": after how long a request may be answered."""
    tries_left: Annotated[int, msgspec.Meta(ge=0, le=100)] = 0
    """With "wrong-code": further tries until another code is shown."""

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "text", printable(self.text, 400))


class Grant(msgspec.Struct, frozen=True, array_like=True):
    """What an applicant gets that knew the code."""

    join_code: Annotated[str, msgspec.Meta(max_length=JOIN_CODE_LIMIT)]
    waits_at: MachineName = ""
    """The machine where the owner has to approve the applicant; empty if nothing is missing."""


class SignedGrant(msgspec.Struct, frozen=True, array_like=True):
    """A grant, with the signature of the inviter's machine."""

    signature: Annotated[bytes, msgspec.Meta(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)]
    grant: Grant


PairingMessage = (
    PairingHello | PairingRequest | PairingShare | PairingProof | PairingGrant | PairingStored | PairingRefusal
)
_decoder: msgspec.msgpack.Decoder[PairingMessage] = msgspec.msgpack.Decoder(PairingMessage)
_grants: msgspec.msgpack.Decoder[SignedGrant] = msgspec.msgpack.Decoder(SignedGrant)


def encode_pairing(message: PairingMessage) -> bytes:
    """Return the bytes of a message, without its frame."""
    return _encoder.encode(message)


def decode_pairing(data: bytes) -> PairingMessage:
    """Decode a message of pairing; raise RemoteProtocolError for anything else."""
    return read_from_peer(_decoder, data, "a message of pairing")


def decode_grant(data: bytes) -> SignedGrant:
    """Decode what a PairingGrant has sealed; raise RemoteProtocolError for anything else."""
    return read_from_peer(_grants, data, "a grant of pairing")


def pairing_objection(here: PairingHello | PairingRequest, there: PairingHello | PairingRequest) -> str:
    """Return why two machines cannot pair, with both releases and which to update; empty if they can."""
    speakers = (Speaker(each.name, each.release, each.versions) for each in (here, there))
    return objection(*speakers)


class PairingKeys:
    """What one end computes from hello and request and the two shares: proofs that it knows the code, and ciphers."""

    def __init__(self, exchange: CodeExchange, hello: bytes, request: bytes, share: bytes, *, is_inviter: bool) -> None:
        """`hello` and `request` are messages as they were sent; `share` is that of the inviter.

        Raises:
            AuthError: the share of the other end is not valid.
        """
        theirs = _request_in(request).share if is_inviter else share
        self._halves: dict[PairingSide, Half] = {
            "applicant": Half(_request_in(request).share, request),
            "inviter": Half(share, hello),
        }
        self._session = session_of(_hello_in(hello), _request_in(request))
        self._key = exchange.key(theirs, self._halves["applicant"], self._halves["inviter"])

    def confirmation(self, side: PairingSide) -> bytes:
        """Return what proves that this side has the key."""
        return confirmation(self._key, self._session, self._halves[side])

    def is_confirmed(self, side: PairingSide, given: bytes) -> bool:
        """Tell whether what was given proves that this side has the key."""
        return hmac.compare_digest(given, self.confirmation(side))

    def words(self, side: PairingSide) -> bytes:
        """Return what the machine key of this side signs: that it takes part in this exchange."""
        said = b"".join(half.packed() for half in self._halves.values())
        return joined(_PAIRING_LABEL, side.encode()) + hashlib.sha512(said).digest()

    def seal(self, side: PairingSide, kind: type[PairingMessage], content: bytes) -> bytes:
        """Return content that only the other end can read, from this side; one for each kind of message."""
        return self._cipher(side, kind).encrypt(bytes(12), content, None)

    def open(self, side: PairingSide, kind: type[PairingMessage], sealed: bytes) -> bytes:
        """Return what this side has sealed; AuthError if it has not."""
        try:
            return self._cipher(side, kind).decrypt(bytes(12), sealed, None)
        except InvalidTag:
            raise AuthError("what the other end has sealed was altered") from None

    def _cipher(self, side: PairingSide, kind: type[PairingMessage]) -> AESGCM:
        info = joined(_PAIRING_LABEL, side.encode(), kind.__name__.encode())
        return AESGCM(HKDF(algorithm=SHA256(), length=32, salt=self._session, info=info).derive(self._key))


def exchange_for(
    code: str, hello: PairingHello, request_nonce: bytes, applicant: bytes, random: Callable[[int], bytes]
) -> CodeExchange:
    """Return one end of the exchange of an applicant, named by its key, with the sender of a hello."""
    channel = joined(_PAIRING_LABEL, applicant, hello.machine)
    return CodeExchange(code.encode(), channel, hello.nonce + request_nonce, random=random)


def session_of(hello: PairingHello, request: PairingRequest) -> bytes:
    """Return the fresh bytes of both ends."""
    return hello.nonce + request.nonce


def seal_grant(keys: PairingKeys, grant: Grant, sign: Callable[[bytes], bytes]) -> PairingGrant:
    """Return the message that gives an applicant the join code."""
    content = _encoder.encode(SignedGrant(sign(keys.words("inviter")), grant))
    return PairingGrant(keys.confirmation("inviter"), keys.seal("inviter", PairingGrant, content))


def open_grant(keys: PairingKeys, message: PairingGrant, inviter: bytes) -> Grant:
    """Return what an applicant was given, once the inviter has proved the code and its machine's key.

    Raises:
        AuthError: it has not.
        RemoteProtocolError: what it has sealed is something else.
    """
    if not keys.is_confirmed("inviter", message.confirmation):
        raise AuthError("the other end does not know the code")
    content = decode_grant(keys.open("inviter", PairingGrant, message.sealed))
    if not is_signed(inviter, keys.words("inviter"), content.signature):
        raise AuthError("the other end poses as a machine whose key it does not have")
    return content.grant


def _hello_in(data: bytes) -> PairingHello:
    message = decode_pairing(data)
    assert isinstance(message, PairingHello)
    return message


def _request_in(data: bytes) -> PairingRequest:
    message = decode_pairing(data)
    assert isinstance(message, PairingRequest)
    return message
