"""The faults that `covey chaos` knows, and the plan of a run's faults, drawn from a seed before the run begins. Pure.

A seed decides what is done and when, not which processes exist then: a fault names its target as a fraction of the
members. The plan follows a model of the job, so that it is feasible: no fault comes while too few members are there.
`injector.py` checks each fault again, against the real processes.
"""

from __future__ import annotations

import random
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeVar

from covey.base.errors import ConfigError
from covey.lab.chaos.orders import MOMENTS, Order

if TYPE_CHECKING:
    from collections.abc import Sequence

Where = Literal["command", "machine", "hosts"]
"""What is broken: a command of the user, the workload of --check on this machine, or the workload on hosts."""
EVERYWHERE: Final[tuple[Where, ...]] = ("command", "machine", "hosts")
CHECKED: Final[tuple[Where, ...]] = ("machine", "hosts")
FAULT_PLACES: Final[dict[Where, str]] = {
    "command": "for a command",
    "machine": "on one machine",
    "hosts": "across hosts",
}

T = TypeVar("T")


class FaultKind(NamedTuple):
    """A kind of fault."""

    text: str
    weight: int
    """How often it comes with --check, compared with the others; those of a command take turns."""
    where: tuple[Where, ...]
    least: int = 2
    """How many members must be there."""


FAULT_KINDS: Final = {
    "kill": FaultKind("a process is killed", 8, EVERYWHERE),
    "two": FaultKind("two processes are killed at once", 4, CHECKED, 3),
    "most": FaultKind("all processes but one are killed at once", 2, ("machine",), 3),
    "all": FaultKind("all processes are killed at once", 1, ("machine",), 1),
    "stop": FaultKind(
        "a process is stopped for longer than the others wait, as on a laptop that sleeps", 6, EVERYWHERE
    ),
    "pause": FaultKind("a process is stopped for a moment", 4, EVERYWHERE),
    "slow": FaultKind("a process is stopped many times for a moment", 2, EVERYWHERE),
    "leave": FaultKind("a process is asked to leave (SIGTERM)", 2, EVERYWHERE),
    "join": FaultKind("a process that ended is started again, or one is added", 2, ("command",), 1),
    "cut": FaultKind("all connections of a process with the others break", 4, EVERYWHERE),
    "keeper": FaultKind("`covey run` is stopped for a while", 2, CHECKED, 1),
    "order": FaultKind(
        "a process is killed or stopped at a chosen moment, such as the start of a restore", 16, CHECKED
    ),
    "host-kill": FaultKind("`covey run` of a host is killed, and started again", 4, ("hosts",), 1),
    "host-stop": FaultKind("all processes of a host are stopped for a while", 2, ("hosts",), 1),
    "unplug": FaultKind("a host is taken off the network", 4, ("hosts",)),
    "isolate": FaultKind("the packets between a host and all others are lost", 6, ("hosts",)),
    "split": FaultKind("the packets between two hosts and the others are lost", 4, ("hosts",)),
    "one-way": FaultKind(
        "the packets from one host to another are lost, not those in the other direction", 6, ("hosts",)
    ),
    "isolate-kill": FaultKind("as isolate, and the processes there are killed meanwhile", 3, ("hosts",)),
    "split-kill": FaultKind("as split, and the processes of the two are killed meanwhile", 3, ("hosts",)),
}

PARTED: Final = (2.0, 11.0)
SPANS: Final = {
    "stop": (0.9, 2.4),
    "pause": (0.05, 0.25),
    "slow": (0.5, 1.5),
    "keeper": (0.3, 3.3),
    "host-kill": (0.4, 3.4),
    "host-stop": (1.0, 8.0),
    "unplug": (0.5, 8.5),
    "isolate": PARTED,
    "split": PARTED,
    "one-way": PARTED,
    "isolate-kill": PARTED,
    "split-kill": PARTED,
}
"""For how many seconds a fault lasts.

A pause is well below the time after which a process that does not answer is excluded, and a stop is well above it.
"""
SLOW_PULSE: Final = (0.02, 0.05)
"""Seconds of each stop of a slow process, and between two of them."""
LOSSES: Final = frozenset(["kill", "two", "most", "all", "stop"])
"""Faults after which the members have to continue without their targets."""
EXTRA: Final = 2
"""Most processes that join beyond those that the job began with."""
BARREN: Final = 20
"""The plan ends after this many draws in a row without a feasible fault, as with one member and no newcomer."""
RESTART_SECONDS: Final = 1.5
"""Roughly how long a restarted process takes to become a member."""


def known(where: Where) -> dict[str, FaultKind]:
    """Return the kinds of faults that are possible there."""
    return {name: kind for name, kind in FAULT_KINDS.items() if where in kind.where}


def touched_by(kind: str, count: int) -> int:
    """Return how many of `count` members a fault of this kind stops, kills or asks to leave."""
    return {"two": 2, "most": count - 1, "all": count}.get(kind, int(kind in TARGETED))


TARGETED: Final = frozenset(["kill", "stop", "pause", "slow", "leave", "order"])


def pick(members: Sequence[T], fraction: float, count: int = 1) -> list[T]:
    """Return `count` of the members, beginning with the one at a fraction (below 1) of the list."""
    first = int(fraction * len(members))
    return [members[(first + number) % len(members)] for number in range(count)]


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """One planned fault."""

    number: int
    at: float
    """Seconds after the job was at work."""
    kind: str
    target: float
    """Which of the members or hosts that exist then, as a fraction below 1."""
    how: float
    """How long, or which second host, as a fraction below 1."""
    order: Order | None = None

    @property
    def seconds(self) -> float:
        """How long it lasts."""
        return between(SPANS[self.kind], self.how) if self.kind in SPANS else 0.0


def between(span: tuple[float, float], fraction: float) -> float:
    return round(span[0] + fraction * (span[1] - span[0]), 3)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChaosTerms:
    """The terms of a plan of faults; checked when built."""

    seed: int
    size: int
    """Processes that the job begins with."""
    where: Where = "command"
    kinds: tuple[str, ...] = ()
    """All that are possible there, if there is none."""
    every: float = 2.0
    """Seconds between two faults on average: each pause is drawn from half to one and a half of it."""
    count: int = 10
    duration: float | None = None
    """No fault comes later than this after the job was at work."""
    restarts: int = 0
    """How often a process that fails is restarted automatically."""
    min_alive: int = 1
    """Members that are undisturbed at any time."""

    def __post_init__(self) -> None:
        possible = known(self.where)
        for kind in self.kinds:
            if kind not in possible:
                names = ", ".join(possible)
                raise ConfigError(f"--faults knows no {kind!r} {FAULT_PLACES[self.where]}; choose from {names}")
        if self.size < 2:
            raise ConfigError(f"chaos needs at least 2 processes, so that one is left; got {self.size}")
        if not 0 <= self.min_alive < self.size or (self.where == "command" and not self.min_alive):
            least = 1 if self.where == "command" else 0
            raise ConfigError(
                f"--min-alive {self.min_alive} must be at least {least} and less than the {self.size} processes"
            )
        if not self.every > 0:
            raise ConfigError(f"--every {self.every:g} must be a number of seconds above 0")

    @property
    def most(self) -> int:
        """How many processes there may be at a time."""
        return self.size + (EXTRA if "join" in self.chosen else 0)

    @property
    def chosen(self) -> tuple[str, ...]:
        return self.kinds or tuple(known(self.where))


def plan(terms: ChaosTerms) -> list[PlannedFault]:
    """Return the faults in order; the same terms give the same faults."""
    return _Planner(terms).faults()


@dataclass(slots=True)
class _Modelled:
    """A process that the model takes to exist."""

    back_at: float
    """When it is a member."""
    restarts: int


class _Planner:
    """Draws faults one after another, and models their effect on the job."""

    def __init__(self, terms: ChaosTerms) -> None:
        self._terms = terms
        self._random = random.Random(f"covey chaos {terms.seed}")
        self._now = 0.0
        self._there = [_Modelled(0.0, terms.restarts) for _ in range(terms.size)]
        self._has_left = False
        """Whether a process was asked to leave."""

    def faults(self) -> list[PlannedFault]:
        terms, faults = self._terms, list[PlannedFault]()
        bag: list[str] = []
        barren = 0
        while len(faults) < terms.count and barren < BARREN:
            self._now = round(self._now + terms.every * self._random.uniform(0.5, 1.5), 3)
            if terms.duration is not None and self._now > terms.duration:
                break
            fault = self._next(len(faults), bag)
            if fault is None:  # the kinds take turns; an infeasible kind stays due
                bag += self._round()
                fault = self._next(len(faults), bag)
            if fault is not None:
                faults.append(fault)
            barren = 0 if fault is not None else barren + 1
        return faults

    def _round(self) -> list[str]:
        """Return every chosen kind, as often as it weighs, in random order."""
        is_equal = self._terms.where == "command"
        kinds = [kind for kind in self._terms.chosen for _ in range(1 if is_equal else FAULT_KINDS[kind].weight)]
        return self._random.sample(kinds, len(kinds))

    def _next(self, number: int, bag: list[str]) -> PlannedFault | None:
        """Draw the first feasible fault of the kinds that are due; None if there is none."""
        for kind in dict.fromkeys(bag):
            if self._is_feasible(kind):
                bag.remove(kind)
                order = draw_order(self._random) if kind == "order" else None
                fault = PlannedFault(number, self._now, kind, self._random.random(), self._random.random(), order)
                self._suffer(fault)
                return fault
        return None

    def _members(self) -> list[_Modelled]:
        return [each for each in self._there if each.back_at <= self._now]

    def _is_feasible(self, kind: str) -> bool:
        count = len(self._members())
        if kind == "join" and len(self._there) >= self._terms.most:
            return False
        if kind == "all" and self._has_left:
            return False  # `covey run` takes a process that exited with 0 for one that finished the work of the run
        return count >= FAULT_KINDS[kind].least and count - touched_by(kind, count) >= self._terms.min_alive

    def _suffer(self, fault: PlannedFault) -> None:
        """Let the model be as the job will be after a fault."""
        members = self._members()
        self._has_left = self._has_left or fault.kind == "leave"
        for each in pick(members, fault.target, touched_by(fault.kind, len(members))):
            if fault.kind in ("stop", "pause", "slow"):
                each.back_at = self._now + fault.seconds + (RESTART_SECONDS if fault.kind in LOSSES else 0.0)
            elif fault.kind != "leave" and each.restarts:
                each.restarts -= 1
                each.back_at = self._now + RESTART_SECONDS
            else:
                self._there.remove(each)
        if fault.kind == "join":
            self._there.append(_Modelled(self._now + RESTART_SECONDS, self._terms.restarts))


def draw_order(chance: random.Random) -> Order:
    """Return a random fault that waits for a moment in a process."""
    moment = chance.choice(MOMENTS)
    target = chance.choice(["fresh", "old", "any", "first"]) if moment == "restore" else chance.choice(["any", "first"])
    longest = {"join": 1.5, "restore": 0.3, "change": 0.3, "large": 0.3}.get(moment, 0.05)
    delay = 0.0 if chance.random() < 0.2 else round(longest * chance.random() ** 2, 4)
    if chance.random() < 0.75:
        return Order(moment, "any" if moment == "join" else target, int(signal.SIGKILL), delay)
    return Order(moment, target, int(signal.SIGSTOP), delay, round(chance.uniform(0.2, 2.2), 3))
