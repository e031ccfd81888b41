"""How newcomers of a training get its state while the others train: they follow as shadows until they have it.

A shadow takes part in every average of gradients and contributes nothing. Holders give it a snapshot of their state
after one step, in the background; it keeps the averages of the steps after that one, and takes these steps when the
snapshot is complete. After each step all ranks tell each other how far they are, in one exchange that is all or
nothing, so every rank computes the same `ShadowAdmission` from it.

Invariants:

- The averages that a shadow keeps are those of all steps after its snapshot, in their order. If they exceed the bound,
  it drops them, and needs a newer snapshot.
- A shadow becomes a holder after all pieces of its state were compared with those of all holders, one after each step,
  and none differed. A rank that is no holder trains on nothing and gives its state to no other rank.
- An admission ends: all shadows become holders or are lost, or all ranks wait until they have the state.
"""

from __future__ import annotations

from collections import Counter, deque
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

AverageT = TypeVar("AverageT")

MOST_HITS: Final = 2
"""How often a shadow may reach its bound before all ranks wait for it."""


class ShadowPhase(IntEnum):
    """How far a rank is."""

    HOLDS = 0
    """It has the state, and trains."""
    RECEIVES = 1
    """A part of the snapshot is missing."""
    FULL = 2
    """It needs a newer snapshot: what it keeps has reached the bound, or a part of the snapshot does not come.

    Of a donor: it could not give its part.
    """
    REPLAYS = 3
    """It has the snapshot, but not taken all steps since."""
    READY = 4
    """It has taken all steps, and takes the next ones with the others."""


class ShadowReport(NamedTuple):
    """What a rank tells the others after a step."""

    phase: int
    pieces: int = 0
    """The pieces of its state, if one is compared."""
    digest: int = 0
    """That of the piece that is compared."""


class AdmissionOrder(Enum):
    """What all ranks do next."""

    TRAIN = "train"
    SNAPSHOT = "snapshot"
    """Holders give those that receive a snapshot of their state as it is now."""
    WAIT = "wait"
    """All ranks wait until the shadows have the state."""
    ALONE = "alone"
    """No holder is left: the shadows continue with what they have."""
    OVER = "over"
    """No shadow is left."""


class ShadowAdmission:
    """The admission of the shadows of one generation; equal on all of its ranks."""

    def __init__(self, holders: Sequence[int], shadows: Sequence[int]) -> None:
        self.holders, self.shadows = tuple(sorted(holders)), tuple(sorted(shadows))
        self.donors = self.holders
        """The ranks that give the last snapshot."""
        self.compared: tuple[int, ...] = ()
        """The shadows whose state is compared with that of the holders."""
        self.entered: tuple[int, ...] = ()
        """The shadows that became holders in the last exchange."""
        self.reason = ""
        """Why all ranks wait."""
        self._piece = 0
        self._hits: Counter[int] = Counter()

    def piece_of(self, rank: int) -> int | None:
        """Return the number of the piece whose digest a rank tells in the next exchange; None if it tells none."""
        return self._piece if self.compared and rank in (*self.holders, *self.compared) else None

    def receives(self, phase: int) -> bool:
        """Tell whether a shadow in this phase takes the next snapshot."""
        return phase in (ShadowPhase.RECEIVES, ShadowPhase.FULL)

    def settle(self, told: Mapping[int, ShadowReport]) -> AdmissionOrder:
        """Take what the remaining ranks told after a step; return what all of them do now."""
        self.entered = ()
        has_lost_donor = not told.keys() >= set(self.donors)
        self.holders, self.shadows, self.compared = (
            tuple(rank for rank in ranks if rank in told) for ranks in (self.holders, self.shadows, self.compared)
        )
        if not self.shadows:
            return AdmissionOrder.OVER
        if not self.holders:
            return AdmissionOrder.ALONE
        if self.compared and not self._agrees(told):
            return AdmissionOrder.WAIT
        if not self.shadows:
            return AdmissionOrder.OVER
        receivers = [rank for rank in self.shadows if self.receives(told[rank].phase)]
        has_failed_donor = any(rank in told and told[rank].phase == ShadowPhase.FULL for rank in self.donors)
        full = [rank for rank in receivers if has_failed_donor or told[rank].phase == ShadowPhase.FULL]
        self._hits.update(full)
        if stuck := [rank for rank in full if self._hits[rank] >= MOST_HITS]:
            self.reason = (
                f"rank {stuck[0]} could not take the state in the background: twice, the averages that it kept "
                "meanwhile reached their bound, or a part of the state did not come"
            )
            return AdmissionOrder.WAIT
        if not self.compared:
            self.compared = tuple(rank for rank in self.shadows if told[rank].phase == ShadowPhase.READY)
            self._piece = 0
        if full or (receivers and has_lost_donor):
            self.donors = self.holders
            return AdmissionOrder.SNAPSHOT
        return AdmissionOrder.TRAIN

    def _agrees(self, told: Mapping[int, ShadowReport]) -> bool:
        """Compare a piece; let the shadows in after the last one. Return False if it differs."""
        first = told[self.holders[0]]
        differing = [rank for rank in (*self.holders, *self.compared) if told[rank][1:] != first[1:]]
        if differing:
            self.reason = (
                f"the state of rank {differing[0]} differs from that of rank {self.holders[0]} after the same steps: "
                "an optimizer that is not deterministic, or a program that changes state between steps, "
                "cannot be followed"
            )
            return False
        self._piece += 1
        if self._piece >= first.pieces:
            self.entered, self.compared = self.compared, ()
            self.holders = tuple(sorted({*self.holders, *self.entered}))
            self.shadows = tuple(rank for rank in self.shadows if rank not in self.entered)
        return True


class ShadowReplay(Generic[AverageT]):
    """What one shadow has: the averages since its snapshot, in order, up to a number of bytes."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._kept: deque[tuple[AverageT, int]] = deque()
        self._nbytes = 0
        self._is_complete = self._is_full = False

    @property
    def phase(self) -> ShadowPhase:
        if self._is_full:
            return ShadowPhase.FULL
        if not self._is_complete:
            return ShadowPhase.RECEIVES
        return ShadowPhase.REPLAYS if self._kept else ShadowPhase.READY

    @property
    def is_complete(self) -> bool:
        """Whether this has the snapshot and all averages since."""
        return self._is_complete and not self._is_full

    def begin(self) -> None:
        """Note that a snapshot is of the state that the others have now."""
        self._forget()
        self._is_complete = self._is_full = False

    def keep(self, average: AverageT, nbytes: int) -> None:
        """Keep the average of a step. One that is READY takes the step instead."""
        if self._is_full:
            return
        self._kept.append((average, nbytes))
        self._nbytes += nbytes
        if self._nbytes > self._most:
            self.give_up()

    def complete(self) -> None:
        """Note that the whole snapshot has come."""
        self._is_complete = True

    def give_up(self) -> None:
        """Note that a newer snapshot is needed."""
        self._forget()
        self._is_full = True

    def next(self) -> AverageT | None:
        """Return the average of the next step to take; None if none is kept."""
        if not (self._is_complete and self._kept):
            return None
        average, nbytes = self._kept.popleft()
        self._nbytes -= nbytes
        return average

    def _forget(self) -> None:
        self._kept.clear()
        self._nbytes = 0
