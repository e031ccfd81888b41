from __future__ import annotations

import itertools
import random
import weakref
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.in_turn import in_turn

from covey.base.arithmetic import dtype_code
from covey.base.errors import ConfigError, MismatchError, PeerLostError, RemoteProtocolError
from covey.base.numbers import ANY
from covey.proto.matching import Matcher
from covey.proto.message import HEADER_COST, MessageSend, Operation, Receive
from covey.proto.message_link import MessageSizes
from covey.proto.message_stream import PAYLOAD_PIECE_BYTES
from covey.wire import message_header as wire
from covey.wire.message_header import MessageHeader

unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""A busy machine is no failure."""

UINT8 = dtype_code(np.dtype(np.uint8))
INT32 = dtype_code(np.dtype(np.int32))
EAGER_BYTES, CREDIT_BYTES = MessageSizes()
LARGE = EAGER_BYTES + 1
COST = EAGER_BYTES + HEADER_COST
LISTENED = 1 << 62
"""The tag of messages about calls."""


def content(seed: int, length: int) -> bytes:
    """Bytes that differ by message and by position."""
    return np.random.default_rng(seed).integers(0, 256, length, dtype=np.uint8).tobytes()


class World:
    """Matchers joined by pipes that move when told to, in slices of any size."""

    def __init__(self, size: int, rng: random.Random | None = None, *, listened: int | None = None) -> None:
        self.matchers = [Matcher(rank, size) for rank in range(size)]
        for matcher in self.matchers:
            matcher.listened.update(() if listened is None else (listened,))
        self.pairs = list(itertools.permutations(range(size), 2))
        self.pipes = {pair: bytearray() for pair in self.pairs}
        self.rng = rng
        self.over: set[Operation] = set()
        for source, peer in self.pairs:
            self.matchers[source].lane_opened(peer)
        self.settle()

    def send(self, data: bytes, source: int, peer: int, tag: int, share: float = 1.0) -> MessageSend:
        return self.matchers[source].send(
            memoryview(data), peer, tag, dtype_code=UINT8, shape=(len(data),), is_object=False, share=share
        )

    def push(self, source: int, peer: int) -> int:
        """Move some of what `source` has to say into the pipe."""
        buffers = self.matchers[source].link(peer).outlet.buffers()
        total = sum(map(len, buffers))
        count = self.rng.randint(0, total) if self.rng else total
        self.pipes[source, peer] += b"".join(buffers)[:count]
        self.matchers[source].link(peer).outlet.advance(count)
        return count

    def pull(self, source: int, peer: int) -> int:
        """Move some of what is in the pipe to `peer`."""
        pipe, count = self.pipes[source, peer], 0
        for buffer in self.matchers[peer].link(source).inlet.buffers():
            step = min(len(pipe), self.rng.randint(0, len(buffer)) if self.rng else len(buffer))
            buffer[:step] = pipe[:step]
            del pipe[:step]
            count += step
            if step < len(buffer):
                break
        self.matchers[peer].link(source).inlet.advance(count)
        return count

    def settle(self) -> None:
        """Move everything until nothing is left to move."""
        rng, self.rng = self.rng, None
        while sum(self.push(*pair) + self.pull(*pair) for pair in self.pairs):
            pass
        assert all(peer not in self.matchers[source].ready for source, peer in self.pairs)
        self.rng = rng
        self.collect()

    def collect(self) -> None:
        for matcher in self.matchers:
            for operation in matcher.completed:
                assert operation not in self.over
                self.over.add(operation)
            matcher.completed.clear()


def payload(receive: Receive) -> bytes:
    assert receive.error is None
    assert receive.result is not None
    return bytes(receive.out) if receive.out is not None else bytes(receive.result.data)  # type: ignore[arg-type]


def admits(receive: Receive, source: int, tag: int) -> bool:
    return receive.source in (ANY, source) and receive.tag in (ANY, tag)


@in_turn(seed=range(60))
def test_every_message_arrives_once_and_in_order_whatever_the_schedule(seed: int) -> None:
    rng = random.Random(seed)
    size, tags = 3, 3
    world = World(size, rng)
    sizes = [0, 1, 100, 5000, EAGER_BYTES - 1, EAGER_BYTES, LARGE, 150_000, PAYLOAD_PIECE_BYTES + 77]
    sent: list[tuple[int, int, int, bytes, MessageSend]] = []
    receives: list[list[Receive]] = [[] for _ in range(size)]
    interrupts = seed % 3 == 0  # receives are withdrawn while their message is landing, and when it is there
    for _ in range(150):
        match rng.choice(["send", "receive", "push", "pull", "push", "pull", "withdraw", "put back"]):
            case "send":
                source, peer, tag = rng.randrange(size), rng.randrange(size), rng.randrange(tags)
                data = content(len(sent), rng.choice(sizes))
                sent.append((source, peer, tag, data, world.send(data, source, peer, tag)))
            case "receive":
                rank = rng.randrange(size)
                source, tag = rng.choice([ANY, *range(size)]), rng.choice([ANY, *range(tags)])
                receives[rank].append(world.matchers[rank].receive(source, tag))
            case "push":
                world.push(*rng.choice(world.pairs))
            case "pull":
                world.pull(*rng.choice(world.pairs))
            case "withdraw":
                rank = rng.randrange(size)
                world.collect()
                pending = [r for r in receives[rank] if r not in world.over and (interrupts or r.arrival is None)]
                if pending:
                    receive = rng.choice(pending)
                    assert world.matchers[rank].withdraw(receive)
                    receives[rank].remove(receive)
            case "put back" if interrupts:
                rank = rng.randrange(size)
                world.collect()
                done = [receive for receive in receives[rank] if receive in world.over]
                if done:
                    receive = rng.choice(done)
                    world.matchers[rank].put_back(receive)
                    receives[rank].remove(receive)

    world.settle()
    for rank in range(size):  # those without a message step aside for receives that take anything
        for receive in [receive for receive in receives[rank] if receive not in world.over]:
            world.matchers[rank].withdraw(receive)
            receives[rank].remove(receive)
        due = sum(peer == rank for _, peer, *_ in sent) - len(receives[rank])
        receives[rank] += [world.matchers[rank].receive(ANY, ANY) for _ in range(due)]
    world.settle()

    assert all(send in world.over and send.error is None for *_, send in sent)
    for rank in range(size):
        expected = sorted((source, tag, data) for source, peer, tag, data, _ in sent if peer == rank)
        actual = [(payload(receive), receive.result) for receive in receives[rank]]
        assert sorted((result.source, result.tag, data) for data, result in actual if result) == expected
        assert not world.matchers[rank].has_match(ANY, ANY)
        if not interrupts:
            position = {data: at for at, (_, peer, _, data, _) in enumerate(sent) if peer == rank and data}
            for first, second in itertools.combinations(receives[rank], 2):
                one, two = first.result, second.result
                if one and two and one.source == two.source and admits(first, two.source, two.tag):
                    a, b = payload(first), payload(second)
                    assert not a or not b or position[a] < position[b]


def test_a_sender_stops_at_its_credit_and_goes_on_as_messages_are_taken() -> None:
    world = World(2)
    data = [content(seed, EAGER_BYTES) for seed in range(200)]
    sends = [world.send(each, 0, 1, tag=5) for each in data]
    world.settle()
    allowed = -(-CREDIT_BYTES // COST)
    assert [send in world.over for send in sends] == [True] * allowed + [False] * (200 - allowed)
    for at, each in enumerate(data):
        receive = world.matchers[1].receive(0, 5)
        world.settle()
        assert payload(receive) == each
        unmatched = sum(send in world.over for send in sends) - at - 1
        assert unmatched * COST < CREDIT_BYTES + COST
        assert unmatched >= min(199 - at, allowed - CREDIT_BYTES // 16 // COST - 1)
    assert all(send in world.over for send in sends)


def test_messages_with_a_share_of_the_credit_leave_the_rest_to_those_with_a_larger_one() -> None:
    world = World(2, listened=LISTENED)
    data, announced = content(1, EAGER_BYTES), 0
    for tag, share in enumerate((0.5, 0.75, 1.0)):
        sends = [world.send(data, 0, 1, tag, share) for _ in range(100)]
        world.settle()
        announced += sum(send in world.over for send in sends)
        assert announced == -(-int(share * CREDIT_BYTES) // COST), share
    for tag in (2, 1, 0):
        receives = [world.matchers[1].receive(0, tag) for _ in range(100)]
        world.settle()
        assert all(receive.result is not None for receive in receives), "those with less than this are not awaited"


def test_credit_comes_back_while_messages_that_no_receive_takes_have_nearly_the_share_of_the_rest() -> None:
    world = World(2, listened=LISTENED)
    left = [world.send(content(1, EAGER_BYTES), 0, 1, 1, 0.5) for _ in range(CREDIT_BYTES // 2 // COST)]
    taken = [world.send(content(2, EAGER_BYTES), 0, 1, 2, 0.5) for _ in range(20)]
    receives = [world.matchers[1].receive(0, 2) for _ in range(20)]
    world.settle()
    assert all(send in world.over for send in left + taken)
    assert all(receive.result is not None for receive in receives)


def test_what_waits_for_its_share_of_the_credit_can_be_cancelled_and_fails_with_its_peer() -> None:
    world = World(2, listened=LISTENED)
    sends = [world.send(content(1, EAGER_BYTES), 0, 1, 1, 0.5) for _ in range(40)]
    world.settle()
    assert not world.matchers[0].withdraw(sends[0])
    assert world.matchers[0].withdraw(sends[-1])
    world.matchers[0].fail(1, PeerLostError("gone", rank=1))
    assert [type(send.error) for send in sends[-3:]] == [PeerLostError, PeerLostError, type(None)]
    other = World(2, listened=LISTENED)
    for send in [other.send(content(1, EAGER_BYTES), 0, 1, 1, 0.5) for _ in range(40)]:
        other.matchers[0].withdraw(send)
    assert other.matchers[0].link(1)._with_share == {}


def test_empty_messages_and_headers_of_large_ones_are_bounded_too() -> None:
    world = World(2)
    large = content(1, LARGE)
    for at in range(CREDIT_BYTES // HEADER_COST + 10):
        world.send(large if at % 2 else b"", 0, 1, tag=at)
    world.settle()
    assert world.matchers[1].has_match(0, CREDIT_BYTES // HEADER_COST - 1)
    assert not world.matchers[1].has_match(0, CREDIT_BYTES // HEADER_COST)
    receive = world.matchers[1].receive(0, 0)
    world.settle()
    assert payload(receive) == b""
    assert world.matchers[1].has_match(0, CREDIT_BYTES // HEADER_COST)


def test_large_messages_nobody_asks_for_hold_up_no_other_tag() -> None:
    world = World(2)
    large = [content(seed, 3 * PAYLOAD_PIECE_BYTES) for seed in range(4)]
    sends = [world.send(each, 0, 1, tag=seed) for seed, each in enumerate(large)]
    small = world.matchers[1].receive(0, 9)
    world.send(b"small", 0, 1, tag=9)
    world.settle()
    assert payload(small) == b"small"
    assert not any(send in world.over for send in sends)
    late = [world.matchers[1].receive(ANY, tag) for tag in (2, 0, 3, 1)]
    world.settle()
    assert [payload(receive) for receive in late] == [large[2], large[0], large[3], large[1]]
    assert all(send in world.over for send in sends)


def test_a_small_message_overtakes_the_rest_of_a_large_one() -> None:
    world = World(2)
    large, small = world.matchers[1].receive(0, 1), world.matchers[1].receive(0, 2)
    world.send(content(1, 10 * PAYLOAD_PIECE_BYTES), 0, 1, tag=1)
    world.push(0, 1)
    world.pull(0, 1)
    world.push(1, 0)
    world.pull(1, 0)
    world.push(0, 1)  # the first piece
    world.send(b"quick", 0, 1, tag=2)
    world.push(0, 1)  # it, and the second piece
    while world.pull(0, 1):
        pass
    world.collect()
    assert small in world.over
    assert large not in world.over
    world.settle()
    assert payload(large) == content(1, 10 * PAYLOAD_PIECE_BYTES)


def test_any_takes_the_earliest_announced_message_of_all_sources() -> None:
    world = World(3)
    for source, tag, data in [(0, 4, b"first"), (1, 3, content(1, LARGE)), (0, 3, b"third"), (1, 4, b"fourth")]:
        world.send(data, source, 2, tag)
        world.settle()
    matcher = world.matchers[2]
    fourth_tag, first, second = matcher.receive(1, 4), matcher.receive(ANY, 4), matcher.receive(ANY, ANY)
    third = matcher.receive(ANY, ANY)
    world.settle()
    assert [payload(r) for r in (first, third, fourth_tag)] == [b"first", b"third", b"fourth"]
    assert payload(second) == content(1, LARGE)


@pytest.mark.parametrize("length", [0, 7, EAGER_BYTES, LARGE, 3_000_000])
def test_a_message_to_oneself_is_a_copy(length: int) -> None:
    world = World(1)
    data = bytearray(content(3, length))
    out = memoryview(bytearray(length))
    send = world.matchers[0].send(memoryview(data), 0, 1, dtype_code=UINT8, shape=(length,), is_object=False)
    data[:] = bytes(length)
    early, late = world.matchers[0].receive(0, 1, out), world.matchers[0].receive(ANY, ANY)
    world.send(content(4, length), 0, 0, 2)
    world.settle()
    assert send in world.over
    assert payload(early) == content(3, length)
    assert payload(late) == content(4, length)


@in_turn(length=[40, 400_000])
@in_turn(early=[True, False])
@in_turn(wrong=["dtype", "size", "object"])
def test_a_message_that_does_not_fit_is_consumed_and_named(length: int, early: bool, wrong: str) -> None:
    world = World(2)
    out_length = length - 4 if wrong == "size" else length
    expect = (INT32, (out_length // 4,))

    def receive() -> Receive:
        return world.matchers[1].receive(0, 1, memoryview(bytearray(out_length)), expect)

    def send() -> MessageSend:
        code = UINT8 if wrong == "dtype" else INT32
        shape = (length,) if wrong == "dtype" else (length // 4,)
        view = memoryview(content(1, length))
        return world.matchers[0].send(view, 1, 1, dtype_code=code, shape=shape, is_object=wrong == "object")

    if early:
        refused, sent = receive(), send()
    else:
        sent = send()
        world.settle()
        refused = receive()
    world.settle()
    assert sent in world.over
    assert sent.error is None
    assert isinstance(refused.error, MismatchError)
    assert "int32" in str(refused.error)
    assert {"dtype": "uint8", "size": str(length), "object": "an object"}[wrong] in str(refused.error)
    following = world.matchers[1].receive(0, 1, memoryview(bytearray(length)), (INT32, (length // 8, 2)))
    data = content(2, length)
    world.matchers[0].send(memoryview(data), 1, 1, dtype_code=INT32, shape=(length // 4,), is_object=False)
    world.settle()
    assert payload(following) == data


def test_a_receive_withdrawn_while_its_message_lands_leaves_it_to_the_next_in_order() -> None:
    world = World(2)
    messages = [content(seed, 2 * PAYLOAD_PIECE_BYTES) for seed in range(2)]
    out = bytearray(2 * PAYLOAD_PIECE_BYTES)
    receive = world.matchers[1].receive(0, 1, memoryview(out))
    for data in messages:
        world.send(data, 0, 1, 1)
    for pair in [(0, 1), (1, 0), (0, 1)]:  # header, request, first piece
        world.push(*pair)
        world.pull(*pair)
    assert out[:1000] == messages[0][:1000]
    world.matchers[1].withdraw(receive)
    before = bytes(out)
    again = [world.matchers[1].receive(0, 1) for _ in range(2)]
    world.settle()
    assert [payload(each) for each in again] == messages
    assert bytes(out) == before
    assert receive not in world.over


@pytest.mark.parametrize("length", [0, 100, LARGE])
def test_a_message_that_is_put_back_keeps_its_place_and_wakes_a_receive_that_waits(length: int) -> None:
    world = World(2)
    matcher = world.matchers[1]
    messages = [content(seed, length) for seed in range(3)]
    out = bytearray(length)
    first = matcher.receive(0, 1, memoryview(out))
    for data in messages:
        world.send(data, 0, 1, 1)
    world.settle()
    assert payload(first) == messages[0]
    matcher.put_back(first)
    out[:] = bytes(length)  # the program uses its memory for something else
    again = [matcher.receive(0, 1) for _ in range(3)]
    world.settle()
    assert [payload(each) for each in again] == messages
    waiting = matcher.receive(0, ANY)
    matcher.put_back(again[2])
    world.settle()
    assert payload(waiting) == messages[2]
    matcher.put_back(again[1])
    assert matcher.waiting(0, 1) is not None
    matcher.fail(0, PeerLostError("gone", rank=0))
    last = matcher.receive(0, 1)  # complete messages of a lost rank can be received
    world.collect()
    assert payload(last) == messages[1]
    matcher.fail_all(PeerLostError("over", rank=0))
    matcher.put_back(last)
    assert matcher.waiting(0, 1) is None


def test_a_send_can_be_withdrawn_only_before_it_is_announced() -> None:
    world = World(2)
    announced = world.send(content(0, LARGE), 0, 1, tag=1)
    for seed in range(64):
        world.send(content(seed, EAGER_BYTES), 0, 1, tag=2)
    waiting = world.send(b"late", 0, 1, tag=3)
    assert not world.matchers[0].withdraw(announced)
    assert world.matchers[0].withdraw(waiting)
    taken = [world.matchers[1].receive(0, 2) for _ in range(64)]
    world.settle()
    assert [payload(receive) for receive in taken] == [content(seed, EAGER_BYTES) for seed in range(64)]
    assert not world.matchers[1].has_match(0, 3)
    assert waiting not in world.over


def test_messages_that_are_complete_outlive_their_sender() -> None:
    world = World(3)
    lost = PeerLostError("rank 0 is gone", rank=0)
    world.send(b"complete", 0, 2, tag=1)
    world.send(content(1, LARGE), 0, 2, tag=1)
    landing = world.matchers[2].receive(0, 7)
    world.send(content(2, 3 * PAYLOAD_PIECE_BYTES), 0, 2, tag=7)
    for pair in [(0, 2), (2, 0), (0, 2)]:
        world.push(*pair)
        world.pull(*pair)
    matcher = world.matchers[2]
    waits, from_any, from_other = matcher.receive(0, 9), matcher.receive(ANY, 9), matcher.receive(1, 9)
    to_lost = world.send(content(3, LARGE), 2, 0, tag=1)
    matcher.fail(0, lost)
    world.collect()
    assert [str(operation.error) for operation in (landing, waits, from_any, to_lost)] == [str(lost)] * 4
    assert from_other not in world.over
    assert payload(matcher.receive(ANY, ANY)) == b"complete"
    assert str(matcher.receive(0, 1).error) == str(lost)
    assert matcher.receive(ANY, 3).error is None  # a receive from any rank has reported the loss
    assert str(world.send(b"", 2, 0, tag=1).error) == str(lost)
    world.send(b"alive", 1, 2, tag=9)
    world.pairs = [(1, 2), (2, 1)]
    world.settle()
    assert payload(from_other) == b"alive"


def rank_of(receive: Receive) -> int:
    assert isinstance(receive.error, PeerLostError)
    return receive.error.rank


def test_a_receive_from_anyone_hears_of_each_loss_once_and_then_that_no_rank_is_left() -> None:
    world = World(4)
    matcher = world.matchers[0]
    world.send(b"before", 3, 0, tag=1)
    world.settle()
    for rank in (2, 1):
        matcher.fail(rank, PeerLostError(f"rank {rank} is lost", rank=rank))
    assert payload(matcher.receive(ANY, ANY)) == b"before"
    assert [rank_of(matcher.receive(ANY, ANY)) for _ in range(2)] == [2, 1]
    waiting = [matcher.receive(ANY, tag) for tag in (ANY, 5)]
    matcher.fail(3, PeerLostError("rank 3 is lost", rank=3))
    assert [rank_of(receive) for receive in waiting] == [3, 3]
    for _ in range(3):
        assert rank_of(matcher.receive(ANY, 7)) == -1
    assert rank_of(matcher.receive(2, 7)) == 2  # a receive from one rank reports that rank


def test_losses_that_no_receive_waited_for_are_told_before_that_no_rank_is_left() -> None:
    matcher = Matcher(1, 3)
    for rank in (0, 2):
        matcher.fail(rank, PeerLostError(f"rank {rank} is lost", rank=rank))
    assert [rank_of(matcher.receive(ANY, ANY)) for _ in range(4)] == [0, 2, -1, -1]


def test_a_group_of_one_may_wait_for_its_own_messages() -> None:
    world = World(1)
    receive = world.matchers[0].receive(ANY, ANY)
    world.send(b"mine", 0, 0, 3)
    assert payload(receive) == b"mine"


@pytest.mark.parametrize(("peer", "tag"), [(2, 0), (-1, 0), (0, -1), (0, 2**63)])
def test_ranks_and_tags_that_do_not_exist_are_refused(peer: int, tag: int) -> None:
    with pytest.raises(ConfigError):
        World(2).send(b"", 0, peer, tag)
    with pytest.raises(ConfigError):
        World(2).matchers[0].receive(peer if peer >= 0 else -2, tag if tag >= 0 else -2)


def feed(matcher: Matcher, peer: int, data: bytes) -> None:
    """Let `data` come from a peer that has just connected."""
    matcher.lane_opened(peer)
    feed_more(matcher, peer, wire.encode(MessageHeader(wire.RESUME)) + data)


def feed_more(matcher: Matcher, peer: int, data: bytes) -> None:
    while data:
        buffer = matcher.link(peer).inlet.buffers()[0]
        step = min(len(buffer), len(data))
        buffer[:step] = data[:step]
        data = data[step:]
        matcher.link(peer).inlet.advance(step)


def test_each_receive_from_a_lost_rank_has_an_error_of_its_own() -> None:
    """One that were raised again and again would keep the frames of every raise."""
    matcher, cause = Matcher(0, 2), OSError("cut")
    lost = PeerLostError("rank 1 was lost", rank=1)
    lost.__cause__ = cause
    waiting = [matcher.receive(1, tag) for tag in range(2)]
    matcher.fail(1, lost)
    for receive in (*waiting, matcher.receive(1, 2), matcher.receive(1, 2)):
        assert isinstance(receive.error, PeerLostError)
        assert (str(receive.error), receive.error.rank, receive.error.__cause__) == ("rank 1 was lost", 1, cause)
    assert len({id(each.error) for each in matcher.completed} | {id(lost)}) == 5


@pytest.mark.parametrize("ends_first", [True, False])
def test_half_a_payload_is_dropped_once_its_peer_is_lost_and_the_connection_has_ended(ends_first: bool) -> None:
    taken: list[weakref.ref[np.ndarray[Any, np.dtype[np.uint8]]]] = []

    def take(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        taken.append(weakref.ref(memory := np.empty(nbytes, np.uint8)))
        return memory

    matcher = Matcher(0, 2, allocate=take)
    receive = matcher.receive(1, 0)
    announced = MessageHeader(wire.RTS, 0, LARGE, dtype_code=UINT8, shape=(LARGE,))
    feed(matcher, 1, wire.encode(announced))
    feed_more(matcher, 1, wire.encode(MessageHeader(wire.DATA, 0, LARGE)) + bytes(LARGE // 2))
    events = [lambda: matcher.lane_ended(1), lambda: matcher.fail(1, PeerLostError("lost", rank=1))]
    for event in events if ends_first else events[::-1]:
        event()
    assert isinstance(receive.error, PeerLostError)
    matcher.completed.clear()
    del receive
    assert [memory() for memory in taken] == [None]


@pytest.mark.parametrize(
    "header",
    [
        MessageHeader(wire.EAGER, 1, 0, dtype_code=UINT8, shape=(0,)),
        MessageHeader(wire.EAGER, 0, LARGE, dtype_code=UINT8, shape=(LARGE,)),
        MessageHeader(wire.RTS, 0, 5, dtype_code=UINT8, shape=(5,)),
        MessageHeader(wire.CTS, 0, 0),
        MessageHeader(wire.DATA, 0, 10),
        MessageHeader(wire.CREDIT, 0, 1),
        MessageHeader(wire.ACK, 0, 1),
        MessageHeader(wire.RESUME),
    ],
    ids=[
        *("out of turn", "too large to be eager", "too small to wait", "never offered", "never asked for", "not owed"),
        *("never sent", "in the middle"),
    ],
)
def test_frames_that_cannot_come_now_are_a_protocol_error(header: MessageHeader) -> None:
    with pytest.raises(RemoteProtocolError):
        feed(Matcher(0, 2), 1, wire.encode(header))


def test_a_peer_that_ignores_its_credit_is_a_protocol_error() -> None:
    matcher = Matcher(0, 2)
    allowed = CREDIT_BYTES // HEADER_COST
    headers = [wire.encode(MessageHeader(wire.EAGER, at, 0, is_object=True)) for at in range(allowed + 1)]
    feed(matcher, 1, b"".join(headers[:allowed]))
    with pytest.raises(RemoteProtocolError, match="without credit"):
        feed_more(matcher, 1, headers[allowed])


@unhurried
@given(st.data())
def test_any_bytes_are_frames_or_a_protocol_error(data: st.DataObject) -> None:
    matcher = Matcher(0, 2)
    valid = wire.encode(MessageHeader(wire.EAGER, 0, 6, 3, dtype_code=UINT8, shape=(2, 3))) + b"abcdef"
    stream: Any = bytearray(valid + wire.encode(MessageHeader(wire.RTS, 1, LARGE, 4, is_object=True)))
    for at in data.draw(st.lists(st.integers(0, len(stream) - 1), max_size=3)):
        stream[at] = data.draw(st.integers(0, 255))
    stream += data.draw(st.binary(max_size=100))
    stream = data.draw(st.sampled_from([wire.encode(MessageHeader(wire.RESUME)), b"x" * wire.FIXED_BYTES])) + stream
    matcher.lane_opened(1)
    try:
        for at in range(0, len(stream), step := data.draw(st.integers(1, 60))):
            feed_more(matcher, 1, bytes(stream[at : at + step]))
    except RemoteProtocolError:
        pass


@pytest.mark.parametrize("size", [EAGER_BYTES, LARGE])
def test_memory_of_a_receive_that_has_failed_is_written_no_more_while_its_lane_is_read_to_the_end(size: int) -> None:
    world, out = World(2), bytearray(size)
    receive = world.matchers[1].receive(0, 3, memoryview(out))
    world.send(content(1, size), 0, 1, 3)
    world.send(b"next", 0, 1, 4)
    while world.push(0, 1) + world.push(1, 0) + world.pull(1, 0):
        pipe = world.pipes[0, 1]
        rest, world.pipes[0, 1] = pipe[2000:], pipe[:2000]
        if world.pull(0, 1) and any(out):
            break
        world.pipes[0, 1] += rest
    world.matchers[1].fail_all(PeerLostError("another rank is lost", rank=2))
    assert isinstance(receive.error, PeerLostError)
    before = bytes(out)
    assert any(before)
    assert not before[-1]
    world.pipes[0, 1] += rest
    while world.pull(0, 1):
        pass
    assert out == before
    assert world.matchers[1].link(0).inlet.is_between_frames
