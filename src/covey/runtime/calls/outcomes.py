"""From what ends a call to what its caller gets, and from an exception to what travels."""

from __future__ import annotations

import traceback
from typing import Final

from covey.base.errors import (
    CallCancelledError,
    CallRefusedError,
    ClosedError,
    CoveyError,
    DeadlineError,
    RemoteCallError,
)
from covey.base.text import printable, spell_error
from covey.wire import calls as wire

_TEXT_LIMIT: Final = 4000
_LINE_LIMIT: Final = 300


def failure_error(failure: wire.CallFailure, what: str, rank: int) -> CoveyError:
    """Return the error that a failure of the other node becomes; `what` describes the call."""
    match failure.kind:
        case wire.RAISED:
            text = (
                f"{what} raised {failure.error}: {failure.text}" if failure.text else f"{what} raised {failure.error}"
            )
            trace = "\n".join(failure.traceback)
            error = RemoteCallError(text, type=failure.error, text=failure.text, traceback=trace, peer=rank)
            if trace:
                error.add_note(f"The traceback on rank {rank}:\n{trace}")
            return error
        case wire.LATE:
            return DeadlineError(f"{what} reached its timeout there: {failure.text}", late=(rank,))
        case wire.CANCELLED:
            return CallCancelledError(f"{what}: {failure.text}")
        case wire.CLOSING:
            return ClosedError(f"{what}: {failure.text}")
    return CallRefusedError(f"{what}: {failure.text}")


class UnservedError(Exception):
    """A call has no result, for this reason: `kind` is one of those of `wire.calls`."""

    def __init__(self, kind: int, text: str) -> None:
        super().__init__(text)
        self.kind = kind


def failure_of(number: int, error: BaseException) -> wire.CallFailure:
    """Return the failure that tells a caller what was raised instead of a result, whatever it is."""
    if isinstance(error, UnservedError):
        return wire.CallFailure(number, error.kind, "", str(error))
    try:
        return _raised(number, error)
    except BaseException:  # the exception's own code raises: `__str__`, a metaclass, a line of the source that is gone
        return wire.CallFailure(number, wire.RAISED, type(error).__name__, spell_error(error))


def _raised(number: int, error: BaseException) -> wire.CallFailure:
    """Return the failure for an exception of a function, without the frames of covey."""
    trace = error.__traceback__
    while trace is not None and _is_ours(trace.tb_frame.f_code.co_filename) and trace.tb_next is not None:
        trace = trace.tb_next
    lines = [
        printable(line, _LINE_LIMIT)
        for text in traceback.format_exception(type(error), error, trace)
        for line in text.splitlines()
    ]
    kind = type(error)
    name = (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )
    return wire.CallFailure(
        number, wire.RAISED, name[:200], printable(str(error), _TEXT_LIMIT), tuple(lines[-wire.LINES_LIMIT :])
    )


_OURS: Final = __file__.rpartition("calls")[0] + "calls"


def _is_ours(path: str) -> bool:
    return path.startswith(_OURS)


def too_large(number: int, what: str, size: int, limit: int) -> wire.CallFailure:
    """Return the failure that tells a caller that what its function made is too large."""
    text = f"{what} has {size} bytes, and a call may carry {limit}; send it in pieces, or set COVEY_CALL_BYTES"
    return wire.CallFailure(number, wire.TOO_LARGE, "", text)
