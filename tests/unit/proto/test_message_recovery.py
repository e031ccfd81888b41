"""Messages over connections that break anywhere and are replaced: each arrives once, in order, with the right bytes."""

from __future__ import annotations

import contextlib
import random
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from covey.base.arithmetic import dtype_code
from covey.base.errors import PeerLostError, RemoteProtocolError
from covey.base.numbers import ANY
from covey.proto import message_link, message_stream
from covey.proto.matching import RESERVED_TAGS, Matcher
from covey.proto.message import HEADER_COST
from covey.proto.message_link import MessageLink, MessageSizes
from covey.proto.message_stream import Inlet, Outlet
from covey.wire import message_header as wire
from covey.wire.message_header import MessageHeader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from covey.proto.message import MessageSend, Operation, Receive

UINT8 = dtype_code(np.dtype(np.uint8))
SEEDS = 300
TURNS = 120
EAGER, PIECE = 60, 300
CREDIT = 8 * (EAGER + HEADER_COST)
ACK_BATCH = 4 * (EAGER + HEADER_COST)
SIZES = [0, 1, 20, EAGER - 1, EAGER, EAGER + 1, PIECE, 2 * PIECE + 77, 5 * PIECE]
TAGS = 3
MOST_DOUBTS = 4
"""Connections that may be given up because they swallow something, when the network swallows nothing any more."""
LISTENED = RESERVED_TAGS + 1
"""A tag whose messages need no receive."""


@pytest.fixture(autouse=True)
def small_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages of a few hundred bytes go through all that otherwise takes megabytes."""
    monkeypatch.setattr(message_stream, "PAYLOAD_PIECE_BYTES", PIECE)
    monkeypatch.setattr(message_link, "ACK_BATCH", ACK_BATCH)


class Connection:
    """Two pipes, by the rank that writes; once broken, what is written is lost, and so is some of what is in them."""

    def __init__(self) -> None:
        self.pipes = {0: bytearray(), 1: bytearray()}
        self.is_broken = False
        self.swallows: set[int] = set()
        """Ranks whose bytes a machine on the way takes, and does not pass on."""


class Message:
    """One message as the test remembers it. Its memory changes as soon as the send is over, as a program's would."""

    def __init__(self, data: bytes, tag: int) -> None:
        self.data, self.tag = data, tag
        self.memory = bytearray(data)
        self.send: MessageSend


class Story:
    """Two ranks that send each other messages while their connections break, in a way that a seed decides."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.may_swallow = seed % 2 == 1
        self.matchers = [Matcher(rank, 2, MessageSizes(EAGER, CREDIT)) for rank in range(2)]
        self.connections = [Connection()]
        self.at: list[int | None] = [None, None]
        self.last = [-1, -1]
        """By rank: the connection that it uses, and the last one that it used."""
        self.messages: list[list[Message]] = [[], []]
        """By sender."""
        self.told: list[list[bytes]] = [[], []]
        """By sender: messages that need no receive."""
        for matcher in self.matchers:
            matcher.listened.add(LISTENED)
        self.receives: list[list[Receive]] = [[], []]
        self.over: set[Operation] = set()
        self.breaks = self.swallowed = 0
        self.claimed = [0, 0]
        """By rank: bytes that its socket has sent, but not told of yet, as sealed sockets do."""

    def play(self) -> None:
        acts = [self.send, self.send, self.receive, self.receive, self.part, self.notice, self.connect, self.adopt]
        acts += [self.tell, self.swallow, self.be_quiet]
        weights = [3, 3, 3, 3, 1, 4, 4, 4, 4, 0.8 * self.may_swallow, 1.0 * self.may_swallow]
        for _ in range(TURNS):
            self.rng.choices(acts, weights)[0]()
            for _ in range(self.rng.randrange(4)):
                rank = self.rng.randrange(2)
                self.push(rank)
                self.pull(self.rng.randrange(2))
            self.collect()
        self.settle()
        for rank in range(2):
            missing = len(self.messages[1 - rank]) - len(self.receives[rank])
            for _ in range(missing):
                self.receives[rank].append(self.matchers[rank].receive(1 - rank, ANY))
        self.settle()
        self.check()

    # What the ranks do

    def send(self) -> None:
        rank = self.rng.randrange(2)
        number = len(self.messages[rank])
        data = bytes((rank * 131 + number * 17 + at * 7) % 251 for at in range(self.rng.choice(SIZES)))
        message = Message(data, self.rng.randrange(TAGS))
        view = memoryview(message.memory)
        message.send = self.matchers[rank].send(
            view, 1 - rank, message.tag, dtype_code=UINT8, shape=(len(data),), is_object=False
        )
        self.messages[rank].append(message)
        self.collect()

    def tell(self) -> None:
        rank = self.rng.randrange(2)
        number = len(self.told[rank])
        size = self.rng.choice([0, 1, 20, EAGER])
        self.told[rank].append(bytes((rank * 37 + number * 11 + at * 5) % 251 for at in range(size)))
        self.matchers[rank].tell(self.told[rank][-1], 1 - rank, LISTENED)
        self.collect()

    def receive(self) -> None:
        rank = self.rng.randrange(2)
        if len(self.receives[rank]) < len(self.messages[1 - rank]):
            self.receives[rank].append(self.matchers[rank].receive(self.rng.choice([ANY, 1 - rank]), ANY))

    # What the network does

    def part(self) -> None:
        connection = self.connections[-1]
        if not connection.is_broken:
            connection.is_broken, self.breaks = True, self.breaks + 1
            for pipe in connection.pipes.values():
                del pipe[self.rng.randint(0, len(pipe)) :]

    def swallow(self) -> None:
        rank, connection = self.rng.randrange(2), self.connections[-1]
        if not connection.is_broken:
            connection.swallows.add(rank)
            del connection.pipes[rank][self.rng.randint(0, len(connection.pipes[rank])) :]

    def be_quiet(self, rank: int | None = None) -> None:
        rank = self.rng.randrange(2) if rank is None else rank
        if self.at[rank] is not None:
            self.matchers[rank].fell_quiet(1 - rank)

    def connect(self) -> None:
        if self.connections[-1].is_broken:
            self.connections.append(Connection())

    def adopt(self, rank: int | None = None) -> None:
        rank = self.rng.randrange(2) if rank is None else rank
        if self.last[rank] < len(self.connections) - 1:
            if self.at[rank] is not None:  # it has not noticed the end of the other one
                self.matchers[rank].lane_ended(1 - rank)
            self.at[rank] = self.last[rank] = len(self.connections) - 1
            self.claimed[rank] = 0
            self.matchers[rank].lane_opened(1 - rank)

    def notice(self, rank: int | None = None) -> None:
        rank = self.rng.randrange(2) if rank is None else rank
        at = self.at[rank]
        if at is not None and self.connections[at].is_broken:
            self.matchers[rank].lane_ended(1 - rank)
            self.at[rank] = None

    def push(self, rank: int, *, everything: bool = False) -> int:
        at = self.at[rank]
        if at is None:
            assert 1 - rank not in self.matchers[rank].ready
            return 0
        buffers = self.matchers[rank].link(1 - rank).outlet.buffers()
        total = sum(map(len, buffers))
        count, self.claimed[rank] = self.claimed[rank], 0
        if not count:
            count = total if everything else self.rng.randint(0, total)
            if rank in self.connections[at].swallows:
                self.swallowed += count
            elif not self.connections[at].is_broken:
                self.connections[at].pipes[rank] += b"".join(buffers)[:count]
            if not everything and self.rng.random() < 0.3:
                self.claimed[rank] = count
                return count
        self.matchers[rank].link(1 - rank).outlet.advance(count)
        assert (1 - rank in self.matchers[rank].ready) == bool(self.matchers[rank].link(1 - rank).outlet.buffers())
        return count

    def pull(self, rank: int, *, everything: bool = False) -> int:
        at, count = self.at[rank], 0
        if at is None:
            return 0
        pipe = self.connections[at].pipes[1 - rank]
        for buffer in self.matchers[rank].link(1 - rank).inlet.buffers():
            step = min(len(pipe), len(buffer) if everything else self.rng.randint(0, len(buffer)))
            buffer[:step] = pipe[:step]
            del pipe[:step]
            count += step
            if step < len(buffer):
                break
        self.matchers[rank].link(1 - rank).inlet.advance(count)
        return count

    def settle(self) -> None:
        """Let the network be good until nothing moves, but for what it swallows already."""
        for _ in range(MOST_DOUBTS):
            for rank in range(2):
                self.notice(rank)
            self.connect()
            for rank in range(2):
                self.adopt(rank)
            self.move_all()
            if not self.may_swallow:  # what the ranks say when they are quiet would hide other mistakes
                return
            for _ in range(2):
                for rank in range(2):
                    self.be_quiet(rank)
                moved = self.move_all()
            assert not moved, "acknowledgements are acknowledged"
            doubts = [rank for rank in range(2) if self.matchers[rank].is_unheard(1 - rank)]
            if not doubts:
                return
            assert self.connections[-1].swallows, f"rank {doubts[0]} doubts a good connection"
            self.connections[-1].is_broken = True
        raise AssertionError("doubts never end")

    def move_all(self) -> int:
        """Move bytes while any move; return how many did."""
        total = 0
        while moved := sum(
            self.push(rank, everything=True) + self.pull(1 - rank, everything=True) for rank in range(2)
        ):
            total += moved
            self.collect()
        self.collect()
        return total

    def collect(self) -> None:
        for matcher in self.matchers:
            for operation in matcher.completed:
                assert operation not in self.over
                assert operation.error is None, operation.error
                self.over.add(operation)
            matcher.completed.clear()
        for message in self.messages[0] + self.messages[1]:
            if message.send in self.over and any(message.memory):
                message.memory[:] = bytes(len(message.memory))  # the program uses its memory for something else

    # What must hold

    def check(self) -> None:
        for rank, messages in enumerate(self.messages):
            assert all(message.send in self.over for message in messages), "a send never ended"
            receives = self.receives[1 - rank]
            assert all(receive in self.over for receive in receives), "a message was lost"
            assert not self.matchers[1 - rank].has_match(rank, ANY), "a message came twice"
            expected: dict[int, deque[bytes]] = {tag: deque() for tag in range(TAGS)}
            for message in messages:
                expected[message.tag].append(message.data)
            for receive in receives:
                assert receive.result is not None
                assert receive.result.data is not None
                assert receive.result.data.tobytes() == expected[receive.result.tag].popleft(), "order, or bytes"
            assert self.matchers[1 - rank].heard == [(rank, data) for data in self.told[rank]], "told once, in order"
            assert not self.matchers[rank].undelivered()


def outlet(matcher: Matcher, peer: int) -> Outlet:
    return matcher.link(peer).outlet


def test_every_message_arrives_once_and_in_order_however_often_the_connection_breaks() -> None:
    breaks = swallowed = 0
    for seed in range(SEEDS):
        story = Story(seed)
        try:
            story.play()
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        breaks += story.breaks
        swallowed += story.swallowed > 0
    assert breaks > 3 * SEEDS
    assert swallowed > SEEDS / 4


def kept_of_long_talk(sizes: list[int]) -> int:
    """Return the most that one rank kept of its own memory while it sent many messages that were all received."""
    pair, most = [Matcher(0, 2, MessageSizes(EAGER, CREDIT)), Matcher(1, 2, MessageSizes(EAGER, CREDIT))], 0
    connect(*pair)
    for number in range(3000):
        start_send(pair[0], bytes(sizes[number % len(sizes)]))
        pair[1].receive(0, ANY)
        move(pair)
        for matcher in pair:
            matcher.completed.clear()
            items = outlet(matcher, 1 - matcher.rank)._unacknowledged
            most = max(most, sum(HEADER_COST + len(item.data) for item in items if item.payload is None))
    return most


@pytest.mark.parametrize("sizes", [[0], [EAGER], [5 * PIECE], [3, EAGER, 5 * PIECE, 1]])
def test_what_is_kept_to_be_sent_again_is_bounded(sizes: list[int]) -> None:
    assert kept_of_long_talk(sizes) <= 2 * ACK_BATCH


# Mutants: each breaks one rule, and the stories must notice.


@contextlib.contextmanager
def mutated(owner: type, name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, wrap(before))
    try:
        yield
    finally:
        setattr(owner, name, before)


def forgets_what_may_be_sent(buffers: Any) -> Any:
    def mutant(self: Outlet) -> Any:
        result = buffers(self)
        self._offered = self._sent
        return result

    return mutant


def forgets_what_it_sent(advance: Any) -> Any:
    def mutant(self: Outlet, count: int) -> None:
        advance(self, count)
        while self._unacknowledged:
            self._start += len(self._unacknowledged.popleft().data)

    return mutant


def sends_whole_frames_again(resume: Any) -> Any:
    def mutant(self: Outlet, position: int) -> None:
        resume(self, position)
        self._sent -= self._at
        self._at = 0

    return mutant


def goes_on_where_it_was(resume: Any) -> Any:
    def mutant(self: Outlet, position: int) -> None:
        before = self._sent
        resume(self, position)
        while self._sent < before:
            self.advance(min(before - self._sent, len(self._line[0].data) - self._at))

    return mutant


def does_not_await_the_other_end(lane_opened: Any) -> Any:
    def mutant(self: Outlet, received: int) -> None:
        lane_opened(self, received)
        self._flows = True

    return mutant


def forgets_half_a_header(lane_opened: Any) -> Any:
    def mutant(self: Inlet) -> None:
        lane_opened(self)
        if self._landing is None:
            self._stop = 0

    return mutant


def forgets_half_a_payload(lane_opened: Any) -> Any:
    def mutant(self: Inlet) -> None:
        lane_opened(self)
        self._landing = None

    return mutant


def ends_a_send_that_has_only_left(advance: Any) -> Any:
    def mutant(self: Outlet, count: int) -> None:
        advance(self, count)
        for at, item in enumerate(self._unacknowledged):
            if item.is_last and item.payload is not None:
                self._arrived(item.payload)
                self._unacknowledged[at] = item._replace(payload=None)

    return mutant


def acknowledges_nothing_small(begin: Any) -> Any:
    def mutant(self: MessageLink, header: MessageHeader) -> Any:
        self._unacknowledged = -(2**40)
        return begin(self, header)

    return mutant


def acknowledges_nothing_large(_landed: Any) -> Any:
    def mutant(self: MessageLink, landing: Any) -> None:
        acknowledge, self._acknowledge = self._acknowledge, lambda *_: None  # type: ignore[method-assign]
        try:
            _landed(self, landing)
        finally:
            self._acknowledge = acknowledge  # type: ignore[method-assign]

    return mutant


def counts_what_has_not_come(advance: Any) -> Any:
    def mutant(self: Inlet, count: int) -> None:
        advance(self, count)
        if self._landing is not None:
            self.received += 1
            self.received -= 1 if self._left > 5 else 0

    return mutant


def tells_without_credit(tell: Any) -> Any:
    def mutant(self: MessageLink, data: bytes, tag: int, priority: int) -> bool:
        used, self._used = self._used, 0
        try:
            return bool(tell(self, data, tag, priority))
        finally:
            self._used += used

    return mutant


def gives_no_credit_back_for_what_it_heard(heard: Any) -> Any:
    def mutant(self: MessageLink, header: MessageHeader, data: bytes) -> None:
        give_credit, self._give_credit = self._give_credit, lambda: None  # type: ignore[method-assign]
        try:
            heard(self, header, data)
        finally:
            self._give_credit = give_credit  # type: ignore[method-assign]
            self._owed -= HEADER_COST + len(data)

    return mutant


def does_not_say_what_has_arrived(fell_quiet: Any) -> Any:
    def mutant(self: MessageLink) -> None:
        self._heard_bytes = self.inlet.received
        fell_quiet(self)

    return mutant


def doubts_nothing(fell_quiet: Any) -> Any:
    def mutant(self: MessageLink) -> None:
        fell_quiet(self)
        self._said_until = 0

    return mutant


def wants_its_acknowledgements_acknowledged(fell_quiet: Any) -> Any:
    def mutant(self: MessageLink) -> None:
        self._last_acks = (0, 0)
        fell_quiet(self)

    return mutant


def acknowledges_acknowledgements(note_frame: Any) -> Any:
    def mutant(self: MessageLink, header: MessageHeader) -> None:
        note_frame(self, header)
        self._acks_in = 0

    return mutant


MUTANTS: list[tuple[type, str, Callable[[Any], Any]]] = [
    (Outlet, "advance", forgets_what_it_sent),
    (Outlet, "buffers", forgets_what_may_be_sent),
    (Outlet, "resume", sends_whole_frames_again),
    (Outlet, "resume", goes_on_where_it_was),
    (Outlet, "lane_opened", does_not_await_the_other_end),
    (Inlet, "lane_opened", forgets_half_a_header),
    (Inlet, "lane_opened", forgets_half_a_payload),
    (Outlet, "advance", ends_a_send_that_has_only_left),
    (MessageLink, "_begin", acknowledges_nothing_small),
    (MessageLink, "_landed", acknowledges_nothing_large),
    (Inlet, "advance", counts_what_has_not_come),
    (MessageLink, "tell", tells_without_credit),
    (MessageLink, "_heard", gives_no_credit_back_for_what_it_heard),
    (MessageLink, "fell_quiet", does_not_say_what_has_arrived),
    (MessageLink, "fell_quiet", doubts_nothing),
    (MessageLink, "fell_quiet", wants_its_acknowledgements_acknowledged),
    (MessageLink, "_note_frame", acknowledges_acknowledgements),
]


@pytest.mark.parametrize(("owner", "name", "mutant"), MUTANTS, ids=[mutant.__name__ for *_, mutant in MUTANTS])
def test_without_one_of_its_rules_the_stories_go_wrong(owner: type, name: str, mutant: Callable[[Any], Any]) -> None:
    with mutated(owner, name, mutant):
        try:
            if kept_of_long_talk([3, EAGER]) > 2 * ACK_BATCH:
                return
            for seed in range(300):
                Story(seed).play()
        except (AssertionError, RemoteProtocolError, IndexError, KeyError, ValueError):
            return
    pytest.fail("the stories end well without it")


# Single rules


def connect(*matchers: Matcher) -> None:
    for matcher in matchers:
        matcher.lane_opened(1 - matcher.rank)


def move(matchers: list[Matcher]) -> None:
    """Carry everything from one to the other until nothing moves."""
    moved = 1
    while moved:
        moved = 0
        for matcher in matchers:
            peer = 1 - matcher.rank
            data = b"".join(matcher.link(peer).outlet.buffers())
            matcher.link(peer).outlet.advance(len(data))
            moved += len(data)
            while data:
                buffer = matchers[peer].link(matcher.rank).inlet.buffers()[0]
                step = min(len(buffer), len(data))
                buffer[:step] = data[:step]
                data = data[step:]
                matchers[peer].link(matcher.rank).inlet.advance(step)


def start_send(matcher: Matcher, data: bytes, tag: int = 0) -> MessageSend:
    view = memoryview(data)
    return matcher.send(view, 1 - matcher.rank, tag, dtype_code=UINT8, shape=(len(data),), is_object=False)


def test_the_first_message_does_not_wait_for_the_other_end() -> None:
    matcher = Matcher(0, 2, MessageSizes(EAGER, CREDIT))
    matcher.lane_opened(1)
    start_send(matcher, b"first")
    matcher.link(1).outlet.advance(wire.FIXED_BYTES)  # RESUME
    assert b"first" in b"".join(matcher.link(1).outlet.buffers())


@pytest.mark.parametrize("position", [0, 10**6], ids=["less than it acknowledged", "more than was sent"])
def test_a_peer_that_claims_to_have_what_it_cannot_have_breaks_the_protocol(position: int) -> None:
    pair = [Matcher(0, 2, MessageSizes(EAGER, CREDIT)), Matcher(1, 2, MessageSizes(EAGER, CREDIT))]
    connect(*pair)
    large = start_send(pair[0], bytes(2 * PIECE))
    pair[1].receive(0, ANY)
    move(pair)
    assert large in pair[0].completed
    start_send(pair[0], b"x")
    pair[0].link(1).outlet.advance(sum(map(len, pair[0].link(1).outlet.buffers())))
    pair[0].lane_ended(1)
    pair[0].lane_opened(1)
    resume = wire.encode(MessageHeader(wire.RESUME, payload_bytes=position))
    pair[0].link(1).inlet.buffers()[0][:] = resume
    with pytest.raises(RemoteProtocolError, match="bytes have arrived there"):
        pair[0].link(1).inlet.advance(len(resume))


def test_a_peer_that_said_its_end_is_known_to_have_parted() -> None:
    pair = [Matcher(0, 2, MessageSizes(EAGER, CREDIT)), Matcher(1, 2, MessageSizes(EAGER, CREDIT))]
    connect(*pair)
    start_send(pair[0], b"last words")
    pair[0].say_end()
    move(pair)
    assert pair[1].has_parted(0)
    assert not pair[0].has_parted(1)
    assert pair[1].has_match(0, 0)


def test_what_may_have_been_lost_is_undelivered_until_the_other_end_says_how_much_it_has() -> None:
    pair = [Matcher(0, 2, MessageSizes(EAGER, CREDIT)), Matcher(1, 2, MessageSizes(EAGER, CREDIT))]
    connect(*pair)
    assert not pair[0].undelivered()
    start_send(pair[0], b"small")
    assert pair[0].undelivered()
    move(pair)
    assert not pair[0].undelivered()  # the kernel has it, and the connection is well
    for matcher in pair:
        matcher.lane_ended(1 - matcher.rank)
    assert pair[0].undelivered()
    connect(*pair)
    assert pair[0].resuming == {1}
    move(pair)
    assert not pair[0].undelivered()
    pair[1].receive(0, 0)
    assert not pair[1].has_match(0, 0)


def test_nothing_of_a_lost_peer_is_kept() -> None:
    matcher = Matcher(0, 2, MessageSizes(EAGER, CREDIT))
    matcher.lane_opened(1)
    for _ in range(3):
        start_send(matcher, b"unread")
    matcher.link(1).outlet.advance(wire.FIXED_BYTES)
    matcher.link(1).outlet.advance(sum(map(len, matcher.link(1).outlet.buffers())))
    matcher.fail(1, PeerLostError("lost", rank=1))
    assert not outlet(matcher, 1)._unacknowledged
    assert not matcher.undelivered()
    assert not matcher.ready
