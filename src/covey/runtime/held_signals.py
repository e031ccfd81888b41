"""Holds back the program's signal handlers while a thread changes what other threads share.

Python runs handlers on the main thread, between any two steps of its code. One that raises, as that of Ctrl-C does,
would leave a half-read frame or a half-sent record behind.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` takes ten times as long: it turns numbers into enums
import threading
from typing import TYPE_CHECKING, Any, Final, Self

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

_SIGNALS: Final = (_signal.SIGINT, _signal.SIGTERM, _signal.SIGALRM)
"""Those whose handlers usually raise."""


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
