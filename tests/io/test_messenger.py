from __future__ import annotations

import contextlib
import itertools
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.support.waiting import DEADLINE

from covey.base.arithmetic import dtype_code
from covey.base.errors import (
    ClosedError,
    ConfigError,
    DeadlineError,
    MismatchError,
    PeerLostError,
    RemoteProtocolError,
)
from covey.base.numbers import ANY
from covey.proto.message_link import MessageSizes
from covey.runtime.messages.messenger import Messenger
from covey.wire import message_header as wire
from covey.wire.message_header import MessageHeader

if TYPE_CHECKING:
    from covey.runtime.work import Work

UINT8 = dtype_code(np.dtype(np.uint8))
INT64 = dtype_code(np.dtype(np.int64))
KIB, MIB = 1024, 1024 * 1024
SIZES = [0, 1, 64 * KIB - 1, 64 * KIB, 64 * KIB + 1, 10 * MIB]


def content(seed: int, length: int) -> bytes:
    """Bytes that differ by message and by position."""
    return np.random.default_rng(seed).integers(0, 256, length, dtype=np.uint8).tobytes()


def unix_pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair()


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    for sock in (near, far):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return near, far


class MessengerGroup:
    """The messengers of a group of threads. The first to ask for a lane makes it; the other one adopts it."""

    def __init__(self, size: int, make_pair: Callable[[], tuple[socket.socket, socket.socket]] = unix_pair) -> None:
        self._make_pair = make_pair
        self._lock = threading.Lock()
        self.ends: dict[tuple[int, int], socket.socket] = {}
        self.asked: list[tuple[int, int]] = []
        self.fault: BaseException | None = None
        self.gone: dict[int, BaseException] = {}
        self.given_up: list[tuple[int, int]] = []
        self.renewed: list[tuple[int, int]] = []
        self.replaced: list[socket.socket] = []
        self.wakes = [socket.socketpair() for _ in range(size)]
        self.messengers = [self._make_messenger(rank, size) for rank in range(size)]

    def _make_messenger(self, rank: int, size: int) -> Messenger:
        def open_lane(peer: int, _deadline: float | None) -> socket.socket:
            return self.open_lane(rank, peer)

        wake_fd = self.wakes[rank][0].fileno()
        return Messenger(
            rank,
            size,
            open_lane=open_lane,
            renew_lane=lambda peer, ended, _pause: self.renew_lane(rank, peer, ended),
            give_up=lambda peer: self.given_up.append((rank, peer)),
            wake_fd=wake_fd,
            fault=lambda: self.fault,
            lost=self.gone.get,
            name=f"test[{rank}]",
            sizes=MessageSizes(),
        )

    def open_lane(self, rank: int, peer: int) -> socket.socket:
        with self._lock:
            self.asked.append((rank, peer))
            is_new = (rank, peer) not in self.ends
            if is_new:
                near, far = self._make_pair()
                near.setblocking(False)
                far.setblocking(False)
                self.ends[rank, peer], self.ends[peer, rank] = near, far
                self.messengers[peer].adopt(rank, far)
            return self.ends[rank, peer]

    def renew_lane(self, rank: int, peer: int, ended: socket.socket) -> None:
        """The first to ask makes another lane; a rank that is gone, or wants none, is not reached."""
        with self._lock:
            if is_reached := not {rank, peer} & self.gone.keys() and (peer, rank) not in self.given_up:
                if self.ends[rank, peer] is ended:
                    self.renewed.append((rank, peer))
                    near, far = self._make_pair()
                    near.setblocking(False)
                    far.setblocking(False)
                    self.replaced += [self.ends[rank, peer], self.ends[peer, rank]]
                    self.ends[rank, peer], self.ends[peer, rank] = near, far
                for one, other in ((rank, peer), (peer, rank)):  # one at a time, as on the control loop
                    self.messengers[one].adopt(other, self.ends[one, other])
        if not is_reached:
            self.messengers[rank].unreachable(peer)

    def cut(self, rank: int, peer: int) -> None:
        """Break the connection between two ranks, as a router that forgets it would."""
        with contextlib.suppress(OSError):
            self.ends[rank, peer].shutdown(socket.SHUT_RDWR)

    def fail(self, fault: BaseException) -> None:
        self.fault = fault
        for _, rope in self.wakes:
            rope.send(b"!")

    def start_send(self, rank: int, data: bytes | bytearray, dst: int, tag: int = 0) -> Work[None]:
        return self.messengers[rank].start_send(memoryview(data), dst, tag, UINT8, (len(data),), False)

    def start_receive(self, rank: int, src: int = ANY, tag: int = ANY, out: bytearray | None = None) -> Work[Any]:
        return self.messengers[rank].start_receive(src, tag, None if out is None else memoryview(out), None)

    def wait(self, rank: int, work: Work[Any], seconds: float = DEADLINE) -> Any:
        return self.messengers[rank].wait(work, time.monotonic() + seconds)

    def ends_with(self, error: type[BaseException], rank: int, work: Work[Any]) -> None:
        with pytest.raises(error):
            self.wait(rank, work)

    def send(self, rank: int, data: bytes | bytearray, dst: int, tag: int = 0, *, seconds: float = DEADLINE) -> None:
        self.wait(rank, self.start_send(rank, data, dst, tag), seconds)

    def recv(self, rank: int, src: int = ANY, tag: int = ANY, *, seconds: float = DEADLINE) -> bytes:
        return bytes(self.wait(rank, self.start_receive(rank, src, tag), seconds).data)

    def run(self, *bodies: Callable[[], object]) -> None:
        """Run each body on a thread of its own and raise what the first failing one raised."""
        errors: list[BaseException] = []

        def guarded(body: Callable[[], object]) -> None:
            try:
                body()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=guarded, args=(body,), daemon=True) for body in bodies]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE)
            assert not thread.is_alive(), "a body hangs"
        if errors:
            raise errors[0]

    def close(self) -> None:
        deadline = time.monotonic()
        for messenger in self.messengers:
            messenger.close(deadline)
        for sock in [*itertools.chain(*self.wakes), *self.ends.values(), *self.replaced]:
            sock.close()


MakeGroup = Callable[..., MessengerGroup]


@pytest.fixture
def make_group() -> Iterator[MakeGroup]:
    groups: list[MessengerGroup] = []

    def make(*args: Any) -> MessengerGroup:
        groups.append(MessengerGroup(*args))
        return groups[-1]

    try:
        yield make
    finally:
        for group in groups:
            group.close()
    assert not [thread for thread in threading.enumerate() if thread.name.endswith("messages")]


both_lanes = pytest.mark.parametrize("make_pair", [unix_pair, tcp_pair], ids=["unix", "tcp"])


@both_lanes
@pytest.mark.parametrize("length", SIZES)
def test_messages_of_any_size_arrive_whole(
    make_group: MakeGroup, make_pair: Callable[[], tuple[socket.socket, socket.socket]], length: int
) -> None:
    group = make_group(2, make_pair)
    out = bytearray(length)

    def first() -> None:
        group.send(0, content(1, length), 1, tag=7)
        assert group.recv(0, 1, 8) == content(2, length)

    def second() -> None:
        message = group.wait(1, group.start_receive(1, 0, 7, out))
        assert (message.source, message.tag, message.dtype_code, message.shape) == (0, 7, UINT8, (length,))
        assert (message.is_object, message.data) == (False, None)
        group.send(1, content(2, length), 0, tag=8)

    group.run(first, second)
    assert out == content(1, length)


def test_lanes_are_opened_on_first_use_and_once(make_group: MakeGroup) -> None:
    group = make_group(4)
    group.send(0, b"hello", 1)
    assert group.asked == [(0, 1)]
    assert group.recv(1, 0) == b"hello"
    assert group.asked == [(0, 1)]
    group.send(1, b"back", 0)
    with pytest.raises(DeadlineError):
        group.recv(2, seconds=0.01)
    assert group.asked == [(0, 1), (2, 0), (2, 1), (2, 3)]
    assert group.recv(0) == b"back"
    assert group.asked == [(0, 1), (2, 0), (2, 1), (2, 3), (0, 3)]


def test_a_lane_that_cannot_be_opened_is_asked_for_again(make_group: MakeGroup) -> None:
    group = make_group(2)
    make_pair = group._make_pair

    def refuse() -> tuple[socket.socket, socket.socket]:
        group._make_pair = make_pair
        raise ConnectionRefusedError("not there yet")

    group._make_pair = refuse
    with pytest.raises(ConnectionRefusedError):
        group.start_send(0, b"early", 1)
    group.send(0, b"later", 1)
    assert group.recv(1, 0) == b"later"


def test_objects_and_empty_shapes_keep_their_description(make_group: MakeGroup) -> None:
    group = make_group(2)
    messenger = group.messengers[0]
    messenger.start_send(memoryview(b"encoded"), 1, 3, INT64, (4, 5), True)
    messenger.start_send(memoryview(b""), 1, 3, INT64, (4, 0, 5), False)
    first, second = (group.wait(1, group.start_receive(1, 0, 3)) for _ in range(2))
    assert (first.is_object, bytes(first.data)) == (True, b"encoded")
    assert (second.is_object, second.dtype_code, second.shape, second.data.size) == (False, INT64, (4, 0, 5), 0)


@both_lanes
@pytest.mark.parametrize(
    "seed", [0, pytest.param(1, marks=pytest.mark.thorough), pytest.param(2, marks=pytest.mark.thorough)]
)
def test_thousands_of_messages_of_three_ranks_arrive_once_and_in_order(
    make_group: MakeGroup, make_pair: Callable[[], tuple[socket.socket, socket.socket]], seed: int
) -> None:
    size, count, tags = 3, 400, 4
    group = make_group(size, make_pair)
    rng = random.Random(seed)
    sizes = [0, 1, 10, 1000, 30_000, 64 * KIB, 64 * KIB + 1, 300_000]
    weights = [4, 8, 20, 20, 4, 2, 1, 1]
    script = {
        (source, peer): [(rng.randrange(tags), rng.choices(sizes, weights)[0]) for _ in range(count)]
        for source in range(size)
        for peer in range(size)
    }

    def body_of(source: int, peer: int, at: int) -> bytes:
        return content(source * 10**6 + peer * 10**5 + at, script[source, peer][at][1])

    def sender(rank: int) -> None:
        # Posted first and waited for last: rank 1 asks in an order of its own.
        works = [
            group.start_send(rank, body_of(rank, peer, at), peer, script[rank, peer][at][0])
            for at in range(count)
            for peer in range(size)
        ]
        for work in works:
            group.wait(rank, work)

    def receiver(rank: int, any_tag: bool) -> None:
        expected: dict[tuple[int, int], list[int]] = {}
        for source in range(size):
            for at, (tag, _) in enumerate(script[source, rank]):
                expected.setdefault((source, tag), []).append(at)
        wishes = [(source, tag) for (source, tag), ats in expected.items() for _ in ats]
        random.Random(rank).shuffle(wishes)
        for wish in wishes:
            message = group.wait(rank, group.start_receive(rank, *((ANY, ANY) if any_tag else wish)))
            at = expected[message.source, message.tag].pop(0)
            assert bytes(message.data) == body_of(message.source, rank, at)
        assert not any(expected.values())

    group.run(*(lambda r=r: sender(r) for r in range(size)), *(lambda r=r: receiver(r, r != 1) for r in range(size)))


def test_every_rank_may_start_every_message_and_wait_in_any_order(make_group: MakeGroup) -> None:
    size, length = 4, 3 * MIB
    group = make_group(size)

    def body(rank: int) -> None:
        peers = [peer for peer in range(size) if peer != rank]
        works = [group.start_send(rank, content(10 * rank + peer, length), peer) for peer in peers]
        outs = {peer: bytearray(length) for peer in peers}
        works += [group.start_receive(rank, peer, 0, outs[peer]) for peer in peers]
        random.Random(rank).shuffle(works)
        for work in works:
            group.wait(rank, work)
        assert all(outs[peer] == content(10 * peer + rank, length) for peer in peers)

    group.run(*(lambda r=r: body(r) for r in range(size)))


def test_one_thread_can_send_to_itself_first_and_receive_later(make_group: MakeGroup) -> None:
    group = make_group(1)
    for length in SIZES:
        group.send(0, content(length, length), 0, tag=length)
    for length in reversed(SIZES):
        assert group.recv(0, 0, length) == content(length, length)


def test_a_sender_may_leave_four_mebibytes_and_then_waits(make_group: MakeGroup) -> None:
    group = make_group(2)
    works = [group.start_send(0, content(seed, 64 * KIB), 1, tag=seed % 3) for seed in range(100)]
    allowed = MessageSizes().credit_bytes // (64 * KIB)
    assert [work.done() for work in works] == [True] * allowed + [False] * (100 - allowed)
    with pytest.raises(DeadlineError, match="rank 1"):
        group.wait(0, works[-1], 0.02)
    for seed in range(99):
        assert group.recv(1, 0, seed % 3) == content(seed, 64 * KIB)
    group.send(0, b"room again", 1, tag=9)
    assert group.recv(1, 0) == b"room again"  # and not the one that was withdrawn


def test_what_was_accepted_arrives_though_the_sender_has_turned_to_other_things(make_group: MakeGroup) -> None:
    group = make_group(2)
    for seed in range(40):  # far more than a socket's buffer holds
        group.send(0, content(seed, 64 * KIB), 1)
    assert [group.recv(1, 0) for _ in range(40)] == [content(seed, 64 * KIB) for seed in range(40)]


def test_a_large_message_that_is_not_received_holds_up_no_other_tag(make_group: MakeGroup) -> None:
    group = make_group(2)
    large = group.start_send(0, content(1, 10 * MIB), 1, tag=1)
    for seed in range(200):
        group.send(0, content(seed, 50_000), 1, tag=2)
        assert group.recv(1, 0, 2) == content(seed, 50_000)
    assert not large.done()
    group.messengers[0].progress_in_background()
    assert group.recv(1, 0, 1) == content(1, 10 * MIB)
    group.wait(0, large)


def test_works_that_are_not_waited_for_go_on_in_the_background(make_group: MakeGroup) -> None:
    group = make_group(2)
    out = bytearray(10 * MIB)
    ended = threading.Semaphore(0)
    for work in (group.start_receive(1, 0, 5, out), group.start_send(0, content(5, 10 * MIB), 1, tag=5)):
        work.add_done_callback(lambda _: ended.release())
    for messenger in group.messengers:
        messenger.progress_in_background()
    for _ in range(2):
        assert ended.acquire(timeout=DEADLINE)
    assert out == content(5, 10 * MIB)


def test_waiting_threads_of_one_rank_help_each_other(make_group: MakeGroup) -> None:
    group = make_group(2)
    count = 8

    def receiver(tag: int) -> None:
        for at in range(20):
            assert group.recv(1, 0, tag) == content(100 * tag + at, 1000 * tag)

    def sender() -> None:
        for at in range(20):
            for tag in reversed(range(count)):
                group.send(0, content(100 * tag + at, 1000 * tag), 1, tag)

    group.messengers[1].progress_in_background()
    group.run(sender, *(lambda tag=tag: receiver(tag) for tag in range(count)))


def test_a_thread_that_drives_notices_when_another_one_completes_its_work(make_group: MakeGroup) -> None:
    group = make_group(2)

    def player(mine: int, other: int) -> None:
        for at in range(50):
            group.send(0, content(at, 10 + mine), 0, tag=other)
            assert group.recv(0, 0, mine) == content(at, 10 + other)

    started_at = time.monotonic()
    group.run(lambda: player(1, 2), lambda: player(2, 1))
    assert time.monotonic() - started_at < DEADLINE / 2


def test_a_callback_may_wait_for_another_work(make_group: MakeGroup) -> None:
    group = make_group(2)
    answers: list[bytes] = []
    question = group.start_receive(1, 0, 1)
    question.add_done_callback(lambda _: answers.append(group.recv(1, 0, 2)))

    def asker() -> None:
        group.send(0, b"question", 1, tag=1)
        group.send(0, content(2, 2 * MIB), 1, tag=2)

    group.run(asker, lambda: group.wait(1, question))
    assert answers == [content(2, 2 * MIB)]


def test_an_idle_messenger_uses_no_cpu(make_group: MakeGroup) -> None:
    group = make_group(2)
    pending = group.start_receive(1, 0, 1)
    group.messengers[1].progress_in_background()
    before = time.process_time()
    with pytest.raises(DeadlineError):
        pending.wait(0.4)
    assert time.process_time() - before < 0.1


@pytest.mark.parametrize("length", [80, 800_000])
def test_a_message_that_does_not_fit_fails_its_receive_only(make_group: MakeGroup, length: int) -> None:
    group = make_group(2)
    sends = [group.start_send(0, content(seed, length), 1) for seed in range(2)]
    group.messengers[0].progress_in_background()
    out = memoryview(bytearray(length))
    with pytest.raises(MismatchError, match=r"int64.*uint8"):
        group.wait(1, group.messengers[1].start_receive(0, 0, out, (INT64, (length // 8,))))
    group.wait(1, group.messengers[1].start_receive(0, 0, out, (UINT8, (length,))))
    assert out == content(1, length)
    for send in sends:
        group.wait(0, send)


def test_ranks_that_do_not_exist_are_refused_before_anything_is_opened(make_group: MakeGroup) -> None:
    group = make_group(2)
    with pytest.raises(ConfigError, match="rank 2"):
        group.start_send(0, b"", 2)
    with pytest.raises(ConfigError, match="rank -2"):
        group.start_receive(0, -2)
    assert group.asked == []


def test_a_receive_that_is_late_is_withdrawn(make_group: MakeGroup) -> None:
    group = make_group(3)
    out = bytearray(5)
    with pytest.raises(DeadlineError, match="rank 1") as caught:
        group.wait(0, group.start_receive(0, 1, 4, out), 0.02)
    assert caught.value.late == (1,)
    late = group.start_receive(0, ANY, 4)
    with pytest.raises(DeadlineError, match="ranks 1, 2") as caught:
        group.wait(0, late, 0.02)
    assert caught.value.late == (1, 2)
    assert isinstance(late.exception(), DeadlineError)
    group.send(1, b"hello", 0, tag=4)
    assert group.recv(0, 1, 4) == b"hello"
    assert out == bytes(5)


def test_two_ranks_that_both_send_first_end_with_a_deadline_and_a_closed_lane(make_group: MakeGroup) -> None:
    group = make_group(2)
    errors: dict[int, BaseException] = {}

    def body(rank: int) -> None:
        try:
            group.send(rank, content(rank, MIB), 1 - rank, seconds=0.3)
        except (DeadlineError, PeerLostError) as error:
            errors[rank] = error

    group.run(lambda: body(0), lambda: body(1))
    late = [error.late for error in errors.values() if isinstance(error, DeadlineError)]
    assert len(errors) == 2
    assert late
    assert set(late) <= {(0,), (1,)}
    rank = next(rank for rank, error in errors.items() if isinstance(error, DeadlineError))
    with pytest.raises(ClosedError, match="was abandoned"):
        group.send(rank, b"more", 1 - rank)


@both_lanes
def test_messages_that_arrived_outlive_their_sender_and_then_its_loss_is_told(
    make_group: MakeGroup, make_pair: Callable[[], tuple[socket.socket, socket.socket]]
) -> None:
    group = make_group(3, make_pair)
    group.gone[0] = PeerLostError("rank 0 was killed", rank=0)
    for seed in range(30):
        group.send(0, content(seed, 5000), 2, tag=seed)
    half_way = group.start_send(0, content(99, MIB), 2, tag=50)
    blocked = group.start_receive(2, 1, 60)
    group.messengers[0].close(time.monotonic() + 0.1)  # no thread reads yet: the kernel goes on alone
    assert isinstance(half_way.exception(), ClosedError)
    assert [group.recv(2, 0, seed) for seed in reversed(range(15))] == [
        content(seed, 5000) for seed in reversed(range(15))
    ]
    assert [group.recv(2) for _ in range(15)] == [content(seed, 5000) for seed in range(15, 30)]
    for source, tag in [(0, ANY), (0, 50), (ANY, ANY)]:
        with pytest.raises(PeerLostError, match="killed"):
            group.recv(2, source, tag)
    with pytest.raises(PeerLostError, match="killed"):
        group.send(2, b"anyone?", 0)
    group.send(1, b"still here", 2, tag=60)
    assert bytes(group.wait(2, blocked).data) == b"still here"


def test_the_loss_of_a_peer_is_told_at_once_to_the_ranks_that_wait_for_it(make_group: MakeGroup) -> None:
    group = make_group(2)
    works = [
        group.start_receive(1, 0, 1),
        group.start_receive(1, ANY, 2),
        group.start_send(1, content(1, MIB), 0, tag=3),
    ]
    group.messengers[1].progress_in_background()
    group.gone[0] = PeerLostError("rank 0 was killed", rank=0)
    group.cut(0, 1)
    for work in works:
        with pytest.raises(PeerLostError, match="rank 0") as caught:
            group.wait(1, work)
        assert caught.value.rank == 0


def test_a_receive_in_the_middle_of_a_payload_ends_when_the_sender_dies(make_group: MakeGroup) -> None:
    group = make_group(2)
    send = group.start_send(0, content(1, 30 * MIB), 1)
    receive = group.start_receive(1, 0)
    with pytest.raises(DeadlineError):
        receive.wait(0)  # one look: the header is here, the payload is asked for
    with pytest.raises(DeadlineError):
        send.wait(0)  # one look: the first bytes leave
    group.gone[0] = PeerLostError("rank 0 was killed", rank=0)
    group.cut(0, 1)
    with pytest.raises(PeerLostError):
        group.wait(1, receive)


def test_bytes_that_are_not_messages_end_the_lane_with_a_protocol_error(make_group: MakeGroup) -> None:
    group = make_group(2)
    group.open_lane(0, 1).send(b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n")
    with pytest.raises(RemoteProtocolError):
        group.recv(1, 0)


@pytest.mark.parametrize("waiting", [True, False], ids=["waiting", "background"])
def test_a_failed_group_ends_all_works_with_its_first_cause(make_group: MakeGroup, waiting: bool) -> None:
    group = make_group(2)
    works = [group.start_receive(1, 0, 1), group.start_receive(1, ANY, ANY), group.start_send(1, content(1, MIB), 0)]
    ended = threading.Semaphore(0)
    for work in works:
        work.add_done_callback(lambda _: ended.release())
    fault = MismatchError("rank 0 called something else")
    if waiting:
        group.run(lambda: group.fail(fault), lambda: group.ends_with(MismatchError, 1, works[0]))
    else:
        group.messengers[1].progress_in_background()
        group.fail(fault)
    for _ in works:
        assert ended.acquire(timeout=DEADLINE)
    errors = [work.exception() for work in works]
    assert [(type(error), str(error)) for error in errors] == [(MismatchError, str(fault))] * 3
    assert len({id(error) for error in (fault, *errors)}) == 4, "each operation has an error of its own to raise"
    with pytest.raises(MismatchError):
        group.start_receive(1, 0, 1)


@both_lanes
def test_close_delivers_what_was_accepted(
    make_group: MakeGroup, make_pair: Callable[[], tuple[socket.socket, socket.socket]]
) -> None:
    group = make_group(2, make_pair)
    bodies = [content(seed, 60_000) for seed in range(60)]
    received: list[bytes] = []
    group.send(1, content(100, 60_000), 0)  # never received: closing with unread bytes must not reset the lane

    def first() -> None:
        for body in bodies:
            group.send(0, body, 1)
        group.messengers[0].close(time.monotonic() + DEADLINE)

    def second() -> None:
        for _ in bodies:
            received.append(group.recv(1, 0))

    group.run(first, second)
    assert received == bodies


def test_close_ends_pending_works_waiters_and_later_calls(make_group: MakeGroup) -> None:
    group = make_group(2)
    works = [group.start_receive(0, 1, 1), group.start_send(0, content(1, MIB), 1)]
    group.run(
        lambda: group.ends_with(ClosedError, 0, works[0]),
        lambda: group.messengers[0].close(time.monotonic() + 0.05),
    )
    assert all(isinstance(work.exception(), ClosedError) for work in works)
    with pytest.raises(ClosedError):
        group.start_receive(0, 1)
    group.messengers[0].close(time.monotonic())
    messenger = group.messengers[0]
    sockets: list[Any] = [messenger._driving._bell, messenger._driving._bell_rope]
    sockets += [lane.sock for lane in messenger._lanes.by_rank.values()]
    assert all(sock.fileno() == -1 for sock in sockets)


def test_an_asynchronous_receive_that_is_not_waited_for_fails_at_its_deadline(make_group: MakeGroup) -> None:
    two = make_group(2)
    work = two.start_receive(0, 1, 7)
    two.messengers[0].progress_in_background(work, time.monotonic() + 0.2)
    error = work.exception()
    assert isinstance(error, DeadlineError)
    assert error.late == (1,)
    later = two.start_receive(0, 1, 7)
    two.messengers[0].progress_in_background(later, time.monotonic() + DEADLINE)
    two.wait(1, two.start_send(1, b"late", 0, 7))
    assert later.wait(DEADLINE).data.tobytes() == b"late"


# Connections that break between ranks that are well


@both_lanes
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in (1, 2, 3))])
def test_messages_of_three_ranks_arrive_once_and_in_order_though_connections_break_all_the_time(
    make_group: MakeGroup, make_pair: Callable[[], tuple[socket.socket, socket.socket]], seed: int
) -> None:
    size, count, tags = 3, 60, 3
    group = make_group(size, make_pair)
    rng = random.Random(seed)
    sizes, weights = [0, 1, 1000, 30_000, 64 * KIB, 64 * KIB + 1, 300_000, 3 * MIB], [4, 20, 20, 4, 2, 2, 2, 1]
    script = {
        pair: [(rng.randrange(tags), rng.choices(sizes, weights)[0]) for _ in range(count)]
        for pair in itertools.permutations(range(size), 2)
    }

    def body_of(source: int, peer: int, at: int) -> bytes:
        return content(source * 10**6 + peer * 10**5 + at, script[source, peer][at][1])

    def sender(rank: int, peer: int) -> None:
        dice = random.Random(f"{seed}{rank}{peer}")
        for at, (tag, length) in enumerate(script[rank, peer]):
            memory = bytearray(body_of(rank, peer, at))
            work = group.start_send(rank, memory, peer, tag)
            if dice.random() < 0.4:
                time.sleep(dice.choice([0, 0, 0.0003, 0.002]))
                group.cut(*dice.choice([(rank, peer), (peer, rank)]))
            group.wait(rank, work, DEADLINE)
            memory[:] = bytes(length)  # a send that is over reads its memory no more

    def receiver(rank: int) -> None:
        expected: dict[tuple[int, int], list[int]] = {}
        for source in range(size):
            if source != rank:
                for at, (tag, _) in enumerate(script[source, rank]):
                    expected.setdefault((source, tag), []).append(at)
        for _ in range(sum(map(len, expected.values()))):
            message = group.wait(rank, group.start_receive(rank), DEADLINE)
            at = expected[message.source, message.tag].pop(0)
            assert bytes(message.data) == body_of(message.source, rank, at), (message.source, rank, at)
        assert not any(expected.values())

    receivers = [lambda r=r: receiver(r) for r in range(size)]
    group.run(*receivers, *(lambda pair=pair: sender(*pair) for pair in script))
    assert len(group.renewed) > 20


def test_a_connection_that_breaks_while_no_thread_drives_is_replaced_as_soon_as_the_other_end_waits(
    make_group: MakeGroup,
) -> None:
    group = make_group(2)
    group.send(0, b"first", 1)
    assert group.recv(1, 0) == b"first"
    group.cut(0, 1)
    # Rank 0 leaves a message with the kernel, which has no use for it, and does something else from then on.
    group.send(0, b"second", 1)
    assert group.recv(1, 0) == b"second"


@both_lanes
def test_what_the_kernel_had_when_the_connection_broke_comes_with_the_next(
    make_group: MakeGroup, make_pair: Callable[[], tuple[socket.socket, socket.socket]]
) -> None:
    group = make_group(2, make_pair)
    for number in range(20):
        group.send(0, content(number, 5000), 1)  # no thread reads them
    group.cut(1, 0)
    for number in range(20, 30):
        group.send(0, content(number, 5000), 1)
    assert [group.recv(1, 0) for _ in range(30)] == [content(number, 5000) for number in range(30)]


def test_a_large_message_goes_on_where_the_connection_broke(make_group: MakeGroup) -> None:
    group = make_group(2)
    length = 80 * MIB
    out = bytearray(length)
    data = content(1, length)
    send, receive = group.start_send(0, data, 1), group.start_receive(1, 0, ANY, out)
    for messenger, work in ((group.messengers[0], send), (group.messengers[1], receive)):
        messenger.progress_in_background(work)
    cuts = 0
    while not receive.done():
        before = group.messengers[1]._matcher.progress(0)
        deadline = time.monotonic() + DEADLINE
        while group.messengers[1]._matcher.progress(0) < before + 10 * MIB and not receive.done():
            assert time.monotonic() < deadline
            time.sleep(0.0005)
        group.cut(0, 1)
        cuts += 1
    group.wait(0, send)
    assert cuts >= 3
    assert out == data
    sent_again = group.messengers[0]._matcher.link(1).outlet._sent - length
    assert sent_again < MIB  # the stream as the receiver counts it: headers and nothing twice


def test_a_send_ends_only_when_the_receiver_has_all_of_it(make_group: MakeGroup) -> None:
    group = make_group(2)
    near, far = group.ends[0, 1], group.ends[1, 0] = unix_pair()  # the test itself is rank 1
    near.setblocking(False)
    far.settimeout(DEADLINE)
    length = 100 * KIB
    send = group.start_send(0, content(1, length), 1)
    group.messengers[0].progress_in_background(send)
    far.sendall(wire.encode(MessageHeader(wire.RESUME)) + wire.encode(MessageHeader(wire.CTS, 0, length)))
    arrived = b""
    while not arrived.endswith(content(1, length)):
        arrived += far.recv(MIB)
    with pytest.raises(DeadlineError):
        send.wait(0.1)
    far.sendall(wire.encode(MessageHeader(wire.ACK, payload_bytes=len(arrived) - wire.FIXED_BYTES - 1)))
    with pytest.raises(DeadlineError):
        send.wait(0.1)
    far.sendall(wire.encode(MessageHeader(wire.ACK, payload_bytes=len(arrived) - wire.FIXED_BYTES)))
    send.wait(DEADLINE)


def test_closing_replaces_a_connection_that_broke_with_messages_on_it(make_group: MakeGroup) -> None:
    group = make_group(2)
    bodies = [content(seed, 60_000) for seed in range(60)]
    received: list[bytes] = []

    def first() -> None:
        for body in bodies:
            group.send(0, body, 1)
        group.cut(0, 1)
        group.messengers[0].close(time.monotonic() + DEADLINE)

    group.run(first, lambda: received.extend(group.recv(1, 0) for _ in bodies))
    assert received == bodies


def test_a_rank_that_closed_in_order_is_not_asked_for_another_connection(make_group: MakeGroup) -> None:
    group = make_group(2)
    group.send(0, b"last words", 1)
    group.messengers[0].close(time.monotonic() + DEADLINE)
    assert group.recv(1, 0) == b"last words"
    with pytest.raises(PeerLostError, match="rank 0"):
        group.recv(1, 0)
    assert group.renewed == []
    assert (1, 0) in group.given_up


def test_a_rank_that_broke_the_protocol_is_not_asked_for_another_connection(make_group: MakeGroup) -> None:
    group = make_group(2)
    group.open_lane(0, 1).send(bytes(1000))
    with pytest.raises(RemoteProtocolError, match="rank 0"):
        group.recv(1, 0)
    assert group.renewed == []
    assert (1, 0) in group.given_up


def test_pauses_grow_as_long_as_connections_break_before_anything_moves(make_group: MakeGroup) -> None:
    group = make_group(2)
    pauses: list[float] = []
    messenger = group.messengers[0]

    def renew(peer: int, ended: Any, pause: float) -> None:
        pauses.append(pause)
        if len(pauses) <= 5:  # each is broken from the start
            near, far = socket.socketpair()
            near.setblocking(False)
            far.close()
            messenger.adopt(peer, near)
        else:
            group.renew_lane(0, peer, group.ends[0, 1])

    messenger._renewal._renew_lane = renew
    group.messengers[1]._renewal._renew_lane = lambda *_: None
    group.send(0, b"before", 1)
    group.cut(0, 1)
    group.run(lambda: group.send(0, content(1, MIB), 1, 5), lambda: group.recv(1, 0, 5))
    assert pauses[:2] == [0.0, pytest.approx(0.02)]
    assert pauses[:6] == sorted(pauses[:6])
    group.cut(0, 1)
    group.run(lambda: group.send(0, content(1, MIB), 1, 6), lambda: group.recv(1, 0, 6))
    assert pauses[-1] == 0.0


def test_an_error_of_time_says_that_the_connection_broke(make_group: MakeGroup) -> None:
    group = make_group(2)
    group.send(1, b"hello", 0)
    group.messengers[0]._renewal._renew_lane = lambda *_: None
    group.cut(0, 1)
    with pytest.raises(DeadlineError, match="connection with rank 1 broke: end of stream"):
        group.wait(0, group.start_receive(0, 1, 9), 0.2)
    assert group.recv(0, 1) == b"hello"
