"""Whole runs that lose members, in a world with a virtual clock: `python -m covey.lab.churn --seeds 10000`.

A `Play` is a function of its seed: the number of members, what they compute, and the faults. It checks the invariants
of every run while it is performed. A seed that breaks one prints its story; `--seed` prints it again.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from covey.base.errors import CoveyError
from covey.lab.invariants import BrokenError, End, Invariants, tell_ranks, tell_state, tell_view
from covey.lab.workers import Bytes, Job, Token, Worker
from covey.lab.world import SimulatedWorld
from covey.proto.ballot import first_record
from covey.proto.changes import Excluded, Quorum, QuorumLost
from covey.proto.commit import Commit, Raised, Returned, Revoked
from covey.proto.membership import Membership
from covey.wire import membership as wire
from covey.wire.membership import Accept, Accepted, Decided, MemberKey, Prepare, Promise, Pulse, Record, State, View

if TYPE_CHECKING:
    from collections.abc import Callable

CHURN_PATIENCE = 12.0
CHURN_RELINK = 0.6
PROGRESS_WITHIN = 40.0
"""Virtual seconds from when the network is good to when all have finished, or know that they cannot."""
MOST_WORDS = 20_000
"""Messages about views in one play; a few hundred are usual."""
KEEPER_MARK = "K"


class Play:
    """One run: its members, the faults, and what the members returned."""

    sizes = (2, 6)
    delays = (0.002, 0.02, 0.1)
    faults: tuple[str, ...] = (
        "crash",
        "crash",
        "partition",
        "partition",
        "cut",
        "flap",
        "stop",
        "stop",
        "slow",
        "leave",
        "slander",
    )
    surprising = ("crash", "partition", "partition", "stop", "flap")
    """Faults that may happen just when a view is being agreed on."""
    crawling = 0.2
    """How often lanes are so slow that bytes outlive their attempt."""
    gagging = 0.2
    """How often a proposer is not heard when its view has been accepted."""
    giving_up = 0.2
    """How often a member gives a group up, and how often operations have a deadline."""

    def __init__(self, seed: int, *, quorum: Quorum = Quorum.MAJORITY, has_keeper: bool = False, tell: bool = False):
        """Plan everything from the seed."""
        self.seed, self.quorum, self.has_keeper = seed, quorum, has_keeper
        self.chance = chance = random.Random(seed)
        self.world = self._make_world(
            delay=chance.choice(self.delays),
            loss=chance.choice([0.0, 0.0, 0.05, 0.2]),
            duplicate=0.1 * chance.randrange(2),
            reorder=0.1 * chance.randrange(2),
            notice=chance.choice([0.3, 1.0]),
            describe=self._describe if tell else None,
        )
        self.world.streamed = {Bytes, Token}
        is_crawling = chance.random() < self.crawling
        self.world.stream_delay = chance.choice([0.4, 1.0]) if is_crawling else self.world.delay
        size = chance.randint(*self.sizes)
        self.min_size = chance.choice([1, 1, 1, 2])
        self.pause = chance.choice([0.02, 0.2, 0.4])
        self.deadline = chance.choice([0.3, 1.0, 4.0]) if chance.random() < self.giving_up else math.inf
        self.ids = [chance.randbytes(32) for _ in range(size)]
        self.keeper = chance.randbytes(32) if has_keeper else None
        self.clocks = {
            id: (chance.uniform(0.96, 1.04), chance.uniform(0, 1000)) for id in [*self.ids, self.keeper or b""]
        }
        all_ranks = list(range(size))
        self.groups = [all_ranks] + [
            chance.sample(all_ranks, chance.randint(1, size)) for _ in range(chance.randrange(3))
        ]
        self.programs = [
            [
                chance.choice([-1, -1, -1, chance.choice(ranks)])
                for _ in range(chance.randint(6, 20) // (5 if is_crawling else 1))
            ]
            for ranks in self.groups
        ]
        seats = [MemberKey(id, chance.randbytes(16)) for id in self.ids]
        self.first = first_record(seats, chance.randbytes(16), anchor=chance.randrange(size), has_keeper=has_keeper)
        self.disks: dict[bytes, Record] = dict.fromkeys(self.ids, self.first)
        self.workers: dict[bytes, Worker] = {}
        """The latest process of each node."""
        self.invariants = Invariants()
        self.given_up: set[int] = set()
        """Groups that a member gave up."""
        self.ends: list[tuple[str, Excluded | QuorumLost]] = []
        self.surprises = chance.randint(0, 4)
        """Faults that will come just when a view is being agreed on."""
        self.words = 0
        self.power_cuts = chance.choice([0.0, 0.0, 0.02, 0.1])
        self.good_at = math.inf
        self.faults_end_at = 1.0
        for _ in range(chance.randint(1, 4)):
            self._plan_fault(chance.uniform(0.0, 2.5), self.faults)
        for group, ranks in enumerate(self.groups):
            for rank in chance.sample(ranks, chance.randint(0, len(ranks))):
                self.world.at(chance.uniform(0.0, 3.0), self._learn, self.ids[rank], group)
            if chance.random() < self.giving_up / 2:
                self.world.at(chance.uniform(0.0, 2.5), self._give_up, self.ids[chance.choice(ranks)], group)

    def _make_world(self, **faults: Any) -> SimulatedWorld:
        return SimulatedWorld(self.seed, **faults)

    # Members

    def _begin(self, rank: int) -> None:
        id, chance = self.ids[rank], self.chance
        if id in self.world.nodes:
            return
        is_first = id not in self.workers
        life = self.first.members[rank].life if is_first else chance.randbytes(16)
        name = "abcdefgh"[rank] if is_first else self.workers[id].name + "'"
        core = self._core(self.disks[id], id, life)
        jobs = [
            Job(Commit(group, ranks, rank, core.view), program)
            for group, (ranks, program) in enumerate(zip(self.groups, self.programs, strict=True))
            if rank in ranks and is_first
        ]
        own = random.Random(chance.random())
        worker = self.workers[id] = Worker(name, core, jobs, self, own, pause=self.pause, deadline=self.deadline)
        self._enter(name, id, life, worker)

    def _introduce(self) -> None:
        self.world.introduce()

    def _begin_keeper(self) -> None:
        assert self.keeper is not None
        life = self.chance.randbytes(16)
        worker = Worker(KEEPER_MARK, self._core(self.first, self.keeper, life), [], self, self.chance, pause=0.0)
        self._enter(KEEPER_MARK, self.keeper, life, worker)

    def _core(self, record: Record, id: bytes, life: bytes) -> Membership:
        return Membership(
            record,
            id,
            life,
            random.Random(self.chance.random()),
            self._clock(id),
            keeper=self.keeper,
            min_size=self.min_size,
            quorum=self.quorum,
            patience=CHURN_PATIENCE,
            relink=CHURN_RELINK,
        )

    def _enter(self, name: str, id: bytes, life: bytes, worker: Worker) -> None:
        rate, ahead = self.clocks[id]
        self.world.start(name, id, life, worker, clock_rate=rate, clock_ahead=ahead)

    def _clock(self, id: bytes) -> float:
        rate, ahead = self.clocks[id]
        return self.world.now * rate + ahead

    # Faults

    def _plan_fault(self, at: float, kinds: tuple[str, ...]) -> None:
        world, chance = self.world, self.chance
        one, other = chance.sample(self.ids, 2)
        lasts = chance.uniform(0.1, 3.0)
        kind = chance.choice(kinds)
        if kind == "crash":
            world.at(at, lambda: world.crash(one, silently=chance.random() < 0.3 and not self.has_keeper))
            if self.has_keeper:
                world.at(at + 0.05, self._judge_all, one, True)
            if chance.random() < 0.5:
                world.at(at + lasts, self._begin, self.ids.index(one))
        elif kind == "flap":
            for _ in range(chance.randint(1, 3)):
                world.at(at + chance.uniform(0, lasts), world.flap, one, other)
        elif kind == "stop":
            world.at(at, world.stop, one)
            if chance.random() < 0.7:
                for _ in range(2):
                    world.at(at + chance.uniform(0.0, lasts), self._judge_all, one, True)
            world.at(at + lasts, world.resume, one)
        elif kind == "slow":
            world.at(at, world.slow, one, chance.choice([0.1, 0.5]))
            world.at(at + lasts, world.slow, one, 0.0)
        elif kind == "leave":
            world.at(at, self._leave, one)
        elif kind == "slander":  # health is wrong for a while
            is_stubborn = chance.random() < 0.5
            world.at(at, self._judge, other, one, True, is_stubborn)
            world.at(at + lasts, self._judge, other, one, False)
        elif not self.has_keeper:  # on one host there is no network to be cut
            side = set(chance.sample(self.ids, chance.randint(1, len(self.ids) - 1)))
            is_partition = kind == "partition"
            world.at(at, *((world.partition, side, set(self.ids) - side) if is_partition else (world.cut, one, other)))
            world.at(at + lasts, world.heal)
        self.faults_end_at = max(self.faults_end_at, at + lasts)

    def _leave(self, id: bytes) -> None:
        self.workers[id].leave()
        self.world.settle(id)

    def _learn(self, id: bytes, group: int) -> None:
        if group in (jobs := self.workers[id].jobs) and self._is_awake(id):
            self.world.tell(f"{self.workers[id].name} knows of a change in group {group}")
            jobs[group].knows = True

    def _give_up(self, id: bytes, group: int) -> None:
        worker = self.workers[id]
        if group in worker.jobs and worker.end is None and self._is_awake(id):
            worker.give_up(group, self._clock(id))
            self.world.settle(id)

    def _is_awake(self, id: bytes) -> bool:
        return id in self.world.nodes and self.world.nodes[id].backlog is None

    def _judge_all(self, id: bytes, is_dead: bool) -> None:
        for judge in sorted(self.world.nodes):
            self._judge(judge, id, is_dead)

    def _judge(self, judge: bytes, id: bytes, is_dead: bool, is_final: bool = False) -> None:
        node = self.world.nodes.get(judge)
        if node is not None and judge != id and node.backlog is None and isinstance(node.core, Worker):
            node.core.judged(id, node.clock(self.world.now), is_dead=is_dead, is_final=is_final)
            self.world.settle(judge)

    def said(self, worker: Worker, message: Any) -> None:
        """The interesting moments come just after a proposal: let many plays go wrong there."""
        self.words += 1
        if self.words > MOST_WORDS:
            raise BrokenError(f"a storm: {MOST_WORDS} messages")
        if type(message) not in (Prepare, Accept, Accepted, Decided) or not self.surprises or self.world.now > 6.0:
            return
        draw = self.chance.random()
        if draw < 0.1:
            self.surprises -= 1
            at = self.world.now + self.chance.uniform(0, 3 * self.world.delay)
            self._plan_fault(at, self.surprising)
        elif draw < 0.1 + self.gagging and isinstance(message, Accepted) and not self.has_keeper:
            self.surprises -= 1
            self._gag(message.ballot % (len(self.ids) + 1), worker)

    def _gag(self, proposer: int, voter: Worker) -> None:
        """Let only a proposer learn that its view is decided, while a member that accepted it starts anew."""
        world, lasts = self.world, self.chance.uniform(0.5, 3.0)
        world.tell(f"nothing from {tell_ranks([proposer])} arrives")
        for id in self.ids:
            if id != self.ids[proposer]:
                world.cut(self.ids[proposer], id)
        id = self._id(voter)
        world.at(world.now + world.delay, world.crash, id)
        world.at(world.now + world.delay + 0.1, self._begin, self.ids.index(id))
        world.at(world.now + lasts, world.heal)
        self.faults_end_at = max(self.faults_end_at, world.now + lasts)

    def persisted(self, worker: Worker, record: Record) -> bool:
        """Write a record; return whether the node lives on."""
        id = next((id for id, known in self.workers.items() if known is worker), None)
        if id is None:
            return True
        chance = self.chance.random()
        if chance >= self.power_cuts or self.world.now > self.faults_end_at:
            self.disks[id] = record
            return True
        if chance < self.power_cuts / 2:
            self.disks[id] = record
        self.world.crash(id)
        self.world.at(self.world.now + self.chance.uniform(0.1, 1), self._begin, self.ids.index(id))
        return False

    # Invariants

    def installed(self, worker: Worker, view: View) -> None:
        self.world.tell(f"{worker.name} INSTALLS {view.number}: {tell_view(view)}")
        self.invariants.installed(worker.name, view)
        if self.ids.index(self._id(worker)) not in view.ranks or len(view.ranks) < self.min_size:
            raise BrokenError(f"{worker.name} installed {tell_view(view)}")

    def froze(self, worker: Worker, state: State) -> None:
        self.invariants.froze(worker.name, worker.core.view, state)

    def ended(self, worker: Worker, effect: Excluded | QuorumLost) -> None:
        self.ends.append((worker.name, effect))
        if isinstance(effect, Excluded):
            self.world.tell(f"{worker.name} IS EXCLUDED by {effect.view.number}: {tell_view(effect.view)}")
            return
        self.world.tell(f"{worker.name} LOST THE QUORUM: {tell_ranks(effect.missing)} missing")
        view, is_good = worker.core.view, self.world.now > self.good_at + CHURN_PATIENCE * 1.1
        alive = [rank for rank in view.ranks if self._is_voting(rank, view)]
        members = [rank for rank in alive if self.workers[self.ids[rank]].core.is_member]
        if (
            is_good
            and 2 * len(alive) > len(view.ranks)
            and len(members) >= self.min_size
            and self.quorum is Quorum.MAJORITY
        ):
            raise BrokenError(f"{worker.name} gave up although {tell_ranks(alive)} of {tell_view(view)} are well")

    def gave_up(self, worker: Worker, group: int) -> None:
        self.world.tell(f"{worker.name} GIVES UP group {group}")
        self.given_up.add(group)

    def returned(self, worker: Worker, job: Job, outcome: Returned) -> None:
        operation, ranks = f"{job.commit.group}.{outcome.sequence}", tell_ranks(job.buffer)
        known = ", change pending" * job.commit.pending
        self.world.tell(f"{worker.name} RETURNS {operation} = {ranks} (attempt {outcome.attempt}{known})")
        root = job.roots[outcome.sequence - 1]
        expected = tuple(sorted(outcome.contributors)) if root < 0 else (root,)
        if job.buffer != expected:
            raise BrokenError(f"{worker.name} returned {ranks} for {operation}, not {tell_ranks(expected)}")
        self._end(worker, job, outcome.sequence, End(f"returned {ranks}", job.commit.pending))

    def raised(self, worker: Worker, job: Job, outcome: Raised) -> None:
        self.world.tell(f"{worker.name} RAISES {job.commit.group}.{outcome.sequence}")
        if job.roots[outcome.sequence - 1] < 0:
            raise BrokenError(f"{worker.name} raised for {job.commit.group}.{outcome.sequence}, which has no root")
        self._end(worker, job, outcome.sequence, End("raised", False))

    def revoked(self, worker: Worker, job: Job, outcome: Revoked) -> None:
        self.world.tell(f"{worker.name} IS REVOKED at {job.commit.group}.{outcome.sequence}")
        if job.commit.group not in self.given_up:
            raise BrokenError(f"{worker.name} is revoked in group {job.commit.group}, which no member gave up")
        self._end(worker, job, outcome.sequence, End("revoked", False))

    def _end(self, worker: Worker, job: Job, sequence: int, end: End) -> None:
        if worker.end is not None or job.commit.returned != sequence - (end.what == "revoked"):
            raise BrokenError(f"{worker.name} {end.what} for {job.commit.group}.{sequence} out of turn")
        self.invariants.ended(job.commit.me, worker.core.view.lineage, job.commit.group, sequence, end)

    def _check_leaders(self) -> None:
        leaders: dict[bytes, str] = {}
        for id, node in self.world.nodes.items():
            if id in self.workers and node.backlog is None:
                core, name = self.workers[id].core, self.workers[id].name
                if core.leader(node.clock(self.world.now)) == self.ids.index(id) and core.is_member:
                    other = leaders.setdefault(core.view.lineage, name)
                    if other != name and not self.has_keeper:
                        raise BrokenError(f"both {name} and {other} lead")

    def _unfinished(self) -> list[str]:
        """Return the members that run, and have neither finished nor learned that they cannot."""
        return [
            worker.name
            for id, worker in self.workers.items()
            if id in self.world.nodes and worker.end is None and (worker.jobs or worker.core.is_member)
            and (any(job.is_unheard or not job.is_over for job in worker.jobs.values()) or worker.will_leave)
        ]  # fmt: skip

    def perform(self) -> None:
        """Run to the end; BrokenError as soon as an invariant does not hold."""
        try:
            self._perform()
        except (CoveyError, RuntimeError) as error:
            raise BrokenError(f"{type(error).__name__}: {error}") from error

    def _perform(self) -> None:
        world = self.world
        for rank in range(len(self.ids)):
            self._begin(rank)
        if self.has_keeper:
            self._begin_keeper()
        self._introduce()
        while world.now < self.faults_end_at:  # a proposal may bring more faults
            world.run(min(self.faults_end_at, world.now + 0.25))
            self._check_leaders()
        world.heal()
        for id in self.ids:
            world.resume(id)
            world.slow(id, 0.0)
        world.loss = world.duplicate = world.reorder = 0.0
        world.stream_delay = world.delay
        self.good_at = world.now
        while (unfinished := self._unfinished()) and world.now < self.good_at + PROGRESS_WITHIN:
            world.run(world.now + 0.25)
            self._check_leaders()
        if unfinished:
            raise BrokenError(f"{', '.join(unfinished)} still wait after {PROGRESS_WITHIN:g} good seconds")

    def count(self) -> Counter[str]:
        """Return what happened, in numbers."""
        ends = Counter(type(end) for _, end in self.ends)
        lost = {"members excluded": ends[Excluded], "members without a quorum": ends[QuorumLost]}
        return self.invariants.count() + Counter(lost)

    def _is_voting(self, rank: int, view: View) -> bool:
        id = self.ids[rank]
        return id in self.world.nodes and self.workers[id].core.view.lineage == view.lineage

    # Transcripts

    def _id(self, worker: Worker) -> bytes:
        return next(id for id, known in self.workers.items() if known is worker)

    def _describe(self, message: Any) -> str:
        match message:
            case Prepare():
                return f"prepare {message.number} in ballot {message.ballot}"
            case Promise():
                states = "only votes" if message.states is None else " ".join(map(tell_state, message.states))
                found = "" if message.accepted is None else f", accepted {tell_view(message.accepted)}"
                hears = tell_ranks(message.hears) or "no rank"
                return f"promise {message.number} in ballot {message.ballot}: {states}; hears {hears}{found}"
            case Accept():
                return f"accept {message.view.number} in ballot {message.ballot}: {tell_view(message.view)}"
            case Decided():
                return f"decided {message.view.number}: {tell_view(message.view)}"
            case Pulse():
                what = "claim" if message.claims else "echo" if message.echo else "at"
                return f"{what} {message.number}, ballot {message.promised}"
            case Bytes() | Token():
                what = "token" + "+" * message.pending if isinstance(message, Token) else tell_ranks(message.ranks)
                return f"{message.group}.{message.sequence}@{message.attempt} {what}"
            case wire.Accepted() | wire.Refuse() | wire.Trouble() | wire.Fork():
                return repr(message).partition("lineage=")[0] + repr(message)[-60:]
        raise AssertionError(message)

    def story(self) -> str:
        """Perform the same play again, and return its messages, with their times, and how it ended."""
        again = type(self)(self.seed, quorum=self.quorum, has_keeper=self.has_keeper, tell=True)
        try:
            again.perform()
            end = "all well"
        except BrokenError as broken:
            end = f"BROKEN: {broken}"
        title = f"seed {self.seed}: {len(self.ids)} members, min_size {self.min_size}, groups {self.groups}"
        return "\n".join([title, *again.world.story, end])


def play_of(seed: int) -> Play:
    """Return the play of a seed: most are about a majority, some about a keeper or about lineages."""
    kind = seed % 8
    return Play(seed, has_keeper=kind == 6, quorum=Quorum.ANY if kind == 7 else Quorum.MAJORITY)


def main(play_of: Callable[[int], Play] = play_of, module: str = "churn") -> None:
    """Perform many plays of losing and keeping members, and say how they ended."""
    parser = argparse.ArgumentParser(prog=f"python -m covey.lab.{module}", description=main.__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many plays (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="tell the story of this one instead")
    options = parser.parse_args()
    if options.seed is not None:
        print(play_of(options.seed).story())
        return
    started_at, totals = time.monotonic(), Counter[str]()
    for seed in range(options.seeds):
        play = play_of(seed)
        try:
            play.perform()
        except BrokenError as broken:
            print(play.story())
            sys.exit(f"seed {seed}: {broken}")
        totals += play.count()
    seconds = time.monotonic() - started_at
    print(f"{options.seeds} runs in {seconds:.1f} s, all well:", ", ".join(f"{n} {what}" for what, n in totals.items()))


if __name__ == "__main__":
    main()
