"""The messages of streams: what is written is read again, and anything else is refused."""

from __future__ import annotations

import random

import numpy as np
import pytest
from tests.support.in_turn import in_turn
from tests.support.seeds import seeds

from covey.coordinator.refusal import Reason, RefusalError
from covey.gateway import gateway_pb2 as pb
from covey.gateway import pieces
from covey.gateway.pieces import ArrayKind, Filling, array_kind, chunks, decode_piece

SIZES = (0, 1, 127, 128, 16_383, 16_384, pieces.CHUNK_BYTES, pieces.CHUNK_BYTES + 1, 2 * pieces.CHUNK_BYTES + 5)


@in_turn(size=SIZES)
def test_chunks_are_what_protobuf_makes_of_them_and_are_read_without_it(size: int) -> None:
    array = np.arange(size, dtype=np.uint64).astype(np.uint8)
    sent = list(chunks(array))
    assert b"".join(pb.Piece.FromString(each).chunk for each in sent) == array.tobytes()
    assert all(pb.Piece(chunk=pb.Piece.FromString(each).chunk).SerializeToString() == each for each in sent)
    filled = np.empty_like(array)
    filling = Filling(filled)
    for each in sent:
        read = decode_piece(each)
        assert isinstance(read, memoryview)
        filling.add(read)
    filling.check_full()
    assert filled.tobytes() == array.tobytes()


@in_turn(seed=seeds(40))
def test_a_damaged_message_is_refused_or_is_what_protobuf_reads(seed: int) -> None:
    rng = random.Random(seed)
    start = pb.Start(session=rng.randbytes(16), dtype="float32", shape=[3, 4], op="sum", root=2)
    whole = rng.choice([pb.Piece(start=start), pb.Piece(chunk=rng.randbytes(rng.randrange(300)))]).SerializeToString()
    for _ in range(50):
        data = bytearray(whole)
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(data) + 1)
            data[at : at + rng.randrange(2)] = rng.randbytes(rng.randrange(3))
        try:
            read = decode_piece(bytes(data))
        except RefusalError:
            continue
        expected = pb.Piece.FromString(bytes(data))
        if isinstance(read, memoryview):
            assert bytes(read) == expected.chunk, data
        else:
            assert read == expected.start, data


@in_turn(
    case=[
        (pb.Start(dtype="int7", shape=[1]), Reason.MALFORMED),
        (pb.Start(dtype="int8", shape=[1] * 33), Reason.MALFORMED),
        (pb.Start(dtype="int8", shape=[101]), Reason.FULL),
        (pb.Start(dtype="float64", shape=[13]), Reason.FULL),
        (pb.Start(dtype="int8", shape=[(1 << 64) - 1] * 32), Reason.FULL),
        (pb.Start(dtype="int8", shape=[0, 101]), Reason.MALFORMED),
    ]
)
def test_an_array_that_cannot_be_is_refused_before_memory_is_taken(case: tuple[pb.Start, Reason]) -> None:
    start, reason = case
    with pytest.raises(RefusalError) as caught:
        array_kind(start, 100)
    assert caught.value.reason is reason, start


def test_an_array_has_the_dtype_and_shape_that_were_announced() -> None:
    assert array_kind(pb.Start(dtype="float64", shape=[3, 4]), 96) == ArrayKind(np.dtype("float64"), (3, 4))
    assert array_kind(pb.Start(dtype="bfloat16"), 2).nbytes == 2


def test_bytes_that_are_no_bool_are_refused() -> None:
    filling = Filling(np.empty(2, np.bool_))
    filling.add(memoryview(b"\x01\x02"))
    with pytest.raises(RefusalError, match="bool"):
        filling.check_full()
