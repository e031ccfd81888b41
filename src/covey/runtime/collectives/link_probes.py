"""The measurement of the links between the ranks of an attempt, over its lanes, in parts that are steps of operations.

Which transfers are made and what follows from them is in `plan.measurement`. The ranks exchange their figures, so that
all of them hold the same bits; a figure that is not a speed is one on all ranks.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from covey.base.errors import ConfigError
from covey.net.discovery.interfaces import all_interfaces, parse_pattern
from covey.plan.measurement import (
    MEASURED_PIECES,
    MOST_ROUNDS,
    LinkMeasurement,
    rotation,
    sustained,
    swap_rounds,
    swaps,
)
from covey.plan.moves import Plan
from covey.plan.network import Flow

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from covey.base.numbers import Rank
    from covey.runtime.collectives.attempt import Attempt

    Matrix = NDArray[np.float64]

ROUND_TRIP: Final = 1e-4
"""Seconds that are assumed where no round trip is known; plans for large arrays depend little on it."""
MOST_ROUND_TRIP: Final = 10.0
SWAPS: Final = 4
"""Two swaps of a byte take one round trip, of which the shortest counts; the first swap waits for the slower rank."""


class MeasuredLinks(NamedTuple):
    """What the ranks have measured, and hold in common."""

    ranks: tuple[Rank, ...]
    """The ranks of the group that took part, by slot."""
    rounds: tuple[tuple[Flow, ...], ...]
    """The flows that ran at the same time; they name slots."""
    round_trips: tuple[tuple[float, ...], ...]
    """Seconds between two slots."""
    at: float
    """When, in seconds since 1970, by the clock of this rank. All else is equal on all ranks."""
    ages: tuple[tuple[float, ...], ...] = ()
    """By source and target: how many seconds before that a figure was measured, in an earlier run; empty for none."""

    def among(self, ranks: tuple[Rank, ...]) -> MeasuredLinks | None:
        """Return what was measured among some of the ranks; None if another rank is with them."""
        slots = {rank: slot for slot, rank in enumerate(self.ranks)}
        if not slots.keys() >= set(ranks):
            return None
        kept = [slots[rank] for rank in ranks]
        new = {slot: at for at, slot in enumerate(kept)}
        rounds = (
            tuple(
                Flow(new[flow.source], new[flow.target], flow.bytes_per_second)
                for flow in flows
                if flow.source in new and flow.target in new
            )
            for flows in self.rounds
        )
        trips = tuple(tuple(self.round_trips[one][other] for other in kept) for one in kept)
        ages = tuple(tuple(self.ages[one][other] for other in kept) for one in kept) if self.ages else ()
        return MeasuredLinks(ranks, tuple(flows for flows in rounds if flows), trips, self.at, ages)


class LinkProbes:
    """One measurement of an attempt. All ranks advance it in the same operations."""

    def __init__(self, attempt: Attempt) -> None:
        size, slot = attempt.size, attempt.slot
        self._schedule = LinkMeasurement(size, swap_rounds(size, MOST_ROUNDS))
        self._trips = np.zeros((size, size), np.float64)
        """The shortest round trips in this rank's row: first what pings took, perhaps while the link was busy, and
        negative if there was none; pairs that swap may find a shorter one."""
        for other, rank in enumerate(attempt.ranks):
            peer = attempt.roster.peer(rank)
            if peer is not None:
                known = [taken for taken in (peer.last_ping, peer.round_trip) if taken >= 0]
                self._trips[slot, other] = min(known, default=-1.0)
        self._speeds = np.zeros((size, size), np.float64)
        """What this rank has received in the current pass, in its column."""
        self._agreed_trips: Matrix | None = None
        self.is_over = False
        """Whether nothing is left to do; equal on all ranks."""
        self.found: MeasuredLinks | None = None
        """What was measured, once it is over; None, on all ranks alike, if what a rank says is not a speed."""

    @property
    def seconds(self) -> float:
        """What the measurement has taken in all, as the ranks agree."""
        return self._schedule.spent

    def advance(self, attempt: Attempt, nbytes: float, seconds: float) -> None:
        """Do the part of an operation, in which each rank has just sent so many bytes in so many agreed seconds.

        A step of that operation, which all ranks have just begun together.
        """
        schedule = self._schedule
        schedule.begin(nbytes, seconds)
        began = time.perf_counter()
        while (number := schedule.next_swap()) is not None:
            self._swap(attempt, number)
            schedule.note(_agreed_elapsed(attempt, began))
        while (step := schedule.next_step()) is not None:
            self._rotate(attempt, step)
            schedule.note(_agreed_elapsed(attempt, began))
        if schedule.is_pass_over:
            self._end_pass(attempt)
        schedule.end()
        if not self.is_over and schedule.is_done:
            self.is_over, self.found = True, self._made(attempt)

    def _swap(self, attempt: Attempt, number: int) -> None:
        """Measure the round trip with the partner of a round; rest if there is none."""
        partner = attempt.slot ^ number
        if partner >= attempt.size:
            attempt.execute(Plan((), ()), (np.zeros(1, np.uint8),))
            return
        arrivals = Arrivals(SWAPS)
        attempt.execute(swaps(partner, SWAPS), (np.zeros(1, np.uint8), np.zeros(1, np.uint8)), coder=arrivals)
        times, known = arrivals.times, float(self._trips[attempt.slot, partner])
        taken = [late - early for early, late in zip(times, times[2:], strict=False)]
        self._trips[attempt.slot, partner] = min(taken + [known] * (known > 0))

    def _rotate(self, attempt: Attempt, step: int) -> None:
        """Run a round: send to one rank, and time what arrives from another."""
        size, slot = attempt.size, attempt.slot
        target, source = (slot + step) % size, (slot - step) % size
        sent, received = self._schedule.piece(slot, target), self._schedule.piece(source, slot)
        arrivals = Arrivals(MEASURED_PIECES)
        plan = rotation(slot, size, step, sent, received, MEASURED_PIECES)
        attempt.execute(plan, (np.zeros(sent, np.uint8), np.empty(received, np.uint8)), coder=arrivals)
        self._speeds[source, slot] = arrivals.speed(received, max(0.0, self._trips[slot, source]))

    def _end_pass(self, attempt: Attempt) -> None:
        """Let the ranks exchange what they have found in a pass."""
        if self._agreed_trips is None:
            self._agreed_trips = _exchanged(attempt, self._trips)
        speeds = _exchanged(attempt, self._speeds)
        self._speeds = np.zeros_like(speeds)
        self.is_over = not self._schedule.take(speeds.tolist())

    def _made(self, attempt: Attempt) -> MeasuredLinks:
        size, speeds, trips = attempt.size, self._schedule.speeds(), self._agreed_trips
        assert trips is not None
        flows = tuple(
            tuple(Flow(slot, (slot + step) % size, speeds[slot][(slot + step) % size]) for slot in range(size))
            for step in self._schedule.rounds
        )
        return MeasuredLinks(attempt.ranks, flows, both_ways(trips), time.time())


def both_ways(trips: Matrix) -> tuple[tuple[float, ...], ...]:
    """Return the round trips of which each row is what a rank has taken: the shorter of both ends, if one has any."""
    known = np.where(np.isfinite(trips) & (trips > 0), trips, np.inf)
    known = np.minimum(known, known.T)
    known = np.where(np.isfinite(known), np.minimum(known, MOST_ROUND_TRIP), ROUND_TRIP)
    np.fill_diagonal(known, 0.0)
    return tuple(tuple(row) for row in known.tolist())


class Arrivals:
    """Notes when the transfers of a plan arrive; see `executor.Coder`. The plan has as many sends as receives."""

    def __init__(self, number: int) -> None:
        self.encodes = (False,) * number
        self.decodes = (True,) * number
        self.times: list[float] = []
        self.began = time.perf_counter()

    def encode(self, _send: int) -> None:
        """Do nothing: no send is encoded."""

    def decode(self, _recv: int) -> None:
        """Note that a transfer has arrived."""
        self.times.append(time.perf_counter())

    def speed(self, piece: int, round_trip: float) -> float:
        """Return bytes per second, once all pieces of so many bytes have arrived from so far away.

        Half of a round trip is that of the first byte; in the other half the sender may not have begun.
        """
        return sustained(self.times, self.began + round_trip, piece)


def _agreed_elapsed(attempt: Attempt, began: float) -> float:
    """Return the longest time since `began` on any rank, once all ranks have ended the round."""
    figures = np.array([time.perf_counter() - began], np.float64)
    attempt.all_reduce(figures, "max")
    return float(figures[0])


def _exchanged(attempt: Attempt, rows: Matrix) -> Matrix:
    """Return the sum of what all ranks have, of which each one has its own figures, and zeros elsewhere."""
    flat = rows.reshape(-1)
    attempt.all_reduce(flat, "sum")
    return flat.reshape(rows.shape)


def is_metered(attempt: Attempt) -> bool:
    """Tell whether bytes over a link of this rank cost money, so that nothing is sent only to measure.

    So it is if a link with another machine goes over an interface that the setting `metered` names.
    """
    try:
        pattern = parse_pattern(attempt.facts.config.metered)
    except ConfigError:  # nodes of a cluster have read it before; a rank of a launcher must not fail alone
        return True
    if not pattern.only:  # an empty setting names none
        return False
    roster = attempt.roster
    links = [peer.link for rank in attempt.ranks if (peer := roster.peer(rank)) is not None]
    used = {link.local_ip for link in links if link is not None}
    return any(
        pattern.allows(interface.name, ip) for interface in all_interfaces() for ip in used & {*interface.addresses}
    )
