from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from covey.wire import door
from covey.wire.proofs import PROOF_BYTES, accept_proof, dial_proof, lane_proof, proofs_equal

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
