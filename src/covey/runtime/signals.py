"""Handlers for signals that a program does not handle itself, signals that a keeper waits for, and signals held back.

Python runs handlers on the main thread, between any two steps of its code. One that raises, as that of Ctrl-C does,
would leave a half-read frame or a half-sent record behind, so a thread that changes what others share holds them back.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` takes ten times as long: it turns numbers into enums
import contextlib
import threading
from typing import TYPE_CHECKING, Any, Final, Self

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator
    from types import FrameType

_SIGNALS: Final = (_signal.SIGINT, _signal.SIGTERM, _signal.SIGALRM)
"""Those whose handlers usually raise."""


def handle(signum: int, handler: Callable[[int, object], None]) -> None:
    """Call `handler` for a signal, unless the program handles or ignores that signal itself.

    Python can set signal handlers on its main thread only; on other threads this does nothing.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and _signal.getsignal(signum) == _signal.SIG_DFL and not _is_caught(signum):
        _signal.signal(signum, handler)


def _is_caught(signum: int) -> bool:
    """Tell whether the process has a handler that Python does not know, such as that of `faulthandler.register`."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        with open("/proc/self/status") as file:
            status = file.read().splitlines()
        caught = next(line for line in status if line.startswith("SigCgt:"))
        return bool(int(caught.split()[1], 16) & 1 << (signum - 1))
    return False


@contextlib.contextmanager
def signals_noted(arrived: list[int]) -> Iterator[socket.socket]:
    """Yield a socket that is readable once a signal has come; signals other than SIGCHLD are added to `arrived`."""
    import signal
    import socket

    def note(signum: int, _: object) -> None:
        if signum != signal.SIGCHLD:
            arrived.append(signum)

    with contextlib.ExitStack() as stack:
        wake, ring = (stack.enter_context(end) for end in socket.socketpair())
        wake.setblocking(False)
        ring.setblocking(False)
        stack.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(ring.fileno(), warn_on_full_buffer=False))
        for signum in (
            signal.SIGINT,
            signal.SIGTERM,
            signal.SIGHUP,
            signal.SIGTSTP,
            signal.SIGUSR1,
            signal.SIGUSR2,
            signal.SIGCHLD,
        ):
            # A signal that the parent set to be ignored (nohup, a background job) stays ignored.
            if signum == signal.SIGCHLD or signal.getsignal(signum) != signal.SIG_IGN:
                stack.callback(signal.signal, signum, signal.signal(signum, note))
        yield wake


class HeldSignals:
    """While it is entered on the main thread, signals are noted; their handlers run when it is left.

    On other threads it does nothing: no handler ever runs there.
    """

    __slots__ = ("_handlers", "_wake", "noted")

    def __init__(self, wake: Callable[[], None] | None = None) -> None:
        """`wake` is called when a signal was noted, to end a wait."""
        self._wake = wake
        self._handlers: list[tuple[int, Any]] = []
        self.noted: list[tuple[int, FrameType | None]] = []
        """The signals that have come, and the frames that they would have interrupted."""

    def __enter__(self) -> Self:
        if threading.get_ident() == threading.main_thread().ident:
            try:
                for number in _SIGNALS:
                    handler = _signal.getsignal(number)
                    if handler and callable(handler):  # 0 is the default action
                        self._handlers.append((number, handler))
                        _signal.signal(number, self._note)
            except BaseException:  # a handler that was not replaced yet has raised
                self.__exit__()
                raise
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.noted.append((number, frame))
        if self._wake is not None:
            self._wake()

    def __exit__(self, *_: object) -> None:
        if self._handlers:
            handlers = dict(self._handlers)
            for number, handler in self._handlers:
                _signal.signal(number, handler)
            for number, frame in self.noted:
                handlers[number](number, frame)
