"""The matcher finishes a large message that other code has begun, from any byte on and over broken connections."""

from __future__ import annotations

import numpy as np
import pytest

from covey.base.arithmetic import dtype_code
from covey.proto import message_stream
from covey.proto.matching import Matcher
from covey.proto.message import HEADER_COST
from covey.proto.message_link import MessageSizes, UnfinishedMessage
from covey.wire import message_header as wire
from covey.wire.message_header import MessageHeader

INT16 = dtype_code(np.dtype(np.int16))
SIZES = MessageSizes(eager_bytes=60, credit_bytes=1 << 16)
PIECE = 300
CONTENT = np.arange(370, dtype=np.int16)
TAG = 5
RTS = wire.encode(MessageHeader(wire.RTS, 0, CONTENT.nbytes, TAG, False, INT16, CONTENT.shape))
CTS = wire.encode(MessageHeader(wire.CTS, 0, CONTENT.nbytes))
FRAMES = b"".join(
    wire.encode(MessageHeader(wire.DATA, 0, len(piece))) + piece
    for piece in (CONTENT.tobytes()[at : at + PIECE] for at in range(0, CONTENT.nbytes, PIECE))
)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_stream, "PAYLOAD_PIECE_BYTES", PIECE)


def give(data: bytes, to: Matcher) -> None:
    while data:
        count = 0
        for buffer in to.link(1 - to.rank).inlet.buffers():
            step = min(len(buffer), len(data) - count)
            buffer[:step] = data[count : count + step]
            count += step
        to.link(1 - to.rank).inlet.advance(count)
        data = data[count:]


def taken(matcher: Matcher) -> bytes:
    peer, data = 1 - matcher.rank, b""
    while peer in matcher.ready:
        part = b"".join(matcher.link(peer).outlet.buffers())
        matcher.link(peer).outlet.advance(len(part))
        data += part
    return data


def exchange(*matchers: Matcher) -> None:
    while any([matcher.ready for matcher in matchers]):
        for matcher, other in zip(matchers, matchers[::-1], strict=True):
            give(taken(matcher), other)


def connected() -> tuple[Matcher, Matcher]:
    matchers = Matcher(0, 2, SIZES), Matcher(1, 2, SIZES)
    for matcher in matchers:
        matcher.lane_opened(1 - matcher.rank)
    exchange(*matchers)
    return matchers


def reconnect(*matchers: Matcher) -> None:
    """Break the connection, with everything that is on its way, and open another one."""
    for matcher in matchers:
        matcher.lane_ended(1 - matcher.rank)
        matcher.lane_opened(1 - matcher.rank)


def as_bytes(array: np.ndarray[tuple[int], np.dtype[np.int16]]) -> memoryview:
    return memoryview(array.view(np.uint8))


@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("acknowledged", [False, True])
def test_a_send_goes_on_from_every_byte(breaks: bool, acknowledged: bool) -> None:
    for moved in range(len(FRAMES) + 1):
        sender, receiver = connected()
        streams = sender.lend(1)
        assert streams is not None
        out = np.zeros_like(CONTENT)
        receive = receiver.receive(0, TAG, as_bytes(out), (INT16, CONTENT.shape))
        give(RTS, receiver)
        assert taken(receiver) == CTS
        has_arrived = moved // 2 if breaks else moved
        give(FRAMES[:has_arrived], receiver)
        streams = streams._replace(
            next_id=1,
            used=HEADER_COST,
            sent=len(RTS) + moved,
            arrived=len(RTS) + has_arrived // 2 if acknowledged else 0,
            unacknowledged=HEADER_COST,
            received=len(CTS),
        )
        message = UnfinishedMessage(as_bytes(CONTENT), TAG, INT16, CONTENT.shape, 0, True, moved, True, 0)
        send = sender.take_back(1, streams, b"" if acknowledged else RTS, message)
        if breaks:
            reconnect(sender, receiver)
        exchange(sender, receiver)
        assert send in sender.completed, moved
        assert receive in receiver.completed
        np.testing.assert_array_equal(out, CONTENT)
        later = receiver.receive(0, 6)
        sender.send(memoryview(b"next"), 1, 6, dtype_code=0, shape=(), is_object=True)
        exchange(sender, receiver)
        assert later.result is not None
        assert later.result.data is not None
        assert later.result.data.tobytes() == b"next"
        sender.completed.clear()
        assert sender.lend(1) is not None


@pytest.mark.parametrize("breaks", [False, True])
def test_a_send_that_was_only_announced_waits_for_its_receive(breaks: bool) -> None:
    sender, receiver = connected()
    streams = sender.lend(1)
    assert streams is not None
    give(b"" if breaks else RTS, receiver)
    message = UnfinishedMessage(as_bytes(CONTENT), TAG, INT16, CONTENT.shape, 0, True, 0, False, 0)
    send = sender.take_back(1, streams._replace(next_id=1, used=HEADER_COST, sent=len(RTS)), RTS, message)
    if breaks:
        reconnect(sender, receiver)
    exchange(sender, receiver)
    assert not sender.completed
    receive = receiver.receive(0, TAG)
    exchange(sender, receiver)
    assert send in sender.completed
    assert receive.result is not None
    assert receive.result.data is not None
    assert receive.result.data.tobytes() == CONTENT.tobytes()


@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("withdrawn", [False, True])
def test_a_receive_goes_on_from_every_byte(breaks: bool, withdrawn: bool) -> None:
    for consumed in range(len(FRAMES) + 1):
        at, header = consumed % (PIECE + wire.FIXED_BYTES), wire.FIXED_BYTES
        if 0 < at < header:
            continue  # a header is taken whole
        sender, receiver = connected()
        send = sender.send(as_bytes(CONTENT), 1, TAG, dtype_code=INT16, shape=CONTENT.shape, is_object=False)
        assert taken(sender) == RTS
        streams = receiver.lend(0)
        assert streams is not None
        give(CTS, sender)
        assert taken(sender) == FRAMES
        out = np.zeros_like(CONTENT)
        begun = -(-consumed // (PIECE + header))
        moved = consumed - begun * header
        as_bytes(out)[:moved] = as_bytes(CONTENT)[:moved]
        left = min(begun * PIECE, CONTENT.nbytes) - moved
        streams = streams._replace(
            expected_id=1,
            held=HEADER_COST,
            owed=HEADER_COST,
            unacknowledged=HEADER_COST * (1 + begun),
            sent=len(CTS),
            received=len(RTS) + consumed,
        )
        message = UnfinishedMessage(as_bytes(out), TAG, INT16, CONTENT.shape, 0, False, moved, True, left)
        receive = receiver.take_back(0, streams, CTS, message)
        assert receive is not None
        if withdrawn and receive not in receiver.completed:
            assert receiver.withdraw(receive)  # the message goes to the next one
            out = np.zeros_like(CONTENT)
            receive = receiver.receive(0, TAG, as_bytes(out), (INT16, CONTENT.shape))
        if breaks:
            reconnect(sender, receiver)
        else:
            give(FRAMES[consumed:], receiver)
        exchange(sender, receiver)
        assert receive in receiver.completed, consumed
        assert send in sender.completed
        np.testing.assert_array_equal(out, CONTENT)
        receiver.completed.clear()
        assert receiver.lend(0) is not None
