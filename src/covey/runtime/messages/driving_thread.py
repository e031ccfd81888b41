"""Decides which thread drives a messenger: polls its lanes and moves the messages of all threads.

One thread at a time drives. A thread that waits for a message drives, and hands over when its own message is done. If
no thread waits and messages are pending, a background thread drives; it steps aside for waiting threads.
"""

from __future__ import annotations

import contextlib
import functools
import socket
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from covey.net.host.descriptors import track

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.runtime.messages.lending import MessengerLock
    from covey.runtime.work import Work

STEP_ASIDE_SECONDS: Final = 5.0
"""How long `close` waits for the driving thread to stop."""
IDLE_DRIVER_SECONDS: Final = 10.0
"""How long the idle background thread stays. While it does, a group that was dropped is not freed."""


class DrivenMessages(Protocol):
    """The messages that are driven."""

    def turn(self, deadline: float | None, *, spins: bool = False) -> None:
        """Wait for events until the deadline, and handle them; without the lock."""

    def has_more(self) -> bool:
        """Tell whether a thread has to drive even if none waits."""

    def flush(self) -> None:
        """Give the kernel what it takes of what was sent; without the lock."""

    def fail_all(self, error: BaseException) -> None:
        """Fail all messages; without the lock."""


class DrivingThread:
    """The thread that drives one messenger, and the threads that wait to drive.

    Methods get the messages as an argument: an attribute would be a reference cycle, but a group that is dropped must
    be freed at once. Callers of `hand_over`, `call_background`, `ring`, `stop` and `close` hold the lock.
    """

    def __init__(self, lock: MessengerLock, name: str, *, may_spin: bool) -> None:
        self._lock, self._name, self._may_spin = lock, name, may_spin
        self._freed = threading.Condition(cast("Any", lock))
        """Notified for waiting threads: a work ended, or no thread drives."""
        self._needed = threading.Condition(cast("Any", lock))
        """Notified for the background thread: it may have to drive."""
        self.driver: int | None = None
        """The thread that drives, if one does."""
        self._waiters = 0
        """The number of threads that wait to drive, or for their work to end."""
        self._thread: threading.Thread | None = None
        self.is_stopping = False
        """Whether no thread may begin to drive any more."""
        self._bell, self._bell_rope = (track(end) for end in socket.socketpair())
        self._close_bell = weakref.finalize(self, _close_sockets, self._bell, self._bell_rope)
        for end in (self._bell, self._bell_rope):
            end.setblocking(False)
        self.bell_fd = self._bell.fileno()
        """A descriptor for the driving thread to poll: readable after `ring`, until `hush`."""

    @property
    def is_idle(self) -> bool:
        """Whether no thread drives or waits to, and one may. With the lock."""
        return self.driver is None and not self._waiters and not self.is_stopping

    @property
    def is_here(self) -> bool:
        """Whether the calling thread drives."""
        return self.driver == threading.get_ident()

    def drive(self, messages: DrivenMessages, work: Work[Any], deadline: float | None) -> None:
        """Make progress on this thread until `work` is done or the deadline has passed."""
        this_thread = threading.get_ident()
        while not work.has_ended:
            with self._lock:
                self._waiters += 1
                try:
                    while not self._may_drive(this_thread) and not work.has_ended:
                        self.ring()  # so that the background thread steps aside
                        if not self._freed.wait(left(deadline)):
                            break
                finally:
                    self._waiters -= 1
                may_drive = self._may_drive(this_thread)
                was_driving = self.driver == this_thread  # this is a callback that waits for another work
                if may_drive:
                    self.driver = this_thread
            try:
                while may_drive and not work.has_ended and not self.is_stopping:
                    messages.turn(deadline, spins=self._may_spin)
                    if left(deadline) == 0:
                        break
            finally:
                with self._lock:
                    if may_drive and not was_driving:
                        self.driver = None
                    self.hand_over(messages)
            if left(deadline) == 0:
                return

    def _may_drive(self, thread: int) -> bool:
        return self.driver in (None, thread) and not self.is_stopping

    def turn_once(self, messages: DrivenMessages) -> bool:
        """Handle what has arrived, on this thread and without waiting; False if another thread drives."""
        with self._lock:
            if self.driver is not None or self.is_stopping:
                return False
            self.driver = threading.get_ident()
        try:
            messages.turn(time.monotonic())
        finally:
            with self._lock:
                self.driver = None
                self.hand_over(messages)
        return True

    def hand_over(self, messages: DrivenMessages) -> None:
        """If no thread drives, let a waiting one drive, or the background thread if there is something to do."""
        if self.driver is None:
            if self._waiters or self.is_stopping:
                self._freed.notify_all()
            elif messages.has_more():
                self.call_background(messages)

    def call_background(self, messages: DrivenMessages) -> None:
        """Let the background thread drive while no other thread does; start it if need be."""
        if self._thread is None and not self.is_stopping:
            self._thread = threading.Thread(
                target=self._run_background, args=(messages,), name=f"{self._name} messages", daemon=True
            )
            self._thread.start()
        self._needed.notify()

    def _run_background(self, messages: DrivenMessages) -> None:
        while True:
            with self._lock:
                while not self.is_stopping and (self.driver is not None or self._waiters or not messages.has_more()):
                    if not self._needed.wait(IDLE_DRIVER_SECONDS) and not messages.has_more():
                        self._thread = None  # `call_background` starts another
                        return
                if self.is_stopping:
                    return
                self.driver = threading.get_ident()
            try:
                while messages.has_more() and not self._waiters and not self.is_stopping:
                    messages.turn(None)
            except BaseException as error:  # no other thread would report it
                messages.fail_all(error)
            finally:
                with self._lock:
                    self.driver = None
                    self._freed.notify_all()

    def ring(self) -> None:
        """Wake the driving thread from its poll, unless it is the caller."""
        if self.driver not in (None, threading.get_ident()):
            with contextlib.suppress(BlockingIOError):  # it has been woken already
                self._bell_rope.send(b"!")

    def alarm(self) -> Callable[[], None]:
        """Return a function that makes the bell readable for any thread that polls it. It does not keep this object."""
        return functools.partial(_ring, self._bell_rope)

    def hush(self, descriptor: int) -> None:
        """Make the bell unreadable again, if `descriptor` is its own and not that of something closed meanwhile."""
        if descriptor == self._bell.fileno():
            self._bell.recv(4096)

    def works_ended(self) -> None:
        """Wake the threads that wait for a work, because some works have ended. Without the lock."""
        if self._waiters or self.driver not in (None, threading.get_ident()):
            with self._lock:
                self._freed.notify_all()
                self.ring()  # the driving thread's own work may be among them

    def stop(self) -> None:
        """Stop the driving thread, and drive on the calling one from now on."""
        self.is_stopping = True
        self._needed.notify_all()
        self.ring()
        while self.driver not in (None, threading.get_ident()):
            # The driving thread was woken and checks `is_stopping` after each poll. If it takes longer, it is in a
            # callback that does not return; when it does, it finds everything closed.
            if not self._freed.wait(STEP_ASIDE_SECONDS):
                break
        self.driver = threading.get_ident()

    def join_background(self) -> None:
        """Wait until the background thread has ended. Without the lock."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(STEP_ASIDE_SECONDS)

    def close(self) -> None:
        """Close the bell, and let the waiting threads go."""
        self._close_bell()
        self.driver = None
        self._freed.notify_all()


def _ring(rope: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the bell is readable already, or closed
        rope.send(b"!")


def _close_sockets(*sockets: socket.socket) -> None:
    for sock in sockets:
        sock.close()


def left(deadline: float | None) -> float | None:
    """Return the seconds until the deadline, not below 0; None if there is none."""
    return None if deadline is None else max(0.0, deadline - time.monotonic())
