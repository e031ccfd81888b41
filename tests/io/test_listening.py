"""Messengers with listeners: which thread receives, and that messages move whatever the others do."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import threading
import time
from typing import TYPE_CHECKING, Any, cast

import pytest
from tests.support.in_turn import in_turn
from tests.support.waiting import DEADLINE

from covey.base.pace import Growing
from covey.net.host import tcp
from covey.proto.calling.tags import CALL_TAG
from covey.proto.message_link import MessageSizes
from covey.runtime.messages import driving_thread, lane_poll, shared_driving
from covey.runtime.messages.listening import ListeningMessenger
from covey.runtime.work import Work
from covey.testing.proxy import Direction, Proxy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

SHORT = 0.5
"""Far longer than a message takes, far shorter than the deadlines here."""


class Asker:
    """One end: asks the other end questions, and ends their works with the answers."""

    def __init__(self, messenger: ListeningMessenger) -> None:
        self.messenger = messenger
        self.works: dict[bytes, Work[int]] = {}
        self.numbers = itertools.count()

    def ask(self, text: str) -> Work[int]:
        return self.ask_all(text)[0]

    def ask_all(self, *texts: str) -> list[Work[int]]:
        """Ask several questions, which arrive together."""
        questions = [f"{text} {next(self.numbers)}".encode() for text in texts]
        works = [Work[int](question.decode(), drive=self.messenger.drive) for question in questions]
        self.works.update(zip(questions, works, strict=True))
        self.messenger.flush((1, question) for question in questions)
        return works

    def heard(self, messages: list[tuple[int, bytes]]) -> None:
        for _, question in messages:
            self.end(self.works.pop(question))

    def end(self, work: Work[int]) -> None:
        """End a work with the thread that ends it."""
        work.finish(threading.get_ident())
        self.messenger.driving.works_ended()


class Answerer:
    """The other end: answers questions that begin with "echo", in jobs if they end with "job"."""

    def __init__(self, messenger: ListeningMessenger) -> None:
        self.messenger = messenger
        self.ran: list[tuple[bytes, bool]] = []
        """Questions, and whether a job answered them."""
        self.block = threading.Event()

    def heard(self, messages: list[tuple[int, bytes]]) -> None:
        for _, question in messages:
            words = question.split()

            def job(question: bytes = question, words: list[bytes] = words) -> None:
                if b"blocked" in words:
                    assert self.block.wait(DEADLINE)
                self.messenger.flush([(0, question)])

            if words[0] == b"echo":
                is_job = b"job" in words and self.messenger.driving.take_job(
                    self.messenger, job, threading.Thread(target=job).start
                )
                self.ran.append((question, is_job))
                if not is_job and b"job" in words:
                    threading.Thread(target=job).start()
                elif not is_job:
                    job()


class Pair:
    def __init__(
        self, ends: Sequence[socket.socket] = (), renew: Callable[[int, Any, float], None] = lambda *_: None
    ) -> None:
        ends = ends or socket.socketpair()
        self.wakes = [socket.socketpair() for _ in ends]
        listeners: list[Any] = []

        def make(rank: int, kind: Callable[[ListeningMessenger], Any]) -> Any:
            messenger = ListeningMessenger(
                rank,
                2,
                open_lane=lambda *_: pytest.fail("a lane was opened"),
                renew_lane=renew,
                give_up=lambda _: None,
                wake_fd=self.wakes[rank][0].fileno(),
                fault=lambda: None,
                lost=lambda _: None,
                name=f"test[{rank}]",
                sizes=MessageSizes(),
                tag=CALL_TAG,
                listener=lambda messages: listeners[rank].heard(messages),
            )
            listeners.append(kind(messenger))
            return listeners[rank]

        self.asker: Asker = make(0, Asker)
        self.answerer: Answerer = make(1, Answerer)
        self.adopt(ends)

    def adopt(self, ends: Sequence[socket.socket]) -> None:
        """Let both messengers use a connection."""
        for sock in ends:
            sock.setblocking(False)
        self.asker.messenger.adopt(1, ends[0])
        self.answerer.messenger.adopt(0, ends[1])

    def close(self) -> None:
        self.answerer.block.set()
        for end in (self.asker, self.answerer):
            end.messenger.close(time.monotonic())
        for sock in itertools.chain(*self.wakes):
            sock.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    try:
        yield made
    finally:
        made.close()


def until(condition: Callable[[], bool]) -> None:
    """Repeat something until it is true: a loaded machine may be slow, and then another thread takes over."""
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline


def test_a_caller_that_calls_again_soon_receives_its_answers_itself(pair: Pair) -> None:
    me = threading.get_ident()
    until(lambda: pair.asker.ask("echo").wait(DEADLINE) == me)


def test_answers_come_to_many_waiting_callers(pair: Pair) -> None:
    answered = []

    def body() -> None:
        for _ in range(50):
            answered.append(pair.asker.ask("echo").wait(DEADLINE))

    threads = [threading.Thread(target=body) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    assert len(answered) == 250
    assert pair.asker.works == {}


def test_an_answer_that_no_caller_waits_for_comes_right_after_one_that_was_waited_for(pair: Pair) -> None:
    for _ in range(20):  # the background thread may have stepped aside
        pair.asker.ask("echo").wait(DEADLINE)
        came = threading.Event()
        pair.asker.ask("echo").add_done_callback(lambda _, came=came: came.set())  # type: ignore[misc]
        pair.asker.messenger.driving.attend()
        assert came.wait(DEADLINE)


def test_a_caller_that_receives_is_woken_when_another_thread_ends_its_work(pair: Pair) -> None:
    until(lambda: pair.asker.ask("echo").wait(DEADLINE) == threading.get_ident())
    work = pair.asker.ask("silence")
    timer = threading.Timer(0.05, pair.asker.end, (work,))
    timer.start()
    began = time.monotonic()
    assert work.wait(DEADLINE) == timer.ident
    assert time.monotonic() - began < DEADLINE / 2


def test_a_caller_that_gives_up_leaves_the_messages_to_others(pair: Pair) -> None:
    until(lambda: pair.asker.ask("echo").wait(DEADLINE) == threading.get_ident())
    with pytest.raises(Exception, match="not done after the timeout"):
        pair.asker.ask("silence").wait(0.05)
    came = threading.Event()
    pair.asker.ask("echo").add_done_callback(lambda _: came.set())
    assert came.wait(DEADLINE)


def test_ctrl_c_interrupts_a_caller_that_receives_and_breaks_nothing(pair: Pair) -> None:
    for delay in (0.05, 0.0, 0.0005):
        until(lambda: pair.asker.ask("echo").wait(DEADLINE) == threading.get_ident())
        timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))

        def interrupted(timer: threading.Timer = timer) -> None:
            timer.start()
            pair.asker.ask("silence").wait(DEADLINE)

        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            interrupted()
        assert time.monotonic() - began < DEADLINE / 2
        timer.join(DEADLINE)
        assert pair.asker.ask("echo").wait(DEADLINE)


def test_a_handler_that_raises_nothing_lets_the_wait_go_on(pair: Pair) -> None:
    until(lambda: pair.asker.ask("echo").wait(DEADLINE) == threading.get_ident())
    work = pair.asker.ask("silence")
    before = signal.signal(signal.SIGALRM, lambda *_: pair.asker.end(work))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        assert work.wait(DEADLINE) == threading.get_ident()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_job_that_takes_long_holds_up_no_other_message(pair: Pair) -> None:
    def blocks() -> bool:
        work = pair.asker.ask("echo job blocked")
        until(lambda: any(question.decode() == work.description for question, _ in pair.answerer.ran))
        is_job = pair.answerer.ran[-1][1]
        others = [pair.asker.ask("echo job"), pair.asker.ask("echo")]
        for other in others:
            other.wait(DEADLINE)
        assert not work.done()
        pair.answerer.block.set()
        work.wait(DEADLINE)
        pair.answerer.block.clear()
        return is_job

    until(blocks)  # the first may run elsewhere: until there is a thread that stands by


class QuietMessages:
    """Messages of which one batch arrives, with two jobs, and nothing afterwards."""

    def __init__(self, *, has_caller: bool) -> None:
        self.driving = shared_driving.SharedDriving(cast("Any", threading.RLock()), "quiet", may_spin=False)
        self.has_arrived, self.may_end, self.flushed = threading.Event(), threading.Event(), threading.Event()
        self.ran_elsewhere, self.has_caller = threading.Event(), has_caller
        self.work: Work[None] = Work("that of a caller")

    def turn(self, deadline: float | None, *, spins: bool = False) -> None:
        if not self.has_arrived.is_set():
            until(lambda: self.driving.take_job(self, self.block, lambda: pytest.fail("it ran already")))
            waits = "it waits behind one that takes long"
            assert self.driving.take_job(self, lambda: pytest.fail(waits), self.ran_elsewhere.set)
            self.has_arrived.set()
        else:
            self.may_end.wait(DEADLINE)

    def block(self) -> None:
        if self.has_caller:
            threading.Thread(target=self.driving.drive, args=(self, self.work, None)).start()
        self.may_end.wait(DEADLINE)

    def has_more(self) -> bool:
        return not self.may_end.is_set()

    def flush(self) -> None:
        self.flushed.set()

    def fail_all(self, error: BaseException) -> None:
        raise error


@in_turn(has_caller=[False, True])
def test_jobs_behind_one_that_takes_long_run_elsewhere_and_what_those_before_it_sent_is_flushed(
    has_caller: bool,
) -> None:
    messages = QuietMessages(has_caller=has_caller)
    with messages.driving._lock:
        messages.driving.call_background(messages)
    try:
        assert messages.ran_elsewhere.wait(DEADLINE)
        assert messages.flushed.wait(DEADLINE)
    finally:
        messages.may_end.set()
        messages.work.finish(None)
        with messages.driving._lock:
            messages.driving.is_stopping = True
            messages.driving._needed.notify_all()
        messages.driving.join_background()
        with messages.driving._lock:
            messages.driving.close()


def test_messengers_that_have_nothing_to_do_use_no_processor_time(pair: Pair) -> None:
    for _ in range(50):
        pair.asker.ask("echo job").wait(DEADLINE)
    time.sleep(0.05)  # the threads that look from time to time go to sleep
    began = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - began < 0.05


def test_closing_while_a_job_runs_does_not_wait_for_it(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (driving_thread, shared_driving):  # a thread that is waited for has all the time of the test
        monkeypatch.setattr(module, "STEP_ASIDE_SECONDS", 2 * DEADLINE)
    until(lambda: bool(pair.asker.ask("echo job").wait(DEADLINE)) and pair.answerer.ran[-1][1])
    pair.asker.ask("echo job blocked")
    until(lambda: b"blocked" in pair.answerer.ran[-1][0].split())
    pair.answerer.messenger.close(time.monotonic() + SHORT)


@pytest.mark.parametrize("way", list(Direction))
def test_what_a_machine_on_the_way_acknowledges_and_swallows_is_sent_again(
    way: Direction, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane_poll, "IDLE_LANE_SECONDS", 0.05)
    monkeypatch.setattr(lane_poll, "DOUBTS", Growing(0.3, 60.0))
    monkeypatch.setattr(tcp, "PATH_CHECK_SECONDS", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as listener, Proxy(listener.getsockname()) as proxy:
        used: list[socket.socket] = []
        lock = threading.Lock()

        def connect() -> list[socket.socket]:
            dialled = socket.create_connection(proxy.address)
            used[:] = [dialled, listener.accept()[0]]
            return used

        def renew(_rank: int, ended: Any, _pause: float) -> None:
            with lock:
                if ended in used:  # the other end has not asked before
                    made.adopt(connect())

        made = Pair(connect(), renew)
        try:
            assert made.asker.ask("echo").wait(DEADLINE)
            proxy.swallow(way)  # the question, or the answer
            assert made.asker.ask("echo").wait(DEADLINE)
            assert proxy.connections() >= 2
        finally:
            made.close()
