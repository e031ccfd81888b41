"""Members that are slow, and not lost: their keeper vouches for them, so they get time to be heard again."""

from __future__ import annotations

import math
from typing import Any

import pytest
from tests.support.plays import performed
from tests.support.seeds import seeds

from covey.lab.churn import CHURN_PATIENCE, CHURN_RELINK, Play
from covey.lab.invariants import BrokenError
from covey.lab.workers import Worker
from covey.proto.changes import Excluded
from covey.proto.membership.ballots import Proposer
from covey.proto.membership.state import Presence
from covey.wire.membership import Trouble

EVERY = 0.5


class LoadedHost(Play):
    """Processes of one keeper on a machine that is loaded: links that end take long to come back, and some crash.

    Nothing else happens to them, so no other member may be excluded.
    """

    faults = ("crash", "flap", "flap")
    sizes = (3, 8)
    giving_up = 0.0
    slowest = CHURN_PATIENCE / 2 - 3.0
    """Seconds that a link may take to come back. Links break for less than 3 s after the first trouble, and a member is
    waited for until patience is half over."""
    flaps_of_the_keeper = 2

    def __init__(self, seed: int, *, tell: bool = False, **_ignored: Any) -> None:
        super().__init__(seed, has_keeper=True, tell=tell)
        chance, world = self.chance, self.world
        self.min_size, self.surprises, world.loss = 1, 0, 0.0
        self.crashed: set[str] = set()
        crash, flap, dial = world.crash, world.flap, world._dial_soon

        def note_crash(id: bytes, **how: Any) -> None:
            if id in world.nodes:
                self.crashed.add(self.workers[id].name)
            crash(id, **how)

        def flap_for_long(one: bytes, other: bytes) -> None:
            world._dial_soon = lambda *pair: None  # type: ignore[method-assign]
            flap(one, other)
            world._dial_soon = dial  # type: ignore[method-assign]
            if self.slowest < math.inf:
                world.at(world.now + chance.uniform(CHURN_RELINK / 2, self.slowest), world._dial, one, other)

        world.crash, world.flap = note_crash, flap_for_long  # type: ignore[method-assign]
        for _ in range(self.flaps_of_the_keeper):
            world.at(chance.uniform(0.1, 2.0), world.flap, chance.choice(self.ids), self.keeper)
        world.at(0.0, self._vouch)

    def _vouch(self) -> None:
        node = self.world.nodes.get(self.keeper or b"")
        for id in self.ids:
            if node is not None and self._is_awake(id) and isinstance(node.core, Worker):
                node.core.core.vouched(id, node.clock(self.world.now))
        self.world.at(self.world.now + EVERY, self._vouch)

    def ended(self, worker: Worker, effect: Any) -> None:
        super().ended(worker, effect)
        if isinstance(effect, Excluded) and worker.name not in self.crashed and worker.name.isalpha():
            raise BrokenError(f"{worker.name} is well and was excluded: {effect}")


def test_no_member_that_its_keeper_vouches_for_is_excluded_because_a_link_is_late() -> None:
    views = 0
    for seed in seeds(80):
        play = LoadedHost(seed)
        performed(play)
        views += play.count()["views"]
    assert views > len(seeds(80))


def test_members_that_never_hear_each_other_again_are_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything else that a run promises still holds: all finish, or know that they are out."""
    monkeypatch.setattr(LoadedHost, "slowest", math.inf)
    monkeypatch.setattr(LoadedHost, "flaps_of_the_keeper", 0)
    monkeypatch.setattr(LoadedHost, "ended", Play.ended)
    excluded = 0
    for seed in seeds(30):
        play = LoadedHost(seed)
        performed(play)
        excluded += play.count()["members excluded"]
    assert excluded > 20


def without_word_of_the_keeper() -> list[tuple[Any, str, Any]]:
    return [(Presence, "vouch", lambda *_: None)]


def without_time_to_answer_the_keeper() -> list[tuple[Any, str, Any]]:
    expected_until = Presence.expected_until

    def impatient(self: Presence, rank: int, asked_at: float, **within: float) -> float:
        return expected_until(self, rank, asked_at, **within | {"relink_vouched": 0.0})

    return [(Presence, "expected_until", impatient)]


def without_time_for_members_to_hear_each_other() -> list[tuple[Any, str, Any]]:
    settled_at = Proposer._settled_at

    def impatient(self: Proposer, proposal: Any, now: float) -> float:
        left_out, proposal.left_out = proposal.left_out, lambda: ()
        try:
            return settled_at(self, proposal, now)
        finally:
            proposal.left_out = left_out

    return [(Proposer, "_settled_at", impatient)]


@pytest.mark.parametrize(
    "rule",
    [without_word_of_the_keeper, without_time_to_answer_the_keeper, without_time_for_members_to_hear_each_other],
)
def test_the_simulation_notices_a_keeper(rule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name, patch in rule():
        monkeypatch.setattr(owner, name, patch)
    for seed in range(300):
        try:
            LoadedHost(seed).perform()
        except BrokenError:
            return
    pytest.fail("300 runs, and nothing was noticed")


def test_members_of_a_keeper_tell_only_it_of_their_trouble() -> None:
    """Only a member that leaves tells all others; else a hundred members would send to each other all the time."""
    told: list[tuple[str, bytes]] = []
    play = LoadedHost(5)
    play.said = lambda worker, message: None  # type: ignore[method-assign]
    outgoing = Worker.outgoing

    def listen(worker: Worker) -> list[tuple[bytes, Any]]:
        out = outgoing(worker)
        told.extend((worker.name, to) for to, message in out if isinstance(message, Trouble) and not message.leaves)
        return out

    Worker.outgoing = listen  # type: ignore[method-assign,assignment]
    try:
        play.perform()
    finally:
        Worker.outgoing = outgoing  # type: ignore[method-assign]
    assert len(told) > 3
    assert {to for _, to in told} == {play.keeper}
