"""The door: a dialler that holds the key gets in, once, for its purpose; no other does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.base.errors import AuthError
from covey.wire import door
from covey.wire.door import PROOF_BYTES, accept_proof, dial_proof, lane_proof, proofs_equal

KEY, OTHER_KEY = bytes(range(32)), bytes(range(1, 33))
challenges = st.binary(min_size=door.CHALLENGE_BYTES, max_size=door.CHALLENGE_BYTES)
salts = st.binary(min_size=door.BOUND_BYTES, max_size=door.BOUND_BYTES)
purposes = st.sampled_from(door.Purpose)


@given(challenges, purposes, salts)
def test_the_holder_of_the_key_gets_in_for_the_purpose_it_names(
    challenge: bytes, purpose: door.Purpose, salt: bytes
) -> None:
    answer = door.answer(KEY, challenge, purpose, salt)
    assert len(answer) == door.DOOR_ANSWER_BYTES
    assert door.check(KEY, challenge, answer) is purpose


@given(challenges, purposes, salts)
def test_another_key_opens_nothing(challenge: bytes, purpose: door.Purpose, salt: bytes) -> None:
    with pytest.raises(AuthError, match="does not have this cluster's key"):
        door.check(KEY, challenge, door.answer(OTHER_KEY, challenge, purpose, salt))


@given(challenges, challenges, purposes, salts)
def test_an_answer_is_good_for_one_challenge_only(
    challenge: bytes, another: bytes, purpose: door.Purpose, salt: bytes
) -> None:
    replayed = door.answer(KEY, challenge, purpose, salt)
    if another == challenge:
        assert door.check(KEY, another, replayed) is purpose
    else:
        with pytest.raises(AuthError):
            door.check(KEY, another, replayed)


@given(challenges, purposes, salts, st.integers(0, 8 * door.DOOR_ANSWER_BYTES - 1))
def test_an_answer_with_one_bit_flipped_opens_nothing(
    challenge: bytes, purpose: door.Purpose, salt: bytes, bit: int
) -> None:
    answer = bytearray(door.answer(KEY, challenge, purpose, salt))
    answer[bit // 8] ^= 1 << bit % 8
    with pytest.raises(AuthError):
        door.check(KEY, challenge, bytes(answer))


@given(challenges, st.binary(max_size=2 * door.DOOR_ANSWER_BYTES))
def test_no_other_bytes_open_the_door_or_break_it(challenge: bytes, given_bytes: bytes) -> None:
    with pytest.raises(AuthError):
        door.check(KEY, challenge, given_bytes)


@pytest.mark.parametrize("purpose", [0, 4, 99, 255])
def test_a_purpose_that_does_not_exist_is_refused_even_with_the_key(purpose: int) -> None:
    challenge, salt = b"c" * door.CHALLENGE_BYTES, b"s" * door.BOUND_BYTES
    answer = door.answer(KEY, challenge, purpose, salt)  # type: ignore[arg-type]
    with pytest.raises(AuthError, match=f"unknown purpose, {purpose}"):
        door.check(KEY, challenge, answer)


def test_an_answer_shows_nothing_that_two_connections_have_in_common() -> None:
    challenge = b"c" * door.CHALLENGE_BYTES
    one, other = (door.answer(KEY, challenge, door.Purpose.LINK, salt * door.BOUND_BYTES) for salt in (b"1", b"2"))
    assert one[:1] == other[:1] == b"\1"
    assert one[1 + door.BOUND_BYTES :] != other[1 + door.BOUND_BYTES :]


def test_the_numbers_on_the_wire_never_change() -> None:
    assert (door.CHALLENGE_BYTES, door.DOOR_ANSWER_BYTES) == (16, 48)
    assert {purpose.name: purpose.value for purpose in door.Purpose} == {"LINK": 1, "LANE": 2, "PROBE": 3}
    answer = door.answer(bytes(32), bytes(16), door.Purpose.LANE, bytes(15))
    assert answer[:16].hex() == "02" + "00" * 15
    # HMAC-SHA256 of 32 zero bytes over "covey/1/door", the challenge and the first half of the answer
    assert answer[16:].hex() == "951651353a1b70bad9310fda16caced02da9840964fca3c331e5c11e3b7451af"


TOKEN, OTHER = b"t" * 32, b"u" * 32
DOOR_BYTES = door.CHALLENGE_BYTES + door.DOOR_ANSWER_BYTES
DOOR, ANOTHER_DOOR = b"d" * DOOR_BYTES, b"e" * DOOR_BYTES
NONCE, ANOTHER_NONCE = b"n" * 32, b"m" * 32
LANE, ANOTHER_LANE = b"l" * 16, b"k" * 16


def test_a_proof_depends_on_all_that_it_proves() -> None:
    proofs = {
        dial_proof(TOKEN, DOOR, b"hello"),
        dial_proof(OTHER, DOOR, b"hello"),
        dial_proof(TOKEN, ANOTHER_DOOR, b"hello"),
        dial_proof(TOKEN, DOOR, b"hullo"),
        accept_proof(TOKEN, DOOR, NONCE, b"hello"),
        accept_proof(OTHER, DOOR, NONCE, b"hello"),
        accept_proof(TOKEN, ANOTHER_DOOR, NONCE, b"hello"),
        accept_proof(TOKEN, DOOR, ANOTHER_NONCE, b"hello"),
        accept_proof(TOKEN, DOOR, NONCE, b"hullo"),
    }
    assert len(proofs) == 9
    assert {len(proof) for proof in proofs} == {PROOF_BYTES}


def test_a_lane_is_proved_by_its_secret_for_one_side_and_one_stream() -> None:
    proofs = {
        lane_proof(TOKEN, b"dial", LANE, 0),
        lane_proof(OTHER, b"dial", LANE, 0),
        lane_proof(TOKEN, b"accept", LANE, 0),
        lane_proof(TOKEN, b"dial", ANOTHER_LANE, 0),
        lane_proof(TOKEN, b"dial", LANE, 1),
        lane_proof(TOKEN, b"accept", LANE, 1),
    }
    assert len(proofs) == 6
    assert {len(proof) for proof in proofs} == {PROOF_BYTES}


@given(hello=st.binary(), said=st.binary(min_size=DOOR_BYTES, max_size=DOOR_BYTES))
def test_what_a_dialler_sent_can_never_be_sent_back_as_an_answer(hello: bytes, said: bytes) -> None:
    echo = dial_proof(TOKEN, said, hello)
    for nonce in (b"", said, hello[:32]):
        assert not proofs_equal(echo, accept_proof(TOKEN, said, nonce, hello))


@given(secret=st.binary(min_size=32, max_size=32), lane=st.binary(min_size=16, max_size=16), stream=st.integers(0, 63))
def test_a_lane_proof_can_never_be_sent_back_as_the_answer(secret: bytes, lane: bytes, stream: int) -> None:
    dialled, accepted = (lane_proof(secret, side, lane, stream) for side in (b"dial", b"accept"))
    assert not proofs_equal(dialled, accepted)


def test_proofs_of_another_length_are_not_equal() -> None:
    proof = dial_proof(TOKEN, DOOR, b"")
    assert proofs_equal(proof, bytes(proof))
    assert not proofs_equal(proof, proof[:-1])
    assert not proofs_equal(proof, b"")
