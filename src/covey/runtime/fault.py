"""Why a group ended, in a form that can be sent to its other ranks: the first failure, or the error of a program."""

from __future__ import annotations

import sys
from typing import Final, NamedTuple

from covey.base.errors import (
    ClosedError,
    CoveyError,
    DeadlineError,
    GroupChangedError,
    MismatchError,
    PeerLostError,
    QuorumLostError,
    RemoteProtocolError,
    SplitRunError,
)
from covey.base.numbers import NO_RANK, REASON_LIMIT, Rank
from covey.base.text import printable

_ERRORS_OF_TEXT: Final[dict[str, type[CoveyError]]] = {
    kind.__name__: kind for kind in (ClosedError, GroupChangedError, MismatchError, RemoteProtocolError, SplitRunError)
}


class Fault(NamedTuple):
    """A failure of a group."""

    kind: str
    """The name of the error class; an unknown name becomes a PeerLostError."""
    text: str
    ranks: tuple[Rank, ...] = ()
    """The lost or late ranks."""

    def error(self, *, rank: Rank, host: str, operation: str, sequence: int, group: str) -> CoveyError:
        """Return the error to raise on `rank`, where `operation` met the fault; `host` is that of the lost rank."""
        if self.kind == "DeadlineError":
            return DeadlineError(self.text, late=self.ranks)
        if self.kind == "QuorumLostError":
            return QuorumLostError(self.text, missing=self.ranks)
        if self.kind in _ERRORS_OF_TEXT:
            return _ERRORS_OF_TEXT[self.kind](self.text)
        text = f"{self.text} (noticed by rank {rank} in {operation}, operation {sequence} of group {group!r})"
        return PeerLostError(text, rank=self.culprit, host=host, operation=operation, sequence=sequence)

    @property
    def culprit(self) -> Rank:
        """The first lost or late rank, or -1."""
        return self.ranks[0] if self.ranks else NO_RANK


def ending_error() -> BaseException | None:
    """Return the uncaught exception that ends this program, if one does.

    The interpreter has set `sys.last_value` before it calls `atexit` handlers. At an interactive prompt such an error
    does not end the program.
    """
    error = getattr(sys, "last_value", None)
    return error if isinstance(error, BaseException) and not hasattr(sys, "ps1") else None


def is_failure(error: BaseException | None) -> bool:
    """Tell whether a program that ends with this exception has failed."""
    return error is not None and not (isinstance(error, SystemExit) and error.code in (None, 0))


def describe(error: BaseException) -> str:
    """Return the kind of an error and the first line of its message, bounded and printable."""
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return f"exit code {error.code}"
    try:
        lines = str(error).strip().splitlines()
    except Exception:  # __str__ of the program's own class
        lines = []
    name = type(error).__name__
    return printable(f"{name}: {lines[0]}" if lines else name, REASON_LIMIT)
