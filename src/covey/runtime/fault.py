"""The first failure of a group, in a form that can be sent to its other ranks."""

from __future__ import annotations

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
from covey.base.numbers import NO_RANK, Rank

_PLAIN: Final[dict[str, type[CoveyError]]] = {
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
        if self.kind in _PLAIN:
            return _PLAIN[self.kind](self.text)
        text = f"{self.text} (noticed by rank {rank} in {operation}, operation {sequence} of group {group!r})"
        return PeerLostError(text, rank=self.culprit, host=host, operation=operation, sequence=sequence)

    @property
    def culprit(self) -> Rank:
        """The first lost or late rank, or -1."""
        return self.ranks[0] if self.ranks else NO_RANK
