"""What `Planner` must know of a kind of sums: what is moved, which plans there are, and what they would take."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from covey.plan.choose import all_reduce, all_reduce_algorithm
from covey.plan.fit import fit, plan_of, predicted

if TYPE_CHECKING:
    from collections.abc import Hashable

    from covey.plan.fit import Candidate, Fitted
    from covey.plan.moves import Plan
    from covey.plan.network import Network
    from covey.runtime.collectives.attempt import Attempt


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
        planner = attempt.known_planner
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
