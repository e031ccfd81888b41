"""Decides which thread drives a messenger whose messages come at any time, such as that of calls between nodes.

A background thread drives while no caller does. Waking a thread takes longer than a short call, so this is avoided:

- A caller that waits while no thread drives does it itself, until its work is done. So that it can, the background
  thread steps aside for LINGER_SECONDS when the waiting callers have their answers: often another call follows.
- With enough cores, a thread that has received something polls for a moment before it sleeps.
- Short jobs that a message causes, functions of the program among them, run on the background thread once it has put
  the driving down. A second one stands by: if the job takes longer than LINGER_SECONDS, it drives, and has the jobs
  behind it run elsewhere. So a thread that drives runs no job, and a job that hangs holds up its own thread only.

So messages are never unattended for longer than that. While messages come that no caller waits for (`attend`), the
background thread does not step aside.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from covey.runtime.messages.driving_thread import IDLE_DRIVER_SECONDS, STEP_ASIDE_SECONDS, DrivingThread, left
from covey.runtime.signals import HeldSignals

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.runtime.messages.driving_thread import DrivenMessages
    from covey.runtime.messages.lending import MessengerLock
    from covey.runtime.work import Work

logger = logging.getLogger("covey")

LINGER_SECONDS: Final = 0.003
"""How long messages may be unattended. The thread that stands by looks as often, while others are busy."""
ATTENTION_SECONDS: Final = 1.0
"""How long the background thread stays after a message that no caller waits for."""
HOLD_SECONDS: Final = 0.0005
"""How long what jobs send may wait for what later jobs send, so that both travel in one system call."""


class SharedDriving(DrivingThread):
    """The thread that drives, the callers that wait, and the background threads. See `DrivingThread` for the lock."""

    def __init__(self, lock: MessengerLock, name: str, *, may_spin: bool) -> None:
        super().__init__(lock, name, may_spin=may_spin)
        self._threads: list[threading.Thread] = []
        """The background threads: one, and another one once there are jobs."""
        self._standing_by = 0
        """How many of them wait until they are needed."""
        self._asleep = 0
        """How many of those need a notification; the others look every LINGER_SECONDS."""
        self._put_down_at = 0.0
        """When a thread last stopped driving."""
        self._attend_until = 0.0
        self._waiting: list[Work[Any]] = []
        """The works of callers that wait while another thread drives."""
        self._has_callers = False
        """Whether callers have waited since a background thread began to drive."""
        self._jobs: deque[tuple[Callable[[], None], Callable[[], None]]] = deque()
        """Short jobs for the background thread that drives, after its turn, and what has each run elsewhere."""
        self.job_thread: threading.Thread | None = None
        """The background thread that runs jobs, since when, and until when what they send may wait."""
        self._jobs_at = self.hold_until = 0.0
        self._is_relieved = False
        """Whether the jobs behind one that takes long were taken from the thread that runs it."""

    # Callers

    def drive(self, messages: DrivenMessages, work: Work[Any], deadline: float | None) -> None:
        """Make progress on this thread until `work` is done or the deadline has passed; wait if another one drives.

        A signal handler of the program runs between two turns, when another thread may drive.
        """
        while not work.has_ended:
            with HeldSignals(self.wake_poll) as held:
                has_driven = self.drive_once(messages, work, deadline, held)
            if not has_driven and not work.has_ended:
                self._wait(work, deadline)
            if left(deadline) == 0:
                return

    def drive_once(self, messages: DrivenMessages, work: Work[Any], deadline: float | None, held: HeldSignals) -> bool:
        """Drive until the work is done, the deadline has passed, or a signal has come; False if another thread does.

        `held` wakes the calling thread with `wake_poll`.
        """
        this_thread = threading.get_ident()
        with self._lock:
            before = self.driver
            if before not in (None, this_thread) or self.is_stopping:
                return False
            self.driver = this_thread
        try:
            while not work.has_ended and not self.is_stopping and not held.noted:
                messages.turn(deadline, spins=self._may_spin)
                if deadline is not None and left(deadline) == 0:
                    break
        finally:
            with self._lock:
                self.driver = before  # else a callback has waited for another work
                if before is None:
                    self._put_down(messages, is_over=work.has_ended)
        return True

    def _wait(self, work: Work[Any], deadline: float | None) -> None:
        with self._lock:
            self._waiting.append(work)
            self._has_callers = True
        try:
            work.wait_until_done(left(deadline))
        finally:
            with self._lock, contextlib.suppress(ValueError):
                self._waiting.remove(work)

    def _put_down(self, messages: DrivenMessages, *, is_over: bool) -> None:
        """Note that no thread drives, with the lock; let another one drive at once if it has to."""
        self._put_down_at = now = time.monotonic()
        if self.is_stopping:
            self._freed.notify_all()
        elif not self._threads:
            self.hand_over(messages)
        elif not is_over or self._asleep or now < self._attend_until or (self._waiting and self._callers_wait()):
            self._needed.notify()

    def _callers_wait(self) -> bool:
        self._waiting = [work for work in self._waiting if not work.has_ended]
        return bool(self._waiting)

    def wake_poll(self) -> None:
        """Wake the calling thread from its next poll: a signal has come."""
        with contextlib.suppress(OSError):
            self._bell_rope.send(b"!")

    def attend(self) -> None:
        """Have messages handled at once for a while: some may come that no caller waits for. Without the lock."""
        now = time.monotonic()
        if self._attend_until - now < ATTENTION_SECONDS / 2:
            self._attend_until = now + ATTENTION_SECONDS
        if self.driver is None and self.job_thread is None:
            with self._lock:
                self._needed.notify()

    # Background threads

    def hand_over(self, messages: DrivenMessages) -> None:
        """If no thread drives, let the background thread drive if there is something to do."""
        if self.is_stopping:
            self._freed.notify_all()
        elif self.driver is None and messages.has_more():
            self.call_background(messages)

    def call_background(self, messages: DrivenMessages) -> None:
        """Let the background thread drive while no other thread does; start it if need be."""
        self._put_down_at = 0.0
        if not self._threads and not self.is_stopping:
            self._start_thread(messages)
        self._needed.notify()

    def _start_thread(self, messages: DrivenMessages) -> None:
        thread = threading.Thread(
            target=self._run_background, args=(messages,), name=f"{self._name} messages", daemon=True
        )
        self._threads.append(thread)
        thread.start()

    def _run_background(self, messages: DrivenMessages) -> None:
        this_thread = threading.get_ident()
        while self._stand_by(messages):
            try:
                if self._is_job_late(time.monotonic()):
                    self._relieve(messages)
                while self.driver == this_thread and self._goes_on(messages):
                    messages.turn(None, spins=self._may_spin)
                    if self._jobs and not self._run_jobs(messages):
                        break
            except BaseException as error:  # no other thread would report it
                messages.fail_all(error)
            finally:
                with self._lock:
                    if self.driver == this_thread:
                        self.driver = None
                        self._put_down(messages, is_over=True)

    def _stand_by(self, messages: DrivenMessages) -> bool:
        """Wait until this thread has to drive, or a job takes long, and return True; return False if it has to end."""
        with self._lock:
            self._standing_by += 1
            try:
                while not self.is_stopping:
                    now = time.monotonic()
                    if self.driver is None and self._is_due(now) and messages.has_more():
                        self.driver, self._has_callers = threading.get_ident(), False
                        return True
                    if self._is_job_late(now):
                        return True
                    # A thread that puts the driving down notifies only those that are asleep: doing so for each call
                    # would cost too much. So look again soon while that may happen at any time.
                    runs_jobs = self.job_thread is not None and not self._is_relieved
                    is_busy = runs_jobs or now - self._put_down_at < 2 * LINGER_SECONDS
                    self._asleep += not is_busy
                    is_notified = self._needed.wait(LINGER_SECONDS if is_busy else IDLE_DRIVER_SECONDS)
                    self._asleep -= not is_busy
                    if not is_notified and not messages.has_more():
                        break
                self._threads.remove(threading.current_thread())
                return False
            finally:
                self._standing_by -= 1

    def _is_due(self, now: float) -> bool:
        """Tell whether a background thread has to drive if no other thread does."""
        if now - self._put_down_at > LINGER_SECONDS:
            return True
        return self.job_thread is None and (now < self._attend_until or self._callers_wait())

    def _goes_on(self, messages: DrivenMessages) -> bool:
        """Tell whether the background thread goes on to drive."""
        if self.is_stopping or not messages.has_more():
            return False
        if not self._has_callers or time.monotonic() < self._attend_until:
            return True
        with self._lock:
            return self._callers_wait()

    # Jobs

    def take_job(self, messages: DrivenMessages, job: Callable[[], None], elsewhere: Callable[[], None]) -> bool:
        """Run a job on the calling thread after its turn, or call `elsewhere` if another job takes long before it.

        Return False if this thread may not run jobs: only a background thread that drives may, while another stands by.
        A job that takes long runs on, and the thread that stood by drives: then it is the only one, and gets no jobs.
        """
        thread = threading.current_thread()
        if self.driver != thread.ident or thread not in self._threads:
            return False
        if not self._standing_by and len(self._threads) < 2:
            with self._lock:
                self._start_thread(messages)
        if not self._standing_by:
            return False
        self._jobs.append((job, elsewhere))
        return True

    def _run_jobs(self, messages: DrivenMessages) -> bool:
        """Run the jobs while the driving is put down; return whether this thread drives again."""
        with self._lock:
            self.job_thread, self.driver = threading.current_thread(), None
            self._put_down_at = self._jobs_at = now = time.monotonic()
            self.hold_until, self._is_relieved = now + HOLD_SECONDS, False
            if self._asleep:
                self._needed.notify()
        try:
            while self._jobs:
                self._run_next(0)
        finally:
            with self._lock:
                self.job_thread = None
                is_free = self.driver is None and not self.is_stopping
                if is_free:
                    self.driver = threading.get_ident()
            messages.flush()
        return is_free

    def _is_job_late(self, now: float) -> bool:
        """Tell whether jobs have run for so long that those behind them must not wait."""
        return self.job_thread is not None and not self._is_relieved and now - self._jobs_at > LINGER_SECONDS

    def _relieve(self, messages: DrivenMessages) -> None:
        """Have the jobs behind one that takes long run elsewhere, and send what those before it have queued."""
        self._is_relieved = True
        while self._jobs:
            self._run_next(1)
        messages.flush()

    def _run_next(self, which: int) -> None:
        """Run the next job here (0), or have it run elsewhere (1), unless another thread has taken it."""
        try:
            job = self._jobs.popleft()[which]
        except IndexError:
            return
        try:
            job()
        except BaseException:  # jobs guard what they call; this is a fault of covey
            logger.exception("%s: messages continue after an error of a job", self._name)

    def join_background(self) -> None:
        """Wait until the background threads have ended, except one that runs a job. Without the lock."""
        for thread in list(self._threads):
            if thread not in (threading.current_thread(), self.job_thread):
                thread.join(STEP_ASIDE_SECONDS)
