"""Members of a simulated run: they perform one operation after another, in several groups, all or nothing.

A `Worker` drives the real cores (`Membership`, `Commit`) as the runtime does. Instead of numbers it reduces the set of
contributing ranks, in place, along a chain, and passes the result on; so a contribution that is lost, counted twice or
of another attempt shows in the result. The runtime makes new lanes for every attempt; here all bytes name their attempt
instead.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from covey.proto.changes import Excluded, Freeze, Installed, Persist, QuorumLost, SendToNode
from covey.proto.commit import Commit, Raised, Returned, Revoked, RunOperation

if TYPE_CHECKING:
    import random

    from covey.proto.membership import Membership
    from covey.wire.membership import Record, State, View


@dataclass(frozen=True, slots=True)
class Bytes:
    """What a lane carries: a header and the ranks reduced so far."""

    group: int
    sequence: int
    attempt: int
    is_result: bool
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Token:
    """In the barrier: the sender, and all ranks whose tokens it has, are complete; whether any knows of a change."""

    group: int
    sequence: int
    attempt: int
    round: int
    pending: bool


class Age(enum.Enum):
    """When a message of a lane can be used."""

    PAST = enum.auto()
    """Never: drop it."""
    PRESENT = enum.auto()
    FUTURE = enum.auto()
    """Later: the sender installed the view first, or is an operation ahead."""


class Watcher(Protocol):
    """Receives what a worker did."""

    def persisted(self, worker: Worker, record: Record) -> bool: ...
    def froze(self, worker: Worker, state: State) -> None: ...
    def installed(self, worker: Worker, view: View) -> None: ...
    def ended(self, worker: Worker, effect: Excluded | QuorumLost) -> None: ...
    def gave_up(self, worker: Worker, group: int) -> None: ...
    def returned(self, worker: Worker, job: Job, outcome: Returned) -> None: ...
    def raised(self, worker: Worker, job: Job, outcome: Raised) -> None: ...
    def revoked(self, worker: Worker, job: Job, outcome: Revoked) -> None: ...
    def said(self, worker: Worker, message: Any) -> None: ...


class Job:
    """One group at one worker: its commit protocol, its executor and buffer, and the program it runs."""

    def __init__(self, commit: Commit, roots: list[int]) -> None:
        self.commit = commit
        self.roots = roots
        """One operation each; -1 is an all_reduce, else a broadcast from there."""
        self.knows = False
        """Whether this member has heard of a waiting change."""
        self.root = -1
        self.kept: tuple[int, ...] = ()
        """The input, until the operation has returned."""
        self.buffer: tuple[int, ...] = ()
        self.run: RunOperation | None = None
        """What is being executed."""
        self.taken: set[bool] = set()
        """Whether it has received the partial sum, and the result: each arrives once."""
        self.told = 0
        """Rounds of the barrier whose token was sent."""
        self.tokens: dict[tuple[int, int], bool] = {}
        """By round and sender: what the token carried."""
        self.pending = False
        """What the barrier carries."""
        self.early: list[tuple[int, Bytes | Token]] = []
        self.out: list[tuple[int, Bytes | Token]] = []
        self.is_started = self.is_revoked = False
        self.start_at = 0.0
        self.asked_at = 0.0
        self.started_at = 0.0
        """The present attempt."""

    @property
    def is_over(self) -> bool:
        return self.is_revoked or self.commit.returned == len(self.roots)

    @property
    def is_unheard(self) -> bool:
        """Whether it wants the group revoked, and no view knows of that."""
        return self.commit.gives_up and not self.commit.is_revoked

    def start(self, now: float) -> RunOperation | Raised | Revoked | None:
        self.is_started, self.asked_at, self.started_at = True, now, now
        self.root = self.roots[self.commit.returned]
        self.kept = (self.commit.me,)
        return self.commit.start(self.root)

    def age(self, sequence: int, attempt: int) -> Age:
        """Tell when a message of this operation and attempt can be used. While frozen, the current attempt is past."""
        commit, run = self.commit, self.run
        if attempt < commit.attempt + commit.is_frozen or sequence <= commit.returned:
            return Age.PAST
        is_now = run is not None and (sequence, attempt) == (run.sequence, run.attempt)
        return Age.PRESENT if is_now else Age.FUTURE

    def execute(self, run: RunOperation) -> Returned | None:
        """Begin an attempt, with the messages that arrived early for it."""
        self.run, self.buffer, self.taken, self.told, self.tokens = run, self.kept, set(), 0, {}
        ended = None
        if self.root == self.commit.me:
            self.out += [(rank, self._bytes(True)) for rank in run.live if rank != self.root]
            ended = self._complete()
        elif self.root < 0 and run.live[0] == self.commit.me:
            ended = self._pass_on()
        early, self.early = self.early, []
        for rank, message in early:
            ended = self.take(rank, message) or ended
        return ended

    def take(self, rank: int, message: Bytes | Token) -> Returned | None:
        """Use a message from a rank, if it can be used now."""
        age = self.age(message.sequence, message.attempt)
        if age is Age.FUTURE:
            self.early.append((rank, message))
        if age is not Age.PRESENT:
            return None
        if isinstance(message, Bytes):
            return self._reduce(rank, message)
        self.tokens[message.round, rank] = message.pending
        return self._advance() if self.told else None

    def _reduce(self, rank: int, data: Bytes) -> Returned | None:
        run, me = self.run, self.commit.me
        if run is None or rank not in run.live:
            return None
        before = run.live[run.live.index(me) - 1]
        if rank != (self.root if self.root >= 0 else before) or data.is_result in self.taken:
            return None
        self.taken.add(data.is_result)
        if self.root < 0 and not data.is_result:
            self.buffer = tuple(sorted([*data.ranks, *self.buffer]))
            return self._pass_on()
        self.buffer = data.ranks
        if self.root < 0:
            self._around()
        return self._complete()

    def _pass_on(self) -> Returned | None:
        assert self.run is not None
        live, me = self.run.live, self.commit.me
        if live[-1] != me:
            self.out.append((live[live.index(me) + 1], self._bytes(False)))
            return None
        self._around()
        return self._complete()

    def _around(self) -> None:
        assert self.run is not None
        live = self.run.live
        after = (live.index(self.commit.me) + 1) % len(live)
        if live[after] != live[-1]:
            self.out.append((live[after], self._bytes(True)))

    def _bytes(self, is_result: bool) -> Bytes:
        assert self.run is not None
        return Bytes(self.commit.group, self.run.sequence, self.run.attempt, is_result, self.buffer)

    def _complete(self) -> Returned | None:
        """Enter the barrier."""
        assert self.run is not None
        self.pending = self.knows
        return self._advance() if self.commit.completed(self.run.attempt) else None

    def _advance(self) -> Returned | None:
        """Send the tokens that are due (Hensgen, Finkel and Manber, 1988); return the outcome once all have arrived."""
        run = self.run
        assert run is not None
        index, size = run.live.index(self.commit.me), len(run.live)
        for round_ in range((size - 1).bit_length()):
            if round_ == self.told:
                self.told += 1
                token = Token(self.commit.group, run.sequence, run.attempt, round_, self.pending)
                self.out.append((run.live[(index + (1 << round_)) % size], token))
            source = run.live[(index - (1 << round_)) % size]
            if (round_, source) not in self.tokens:
                return None
            self.pending |= self.tokens[round_, source]
        return self.commit.passed(run.attempt, self.pending)


class Worker:
    """One incarnation of a member in a world."""

    def __init__(
        self,
        name: str,
        core: Membership,
        jobs: list[Job],
        watcher: Watcher,
        random: random.Random,
        *,
        pause: float,
        deadline: float = math.inf,
    ) -> None:
        self.name, self.core, self.watcher = name, core, watcher
        self.jobs = {job.commit.group: job for job in jobs}
        self.end: Excluded | QuorumLost | None = None
        self._random, self._pause, self._deadline = random, pause, deadline
        """Start with the given cores. `pause` is the longest time between operations, and for stopping executors; an
        operation that takes longer than `deadline` is given up."""
        self.stall_after = 4.0
        self._freeze: tuple[float, int] = (math.inf, 0)
        self.will_leave = self._has_left = False
        self._doubted: set[bytes] = set()
        self._out: list[tuple[bytes, Any]] = []
        self._ids = core.ids

    # Called by the world.

    def link_up(self, peer_id: bytes, peer_life: bytes, now: float) -> bool:
        is_up = self.core.link_up(peer_id, peer_life, now)
        self._heard(peer_id, now)
        self._perform(now)
        return is_up

    def link_down(self, peer_id: bytes, now: float) -> None:
        self.core.link_down(peer_id, now)
        self._perform(now)

    def judged(self, peer_id: bytes, now: float, *, is_dead: bool, is_final: bool = False) -> None:
        """The health monitor judges a peer dead or alive; unless that is final, a message of the peer revokes it."""
        self._doubted.discard(peer_id)
        if is_dead and not is_final:
            self._doubted.add(peer_id)
        self.core.judged(peer_id, now, is_dead=is_dead)
        self._perform(now)

    def _heard(self, peer_id: bytes, now: float) -> None:
        if peer_id in self._doubted:
            self._doubted.discard(peer_id)
            self.core.judged(peer_id, now, is_dead=False)

    def leave(self) -> None:
        """Leave when the operations of all groups are over."""
        self.will_leave = True

    def give_up(self, group: int, now: float) -> None:
        """Ask for a group to be revoked."""
        self._give_up(self.jobs[group], now)
        self._perform(now)

    def _give_up(self, job: Job, now: float) -> None:
        self.watcher.gave_up(self, job.commit.group)
        job.commit.give_up()
        self.core.disturbed(self.core.view.number, now)

    def received(self, peer_id: bytes, message: Any, now: float) -> None:
        self._heard(peer_id, now)
        if isinstance(message, Bytes | Token):
            if self.end is None and message.group in self.jobs:
                job = self.jobs[message.group]
                self._follow(job, job.take(self._ids.index(peer_id), message), now)
        else:
            self.core.received(peer_id, message, now)
        self._perform(now)

    def tick(self, now: float) -> None:
        if now >= self._freeze[0]:
            self._stop_executors(now)
        if now >= self.core.next_deadline():
            self.core.tick(now)
        for job in self._unfinished():
            if not job.is_started and now >= job.start_at and not self.will_leave:
                self._follow(job, job.start(now), now)
            elif job.is_started and now >= job.started_at + self.stall_after:
                job.started_at = now
                self.core.disturbed(job.commit.attempt, now)
            if now >= self._give_up_at(job):
                self._give_up(job, now)
        if self._may_leave():
            self._has_left = True
            self.core.leave(now)
        self._perform(now)

    def next_deadline(self) -> float:
        if self._may_leave():
            return 0.0
        deadlines = [self._freeze[0], self.core.next_deadline()]
        for job in self._unfinished():
            if job.is_started:
                deadlines += [job.started_at + self.stall_after, self._give_up_at(job)]
            elif not self.will_leave:
                deadlines.append(job.start_at)
        return min(deadlines)

    def outgoing(self) -> list[tuple[bytes, Any]]:
        out, self._out = self._out, []
        return out

    def _give_up_at(self, job: Job) -> float:
        return job.asked_at + self._deadline if job.is_started and not job.commit.gives_up else math.inf

    def _may_leave(self) -> bool:
        is_idle = not any(job.is_started for job in self.jobs.values())
        return self.will_leave and not self._has_left and is_idle and self.end is None

    def _unfinished(self) -> list[Job]:
        return [] if self.end is not None else [job for job in self.jobs.values() if not job.is_over]

    # Effects of the cores.

    def _perform(self, now: float) -> None:
        again = True
        while again:
            again = False
            for effect in self.core.effects():
                again = True
                match effect:
                    case SendToNode(peer, message):
                        self._out.append((peer, message))
                        self.watcher.said(self, message)
                    case Persist(record):
                        if not self.watcher.persisted(self, record):
                            return  # the power went out
                    case Freeze(number):
                        self._freeze = (now + self._pause * self._random.random() / 4, number)
                    case Installed(view, _):
                        self._freeze = (math.inf, 0)
                        self.watcher.installed(self, view)
                        self._install(view, now)
                    case Excluded() | QuorumLost():
                        self._freeze = (math.inf, 0)
                        if self.end is None:
                            self.end = effect
                        self.watcher.ended(self, effect)

    def _install(self, view: View, now: float) -> None:
        for job in self.jobs.values():
            self._follow(job, job.commit.install(view), now)
        if any(job.is_unheard for job in self.jobs.values()):
            self.core.disturbed(view.number, now)

    def _follow(self, job: Job, outcome: RunOperation | Returned | Raised | Revoked | None, now: float) -> None:
        """Carry out the outcome of an operation."""
        if isinstance(outcome, RunOperation):
            job.started_at = now
            outcome = job.execute(outcome)
        self._out += [(self._ids[rank], message) for rank, message in job.out]
        job.out.clear()
        match outcome:
            case Returned():
                self.watcher.returned(self, job, outcome)
            case Raised():
                self.watcher.raised(self, job, outcome)
            case Revoked():
                job.is_revoked = True
                self.watcher.revoked(self, job, outcome)
            case _:
                return
        job.is_started, job.run = False, None
        job.start_at = now + self._pause * self._random.random()

    def _stop_executors(self, now: float) -> None:
        number, self._freeze = self._freeze[1], (math.inf, 0)
        states = [job.commit.freeze() for job in self.jobs.values()]
        for state in states:
            self.watcher.froze(self, state)
        self.core.frozen(number, states, now)
