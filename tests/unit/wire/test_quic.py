"""What covey reads and writes of QUIC datagrams, byte by byte."""

from __future__ import annotations

import hmac

import pytest

from covey.base.errors import RemoteProtocolError
from covey.wire import quic

KEY = bytes(range(32))


def initial(destination: bytes = bytes(20), source: bytes = bytes(20), version: int = 1, kind: int = 0xC0) -> bytes:
    head = bytes((kind,)) + version.to_bytes(4, "big") + bytes((len(destination),)) + destination
    return (head + bytes((len(source),)) + source + b"\0").ljust(1200, b"\0")


def test_the_id_of_a_dialler_is_as_documented() -> None:
    nonce = bytes(range(8))
    cid = quic.proving_cid(KEY, nonce)
    assert cid == nonce + hmac.digest(KEY, b"covey/1/quic-dialler" + nonce, "sha256")[:12]
    assert len(cid) == quic.CID_BYTES == 20
    assert quic.is_proof(KEY, cid)
    assert not quic.is_proof(bytes(32), cid)
    assert not quic.is_proof(KEY, cid[:-1])


def test_streams_limits_and_times_are_as_documented() -> None:
    streams = quic.DIALLER_BYTES, quic.ACCEPTOR_BYTES, quic.DIALLER_LIMITS, quic.ACCEPTOR_LIMITS
    assert streams == (2, 3, 6, 7)
    assert quic.limit_bytes(258) == b"\2\1\0\0\0\0\0\0"
    assert quic.TOKEN_SECONDS == 10


def test_a_limit_that_is_taken_back_is_an_error() -> None:
    reader = quic.LimitReader()
    for at in range(8):
        reader.feed(quic.limit_bytes(500)[at : at + 1])
    assert reader.limit == 500
    with pytest.raises(RemoteProtocolError, match="taken back"):
        reader.feed(quic.limit_bytes(499))


def test_probes_of_paths_and_their_answers_are_as_documented() -> None:
    nonce = bytes(range(16))
    probe, answer = quic.path_probe(KEY, nonce), quic.path_answer(KEY, nonce)
    assert probe == b"\1" + nonce + hmac.digest(KEY, b"covey/1/quic-path\1" + nonce, "sha256")[:16]
    assert answer == b"\2" + nonce + hmac.digest(KEY, b"covey/1/quic-path\2" + nonce, "sha256")[:16]
    assert quic.answer_path_probe(KEY, probe) == answer
    assert quic.answer_path_probe(bytes(32), probe) == b""
    assert quic.is_about_path(probe)
    assert not quic.is_about_path(b"\x40" + probe[1:]), "a datagram of QUIC has this bit"


@pytest.mark.parametrize(
    "data", [initial(version=2), initial(kind=0xD0), initial(kind=0x40), initial()[:-1], initial(source=bytes(21))]
)
def test_datagrams_of_another_kind_or_version_begin_nothing(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        quic.read_first(data)


def test_datagrams_are_given_to_the_connection_they_name() -> None:
    assert quic.destination_of(initial(b"d" * 20)) == b"d" * 20
    assert quic.destination_of(b"\x40" + b"e" * 20 + b"rest") == b"e" * 20
    for data in (b"", b"\x40" + b"e" * 19, b"\x00" * 40, b"\xc0\0\0\0\1\x14short", initial(b"")):
        assert quic.destination_of(data) == b""
