"""Views that cannot be, told by members, excluded members, nodes outside of a run and visitors: only the liar pays."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from tests.support.attackers import Insider, call_on_loop, new_cluster, until
from tests.support.runs import SURVIVING, Participant, ThreadRun, node_of
from tests.support.waiting import DEADLINE

from covey.base.errors import CoveyError, GroupChangedError, MismatchError, PeerLostError, RemoteProtocolError
from covey.base.numbers import Seat
from covey.proto.health import Cause
from covey.proto.membership import MOST_BALLOTS_AHEAD, MOST_SKIPPED
from covey.proto.views import MOST_OPERATIONS
from covey.runtime.group.internals import engine_of
from covey.wire import membership, messages
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
    Refuse,
    State,
    Successor,
    Trouble,
    Verdict,
    View,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from covey.runtime.group.group import Group
    from covey.runtime.joining.node import NodeParts
    from covey.runtime.links.link import Link
    from covey.runtime.views.generation import Generation

LIAR = 2
HONEST = (0, 1)
BALLOT = LIAR + 4 * 100
"""A ballot of the liar's own in a run of three, above all that others have promised."""
VALUES = np.arange(1, 4)
ANY = dataclasses.replace(SURVIVING, quorum="any")


class Scene:
    """A run of three real nodes. What a test does to them happens while none of them has begun an operation."""

    def __init__(self, thread_run: ThreadRun) -> None:
        self._thread_run = thread_run
        self.groups: dict[int, Group] = {}
        self._send_vote: Callable[[Seat, messages.Control], None] | None = None
        self._begin = [threading.Event() for _ in range(3)]
        self._together = thread_run.steps(4)
        self._participants = [thread_run.start(self._work) for _ in range(3)]
        self._together()

    def _work(self, group: Group) -> Any:
        group.barrier()
        self.groups[group.rank] = group
        self._together()
        self._begin[group.rank].wait(DEADLINE)
        outcome: list[Any] = []
        for number in range(2):
            try:
                total = group.all_reduce(VALUES * 10**group.rank + number)
            except CoveyError as error:
                outcome.append(error)
                break
            outcome.append((total.tolist(), group.contributors))
        self._together()  # none leaves while others are at work
        return group.rank, outcome

    def outcome(self) -> dict[int, list[Any]]:
        """Let all of them go on; return what two operations gave at each rank: an error, or sums and contributors."""
        self.begin(0, 1, 2)
        self._together()
        return dict(participant.result() for participant in self._participants)

    def begin(self, *ranks: int) -> None:
        """Let these ranks begin their operations."""
        for rank in ranks:
            self._begin[rank].set()

    def prey(self, rank: int) -> Participant:
        """Return the participant that has a rank."""
        id = self.node(rank).card.id
        return next(participant for participant in self._participants if participant.identity.id == id)

    def terms(self) -> Any:
        return self._thread_run.terms()

    def node(self, rank: int) -> NodeParts:
        return node_of(self.groups[rank])

    def generation(self, rank: int) -> Generation:
        generation = self.node(rank).generation
        assert generation is not None
        return generation

    @property
    def group(self) -> int:
        """The number of the group."""
        return engine_of(self.groups[0]).id

    @property
    def returned(self) -> int:
        """The operations that are over."""
        atomic = engine_of(self.groups[0]).atomic
        assert atomic is not None
        return atomic.returned

    @property
    def base(self) -> View:
        """The view of the others."""
        return self.generation(0).view

    def links(self, rank: int, other: int) -> list[Link]:
        """Return the links of one rank with another."""
        id = self.node(other).card.id
        return call_on_loop(lambda: list(self.prey(rank).joiner.mesh.met[id].links))

    def tell(self, rank: int, *votes: membership.Membership) -> None:
        """Let the liar say these to a rank, one right after the other."""
        self.tell_each({rank: votes})

    def tell_all(self, *votes: membership.Membership) -> None:
        """Let the liar say these to every honest rank."""
        self.tell_each(dict.fromkeys(HONEST, votes))

    def tell_each(self, words: Mapping[int, Sequence[membership.Membership]]) -> None:
        """Let the liar say these by rank, at once: none of them hears from another how that one took it."""
        send_vote = self._send_vote or self.node(LIAR).peers.send_vote
        bodies = [
            (Seat(rank), messages.Agreeing(0, membership.encode_membership(vote)))
            for rank, votes in words.items()
            for vote in votes
        ]
        call_on_loop(lambda: [send_vote(seat, body) for seat, body in bodies])

    def give_up_the_liar(self) -> None:
        """Let the honest ranks take the liar for lost; they would wait for it to come back for half their patience."""
        for rank in HONEST:
            call_on_loop(self.node(rank).views.losses.silent, LIAR, "it is cut off", Cause.SILENT)

    def mute(self) -> None:
        """Let the liar say no more about views than it is told to: it could win a ballot without one of the others."""
        node = self.node(LIAR)
        self._send_vote = node.peers.send_vote
        call_on_loop(setattr, node.peers, "send_vote", lambda _seat, _message, **_: None)

    def ask(self, ballot: int = BALLOT) -> Prepare:
        """Return what has a member without an operation freeze, and promise, before it reads on."""
        return Prepare(self.base.lineage, self.base.number + 1, ballot)

    def follows(self, *ranks: int, **changes: Any) -> View:
        """Return a view that could follow, but for the changes."""
        base = self.base
        redo = Verdict(self.group, self.returned + 1, Fate.REDO)
        view = View(base.lineage, base.number + 1, ranks, ranks[0] if ranks else 0, (redo,) if ranks else ())
        return msgspec.structs.replace(view, **changes)

    def forked(self, *ranks: int, **changes: Any) -> View:
        """Return a view with which these could go on apart, but for the changes."""
        view = View(b"f" * 16, self.base.number + 5, ranks, ranks[0])
        return msgspec.structs.replace(view, **changes)


@pytest.fixture(autouse=True)
def nothing_breaks(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No exception ends in a callback or a task of the control loop."""
    yield
    broken = [record for record in caplog.records if record.name == "asyncio" and record.levelno >= logging.ERROR]
    assert not broken


@pytest.fixture
def scene() -> Iterator[Scene]:
    with ThreadRun(new_cluster(), SURVIVING, size=3) as thread_run:
        yield Scene(thread_run)


@pytest.fixture
def hasty_scene() -> Iterator[Scene]:
    """Where a member that has lost all others soon gives up."""
    with ThreadRun(new_cluster(), dataclasses.replace(SURVIVING, patience=2.0), size=3) as thread_run:
        yield Scene(thread_run)


@pytest.fixture
def free_scene() -> Iterator[Scene]:
    """Where halves may go on apart."""
    with ThreadRun(new_cluster(), ANY, size=3) as thread_run:
        yield Scene(thread_run)


def assert_right(outcome: dict[int, list[Any]], *, of: Sequence[int] = HONEST) -> None:
    """Check that honest ranks got right numbers, each other's among them, from both operations."""
    for rank in of:
        assert len(outcome[rank]) == 2
        for number, (total, contributors) in enumerate(outcome[rank]):
            assert set(of) <= set(contributors)
            assert total == sum(VALUES * 10**other + number for other in contributors).tolist()
    assert len({str(outcome[rank]) for rank in of}) == 1


def assert_cut_off(scene: Scene, lie: Callable[[], None]) -> None:
    """Check that a lie ends the links it came on with RemoteProtocolError, those of the liar with each honest rank."""
    before = {rank: scene.links(rank, LIAR) for rank in HONEST}
    between = scene.links(0, 1) + scene.links(1, 0)
    scene.mute()
    lie()
    for rank in HONEST:
        until(lambda rank: any(isinstance(link.error, RemoteProtocolError) for link in before[rank]), rank)
    assert not any(isinstance(link.error, CoveyError) for link in between)
    until(lambda: any(link.is_open for link in between))
    scene.give_up_the_liar()


def successor(scene: Scene, *, members: Sequence[int] = (0, 1, 2), tie_breaker: int = 0) -> Successor:
    cards = [scene.node(rank).card for rank in members]
    return Successor(1, b"s" * 16, tuple(MemberKey(card.id, card.life) for card in cards), tie_breaker)


def first(count: int, lies: Mapping[str, Any]) -> list[Any]:
    """Return lies as parameters: so many for every run of the tests. `tests/unit/proto` has each rule by itself."""
    marks = [()] * count + [pytest.mark.thorough] * (len(lies) - count)
    return [pytest.param(lie, id=name, marks=mark) for (name, lie), mark in zip(lies.items(), marks, strict=True)]


IMPOSSIBLE: dict[str, Callable[[Scene], View]] = {
    "a successor that no other member wished for": lambda scene: scene.follows(0, 1, 2, successor=successor(scene)),
    "a rank that does not exist": lambda scene: scene.follows(0, 1, 2, 7),
    "a rank twice": lambda scene: scene.follows(0, 1, 1, 2),
    "a tie-breaker outside": lambda scene: scene.follows(0, 1, tie_breaker=2),
    "one group twice": lambda scene: scene.follows(0, 1, 2, verdicts=2 * scene.follows(0, 1, 2).verdicts),
}


@pytest.mark.parametrize("lie", first(2, IMPOSSIBLE))
def test_a_member_that_tells_of_a_view_that_cannot_follow_is_cut_off_and_the_others_go_on(
    lie: Callable[[Scene], View], scene: Scene
) -> None:
    def tell() -> None:
        scene.tell_each({0: (scene.ask(), Decided(lie(scene))), 1: (scene.ask(), Accept(BALLOT, lie(scene)))})

    assert_cut_off(scene, tell)
    assert_right(scene.outcome())


def test_a_view_for_which_a_member_never_answered_is_not_installed(scene: Scene) -> None:
    def tell() -> None:
        view = scene.follows(0, 1, 2)
        scene.tell_each({0: (Decided(view),), 1: (Accept(BALLOT, view),)})

    assert_cut_off(scene, tell)
    assert_right(scene.outcome())


def far(scene: Scene) -> int:
    """Return a ballot of the liar's that leaves the others few higher ones."""
    size = len(scene.generation(0).seats)
    return MOST_BALLOTS_AHEAD * 4 // (size + 1) * (size + 1) * 4 + LIAR


BALLOTS: dict[str, Callable[[Scene], membership.Membership]] = {
    "to propose": lambda scene: scene.ask(far(scene)),
    "that was promised": lambda scene: Promise(scene.base.lineage, scene.base.number + 1, far(scene), (0, 1), None),
    "to lead by": lambda scene: Pulse(scene.base.lineage, scene.base.number, far(scene), claims=True, stamp=1.0),
}


@pytest.mark.parametrize("lie", first(1, BALLOTS))
def test_a_member_with_a_ballot_far_above_all_others_is_cut_off(
    lie: Callable[[Scene], membership.Membership], scene: Scene
) -> None:
    assert_cut_off(scene, lambda: scene.tell_all(lie(scene)))
    assert_right(scene.outcome())
    assert (
        max(call_on_loop(lambda: [scene.generation(rank).view_driver._core.ballot for rank in HONEST]))
        < MOST_BALLOTS_AHEAD
    )


def test_a_member_that_proposes_in_a_ballot_of_another_is_cut_off(scene: Scene) -> None:
    view = scene.follows(0, 1, 2)
    assert_cut_off(scene, lambda: scene.tell_all(scene.ask(), Accept(BALLOT + 1, view)))
    assert_right(scene.outcome())


ANSWERS: dict[str, Callable[[Scene, Promise], dict[str, Any]]] = {
    "an accepted view that cannot follow": lambda scene, _: {
        "accepted_ballot": 1, "accepted": scene.follows(0, 1, 9)},
    "a view accepted in no ballot": lambda scene, _: {"accepted": scene.follows(0, 1)},
    "one group twice": lambda _, __: {"states": (State(0, (0, 1, 2), 1), State(0, (0, 1, 2), 2))},
    "ranks that do not exist": lambda _, __: {"states": (State(0, (0, 1, 2, 9), 1),)},
    "operations that the others have not begun": lambda scene, _: {
        "states": (State(scene.group, (0, 1, 2), scene.returned + 1),)},
    "operations that the others have not begun, and gives up": lambda scene, _: {
        "states": (State(scene.group, (0, 1, 2), scene.returned + 1000, gives_up=True),)},
    "more operations than fit": lambda _, __: {"states": (State(0, (0, 1, 2), MOST_OPERATIONS),)},
}  # fmt: skip


@pytest.mark.parametrize("lie", first(2, ANSWERS))
def test_a_member_that_answers_what_cannot_be_is_cut_off_and_the_others_go_on(
    lie: Callable[[Scene, Promise], dict[str, Any]], scene: Scene
) -> None:
    node = scene.node(LIAR)
    send_vote = node.peers.send_vote
    lies: list[Promise] = []

    def send_lies(seat: int, message: Any, **_: Any) -> None:
        vote = membership.decode_membership(message.body)
        if isinstance(vote, Promise) and seat == 0:  # in every ballot, for one that is over is not looked at
            lies.append(vote)
            vote = msgspec.structs.replace(vote, **lie(scene, vote))
            send_vote(Seat(seat), messages.Agreeing(message.generation, membership.encode_membership(vote)))

    links = scene.links(0, LIAR)
    call_on_loop(setattr, node.peers, "send_vote", send_lies)
    call_on_loop(lambda: scene.generation(0).disturbed(scene.base.number))
    until(lambda: any(isinstance(link.error, RemoteProtocolError) for link in links))
    assert lies
    scene.give_up_the_liar()
    assert_right(scene.outcome())


# Verdicts


def verdict(ahead: int, fate: Fate) -> Callable[[Scene], View]:
    """Return a view that says this of the operation so many after the last that is over."""
    return lambda scene: scene.follows(0, 1, 2, verdicts=(Verdict(scene.group, scene.returned + ahead, fate),))


AGAINST_ANSWERS: dict[str, Callable[[Scene], View]] = {
    "an operation that has not begun is committed": verdict(1, Fate.COMMIT),
    "an operation that was over is tried again": verdict(0, Fate.REDO),
    "nothing about a group": lambda scene: scene.follows(0, 1, 2, verdicts=()),
    "the group is revoked, but much later": verdict(1 << 40, Fate.REVOKE),
}


@pytest.mark.parametrize("lie", first(2, AGAINST_ANSWERS))
def test_a_view_against_what_a_member_answered_is_refused(lie: Callable[[Scene], View], scene: Scene) -> None:
    def tell() -> None:
        scene.tell_each({0: (scene.ask(), Decided(lie(scene))), 1: (scene.ask(), Accept(BALLOT, lie(scene)))})

    assert_cut_off(scene, tell)
    assert_right(scene.outcome())


def test_an_operation_that_is_not_complete_is_not_committed_by_the_word_of_a_member(scene: Scene) -> None:
    links = {rank: scene.links(rank, LIAR) for rank in HONEST}
    lie = verdict(1, Fate.COMMIT)(scene)
    scene.mute()
    scene.begin(*HONEST)
    for rank in HONEST:  # each waits for the liar in the middle of its operation
        atomic = engine_of(scene.groups[rank]).atomic
        assert atomic is not None
        until(lambda atomic: atomic.is_executing, atomic)
        core = scene.generation(rank).view_driver._core
        scene.tell(rank, scene.ask())
        until(lambda core: core._round.states is not None and any(state.sequence for state in core._round.states), core)
    scene.tell_all(Decided(lie))
    for rank in HONEST:
        until(lambda rank: any(isinstance(link.error, RemoteProtocolError) for link in links[rank]), rank)
    scene.give_up_the_liar()
    assert_right(scene.outcome())


def test_verdicts_of_groups_that_a_member_is_not_in_are_none_of_its_business(scene: Scene) -> None:
    others = (Verdict(1 << 61, 7, Fate.REVOKE), Verdict(77, 1, Fate.COMMIT))
    view = scene.follows(0, 1, 2, verdicts=scene.follows(0).verdicts + others)
    scene.tell_all(scene.ask(), Decided(view))
    until(lambda: all(scene.generation(rank).view == view for rank in HONEST))
    assert_right(scene.outcome())


def test_a_rank_whose_operation_the_others_are_past_is_told_that_the_calls_differ() -> None:
    with ThreadRun(new_cluster(), SURVIVING, size=3) as thread_run:
        together = thread_run.steps(3)

        def work(group: Group) -> Any:
            group.barrier()
            generation, node = engine_of(group).generation, node_of(group)
            assert generation is not None
            if group.rank == LIAR:
                call_on_loop(generation.withdraw)
                together()
                together()
                return None
            until(lambda: node.peers[Seat(LIAR)].is_excluded)
            together()
            with pytest.raises((PeerLostError, MismatchError)) as error:
                # A broadcast from a lost rank raises at once, on this rank alone.
                group.all_reduce(VALUES) if group.rank else group.broadcast(VALUES, root=LIAR)
            if group.rank == 0:
                other = engine_of(groups[1]).atomic
                assert other is not None
                until(lambda: other.is_executing)
                call_on_loop(generation.disturbed, generation.view.number)
            together()
            with contextlib.suppress(MismatchError):  # if this rank was told only of the loss
                group.close()
            return type(error.value)

        groups: dict[int, Group] = {}

        def main(group: Group) -> Any:
            groups[group.rank] = group
            return group.rank, work(group)

        ends = dict(node.result() for node in [thread_run.start(main) for _ in range(3)])
    assert ends == {0: PeerLostError, 1: MismatchError, LIAR: None}


# Forks and other histories

FORKS: dict[str, Callable[[Scene], View]] = {
    "a rank that does not exist": lambda scene: scene.forked(0, 1, 2, 9),
    "a number far ahead": lambda scene: scene.forked(0, 1, 2, number=scene.base.number + MOST_SKIPPED + 2),
    "without the member that tells of it": lambda scene: scene.forked(0, 1),
    "a successor": lambda scene: scene.forked(0, 1, 2, successor=successor(scene)),
}


@pytest.mark.parametrize("lie", first(1, FORKS))
def test_a_member_that_tells_of_a_fork_that_cannot_be_is_cut_off(
    lie: Callable[[Scene], View], free_scene: Scene
) -> None:
    scene = free_scene
    fork = Fork(scene.base.lineage, scene.base.number, lie(scene))
    assert_cut_off(scene, lambda: scene.tell_all(scene.ask(), fork))
    assert_right(scene.outcome())


def test_where_a_quorum_decides_no_member_can_fork_a_run(scene: Scene) -> None:
    for rank in HONEST:
        fork = Fork(scene.base.lineage, scene.base.number, scene.forked(rank, LIAR))
        scene.tell(rank, scene.ask(), fork, Fork(bytes(16), 0, scene.forked(rank, LIAR)))
    assert_right(scene.outcome())
    assert {scene.base.lineage} == {scene.generation(rank).founded.lineage for rank in HONEST}


def test_views_of_another_lineage_have_no_effect(scene: Scene) -> None:
    stranger = scene.follows(0, 2, lineage=bytes(16))
    old, ahead = (scene.follows(0, 1, 2, number=scene.base.number + more) for more in (0, 9))
    for rank in HONEST:
        scene.tell(rank, Decided(stranger), Accept(BALLOT, stranger), Decided(old), Accept(BALLOT, old),
                   Prepare(bytes(16), 1, BALLOT), Pulse(bytes(16), 0, BALLOT, claims=True, stamp=1.0),
                   Trouble(bytes(16), 0, leaves=True), Decided(ahead))  # fmt: skip
    before = {rank: scene.links(rank, LIAR) for rank in HONEST}
    outcome = scene.outcome()
    assert_right(outcome, of=(0, 1, 2))
    assert not any(isinstance(link.error, CoveyError) for links in before.values() for link in links)


# Nodes that are no members


def everything(scene: Scene) -> list[membership.Membership]:
    """What only members may say, plausible or not."""
    lineage, number = scene.base.lineage, scene.base.number
    ranks = [(0, 1), (0, 1, 2), (0, 1, 7), (1, 1), (1, 0), (0,), (1,), (2,), (0, 2), ()]
    views = [scene.follows(*each) for each in ranks]
    views += [scene.follows(0, 1, number=number + 9), scene.follows(0, 1, successor=successor(scene))]
    ballots = [BALLOT + place for place in range(4)] + [far(scene)]
    words: list[membership.Membership] = [Prepare(lineage, number + 1, ballot) for ballot in ballots]
    words += [Accept(ballot, view) for ballot in ballots for view in views]
    words += [Decided(view) for view in views]
    words += [Promise(lineage, number + 1, ballot, (0, 1), (), 3, scene.follows(0, 9)) for ballot in ballots]
    words += [Pulse(lineage, number, ballot, claims=True, stamp=1.0, echo=1.0) for ballot in ballots]
    words += [Refuse(lineage, number + 1, ballot) for ballot in ballots]
    words += [Accepted(lineage, number + 1, ballot) for ballot in ballots]
    words += [
        Fork(lineage, number, scene.forked(0, 1, 2)),
        Trouble(lineage, number),
        Trouble(lineage, number, leaves=True),
    ]
    return words


@pytest.mark.parametrize("purpose", first(1, {name: name for name in ("candidate", "visitor", "keeper")}))
def test_no_node_outside_of_a_run_has_a_say_in_its_views(purpose: str, scene: Scene) -> None:
    view = scene.base
    for rank in range(3):
        with Insider(scene.prey(rank).prey, purpose=purpose) as outsider:
            for word in everything(scene):
                outsider.say(messages.Agreeing(0, membership.encode_membership(word)))
            outsider.ping()
    assert [scene.generation(rank).view for rank in range(3)] == [view] * 3
    assert max(call_on_loop(lambda: [scene.generation(rank).view_driver._core.ballot for rank in range(3)])) < BALLOT
    assert_right(scene.outcome(), of=(0, 1, 2))


def test_an_excluded_member_has_no_say_in_views(scene: Scene) -> None:
    call_on_loop(scene.generation(LIAR).withdraw)
    until(lambda: all(scene.generation(rank).view.ranks == HONEST for rank in HONEST))
    view, between = scene.base, scene.links(0, 1) + scene.links(1, 0)
    for rank in HONEST:
        for word in everything(scene):
            scene.tell(rank, word)
    outcome = scene.outcome()
    assert_right(outcome)
    assert isinstance(outcome[LIAR][0], GroupChangedError)
    assert [scene.generation(rank).view for rank in HONEST] == [view] * 2
    assert not any(isinstance(link.error, CoveyError) for link in between)


# What a member can do


def test_a_member_can_cost_another_its_place_and_that_one_is_told(scene: Scene) -> None:
    scene.tell(1, Decided(scene.follows(0, LIAR)))
    until(lambda: scene.generation(1).is_over)
    outcome = scene.outcome()
    assert isinstance(outcome[1][0], GroupChangedError)
    assert_right(outcome, of=(0, LIAR))


def test_a_member_can_cost_all_others_their_places_and_none_of_them_takes_the_run_for_over(
    hasty_scene: Scene,
) -> None:
    scene = hasty_scene
    scene.tell_all(Decided(scene.follows(LIAR)))
    until(lambda: all(scene.generation(rank).is_over for rank in HONEST))
    known = [call_on_loop(scene.prey(rank).joiner.records.lineages) for rank in HONEST]
    assert [(len(each.open), each.ended) for each in known] == [(1, ())] * 2
    outcome = scene.outcome()
    assert [type(outcome[rank][0]) for rank in HONEST] == [GroupChangedError] * 2


def test_members_that_a_member_told_of_different_views_end_with_errors_or_right_numbers(hasty_scene: Scene) -> None:
    scene = hasty_scene
    scene.tell_each({rank: (scene.ask(), Decided(scene.follows(rank, LIAR))) for rank in HONEST})
    # One of them may hear from the other, first, that it is out.
    views = {rank: (rank, LIAR) for rank in HONEST}
    until(
        lambda: all(
            scene.generation(rank).is_over or scene.generation(rank).view.ranks == views[rank] for rank in HONEST
        )
    )
    for rank, results in scene.outcome().items():
        for number, result in enumerate(results):
            if isinstance(result, CoveyError):
                continue
            total, contributors = result
            assert total == sum(VALUES * 10**other + number for other in contributors).tolist(), rank
