from __future__ import annotations

import math
import random
import time
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.in_turn import in_turn

from covey.base.errors import RemoteProtocolError
from covey.lab.workers import Worker
from covey.lab.world import SimulatedWorld
from covey.proto import ballot
from covey.proto.ballot import first_record
from covey.proto.changes import Excluded, Freeze, Persist, Quorum, QuorumAwaited, QuorumLost, SendToNode
from covey.proto.commit import Commit
from covey.proto.membership import FINISH_TOGETHER, MOST_BALLOTS_AHEAD, PAST_VIEWS, Membership
from covey.proto.membership.leader import CLOCK_DRIFT, LEASE, Lease
from covey.proto.views import MOST_OPERATIONS, fits, is_quorum, judge, largest_clique, next_tie_breaker, rests_on
from covey.wire.membership import (
    Accept,
    Accepted,
    Decided,
    Fate,
    Fork,
    MemberKey,
    Prepare,
    Promise,
    Pulse,
    Record,
    Refuse,
    State,
    Successor,
    Trouble,
    Verdict,
    View,
)
from covey.wire.messages import MAX_MEMBERS

if TYPE_CHECKING:
    from collections.abc import Collection

LINEAGE = b"0" * 16
KEEPER = b"K" * 32
MessageT = TypeVar("MessageT")


def seat(name: str) -> MemberKey:
    """Return a life of the node that is called by the first letter of `name`; a' is the life after a."""
    return MemberKey(name[0].encode() * 32, name.encode().ljust(16, b"."))


def sent(core: Membership, kind: type[MessageT]) -> list[MessageT]:
    """Return the messages of one kind that a core wants to send."""
    messages = [effect.message for effect in core.effects() if isinstance(effect, SendToNode)]
    return [message for message in messages if isinstance(message, kind)]


class Stage:
    """Members in a fast and faultless world, and what became of them."""

    def __init__(self, names: str, *, anchor: int = 0, has_keeper: bool = False, **options: Any) -> None:
        self.names, self.options = names, options | ({"keeper": KEEPER} if has_keeper else {})
        self.world = SimulatedWorld(1, delay=0.01, notice=0.5)
        self.first = first_record(map(seat, names), LINEAGE, anchor=anchor, has_keeper=has_keeper)
        self.disks = {name: self.first for name in [*names, "K"]}
        self.cores: dict[str, Membership] = {}
        self.views: dict[str, list[View]] = {name: [] for name in names}
        self.ends: dict[str, Excluded | QuorumLost] = {}
        for name in names + "K" * has_keeper:
            self.enter(name)
        self.world.introduce()

    def enter(self, name: str) -> None:
        me = seat(name)
        core = Membership(self.disks[name[0]], me.id, me.life, random.Random(name), self.world.now, **self.options)
        self.cores[name] = core
        self.world.start(name, me.id, me.life, Worker(name, core, [], self, random.Random(name), pause=0.01))

    # What workers tell.

    def persisted(self, worker: Worker, record: Record) -> bool:
        self.disks[worker.name[0]] = record
        return True

    def installed(self, worker: Worker, view: View) -> None:
        self.views[worker.name].append(view)

    def ended(self, worker: Worker, effect: Excluded | QuorumLost) -> None:
        self.ends[worker.name] = effect

    def returned(self, *_: Any) -> None: ...
    def raised(self, *_: Any) -> None: ...
    def said(self, *_: Any) -> None: ...
    def froze(self, *_: Any) -> None: ...
    def gave_up(self, *_: Any) -> None: ...
    def revoked(self, *_: Any) -> None: ...

    # What a test does.

    def crash(self, *names: str) -> None:
        for name in names:
            self.world.crash(seat(name).id)

    def partition(self, *sides: str) -> None:
        self.world.partition(*([seat(name).id for name in side] for side in sides))

    def run(self, seconds: float) -> None:
        self.world.run(self.world.now + seconds)

    def worker(self, name: str) -> Worker:
        core = self.world.nodes[seat(name).id].core
        assert isinstance(core, Worker)
        return core

    def tell(self, name: str, what: str, *args: Any, **options: Any) -> None:
        """Call a method of a core that the world does not, and let it take effect."""
        getattr(self.cores[name], what)(*args, self.world.now, **options)
        self.worker(name).tick(self.world.now)
        self.world.settle(seat(name).id)

    def members(self) -> dict[str, str]:
        """Return the last view of each member that installed one."""
        return {
            name: f"{views[-1].number}:" + "".join(self.names[rank] for rank in views[-1].ranks)
            for name, views in self.views.items()
            if views
        }

    def leaders(self) -> list[str]:
        """Return those that lead, by their own word."""
        now = self.world.now
        return [name for name, core in self.cores.items() if core.is_member and core.leader(now) == self.rank(name)]

    def rank(self, name: str) -> int:
        return self.names.index(name[0])


# Whole runs.


def test_a_lost_member_is_excluded_by_the_others() -> None:
    stage = Stage("abcd")
    stage.run(1)
    assert stage.members() == {}
    stage.crash("c")
    stage.run(2)
    assert stage.members() == {name: "1:abd" for name in "abd"}
    assert {views[0].tie_breaker for name, views in stage.views.items() if name != "c"} == {0}


def test_a_member_known_to_be_dead_is_excluded_at_once() -> None:
    stage = Stage("abc")
    stage.run(1)
    stage.crash("c")
    stage.run(0.02)
    for name in "ab":
        stage.tell(name, "judged", seat("c").id, is_dead=True)
    stage.run(0.3)
    assert stage.members() == {"a": "1:ab", "b": "1:ab"}


def test_one_after_another_may_be_lost_down_to_the_last() -> None:
    stage = Stage("abcde")
    for lost in "adbe":
        stage.crash(lost)
        stage.run(3)
    assert stage.members()["c"] == "4:c"
    assert [(view.number, view.tie_breaker) for view in stage.views["c"]] == [(1, 1), (2, 1), (3, 2), (4, 2)]


def test_of_two_halves_the_one_with_the_tie_breaker_goes_on_and_the_other_gives_up() -> None:
    stage = Stage("abcd", anchor=2, patience=10.0)
    stage.partition("ab", "cd")
    stage.run(5)
    assert stage.members() == {"c": "1:cd", "d": "1:cd"}
    assert stage.ends == {}
    stage.run(8)
    assert stage.ends == {name: QuorumLost((2, 3), (0, 1), 2) for name in "ab"}


def test_a_run_without_a_quorum_goes_on_by_itself_when_the_network_heals_in_time() -> None:
    stage = Stage("abcde")
    stage.partition("ab", "cd", "e")
    stage.run(10)
    assert stage.members() == {}
    stage.world.heal()
    stage.run(6)
    assert set(stage.members().values()) == {f"{stage.cores['a'].view.number}:abcde"}
    assert stage.ends == {}


def test_who_was_cut_off_learns_that_it_is_excluded() -> None:
    stage = Stage("abc")
    stage.partition("ab", "c")
    stage.run(5)
    stage.world.heal()
    stage.run(2)
    assert isinstance(stage.ends["c"], Excluded)
    assert stage.ends["c"].view.ranks == (0, 1)
    assert not stage.cores["c"].is_member


def test_a_link_that_breaks_between_two_that_live_evicts_nobody() -> None:
    stage = Stage("abc")
    stage.run(1)
    stage.world.flap(seat("b").id, seat("c").id)
    stage.run(5)
    assert set(stage.members().values()) <= {"1:abc"}
    assert {core.view.ranks for core in stage.cores.values()} == {(0, 1, 2)}


def test_a_broken_lane_is_a_new_view_with_the_same_members() -> None:
    stage = Stage("abc")
    stage.run(1)
    stage.tell("c", "disturbed", 0)
    stage.run(1)
    assert stage.members() == {name: "1:abc" for name in "abc"}
    stage.tell("b", "disturbed", 0)
    stage.run(1)
    assert stage.members() == {name: "1:abc" for name in "abc"}, "that attempt was over already"


def test_of_two_that_do_not_hear_each_other_for_long_the_junior_goes() -> None:
    stage = Stage("abc")
    stage.run(1)
    stage.world.cut(seat("b").id, seat("c").id)
    stage.run(8)
    assert stage.members()["a"] == stage.members()["b"] == "1:ab"
    assert isinstance(stage.ends["c"], Excluded)


def test_a_tie_breaker_that_leaves_votes_before_it_goes() -> None:
    stage = Stage("ab")
    stage.run(1)
    stage.tell("a", "leave")
    stage.run(1)
    assert stage.members() == {"b": "1:b"}
    assert stage.views["b"][0].tie_breaker == 1
    assert isinstance(stage.ends["a"], Excluded)


def test_the_last_member_leaves_alone() -> None:
    stage = Stage("a")
    stage.tell("a", "leave")
    assert isinstance(stage.ends["a"], Excluded)


def test_a_node_that_was_started_anew_votes_but_is_no_member() -> None:
    stage = Stage("abc")
    stage.run(1)
    stage.crash("b", "c")
    stage.run(3)
    assert stage.members() == {}, "one of three is no quorum"
    stage.enter("b'")
    stage.run(4)
    assert stage.members() == {"a": "1:a"}
    assert isinstance(stage.ends["b'"], Excluded)


# The end of a generation, and of a run.


def successor(*names: str) -> Successor:
    return Successor(1, b"1" * 16, tuple(map(seat, names)), 0)


def test_a_generation_ends_with_a_view_that_names_the_next() -> None:
    stage = Stage("abc")
    stage.run(1)
    following = successor("a", "b", "c", "d")
    for name in "cab":
        stage.tell(name, "succeed", following)
        stage.run(0.01)
    stage.run(1)
    assert stage.members() == {name: "1:abc" for name in "abc"}
    assert {core.view.successor for core in stage.cores.values()} == {following}
    stage.crash("b")
    stage.run(5)
    assert stage.members() == {name: "1:abc" for name in "abc"}, "no view follows: the next generation has its own"
    stage.tell("a", "leave")
    assert isinstance(stage.ends["a"], Excluded)


def test_a_member_that_is_lost_on_the_way_is_not_in_the_next_generation() -> None:
    stage = Stage("abc")
    stage.run(1)
    stage.crash("a")
    stage.run(0.05)
    for name in "bc":
        stage.tell(name, "succeed", Successor(1, b"1" * 16, tuple(map(seat, "abcd")), 0))
    stage.run(3)
    assert stage.views["b"][-1].successor == Successor(1, b"1" * 16, tuple(map(seat, "bcd")), 0)
    assert stage.views["b"][-1] == stage.views["c"][-1]


def test_a_node_that_was_started_anew_learns_what_followed() -> None:
    stage = Stage("abc")
    stage.crash("c")
    for name in "ba":
        stage.tell(name, "succeed", successor("a", "b"))
        stage.run(1)
    assert stage.views["a"][-1].successor == successor("a", "b")
    stage.enter("c'")
    stage.run(2)
    end = stage.ends["c'"]
    assert isinstance(end, Excluded)
    assert end.view.successor == successor("a", "b")


def test_the_next_generation_waits_for_all_members_to_wish_for_it() -> None:
    stage = Stage("abc", patience=10.0)
    stage.run(1)
    stage.tell("b", "succeed", successor("a", "b", "c"))
    stage.run(2)
    assert stage.members() == {}
    stage.tell("a", "succeed", successor("a", "b", "c"))
    stage.run(0.5)
    assert stage.members() == {}
    stage.tell("c", "succeed", successor("a", "b", "c"))
    stage.run(0.5)
    assert {core.view.successor for core in stage.cores.values()} == {successor("a", "b", "c")}


def test_a_member_that_never_wishes_for_the_next_generation_does_not_stop_the_others_for_ever() -> None:
    stage = Stage("abc", patience=4.0)
    stage.run(1)
    for name in "ab":
        stage.tell(name, "succeed", successor("a", "b", "c"))
    stage.run(3)
    assert stage.members() == {name: "1:abc" for name in "abc"}, "operations go on meanwhile"
    assert stage.cores["a"].view.successor is None
    stage.crash("c")
    stage.run(4)
    assert stage.cores["a"].view.successor == successor("a", "b")


def test_a_quorum_that_was_started_anew_finishes_a_succession_that_may_be_decided() -> None:
    stage = Stage("abc")
    stage.run(1)
    view = View(LINEAGE, 1, (0, 1, 2), 0, successor=successor("a", "b", "c", "d"))
    first = stage.first
    for name in "bc":  # they had accepted it, and a has gone on
        stage.disks[name] = Record(
            first.members, first.view, 4, 4 if name == "b" else -1, view if name == "b" else None
        )
    stage.crash("a", "b", "c")
    stage.run(1)
    stage.enter("b'")
    stage.enter("c'")
    stage.run(40)
    assert [stage.ends[name] for name in ("b'", "c'")] == [Excluded(view)] * 2, "not the end of the run"


def test_a_run_is_over_when_all_members_have_finished_and_all_of_them_know() -> None:
    stage = Stage("abc")
    stage.run(1)
    for name in "bca":
        stage.tell(name, "leave", is_finished=True)
        stage.run(0.1)
    stage.run(0.2)
    over = View(LINEAGE, 1, (), 0, is_finished=True)
    assert stage.ends == {name: Excluded(over) for name in "abc"}
    assert {name: stage.disks[name].view for name in "abc"} == dict.fromkeys("abc", over)


def test_a_member_that_finishes_early_is_let_go_after_a_moment() -> None:
    stage = Stage("abc")
    stage.run(1)
    stage.tell("a", "leave", is_finished=True)
    stage.run(FINISH_TOGETHER - 0.05)
    assert stage.members() == {}
    stage.run(0.5)
    assert stage.members() == {"b": "1:bc", "c": "1:bc"}
    assert stage.ends == {"a": Excluded(View(LINEAGE, 1, (1, 2), 1))}


def test_other_trouble_does_not_wait_for_members_to_finish_together() -> None:
    stage = Stage("abc")
    stage.run(1)
    stage.tell("a", "leave", is_finished=True)
    stage.run(0.05)
    stage.tell("b", "disturbed", 0)
    stage.run(0.2)
    assert stage.members() == {"b": "1:bc", "c": "1:bc"}


def test_members_that_leave_end_the_run_without_those_that_are_lost() -> None:
    stage = Stage("abc")
    stage.run(1)
    stage.crash("a")
    for name in "bc":
        stage.tell(name, "leave", is_finished=True)
    stage.run(2)
    assert stage.ends == {name: Excluded(View(LINEAGE, 1, (), 0, is_finished=True)) for name in "bc"}
    stage.enter("a'")
    stage.run(1)
    assert stage.ends["a'"] == stage.ends["b"], "a node that was started anew is told"


def test_too_few_cannot_end_a_run() -> None:
    stage = Stage("abc", patience=6.0)
    stage.run(1)
    stage.crash("a", "b")
    stage.tell("c", "leave", is_finished=True)
    stage.run(10)
    assert isinstance(stage.ends["c"], QuorumLost)
    assert stage.cores["c"].view.number == 0


def test_nodes_that_were_all_started_anew_end_the_run_at_once() -> None:
    stage = Stage("abc")
    stage.crash(*"abc")
    stage.run(1)
    for name in ("a'", "b'", "c'"):
        stage.enter(name)
    stage.run(1)
    assert stage.ends == {name: Excluded(View(LINEAGE, 1, (), 0)) for name in ("a'", "b'", "c'")}


def test_a_quorum_that_was_started_anew_gives_the_others_time_to_be_heard() -> None:
    stage = Stage("abc", patience=10.0)
    stage.partition("a", "bc")
    stage.crash("b", "c")
    for name in ("b'", "c'"):
        stage.enter(name)
    stage.run(9)
    assert stage.ends == {}
    stage.run(3)
    over = Excluded(View(LINEAGE, 1, (), 0))
    assert {name: stage.ends.get(name) for name in ("b'", "c'")} == {"b'": over, "c'": over}
    stage.world.heal()
    stage.run(3)
    assert stage.ends["a"] in (over, QuorumLost((1, 2), (0,), 0))


def test_too_few_that_were_started_anew_wait() -> None:
    stage = Stage("abcde", patience=3.0)
    stage.partition("abc", "de")
    stage.crash("d", "e")
    for name in ("d'", "e'"):
        stage.enter(name)
    stage.run(30)
    assert {name: stage.ends.get(name) for name in ("d'", "e'")} == {"d'": None, "e'": None}
    assert stage.members() == {name: "1:abc" for name in "abc"}
    stage.world.heal()
    stage.run(1)
    assert all(isinstance(end, Excluded) and end.view.ranks for end in (stage.ends["d'"], stage.ends["e'"]))


def test_a_member_without_a_quorum_says_what_it_waits_for_and_how_long() -> None:
    core = lone("b", patience=30.0, relink=1.0)
    for name in "ac":
        core.link_down(seat(name).id, 5.0)
    core.tick(core.next_deadline())
    core.tick(6.0)
    assert QuorumAwaited((0, 2), 0, 29.0) in core.effects()
    core.tick(20.0)
    assert not [effect for effect in core.effects() if isinstance(effect, QuorumAwaited)], "once"


def test_nobody_goes_on_with_fewer_than_min_size() -> None:
    stage = Stage("abc", min_size=2, patience=6.0)
    stage.crash("b")
    stage.run(3)
    stage.crash("c")
    stage.run(12)
    assert stage.members()["a"] == "1:ac"
    assert stage.ends["a"] == QuorumLost((2,), (0,), 0)


def test_who_gave_up_is_not_in_the_next_view_but_helps_to_find_it() -> None:
    stage = Stage("abc", patience=6.0)
    stage.partition("a", "b", "c")
    stage.run(1)
    stage.crash("c")
    stage.run(3)
    stage.cores["b"]._need.patience = 60.0
    stage.run(5)
    assert stage.ends.keys() == {"a"}
    stage.world.heal()
    stage.run(10)
    assert stage.members() == {"b": "1:b"}


def test_halves_that_may_go_on_become_lineages_that_never_meet() -> None:
    stage = Stage("abcde", quorum=Quorum.ANY)
    stage.partition("ab", "cde")
    stage.run(6)
    lineages = {name: core.view.lineage for name, core in stage.cores.items()}
    assert lineages["a"] == lineages["b"] != LINEAGE
    assert {lineages[name] for name in "cde"} == {LINEAGE}
    stage.world.heal()
    stage.run(6)
    assert {name: text.partition(":")[2] for name, text in stage.members().items()} == dict.fromkeys(
        "ab", "ab"
    ) | dict.fromkeys("cde", "cde")
    assert stage.cores["a"].view.number > 1 + stage.cores["c"].view.number, "attempts must not be mistaken"


def test_under_one_keeper_any_number_may_die_at_once() -> None:
    stage = Stage("abcde", has_keeper=True)
    stage.run(1)
    stage.crash("a", "b", "c", "d")
    stage.run(4)
    assert stage.members() == {"e": "1:e"}
    stage.crash("K")
    stage.run(60)
    assert stage.ends == {}, "nothing was needed of it"


@pytest.mark.parametrize(("is_vouched_for", "seconds"), [(False, 1), (True, 5)])
def test_in_a_cluster_a_member_that_is_cut_off_is_waited_for_a_little_longer_if_its_keeper_is_heard(
    is_vouched_for: bool, seconds: float
) -> None:
    stage = Stage("abc")
    stage.run(2)
    stage.partition("ab", "c")
    since = stage.world.now
    while stage.members().get("a") != "1:ab":
        if is_vouched_for:
            for name in "ab":
                stage.cores[name].vouched(seat("c").id, stage.world.now)
        stage.run(0.1)
        assert stage.world.now < since + 20
    assert seconds <= stage.world.now - since < seconds + 2


def test_after_a_loss_all_members_know_the_next_leader_as_soon_as_the_view_begins() -> None:
    for lost in "abc":
        stage = Stage("abc", anchor=1)
        stage.run(2)
        stage.crash(lost)
        others = [name for name in "abc" if name != lost]
        until = stage.world.now + 60
        while any("1:" not in stage.members().get(name, "") for name in others):
            stage.run(0.05)
            assert stage.world.now < until
        expected = {stage.cores[name].expected_leader(stage.world.now) for name in others}
        assert len(expected) == 1, expected
        assert expected < {stage.rank(name) for name in others}
        stage.run(10)
        assert {stage.cores[name].leader(stage.world.now) for name in others} == expected


def test_only_one_leads_and_after_its_death_another() -> None:
    stage = Stage("abc", anchor=1)
    stage.run(2)
    assert stage.leaders() == ["b"]
    assert {core.leader(stage.world.now) for core in stage.cores.values()} == {1}
    stage.crash("b")
    for _ in range(40):
        stage.run(0.25)
        assert len(stage.leaders()) <= 1
    assert len(stage.leaders()) == 1


def test_a_leader_that_is_cut_off_stops_to_lead_before_another_begins() -> None:
    stage = Stage("abc")
    stage.run(2)
    stage.partition("a", "bc")
    seen: list[Any] = []
    for _ in range(80):
        stage.run(0.1)
        seen += [leader for leader in [stage.leaders()] if leader not in seen[-1:]]
    assert seen[0] == ["a"]
    assert [] in seen
    assert seen[-1] in (["b"], ["c"])
    assert all(len(leaders) <= 1 for leaders in seen)


def test_a_resumed_leader_knows_that_its_lease_is_over() -> None:
    stage = Stage("abc")
    stage.run(2)
    stage.world.stop(seat("a").id)
    stage.run(LEASE + 1)
    assert stage.leaders() == []


def test_a_member_that_was_stopped_and_excluded_changes_nothing_when_it_goes_on() -> None:
    stage = Stage("abc")
    stage.run(1)
    stage.world.stop(seat("a").id)
    for name in "bc":
        stage.tell(name, "judged", seat("a").id, is_dead=True)
    stage.run(2)
    assert stage.members() == {"b": "1:bc", "c": "1:bc"}
    stage.world.resume(seat("a").id)
    stage.run(2)
    assert isinstance(stage.ends["a"], Excluded)
    assert {stage.cores[name].view.number for name in "bc"} == {1}


# One member.


def lone(name: str = "b", record: Record | None = None, **options: Any) -> Membership:
    """Return a member of view 0 of a, b and c that has links with the others."""
    me = seat(name)
    record = first_record(map(seat, "abc"), LINEAGE) if record is None else record
    core = Membership(record, me.id, me.life, random.Random(1), 0.0, **options)
    for other in "abc":
        if other != name[0]:
            core.link_up(seat(other).id, seat(other).life, 0.0)
    core.effects()
    return core


def answering(core: Membership) -> Membership:
    """Have a member freeze and answer ballot 4, which is a's."""
    core.received(seat("a").id, Prepare(LINEAGE, 1, 4), 0.5)
    core.frozen(1, [], 0.5)
    core.effects()
    return core


def test_nothing_is_answered_before_everything_is_frozen_and_written_down() -> None:
    core = lone()
    core.received(seat("a").id, Prepare(LINEAGE, 1, 4), 1.0)
    assert core.effects() == [Freeze(1)]
    core.received(seat("c").id, Prepare(LINEAGE, 1, 6), 1.1)
    assert core.effects() == [], "freezing once is enough"
    state = State(7, (0, 1), 3, 4, 0, True)
    core.frozen(1, [state], 1.2)
    record, send = core.effects()
    assert isinstance(record, Persist)
    assert record.record.promised == 6
    assert send == SendToNode(seat("c").id, Promise(LINEAGE, 1, 6, (0, 2), (state,)))


def test_an_accept_is_written_down_before_it_is_said() -> None:
    core, view = answering(lone()), View(LINEAGE, 1, (0, 1), 0)
    core.received(seat("a").id, Accept(4, view), 1.0)
    *_, record, send = core.effects()
    assert isinstance(record, Persist)
    assert (record.record.accepted_ballot, record.record.accepted) == (4, view)
    assert send == SendToNode(seat("a").id, Accepted(LINEAGE, 1, 4))


def test_promises_and_accepts_bind_the_next_life_too() -> None:
    view = View(LINEAGE, 1, (0, 1), 0)
    first = first_record(map(seat, "abc"), LINEAGE)
    core = lone("b'", Record(first.members, first.view, 8, 4, view))
    assert not core.is_member
    core.received(seat("a").id, Prepare(LINEAGE, 1, 4), 1.0)
    core.received(seat("a").id, Accept(4, View(LINEAGE, 1, (0,), 0)), 1.0)
    assert core.effects() == [SendToNode(seat("a").id, Refuse(LINEAGE, 1, 8))] * 2
    core.received(seat("c").id, Prepare(LINEAGE, 1, 10), 1.0)
    assert core.effects()[-1] == SendToNode(seat("c").id, Promise(LINEAGE, 1, 10, (0, 2), None, 4, view))


def test_a_freeze_that_took_longer_than_the_view_is_forgotten() -> None:
    core = lone()
    core.received(seat("a").id, Prepare(LINEAGE, 1, 4), 1.0)
    core.received(seat("a").id, Decided(View(LINEAGE, 1, (0, 2), 0)), 1.1)
    assert [type(effect) for effect in core.effects()] == [Freeze, Persist, Excluded]
    core.frozen(1, [], 1.2)
    assert core.effects() == []


def test_who_is_behind_is_told_and_who_is_ahead_is_asked() -> None:
    core, view = answering(lone()), View(LINEAGE, 1, (0, 1, 2), 0)
    core.received(seat("a").id, Decided(view), 1.0)
    core.effects()
    core.received(seat("c").id, Pulse(LINEAGE, 0, 0), 1.1)
    core.received(seat("c").id, Prepare(LINEAGE, 1, 6), 1.1)
    assert core.effects() == [SendToNode(seat("c").id, Decided(view))] * 2
    core.received(seat("c").id, Prepare(LINEAGE, 3, 6), 1.1)
    assert core.effects() == [SendToNode(seat("c").id, Pulse(LINEAGE, 1, 4))]


def test_a_view_far_ahead_excludes_who_is_not_in_it() -> None:
    core, view = lone(), View(LINEAGE, PAST_VIEWS * 2, (0, 2), 0)
    core.received(seat("a").id, Decided(view), 1.0)
    record, excluded = core.effects()
    assert isinstance(record, Persist)
    assert record.record.view == view, "it can tell others, also after a crash"
    assert excluded == Excluded(view)
    assert core.next_deadline() == math.inf


def test_what_no_member_says_is_a_protocol_error() -> None:
    core = lone()
    with pytest.raises(RemoteProtocolError, match="in ballot 6, which is not its own"):
        core.received(seat("a").id, Accept(6, View(LINEAGE, 1, (0, 1), 0)), 1.0)
    core.received(b"?" * 32, Prepare(LINEAGE, 1, 4), 1.0)
    core.received(seat("a").id, Prepare(b"another run.....", 1, 4), 1.0)
    assert core.effects() == []


IMPOSSIBLE = {
    "a rank that does not exist": View(LINEAGE, 1, (0, 1, 7), 0),
    "a rank twice": View(LINEAGE, 1, (0, 0, 1), 0),
    "ranks in another order": View(LINEAGE, 1, (1, 0), 0),
    "a tie-breaker that is not in it": View(LINEAGE, 1, (0, 1), 2),
    "an end and a successor": View(LINEAGE, 1, (), 0, successor=Successor(1, LINEAGE, (seat("a"),), 0)),
    "one group twice": View(LINEAGE, 1, (0, 1), 0, (Verdict(7, 1, Fate.REDO), Verdict(7, 2, Fate.REDO))),
}


@pytest.mark.parametrize("view", IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_a_view_that_cannot_follow_is_a_protocol_error_proposed_or_decided(view: View) -> None:
    for message in (Accept(4, view), Decided(view)):
        core = answering(lone())
        with pytest.raises(RemoteProtocolError, match="that cannot follow"):
            core.received(seat("a").id, message, 1.0)
        assert core.view.number == 0
        assert core.effects() == []


def test_a_view_with_this_member_must_rest_on_its_answer() -> None:
    for message in (Accept(4, View(LINEAGE, 1, (0, 1), 0)), Decided(View(LINEAGE, 1, (0, 1), 0))):
        core = lone()
        with pytest.raises(RemoteProtocolError, match="for which this member never answered"):
            core.received(seat("a").id, message, 1.0)
        assert core.view.number == 0


def test_a_member_that_was_excluded_is_told_so_and_has_no_say() -> None:
    core, view = answering(lone()), View(LINEAGE, 1, (0, 1), 0)
    core.received(seat("a").id, Decided(view), 1.0)
    core.effects()
    excluded = seat("c").id
    core.received(excluded, Decided(View(LINEAGE, 2, (0,), 0)), 1.1)
    core.received(excluded, Prepare(LINEAGE, 2, 10), 1.1)
    core.received(excluded, Trouble(LINEAGE, 1), 1.1)
    core.received(excluded, Accept(10, View(LINEAGE, 2, (1,), 1)), 1.1)
    assert core.effects() == []
    assert core.view == view
    core.received(excluded, Trouble(LINEAGE, 0), 1.1)
    core.received(excluded, Pulse(LINEAGE, 0, 4), 1.1)
    assert core.effects() == [SendToNode(excluded, Decided(view))] * 2


def test_a_member_that_left_is_known_to_have_left_even_if_the_view_without_it_is_heard_first() -> None:
    core = answering(lone())
    core.received(seat("a").id, Decided(View(LINEAGE, 1, (0, 1), 0)), 1.0)
    assert 2 not in core.leaving
    core.received(seat("c").id, Trouble(LINEAGE, 0, leaves=True), 1.1)
    assert 2 in core.leaving


def test_a_member_that_asked_to_leave_in_an_earlier_view_leaves_in_this_one_too() -> None:
    core = answering(lone())
    core.received(seat("c").id, Decided(View(LINEAGE, 1, (1, 2), 1)), 1.0)
    sent(core, Decided)
    core.received(seat("c").id, Trouble(LINEAGE, 0, leaves=True), 1.1)  # it had not heard of the view yet
    assert 2 in core.leaving
    assert [view.view.number for view in sent(core, Decided)] == [1]  # so it is told
    assert core.next_deadline() < 2.0  # for the ballot of a view without it


def test_a_member_in_the_middle_of_an_operation_is_told_what_became_of_it_before_a_generation_ends() -> None:
    core = lone("a")
    core.succeed(successor("a", "b", "c"), 1.0)
    core.tick(1.0)
    ballot = sent(core, Prepare)[0].ballot
    core.frozen(1, [State(7, (0, 1, 2), 5)], 1.1)
    core.received(seat("c").id, Promise(LINEAGE, 1, ballot, (0, 1), (State(7, (0, 1, 2), 5),)), 1.1)
    stopped = State(7, (0, 1, 2), 4, 5, 0, complete=True)
    core.received(seat("b").id, Promise(LINEAGE, 1, ballot, (0, 2), (stopped,)), 1.1)
    view = sent(core, Accept)[0].view
    assert view == View(LINEAGE, 1, (0, 1, 2), 0, (Verdict(7, 6, Fate.REDO),))


def test_a_generation_that_this_member_never_wished_for_is_a_protocol_error() -> None:
    view = View(LINEAGE, 1, (0, 1), 0, successor=successor("a", "b", "x"))
    for message in (Accept(4, view), Decided(view)):
        for wish in (None, successor("a", "b", "c")):
            core = answering(lone())
            if wish is not None:
                core.succeed(wish, 0.6)
            core.effects()
            with pytest.raises(RemoteProtocolError, match="that this member never named"):
                core.received(seat("a").id, message, 1.0)
            assert core.view.number == 0
    core = answering(lone())
    core.succeed(successor("a", "b", "c"), 0.6)
    core.received(seat("a").id, Decided(View(LINEAGE, 1, (0, 1), 0, successor=successor("a", "b"))), 1.0)
    assert core.view.successor == successor("a", "b"), "a member that is lost on the way is not in it"


@pytest.mark.parametrize("message", [Decided, lambda view: Accept(4, view)])
def test_one_member_alone_does_not_end_the_run(message: Any) -> None:
    end = View(LINEAGE, 1, (), 0, is_finished=True)
    core = answering(lone())
    core.received(seat("a").id, message(end), 1.0)
    said = {effect.message for effect in core.effects() if isinstance(effect, SendToNode)}
    assert said <= {Pulse(LINEAGE, 0, 4)}, "the others are asked"
    core.received(seat("a").id, Trouble(LINEAGE, 0, leaves=True), 1.1)
    assert core.view.number == 0, "two of three stay"


def test_an_end_that_was_doubted_is_believed_when_no_quorum_stays() -> None:
    end = View(LINEAGE, 1, (), 0, is_finished=True)
    for news in (
        lambda core: core.received(seat("c").id, Trouble(LINEAGE, 0, leaves=True), 1.2),
        lambda core: core.received(seat("c").id, Decided(end), 1.2),
        lambda core: core.link_down(seat("c").id, 1.2),
        lambda core: core.judged(seat("c").id, 1.2, is_dead=True),
    ):
        core = answering(lone())
        core.received(seat("a").id, Trouble(LINEAGE, 0, leaves=True), 1.0)
        core.received(seat("a").id, Decided(end), 1.1)
        assert core.view.number == 0
        news(core)
        assert core.view == end
        assert Excluded(end) in core.effects()
    gone = answering(lone())
    for name in "ac":
        gone.link_down(seat(name).id, 1.0)
    gone.link_up(seat("a").id, seat("a'").life, 1.1)
    gone.received(seat("a").id, Decided(end), 1.1)
    assert gone.view == end, "this one was not heard for a while"


NONSENSE = {
    "a view of another number": {"accepted_ballot": 4, "accepted": View(LINEAGE, 2, (0, 1), 0)},
    "a view of another lineage": {"accepted_ballot": 4, "accepted": View(b"1" * 16, 1, (0, 1), 0)},
    "a view that cannot follow": {"accepted_ballot": 4, "accepted": View(LINEAGE, 1, (0, 9), 0)},
    "a view without a ballot": {"accepted": View(LINEAGE, 1, (0, 1), 0)},
    "a ballot without a view": {"accepted_ballot": 4},
    "a view of a later ballot": {"accepted_ballot": 400, "accepted": View(LINEAGE, 1, (0, 1), 0)},
    "a group twice": {"states": (State(7, (0, 1), 1), State(7, (0, 1), 2))},
    "an operation that is not the next": {"states": (State(7, (0, 1), 1, 7),)},
    "too many operations": {"states": (State(7, (0, 1), MOST_OPERATIONS),)},
    "ranks that do not exist": {"states": (State(7, (0, 9), 1),)},
}


@in_turn(changes=NONSENSE.values())
def test_an_answer_that_cannot_be_is_a_protocol_error_and_changes_nothing(changes: dict[str, Any]) -> None:
    core = lone("a")
    core.disturbed(0, 1.0)
    core.tick(1.0)
    ballot = sent(core, Prepare)[0].ballot
    core.frozen(1, [State(7, (0, 1), 1)], 1.1)
    core.effects()
    values: dict[str, Any] = {"states": (State(7, (0, 1), 1),), "accepted_ballot": -1, "accepted": None} | changes
    with pytest.raises(RemoteProtocolError, match="sent an impossible answer"):
        core.received(seat("b").id, Promise(LINEAGE, 1, ballot, (0, 2), **values), 1.2)
    assert core.effects() == []
    for name, hears in (("b", (0, 2)), ("c", (0, 1))):
        core.received(seat(name).id, Promise(LINEAGE, 1, ballot, hears, (State(7, (0, 1), 1),)), 1.3)
    assert any(isinstance(getattr(effect, "message", 0), Accept) for effect in core.effects()), "the others are heard"


def test_no_member_uses_up_the_ballots_of_the_others() -> None:
    far = MOST_BALLOTS_AHEAD * 5
    for message in (
        Prepare(LINEAGE, 1, far),
        Accept(far, View(LINEAGE, 1, (0,), 0)),
        Pulse(LINEAGE, 0, far, claims=True, stamp=1.0),
        Refuse(LINEAGE, 1, far),
    ):
        core = answering(lone())
        with pytest.raises(RemoteProtocolError, match="far above all others"):
            core.received(seat("a").id, message, 1.0)
        assert (core.ballot, core.effects()) == (4, [])


def test_an_excluded_member_can_claim_nothing() -> None:
    core, view = answering(lone()), View(LINEAGE, 1, (0, 1), 0)
    core.received(seat("a").id, Decided(view), 1.0)
    core.effects()
    core.received(seat("c").id, Pulse(LINEAGE, 1, 10, claims=True, stamp=1.0), 1.1)
    core.received(seat("c").id, Pulse(LINEAGE, 9, 10), 1.1)
    assert (core.ballot, core.effects()) == (4, [])


def test_an_echo_of_a_claim_that_is_yet_to_come_makes_no_leader() -> None:
    core = lone("a", record=first_record(map(seat, "abc"), LINEAGE, anchor=1))
    core._leading.promise(core._position.next_ballot(), 1.0)
    core.tick(1.0)
    for stamp in (math.inf, 1e300, math.nan):
        for name in "bc":
            core.received(seat(name).id, Pulse(LINEAGE, 0, core.ballot, echo=stamp), 1.0)
    assert core.leader(1.0 + 100 * LEASE) is None


FORKS = {
    "ranks that do not exist": View(b"1" * 16, 500, (0, 1, 9), 0),
    "a rank twice": View(b"1" * 16, 500, (0, 1, 1), 0),
    "a number that was used": View(b"1" * 16, 0, (0, 1), 0),
    "a number far ahead": View(b"1" * 16, 1 << 30, (0, 1), 0),
    "the same lineage": View(LINEAGE, 500, (0, 1), 0),
    "without the one that tells": View(b"1" * 16, 500, (1, 2), 1),
    "a tie-breaker that is not in it": View(b"1" * 16, 500, (0, 1), 2),
}


@pytest.mark.parametrize("view", FORKS.values(), ids=FORKS)
def test_a_fork_that_cannot_be_is_a_protocol_error(view: View) -> None:
    core = answering(lone(quorum=Quorum.ANY))
    with pytest.raises(RemoteProtocolError, match="a fork that cannot follow"):
        core.received(seat("a").id, Fork(LINEAGE, 0, view), 1.0)
    assert core.view.number == 0
    strict = answering(lone())
    strict.received(seat("a").id, Fork(LINEAGE, 0, view), 1.0)
    assert strict.view.number == 0


def test_the_news_of_a_fork_is_not_answered_with_the_same_news() -> None:
    core = lone(quorum=Quorum.ANY)
    core.received(seat("a").id, Prepare(LINEAGE, 1, 4), 1.0)
    core.frozen(1, [], 1.0)
    fork = Fork(LINEAGE, 0, View(b"1" * 16, 500, (0, 1), 0))
    core.received(seat("a").id, fork, 1.0)
    assert core.view == fork.view
    core.effects()
    core.received(seat("a").id, fork, 1.1)
    assert core.effects() == []
    core.received(seat("a").id, Prepare(LINEAGE, 1, 8), 1.1)
    assert core.effects() == [SendToNode(seat("a").id, fork)], "only a member that has not heard of it is told"


# The rules.


def test_a_lease_lasts_from_the_claim_that_a_quorum_echoed_and_begins_when_any_other_is_over() -> None:
    def has_one_more(ranks: Collection[int]) -> bool:
        return len(ranks) >= 1

    lease = Lease()
    lease.echoed(1, 10.0, has_one_more, 10.1)
    assert not lease.is_held(has_one_more, 10.2), "another's lease may not be over"
    lease.echoed(2, 12.0, has_one_more, 12.1)
    assert lease.is_held(has_one_more, 10.1 + LEASE * CLOCK_DRIFT)
    assert not lease.is_held(has_one_more, 12.0 + LEASE)
    lease.lost()
    lease.echoed(2, 13.0, has_one_more, 13.1)
    assert not lease.is_held(has_one_more, 13.2), "by another ballot it begins anew"


@given(st.integers(1, 9), st.data())
def test_two_quorums_of_a_view_have_a_member_in_common(size: int, data: st.DataObject) -> None:
    ranks = tuple(range(size))
    view = View(LINEAGE, 0, ranks, data.draw(st.sampled_from(ranks)))
    one = data.draw(st.sets(st.sampled_from(ranks)))
    assert not (is_quorum(view, one) and is_quorum(view, set(ranks) - one))
    assert is_quorum(view, one) or is_quorum(view, set(ranks) - one)


@given(st.sets(st.tuples(st.integers(0, 6), st.integers(0, 6))))
def test_the_largest_company_is_as_large_as_any(cuts: set[tuple[int, int]]) -> None:
    ranks = range(7)
    hears = {one: [other for other in ranks if (one, other) not in cuts] for one in ranks}

    def is_company(chosen: set[int]) -> bool:
        return all(other in hears[one] for one in chosen for other in chosen if other != one)

    found = largest_clique(hears, 0)
    assert is_company(set(found))
    every = [{rank for rank in ranks if bits >> rank & 1} for bits in range(1 << 7)]
    assert len(found) == max(len(chosen) for chosen in every if is_company(chosen))


def test_a_company_of_a_hundred_in_two_halves_is_found_quickly_with_the_tie_breaker() -> None:
    hears = {rank: [other for other in range(100) if other // 50 == rank // 50] for rank in range(100)}
    assert largest_clique(hears, 70) == tuple(range(50, 100))
    assert largest_clique(hears, 0) == tuple(range(50))


def test_the_company_of_a_hundred_ranks_is_found_at_once() -> None:
    """A keeper may look for it after each of many answers, while all members wait."""
    all_ranks = range(128)
    hears = {rank: tuple(other for other in all_ranks if other not in (rank, 5, 50)) for rank in all_ranks}
    began = time.process_time()
    for _ in all_ranks:
        largest_clique(hears, 0)
    assert time.process_time() - began < 2.0


def test_the_answers_of_the_most_members_that_there_may_be_are_taken_in_moments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All members wait meanwhile. The company is looked for once all answers are there, not after each of them."""
    searches = []

    def search(hears: Any, tie_breaker: int) -> tuple[int, ...]:
        searches.append(len(hears))
        return largest_clique(hears, tie_breaker)

    monkeypatch.setattr(ballot, "largest_clique", search)
    all_ranks = tuple(range(MAX_MEMBERS))
    keys = [MemberKey(rank.to_bytes(32, "big"), rank.to_bytes(16, "big")) for rank in all_ranks]
    keeper = b"k" * 32
    record = first_record(keys, LINEAGE, has_keeper=True)
    core = Membership(record, keeper, b"k" * 16, random.Random(1), 0.0, keeper=keeper)
    began = time.process_time()
    for key in keys:
        core.link_up(key.id, key.life, 0.0)
    core.link_down(keys[5].id, 1.0)
    core.tick(1.0)
    prepare = next(
        one.message for one in core.effects() if isinstance(one, SendToNode) and isinstance(one.message, Prepare)
    )
    for rank in all_ranks:
        if rank != 5:
            hears = tuple(other for other in all_ranks if other not in (rank, 5))
            answer = Promise(LINEAGE, 1, prepare.ballot, hears, (State(7, all_ranks, 4),))
            core.received(keys[rank].id, answer, 1.5)
    core.tick(2.5)
    sent = [one for one in core.effects() if isinstance(one, SendToNode) and isinstance(one.message, Decided)]
    told = {one.peer: one.message for one in sent}
    expected = View(LINEAGE, 1, all_ranks[:5] + all_ranks[6:], 0, (Verdict(7, 5, Fate.REDO),))
    assert told == {key.id: Decided(expected) for key in keys if key is not keys[5]}
    assert time.process_time() - began < 4.0
    assert len(searches) <= 4


def test_the_tie_breaker_stays_as_long_as_it_can() -> None:
    view = View(LINEAGE, 4, (1, 3, 6), 3)
    assert [next_tie_breaker(view, ranks) for ranks in ((1, 3), (6, 1))] == [3, 1]


@pytest.mark.parametrize(
    ("answers", "sequence", "fate"),
    [
        ({0: State(7, (0, 1, 2), 4), 1: State(7, (0, 1, 2), 4)}, 5, Fate.REDO),
        ({0: State(7, (0, 1, 2), 4, 5, 3, True), 1: State(7, (0, 1, 2), 4, 5, 3, True)}, 5, Fate.COMMIT),
        ({0: State(7, (0, 1, 2), 4, 5, 3, True), 1: State(7, (0, 1, 2), 4, 5, 2, True)}, 5, Fate.REDO),
        ({0: State(7, (0, 1, 2), 4, 5, 3, True), 1: State(7, (0, 1, 2), 4, 5, 3)}, 5, Fate.REDO),
        ({0: State(7, (0, 1, 2), 5, 6, 3, True), 1: State(7, (0, 1, 2), 4, 5, 3, True)}, 6, Fate.REDO),
        ({0: State(7, (0, 1, 2), 4, 5, 3, True, 2), 1: State(7, (0, 1, 2), 4)}, 5, Fate.RAISE),
        ({0: State(7, (0, 1, 2), 4, 5, 3, True, 2), 1: State(7, (0, 1, 2), 4, 5, 3, True, 2)}, 5, Fate.COMMIT),
        ({0: State(7, (0, 1, 2), 4, 5, 3, False, 1), 1: State(7, (0, 1, 2), 4)}, 5, Fate.REDO),
    ],
)
def test_the_fate_of_an_operation_follows_from_the_answers(
    answers: dict[int, State], sequence: int, fate: Fate
) -> None:
    verdicts = judge({rank: (state,) for rank, state in answers.items()})
    assert verdicts == (Verdict(7, sequence, fate),)
    for state in answers.values():
        assert rests_on(View(LINEAGE, 1, tuple(answers), 0, verdicts), [state])


@pytest.mark.parametrize(
    ("state", "verdict"),
    [
        (State(7, (0, 1, 2), 4), Verdict(7, 4, Fate.REDO)),
        (State(7, (0, 1, 2), 4), Verdict(8, 5, Fate.REDO)),
        (State(7, (0, 1, 2), 4), Verdict(7, 5, Fate.COMMIT)),
        (State(7, (0, 1, 2), 4, 5), Verdict(7, 5, Fate.COMMIT)),
        (State(7, (0, 1, 2), 4, 5), Verdict(7, 6, Fate.COMMIT)),
        (State(7, (0, 1, 2), 4, 5, 0, True), Verdict(7, 6, Fate.COMMIT)),
        (State(7, (0, 1), 4), Verdict(7, 6, Fate.REDO)),
        (State(7, (0, 1), 4, 5), Verdict(7, 6, Fate.REVOKE)),
        (State(7, (0, 1), 4, 5, 0, True), Verdict(7, 7, Fate.REDO)),
        (State(7, (0, 1, 2), 4), Verdict(7, MOST_OPERATIONS + 1, Fate.REDO)),
    ],
)
def test_a_verdict_that_no_judge_gives_after_such_an_answer_is_known(state: State, verdict: Verdict) -> None:
    assert not rests_on(View(LINEAGE, 1, (0, 1), 0, (verdict,)), [state])


def test_a_member_that_forgot_a_group_may_not_know_how_far_it_was() -> None:
    forgotten = State(7, (0, 1, 2), 0, gives_up=True)
    answers = {0: (State(7, (0, 1, 2), 50),), 1: (forgotten,), 2: (State(7, (0, 1, 2), 49, 50, 0, True),)}
    view = View(LINEAGE, 1, (0, 1, 2), 0, judge(answers))
    for states in answers.values():
        assert rests_on(view, states)
        assert all(fits(others, states, view) for others in answers.values())


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (State(7, (0, 1), 4), State(7, (0, 1), 5)),
        (State(7, (0, 1), 4, 5), State(7, (0, 1), 5)),
        (State(7, (0, 1), 4, 5, 0, True), State(7, (0, 1), 6)),
        (State(7, (0, 1), 4), State(7, (0, 1), 5, gives_up=True)),
        (State(7, (0, 1), 4), State(7, (0, 1), 3)),
        (State(7, (0, 1), 4), State(7, (0, 1), 3, 4)),
    ],
)
def test_members_of_a_whole_group_are_at_most_one_complete_operation_apart(ours: State, theirs: State) -> None:
    assert not fits([theirs], [ours], View(LINEAGE, 1, (0, 1), 0))
    assert fits([theirs], [ours], View(LINEAGE, 1, (0, 2), 0)), "operations may have raised, for want of a root"
    assert fits([theirs], [State(8, (0, 1), 1)], View(LINEAGE, 1, (0, 1), 0))


def test_an_answer_that_came_before_this_member_had_frozen_is_compared_then() -> None:
    core = lone("a")
    core.disturbed(0, 1.0)
    core.tick(1.0)
    ballot = sent(core, Prepare)[0].ballot
    true, false = (State(7, (0, 1, 2), returned) for returned in (4, 9))
    core.received(seat("b").id, Promise(LINEAGE, 1, ballot, (0, 2), (false,)), 1.1)
    core.received(seat("c").id, Promise(LINEAGE, 1, ballot, (0, 1), (true,)), 1.1)
    core.frozen(1, [true], 1.2)
    assert not any(isinstance(getattr(effect, "message", 0), Accept) for effect in core.effects())
    with pytest.raises(RemoteProtocolError, match="sent an impossible answer"):
        core.received(seat("b").id, Promise(LINEAGE, 1, ballot, (0, 2), (false,)), 1.3)
    core.received(seat("b").id, Promise(LINEAGE, 1, ballot, (0, 2), (true,)), 1.4)
    (view,) = {message.view for message in sent(core, Accept)}
    assert view == View(LINEAGE, 1, (0, 1, 2), 0, (Verdict(7, 5, Fate.REDO),))


def test_a_member_that_called_something_else_than_the_others_gives_an_answer_that_is_taken() -> None:
    core = lone("a")
    core.disturbed(0, 1.0)
    core.tick(1.0)
    ballot = sent(core, Prepare)[0].ballot
    behind = Commit(7, (0, 1, 2), 1, View(LINEAGE, 0, (0, 1), 0, (Verdict(7, 3, Fate.RAISE),)))
    behind.start()
    core.received(seat("b").id, Promise(LINEAGE, 1, ballot, (0, 2), (behind.freeze(),)), 1.1)


def test_a_member_that_does_not_know_the_group_yet_is_not_complete_in_it() -> None:
    complete = State(7, (0, 1), 0, 1, 0, True)
    assert judge({0: (complete,), 1: ()}) == (Verdict(7, 1, Fate.REDO),)
    assert judge({0: (complete,), 2: ()}) == (Verdict(7, 1, Fate.COMMIT),)
