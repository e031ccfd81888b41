from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from covey.wire.greeting import BANNER, NONCE_BYTES, PROOF_BYTES, accept_proof, dial_proof, proofs_equal

TOKEN, OTHER = b"t" * 32, b"u" * 32
CHALLENGE, NONCE = b"c" * NONCE_BYTES, b"n" * NONCE_BYTES


def test_a_proof_depends_on_all_that_it_proves() -> None:
    proofs = {
        dial_proof(TOKEN, CHALLENGE, b"hello"),
        dial_proof(OTHER, CHALLENGE, b"hello"),
        dial_proof(TOKEN, NONCE, b"hello"),
        dial_proof(TOKEN, CHALLENGE, b"hullo"),
        accept_proof(TOKEN, CHALLENGE, NONCE, b"hello"),
        accept_proof(OTHER, CHALLENGE, NONCE, b"hello"),
        accept_proof(TOKEN, NONCE, CHALLENGE, b"hello"),
        accept_proof(TOKEN, CHALLENGE, NONCE, b"hullo"),
    }
    assert len(proofs) == 8
    assert {len(proof) for proof in proofs} == {PROOF_BYTES}


@given(hello=st.binary(), challenge=st.binary(min_size=NONCE_BYTES, max_size=NONCE_BYTES))
def test_what_a_dialler_sent_can_never_be_sent_back_as_an_answer(hello: bytes, challenge: bytes) -> None:
    echo = dial_proof(TOKEN, challenge, hello)
    for nonce in (b"", challenge, hello[:NONCE_BYTES]):
        assert not proofs_equal(echo, accept_proof(TOKEN, challenge, nonce, hello))


def test_proofs_of_another_length_are_not_equal() -> None:
    proof = dial_proof(TOKEN, CHALLENGE, b"")
    assert proofs_equal(proof, bytes(proof))
    assert not proofs_equal(proof, proof[:-1])
    assert not proofs_equal(proof, b"")


def test_the_banner_names_the_version() -> None:
    assert BANNER == b"covey/1\n"
