"""Fit the plans of large sums to the links between the ranks, which the ranks measure and agree on.

The first large sums of an attempt use the plain plan, and are timed. From a call with a fixed number on, the ranks
measure the links (`link_probes`), a part after each large sum, and then choose a plan for each size class: all from the
same figures, so all alike. Later they measure again, at calls that all of them know, so seldom that it takes little of
the time, or when sums take much longer or shorter than they did (`size_class.Drift`). A fitted plan stays chosen only
if it turns out to be faster than the plain one; where lines allow bursts, the plain one is timed once more before that
is decided.

If earlier runs have measured all links (`saved_links`), the ranks choose from those figures at the first large sum, and
measure soon if sums do not take about the predicted time.

All of this belongs to one attempt: when ranks are lost, the next attempt begins anew, with what was measured before if
all ranks have the same.

Ranks that time a sum begin it together, and it takes as long as the last of them needs.
"""

from __future__ import annotations

import math
import time
import zlib
from typing import TYPE_CHECKING, Final

import numpy as np

from covey.plan.choose import PLANNED_BYTES
from covey.plan.fit import is_distant
from covey.plan.measurement import MOST_SECONDS
from covey.plan.network import infer
from covey.runtime.collectives import saved_links
from covey.runtime.collectives.link_probes import LinkProbes, is_metered
from covey.runtime.collectives.size_class import (
    CHANGE,
    FIRST_PLAN,
    METERED,
    UNMEASURED,
    PlainSums,
    PlanChoice,
    SizeClass,
)
from covey.runtime.events import PLAN, Event

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from covey.plan.choose import PlanSizes
    from covey.plan.fit import Fitted
    from covey.plan.moves import Plan
    from covey.plan.network import Network
    from covey.runtime.collectives.attempt import Attempt, AttemptPlanner
    from covey.runtime.collectives.link_probes import MeasuredLinks
    from covey.runtime.collectives.size_class import Sums

TIMED_PLAIN_CALLS: Final = 2
"""Calls of a size class that use the plain plan, and are timed. The first one may have to open connections."""
MEASURING: Final = TIMED_PLAIN_CALLS
"""The large call of an attempt, counted from 1, after which the ranks begin to measure."""
CHECKING: Final = 2
"""Calls of a fitted plan that are timed before it is compared with the plain plan."""
COST: Final = 0.01
"""The part of the time of large sums that later measurements may take."""
REVIEW_CALLS: Final = 64
"""Large calls after which ranks look for the first time whether they may measure again."""
MOST_CALLS: Final = 1 << 20
PATIENCE: Final = 0.2
"""The part of the time which is left to an operation that a measurement in it may take."""
GAIN: Final = 0.9
"""A plan replaces another one if it is predicted to take at most this part of its time."""
NEVER: Final = 0
"""The number of no call."""

Times = tuple[tuple[float, ...], ...]
"""By source and target, in seconds since 1970."""


class Planner:
    """The choices of one attempt. Every rank makes the same calls in the same order."""

    def __init__(self, hosts: tuple[int, ...]) -> None:
        """`hosts` has for each slot a number that is equal for ranks on one host."""
        self.hosts = hosts
        self.network: Network | None = None
        """What was measured; None before, and if ranks do not agree on it."""
        self.measured: MeasuredLinks | None = None
        self.is_earlier = False
        """Whether all of it was measured in earlier runs."""
        self._seen: dict[tuple[int, int], float] = {}
        """By source and target: when sums over this link were last seen to take as long as before."""
        self.classes: dict[Hashable, SizeClass] = {}
        """By `Sums.key`."""
        self._calls = self._calls_before = 0
        self._review_at = MEASURING
        self._plain_calls = TIMED_PLAIN_CALLS
        self._is_on = True
        """Whether the ranks agree on what they know of each other."""
        self._is_suspected = self._is_metered = False
        """Whether links seem to have changed, and whether bytes over a link of any rank cost money. Equal on all."""
        self._spent = self._cost = 0.0
        """Seconds of large sums since the last measurement, and those of that measurement."""
        self._probes: LinkProbes | None = None
        """The measurement that is under way."""

    def reduce_plain(
        self, attempt: Attempt, count: int, itemsize: int, plain: Plan, perform: Callable[[Plan], None]
    ) -> None:
        """Call `perform` with the plan for a sum of an array that travels as it is; `plain` is that of equal links."""
        sums = PlainSums(count, itemsize)

        def run(fitted: Fitted | None) -> None:
            perform(plain if fitted is None else sums.plan(attempt, fitted, attempt.slot))

        if sums.nbytes >= PLANNED_BYTES:
            self.reduce(attempt, sums, run)
        elif self.fits_medium(sums.nbytes, attempt.sizes):
            run(self._medium_plan(attempt, sums))
        else:
            perform(plain)

    def reduce(self, attempt: Attempt, sums: Sums, perform: Callable[[Fitted | None], None]) -> None:
        """Call `perform` with the plan to use for a sum; None is the plan for equal links."""
        entered = time.perf_counter()
        kind = self.classes.setdefault(sums.key, SizeClass())
        self._calls += 1
        if self._calls == 1:
            self._recall(attempt)
        if self._is_metered and kind.choice is FIRST_PLAN:
            kind.choice = METERED
        if self.network is not None:
            if kind.network is not self.network and kind.calls >= self._plain_calls:
                self._choose(attempt, kind, self.network, sums)
            elif self._is_checked(kind):
                self._check(attempt, kind)
            elif kind.drift.is_due:
                self._compare(attempt, kind, sums)
        fitted = kind.choice.fitted
        is_reviewed = self._is_on and (self._probes is not None or self._calls == self._review_at)
        is_timed = kind.calls < (TIMED_PLAIN_CALLS if fitted is None else CHECKING) or (is_reviewed and fitted is None)
        if is_timed or is_reviewed:
            attempt.synchronize()
        began = time.perf_counter()
        perform(fitted)
        seconds = max(time.perf_counter() - began, 1e-9)
        kind.calls += 1
        if is_timed:
            kind.timed.append(seconds)
        else:
            kind.drift.note(seconds)
        self._spent += seconds
        if is_reviewed:
            self._review(attempt, 2 * (attempt.size - 1) / attempt.size * sums.nbytes, seconds)
        attempt.planning_seconds += time.perf_counter() - entered - seconds

    def _is_checked(self, kind: SizeClass) -> bool:
        """Tell whether the plan of a size class is judged before the next call, by its times. Equal on all ranks."""
        return kind.calls == CHECKING and (
            kind.choice.fitted is not None or self.is_earlier or kind.given_up is not None
        )

    def fits_medium(self, nbytes: int, sizes: PlanSizes) -> bool:
        """Tell whether sums of less than PLANNED_BYTES have fitted plans, too: between distant hosts, once it is known.

        Smaller ones have the plan with the fewest rounds anyway. Equal on all ranks.
        """
        return self._is_on and self.network is not None and is_distant(self.network) and nbytes > sizes.doubling_bytes

    def _medium_plan(self, attempt: Attempt, sums: Sums) -> Fitted | None:
        """Return the plan of a sum for which `fits_medium`: chosen by its predicted time, neither timed nor checked.

        None is the plan for equal links. A step of an operation.
        """
        kind, network = self.classes.setdefault(sums.key, SizeClass()), self.network
        assert network is not None
        if kind.network is not network:
            self._choose(attempt, kind, network, sums)
        return kind.choice.fitted

    def _recall(self, attempt: Attempt) -> None:
        """Take over what was measured in an earlier attempt, if all ranks have the same figures of those present.

        If there is nothing, take over what earlier runs have measured, if that is complete.
        """
        links = attempt.links
        before = None if links.measured is None else links.measured.among(attempt.ranks)
        known = 0 if before is None else zlib.crc32(repr((before.rounds, before.round_trips)).encode())
        is_same, is_known = _agrees(attempt, zlib.crc32(repr(self.hosts).encode()), known)
        self._is_on = is_same
        if not is_same:
            return
        if not is_known or before is None:
            before = links.measured = saved_links.recalled(attempt)
            self.is_earlier = before is not None
        if before is not None:
            self._plain_calls = 0
            self._use(attempt, before)
            self._review_at = REVIEW_CALLS
        self._is_metered = _is_any(attempt, is_here=is_metered(attempt))
        if self._is_metered:
            self._review_at = NEVER

    def _review(self, attempt: Attempt, nbytes: float, seconds: float) -> None:
        """Measure the links after a sum, for which this rank sent so many bytes; or put that off.

        It is put off if it would take too large a part of the time, or of what is left to this operation.
        """
        left = attempt.operation.deadline - time.monotonic()
        figures = np.array([seconds, -left, -self._spent], np.float64)
        attempt.all_reduce(figures, "max")
        if not np.isfinite(figures).all() or not figures[0] > 0:  # every rank has these figures, and returns here
            self._put_off(REVIEW_CALLS)
            return
        seconds, left, spent = float(figures[0]), -float(figures[1]), -float(figures[2])
        if PATIENCE * left < min(seconds, MOST_SECONDS):
            self._put_off(REVIEW_CALLS)
            return
        if self._probes is None:
            if self._cost and spent * COST < self._cost and not self._is_suspected:
                each = max(spent / (self._calls - self._calls_before), 1e-9)
                self._put_off(math.ceil((self._cost / COST - spent) / each))
                return
            self._probes = LinkProbes(attempt)
        probes = self._probes
        probes.advance(attempt, nbytes, seconds)
        if not probes.is_over:
            return
        self._cost, self._spent = probes.seconds, 0.0
        self._calls_before, self._probes = self._calls, None
        self._put_off(REVIEW_CALLS)
        self._is_suspected = False
        if probes.found is not None:
            attempt.links.measured = probes.found
            self.is_earlier = False
            self._use(attempt, probes.found)
            saved_links.keep(attempt, probes.found)

    def _put_off(self, calls: int) -> None:
        """Review again after so many calls; a measurement that is under way goes on at the next one."""
        self._review_at = self._calls + max(1, min(calls, MOST_CALLS))

    def _use(self, attempt: Attempt, measured: MeasuredLinks) -> None:
        self.network = infer(self.hosts, measured.rounds, measured.round_trips)
        self.measured = measured
        self._seen.clear()
        saved_links.tell(attempt, self, "")

    def times(self) -> Times:
        """Return when the figures of each link were measured, or last seen to hold, by source and target."""
        measured, size = self.measured, len(self.hosts)
        assert measured is not None
        return tuple(
            tuple(
                max(measured.at - (measured.ages[i][j] if measured.ages else 0.0), self._seen.get((i, j), 0.0))
                for j in range(size)
            )
            for i in range(size)
        )

    def _choose(self, attempt: Attempt, kind: SizeClass, network: Network, sums: Sums) -> None:
        """Choose the plan of a size class, from a network that all ranks hold."""
        used = kind.choice.fitted
        kind.given_up, kind.has_returned = None, False
        candidates = sums.ranked(attempt, network)
        plain = next(each.fitted for each in candidates if sums.is_plain(attempt, each.fitted))
        best, why = candidates[0]
        if best != plain:
            why = f"{why}: {_ms(best.seconds)} predicted, {_ms(plain.seconds)} for the plain plan"
            if used is not None and _form(used) != _form(best):
                before = sums.predicted(attempt, used, network)
                if best.seconds > GAIN * before:
                    best, why = used._replace(seconds=before), kind.choice.why
        if used is None:
            kind.plain = kind.measured = _agreed(attempt, kind)
        else:
            kind.plain = UNMEASURED  # it was timed when the links were others
        kind.candidates, kind.network, kind.plain_predicted = candidates, network, plain.seconds
        earlier = kind.choice
        if not _agrees(attempt, zlib.crc32(repr((candidates, best)).encode()))[0]:
            why = "plain: the ranks found different plans in the same figures"  # as if they rounded differently
            self._take(attempt, kind, PlanChoice(None, why, plain.seconds))
        elif best == plain:
            why = f"plain: no other plan is predicted to be faster than {_ms(plain.seconds)}"
            self._take(attempt, kind, PlanChoice(None, why, plain.seconds))
        else:
            self._take(attempt, kind, PlanChoice(best, f"{best.algorithm}: {why}", best.seconds))
        kind.drift.begin(has_changed=_form(earlier.fitted) != _form(kind.choice.fitted))

    def _check(self, attempt: Attempt, kind: SizeClass) -> None:
        """Compare the times of a fitted plan with those of the plain one, and go back if that was faster.

        The plain plan may have been timed in a burst. So it is timed again after it has replaced a fitted plan, which
        comes back, once, if that shows that it was the faster one. If figures of earlier runs predicted something else,
        the ranks measure after this call.
        """
        measured = _agreed(attempt, kind)
        ratio = measured / kind.choice.predicted
        if self.is_earlier and not 1 / CHANGE <= ratio <= CHANGE:
            self._suspect()
        if kind.choice.fitted is None:
            given_up, kind.given_up = kind.given_up, None
            if measured != UNMEASURED:
                kind.plain = kind.measured = measured
            if given_up is not None and measured != UNMEASURED and kind.fitted_measured < measured:
                kind.has_returned = True
                self._take(attempt, kind, given_up)
            return
        if measured < kind.plain or measured == UNMEASURED:
            kind.measured = measured
            return
        given_up, kind.fitted_measured = kind.choice, measured
        why = f"plain: {_ms(kind.plain)}, and {_ms(measured)} with the plan that was predicted to be faster"
        self._take(attempt, kind, PlanChoice(None, why, kind.plain_predicted))
        kind.measured = kind.plain
        kind.given_up = None if kind.has_returned else given_up

    def _compare(self, attempt: Attempt, kind: SizeClass, sums: Sums) -> None:
        """Let the ranks compare what sums take with what they took; measure after this one if that differs."""
        holds = kind.drift.exchange(attempt)
        if holds is None:
            return
        if not holds:
            self._suspect()
            return
        now = time.time()
        for slot in range(attempt.size):
            moves = sums.plan(attempt, kind.choice.fitted, slot)
            self._seen |= {(slot, send.peer): now for send in moves.sends}
        saved_links.tell(attempt, self, kind.choice.why)

    def _suspect(self) -> None:
        """Measure after this call, because links seem to have changed."""
        if self._is_metered:
            return
        self._is_suspected = True
        self._review_at = min(self._review_at, self._calls)

    def _take(self, attempt: Attempt, kind: SizeClass, choice: PlanChoice) -> None:
        before, kind.choice = kind.choice, choice
        if _form(before.fitted) == _form(choice.fitted):
            return
        kind.calls, kind.measured = 0, UNMEASURED
        kind.timed.clear()
        if self.network is not None:
            saved_links.tell(attempt, self, choice.why)
        facts, node = attempt.facts, attempt.roster.node
        if node is not None:
            node.events.add(Event(PLAN, time.time(), facts.generation, 0, text=f"{facts.name}: {choice.why}"))


def planner_of(attempt: Attempt) -> AttemptPlanner | None:
    """Return what fits the plans of large sums of an attempt to its links; None where all links are alike.

    For the thread that runs an operation; others read `Attempt.planner`.
    """
    if attempt.planner is None and attempt.fits_plans:
        hosts = [attempt.roster.host(rank) for rank in attempt.ranks]
        if attempt.facts.config.plan == "always":  # for tests on one host: as if each rank were on a host of its own
            hosts = [str(slot) for slot in attempt.slots]
        attempt.planner = Planner(tuple(hosts.index(host) for host in hosts))
    return attempt.planner


def _form(fitted: Fitted | None) -> Fitted | None:
    """Return what tells plans apart: all but the predicted time."""
    return None if fitted is None else fitted._replace(seconds=0.0)


def _agrees(attempt: Attempt, *digests: int) -> list[bool]:
    """Tell for each number whether it is the same on all ranks; for numbers other than 0, which none may be."""
    figures = np.array([sign * each for each in digests for sign in (1, -1)], np.int64)
    attempt.all_reduce(figures, "min")
    return [bool(least == -most != 0) for least, most in figures.reshape(-1, 2)]


def _is_any(attempt: Attempt, *, is_here: bool) -> bool:
    """Tell whether something is so on any rank."""
    flags = np.array([is_here], np.int64)
    attempt.all_reduce(flags, "max")
    return bool(flags[0])


def _agreed(attempt: Attempt, kind: SizeClass) -> float:
    """Return what the fastest timed call took until the last rank had finished, and forget the times."""
    if not kind.timed:
        return UNMEASURED
    figures = np.array(kind.timed, np.float64)
    kind.timed.clear()
    attempt.all_reduce(figures, "max")
    return float(figures.min()) if np.isfinite(figures).all() and figures.min() > 0 else UNMEASURED


def _ms(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
