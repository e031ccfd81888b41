"""The door: a dialler that holds the key gets in, once, for its purpose; no other does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.base.errors import AuthError
from covey.wire import door

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
