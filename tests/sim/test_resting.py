"""Runs whose links rest: most members do not notice that another one crashes or is cut off before they send to it.

A failing seed prints its story; `python -m covey.lab.resting --seed N` tells it again.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
from tests.sim.test_membership import MUTANTS, Patches, without_the_freeze
from tests.support.plays import performed
from tests.support.seeds import batches, seeds

from covey.lab.invariants import BrokenError
from covey.lab.resting import RestingPlay, RestingWorld, play_of
from covey.proto.membership import ballots
from covey.proto.membership.state import ViewPosition


def perform(seed: int) -> RestingPlay:
    return performed(play_of(seed))


@pytest.mark.parametrize("batch", batches(2))
def test_fifty_runs_whose_links_rest_keep_the_invariants(batch: int) -> None:
    plays = [perform(seed) for seed in range(50 * batch, 50 * batch + 50)]
    totals = sum((play.count() for play in plays), Counter[str]())
    assert totals["views"] > 25, totals
    assert totals["operations that returned"] > 250, totals
    assert totals["links that were woken"] > 100, totals
    assert totals["links that could not be woken"] > 5, totals


@pytest.mark.parametrize("batch", seeds(1))
def test_so_do_those_in_which_changes_are_told_together(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rules for hundreds of members, in which links rest, played with a few and all faults."""
    monkeypatch.setattr(ballots, "CROWD_OF_MEMBERS", 1)
    for seed in range(30 * batch, 30 * batch + 30):
        perform(100_000 + seed)


# What a rule is for shows when it is gone.


def leaving_ballots_to_the_leader() -> Patches:
    may_propose = vars(ViewPosition)["may_propose"].fget

    def only_leading(self: ViewPosition) -> bool:
        return may_propose(self) and self.owner(self.ballot) == self.me

    return [(ViewPosition, "may_propose", property(only_leading))]


MUTANTS_OF_RESTING: dict[str, Patches] = {
    "takes any half for a quorum": MUTANTS["takes any half for a quorum"][0],
    "goes on after it answered": without_the_freeze(),
    "leaves ballots to the leader": leaving_ballots_to_the_leader(),
}


@pytest.mark.parametrize("mutant", MUTANTS_OF_RESTING)
def test_the_simulation_notices_a_member_that(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name, rule in MUTANTS_OF_RESTING[mutant]:
        monkeypatch.setattr(owner, name, rule)
    for seed in range(300):
        try:
            RestingPlay(seed).perform()
        except BrokenError:
            return
    pytest.fail(f"300 runs with a member that {mutant}, and nothing was noticed")


# The means of these tests.


class Recorder:
    """A core that records what it is told, and sends what it is asked to."""

    def __init__(self) -> None:
        self.told: list[tuple[float, Any]] = []
        self.out: list[tuple[bytes, Any]] = []

    def link_up(self, peer_id: bytes, peer_life: bytes, now: float) -> bool:
        self.told.append((now, f"{peer_id.decode()} up as {peer_life.decode()}"))
        return True

    def link_down(self, peer_id: bytes, now: float) -> None:
        self.told.append((now, f"{peer_id.decode()} down"))

    def received(self, peer_id: bytes, message: Any, now: float) -> None:
        self.told.append((now, message))

    def tick(self, now: float) -> None:
        raise AssertionError

    def next_deadline(self) -> float:
        return math.inf

    def outgoing(self) -> list[tuple[bytes, Any]]:
        out, self.out = self.out, []
        return out


class Two:
    """Two nodes whose link rests, with what each was told since."""

    def __init__(self) -> None:
        self.wants: set[bytes] = set()
        self.world = RestingWorld(
            1, wants_awake=lambda _id: self.wants, rest_after=1.0, wake_within=3.0, dial=0.2, streams_wake=False
        )
        self.cores = {id: Recorder() for id in (b"a", b"b")}
        for id, core in self.cores.items():
            self.world.start(id.decode(), id, b"1", core)
        self.world.run(2.0)
        assert not self.world.is_awake(b"a", b"b")
        for core in self.cores.values():
            core.told.clear()

    def send(self, source: bytes, *messages: int) -> None:
        (target,) = self.cores.keys() - {source}
        self.cores[source].out += [(target, message) for message in messages]
        self.world.settle(source)

    def told(self, id: bytes) -> list[Any]:
        return [what for _, what in self.cores[id].told]


def test_messages_wake_a_resting_link_and_arrive_in_order() -> None:
    two = Two()
    two.send(b"a", 1, 2)
    two.world.run(2.001)
    two.send(b"a", 3)
    two.send(b"b", 4)
    two.world.run(2.5)
    assert two.told(b"b") == [1, 2, 3]
    assert two.told(b"a") == [4]
    assert two.world.is_awake(b"a", b"b")
    two.world.run(5.0)
    assert not two.world.is_awake(b"a", b"b")
    assert two.world.failed_wakes == 0


def test_an_end_wakes_a_link_that_is_to_stay_awake() -> None:
    two = Two()
    two.wants.add(b"a")
    two.world.run(9.0)
    assert two.world.is_awake(b"a", b"b")
    assert two.told(b"a") == two.told(b"b") == []


def test_a_crash_at_the_other_end_of_a_resting_link_is_noticed_only_by_sending() -> None:
    two = Two()
    two.world.crash(b"b")
    two.world.run(20.0)
    assert two.told(b"a") == []
    two.send(b"a", 1)
    two.world.run(22.9)
    assert two.told(b"a") == []
    two.world.run(24.0)
    assert two.told(b"a") == ["b down"]
    two.world.start("b", b"b", b"2", Recorder())
    two.world.run(25.0)
    assert two.told(b"a") == ["b down", "b up as 2"]


def test_another_life_ends_the_resting_link_of_the_one_before_it() -> None:
    two = Two()
    two.world.crash(b"b")
    two.world.start("b", b"b", b"2", Recorder())
    two.world.run(3.0)
    assert two.told(b"a") == ["b down", "b up as 2"]


def test_of_a_cut_only_the_end_that_sends_learns_and_the_other_one_never() -> None:
    two = Two()
    two.world.partition([b"a"], [b"b"])
    two.send(b"a", 1)
    two.world.run(10.0)
    assert two.told(b"a") == ["b down"]
    two.world.heal()
    two.world.run(11.0)
    assert two.told(b"a") == ["b down", "b up as 1"]
    assert two.told(b"b") == []


def test_a_cut_that_is_over_soon_only_delays_what_is_sent() -> None:
    two = Two()
    two.world.cut(b"b", b"a")
    two.send(b"a", 1, 2)
    two.world.run(4.0)
    two.world.heal()
    two.world.run(5.0)
    assert (two.told(b"a"), two.told(b"b")) == ([], [1, 2])


def test_a_stopped_node_cannot_be_woken() -> None:
    two = Two()
    two.world.stop(b"b")
    two.send(b"a", 1)
    two.world.run(6.0)
    assert two.told(b"a") == ["b down"]
    two.world.resume(b"b")
    two.world.run(7.0)
    assert two.told(b"a") == ["b down", "b up as 1"]
