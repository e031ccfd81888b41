"""A run on several machines, attended from one terminal: its output, Ctrl-C, and its exit code.

Each machine has a share of the run. A share reports on a thread of its own; this module reads the reports of all of
them on the main thread, which has the signals.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
import time
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from covey.net.host.saved_runs import STOPPED_BY
from covey.runtime.keeper.supervisor import stopping_text
from covey.runtime.loop import LOOK_UP_EVERY
from covey.runtime.processes import signal_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from covey.agent.screen import Screen

FAILURE_SECONDS: Final = 2.0
"""How long the others may take to notice a failure by themselves, before they are stopped."""
BACKLOG_REPORTS: Final = 64
"""Reports of one share that wait to be shown; then the share waits."""
KILLS: Final = 2
"""Ctrl-C that are passed on; with the next one the terminal leaves."""
SIGNALLED: Final = 128
"""Exit codes above this mean a signal."""
FORWARDED_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Printed(NamedTuple):
    """A program has written something."""

    stream: int
    data: bytes


class ShareEnded(NamedTuple):
    """A program has ended."""

    code: int
    why: str = ""
    """What to show, if it did not end by itself."""
    is_lost: bool = False
    """Whether its machine was lost: the run may continue without it, as it does without a rank."""


class Said(NamedTuple):
    """Something about a share that is worth a line."""

    text: str


Report = Printed | ShareEnded | Said


class Share(Protocol):
    """The part of a run on one machine."""

    @property
    def name(self) -> str:
        """The machine."""

    def run(self, report: Callable[[Report], None]) -> None:
        """Report until the program has ended; `ShareEnded` comes last. On a thread of its own."""

    def send_signal(self, signum: int) -> None:
        """Pass a signal on. On a thread of its own."""


def failure_code(codes: Sequence[int]) -> int:
    """Return the exit code of a run, from those of the machines where it failed, in order; 0 if there are none.

    Ranks that lose a peer end with an exception, and so with 1. The failure that caused it may be reported after
    theirs, so another code takes precedence.
    """
    return next((code for code in codes if code != 1), codes[0] if codes else 0)


class SharedRun:
    """The shares of one run."""

    def __init__(self, shares: Sequence[Share], screen: Screen, goes_on: Callable[[], bool]) -> None:
        """`goes_on` tells whether the nodes of the run go on after a failure: then the others are not stopped."""
        self._shares, self._screen, self._goes_on = shares, screen, goes_on
        self._reports: queue.SimpleQueue[tuple[int, Report] | None] = queue.SimpleQueue()
        """The number of a share and its report; None after a signal: handlers may put into a queue of this kind."""
        self._arrived: list[int] = []
        """Signals that have come."""
        screen.while_waiting = self._react
        self._room = [threading.Semaphore(BACKLOG_REPORTS) for _ in shares]
        self._alive = dict(enumerate(shares))
        self._told: int | None = None
        """The first signal that came."""
        self._interrupts = 0
        self._codes: list[int] = []
        """The exit codes of failures, in the order of their reports, except of programs that were stopped from here."""
        self._lost: dict[str, int] = {}
        """Exit codes of machines that were lost, until another one finishes: then the run continued without them."""
        self._has_stopped = False
        self._has_finished = False
        self._stop_at: float | None = None
        self.reason = ""
        """Why it ended, if not by itself."""

    def attend(self) -> int:
        """Show the output until all programs have ended, and return the exit code; on the main thread, pass signals on.

        The code is `failure_code`, or 128 and the number of a signal that came here.
        """
        with self._signals():
            for number, share in enumerate(self._shares):
                reporter, name = self._reporter(number), f"covey-share-{number}"
                threading.Thread(target=share.run, args=(reporter,), name=name, daemon=True).start()
            while self._alive:
                wait = LOOK_UP_EVERY  # a signal that another thread gets does not end the wait
                if self._stop_at is not None:
                    wait = max(0.0, min(wait, self._stop_at - time.monotonic()))
                with contextlib.suppress(queue.Empty):
                    self._take(self._reports.get(timeout=wait))
                self._react()
                if self._interrupts > KILLS:
                    return 128 + signal.SIGINT
                if self._stop_at is not None and time.monotonic() >= self._stop_at:
                    self._stop_others()
        if self._told is not None and (self._told != signal.SIGTERM or not (self._has_finished or self._codes)):
            return 128 + self._told
        return failure_code([*self._lost.values(), *self._codes])

    def _reporter(self, number: int) -> Callable[[Report], None]:
        def report(what: Report) -> None:
            self._room[number].acquire()
            self._reports.put((number, what))

        return report

    def _take(self, report: tuple[int, Report] | None) -> None:
        match report:
            case (number, what):
                self._room[number].release()
                share = self._shares[number]
                match what:
                    case Printed(stream, data):
                        self._screen.show(share.name, stream, data)
                    case Said(text):
                        self._screen.note(f"{share.name}: {text}")
                    case ShareEnded():
                        self._screen.ended(share.name)
                        self._on_end(number, what)

    def _react(self) -> None:
        """Pass on the signals that have come; also while the terminal takes no output."""
        while self._arrived:
            signum = self._arrived.pop(0)
            self._interrupts += signum == signal.SIGINT
            is_first, self._told = self._told is None, self._told or signum
            if is_first or signum == signal.SIGINT:
                self._send(signum)
            if self._interrupts > KILLS:
                self._screen.close()
            elif is_first:
                self.reason = f"{STOPPED_BY}{signal_name(signum)}"
                self._screen.note_for_all(stopping_text(signum))

    def _on_end(self, number: int, ended: ShareEnded) -> None:
        code, why, is_lost = ended
        del self._alive[number]
        name = self._shares[number].name
        if code == 0:
            self._has_finished = True
            if self._lost and not self._has_stopped:
                self._screen.note(f"the run finished without {', '.join(self._lost)}")
                self._lost.clear()
            return
        if is_lost:
            self._lost[name] = code
        elif not self._has_stopped:
            self._codes.append(code)
        if self._told is None and self._alive and self._stop_at is None:
            self._stop_at = time.monotonic() + FAILURE_SECONDS
        if not why and code >= SIGNALLED and self._told is None and not self._has_stopped:
            why = f"covey run was ended by {signal_name(code - SIGNALLED)}"  # all other ends it has explained itself
        self.reason = self.reason or f"{name} {why or f'ended with exit code {code}'}"
        if why:
            self._screen.note(f"{name}: {why}")

    def _stop_others(self) -> None:
        self._stop_at = None
        if self._told is not None or not self._alive:
            return
        if self._goes_on():
            self._stop_at = time.monotonic() + 5 * FAILURE_SECONDS
            return
        self._has_stopped = True
        self._screen.note(f"stopping {', '.join(share.name for share in self._alive.values())}")
        self._send(signal.SIGTERM)

    def _send(self, signum: int) -> None:
        for share in self._alive.values():
            threading.Thread(target=share.send_signal, args=(signum,), name="covey-signal", daemon=True).start()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        def note(signum: int, _: object) -> None:
            self._arrived.append(signum)
            self._reports.put(None)

        with contextlib.ExitStack() as stack:
            for signum in FORWARDED_SIGNALS if threading.current_thread() is threading.main_thread() else ():
                if signal.getsignal(signum) != signal.SIG_IGN:
                    stack.callback(signal.signal, signum, signal.signal(signum, note))
            yield
