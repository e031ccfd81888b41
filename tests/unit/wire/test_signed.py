"""What the owner of a cluster signs is good for one thing only."""

from __future__ import annotations

import itertools
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from covey.wire.messages import Charter
from covey.wire.signed import charter_words, files_tag, is_signed, public_half, rotation_words

OWNER = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
ROTATION: dict[str, Any] = {
    "cluster": "home",
    "serial": 7,
    "grace": 600,
    "new_key": b"n" * 32,
    "old_key": b"o" * 32,
    "recipient": b"r" * 32,
}
OTHERS: dict[str, Any] = {
    "cluster": "homer",
    "serial": 8,
    "grace": 601,
    "new_key": b"N" * 32,
    "old_key": b"O" * 32,
    "recipient": b"R" * 32,
}


def test_a_signature_of_a_new_secret_is_good_for_this_very_change_and_receiver() -> None:
    signature = OWNER.sign(rotation_words(**ROTATION))
    assert is_signed(public_half(OWNER), rotation_words(**ROTATION), signature)
    for field, value in OTHERS.items():
        assert not is_signed(public_half(OWNER), rotation_words(**(ROTATION | {field: value})), signature), field


def test_no_two_changes_have_the_same_words() -> None:
    chosen = [dict(zip(ROTATION, values, strict=True)) for values in
              itertools.product(*((ROTATION[field], OTHERS[field]) for field in ROTATION))]  # fmt: skip
    assert len({rotation_words(**each) for each in chosen}) == 2 ** len(ROTATION)


def test_a_signature_of_another_owner_or_of_none_is_no_signature() -> None:
    words = rotation_words(**ROTATION)
    signature = Ed25519PrivateKey.generate().sign(words)
    for owner in (public_half(OWNER), b"", bytes(31), bytes(32), b"\xff" * 32):
        for given in (signature, b"", bytes(63), bytes(64), b"\xff" * 64):
            assert not is_signed(owner, words, given)


def test_files_are_named_after_the_owner() -> None:
    assert files_tag(b"a" * 32) != files_tag(b"b" * 32)
    assert len(files_tag(b"a" * 32)) == 32


def test_no_two_charters_have_the_same_words() -> None:
    a, b, c = b"a" * 32, b"b" * 32, b"c" * 32
    charters = [
        Charter(serial, machine, denied, allowed)
        for serial in (1, 256)
        for machine in ("", "otter", "otter-a")
        for denied in ((), (a,), (a, b), (b, a), (a, b, c))
        for allowed in (None, (), (c,), (b, c), (a,))
    ]
    words = {charter_words(name, charter) for name in ("home", "homes") for charter in charters}
    assert len(words) == 2 * len(charters)


def test_a_signed_charter_is_no_signed_secret() -> None:
    words = charter_words("home", Charter(7, "", (), None))
    assert not is_signed(public_half(OWNER), rotation_words(**ROTATION), OWNER.sign(words))
    assert words[:30] != rotation_words(**ROTATION)[:30]
