"""A node that was started anew: it votes for its last life, and waits for the run that it knows of."""

from __future__ import annotations

import functools
import random
from typing import Any

import msgspec

from covey.proto.ballot import first_record
from covey.proto.joining import Agree, Bind, Joining, Remember, Say, founding_record, seated_for
from covey.wire.formation import (
    Ending,
    FoundingMember,
    Here,
    KnownLineage,
    Phase,
    Propose,
    Remembered,
    Terms,
    new_lineage,
)
from covey.wire.membership import (
    Accept,
    Accepted,
    Bound,
    Decided,
    Fate,
    MemberKey,
    Prepare,
    Promise,
    Record,
    Seated,
    Successor,
    Verdict,
    View,
)

TERMS = Terms("a run", "train.py", None, 2, None, "1", "auto")
LINEAGE = new_lineage(1000.0, b"l" * 10)
NEXT = b"n" * 16
KNOWN = Remembered((KnownLineage(LINEAGE, ("a", "b", "c")),))


def seat(name: str) -> MemberKey:
    """Return a life of the node that is called by the first letter of `name`; a' is the life after a."""
    return MemberKey(name[0].encode() * 32, name.encode().ljust(16, b"."))


def member(name: str) -> FoundingMember:
    return FoundingMember(seat(name).id, seat(name).life, name, name[0], b"")


def bound_to(names: str, generation: int = 0, **changes: Any) -> Bound:
    record = first_record(map(seat, names), LINEAGE if not generation else NEXT)
    fields = {name: changes.get(name, getattr(record, name)) for name in Record.__struct_fields__}
    return Bound(generation, Record(**fields), LINEAGE)


class Stage:
    """One node, and what it did."""

    def __init__(self, name: str, *, remembered: Remembered = KNOWN, **options: Any) -> None:
        self.core = Joining(member(name), TERMS, random.Random(1), 0.0, remembered=remembered, **options)
        self.now = 0.0
        self.disk: Any = options.get("bound")
        self.remembered = remembered
        self.said: list[tuple[bytes, Any]] = []
        self.votes: list[tuple[bytes, int, Any]] = []
        self.perform()

    def perform(self) -> None:
        has_said = False
        self.order: list[type] = []
        for effect in self.core.effects():
            self.order.append(type(effect))
            match effect:
                case Bind(bound):
                    assert not has_said, "what is bound must be on disk before anything is said"
                    self.disk = bound
                case Remember(remembered):
                    assert not has_said
                    self.remembered = remembered
                case Say(peer, message):
                    has_said = True
                    self.said.append((peer, message))
                case Agree(peer, generation, message):
                    has_said = True
                    self.votes.append((peer, generation, message))

    def link(self, *names: str) -> None:
        for name in names:
            self.core.link_up(seat(name).id, seat(name).life, self.now)
        self.perform()

    def vote(self, name: str, message: Any, generation: int = 0) -> list[Any]:
        self.votes.clear()
        self.core.agreeing(seat(name).id, generation, message, self.now)
        self.perform()
        return [said for _, _, said in self.votes]

    def run(self, until: float) -> None:
        while (at := self.core.next_deadline()) <= until:
            self.now = max(self.now, at)
            self.core.tick(self.now)
            self.perform()
        self.now = until


def test_it_votes_as_its_last_life_was_bound_to() -> None:
    view = View(LINEAGE, 1, (1,), 1, (Verdict(7, 5, Fate.COMMIT),))
    stage = Stage("a'", bound=bound_to("ab", promised=4, accepted_ballot=4, accepted=view))
    stage.link("b")
    (promise,) = stage.vote("b", Prepare(LINEAGE, 1, 7))
    assert isinstance(promise, Promise)
    assert (promise.ballot, promise.states, promise.accepted_ballot, promise.accepted) == (7, None, 4, view)
    assert stage.disk.record.promised == 7
    assert stage.vote("b", Accept(7, view)) == [Accepted(LINEAGE, 1, 7)]
    assert stage.disk.record.accepted_ballot == 7
    stage.vote("b", Decided(view))
    assert stage.disk.record.view == view, "it can tell others what was decided"
    assert stage.core.formation.lineages.current == LINEAGE, "and is a newcomer of the run"


def test_a_view_without_members_frees_it() -> None:
    stage = Stage("a'", bound=bound_to("ab"))
    stage.link("b")
    stage.vote("b", Decided(View(LINEAGE, 1, (), 0, is_finished=True)))
    assert stage.disk is None
    assert stage.remembered == Remembered((), (Ending(LINEAGE, True),))
    assert stage.core.formation.lineages.current == b""


def test_nodes_that_all_were_started_anew_end_their_run_and_found_another() -> None:
    stage = Stage("a'", bound=bound_to("ab"))
    stage.link("b'")
    stage.run(1.0)
    assert [type(message) for _, _, message in stage.votes][-1] is Decided
    assert stage.disk is None
    assert stage.core.formation.lineages.ending(LINEAGE) == Ending(LINEAGE, False)


def test_too_few_that_were_started_anew_wait() -> None:
    stage = Stage("b'", bound=bound_to("abc"))
    stage.link("x")
    stage.core.heard(seat("x").id, Here(TERMS, member("x"), (seat("b'").life,), Phase.JOINING), 0.1)
    stage.run(200.0)
    assert stage.disk is not None
    assert stage.core.formation.accepted is None
    assert "with a, b, c, and is not known to be over" in stage.core.formation.report().waiting


def test_it_goes_on_voting_in_the_generation_that_followed() -> None:
    stage = Stage("a'", bound=bound_to("abc"))
    stage.link("b")
    following = Successor(1, NEXT, (seat("a"), seat("b"), seat("d")), 1)
    stage.vote("b", Decided(View(LINEAGE, 1, (0, 1), 0, successor=following)))
    assert stage.disk == Bound(1, first_record(following.members, NEXT, anchor=1), LINEAGE, 1)
    assert [type(message) for message in stage.vote("b", Prepare(NEXT, 1, 5), generation=1)] == [Promise]


def test_a_node_that_never_heard_of_its_seat_votes_from_the_beginning_when_it_is_told() -> None:
    told = Seated(LINEAGE, Successor(3, NEXT, (seat("a"), seat("d")), 0))
    for name in ("d", "d'"):
        stage = Stage(name)
        stage.link("a'")
        stage.vote("a'", told, generation=3)
        assert stage.disk == Bound(3, first_record(told.generation.members, NEXT), LINEAGE)
        assert stage.vote("a'", Prepare(NEXT, 1, 3), generation=3)[0].states is None
    other = Stage("x")
    other.link("a'")
    other.vote("a'", told, generation=3)
    assert other.disk is None, "it has no seat"
    strange = Stage("d", remembered=Remembered())
    strange.link("a'")
    strange.vote("a'", told, generation=3)
    assert strange.disk is None, "it waits for no such run"


def test_it_is_told_of_its_seat_by_a_voter_and_knows_whether_it_may_still_enter() -> None:
    stage = Stage("a'", bound=bound_to("ad", generation=3))
    stage.link("d")
    assert (seat("d").id, 3, Seated(LINEAGE, Successor(3, NEXT, (seat("a"), seat("d")), 0))) in stage.votes
    newcomer = Stage("d")
    newcomer.link("a")
    newcomer.vote("a", Seated(LINEAGE, Successor(3, NEXT, (seat("a"), seat("d")), 0)), generation=3)
    assert newcomer.core.may_enter(LINEAGE, 3)
    newcomer.vote("a", Decided(View(NEXT, 1, (0,), 0)), generation=3)
    assert not newcomer.core.may_enter(LINEAGE, 3)
    assert newcomer.core.may_enter(LINEAGE, 4)


def test_a_founding_that_it_never_accepted_came_to_nothing() -> None:
    stage = Stage("c")
    stage.link("a'")
    stage.vote("a'", Seated(LINEAGE, Successor(0, LINEAGE, (seat("a"), seat("c")), 0)))
    assert stage.remembered.ended == (Ending(LINEAGE, False),)
    bound = Stage("c'", bound=bound_to("ac"))
    bound.link("a'")
    bound.vote("a'", Seated(LINEAGE, Successor(0, LINEAGE, (seat("a"), seat("c")), 0)))
    assert bound.core.formation.lineages.current == LINEAGE, "it had accepted"


def test_an_accepted_founding_is_on_disk_before_the_answer_leaves_and_is_forgotten_when_it_comes_to_nothing() -> None:
    stage = Stage("b", remembered=Remembered())
    stage.link("a")
    stage.core.heard(seat("a").id, Here(TERMS, member("a"), (seat("b").life,), Phase.JOINING), 0.1)
    stage.perform()
    stage.core.heard(seat("a").id, Propose(LINEAGE, (member("a"), member("b"))), 0.2)
    stage.perform()
    assert stage.disk == Bound(0, founding_record((member("a"), member("b")), LINEAGE), LINEAGE)
    assert [known.lineage for known in stage.remembered.open] == [LINEAGE]
    stage.core.ended(Ending(LINEAGE, False), 0.3)
    stage.perform()
    assert stage.disk is None
    assert stage.remembered.open == ()


def test_what_a_person_gave_up_binds_it_no_more() -> None:
    stage = Stage("a'", remembered=Remembered(), bound=bound_to("abc"), abandoned=[LINEAGE])
    assert stage.disk is None
    assert stage.core.formation.lineages.current == b""


def test_what_it_accepts_when_its_old_run_turns_out_to_be_over_is_on_disk() -> None:
    """It hears that the run is over and a proposal of another one at once, as from a long backlog."""
    stage = Stage("b'", bound=bound_to("ab"))
    stage.link("a'")
    hears, later = (seat("b'").life,), new_lineage(2000.0, b"m" * 10)
    here = Here(TERMS, member("a'"), hears, Phase.JOINING, endings=(Ending(LINEAGE, False),))
    proposed = Propose(later, (member("a'"), member("b'")))
    stage.core.formation.received(seat("a'").id, here, 0.1)
    stage.core.heard(seat("a'").id, proposed, 0.1)
    stage.perform()
    assert stage.core.formation.accepted is not None
    assert stage.disk == Bound(0, founding_record(proposed.members, later), later)
    assert [known.lineage for known in stage.remembered.open] == [later]


def test_that_a_run_is_over_is_on_disk_before_its_votes_are_forgotten() -> None:
    stage = Stage("a'", bound=bound_to("ab"))
    stage.link("b")
    stage.vote("b", Decided(View(LINEAGE, 1, (), 0)))
    assert stage.disk is None
    assert stage.order[: stage.order.index(Bind)] == [Remember]
    founding = Stage("b", remembered=Remembered())
    founding.link("a")
    founding.core.heard(seat("a").id, Here(TERMS, member("a"), (seat("b").life,), Phase.JOINING), 0.1)
    founding.perform()
    founding.core.heard(seat("a").id, Propose(LINEAGE, (member("a"), member("b"))), 0.2)
    founding.perform()
    assert founding.order[: founding.order.index(Remember)] == [Bind], "and that it may begin after what it binds to"


def test_a_founding_that_was_given_up_here_or_left_for_an_older_run_may_have_come_to_something() -> None:
    seated = Seated(LINEAGE, Successor(0, LINEAGE, (seat("a"), seat("c")), 0))
    older = bound_to("ac")
    older = Bound(older.generation, older.record, new_lineage(1.0, b"o" * 10))
    remembered = Remembered((*KNOWN.open, KnownLineage(older.origin, ())))
    for stage in (
        Stage("c'", remembered=Remembered(given_up=(LINEAGE,))),
        Stage("c'", remembered=Remembered(), abandoned=[LINEAGE]),
        Stage("c'", remembered=remembered, bound=older),
    ):
        stage.link("a'")
        stage.vote("a'", seated)
        assert stage.remembered.ended == ()


def test_a_seat_is_believed_only_from_nodes_that_have_one_too() -> None:
    for generation in (0, 3):
        stage = Stage("d")
        stage.link("x", "a'")
        told = Seated(LINEAGE, Successor(generation, NEXT if generation else LINEAGE, (seat("a"), seat("d")), 0))
        stage.vote("x", told, generation)
        assert (stage.disk, stage.remembered) == (None, KNOWN)


def test_a_node_believes_only_members_of_its_run_that_it_is_over_and_none_while_it_hears_a_quorum() -> None:
    over = Ending(LINEAGE, True)
    here = Here(TERMS, member("x"), (), Phase.JOINING, endings=(over,))
    voter = Stage("a'", bound=bound_to("abc"))
    voter.link("x", "b'")
    voter.core.heard(seat("x").id, here, 0.1)
    voter.core.ended(over, 0.1, seat("x").id)
    voter.perform()
    assert voter.core.formation.lineages.ending(LINEAGE) is None
    voter.core.ended(over, 0.1, seat("b").id)
    assert voter.core.formation.lineages.ending(LINEAGE) == over
    inside = Stage("a", remembered=Remembered())
    inside.core.entered(tuple(map(member, "abc")), LINEAGE, 2, 0.0)
    inside.link("x", "b")
    for may_go_on, teller, is_believed in (
        (True, "x", False),
        (True, "b", False),
        (False, "x", False),
        (False, "b", True),
    ):
        inside.core.may_go_on = functools.partial(bool, may_go_on)
        inside.core.ended(over, 0.2, seat(teller).id)
        inside.core.heard(seat("x").id, here, 0.2)
        assert (inside.core.formation.ending == over) is is_believed
    newcomer = Stage("d")
    newcomer.link("x")
    newcomer.core.heard(seat("x").id, here, 0.1)
    assert newcomer.core.formation.lineages.ending(LINEAGE) == over, "a node that only waits can ask no more"


def test_the_first_that_was_started_to_break_ties_does() -> None:
    wishing = [msgspec.structs.replace(member(name), breaks_ties=name != "a") for name in "abc"]
    assert founding_record(wishing, LINEAGE).view.tie_breaker == 1
    assert founding_record(map(member, "abc"), LINEAGE).view.tie_breaker == 0


def test_nobody_is_told_of_seats_in_what_is_over() -> None:
    assert seated_for(seat("b").id, None) is None
    assert seated_for(seat("x").id, bound_to("ab", 1)) is None
    assert seated_for(seat("b").id, bound_to("ab", 1)) is not None
    over = View(NEXT, 1, (), 0)
    assert seated_for(seat("b").id, bound_to("ab", 1, view=over)) is None
