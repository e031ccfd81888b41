"""A coordinator, workers that crash and are cut off from it, and groups that continue behind its back.

Whatever happens, no round begins beside one that can still decide a view.
"""

from __future__ import annotations

import contextlib
import random
from dataclasses import dataclass, field

import msgspec
import pytest

from covey.coordinator.records import RunRecord, Sizes, ViewRecord, WorkerState
from covey.coordinator.refusal import RefusalError
from covey.coordinator.run import Assignment, CoordinatedRun, Registration

NAMES = ["w0", "w1", "w2", "w3", "w4"]
ACTIONS = {
    "begin": 3,
    "crash": 1,
    "leave": 1,
    "fail": 2,
    "cut": 2,
    "heal": 2,
    "decide": 3,
    "beat": 1,
    "wait": 2,
    "restart": 0.2,
}
"""What happens, and how often."""
STEPS = 60
SIZES = (Sizes(2, 5, 1.0), Sizes(3, 5, 3.0))


@dataclass
class Worker:
    """A process, or the place where the next one is started."""

    name: str
    start: int = 0
    is_alive: bool = False
    is_linked: bool = False
    """Whether it and the coordinator hear each other."""
    is_registered: bool = False
    rank: int = -1
    """In the group that it is in; -1 if it is in none."""
    assignment: Assignment | None = None
    view: ViewRecord | None = None

    @property
    def life(self) -> bytes:
        return f"{self.name}/{self.start}".encode().ljust(16)


@dataclass
class World:
    seed: int
    mutant: str = ""
    now: float = 0.0
    workers: list[Worker] = field(default_factory=lambda: [Worker(name) for name in NAMES])
    views: dict[int, ViewRecord] = field(default_factory=dict)
    """The latest view of each round, which the coordinator need not know."""

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.sizes = self.random.choice(SIZES)
        self.weights = [often * self.random.choice((0.3, 1, 3)) for often in ACTIONS.values()]
        self.run = CoordinatedRun(RunRecord("train", self.sizes), now=self.now)

    # What happens

    def step(self) -> None:
        worker = self.random.choice(self.workers)
        (action,) = self.random.choices(list(ACTIONS), self.weights)
        getattr(self, action)(worker)
        if self.mutant == "crashed workers count as told":
            for record in self.run.record.workers.values():
                record.has_told |= record.state is WorkerState.WAITING
        self.now += 0.1
        self.run.tick(self.now)
        self.seat()

    def begin(self, worker: Worker) -> None:
        if not worker.is_alive:
            worker.start += 1
            worker.is_alive = worker.is_linked = True
            worker.assignment = worker.view = None
        self.register(worker)

    def register(self, worker: Worker) -> None:
        """Register, or again after the stream broke; a worker that is refused tries again later."""
        if not (worker.is_alive and worker.is_linked) or worker.is_registered:
            return
        asked = Registration(
            worker.name, worker.name, worker.life, "", "10.0.0.1:1", self.sizes, assignment=worker.assignment
        )
        with contextlib.suppress(RefusalError):
            self.run.register(asked, now=self.now)
            worker.is_registered = True
            self.seat()

    def crash(self, worker: Worker) -> None:
        if worker.is_alive:
            worker.is_alive, worker.rank = False, -1
            self.part(worker)

    def leave(self, worker: Worker) -> None:
        """Close the group, and the process; the coordinator hears of it if it can."""
        if not worker.is_alive:
            return
        worker.is_alive, worker.rank = False, -1
        if worker.is_registered:
            told = None if self.mutant == "the last view is not told" else worker.view
            self.run.unregister(worker.name, worker.name, worker.life, told, now=self.now)
            worker.is_registered = False
            self.seat()

    def fail(self, worker: Worker) -> None:
        """Let most workers that the coordinator hears leave their group or crash, and start them again."""
        for each in self.workers:
            if each.is_registered and each.rank >= 0 and self.random.random() < 0.8:
                self.random.choice((self.leave, self.crash))(each)
        self.now += self.random.choice((0.0, 10.0))
        for each in self.workers:
            if not each.is_alive:
                self.begin(each)

    def cut(self, worker: Worker) -> None:
        worker.is_linked = False
        self.part(worker)

    def part(self, worker: Worker) -> None:
        if worker.is_registered:
            worker.is_registered = False
            self.run.disconnect(worker.name, worker.life, now=self.now)

    def heal(self, worker: Worker) -> None:
        worker.is_linked = worker.is_alive
        self.register(worker)

    def decide(self, worker: Worker) -> None:
        """Let some members of the worker's group, if they are a quorum, go on without the others."""
        if worker.rank < 0 or worker.view is None:
            return
        last = self.views[worker.view.round]
        able = [each for each in self.able(last.round) if self.random.random() < 0.7]
        if self.is_quorum([each.rank for each in able], last):
            members = tuple(sorted(each.rank for each in able))
            self.views[last.round] = ViewRecord(last.round, 0, last.number + 1, members)
            for each in able:
                each.view = self.views[last.round]

    def beat(self, worker: Worker) -> None:
        if worker.is_registered:
            self.run.hear(worker.name, worker.name, worker.life, worker.view, 0, now=self.now)

    def wait(self, worker: Worker) -> None:
        self.now += self.random.choice((1.0, 6.0, 40.0))

    def restart(self, worker: Worker) -> None:
        """End the coordinator, and start it again from what is on disk."""
        written = msgspec.json.encode(self.run.record)
        self.run = CoordinatedRun(msgspec.json.decode(written, type=RunRecord), now=self.now)
        for each in self.workers:
            each.is_registered = False

    # What has to hold

    def able(self, round: int) -> list[Worker]:
        """Return the workers that are in the latest view of a round, and at work."""
        last = self.views[round]
        return [
            each
            for each in self.workers
            if each.view is not None and each.view.order == last.order and each.rank in last.members
        ]

    def is_quorum(self, ranks: list[int], view: ViewRecord) -> bool:
        here = set(ranks) & set(view.members)
        return 2 * len(here) > len(view.members) or (2 * len(here) == len(view.members) and min(view.members) in here)

    def seat(self) -> None:
        """Give workers the ranks that the coordinator tells them; a round that began must be the only one."""
        round = self.run.record.round
        if round and round not in self.views:
            for old, last in self.views.items():
                able = [each.rank for each in self.able(old)]
                assert not self.is_quorum(able, last), f"seed {self.seed}: round {round} begins beside {last} of {able}"
            self.views[round] = ViewRecord(round, 0, 0, tuple(range(self.run.record.size)))
        for worker in self.workers:
            outlook = self.run.outlook(worker.name, worker.life, now=self.now) if worker.is_registered else None
            if outlook is None:  # also of a worker that the others had excluded when this round began
                self.part(worker)
            elif worker.assignment is None and outlook.assignment is not None:
                worker.assignment, worker.rank = outlook.assignment, outlook.assignment.rank
                worker.view = self.views[round]
        seated = [each for each in self.workers if each.assignment is not None and each.rank >= 0]
        places = [(each.assignment.round, each.rank) for each in seated if each.assignment is not None]
        assert len(set(places)) == len(places), f"seed {self.seed}: two workers with one rank"


def rounds(seed: int, mutant: str = "") -> int:
    world = World(seed, mutant)
    for worker in world.workers:
        world.begin(worker)
    for _ in range(STEPS):
        world.step()
    return world.run.record.round


def test_no_round_begins_beside_one_that_can_go_on() -> None:
    found = [rounds(seed) for seed in range(150)]
    assert sum(found) > 250, "hardly anything happened"


@pytest.mark.parametrize("mutant", ["crashed workers count as told", "the last view is not told"])
def test_a_coordinator_that_lacks_a_rule_is_caught(mutant: str) -> None:
    def search() -> None:
        for seed in range(1000):
            rounds(seed, mutant)

    with pytest.raises(AssertionError, match="begins beside"):
        search()
