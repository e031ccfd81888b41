from __future__ import annotations

import itertools
import math
import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.base.errors import RemoteProtocolError
from covey.lab.world import SimulatedWorld
from covey.proto.formation import MOST_PAST_LIVES, PROPOSALS_LIMIT, Formation, joiners
from covey.proto.formation.joiners import rank_order
from covey.proto.lineages import Lineages
from covey.wire.formation import (
    MAX_OPEN,
    RANDOM_BYTES,
    Answer,
    Ending,
    FoundingMember,
    Here,
    Outcome,
    Phase,
    Propose,
    Row,
    Standing,
    Terms,
    new_lineage,
)
from covey.wire.versions import Versions

LINEAGE = new_lineage(1000.0, b"l" * 10)
OTHER = new_lineage(1001.0, b"k" * 10)
PAIR = Terms("a run", "train.py", 2, 2, None, "1", "auto")
OPEN = Terms("a run", "train.py", None, 2, None, "1", "auto")


def member(name: str, host: str = "north") -> FoundingMember:
    """Return a life of the node that is called by the first letter of `name`; a' is the life after a."""
    return FoundingMember(name[0].encode() * 32, name.encode().ljust(16, b"."), name, host, b"")


def id_of(name: str) -> bytes:
    return member(name).id


class Stage:
    """Joiners in a fast and faultless world."""

    def __init__(self, *names: str, terms: Terms = OPEN) -> None:
        self.world = SimulatedWorld(1, delay=0.01)
        self.cores: dict[str, Formation] = {}
        for name in names:
            self.enter(name, terms)

    def enter(self, name: str, terms: Terms = OPEN, host: str = "north", **options: Any) -> Formation:
        me = member(name, host)
        options = {"wall": lambda: self.world.now, **options}
        self.cores[name] = core = Formation(me, terms, random.Random(name), self.world.now, **options)
        self.world.start(name, me.id, me.life, core)
        return core

    def separate(self, one: str, other: str) -> None:
        self.world.cut(id_of(one), id_of(other))

    def run(self, seconds: float) -> None:
        self.world.run(self.world.now + seconds)

    def views(self) -> dict[str, str]:
        """Return the view of each joiner that has one, as its members' names."""
        return {
            name: "".join(one.name for one in core.formed.view)
            for name, core in self.cores.items()
            if core.formed is not None
        }


def step(core: Formation, *messages: Any, sender: str = "a", now: float = 0.0) -> list[Any]:
    """Let a message come in over a link that is up, and return what is answered to its sender."""
    core.outgoing()
    for message in messages:
        core.received(id_of(sender), message, now)
    return [message for to, message in core.outgoing() if to == id_of(sender)]


def here(name: str, *hears: str, terms: Terms = OPEN, phase: Phase = Phase.JOINING) -> Here:
    return Here(terms, member(name), tuple(member(one).life for one in hears), phase)


def founded(*names: str) -> Here:
    """Return what a member of a run that goes on with these says of itself."""
    return Here(OPEN, member(names[0]), (member("x").life,), Phase.FORMED, names, LINEAGE, 3)


def test_a_joiner_that_knows_of_a_run_proposes_nothing_accepts_nothing_and_says_so() -> None:
    lineages = Lineages()
    lineages.learn(LINEAGE, ["n", "s"])
    core = Formation(member("b"), OPEN, random.Random(1), 0.0, lineages=lineages)
    core.link_up(id_of("a"), member("a").life, 0.0)
    core.received(id_of("a"), here("a", "b"), 0.1)
    core.tick(50.0)
    assert core.accepted is None
    said = [message for _, message in core.outgoing() if isinstance(message, Here)]
    assert {(message.lineage, message.names) for message in said} == {(LINEAGE, ("n", "s"))}
    (standing,) = step(core, Propose(OTHER, (member("a"), member("b"))))
    assert standing.rows[1].answer is Answer.REFUSED
    assert lineages.ending(OTHER) == Ending(OTHER, False), "a founding that was refused came to nothing"


def test_of_several_runs_a_joiner_waits_for_the_oldest() -> None:
    core = Formation(member("x"), OPEN, random.Random(1), 0.0)
    for name, lineage in (("a", OTHER), ("b", LINEAGE)):
        core.link_up(id_of(name), member(name).life, 0.0)
        core.received(id_of(name), msgspec.structs.replace(founded(name), lineage=lineage), 0.1)
    assert min(LINEAGE, OTHER) == LINEAGE == core.lineages.current
    assert core.going_on is not None
    assert core.going_on.names == ("b",)
    assert core.is_member_of_ours(id_of("b"), LINEAGE)
    assert not core.is_member_of_ours(id_of("a"), LINEAGE)


def test_members_of_two_runs_that_meet_both_know_and_only_the_older_takes_newcomers() -> None:
    stage = Stage("a", "b", "c", "d")
    stage.world.partition([id_of("a"), id_of("b")], [id_of("c"), id_of("d")])
    stage.run(2.0)
    stage.world.heal()
    assert stage.views() == {"a": "ab", "b": "ab", "c": "cd", "d": "cd"}
    stage.run(1.0)
    stage.enter("e")
    stage.run(2.0)
    formed = {name: core.formed.lineage for name, core in stage.cores.items() if core.formed is not None}
    older = min(formed.values())
    for name, lineage in formed.items():
        assert set(stage.cores[name].rivals) == set(formed.values()) - {lineage}
        assert stage.cores[name].newcomers() == ((id_of("e"),) if lineage == older else ())
    assert stage.cores["e"].lineages.current == older


def test_a_process_that_came_back_to_a_run_ends_with_it_and_a_new_one_founds_another() -> None:
    lineages = Lineages()
    lineages.learn(LINEAGE, ["n"])
    back = Formation(member("b"), OPEN, random.Random(1), 0.0, lineages=lineages, follows=LINEAGE)
    back.ended(Ending(LINEAGE, True), 1.0)
    assert back.ending == Ending(LINEAGE, True)
    lost = Formation(member("b"), OPEN, random.Random(1), 0.0, lineages=Lineages(), follows=LINEAGE)
    lost.ended(Ending(LINEAGE, False), 1.0)
    assert lost.ending is None, "its members are gone, and the work is not done"
    late = Formation(member("b"), OPEN, random.Random(1), 0.0, lineages=lineages, follows=LINEAGE)
    assert late.ending == Ending(LINEAGE, True), "its disk knows already"
    stage = Stage("a", "b")
    stage.run(2.0)
    assert stage.cores["a"].ending is None


def test_a_first_view_spans_as_many_machines_as_each_member_asks_for() -> None:
    stage = Stage()
    for name in "abc":
        stage.enter(name, min_hosts=2)
    stage.run(10.0)
    assert stage.views() == {}
    waiting = stage.cores["a"].report().waiting
    assert waiting == "3 nodes so far, all on this machine; waiting for another one (--min 3 begins without it)"
    stage.enter("d", host="south")
    stage.run(3.0)
    assert stage.views() == dict.fromkeys("abcd", "abcd")
    alone = Stage()
    alone.enter("a")
    alone.enter("b", min_hosts=2)
    alone.run(10.0)
    assert alone.views() == {}, "b refuses what a proposes"


@given(st.permutations(range(6)), st.lists(st.sampled_from("xyz"), min_size=6, max_size=6))
def test_ranks_of_one_host_are_adjacent_and_do_not_depend_on_who_came_first(order: list[int], hosts: list[str]) -> None:
    members = [member("abcdef"[index], hosts[index]) for index in range(6)]
    ranks = rank_order([members[index] for index in order])
    assert ranks == rank_order(members)
    assert ranks[0] == members[0]
    changes = sum(one.host != other.host for one, other in itertools.pairwise(ranks))
    assert changes == len(set(hosts)) - 1
    assert all(one.id < other.id for one, other in itertools.pairwise(ranks) if one.host == other.host)


def test_a_run_that_is_full_does_not_wait_for_more() -> None:
    stage = Stage("b", "a", terms=PAIR)
    stage.run(0.3)
    assert stage.views() == {"a": "ab", "b": "ab"}
    formed = [core.formed for core in stage.cores.values()]
    assert formed[0] == formed[1]
    assert formed[0] is not None
    assert formed[0].lost == ()


def test_whoever_comes_while_the_others_settle_is_in_the_view() -> None:
    stage = Stage()
    stage.enter("a", host="south")
    stage.enter("b")
    stage.run(0.8)
    stage.enter("c", host="south")
    stage.run(0.8)
    assert stage.views() == {}
    assert stage.cores["a"].report().waiting == "3 nodes are here; agreeing on the group"
    assert stage.cores["b"].report().waiting == "3 nodes are here; agreeing on the group"
    stage.run(0.5)
    assert stage.views() == {"a": "acb", "b": "acb", "c": "acb"}


def test_one_that_comes_later_hears_that_the_run_is_going_on_and_with_whom() -> None:
    stage = Stage("b", "c")
    stage.run(2.0)
    for name in "da":  # they would be enough for a view of their own
        stage.enter(name)
    stage.run(20.0)
    assert stage.views() == {"b": "bc", "c": "bc"}
    report = stage.cores["a"].report()
    assert report.elsewhere == ("b", "c")
    assert report.waiting == "the run is already running with b, c"
    for name in "bc":
        stage.world.crash(id_of(name))
    stage.run(30.0)
    assert stage.views() == {"b": "bc", "c": "bc"}, "b and c may go on where they are not heard"
    assert stage.cores["a"].report().awaited == ("b", "c")
    assert "a run of this name was begun before, with b, c" in stage.cores["a"].report().waiting
    lineage = stage.cores["a"].lineages.current
    stage.cores["d"].ended(Ending(lineage, False), stage.world.now)
    stage.run(3.0)
    assert stage.views() == {"b": "bc", "c": "bc", "a": "ad", "d": "ad"}, "d tells a that the run is over"


def test_no_more_than_max_size_are_taken() -> None:
    stage = Stage(*"edcba", terms=Terms("a run", "train.py", None, 2, 3, "1", "auto"))
    stage.run(5.0)
    (view,) = set(stage.views().values())
    assert len(view) == 3
    assert stage.views() == dict.fromkeys(view, view)


@pytest.mark.parametrize("terms", [Terms("r", "p", 1, 2, None, "1", ""), Terms("r", "p", None, 1, None, "1", "")])
def test_one_alone_is_enough_if_the_terms_say_so(terms: Terms) -> None:
    stage = Stage("a", terms=terms)
    stage.run(1.1)
    assert stage.views() == {"a": "a"}
    stage.run(1.0)
    assert stage.cores["a"].next_deadline() == math.inf


def test_fewer_than_size_are_never_a_view() -> None:
    stage = Stage("a", "b", terms=Terms("a run", "train.py", 3, 2, None, "1", "auto"))
    stage.run(60.0)
    assert stage.views() == {}
    assert stage.cores["b"].report().waiting == "2 of 3 nodes so far"


def test_nodes_that_left_before_a_view_was_agreed_are_named() -> None:
    """The time of one may be over a moment before that of the others, which then count without it."""
    stage = Stage("a", "b", terms=Terms("a run", "train.py", 3, 2, None, "1", "auto"))
    stage.run(5.0)
    assert stage.cores["a"].report().gone == ()
    stage.world.crash(id_of("b"))
    stage.run(5.0)
    report = stage.cores["a"].report()
    assert (report.waiting, report.here, report.gone) == ("1 of 3 nodes so far", ("a",), ("b",))


def test_joiners_on_other_terms_are_refused_with_the_reason_on_both_sides() -> None:
    stage = Stage("a", "b")
    stage.enter("c", Terms("a run", "eval.py", None, 2, None, "1", "auto"))
    stage.run(3.0)
    assert stage.views() == {"a": "ab", "b": "ab"}
    assert stage.cores["a"].report().refused == (("c", "runs eval.py, this node train.py; use the same on both"),)
    report = stage.cores["c"].report()
    assert report.refused == tuple((name, "runs train.py, this node eval.py; use the same on both") for name in "ab")
    assert (report.here, report.elsewhere) == (("c",), ("a", "b"))
    stage.enter("d", Terms("a run", "eval.py", None, 2, None, "1", "auto"))
    stage.run(10.0)
    assert set(stage.views()) == {"a", "b"}, "a second run of that name is not founded, whatever its terms"


def test_two_that_do_not_hear_each_other_are_named_and_are_not_in_one_view() -> None:
    stage = Stage("a", "b", "c", terms=Terms("a run", "train.py", 3, 2, None, "1", "auto"))
    stage.separate("c", "b")
    stage.run(20.0)
    assert stage.views() == {}
    wanted = "3 nodes that all hear each other; there is no link between b and c"
    assert stage.cores["a"].report().waiting == wanted
    stage.world.heal()
    stage.run(1.0)
    assert stage.views() == dict.fromkeys("abc", "abc")


def test_a_smallest_joiner_that_hears_too_few_does_not_hold_up_the_others() -> None:
    stage = Stage("a", "b", "c", "d", terms=Terms("a run", "train.py", 3, 2, None, "1", "auto"))
    for other in "cd":
        stage.separate("a", other)
    stage.run(5.0)
    assert stage.views() == dict.fromkeys("bcd", "bcd")


def test_lives_that_a_peer_hears_count_in_whatever_order_it_names_them() -> None:
    core = Formation(member("b"), OPEN, random.Random(1), 0.0)
    for name in "acd":
        core.link_up(id_of(name), member(name).life, 0.0)
    for name in "acd":
        others = [other for other in "dcba" if other != name]
        core.received(id_of(name), here(name, *others), 0.0)
    assert core.report().here == ("a", "b", "c", "d")
    assert core.report().waiting == "4 nodes are here; agreeing on the group"


def test_the_announcement_to_a_new_link_names_only_that_link_if_there_are_many_and_the_next_one_names_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(joiners, "CROWD_OF_JOINERS", 2)
    core = Formation(member("b"), OPEN, random.Random(1), 0.0)
    core.tick(0.0)
    heard = []
    for name in "acde":
        core.link_up(id_of(name), member(name).life, 0.0)
        heard += [(to, message.hears) for to, message in core.outgoing() if isinstance(message, Here)]
    lives = {name: member(name).life for name in "acde"}
    assert [hears for _, hears in heard] == [
        (lives["a"],),
        (lives["a"], lives["c"]),
        (lives["d"],),
        (lives["e"],),
    ]
    core.tick(core.next_deadline())
    assert {(to, message.hears) for to, message in core.outgoing() if isinstance(message, Here)} == {
        (id_of(name), tuple(lives.values())) for name in "acde"
    }


def test_a_link_that_keeps_flapping_prolongs_settling_only_so_far() -> None:
    stage = Stage("a", "b", "c")
    for tick in range(100):
        stage.world.at(0.1 + 0.2 * tick, stage.world.flap, id_of("a"), id_of("c"))
    stage.run(10.0)
    assert {"a", "b"} <= stage.views().keys()


def test_a_proposer_that_dies_in_the_middle_costs_the_others_little() -> None:
    stage = Stage("a", "b", "c", "d", terms=Terms("a run", "train.py", None, 3, None, "1", "auto"))
    stage.world.run(10.0, lambda: stage.cores["a"].is_deciding)
    stage.world.crash(id_of("a"))
    stage.run(4.0)
    assert stage.views() == dict.fromkeys("bcd", "bcd")


def doubtful() -> Stage:
    """Return a stage on which a and b have accepted a view, a has died, and b cannot know whether a went ahead."""
    stage = Stage("a", "b", terms=PAIR)
    b = stage.cores["b"]
    stage.world.run(10.0, lambda: b.is_deciding)
    assert b.formed is None
    stage.world.crash(id_of("a"))
    stage.run(30.0)
    assert stage.views().keys() <= {"a"}
    return stage


def test_one_left_in_doubt_says_whom_it_waits_for_and_does_not_hold_up_others() -> None:
    stage = doubtful()
    assert stage.cores["b"].report().waiting.startswith("a went away while the view was being agreed and may have gone")
    for name in "cd":
        stage.enter(name, PAIR)
    stage.run(4.0)
    assert stage.views()["c"] == stage.views()["d"] == "cd"
    assert stage.cores["b"].formed is None


def test_one_left_in_doubt_is_free_when_the_other_has_been_started_anew() -> None:
    stage = doubtful()
    stage.enter("a'", PAIR)
    stage.run(4.0)
    assert stage.views()["b"] == stage.views()["a'"] == "a'b"


def test_a_member_cut_off_while_it_decides_learns_the_outcome_when_it_is_back() -> None:
    stage = Stage("a", "b", terms=PAIR)
    b = stage.cores["b"]
    stage.world.run(10.0, lambda: b.is_deciding)
    stage.separate("a", "b")
    stage.run(20.0)
    assert stage.views() == {"a": "ab"}, "the first of two is a quorum"
    stage.world.heal()
    stage.run(2.0)
    assert stage.views() == {"a": "ab", "b": "ab"}


def test_a_second_life_of_a_node_is_refused_while_the_first_is_here() -> None:
    core = Formation(member("b"), OPEN, random.Random(1), 0.0)
    assert core.link_up(id_of("a"), member("a").life, 0.0)
    assert not core.link_up(id_of("a"), member("a'").life, 0.1)
    assert not core.link_up(id_of("b"), member("b'").life, 0.1)
    assert core.report().in_use == (id_of("a"), id_of("b"))
    core.link_down(id_of("a"), 0.2)
    assert core.link_up(id_of("a"), member("a'").life, 0.3)
    assert core.report().in_use == (id_of("b"),)
    core.link_down(id_of("a"), 0.4)
    assert not core.link_up(id_of("a"), member("a").life, 0.5), "a life that ended does not come back"


def test_a_member_that_poses_as_another_is_a_protocol_error() -> None:
    core = Formation(member("c"), OPEN, random.Random(1), 0.0)
    core.link_up(id_of("a"), member("a").life, 0.0)
    for posing in (here("b"), here("a'")):
        with pytest.raises(RemoteProtocolError, match="says that it is"):
            step(core, posing)


@pytest.mark.parametrize("names", ["cab", "aab", "a"])
def test_a_proposal_that_cannot_be_a_view_is_a_protocol_error(names: str) -> None:
    core = Formation(member("c"), OPEN, random.Random(1), 0.0)
    core.link_up(id_of("a"), member("a").life, 0.0)
    with pytest.raises(RemoteProtocolError, match="cannot be a view"):
        step(core, here("a", "c"), Propose(b"p" * 16, tuple(member(name) for name in names)))


def test_a_standing_of_another_size_is_a_protocol_error() -> None:
    core = Formation(member("c"), OPEN, random.Random(1), 0.0)
    core.link_up(id_of("a"), member("a").life, 0.0)
    step(core, here("a", "c"), Propose(b"p" * 16, (member("a"), member("c"))))
    for bad in (Standing(b"p" * 16, (Row(),), Outcome.OPEN), Standing(b"p" * 16, (Row(), Row()), Outcome.OPEN, (2,))):
        with pytest.raises(RemoteProtocolError, match="the proposal has 2"):
            step(core, bad)


def test_what_was_accepted_is_not_refused_later_nor_the_other_way_round() -> None:
    core = Formation(member("c"), OPEN, random.Random(1), 0.0)
    core.link_up(id_of("a"), member("a").life, 0.0)
    first, second = (Propose(number * 16, (member("a"), member("c"))) for number in (b"1", b"2"))
    (standing,) = step(core, here("a", "c"), first)
    assert standing.rows[1].answer is Answer.ACCEPTED
    (standing,) = step(core, second)
    assert (standing.rows[1].answer, standing.rows[1].reason) == (Answer.REFUSED, "c has accepted another proposal")
    step(core, Standing(b"1" * 16, (Row(Answer.REFUSED), Row()), Outcome.ABORT))
    for proposal, answer in ((first, Answer.ACCEPTED), (second, Answer.REFUSED)):
        (standing,) = step(core, proposal)
        assert (standing.rows[1].answer, standing.outcome) == (answer, Outcome.ABORT)


def test_a_proposal_with_somebody_unknown_is_refused_only_after_a_while() -> None:
    core = Formation(member("c"), OPEN, random.Random(1), 0.0)
    core.link_up(id_of("a"), member("a").life, 0.0)
    proposal = Propose(b"p" * 16, (member("a"), member("b"), member("c")))
    assert step(core, here("a", "c"), proposal) == []
    (standing,) = step(core, proposal, now=1.1)
    assert standing.rows[2] == Row(Answer.REFUSED, reason="c has not met b")


def test_words_without_a_link_and_proposals_to_an_earlier_life_are_not_answered() -> None:
    core = Formation(member("c'"), OPEN, random.Random(1), 0.0)
    proposal = Propose(b"p" * 16, (member("a"), member("c")))
    assert step(core, here("a", "c"), proposal) == []
    core.link_up(id_of("a"), member("a").life, 0.0)
    assert step(core, here("a"), proposal) == []


def test_a_node_that_waits_for_a_run_which_is_long_over_is_told_so_however_many_ended_since() -> None:
    lineages = Lineages()
    for number in range(20):
        lineages.end(Ending(new_lineage(1000.0 + number, b"e" * 10), True))
    stage = Stage()
    knows, stale = stage.enter("a", lineages=lineages), Lineages()
    stale.learn(new_lineage(1000.0, b"e" * 10), ["a", "b"])
    waits = stage.enter("b", lineages=stale)
    stage.run(3.0)
    assert waits.lineages.current == b"" or waits.formed is not None
    assert stage.views() == {"a": "ab", "b": "ab"}
    assert knows.lineages.current == waits.lineages.current


def test_a_life_that_another_node_has_had_is_welcome() -> None:
    core = Formation(member("a"), OPEN, random.Random(1), 0.0)
    for life in ("b", "b'"):
        assert core.link_up(id_of("x"), member(life).life, 0.0), "x says that it is a life of b"
        core.link_down(id_of("x"), 0.0)
    assert not core.link_up(id_of("x"), member("b").life, 0.0)
    assert core.link_up(id_of("b"), member("b").life, 0.0)


# A peer may tell of any number of things that it has made up.


def test_rivals_that_a_peer_makes_up_are_bounded_and_an_older_one_is_still_noticed() -> None:
    core = Formation(member("x"), OPEN, random.Random(1), 0.0)
    core.entered((member("x"), member("b")), LINEAGE, 1, 0.0)
    core.link_up(id_of("a"), member("a").life, 0.0)
    for number in range(1000):
        younger = new_lineage(2e9 + number, bytes(RANDOM_BYTES))
        core.received(id_of("a"), msgspec.structs.replace(founded("a"), lineage=younger), 0.1)
    assert len(core.rivals) == MAX_OPEN
    older = new_lineage(1.0, bytes(RANDOM_BYTES))
    core.received(id_of("a"), msgspec.structs.replace(founded("a"), lineage=older), 0.1)
    assert older in core.rivals
    assert len(core.rivals) == MAX_OPEN


def test_proposals_with_nodes_that_nobody_has_met_are_bounded() -> None:
    core = Formation(member("b"), OPEN, random.Random(1), 0.0)
    core.link_up(id_of("a"), member("a").life, 0.0)
    core.received(id_of("a"), here("a", "b"), 0.0)
    for number in range(3 * PROPOSALS_LIMIT):
        proposal = Propose(number.to_bytes(16, "big"), (member("a"), member("b"), member("c")))
        core.received(id_of("a"), proposal, 0.1)
    assert 0 < len(core._deciding._held) <= PROPOSALS_LIMIT


def test_lives_of_a_node_that_starts_anew_again_and_again_are_bounded() -> None:
    core = Formation(member("b"), OPEN, random.Random(1), 0.0)
    for number in range(MOST_PAST_LIVES + 100):
        core.link_up(id_of("a"), number.to_bytes(16, "big"), 0.0)
        core.link_down(id_of("a"), 0.0)
    assert len(core._links._past_lives) == MOST_PAST_LIVES
    assert not core.link_up(id_of("a"), (MOST_PAST_LIVES + 98).to_bytes(16, "big"), 0.0)


# What the members speak


def speaking(oldest: int, newest: int, *features: str) -> Terms:
    return msgspec.structs.replace(OPEN, versions=Versions(oldest, newest, features), release=f"0.{newest}")


def test_a_run_speaks_the_newest_that_all_its_members_know_and_its_terms_say_so() -> None:
    stage = Stage()
    stage.enter("a", speaking(2, 5, "echo", "tide"))
    stage.enter("b", speaking(3, 4, "tide"))
    stage.enter("c", speaking(1, 9, "echo", "lull", "tide"))
    stage.run(5.0)
    assert set(stage.views().values()) == {"abc"}
    fixed = Versions(4, 4, ("tide",), ("tide",))
    assert [core.formed.versions for core in stage.cores.values() if core.formed] == [fixed] * 3
    newer = stage.enter("d", speaking(4, 12, "tide"))
    older = stage.enter("e", speaking(1, 3, "tide"))
    plain = stage.enter("f", speaking(4, 4))
    stage.run(5.0)
    assert not {"a", "b", "c"} & {name for name, _ in newer.report().refused}
    assert ("a", "speaks protocol 4 (covey 0.5), this node 1 to 3 (covey 0.3); update covey here") in (
        older.report().refused
    )
    assert any("needs tide, which this node does not know" in why for _, why in plain.report().refused)
    assert stage.cores["a"].newcomers() == (id_of("d"),)


def test_a_member_that_proposes_to_speak_less_than_all_know_is_cut_off() -> None:
    core = Formation(member("b"), speaking(2, 5), random.Random(1), 0.0)
    core.link_up(id_of("a"), member("a").life, 0.0)
    core.received(id_of("a"), here("a", "b", terms=speaking(2, 4)), 0.0)
    members = rank_order((member("a"), member("b")))
    for wrong in (Versions(3, 3), Versions(2, 4), Versions(4, 4, ("tide",), ("tide",))):
        with pytest.raises(RemoteProtocolError, match="did not agree on"):
            core.received(id_of("a"), Propose(LINEAGE, members, wrong), 0.0)
    core.received(id_of("a"), Propose(LINEAGE, members, Versions(4, 4)), 0.0)
    assert core.accepted is not None


def test_members_that_could_not_talk_are_neither_proposed_nor_accepted() -> None:
    """Each of them could talk to this node, and their links would have been refused: so one of them lies."""
    core = Formation(member("a"), speaking(2, 9), random.Random(1), 0.0, settle=0.0)
    for name, terms in (("b", speaking(2, 3)), ("c", speaking(8, 9))):
        core.link_up(id_of(name), member(name).life, 0.0)
        other = "c" if name == "b" else "b"
        core.received(id_of(name), here(name, "a", other, terms=terms), 0.0)
    core.tick(60.0)
    assert core.accepted is None
    members = rank_order(member(name) for name in "abc")
    with pytest.raises(RemoteProtocolError, match="cannot be a view"):
        core.received(id_of("b"), Propose(LINEAGE, members, Versions(3, 3)), 60.0)
