"""Messages of a higher class overtake those that wait to be sent, and nothing else changes its order."""

from __future__ import annotations

import random

import numpy as np
import pytest
from tests.support.in_turn import in_turn
from tests.support.seeds import seeds

from covey.base.errors import ConfigError
from covey.base.numbers import BULK, CRITICAL, PRIORITIES, REALTIME
from covey.base.setting_kinds import check_priority
from covey.proto.matching import Matcher
from covey.proto.message import MessageSend
from covey.proto.message_stream import HURRIED_PIECE_BYTES

EAGER = 1000
LARGE = 300_000


class Pair:
    """Rank 0 sends to rank 1, through a connection that takes bytes when it is told to."""

    def __init__(self) -> None:
        self.ends = Matcher(0, 2), Matcher(1, 2)
        for rank, end in enumerate(self.ends):
            end.lane_opened(1 - rank)
        self.settle()

    def send(self, tag: int, size: int, priority: int) -> MessageSend:
        data = np.full(size, tag % 251, np.uint8).data
        return self.ends[0].send(data, 1, tag, dtype_code=0, shape=(), is_object=True, priority=priority)

    def move(self, source: int, most: int) -> int:
        """Move up to `most` bytes; return how many."""
        outlet, inlet = self.ends[source].link(1 - source).outlet, self.ends[1 - source].link(source).inlet
        data = b"".join(outlet.buffers())[:most]
        outlet.advance(len(data))
        at = 0
        while at < len(data):
            count = 0
            for buffer in inlet.buffers():
                step = min(len(buffer), len(data) - at)
                buffer[:step] = data[at : at + step]
                at, count = at + step, count + step
                if step < len(buffer):
                    break
            inlet.advance(count)
        return len(data)

    def settle(self) -> None:
        while self.move(0, 1 << 30) + self.move(1, 1 << 30):
            pass

    def received(self) -> list[int]:
        """Return the tags of the messages that have arrived whole, in the order of their ends."""
        tags = []
        for operation in self.ends[1].completed:
            result = getattr(operation, "result", None)
            assert result is not None
            assert (result.data == result.tag % 251).all()
            tags.append(result.tag)
        return tags


def test_small_messages_go_in_the_order_of_their_classes() -> None:
    pair = Pair()
    for tag in range(9):
        pair.ends[1].receive(0, tag)
    pair.send(0, EAGER, BULK)  # it is in the line, and stays there
    for tag, priority in ((1, BULK), (2, REALTIME), (3, BULK), (4, CRITICAL), (5, REALTIME), (6, CRITICAL)):
        assert pair.send(tag, EAGER, priority).error is None
    pair.settle()
    assert pair.received() == [0, 4, 6, 2, 5, 1, 3]


def test_a_large_message_is_overtaken_by_one_of_a_higher_class_after_one_piece() -> None:
    pair = Pair()
    for tag in range(4):
        pair.ends[1].receive(0, tag)
    pair.ends[0].link(1).outlet.piece_bytes = HURRIED_PIECE_BYTES
    pair.send(0, LARGE, BULK)
    while pair.move(1, 1 << 30) + pair.move(0, 200):  # until it is asked for, and has begun
        if pair.ends[0].link(1).outlet.sent > 2 * HURRIED_PIECE_BYTES:
            break
    pair.send(1, LARGE, REALTIME)
    pair.send(2, LARGE, CRITICAL)
    pair.send(3, EAGER, CRITICAL)
    pair.settle()
    assert pair.received() == [3, 2, 1, 0]


@in_turn(seed=seeds(20))
def test_every_message_arrives_and_those_of_a_class_and_tag_in_order(seed: int) -> None:
    rng = random.Random(seed)
    pair, sent = Pair(), list[tuple[int, int, MessageSend]]()
    for number in range(60):
        priority = rng.randrange(len(PRIORITIES))
        tag = 10 * number + priority
        pair.ends[1].receive(0, tag)
        sent.append((tag, priority, pair.send(tag, rng.choice([0, 1, EAGER, 60_000, LARGE]), priority)))
        for _ in range(rng.randrange(3)):
            pair.move(rng.randrange(2), rng.randrange(1, 100_000))
        if rng.random() < 0.1:  # the connection breaks, and what is under way is sent again
            for rank, end in enumerate(pair.ends):
                end.lane_ended(1 - rank)
                end.lane_opened(1 - rank)
    pair.settle()
    received = pair.received()
    assert sorted(received) == [tag for tag, _, _ in sent]
    small = [tag for tag, _, send in sent if len(send.view) < LARGE]
    for priority in range(len(PRIORITIES)):
        order = [tag for tag in received if tag % 10 == priority and tag in small]
        assert order == sorted(order)
    assert all(operation.error is None for operation in pair.ends[0].completed)
    assert not pair.ends[0].undelivered()


def test_what_waits_when_the_peer_is_lost_or_the_group_ends_is_not_forgotten() -> None:
    pair = Pair()
    kept = [pair.send(tag, size, BULK) for tag, size in ((0, EAGER), (1, LARGE), (2, LARGE))]
    pair.ends[0].fail(1, ConfigError("gone"))
    assert [send.error is not None for send in kept] == [False, True, True]
    pair = Pair()
    for tag in range(3):
        pair.ends[1].receive(0, tag)
        pair.send(tag, EAGER, BULK)
    pair.ends[0].say_end()
    pair.settle()
    assert pair.received() == [0, 1, 2]
    assert pair.ends[1].has_parted(0)


@pytest.mark.parametrize("wrong", ["high", "", "Critical", "control", 1, None])
def test_an_unknown_priority_is_refused_with_the_known_ones(wrong: str) -> None:
    with pytest.raises(ConfigError, match="'critical', 'realtime', 'bulk'"):
        check_priority(wrong)
