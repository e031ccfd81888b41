"""What came of a call in the process of a rank: its result, or its exception as another process can raise it."""

from __future__ import annotations

import contextlib
import pickle
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from covey.base.errors import ClosedError, ConnectError, PeerLostError, RankFailedError
from covey.runtime import tracebacks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SYMPTOMS: Final = (PeerLostError, ClosedError, ConnectError)
"""Errors that ranks raise because another rank failed; any other error explains more."""


@dataclass(frozen=True)
class CallReport:
    """The result of a rank's call."""

    ok: bool
    body: bytes
    """The pickled result or exception; empty when the exception cannot be pickled."""
    text: str = ""
    """The traceback."""

    def failure(self, rank: int, size: int) -> BaseException | None:
        """Return the exception of the call, with a note that names its rank; None if the call succeeded."""
        if self.ok:
            return None
        try:
            error = _unpack(self.body)
        except Exception:
            return RankFailedError(f"rank {rank} of {size} failed:\n{self.text}", rank=rank)
        error.add_note(f"raised in rank {rank} of {size}\n\n{self.text}")
        return error


def report_of(call: Callable[[], bytes], dumps: Callable[[object], bytes] = pickle.dumps) -> CallReport:
    """Call `call`, which returns a pickled result, and report what came of it; `dumps` pickles an exception."""
    try:
        return CallReport(ok=True, body=call())
    except BaseException as error:
        body = _pack(error, dumps)
        for _ in range(2):  # without the frames of this function and of `call`
            if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
                error.__traceback__ = error.__traceback__.tb_next
        if not tracebacks.is_debugging():
            tracebacks.shorten(error)
        return CallReport(ok=False, body=body, text="".join(traceback.format_exception(error)).rstrip())


def most_telling(failures: Sequence[BaseException]) -> BaseException:
    """Return the earliest failure that is no consequence of another; the earliest if all may be."""
    return min(failures, key=lambda error: isinstance(error, SYMPTOMS))


def _pack(error: BaseException, dumps: Callable[[object], bytes]) -> bytes:
    """Return `error` pickled in a form that `_unpack` can read, or b"" if there is none."""
    if isinstance(error, Exception):  # SystemExit and KeyboardInterrupt would end the parent
        for form in (error, (type(error), error.args, error.__dict__)):
            with contextlib.suppress(Exception):
                body = dumps(form)
                _unpack(body)
                return body
    return b""


def _unpack(body: bytes) -> BaseException:
    form = pickle.loads(body)
    if isinstance(form, BaseException):
        return form
    kind, args, state = form  # an exception whose __init__ takes more than its args, which pickle cannot repeat
    error: BaseException = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error
