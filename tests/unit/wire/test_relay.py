"""What nodes prove to a relay: a registration and a call are good for one relay's challenge, and for nothing else."""

from __future__ import annotations

import secrets

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from covey.wire.decoding import FRAME_LENGTH, frame
from covey.wire.relay import (
    LISTED_TOKENS_LIMIT,
    RELAY_LIMIT,
    RELAY_SPEAKS,
    CallToken,
    ListedTokens,
    RelayKey,
    decode_relay,
    encode_relay,
    is_proved,
    relay_objection,
)
from covey.wire.secret import ClusterSecret
from covey.wire.versions import Versions, only

SECRET = ClusterSecret("lab", bytes(range(32)))
CHALLENGE, TOKEN = bytes(32), b"t" * 16


def test_holders_of_one_secret_have_one_key_and_others_have_others() -> None:
    assert RelayKey(SECRET).cluster == RelayKey(ClusterSecret("lab", SECRET.key)).cluster
    for other in (ClusterSecret("lab2", SECRET.key), ClusterSecret("lab", secrets.token_bytes(32))):
        assert RelayKey(other).cluster != RelayKey(SECRET).cluster


def test_the_key_says_nothing_about_the_secret_or_other_keys() -> None:
    derived = [SECRET.derive(purpose) for purpose in ("door", "node-ca", "mdns", "local", "files", "relay")]
    assert RelayKey(SECRET).cluster not in (SECRET.key, *derived)


@pytest.mark.parametrize("kind", ["register", "call"])
def test_what_was_signed_is_good_as_it_is_and_not_if_anything_is_changed(kind: str) -> None:
    key, other = RelayKey(SECRET), RelayKey(ClusterSecret("lab", bytes(32)))
    message = key.register(CHALLENGE, TOKEN, is_listed=True) if kind == "register" else key.call(CHALLENGE, TOKEN)
    assert is_proved(message, CHALLENGE)
    assert is_proved(decode_relay(encode_relay(message)), CHALLENGE)  # type: ignore[arg-type]
    assert not is_proved(message, b"\1" + CHALLENGE[1:])
    changes: dict[str, object] = {"token": b"u" * 16, "cluster": other.cluster, "signature": bytes(64)}
    changes |= {"versions": Versions(1, 2)}
    changes |= {"is_listed": False} if kind == "register" else {}
    for field, value in changes.items():
        assert not is_proved(msgspec.structs.replace(message, **{field: value}), CHALLENGE)


def test_what_is_signed_is_as_written() -> None:
    key = RelayKey(SECRET)
    public = Ed25519PrivateKey.from_private_bytes(SECRET.derive("relay")).public_key()
    assert public.public_bytes_raw() == key.cluster
    label = b"\0\0\0\x0dcovey/1/relay"
    versions = msgspec.msgpack.encode([2, 2, [], []])
    spoken = 2 * (len(versions).to_bytes(4, "big") + versions)
    for is_listed in (True, False):
        words = label + b"R" + CHALLENGE + key.cluster + TOKEN + bytes((is_listed,)) + spoken
        public.verify(key.register(CHALLENGE, TOKEN, is_listed=is_listed).signature, words)
    public.verify(key.call(CHALLENGE, TOKEN).signature, label + b"C" + CHALLENGE + key.cluster + TOKEN + spoken)


def test_a_relay_that_was_made_to_seem_older_notices_it() -> None:
    """What lies between a node and a relay may change the first message, but not what the node signs."""
    key, told = RelayKey(SECRET), Versions(1, 2)
    assert not is_proved(key.register(CHALLENGE, TOKEN, is_listed=True, heard=told), CHALLENGE)
    assert not is_proved(key.call(CHALLENGE, TOKEN, heard=told), CHALLENGE)


def test_a_relay_and_a_node_that_cannot_talk_are_told_which_to_update() -> None:
    assert relay_objection(RELAY_SPEAKS, "0.2", RELAY_SPEAKS, "0.2") == ""
    assert relay_objection(Versions(3, 4), "0.4", RELAY_SPEAKS, "0.2") == (
        "relay protocol 3 to 4 (covey 0.4), node 2 (covey 0.2): update the node"
    )
    assert relay_objection(only(1), "of unknown release", RELAY_SPEAKS, "0.2").endswith("update the relay")


def test_a_registration_is_no_call() -> None:
    registration = RelayKey(SECRET).register(CHALLENGE, TOKEN, is_listed=False)
    assert not is_proved(CallToken(registration.cluster, TOKEN, registration.signature), CHALLENGE)


def test_the_longest_message_fits_into_a_frame() -> None:
    longest = frame(encode_relay(ListedTokens((TOKEN,) * LISTED_TOKENS_LIMIT)))
    assert len(longest) - FRAME_LENGTH.size <= RELAY_LIMIT
