"""Every error covey raises, each with its remedy.

CoveyError
├── ConfigError          a setting or an argument cannot work                  FIX
├── MismatchError        ranks called different operations                     FIX
├── BusyError            two threads used one group's collectives at once      FIX
├── AuthError            the other end did not prove that it may join          FIX
├── CancelledError       `Work.cancel` ended the operation                     RETRY
├── ConnectError         a rank could not be reached (a ConnectionError)       RETRY
├── DeadlineError        not finished in time (a TimeoutError)                 RETRY
├── PeerLostError        a rank that an operation needs was lost               REGROUP
├── GroupChangedError    the other members continue without this process       REGROUP
├── QuorumLostError      too few members remain to continue safely             REGROUP
├── SplitRunError        an older run of the same name exists                  STOP
├── ClosedError          the group was closed, revoked, or ended by a failure  REGROUP
├── CheckpointError      a checkpoint is not written, not there or damaged     STOP
├── RankFailedError      a launched process failed                             STOP
├── RemoteCallError      a function that was called on another node raised     STOP
├── CallRefusedError     a call between nodes cannot work                      FIX
├── CallCancelledError   a call was cancelled                                  RETRY
└── RemoteProtocolError  the other end broke the protocol                      STOP

What a group raises once it has ended: the operations that were waiting, and the first one that is issued afterwards,
raise the error that ended it. If its remedy is REGROUP (PeerLostError, GroupChangedError, QuorumLostError), every later
operation raises the same class with the same attributes: such an error is about the members, and still true. After a
failure of one operation (MismatchError, DeadlineError, RemoteProtocolError) every later one raises ClosedError, with
that failure as its `__cause__`: the same class would read as the outcome of the later operation, and a loop that tries
again after a DeadlineError would never end. A group that was closed or revoked raises ClosedError. The rule is the same
for blocking and asynchronous operations, for collectives and messages, and for groups made by `split`.
"""

from __future__ import annotations

import copy
import enum
from typing import Any, ClassVar, Self


class Remedy(enum.Enum):
    """What to do about an error."""

    FIX = "correct the call or the setting"
    RETRY = "try again, perhaps with more time"
    REGROUP = "make a new group of the remaining ranks"
    STOP = "stop and look at the cause"


class CoveyError(Exception):
    """Base of all errors raised by covey."""

    remedy: ClassVar[Remedy] = Remedy.STOP

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (type(self), self.args, self.__dict__)  # __init__ may need more than the message

    def again(self) -> Self:
        """Return the same error for another raise: one that is raised often keeps the frames of every raise."""
        made = copy.copy(self)
        made.__cause__ = self.__cause__
        return made


class ConfigError(CoveyError, ValueError):
    """A setting or an argument cannot work; the message says which and what to write instead."""

    remedy = Remedy.FIX


class MismatchError(CoveyError):
    """Ranks of one group called different operations, shapes, dtypes or roots; the message lists what each called."""

    remedy = Remedy.FIX


class BusyError(CoveyError):
    """Two threads issued collectives on one group at the same time. Give each thread a group: `group.split(0)`."""

    remedy = Remedy.FIX


class AuthError(CoveyError):
    """The other end did not prove that it knows the run's token, or belongs to another user."""

    remedy = Remedy.FIX


class CancelledError(CoveyError):
    """The program cancelled the operation with `Work.cancel`, a collective on some rank; nothing of it was sent."""

    remedy = Remedy.RETRY


class ConnectError(CoveyError, ConnectionError):
    """A rank could not be reached; the message says what was tried and for how long."""

    remedy = Remedy.RETRY


class DeadlineError(CoveyError, TimeoutError):
    """The operation did not finish within `timeout`; `late` lists the ranks it was waiting for."""

    remedy = Remedy.RETRY

    def __init__(self, message: str, *, late: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.late = late


class PeerLostError(CoveyError):
    """A rank that an operation needs was lost or left."""

    remedy = Remedy.REGROUP

    def __init__(self, message: str, *, rank: int, host: str = "", operation: str = "", sequence: int = 0) -> None:
        super().__init__(message)
        self.rank = rank
        """The lost rank, in the numbering of the group that raised this; -1 from a `recv` from any rank when no other
        rank remains."""
        self.host = host
        self.operation = operation
        self.sequence = sequence


class CheckpointError(CoveyError):
    """A checkpoint could not be written, there is no complete one, or its files are damaged."""

    remedy = Remedy.STOP

    def __init__(self, message: str, *, files: tuple[str, ...] = (), ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.files = files
        """The damaged files."""
        self.ranks = ranks
        """The ranks that could not write their part."""


class GroupChangedError(CoveyError):
    """The other members agreed to continue without this process; join again to be in the next generation."""

    remedy = Remedy.REGROUP


class QuorumLostError(CoveyError):
    """Too few members are connected to continue without the risk of a split; `missing` are the ranks not connected."""

    remedy = Remedy.REGROUP

    def __init__(self, message: str, *, missing: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.missing = missing


class SplitRunError(CoveyError):
    """This run met an older one of the same name, and ends. `saved` is the file with its state."""

    remedy = Remedy.STOP

    def __init__(self, message: str, *, saved: str = "") -> None:
        super().__init__(message)
        self.saved = saved
        """The file with the state that `group.restore` was given last; empty if there was none."""


class ClosedError(CoveyError):
    """The group was closed or revoked. If the failure of an operation ended it, that failure is the `__cause__`."""

    remedy = Remedy.REGROUP


class RankFailedError(CoveyError):
    """A process started by `launch` failed, and its own exception cannot be raised here."""

    remedy = Remedy.STOP

    def __init__(self, message: str, *, rank: int, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.exit_code = exit_code


class RemoteCallError(CoveyError):
    """A function that was called on another node raised. Its own exception may be of a class that is not known here."""

    remedy = Remedy.STOP

    def __init__(self, message: str, *, type: str, text: str, traceback: str, peer: int) -> None:
        super().__init__(message)
        self.type = type
        """The class of the exception, such as `ValueError`."""
        self.text = text
        """The text of the exception."""
        self.traceback = traceback
        """The traceback on the other node, as text."""
        self.peer = peer
        """The rank that was called, in the numbering of the group that made the call."""


class CallRefusedError(CoveyError):
    """A call that cannot work: no such function, wrong arguments, too large, or a result that cannot be sent."""

    remedy = Remedy.FIX


class CallCancelledError(CoveyError):
    """The call was cancelled before it was answered."""

    remedy = Remedy.RETRY


class RemoteProtocolError(CoveyError):
    """The other end sent bytes that this version of covey never sends."""

    remedy = Remedy.STOP


def _restore(kind: type[CoveyError], args: tuple[Any, ...], facts: dict[str, Any]) -> CoveyError:
    error = kind.__new__(kind, *args)
    error.args = args  # an OSError with its own __init__ does not set them
    error.__dict__.update(facts)
    return error


for _error in (CoveyError, *CoveyError.__subclasses__()):
    _error.__module__ = "covey"  # the module that users import them from, as tracebacks should show
