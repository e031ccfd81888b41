"""Whole runs of one name, from the first link to the end, in a world with a virtual clock and disks.

`python -m covey.lab.lineages --seeds 1000` performs them. A `Story` is a function of its seed: machines come and
go, are cut off for longer than patience, crash, and are started again with what they wrote down. The real cores decide
(`Joining`, `Membership`); operations are left out. A story checks, while it is performed, that one run never becomes
two.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from covey.lab.invariants import BrokenError
from covey.lab.world import SimulatedWorld
from covey.proto.ballot import first_record
from covey.proto.changes import Excluded, Freeze, Installed, Persist, QuorumLost, SendToNode
from covey.proto.joining import Agree, Bind, Joining, JoiningPace, Remember, Say, founding_record, seated_for
from covey.proto.membership import Membership
from covey.wire.formation import Ending, FoundingMember, Here, Phase, Remembered, Terms
from covey.wire.membership import Bound, MemberKey, Seated, Successor, View

STORY_PATIENCE = 4.0
STORY_RELINK = 0.5
TOGETHER_WITHIN = 90.0
"""Virtual seconds from when all is good to when all processes are in one generation."""
STORY_LEAVE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class ViewNotice:
    """A message about the views of a generation."""

    generation: int
    message: Any


@dataclass(frozen=True, slots=True)
class FoundedNotice:
    """The sender is in this generation."""

    origin: bytes
    successor: Successor


@dataclass(frozen=True, slots=True)
class EndedNotice:
    """The sender knows that a run is over."""

    ending: Ending


@dataclass
class Disk:
    """What one machine keeps through a crash."""

    remembered: Remembered = field(default_factory=Remembered)
    bound: Bound | None = None


class SimulatedProcess:
    """One incarnation of a node: it joins the run, and is then in one generation of it after another."""

    def __init__(self, story: Story, index: int, life: bytes, *, is_returning: bool) -> None:
        self.story, self.index, self.life = story, index, life
        self.id, self.disk = story.ids[index], story.disks[index]
        self.name = story.name(index)
        self._random = random.Random(story.chance.random())
        member = FoundingMember(self.id, life, self.name, self.name, b"")
        self.joining = Joining(
            member,
            story.terms,
            self._random,
            story.world.now,
            remembered=self.disk.remembered,
            bound=self.disk.bound,
            is_returning=is_returning,
            is_elastic=True,
            wall=lambda: 1e9 + story.world.now,
            pace=JoiningPace(view_patience=STORY_PATIENCE, relink=STORY_RELINK),
        )
        self.joining.may_go_on = lambda: self.core is not None and self.core.hears_quorum
        self.origin = b""
        self.generation = -1
        self.cores: dict[int, Membership] = {}
        """By generation: the one that this process is in, and the one before."""
        self.seats: tuple[MemberKey, ...] = ()
        self.links: dict[bytes, bytes] = {}
        self.early: list[tuple[bytes, Any]] = []
        self.is_frozen = False
        self._is_outlived = self.is_done = False
        self.over: Ending | None = None
        """The run that this process was in, or waited for, has ended."""
        self._out: list[tuple[bytes, Any]] = []

    @property
    def core(self) -> Membership | None:
        return self.cores.get(self.generation)

    @property
    def is_member(self) -> bool:
        return self.core is not None and self.core.is_member

    # Inputs

    def link_up(self, peer_id: bytes, peer_life: bytes, now: float) -> bool:
        is_wanted = self.joining.link_up(peer_id, peer_life, now)
        if is_wanted:
            self.links[peer_id] = peer_life
            for core in self.cores.values():
                core.link_up(peer_id, peer_life, now)
            if self.generation >= 0 and (seated := seated_for(peer_id, self.disk.bound)) is not None:
                self._out.append((peer_id, ViewNotice(self.generation, seated)))
        self._perform(now)
        return is_wanted

    def link_down(self, peer_id: bytes, now: float) -> None:
        self.links.pop(peer_id, None)
        self.joining.link_down(peer_id, now)
        for core in self.cores.values():
            core.link_down(peer_id, now)
        self._perform(now)

    def received(self, peer_id: bytes, message: Any, now: float) -> None:
        match message:
            case ViewNotice(_, Seated() as seated):
                self.joining.agreeing(peer_id, 0, seated, now)
            case ViewNotice(generation, body) if generation in self.cores:
                self.cores[generation].received(peer_id, body, now)
            case ViewNotice(generation, _) if self.generation > generation >= 0:
                assert self.core is not None
                view = self.core.view
                if view.ranks and view.successor is None:  # the asker is told where the run is now
                    self._out.append((peer_id, FoundedNotice(self.origin, self._as_successor())))
            case ViewNotice(generation, body):
                if generation > self.generation >= 0:
                    self.early.append((peer_id, message))
                self.joining.agreeing(peer_id, generation, body, now)
            case FoundedNotice(origin, successor):
                self._heard_founded(peer_id, origin, successor, now)
            case EndedNotice(ending):
                self.joining.ended(ending, now, peer_id)
            case _:
                if isinstance(message, Here):
                    self.story.informed(self, message)
                self.joining.heard(peer_id, message, now)
        self._perform(now)

    def tick(self, now: float) -> None:
        if now >= self.joining.next_deadline():
            self.joining.tick(now)
        for core in list(self.cores.values()):
            if now >= core.next_deadline():
                core.tick(now)
        self._perform(now)

    def next_deadline(self) -> float:
        return min([self.joining.next_deadline(), *(core.next_deadline() for core in self.cores.values())])

    def outgoing(self) -> list[tuple[bytes, Any]]:
        out, self._out = self._out, []
        return out

    # Generations

    def _heard_founded(self, peer_id: bytes, origin: bytes, successor: Successor, now: float) -> None:
        is_ours = MemberKey(self.id, self.life) in successor.members
        if self.generation >= 0:
            if origin == self.origin and successor.generation > self.generation and not is_ours:
                self._go_away(now)  # the run is generations ahead, without this process
            return
        formation = self.joining.formation
        is_open = self.joining.may_enter(origin, successor.generation)
        if is_ours and is_open and formation.is_member_of_ours(peer_id, origin):
            self._enter(origin, successor, now)

    def _enter(self, origin: bytes, successor: Successor, now: float) -> None:
        record = first_record(successor.members, successor.lineage, anchor=successor.tie_breaker)
        known = self.disk.bound
        if known is not None and (known.origin, known.generation) == (origin, successor.generation):
            record = known.record  # it has voted there before it heard of its seat
        bound = Bound(successor.generation, record, origin, successor.tie_breaker)
        self._begin(origin, successor.generation, bound, now)
        for seat in successor.members:
            if seat.id in self.links:
                self._out.append((seat.id, FoundedNotice(origin, successor)))

    def _begin(self, origin: bytes, generation: int, bound: Bound, now: float) -> None:
        self.disk.bound = bound
        self.origin, self.generation, self.seats = origin, generation, bound.record.members
        core = self.cores[generation] = Membership(
            bound.record, self.id, self.life, self._random, now, patience=STORY_PATIENCE, relink=STORY_RELINK
        )
        for number in [number for number in self.cores if number < generation - 1]:
            del self.cores[number]
        self.story.began(self, bound)
        for peer_id, life in self.links.items():
            core.link_up(peer_id, life, now)
        if generation:
            names = tuple(FoundingMember(seat.id, seat.life, seat.id.hex()[:4], "", b"") for seat in self.seats)
            self.joining.entered(names, origin, generation, now)
        early, self.early = self.early, []
        for peer_id, message in early:
            if message.generation == generation:
                core.received(peer_id, message.message, now)

    def _as_successor(self) -> Successor:
        assert self.core is not None
        assert self.disk.bound is not None
        return Successor(self.generation, self.core.view.lineage, self.seats, self.disk.bound.tie_breaker)

    def succeed(self, successor: Successor, now: float) -> None:
        """The operation that agrees on the next generation has returned here."""
        if self.core is not None and self.core.is_member and self.generation == successor.generation - 1:
            self.core.succeed(successor, now)
            self._perform(now)
            self.story.world.settle(self.id)

    def finish(self, now: float, *, is_finished: bool) -> None:
        """The program has ended, or gives up the run."""
        self.is_done = is_finished
        if self.core is not None:
            self.core.leave(now, is_finished=is_finished)
            self._perform(now)
            self.story.world.settle(self.id)

    # Effects

    def _perform(self, now: float) -> None:
        is_busy = True
        while is_busy:
            is_busy = self._perform_joining(now)
            for generation, core in sorted(self.cores.items()):
                if effects := core.effects():
                    is_busy = True
                    for effect in effects:
                        self._do(generation, core, effect, now)
            formed = self.joining.formation.formed
            if formed is not None and self.generation < 0:
                is_busy = True
                record = founding_record(formed.view, formed.lineage)
                bound = Bound(0, record, formed.lineage, record.view.tie_breaker)
                self._begin(formed.lineage, 0, bound, now)
        unaware = self.joining.formation.unaware
        if self.generation > 0 and self.core is not None and self.is_member:
            inside = {self.seats[rank].id for rank in self.core.view.ranks}
            self._out += [(peer, FoundedNotice(self.origin, self._as_successor())) for peer in sorted(unaware & inside)]
        unaware.clear()
        if self.joining.formation.ending is not None and self.over is None:
            self.over = self.joining.formation.ending
            self._go_away(now)
        rivals = self.joining.formation.rivals
        if any(rival < self.origin for rival in rivals) and self.is_member and not self._is_outlived:
            self._is_outlived = True
            self.story.world.at(now, self.story.outlived, self)

    def _perform_joining(self, now: float) -> bool:
        effects = self.joining.effects()
        for effect in effects:
            match effect:
                case Remember(remembered):
                    self.story.remember(self, remembered)
                case Bind(bound):
                    if self.generation < 0:
                        self.story.accepted(self, bound)
                        self.disk.bound = bound
                case Say(peer, message):
                    self._out.append((peer, message))
                case Agree(peer, generation, message):
                    self.story.said(message)
                    self._out.append((peer, ViewNotice(generation, message)))
        return bool(effects)

    def _do(self, generation: int, core: Membership, effect: Any, now: float) -> None:
        match effect:
            case SendToNode(peer, message):
                self.story.said(message)
                self._out.append((peer, ViewNotice(generation, message)))
            case Persist(record):
                if generation == self.generation and self.disk.bound is not None:
                    self.disk.bound = Bound(generation, record, self.origin, self.disk.bound.tie_breaker)
            case Freeze(number):
                core.frozen(number, (), now)
            case Installed(view, _):
                self._installed(generation, view, now)
            case Excluded(view):
                self._excluded(generation, view, now)
            case QuorumLost():
                if generation == self.generation:
                    self._go_away(now)

    def _go_away(self, now: float) -> None:
        """End this process, after what it has said is delivered: links are closed in order."""
        self.story.world.at(now + 2 * self.story.world.delay, self.story.gone, self)

    def _installed(self, generation: int, view: View, now: float) -> None:
        self.story.installed(self, generation, view)
        if generation != self.generation or view.successor is None:
            return
        if MemberKey(self.id, self.life) in view.successor.members:
            self._enter(self.origin, view.successor, now)
        else:
            self._go_away(now)

    def _excluded(self, generation: int, view: View, now: float) -> None:
        self.story.installed(self, generation, view)
        if generation != self.generation:
            return
        if not view.ranks:
            ending = Ending(self.origin, view.is_finished)
            self.joining.ended(ending, now)
            self._perform_joining(now)
            self._out += [(peer, EndedNotice(ending)) for peer in self.links]
        elif self.is_done:
            self.story.left_early.add(self.id)
        self._go_away(now)


class Story:
    """The machines of one run, the faults, and what is known of the lineages of the run."""

    worlds: type[SimulatedWorld] = SimulatedWorld
    faults = ("crash", "crash", "partition", "partition", "long partition", "long partition", "flap", "stop")

    def __init__(self, seed: int, *, tell: bool = False) -> None:
        """Plan everything from the seed."""
        self.seed = seed
        self.chance = chance = random.Random(seed)
        self.world = self.worlds(
            seed,
            delay=chance.choice([0.002, 0.02, 0.1]),
            loss=chance.choice([0.0, 0.0, 0.05]),
            notice=chance.choice([0.3, 1.0]),
            describe=self._describe if tell else None,
        )
        count = chance.randint(2, 6)
        self.terms = Terms("a run", "train.py", None, chance.choice([1, 2, 2, 2]), None, "1", "auto")
        self.ids = [chance.randbytes(32) for _ in range(count)]
        self.disks = [Disk() for _ in self.ids]
        self.lives = [0] * count
        self.processes: dict[bytes, SimulatedProcess] = {}
        """The latest process of each node."""
        self.ended: dict[bytes, bool] = {}
        """Lineages that are over: by a decided view, or because their founding was given up."""
        self._known: dict[bytes, dict[bytes, float]] = defaultdict(dict)
        """By node: lineages that it was told of or was in, and when first."""
        self._accepted: dict[tuple[bytes, bytes], float] = {}
        """By node and lineage: when it accepted the founding."""
        self._views: dict[tuple[bytes, int, int], View] = {}
        self._members: dict[tuple[bytes, int], tuple[MemberKey, ...]] = {}
        self._agreed: set[tuple[bytes, bytes]] = set()
        """Generations whose members have agreed on what follows, by run and lineage."""
        self.foundings: set[bytes] = set()
        self.left_early: set[bytes] = set()
        """Nodes whose program ended before that of the others."""
        self.words = 0
        self.is_good = False
        for index in range(count):
            self.world.at(chance.choice([0.0, 0.0, chance.uniform(0, 8)]), self.begin, index)
        self.faults_end_at = 8.0
        for _ in range(chance.randint(1, 5)):
            self._plan_fault(chance.uniform(2.0, 16.0))
        self.world.at(1.0, self._look_for_newcomers)

    def name(self, index: int) -> str:
        return "abcdefgh"[index] + "'" * (self.lives[index] - 1)

    # Processes

    def begin(self, index: int, *, is_returning: bool = False) -> None:
        id = self.ids[index]
        if id in self.world.nodes:
            return
        self.lives[index] += 1
        life = self.lives[index].to_bytes(8, "big") + self.chance.randbytes(8)
        process = self.processes[id] = SimulatedProcess(self, index, life, is_returning=is_returning)
        self.world.start(self.name(index), id, life, process)

    def gone(self, process: SimulatedProcess) -> None:
        """A process has ended by itself; its keeper starts it again, unless the run is finished."""
        if self._is_current(process):
            self.world.crash(process.id)
            if not process.is_done and (process.over is None or not process.over.is_finished):
                self.world.at(self.world.now + self.chance.uniform(0.2, 1.0), self._again, process.index)

    def outlived(self, process: SimulatedProcess) -> None:
        """A process meets an older run of the same name: it leaves its own, and comes back as a newcomer."""
        if self._is_current(process) and process.is_member:
            process.finish(self.world.now, is_finished=False)
            self.world.at(self.world.now + STORY_LEAVE_SECONDS, self.gone, process)

    def _again(self, index: int) -> None:
        self.begin(index, is_returning=True)

    def _is_current(self, process: SimulatedProcess) -> bool:
        node = self.world.nodes.get(process.id)
        return node is not None and node.core is process

    # Faults

    def _plan_fault(self, at: float) -> None:
        world, chance = self.world, self.chance
        kind = chance.choice(self.faults)
        one, other = chance.sample(self.ids, 2)
        lasts = chance.uniform(0.2, 3.0) if kind != "long partition" else chance.uniform(6.0, 14.0)
        if kind == "crash":
            for id in chance.sample(self.ids, chance.choice([1, 1, 2, len(self.ids)])):
                world.at(at, self._crash, id)
                world.at(at + chance.uniform(0.2, lasts), self._again, self.ids.index(id))
        elif kind == "flap":
            world.at(at, world.flap, one, other)
        elif kind == "stop":
            world.at(at, world.stop, one)
            world.at(at + lasts, world.resume, one)
        else:
            side = set(chance.sample(self.ids, chance.randint(1, len(self.ids) - 1)))
            world.at(at, world.partition, side, set(self.ids) - side)
            if chance.random() < 0.3:
                for id in sorted(side):
                    world.at(at + 0.3, self._crash, id)
                    world.at(at + 0.6, self._again, self.ids.index(id))
            world.at(at + lasts, world.heal)
        self.faults_end_at = max(self.faults_end_at, at + lasts + 1.0)

    def _crash(self, id: bytes) -> None:
        self.world.crash(id, silently=self.chance.random() < 0.3)

    def _look_for_newcomers(self) -> None:
        """Now and then, let the members of a view agree, in one operation, to take in the nodes that wait."""
        self.world.at(self.world.now + self.chance.uniform(0.3, 1.5), self._look_for_newcomers)
        living = [node.core for node in self.world.nodes.values() if node.backlog is None]
        members = [core for core in living if isinstance(core, SimulatedProcess) and core.is_member]
        for origin, generation in sorted({(member.origin, member.generation) for member in members}):
            together = [each for each in members if (each.origin, each.generation) == (origin, generation)]
            self._take_in(together)

    def _take_in(self, together: list[SimulatedProcess]) -> None:
        first = together[0]
        assert first.core is not None
        view, seats = first.core.view, first.seats
        here = {MemberKey(each.id, each.life): each for each in together}
        if view.successor is not None or any(seats[rank] not in here for rank in view.ranks):
            return
        if (first.origin, view.lineage) in self._agreed:
            return  # the operation in which the members agree on what follows returns once
        staying = [here[seats[rank]] for rank in view.ranks]
        if any(each.core is None or each.core.view != view for each in staying):
            return
        wanted = [set(each.joining.formation.newcomers()) for each in staying]
        newcomers = sorted(set.intersection(*wanted))
        if not newcomers or any(
            other.id not in each.links for each in staying for other in staying if other is not each
        ):
            return
        new = [MemberKey(id, first.links[id]) for id in newcomers]
        members = (*(MemberKey(each.id, each.life) for each in staying), *new)
        lives = b"".join(seat.life for seat in members)
        lineage = hashlib.blake2b(view.lineage + lives, digest_size=16).digest()
        tie_breaker = next((at for at, each in enumerate(staying) if each.id == seats[view.tie_breaker].id), 0)
        successor = Successor(first.generation + 1, lineage, members, tie_breaker)
        self._agreed.add((first.origin, view.lineage))
        for each in staying:
            at = self.world.now + self.chance.choice([0.0, 0.001, self.chance.uniform(0.0, 0.4)])
            self.world.at(at, lambda each=each: each.succeed(successor, each.story.world.now))
        if self.chance.random() < 0.3 and not self.is_good:
            self._plan_fault(self.world.now + self.chance.uniform(0.0, 0.3))

    # Invariants

    def said(self, message: Any) -> None:
        self.words += 1

    def remember(self, process: SimulatedProcess, remembered: Remembered) -> None:
        for ending in remembered.ended:
            self.ended.setdefault(ending.lineage, ending.is_finished)
        process.disk.remembered = remembered

    def informed(self, process: SimulatedProcess, here: Here) -> None:
        """A process heard of a lineage."""
        if here.lineage is not None and here.phase is not Phase.LOCKED:
            self._known[process.id].setdefault(here.lineage, self.world.now)

    def accepted(self, process: SimulatedProcess, bound: Bound | None) -> None:
        if bound is not None and bound.generation == 0:
            self._accepted.setdefault((process.id, bound.origin), self.world.now)

    def began(self, process: SimulatedProcess, bound: Bound) -> None:
        """A process is in a generation."""
        origin, generation = bound.origin, bound.generation
        key = origin, generation
        if self._members.setdefault(key, bound.record.members) != bound.record.members:
            raise BrokenError(f"generation {generation} of {origin.hex()} has two sets of members")
        if origin in self.ended and generation:
            raise BrokenError(f"{process.name} enters generation {generation} of a run that is over")
        if generation == 0 and origin not in self.foundings:
            self._founded(origin, bound.record.members)
        self._known[process.id].setdefault(origin, self.world.now)

    def _founded(self, origin: bytes, members: tuple[MemberKey, ...]) -> None:
        self.foundings.add(origin)
        for seat in members:
            accepted_at = self._accepted[seat.id, origin]
            for lineage, at in self._known[seat.id].items():
                if lineage not in (origin, *self.ended) and at < accepted_at:
                    name = self.processes[seat.id].name
                    raise BrokenError(f"{name} founds a second run, and knew of one that is not over since {at:.2f}")

    def installed(self, process: SimulatedProcess, generation: int, view: View) -> None:
        key = process.origin, generation, view.number
        if self._views.setdefault(key, view) != view:
            raise BrokenError(f"view {view.number} of generation {generation} has two values: {view}")
        if not view.ranks:
            self.ended[process.origin] = view.is_finished

    def perform(self) -> None:
        """Run to the end; BrokenError as soon as an invariant does not hold."""
        world = self.world
        while world.now < self.faults_end_at:
            world.run(self.faults_end_at)
        self.is_good = True
        world.heal()
        world.loss = 0.0
        for id in self.ids:
            world.resume(id)
        for index in range(len(self.ids)):
            self.begin(index)
        good_at = world.now
        while not self._are_together():
            if world.now > good_at + TOGETHER_WITHIN:
                raise BrokenError(f"not together {TOGETHER_WITHIN:g} s after all was good: {self._situation()}")
            world.run(world.now + 0.5)
        self._finish()

    def _are_together(self) -> bool:
        processes = [self.processes[id] for id in self.ids]
        if any(not self._is_current(process) or not process.is_member for process in processes):
            return False
        first = processes[0]
        assert first.core is not None
        all_seats = {MemberKey(process.id, process.life) for process in processes}
        same = all((each.origin, each.generation) == (first.origin, first.generation) for each in processes)
        views = {process.core.view for process in processes if process.core is not None}
        return (
            same and len(views) == 1 and set(first.seats) == all_seats and len(first.core.view.ranks) == len(processes)
        )

    def _finish(self) -> None:
        """Let all programs end, and see that all machines learn that the run is over."""
        origin = self.processes[self.ids[0]].origin
        for index, id in enumerate(self.ids):
            process = self.processes[id]
            self.world.at(
                self.world.now + 0.05 * index, lambda process=process: process.finish(self.world.now, is_finished=True)
            )
        self.world.run(self.world.now + 5.0)
        if not self.ended.get(origin):
            raise BrokenError("all members have finished, and the run is not over")
        for index, disk in enumerate(self.disks):
            if self.ids[index] in self.left_early:
                continue  # the others went on for a moment: it has to ask them the next time
            if not any(ending.lineage == origin for ending in disk.remembered.ended):
                raise BrokenError(f"{self.name(index)} does not know that the run is over")
        if self.world.nodes:
            raise BrokenError(f"some go on after the end: {sorted(self.processes[id].name for id in self.world.nodes)}")

    def _situation(self) -> str:
        words = []
        for id in self.ids:
            process = self.processes[id]
            if not self._is_current(process):
                words.append(f"{process.name} is gone")
            elif process.core is not None:
                words.append(f"{process.name} in {process.origin.hex()[:12]}/{process.generation} {process.core.view}")
            else:
                words.append(f"{process.name}: {process.joining.formation.report().waiting}")
        return "; ".join(words)

    # Transcripts

    def _describe(self, message: Any) -> str:
        match message:
            case Here():
                lineage = message.lineage.hex()[8:16] if message.lineage is not None else "none"
                return f"{message.phase.name.lower()} {lineage} hears {len(message.hears)}"
            case ViewNotice(generation, body):
                return f"[{generation}] {body}"
        return str(message)[:200]

    def story(self) -> str:
        """Perform the same story again, and return its messages, with their times, and how it ended."""
        again = Story(self.seed, tell=True)
        try:
            again.perform()
            end = "all well"
        except BrokenError as broken:
            end = f"BROKEN: {broken}"
        return "\n".join([f"seed {self.seed}", *again.world.story, end])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--from", dest="first", type=int, default=0)
    parser.add_argument("--seed", type=int, help="tell one story")
    asked = parser.parse_args()
    if asked.seed is not None:
        print(Story(asked.seed).story())
        return 0
    broken = 0
    lineages = 0
    for seed in range(asked.first, asked.first + asked.seeds):
        story = Story(seed)
        try:
            story.perform()
        except BrokenError as error:
            broken += 1
            print(f"seed {seed}: {error}")
        lineages += len(story.foundings)
    print(f"{asked.seeds} stories, {broken} broken, {lineages} runs were founded")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
