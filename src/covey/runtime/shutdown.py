"""Orderly shutdown: what a program wants to be called before its process ends, last added first, each with a deadline.

Calls of other nodes come first: new ones are refused, and those that have begun get time to finish. Then the closers
run, and after them the groups are closed, by the program or at the end of the process.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` takes ten times as long: it turns numbers into enums
import atexit
import contextlib
import logging
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar, overload

from covey.base.config import check_timeout
from covey.runtime.counters import process

if TYPE_CHECKING:
    from collections.abc import Callable

F = TypeVar("F", bound="Callable[[], object]")

logger = logging.getLogger("covey")

CLOSER_SECONDS: Final = 10.0
"""How long a closer may take, unless the program says otherwise."""
CALLS_SECONDS: Final = 10.0
"""How long calls of other nodes that have begun may take."""
WRITE_SECONDS: Final = 0.05
"""How long another thread waits for a stream before it counts as being written to."""
POSTPONED_SECONDS: Final = 0.01
MOST_POSTPONED: Final = 20
"""How often a signal comes back that interrupts writing: the reader of the stream may be stuck."""


class _Closer(NamedTuple):
    function: Callable[[], object]
    timeout: float


class _Closers:
    """The closers of this process."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal may interrupt the thread that holds it
        self._closers: list[_Closer] = []
        self._runner = 0
        """The thread that runs them; 0 if none does."""
        self._threads: set[int] = set()
        """The threads of closers that run."""
        self._ended = threading.Event()
        self._longest = 0.0
        """How long they can take."""
        self.is_running = False
        """Whether the process shuts down. It stays so."""

    def add(self, function: Callable[[], object], timeout: float) -> None:
        """Run a function at the shutdown, before those that were added earlier."""
        with self._lock:
            self._closers.append(_Closer(function, timeout))

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to run."""
        return not self._closers

    def run(self) -> None:
        """Run all closers. A second call waits for the first, unless it comes from a closer or the same thread."""
        here = threading.get_ident()
        with self._lock:
            if not self._runner:
                self._runner, self.is_running = here, True
                closers, self._closers = self._closers[::-1], []
                self._longest = CALLS_SECONDS + sum(closer.timeout for closer in closers) + 1.0
                self._ended.clear()
                is_first = True
            else:
                is_first = False
        if not is_first:
            if here != self._runner and here not in self._threads:
                self._ended.wait(self._longest)
            return
        try:
            _drain_calls()
            for closer in closers:
                self._run_one(closer)
        finally:
            self._runner = 0
            self._ended.set()

    def _run_one(self, closer: _Closer) -> None:
        name = getattr(closer.function, "__qualname__", repr(closer.function))

        def run() -> None:
            self._threads.add(threading.get_ident())
            try:
                closer.function()
            except BaseException:  # also sys.exit: the others must run
                logger.exception("%s failed while the process was shut down", name)
            finally:
                self._threads.discard(threading.get_ident())

        thread = threading.Thread(target=run, name="covey-shutdown", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # Python starts no threads any more: it ends
            run()
            return
        thread.join(closer.timeout)
        if thread.is_alive():
            logger.warning("%s did not end within %g s; the shutdown continues without it", name, closer.timeout)


_closers = _Closers()


@overload
def on_shutdown(function: F, *, timeout: float = CLOSER_SECONDS) -> F: ...


@overload
def on_shutdown(function: None = None, *, timeout: float = CLOSER_SECONDS) -> Callable[[F], F]: ...


def on_shutdown(function: Any = None, *, timeout: float = CLOSER_SECONDS) -> Any:
    """Call a function once before this process ends: at SIGTERM, at Ctrl-C, at its normal end, or in `shutdown`.

    Functions are called in the reverse order, each on a thread of its own; the next one follows when it has returned,
    or after `timeout` seconds. Before them, calls of other nodes are refused, and those that have begun finish; groups
    are closed after them. A program that handles SIGTERM or SIGINT itself keeps its handler, and calls `shutdown`.
    After SIGTERM the exit code is 143, so that a scheduler does not take the job for finished.

    Also a decorator: `@covey.on_shutdown`, or `@covey.on_shutdown(timeout=60)`.
    """
    seconds = check_timeout(timeout)

    def add(function: F) -> F:
        _closers.add(function, seconds)
        _handle_signals()
        arm()
        return function

    return add if function is None else add(function)


def shutdown() -> None:
    """Run the functions of `on_shutdown` now, each once. A call from another thread waits until they have run."""
    _closers.run()


def is_shutting_down() -> bool:
    """Tell whether the shutdown of this process has begun."""
    return _closers.is_running


def raise_or_exit(error: Exception) -> None:
    """Raise an error; if the program has ended, write it, and let the process end with exit code 1.

    After the end of a program an exception is not raised anywhere, and the process would end with exit code 0.
    """
    global _has_failed
    if threading.main_thread().is_alive():
        raise error
    _has_failed = True
    print(f"covey.{type(error).__name__}: {error}", file=sys.stderr, flush=True)


_has_failed = False


def _exit_as_failed() -> None:
    """End the process with exit code 1, if the program failed after its end. One of the last functions at exit."""
    if _has_failed:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # replaced by the program, or closed
                stream.flush()
        os._exit(1)


atexit.register(_exit_as_failed)


def arm() -> None:
    """Let the closers run before the handlers of `atexit` that were registered until now, such as that of a group."""
    if not _closers.is_empty:
        atexit.unregister(shutdown)
        atexit.register(shutdown)


def signalled(signum: int, _frame: object) -> None:
    """Shut down because of a signal, and end the program. A second Ctrl-C ends it at once."""
    is_first = not _closers.is_running
    if is_first and _postponed < MOST_POSTPONED and _is_writing():
        _postpone(signum)
        return
    if is_first:
        logger.info("%s: shutting down", "SIGINT" if signum == _signal.SIGINT else "SIGTERM")
        shutdown()
    if signum == _signal.SIGINT:
        raise KeyboardInterrupt
    if is_first:
        raise SystemExit(128 + signum)


_postponed = 0


def _postpone(signum: int) -> None:
    """Get the signal again in a moment: it has interrupted the main thread while that was writing.

    The closers, which run on other threads while the main thread waits for them, could not write anything.
    """
    global _postponed
    _postponed += 1

    def send() -> None:
        time.sleep(POSTPONED_SECONDS)
        _signal.pthread_kill(threading.main_thread().ident, signum)

    threading.Thread(target=send, name="covey-shutdown", daemon=True).start()


def _is_writing() -> bool:
    """Tell whether a thread, such as this one, is about to write to a standard stream or to a log."""

    def try_locks() -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # replaced by the program, or closed
                stream.buffer.write(b"")
        for handler in (*logging.root.handlers, *logger.handlers):
            if handler.lock is not None:
                with handler.lock:
                    pass

    thread = threading.Thread(target=try_locks, name="covey-shutdown", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # Python starts no threads any more: it ends
        return False
    thread.join(WRITE_SECONDS)
    return thread.is_alive()


def _handle_signals() -> None:
    """Handle SIGTERM and SIGINT, unless the program does. Python can set handlers on its main thread only."""
    if threading.current_thread() is threading.main_thread():
        for signum, usual in ((_signal.SIGTERM, _signal.SIG_DFL), (_signal.SIGINT, _signal.default_int_handler)):
            if _signal.getsignal(signum) == usual:
                _signal.signal(signum, signalled)


def _drain_calls() -> None:
    """Refuse new calls of other nodes, and wait for those that have begun."""
    until = time.monotonic() + CALLS_SECONDS
    waiting = [node.calls for node in list(process.nodes) if node.calls is not None]
    for calls in waiting:
        calls.drain()
    while waiting and time.monotonic() < until:
        waiting = [calls for calls in waiting if calls.is_busy]
        if waiting:
            time.sleep(0.01)


def _forked() -> None:
    global _closers
    _closers = _Closers()  # they are the parent's


os.register_at_fork(after_in_child=_forked)
