"""Whole clusters judging each other in virtual time: on bad networks the living are not given up, the dead are found.

A `Ward` is a function of its seed: `Ward(seed, ...)` and the same calls tell the same `story` again.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.in_turn import in_turn
from tests.support.seeds import seeds

from covey.proto import evidence, health
from covey.proto.health import (
    REPORT_EVERY,
    Cause,
    Dead,
    Health,
    PeerOpinion,
    ProcessState,
    SendPing,
    Suspect,
    Trust,
    Unheard,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

HOUR = 3600.0
KEEPER_LOOKS_EVERY = 0.1


class Air:
    """Wi-Fi in a bad mood: 2 % of messages are lost; radios stall for 200 ms and sometimes lose most for a second."""

    def __init__(self, chance: random.Random, hosts: Iterable[str], *, is_bad: bool) -> None:
        self.chance, self.is_bad = chance, is_bad
        self.stalls = dict.fromkeys(hosts, (0.0, 0.0))
        self.bursts = dict.fromkeys(hosts, (0.0, 0.0))
        self.unplugged: dict[str, float] = {}

    def arrival(self, source: str, target: str, now: float) -> float | None:
        """Return when a message arrives, None if it never does."""
        if source in self.unplugged or target in self.unplugged:
            return None
        random = self.chance.random
        if source == target:
            return now + 1e-4 * random()
        at = now + 0.001 + 0.007 * random()
        if self.is_bad:
            if random() < 0.02:
                return None
            for host in (source, target):
                if self._during(self.bursts, host, at, every=60.0, lasts=1.0) and random() < 0.6:
                    return None
                at = self._during(self.stalls, host, at, every=3.0, lasts=0.2) or at
        return at

    def _during(
        self, spells: dict[str, tuple[float, float]], host: str, at: float, *, every: float, lasts: float
    ) -> float | None:
        """Return when the host's bad spell at this time ends, None if there is none."""
        start, end = spells[host]
        while end < at:
            start = end + self.chance.expovariate(1 / every)
            end = start + lasts
        spells[host] = start, end
        return end if start <= at else None


class Actor:
    """A member: its core, its clock, which is wrong, and what waits while it does not run."""

    def __init__(self, id: bytes, host: str, rate: float, offset: float) -> None:
        self.id, self.host, self.rate, self.offset = id, host, rate, offset
        self.health = Health(host, offset)
        self.is_gone = False
        self.is_stopped = False
        self.runs_from = 0.0
        """It does nothing before that."""
        self.inbox: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self.acked: dict[bytes, float] = {}
        """When the kernels of others last acknowledged something, by this member's clock."""
        self.alarm: object = None

    def local(self, now: float) -> float:
        return self.offset + self.rate * now

    @property
    def name(self) -> str:
        return self.id.decode()


class Ward:
    """Members on hosts (`hosts[i]` is where member i lives), the air between them, and everything they thought."""

    def __init__(
        self,
        seed: int,
        hosts: list[str],
        *,
        keepers: bool = False,
        kernels: bool = True,
        bad_air: bool = True,
        drift: float = 0.01,
    ) -> None:
        self.chance = chance = random.Random(seed)
        self.now = 0.0
        self.air = Air(chance, sorted(set(hosts)), is_bad=bad_air)
        self.has_keepers, self.has_kernels = keepers, kernels
        self.log: list[tuple[float, str, Any]] = []
        self._due: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = itertools.count()
        self.actors = [
            Actor(chr(97 + index).encode(), host, chance.uniform(1 - drift, 1 + drift), chance.uniform(0, 1e6))
            for index, host in enumerate(hosts)
        ]
        for one, other in itertools.permutations(self.actors, 2):
            one.health.watch(other.id, other.host, one.offset)
            one.health.link_up(other.id, one.offset)
        for actor in self.actors:
            self._arm(actor)
            if keepers:
                self.at(chance.uniform(0, REPORT_EVERY), self._vouch_on, actor)

    # Faults

    def kill(self, index: int) -> None:
        """End a process: its links end, and its keeper sees it."""
        actor = self.actors[index]
        actor.is_gone = True
        for other in self.others(actor):
            if (at := self.air.arrival(actor.host, other.host, self.now)) is not None:
                self.at(at, self._call, other, "link_lost", actor.id)
        self._keeper_sees(actor, ProcessState.EXITED)

    def stop(self, index: int, seconds: float = math.inf) -> None:
        """SIGSTOP, and SIGCONT after a while."""
        actor = self.actors[index]
        actor.is_stopped = True
        self.hold(index, seconds)
        self._keeper_sees(actor, ProcessState.STOPPED)
        if seconds < math.inf:
            self.at(self.now + seconds, self._goes_on, actor)

    def hold(self, index: int, seconds: float) -> None:
        """Let a C call hold a process's interpreter for so long."""
        self.actors[index].runs_from = self.now + seconds
        if seconds < math.inf:
            self.at(self.now + seconds, self._resume, self.actors[index])

    def unplug(self, host: str, seconds: float = math.inf) -> None:
        """Pull a cable."""
        self.air.unplugged[host] = self.now
        if seconds < math.inf:
            self.at(self.now + seconds, self.air.unplugged.pop, host)

    def suspend(self, host: str, seconds: float) -> None:
        """Close a lid for so long."""
        self.unplug(host, seconds)
        for index, actor in enumerate(self.actors):
            if actor.host == host:
                self.hold(index, seconds)

    # The clock.

    def at(self, when: float, action: Callable[..., Any], *args: Any) -> None:
        heapq.heappush(self._due, (when, next(self._order), action, args))

    def run(self, seconds: float) -> list[tuple[float, str, Any]]:
        """Let time pass; return what was thought meanwhile."""
        due, end, before = self._due, self.now + seconds, len(self.log)
        while due[0][0] <= end:
            self.now, _, action, args = heapq.heappop(due)
            action(*args)
        self.now = end
        return self.log[before:]

    def others(self, actor: Actor) -> list[Actor]:
        return [other for other in self.actors if other is not actor]

    def story(self) -> str:
        lines = (f"{at:9.3f}  {who} of {what.peer.decode()}: {what}" for at, who, what in self.log)
        return "\n".join(lines)

    def _arm(self, actor: Actor) -> None:
        deadline = actor.health.next_deadline()
        actor.alarm = alarm = object()
        self.at(max(self.now, (deadline - actor.offset) / actor.rate), self._ring, actor, alarm)

    def _ring(self, actor: Actor, alarm: object) -> None:
        if actor.alarm is alarm and not actor.is_gone:
            if self.now < actor.runs_from:
                actor.inbox.append((self._ring, (actor, alarm)))
                return
            # The way there and back through the other clock can end a hair early.
            actor.health.tick(max(actor.local(self.now), actor.health.next_deadline()))
            self._perform(actor)
            self._arm(actor)

    def _resume(self, actor: Actor) -> None:
        """Do everything that has waited, in a random order."""
        waiting, actor.inbox = actor.inbox, []
        alarms = [entry for entry in waiting if entry[0] == self._ring]
        others = [entry for entry in waiting if entry[0] != self._ring]
        for action, args in alarms + others if self.chance.random() < 0.5 else others + alarms:
            action(*args)

    # What they say.

    def _perform(self, actor: Actor) -> None:
        for effect in actor.health.effects():
            if type(effect) not in (SendPing, Unheard):
                self.log.append((self.now, actor.name, effect))
                continue
            other = self.actors[effect.peer[0] - 97]
            if self.has_kernels and (acked := actor.acked.get(other.id, math.inf)) <= actor.local(self.now):
                actor.health.acknowledged(other.id, acked)
            if (at := self.air.arrival(actor.host, other.host, self.now)) is not None:
                self.at(at, self._ping_arrives, actor, other, self.now)

    def _ping_arrives(self, source: Actor, target: Actor, sent_at: float) -> None:
        if target.host in self.air.unplugged or target.is_gone:
            return
        if (acked := self.air.arrival(target.host, source.host, self.now)) is not None:
            source.acked[target.id] = source.local(acked)
        self._pinged(source, target, sent_at)

    def _pinged(self, source: Actor, target: Actor, sent_at: float) -> None:
        if self.now < target.runs_from:
            target.inbox.append((self._pinged, (source, target, sent_at)))
        else:
            self._call(target, "heard", source.id)
            if (at := self.air.arrival(target.host, source.host, self.now)) is not None:
                self.at(at, self._answered, source, target, sent_at)

    def _answered(self, source: Actor, target: Actor, sent_at: float) -> None:
        if self.now < source.runs_from:
            source.inbox.append((self._answered, (source, target, sent_at)))
        elif not source.is_gone and source.host not in self.air.unplugged:
            source.health.round_trip(target.id, source.rate * (self.now - sent_at))
            self._call(source, "heard", target.id)

    def _call(self, actor: Actor, call: str, *args: Any) -> None:
        if actor.is_gone:
            return
        if self.now < actor.runs_from:
            actor.inbox.append((self._call, (actor, call, *args)))
            return
        getattr(actor.health, call)(*args, actor.local(self.now))
        self._perform(actor)
        if call != "heard":
            self._arm(actor)

    # Keepers.

    def _vouch_on(self, actor: Actor) -> None:
        if not actor.is_gone:
            self._say(actor, ProcessState.STOPPED if actor.is_stopped else ProcessState.BUSY)
            self.at(self.now + REPORT_EVERY, self._vouch_on, actor)

    def _keeper_sees(self, actor: Actor, vouch: ProcessState) -> None:
        if self.has_keepers:
            self.at(self.now + self.chance.uniform(0, KEEPER_LOOKS_EVERY), self._say, actor, vouch)

    def _say(self, actor: Actor, vouch: ProcessState) -> None:
        for other in self.others(actor):
            if (at := self.air.arrival(actor.host, other.host, self.now)) is not None:
                self.at(at, self._call, other, "vouched", actor.id, vouch)

    def _goes_on(self, actor: Actor) -> None:
        actor.is_stopped = False
        self._keeper_sees(actor, ProcessState.BUSY)


def hosts(count: int) -> list[str]:
    return [f"h{index}" for index in range(count)]


def pairs(count: int) -> list[str]:
    """Return hosts for two members each."""
    return [f"h{index // 2}" for index in range(count)]


def only(kind: type, log: list[tuple[float, str, Any]]) -> list[tuple[float, str, Any]]:
    return [entry for entry in log if isinstance(entry[2], kind)]


def latencies(ward: Ward, log: list[tuple[float, str, Any]], since: float, kind: type[Any], index: int) -> list[float]:
    """Return how long each other member on another host took to think this of one, sorted; all must."""
    victim = ward.actors[index]
    found = {who: at - since for at, who, what in reversed(log) if isinstance(what, kind) and what.peer == victim.id}
    wanted = {other.name for other in ward.others(victim) if other.host != victim.host}
    assert found.keys() >= wanted, f"{sorted(wanted - found.keys())} did not notice\n{ward.story()}"
    return sorted(found[who] for who in wanted)


@pytest.mark.parametrize(
    ("count", "minutes", "seed"),
    [
        *((2, 60, seed) for seed in seeds(2)),
        *(pytest.param(4, 60, seed, marks=pytest.mark.thorough) for seed in seeds(1)),
        pytest.param(8, 20, 1, marks=pytest.mark.thorough),
        (16, 2, 1),
    ],
)
def test_an_hour_of_bad_air_kills_nobody_and_raises_few_suspicions(count: int, minutes: int, seed: int) -> None:
    # An hour has 300,000 messages for every six pairs, so the many have fewer minutes.
    ward = Ward(seed, hosts(count))
    log = ward.run(60 * minutes)
    assert only(Dead, log) == [], ward.story()
    suspicions = only(Suspect, log)
    # A radio's worst seconds now and then, each taken back; a storm would be thousands.
    assert len(suspicions) <= 3 * count * (count - 1) * minutes / 60 + 3, ward.story()
    assert len(only(Trust, log)) == len(suspicions)


@pytest.mark.parametrize("seed", seeds(2))
def test_half_an_hour_of_members_that_are_often_busy_kills_nobody(seed: int) -> None:
    ward = Ward(seed, pairs(4), keepers=seed % 2 == 1, drift=0.01)
    for index in range(4):
        at = 0.0
        while (at := at + ward.chance.expovariate(1 / 30)) < HOUR / 2:
            ward.at(at, ward.hold, index, ward.chance.choice([0.3, 0.6, 2.0, 8.0]))
            at += 8.0
    log = ward.run(HOUR / 2)
    assert only(Dead, log) == [], ward.story()


@pytest.mark.parametrize("keepers", [False, True])
@in_turn(seed=seeds(15))
def test_a_killed_process_is_known_in_under_half_a_second(keepers: bool, seed: int) -> None:
    ward = Ward(seed, pairs(4 + seed % 5), keepers=keepers, bad_air=False)
    ward.run(ward.chance.uniform(3, 6))
    victim, since = seed % 4, ward.now
    ward.kill(victim)
    log = ward.run(1.0)
    assert latencies(ward, log, since, Dead if keepers else Suspect, victim)[-1] < 0.5
    assert {(what.peer, what.cause) for _, _, what in log if isinstance(what, Dead)} <= {
        (ward.actors[victim].id, Cause.EXITED)
    }
    if keepers:
        assert ward.run(20.0) == []


@in_turn(seed=seeds(15))
def test_a_stopped_process_is_dead_within_a_second_if_it_has_a_keeper_and_well_when_it_goes_on(seed: int) -> None:
    ward = Ward(seed, pairs(4), keepers=True, bad_air=False)
    ward.run(ward.chance.uniform(3, 6))
    victim, since = seed % 4, ward.now
    ward.stop(victim, seconds=10.0)
    log = ward.run(9.9)
    assert latencies(ward, log, since, Suspect, victim)[-1] < 0.2
    assert 0.4 < latencies(ward, log, since, Dead, victim)[-1] < 1.0
    assert {what.cause for _, _, what in log} == {Cause.STOPPED}
    log = ward.run(20.0)
    assert {type(what) for _, _, what in log} == {Trust}, "the one that went on suspected a peer\n" + ward.story()
    assert latencies(ward, log, since + 10.0, Trust, victim)[-1] < 0.5


@in_turn(seed=seeds(8))
def test_a_stopped_process_without_a_keeper_is_dead_after_fifteen_seconds(seed: int) -> None:
    ward = Ward(seed, pairs(4))
    ward.run(ward.chance.uniform(3, 6))
    victim, since = seed % 4, ward.now
    ward.stop(victim)
    found = latencies(ward, ward.run(17.0), since, Dead, victim)
    assert found[0] > 14.0
    assert found[-1] < 15.5
    assert len(only(Dead, ward.log)) == 3


@pytest.mark.parametrize("keepers", [False, True])
@in_turn(seed=seeds(10))
def test_a_pulled_cable_is_known_in_under_five_seconds(keepers: bool, seed: int) -> None:
    ward = Ward(seed, pairs(6) if seed % 2 else hosts(5), keepers=keepers, kernels=not keepers)
    ward.run(ward.chance.uniform(3, 6))
    since = ward.now
    ward.unplug("h1")
    log = ward.run(6.0)
    for index in [index for index, actor in enumerate(ward.actors) if actor.host == "h1"]:
        suspected, dead = (latencies(ward, log, since, kind, index) for kind in (Suspect, Dead))
        assert dead[-1] < 5.0
        assert suspected[-1] < 3.2
        assert all(one < other for one, other in zip(suspected, dead, strict=True))
    connected = {actor.name for actor in ward.actors if actor.host != "h1"}
    between = [what for _, who, what in only(Dead, log) if who in connected and what.peer.decode() in connected]
    assert between == []


@in_turn(seed=seeds(10))
def test_a_cable_that_was_loose_for_three_seconds_kills_nobody(seed: int) -> None:
    ward = Ward(seed, hosts(5), bad_air=False)
    ward.run(5.0)
    ward.unplug("h1", seconds=3.0)
    assert only(Dead, ward.run(20.0)) == []
    assert all(
        one.health.standing(other.id) is PeerOpinion.TRUSTED for one in ward.actors for other in ward.others(one)
    )


@pytest.mark.parametrize("lockstep", [False, True])
@in_turn(seed=seeds(8))
def test_an_interpreter_held_for_eight_seconds_is_no_death_even_if_all_of_a_host_are_held_at_once(
    lockstep: bool,
    seed: int,
) -> None:
    ward = Ward(seed, pairs(4))
    ward.run(ward.chance.uniform(3, 6))
    for index in (0, 1) if lockstep else (0,):
        ward.hold(index, 8.0)
    ward.run(30.0)
    assert only(Dead, ward.log) == [], ward.story()


@in_turn(seed=seeds(5))
def test_an_interpreter_held_for_a_minute_is_not_even_suspect_if_its_keeper_is_heard(seed: int) -> None:
    ward = Ward(seed, pairs(4), keepers=True, bad_air=False)
    ward.run(5.0)
    ward.hold(0, 60.0)
    assert ward.run(80.0) == []


@in_turn(seed=seeds(5))
def test_without_kernels_or_keepers_to_ask_nobody_takes_a_busy_process_for_a_dead_host(seed: int) -> None:
    ward = Ward(seed, hosts(3), kernels=False)
    ward.run(5.0)
    ward.hold(0, 8.0)
    ward.run(30.0)
    assert only(Dead, ward.log) == []


@pytest.mark.parametrize("seconds", [2.0, 30.0])
@in_turn(seed=seeds(10))
def test_a_node_that_was_suspended_accuses_nobody_and_is_well_again_to_the_others(seconds: float, seed: int) -> None:
    ward = Ward(seed, hosts(4), bad_air=False)
    ward.run(ward.chance.uniform(3, 6))
    ward.suspend("h0", seconds)
    ward.run(seconds + 20.0)
    assert [entry for entry in ward.log if entry[1] == "a"] == [], ward.story()
    assert {what.peer for _, _, what in ward.log} == {b"a"}
    assert len(only(Dead, ward.log)) == (3 if seconds > 5 else 0)
    assert all(other.health.standing(b"a") is PeerOpinion.TRUSTED for other in ward.actors[1:])


def test_the_same_seed_tells_the_same_story() -> None:
    def story(seed: int) -> str:
        ward = Ward(seed, pairs(6), keepers=True)
        ward.run(5.0)
        ward.stop(2, 3.0)
        ward.unplug("h0", 8.0)
        ward.run(20.0)
        return ward.story()

    assert story(1) == story(1) != story(2)


def suspended(seed: int) -> bool:
    ward = Ward(seed, hosts(4), bad_air=False)
    ward.run(5.0)
    ward.suspend("h0", 30.0)
    ward.run(40.0)
    return any(who == "a" for _, who, _ in ward.log)


def held(seed: int, *, keepers: bool = False, kernels: bool = True) -> bool:
    ward = Ward(seed, hosts(3), keepers=keepers, kernels=kernels)
    ward.run(5.0)
    ward.hold(0, 8.0 if not keepers else 30.0)
    return bool(only(Dead, ward.run(40.0)))


def seldom_listening(seed: int) -> bool:
    """Whether a node with many short gaps misses that another died."""
    ward = Ward(seed, hosts(2), bad_air=False)
    ward.run(5.0)
    ward.unplug("h1")
    for turn in range(60):
        ward.at(ward.now + 0.9 * turn, ward.hold, 0, 0.7)
    ward.run(53.0)
    return ward.actors[0].health.standing(b"b") is not PeerOpinion.DEAD


MUTANTS: dict[str, tuple[Any, str, Any, Callable[[int], bool]]] = {
    "counts the time it slept": (Health, "_forgive", lambda self, seconds, now: None, suspended),
    "starts all clocks anew after every gap": (health, "SLEPT", 0.0, seldom_listening),
    "takes silence of its members for silence of a host": (
        evidence.HostEvidence,
        "gives_signs",
        property(lambda self: True, lambda self, value: None),
        lambda seed: held(seed, kernels=False),
    ),
    "does not believe keepers": (evidence, "VOUCHED", 0.0, lambda seed: held(seed, keepers=True)),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_simulation_notices_a_member_that(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, rule, is_broken = MUTANTS[mutant]
    assert not any(is_broken(seed) for seed in range(5))
    monkeypatch.setattr(owner, name, rule, raising=False)
    assert any(is_broken(seed) for seed in range(20))
