"""Measure the links between the ranks of an attempt, as a step of an operation, over the lanes of the group.

In round k every slot i sends to slot i + k and receives from slot i - k, so each rank sends one flow at a time and
receives one. Receivers time what arrives. The ranks exchange their figures, so that all of them hold the same bits; a
figure that is not a speed is one on all ranks.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from covey.plan.network import Flow
from covey.plan.probes import partners, rotation, swaps

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from covey.base.numbers import Rank
    from covey.runtime.collectives.attempt import Attempt

    Matrix = NDArray[np.float64]

PIECES: Final = 12
"""Into which a transfer is cut, so that its receiver can see how it goes on."""
SKIPPED: Final = 3
"""Pieces that are not timed at the beginning: ranks do not begin at the same moment, and a connection has to find its
speed. As many are not timed at the end, where other flows over a shared link may be over."""
FLATTERY: Final = 1.5
"""How many times as fast as the whole transfer its middle may be. A receiver that was not running finds many pieces at
once, and would take the link for much faster than it is."""
LEAST_PIECE, MOST_PIECE = 8 << 10, 640 << 10
"""Bytes of a piece. Twelve of the largest take 63 ms at 1 Gbit/s, and a fast link needs no more."""
SHARES: Final = (0.1, 0.3, 0.3, 0.3)
"""The parts of the time of four passes. Each finds how many bytes every link moves in the next one, so that flows over
a shared link are under way at the same time. The median of the last three counts: a machine may stand still in one."""
MOST_ROUND_SECONDS: Final = 0.25
SLOWEST, FASTEST = 1e3, 1e12
"""Bytes per second. What a rank says beyond these is taken for them."""
ROUND_TRIP: Final = 1e-4
"""Seconds that are assumed where no round trip is known; plans for large arrays depend little on it."""
MOST_ROUND_TRIP: Final = 10.0
SWAPS: Final = 8
"""Two swaps of a byte take one round trip, of which the shortest counts; the first swap waits for the slower rank."""
MOST_ROUNDS: Final = 15
"""Among up to 16 ranks all pairs are measured. Among more, some: every pair has a lane of its own."""


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


def steps(size: int) -> list[int]:
    """Return the rounds of a measurement among so many ranks, each as the distance that it sends over."""
    if size - 1 <= MOST_ROUNDS:
        return list(range(1, size))
    near = {1 << bit for bit in range((size - 1).bit_length()) if 1 << bit < size}
    return sorted(near | {size - step for step in near})[:MOST_ROUNDS]


def measure(attempt: Attempt, seconds: float, speed: float) -> MeasuredLinks | None:
    """Measure the links for about so many seconds; None if what a rank says is not a speed, on all ranks alike.

    `speed`, in bytes per second, is a guess of the slowest link. Arguments are equal on all ranks.
    """
    size, rounds = attempt.size, steps(attempt.size)
    trips = _exchanged(attempt, _round_trips(attempt))
    each = min(MOST_ROUND_SECONDS, seconds / len(rounds))
    passes: list[Matrix] = []
    speeds: Matrix | None = np.full((size, size), speed)
    for share in SHARES:
        assert speeds is not None
        speeds = _speeds(attempt, rounds, np.array([[_piece(rate, share * each) for rate in row] for row in speeds]))
        if speeds is None:
            return None
        passes.append(speeds)
    speeds = np.median(passes[1:], axis=0)
    flows = tuple(
        tuple(Flow(slot, (slot + step) % size, float(speeds[slot, (slot + step) % size])) for slot in range(size))
        for step in rounds
    )
    known = np.where(np.isfinite(trips) & (trips > 0), np.minimum(trips, MOST_ROUND_TRIP), ROUND_TRIP)
    np.fill_diagonal(known, 0.0)
    return MeasuredLinks(attempt.ranks, flows, tuple(tuple(row) for row in known.tolist()), time.time())


def _piece(rate: float, seconds: float) -> int:
    """Return the bytes of a piece of a transfer that takes so many seconds."""
    return max(LEAST_PIECE, min(MOST_PIECE, int(rate * seconds) // PIECES))


def _speeds(attempt: Attempt, rounds: Sequence[int], pieces: NDArray[np.int64]) -> Matrix | None:
    """Run all rounds with pieces of these sizes; return the speed by sender and receiver, checked."""
    size, slot = attempt.size, attempt.slot
    outgoing, arriving = (np.zeros(int(row.max()), np.uint8) for row in (pieces[slot], pieces[:, slot]))
    speeds = np.zeros((size, size), np.float64)
    for step in rounds:
        target, source = (slot + step) % size, (slot - step) % size
        attempt.synchronize()
        arrivals = Arrivals(PIECES)
        plan = rotation(slot, size, step, int(pieces[slot, target]), int(pieces[source, slot]), PIECES)
        attempt.execute(plan, (outgoing, arriving), coder=arrivals)
        speeds[source, slot] = arrivals.speed(int(pieces[source, slot]))
    speeds = _exchanged(attempt, speeds)
    measured = np.zeros((size, size), np.bool_)
    for step in rounds:
        measured[range(size), [(each + step) % size for each in range(size)]] = True
    if not np.isfinite(speeds).all() or not (speeds[measured] > 0).all():
        return None
    return np.where(measured, np.clip(speeds, SLOWEST, FASTEST), SLOWEST)


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

    def speed(self, piece: int) -> float:
        """Return bytes per second, once all pieces of so many bytes have arrived."""
        seconds = self.times[-1 - SKIPPED] - self.times[SKIPPED - 1]
        timed = piece * (PIECES - 2 * SKIPPED) / max(seconds, 1e-9)
        return min(timed, FLATTERY * piece * PIECES / max(self.times[-1] - self.began, 1e-9))


def _round_trips(attempt: Attempt) -> Matrix:
    """Measure the round trips of this rank; return them in its row.

    Those of pairs that do not swap are what pings took, perhaps while the link was busy; negative if there was none.
    """
    trips = np.zeros((attempt.size, attempt.size), np.float64)
    for slot, rank in enumerate(attempt.ranks):
        peer = attempt.engine.roster.peer(rank)
        if peer is not None:
            known = [taken for taken in (peer.last_ping, peer.round_trip) if taken >= 0]
            trips[attempt.slot, slot] = min(known, default=-1.0)
    others = partners(attempt.slot, attempt.size, MOST_ROUNDS)
    arrivals = Arrivals(len(others) * SWAPS)
    attempt.execute(swaps(others, SWAPS), (np.zeros(1, np.uint8), np.zeros(1, np.uint8)), coder=arrivals)
    for number, other in enumerate(others):
        times = arrivals.times[number * SWAPS : (number + 1) * SWAPS]
        trips[attempt.slot, other] = min(late - early for early, late in zip(times, times[2:], strict=False))
    return trips


def _exchanged(attempt: Attempt, rows: Matrix) -> Matrix:
    """Return the sum of what all ranks have, of which each one has its own figures, and zeros elsewhere."""
    flat = rows.reshape(-1)
    attempt.all_reduce(flat, "sum")
    return flat.reshape(rows.shape)
