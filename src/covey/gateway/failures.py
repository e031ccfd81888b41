"""What a program is told when a call fails: a gRPC status, a text, and details that a program can read.

The details are trailing metadata, as text, by the names below. A status alone says what to do about the call, and
`covey-group` whether the rank can make further ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from covey.base.errors import (
    AuthError,
    BusyError,
    CancelledError,
    ClosedError,
    ConfigError,
    ConnectError,
    CoveyError,
    DeadlineError,
    GroupChangedError,
    MismatchError,
    PeerLostError,
    QuorumLostError,
    Remedy,
)
from covey.base.text import CUT, printable
from covey.coordinator.refusal import RefusalError

if TYPE_CHECKING:
    from collections.abc import Sequence

ERROR_KEY: Final = "covey-error"
"""The class of covey's error, such as PeerLostError; RefusalError if the gateway itself refuses the call."""
REMEDY_KEY: Final = "covey-remedy"
"""FIX, RETRY, REGROUP or STOP, as for covey's own errors."""
RANKS_KEY: Final = "covey-ranks"
"""The ranks that were lost, that are late or missing, as "1,3"."""
GROUP_KEY: Final = "covey-group"
"""`open` if the rank can make further calls, `over` if its group has ended, `none` if the program has no rank."""
STATUS_TEXT_LIMIT: Final = 4000
"""Bytes of a status as gRPC encodes it; HTTP/2 takes 8 KiB of metadata."""

STATUSES: Final[tuple[tuple[type[Exception], str], ...]] = (
    (ConfigError, "INVALID_ARGUMENT"),
    (MismatchError, "FAILED_PRECONDITION"),
    (BusyError, "FAILED_PRECONDITION"),
    (AuthError, "PERMISSION_DENIED"),
    (DeadlineError, "DEADLINE_EXCEEDED"),
    (PeerLostError, "ABORTED"),
    (GroupChangedError, "ABORTED"),
    (QuorumLostError, "ABORTED"),
    (ClosedError, "ABORTED"),
    (CancelledError, "CANCELLED"),
    (ConnectError, "UNAVAILABLE"),
    (CoveyError, "INTERNAL"),
    (MemoryError, "RESOURCE_EXHAUSTED"),
)
"""The status of each error; the first that fits."""


class FailedCall(NamedTuple):
    """What a program is told of an error."""

    status: str
    """The name of a gRPC status."""
    text: str
    details: tuple[tuple[str, str], ...]


def failure_of(error: Exception, group: str) -> FailedCall:
    """Return what to tell of an error; `group` is the value of `covey-group`."""
    if isinstance(error, RefusalError):
        status, remedy = error.reason.value, Remedy.FIX
    else:
        status = next((name for kind, name in STATUSES if isinstance(error, kind)), "INTERNAL")
        remedy = error.remedy if isinstance(error, CoveyError) else Remedy.STOP
    details = [(ERROR_KEY, type(error).__name__), (REMEDY_KEY, remedy.name), (GROUP_KEY, group)]
    if ranks := _ranks(error):
        details.append((RANKS_KEY, ",".join(map(str, ranks))))
    return FailedCall(status, _cut(printable(str(error) or type(error).__name__, STATUS_TEXT_LIMIT)), tuple(details))


def _cut(text: str) -> str:
    """Return as much of a text as fits into a status, in which every byte that is no plain letter takes three."""
    size = len(CUT)
    for at, letter in enumerate(text):
        size += 1 if " " <= letter <= "~" and letter != "%" else 3 * len(letter.encode())
        if size > STATUS_TEXT_LIMIT:
            return text[:at] + CUT
    return text


def _ranks(error: Exception) -> Sequence[int]:
    if isinstance(error, PeerLostError):
        return (error.rank,) if error.rank >= 0 else ()
    if isinstance(error, DeadlineError):
        return error.late
    return error.missing if isinstance(error, QuorumLostError) else ()
