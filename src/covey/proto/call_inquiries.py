"""What the ranks of a group ask each other about their calls: when one was lost, and when one closes the group.

**`Hearing`: whether a mismatch is behind the loss of a rank.**

A group that ends with its first loss must not blame the loss if ranks had called different things before: what a killed
rank sent may lie unread in the lanes of some ranks and prove it. Each rank that hears of a loss does this, once:

1. It *looks* at its lanes. What had arrived before the loss is still there: the kernel keeps it until it is read. What
   it finds says what other ranks called as which operation, that of the lost rank among them.
2. It *testifies*: it tells all others its own last calls and what it has found.
3. It waits until every other rank has testified, or is gone. All ranks that remain have the same testimonies then, so
   they come to the same verdict: if two calls with one number differ, wherever they are known from, the group ends with
   a mismatch, else with the loss.

A rank that hears only of the loss by another rank's testimony looks after it, and so after the loss. So a call proves a
mismatch whichever rank made it, whichever rank holds the bytes, and whether that rank is in an operation or not.

A rank waits no longer than `TESTIMONY_PATIENCE` for ranks that are alive and do not testify: their processes get no
processor time, hold the interpreter's lock in one long call, or are cut off from this rank. If such a rank alone can
prove the mismatch, the others end with the loss. A call that a rank makes after it has testified is compared by that
rank alone.

**`Parting`: what a rank learns of the others' calls before it closes a group.**

A rank that receives from all others in an operation has checked that they called the same. A rank that only sends,
such as the root of a broadcast, has not: it may have called something else, return, and close the group without a sign
of it. So a rank that closes a group while calls of its log are *in doubt* (`is_in_doubt`) does this, once:

1. It sends its last calls to all others, and asks each of them what it called as the last operation. Both travel on one
   link, in this order: the answer of a rank that has entered the operation means that it has compared all of them.
2. It waits until each other rank has entered that operation and has answered, has closed the group and sent its own
   last calls, or is gone. A rank that has not entered the operation yet is asked again, with growing pauses.
3. It waits no longer than `PARTING_PATIENCE`: a rank that is slow, stopped or cut off does not keep it. Then nothing
   is known of that rank; the rank itself has the calls, and finds a difference when it makes its own or closes the
   group.

The calls of two ranks differ if they called different things as one operation, or if one of them has closed the group
in order without an operation that the other called. Whichever of the two notices starts a comparison among all ranks.

Without doubt nothing is asked and nothing awaited; what is known already is looked at.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

from covey.base.pace import Growing

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

TESTIMONY_PATIENCE: Final = 2.0
"""Seconds that a rank waits for the testimony of ranks that are alive. All others testify within milliseconds."""
PARTING_PATIENCE: Final = 2.0
"""Seconds that a rank which closes a group waits for others that have not called its last operation yet."""
ASK_PAUSES: Final = Growing(0.02, 0.32)
"""Until a rank that had not entered the operation is asked again."""


class Hearing:
    """What one rank knows of the calls in its group once a loss is suspected."""

    def __init__(self, others: Collection[int]) -> None:
        self._waiting = set(others)
        self._calls: dict[int, set[int]] = {}
        """By number of an operation: the fingerprints with which ranks are known to have called it."""
        self._until = math.inf
        self.differs_at = 0
        """The first operation that ranks are known to have called differently; 0 for none."""

    @property
    def is_over(self) -> bool:
        """Whether the verdict is known: a mismatch if `differs_at` is set, else a loss."""
        return self.differs_at > 0 or (self._until < math.inf and not self._waiting)

    @property
    def waiting(self) -> frozenset[int]:
        """The ranks that have neither testified nor gone."""
        return frozenset(self._waiting)

    def looked(self, calls: Mapping[int, int], found: Collection[tuple[int, int]], now: float) -> None:
        """Note this rank's own calls, by number, and the calls of others that it has found, each as number and call."""
        self._until = min(self._until, now + TESTIMONY_PATIENCE)
        self._note([*calls.items(), *found])

    def heard(self, rank: int, calls: Mapping[int, int], found: Collection[tuple[int, int]]) -> None:
        """Note the testimony of another rank: its calls and what it has found."""
        self._waiting.discard(rank)
        self._note([*calls.items(), *found])

    def gone(self, rank: int) -> None:
        """Note that a rank is lost, has left or has closed the group: it does not testify any more."""
        self._waiting.discard(rank)

    def _note(self, calls: Collection[tuple[int, int]]) -> None:
        for number, call in calls:
            known = self._calls.setdefault(number, set())
            known.add(call)
            if len(known) > 1:
                self.differs_at = min(self.differs_at or number, number)

    # The shape of cores with deadlines

    def next_deadline(self) -> float:
        """Return when to call `tick`; inf for never."""
        return math.inf if self.is_over else self._until

    def tick(self, now: float) -> None:
        """Give up waiting for ranks that do not testify."""
        if now >= self._until:
            self._waiting.clear()


class AskLast(NamedTuple):
    """Ask these ranks what they called as the last operation of this rank."""

    ranks: tuple[int, ...]


class Parting:
    """Compares the calls of one rank, which closes a group, with those of the others."""

    def __init__(
        self, calls: Mapping[int, int], last: int, others: Collection[int], now: float, *, is_in_doubt: bool
    ) -> None:
        """`calls` are the fingerprints of this rank's last calls by number, of which `last` is the latest."""
        self._calls, self._last = calls, last
        self._waiting = set(others) if is_in_doubt else set()
        self._effects = [AskLast(tuple(sorted(self._waiting)))] if self._waiting else []
        self._questions = 1
        self._ask_at, self._until = now + ASK_PAUSES.after(1), now + PARTING_PATIENCE
        self.differs_at = 0
        """The first operation that another rank is known to have called differently, or not at all; 0 for none."""

    @property
    def is_over(self) -> bool:
        """Whether this rank need not wait any longer."""
        return self.differs_at > 0 or not self._waiting

    @property
    def waiting(self) -> frozenset[int]:
        """The ranks whose calls are not known yet."""
        return frozenset(self._waiting)

    def answered(self, rank: int, entered: int, calls: Mapping[int, int]) -> None:
        """Note what a rank has answered since it was asked: how far it is, and its calls as far as they are known."""
        self._compare(calls)
        if entered >= self._last:
            self._waiting.discard(rank)

    def parted(self, rank: int, entered: int, calls: Mapping[int, int], *, in_order: bool) -> None:
        """Note the last calls of a rank that has closed the group; `in_order` if its program has not failed."""
        self._compare(calls)
        self._waiting.discard(rank)
        if in_order and entered != self._last:
            self._differ(min(entered, self._last) + 1)

    def gone(self, rank: int) -> None:
        """Note that a rank is lost, or has failed: it tells nothing any more."""
        self._waiting.discard(rank)

    def _compare(self, theirs: Mapping[int, int]) -> None:
        for sequence in sorted(theirs.keys() & self._calls.keys()):
            if theirs[sequence] != self._calls[sequence]:
                self._differ(sequence)
                return

    def _differ(self, sequence: int) -> None:
        self.differs_at = min(self.differs_at or sequence, sequence)

    # The shape of cores with deadlines

    def effects(self) -> list[AskLast]:
        """Return the effects to perform, in order, and clear them."""
        effects, self._effects = self._effects, []
        return effects

    def next_deadline(self) -> float:
        """Return when to call `tick`; inf for never."""
        return math.inf if self.is_over else min(self._ask_at, self._until)

    def tick(self, now: float) -> None:
        """Ask again, or give up."""
        if self.is_over:
            return
        if now >= self._until:
            self._waiting.clear()
        elif now >= self._ask_at:
            self._questions += 1
            self._ask_at = now + ASK_PAUSES.after(self._questions)
            self._effects.append(AskLast(tuple(sorted(self._waiting))))
