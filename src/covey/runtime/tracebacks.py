"""Tracebacks of covey's errors that end at the user's own line.

A failed join passes through thirty frames of threads, futures and coroutines that do not help the author of a script.
When an exception ends the program, covey's own frames are left out of the tracebacks of covey's errors and of
KeyboardInterrupt, together with the exceptions that covey caught on the way. Under `covey run`, which passes Ctrl-C on
to all ranks, each shows one line instead of a traceback. Other exceptions are shown whole, since they may be faults in
covey. COVEY_DEBUG=1 shows everything.

This is done when the interpreter shows the exception, not where it is raised: a program that catches it sees it whole,
with its `__cause__`, and collectives are not slowed down.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import TYPE_CHECKING, Final

from covey.base.errors import CoveyError

if TYPE_CHECKING:
    from types import TracebackType

_PACKAGE: Final = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
_LIBRARY: Final = os.path.join(os.path.dirname(os.path.abspath(os.__file__)), "")
_INSTALLED: Final = (os.path.join(_LIBRARY, "site-packages", ""), os.path.join(_LIBRARY, "dist-packages", ""))
_KEEPERS: Final = frozenset({"COVEY_KEEPER", "COVEY_KEEPER_ID"})
"""Variables of processes that `covey run` has started."""
_IS_NAMED: Final = "_covey_named_the_wait"


def is_debugging() -> bool:
    """Tell whether COVEY_DEBUG=1 asks for whole tracebacks, and for what else finds faults."""
    return os.environ.get("COVEY_DEBUG") == "1"


def install() -> None:
    """Shorten exceptions that end the program or a thread before the current hooks show them. Idempotent."""
    if getattr(sys.excepthook, "_is_of_covey", False):
        return
    show, show_of_thread = sys.excepthook, threading.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if not is_debugging():
            error.__traceback__ = traceback
            shorten(error)
            traceback = error.__traceback__
            if isinstance(error, KeyboardInterrupt) and not _KEEPERS.isdisjoint(os.environ):
                print(_interrupted(error), file=sys.stderr)
                return
        show(kind, error, traceback)

    def thread_excepthook(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None and not is_debugging():
            shorten(args.exc_value)
            args = threading.ExceptHookArgs((args.exc_type, args.exc_value, args.exc_value.__traceback__, args.thread))
        show_of_thread(args)

    excepthook._is_of_covey = True  # type: ignore[attr-defined]
    sys.excepthook, threading.excepthook = excepthook, thread_excepthook


def _interrupted(interrupt: KeyboardInterrupt) -> str:
    """Return where Ctrl-C reached a rank, in one line: each of the ranks shows one, and all of them for one reason."""
    if _IS_NAMED in vars(interrupt):
        return str(interrupt)
    last = interrupt.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None:
        return "interrupted"
    code = last.tb_frame.f_code
    where = f"{os.path.basename(code.co_filename)}, line {last.tb_lineno}"
    return f"interrupted in {where}" + (f" ({code.co_qualname})" if code.co_name != "<module>" else "")


def name_wait(interrupt: KeyboardInterrupt, waited_for: str) -> None:
    """Set the message of a KeyboardInterrupt to what it interrupted; under `covey run`, only that line is shown."""
    interrupt.args = (f"interrupted while waiting for {waited_for}",)
    vars(interrupt)[_IS_NAMED] = True


def shorten(error: BaseException) -> None:
    """Remove covey's frames, and exceptions that covey caught, from an exception that is about to be shown.

    Changes the exception, its causes and its contexts.
    """
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        following = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
        if isinstance(current, CoveyError | KeyboardInterrupt):
            is_named = _IS_NAMED in vars(current)  # came in covey's own wait, whatever covey was calling there
            if following is not None and (is_named or _is_internal(following)):
                current.__cause__, following = None, None  # this suppresses the context, too
            current.__traceback__ = without_covey(current.__traceback__, below=not is_named)
        current = following


def _is_internal(error: BaseException) -> bool:
    """Tell whether covey caught this exception and replaced it by another.

    A traceback begins in the frame that caught the exception. A CoveyError that is the documented cause of another one
    is not internal.
    """
    caught_by = error.__traceback__
    return not isinstance(error, CoveyError) and (caught_by is None or _is_in_covey(caught_by))


def without_covey(traceback: TracebackType | None, *, below: bool = True) -> TracebackType | None:
    """Return a traceback without covey's frames and what they call in Python's library, or in code without a file.

    Frames of torch that lead to covey's are left out, too. Frames of other code below covey's stay if `below`: there,
    covey has called a function of the user.
    """
    kept: list[TracebackType] = []
    is_below = False
    current = traceback
    while current is not None:
        if _is_in_covey(current):
            is_below = True
            while kept and _is_in_torch(kept[-1]):
                kept.pop()
        elif not (is_below and (not below or _is_in_library(current))):
            is_below = False
            kept.append(current)
        current = current.tb_next
    following: TracebackType | None = None
    for each in reversed(kept):
        each.tb_next, following = following, each
    return following


def _is_in_covey(traceback: TracebackType) -> bool:
    return os.path.abspath(traceback.tb_frame.f_code.co_filename).startswith(_PACKAGE)


def _is_in_torch(traceback: TracebackType) -> bool:
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    return torch is not None and traceback.tb_frame.f_code.co_filename.startswith(os.path.dirname(torch) + os.sep)


def _is_in_library(traceback: TracebackType) -> bool:
    name = traceback.tb_frame.f_code.co_filename
    return name.startswith("<") or (name.startswith(_LIBRARY) and not name.startswith(_INSTALLED))


def stacks() -> str:
    """Return where each thread of this process is, except the calling one."""
    import traceback  # most processes never need it

    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = [each for each in sorted(sys._current_frames().items()) if each[0] != threading.get_ident()]
    return "\n".join(
        f"{names.get(ident, 'unknown')} ({ident}):\n{''.join(traceback.format_stack(frame))}" for ident, frame in frames
    )
