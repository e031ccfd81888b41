"""Members of a simulated run that do what a run does: one operation after another, in several groups, all or nothing.

A `Worker` drives the real cores (`Membership`, `Commit`) as the runtime does. Instead of numbers it reduces the ranks
that contributed, in place, along a chain, and passes the result around; so a contribution that is lost, counted twice
or of another attempt shows in the result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from covey.proto.changes import Excluded, Freeze, Installed, Persist, QuorumLost, Send
from covey.proto.commit import Age, Commit, Raised, Returned, Run, Tell
from covey.wire.membership import Token

if TYPE_CHECKING:
    import random

    from covey.proto.membership import Membership
    from covey.wire.membership import Record, View


@dataclass(frozen=True, slots=True)
class Bytes:
    """What a lane carries: a header and the ranks that were reduced so far."""

    group: int
    sequence: int
    attempt: int
    is_result: bool
    ranks: tuple[int, ...]


class Watcher(Protocol):
    """Who is told what a worker did."""

    def persisted(self, worker: Worker, record: Record) -> bool: ...
    def installed(self, worker: Worker, view: View) -> None: ...
    def ended(self, worker: Worker, effect: Excluded | QuorumLost) -> None: ...
    def returned(self, worker: Worker, group: int, result: tuple[int, ...], effect: Returned) -> None: ...
    def raised(self, worker: Worker, group: int, effect: Raised) -> None: ...
    def said(self, worker: Worker, message: Any) -> None: ...


class Job:
    """One group at one worker: its commit protocol, its buffer, and the program it runs."""

    def __init__(self, commit: Commit, roots: list[int]) -> None:
        self.commit = commit
        self.roots = roots
        """One operation each; -1 is an all_reduce, else a broadcast from there."""
        self.root = -1
        self.kept: tuple[int, ...] = ()
        """The input, until the operation has returned."""
        self.buffer: tuple[int, ...] = ()
        self.run: Run | None = None
        """What is being executed."""
        self.taken: set[bool] = set()
        """Whether it took a part, and the result: a lane does not repeat itself."""
        self.is_started = False
        self.start_at = 0.0
        self.started_at = 0.0
        self.early: list[tuple[int, Bytes]] = []

    @property
    def is_over(self) -> bool:
        return self.commit.returned == len(self.roots)

    def start(self, now: float) -> None:
        self.is_started, self.started_at = True, now
        self.root = self.roots[self.commit.returned]
        self.kept = (self.commit.me,)
        self.commit.start(self.root)

    def execute(self, run: Run) -> list[tuple[int, Bytes]]:
        """Begin an attempt; return what to send."""
        self.run, self.buffer, self.taken = run, self.kept, set()
        if self.root >= 0:
            if self.root == self.commit.me:
                self.commit.completed(run.attempt)
                return [(rank, self._bytes(True)) for rank in run.live if rank != self.root]
            return []
        return self._pass_on() if run.live[0] == self.commit.me else []

    def take(self, rank: int, data: Bytes) -> list[tuple[int, Bytes]]:
        """Use bytes of the present attempt; return what to send."""
        run, me = self.run, self.commit.me
        if run is None or rank not in run.live:
            return []
        before = run.live[run.live.index(me) - 1]
        if rank != (self.root if self.root >= 0 else before) or data.is_result in self.taken:
            return []
        self.taken.add(data.is_result)
        if self.root >= 0:
            self.buffer = data.ranks
            self.commit.completed(run.attempt)
            return []
        if not data.is_result:
            self.buffer = tuple(sorted([*data.ranks, *self.buffer]))
            return self._pass_on()
        self.buffer = data.ranks
        self.commit.completed(run.attempt)
        return self._around()

    def _pass_on(self) -> list[tuple[int, Bytes]]:
        assert self.run is not None
        live, me = self.run.live, self.commit.me
        if live[-1] != me:
            return [(live[live.index(me) + 1], self._bytes(False))]
        self.commit.completed(self.run.attempt)
        return self._around()

    def _around(self) -> list[tuple[int, Bytes]]:
        assert self.run is not None
        live = self.run.live
        after = (live.index(self.commit.me) + 1) % len(live)
        return [] if live[after] == live[-1] else [(live[after], self._bytes(True))]

    def _bytes(self, is_result: bool) -> Bytes:
        assert self.run is not None
        return Bytes(self.commit.group, self.run.sequence, self.run.attempt, is_result, self.buffer)


class Worker:
    """One life of a member in a world."""

    def __init__(
        self, name: str, core: Membership, jobs: list[Job], watcher: Watcher, random: random.Random, *, pause: float
    ) -> None:
        self.name, self.core, self.watcher = name, core, watcher
        self.jobs = {job.commit.group: job for job in jobs}
        self.end: Excluded | QuorumLost | None = None
        self._random, self._pause = random, pause
        """`pause` is the longest time between operations, and for stopping executors."""
        self.stall_after = 4.0
        self._freeze: tuple[float, int] = (math.inf, 0)
        self.will_leave = self._has_left = False
        self._doubted: set[bytes] = set()
        self._out: list[tuple[bytes, Any]] = []
        self._ids = core.ids

    # What a world tells.

    def link_up(self, peer_id: bytes, peer_life: bytes, now: float) -> bool:
        is_up = self.core.link_up(peer_id, peer_life, now)
        self._heard(peer_id, now)
        self._perform(now)
        return is_up

    def link_down(self, peer_id: bytes, now: float) -> None:
        self.core.link_down(peer_id, now)
        self._perform(now)

    def judged(self, peer_id: bytes, now: float, *, is_dead: bool, is_final: bool = False) -> None:
        """Health has changed its mind; unless it is final, a word of the peer changes it back."""
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

    def received(self, peer_id: bytes, message: Any, now: float) -> None:
        rank = self._ids.index(peer_id)
        self._heard(peer_id, now)
        if isinstance(message, Bytes):
            if self.end is None and message.group in self.jobs:
                self._take(self.jobs[message.group], rank, message)
        elif isinstance(message, Token):
            if self.end is None and message.group in self.jobs:
                self.jobs[message.group].commit.received(rank, message)
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
                job.start(now)
            elif job.is_started and now >= job.started_at + self.stall_after:
                job.started_at = now
                self.core.disturbed(job.commit.attempt, now)
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
                deadlines.append(job.started_at + self.stall_after)
            elif not self.will_leave:
                deadlines.append(job.start_at)
        return min(deadlines)

    def outgoing(self) -> list[tuple[bytes, Any]]:
        out, self._out = self._out, []
        return out

    def _may_leave(self) -> bool:
        is_idle = not any(job.is_started for job in self.jobs.values())
        return self.will_leave and not self._has_left and is_idle and self.end is None

    def _unfinished(self) -> list[Job]:
        return [] if self.end is not None else [job for job in self.jobs.values() if not job.is_over]

    # What the cores want.

    def _perform(self, now: float) -> None:
        again = True
        while again:
            again = False
            for effect in self.core.effects():
                again = True
                match effect:
                    case Send(peer, message):
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
                        for job in self.jobs.values():
                            job.commit.install(view)
                    case Excluded() | QuorumLost():
                        self._freeze = (math.inf, 0)
                        if self.end is None:
                            self.end = effect
                        self.watcher.ended(self, effect)
            if self.end is None:
                for job in self.jobs.values():
                    again |= self._perform_job(job, now)

    def _perform_job(self, job: Job, now: float) -> bool:
        effects = job.commit.effects()
        for effect in effects:
            match effect:
                case Run():
                    job.started_at = now
                    self._send_bytes(job.execute(effect))
                    early, job.early = job.early, []
                    for rank, data in early:
                        self._take(job, rank, data)
                case Tell(rank, token):
                    self._out.append((self._ids[rank], token))
                case Returned():
                    self.watcher.returned(self, job.commit.group, job.buffer, effect)
                    self._finish(job, now)
                case Raised():
                    self.watcher.raised(self, job.commit.group, effect)
                    self._finish(job, now)
        return bool(effects)

    def _finish(self, job: Job, now: float) -> None:
        job.is_started, job.run = False, None
        job.start_at = now + self._pause * self._random.random()

    def _take(self, job: Job, rank: int, data: Bytes) -> None:
        match job.commit.age(data.sequence, data.attempt):
            case Age.PRESENT:
                self._send_bytes(job.take(rank, data))
            case Age.FUTURE:
                job.early.append((rank, data))

    def _send_bytes(self, messages: list[tuple[int, Bytes]]) -> None:
        self._out += [(self._ids[rank], data) for rank, data in messages]

    def _stop_executors(self, now: float) -> None:
        number, self._freeze = self._freeze[1], (math.inf, 0)
        states = [job.commit.freeze() for job in self.jobs.values()]
        self.core.frozen(number, states, now)
