"""Sums of about one size: what `Planner` must know of them, which plan they have, and what they take."""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import numpy as np

from covey.plan.choose import all_reduce, all_reduce_algorithm
from covey.plan.fit import fit, plan_of, predicted

if TYPE_CHECKING:
    from collections.abc import Hashable

    from covey.plan.fit import Candidate, Fitted
    from covey.plan.moves import Plan
    from covey.plan.network import Network
    from covey.runtime.collectives.attempt import Attempt

TIMED: Final = 2
"""The last timed calls of a plan, of which the fastest counts: the first ones may be those of a burst."""
DRIFT_CALLS: Final = 32
"""Calls of a size class between two exchanges: one takes a few round trips, and each of the sums takes more."""
MOST_DRIFT_CALLS: Final = 1024
CHANGE: Final = 2.0
"""How many times as long, or as short, sums take if a link has changed. Less is what busy machines do."""
UNMEASURED: Final = math.inf


class Sums(Protocol):
    """Sums of arrays of one size. Everything here is equal on all ranks."""

    @property
    def key(self) -> Hashable:
        """Equal for sums that share their choice of a plan."""

    @property
    def nbytes(self) -> int:
        """The bytes of the array, as they travel."""

    def ranked(self, attempt: Attempt, network: Network) -> tuple[Candidate, ...]:
        """Return the plans, the best one first; the plain one is among them. A step of an operation."""

    def is_plain(self, attempt: Attempt, fitted: Fitted) -> bool:
        """Tell whether a plan is the one for equal links."""

    def predicted(self, attempt: Attempt, fitted: Fitted, network: Network) -> float:
        """Return the seconds of a plan, after `ranked`."""

    def plan(self, attempt: Attempt, fitted: Fitted | None, slot: int) -> Plan:
        """Return the moves of a slot; None is the plain plan."""


class PlainSums(NamedTuple):
    """Sums of arrays that travel as they are."""

    elements: int
    itemsize: int

    @property
    def key(self) -> Hashable:
        return size_class(self.nbytes)

    @property
    def nbytes(self) -> int:
        return self.elements * self.itemsize

    def ranked(self, attempt: Attempt, network: Network) -> tuple[Candidate, ...]:
        return fit(network, self.elements, self.itemsize, attempt.sizes)

    def is_plain(self, attempt: Attempt, fitted: Fitted) -> bool:
        planner = attempt.planner
        assert planner is not None
        lanes = "stream" if len(set(planner.hosts)) > 1 else "ring"
        algorithm = all_reduce_algorithm(attempt.size, self.nbytes, lanes, attempt.sizes)
        return (fitted.algorithm, fitted.order, fitted.shares) == (algorithm, (), ())

    def predicted(self, attempt: Attempt, fitted: Fitted, network: Network) -> float:
        return predicted(fitted, network, self.elements, self.itemsize, attempt.sizes)

    def plan(self, attempt: Attempt, fitted: Fitted | None, slot: int) -> Plan:
        if fitted is None:
            return all_reduce(
                slot, attempt.size, self.elements, self.itemsize, attempt.lane_family, None, attempt.sizes
            )
        return plan_of(fitted, slot, attempt.size, self.elements, self.itemsize, attempt.sizes)


def size_class(nbytes: int) -> int:
    """Return a number that is equal for arrays of about one size."""
    return nbytes.bit_length()


class PlanChoice(NamedTuple):
    """The plan of a size class."""

    fitted: Fitted | None
    """None: the plain plan."""
    why: str
    predicted: float
    """Seconds; infinite before the links are known."""


FIRST_PLAN: Final = PlanChoice(None, "plain: the links are not measured yet", UNMEASURED)
METERED: Final = PlanChoice(None, "plain: a link is metered, so nothing is sent to measure the links", UNMEASURED)


class SizeClass:
    """The sums of arrays of about one size. Read on any thread."""

    def __init__(self) -> None:
        self.choice = FIRST_PLAN
        self.calls = 0
        """Since the choice."""
        self.timed: deque[float] = deque(maxlen=TIMED)
        """What the last timed calls took on this rank since the choice. All ranks have timed the same calls."""
        self.measured = self.plain = UNMEASURED
        """What the fastest timed call took with the chosen plan, and with the plain one before: agreed seconds."""
        self.given_up: PlanChoice | None = None
        """A fitted plan that was slower than the plain one, until that has been timed again."""
        self.fitted_measured = UNMEASURED
        """What that plan took."""
        self.has_returned = False
        """Whether a plan that was given up has been taken again since the links were measured."""
        self.plain_predicted = UNMEASURED
        self.candidates: tuple[Candidate, ...] = ()
        self.network: Network | None = None
        """What the choice was made from."""
        self.drift = Drift()


class Drift:
    """The times of one size class since its plan was chosen: they tell when links have changed.

    Each rank notes the shortest time of a few calls. Then the ranks exchange these times: the rank that enters a sum
    last waits for no other, so the shortest time of all ranks is that of the transfers. If it is far from what it was
    when the plan was chosen, links are suspected to have changed. All ranks hold the same figures, so all suspect it at
    the same call.
    """

    def __init__(self) -> None:
        self._every = DRIFT_CALLS
        self._is_suspected = False
        self.begin(has_changed=True)

    def begin(self, *, has_changed: bool) -> None:
        """Begin anew, because the links were measured; suspect less often if that has not changed the plan."""
        if self._is_suspected:
            self._every = DRIFT_CALLS if has_changed else min(2 * self._every, MOST_DRIFT_CALLS)
        self._is_suspected = False
        self._usual = UNMEASURED
        self._calls, self._shortest = 0, UNMEASURED

    def note(self, seconds: float) -> None:
        """Note what a call took on this rank."""
        self._calls += 1
        self._shortest = min(self._shortest, seconds)

    @property
    def is_due(self) -> bool:
        """Whether the ranks exchange their times before the next call. Equal on all ranks."""
        return self._calls >= self._every

    def exchange(self, attempt: Attempt) -> bool | None:
        """Exchange times with all ranks; tell whether links seem to be as they were. None: there is nothing to compare.

        A step of an operation.
        """
        figures = np.array([self._shortest], np.float64)
        attempt.all_reduce(figures, "min")
        now, before = float(figures[0]), self._usual
        self._calls, self._shortest = 0, UNMEASURED
        if not (math.isfinite(now) and now > 0):
            return None
        if before == UNMEASURED:
            self._usual = now
            return None
        if before <= CHANGE * now and now <= CHANGE * before:
            return True
        self._is_suspected = True
        return False
