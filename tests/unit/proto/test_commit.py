from __future__ import annotations

from typing import Any

import msgspec
import pytest

from covey.base.errors import RemoteProtocolError
from covey.proto.commit import Age, Commit, Raised, Returned, Run, Tell
from covey.proto.views import judge
from covey.wire.membership import Fate, State, Token, Verdict, View

LINEAGE = b"l" * 16


def view(number: int, *ranks: int, verdicts: tuple[Verdict, ...] = ()) -> View:
    return View(LINEAGE, number, ranks, ranks[0], verdicts)


class Crew:
    """The same group at several members; tokens wait until they are delivered."""

    def __init__(self, size: int) -> None:
        self.members = [Commit(7, range(size), rank, view(0, *range(size))) for rank in range(size)]
        self.tokens: list[tuple[int, int, Token]] = []
        self.seen: list[list[Any]] = [[] for _ in self.members]

    def __getitem__(self, rank: int) -> Commit:
        return self.members[rank]

    def drain(self, *ranks: int) -> None:
        """Note what members did, and keep their tokens."""
        for rank in ranks or range(len(self.members)):
            for effect in self[rank].effects():
                if isinstance(effect, Tell):
                    self.tokens.append((rank, effect.rank, effect.token))
                else:
                    self.seen[rank].append(effect)

    def deliver(self, *, to: int | None = None, source: int | None = None) -> None:
        """Let tokens arrive, and those that they bring about."""
        self.drain()
        while chosen := [one for one in self.tokens if to in (None, one[1]) and source in (None, one[0])]:
            for one in chosen:
                self.tokens.remove(one)
                self[one[1]].received(one[0], one[2])
            self.drain()

    def start(self, *ranks: int, root: int = -1) -> None:
        for rank in ranks or range(len(self.members)):
            self[rank].start(root)

    def complete(self, *ranks: int) -> None:
        for rank in ranks:
            self[rank].completed(self[rank].attempt)

    def change(self, number: int, *ranks: int) -> View:
        """Freeze these members, judge, and install."""
        states = {rank: (self[rank].freeze(),) for rank in ranks}
        new = view(number, *ranks, verdicts=judge(states))
        for rank in ranks:
            self[rank].install(new)
        self.drain(*ranks)
        return new

    def ends(self, rank: int) -> list[Any]:
        return [effect for effect in self.seen[rank] if not isinstance(effect, Run)]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 13])
def test_nobody_returns_before_everybody_is_complete(size: int) -> None:
    crew = Crew(size)
    crew.start()
    for rank in reversed(range(size)):
        assert not any(crew.ends(other) for other in range(size))
        crew.complete(rank)
        crew.deliver()
    everybody = tuple(range(size))
    assert [crew.ends(rank) for rank in range(size)] == [[Returned(1, 0, everybody)]] * size


def test_a_barrier_takes_as_many_rounds_as_the_members_can_be_halved() -> None:
    for size in range(1, 34):
        member = Commit(7, range(size), 0, view(0, *range(size)))
        member.start()
        member.completed(0)
        for round_ in range((size - 1).bit_length()):
            member.received(-(1 << round_) % size, Token(7, 1, 0, round_))
        effects = member.effects()
        tells = [effect for effect in effects if isinstance(effect, Tell)]
        assert [tell.rank for tell in tells] == [(1 << k) % size for k in range((size - 1).bit_length())]
        assert effects[-1] == Returned(1, 0, tuple(range(size)))


def test_tokens_that_come_before_the_operation_begins_are_kept() -> None:
    crew = Crew(2)
    crew.start(1)
    crew.complete(1)
    crew.deliver()
    crew.start(0)
    crew.complete(0)
    crew.deliver()
    assert crew.ends(0) == crew.ends(1) == [Returned(1, 0, (0, 1))]


def test_an_operation_that_is_complete_with_all_who_are_left_returns_with_the_contributors_it_had() -> None:
    crew = Crew(3)
    crew.start()
    crew.complete(0, 1)
    new = crew.change(1, 0, 1)
    assert new.verdicts == (Verdict(7, 1, Fate.COMMIT),)
    assert crew.ends(0) == crew.ends(1) == [Returned(1, 0, (0, 1, 2))]


def test_an_operation_that_one_had_returned_returns_with_all_and_the_next_is_redone() -> None:
    crew = Crew(3)
    crew.start()
    crew.complete(0, 1, 2)
    crew.deliver(to=1, source=0)
    crew.deliver(to=0)
    assert crew.ends(0) == [Returned(1, 0, (0, 1, 2))]
    assert crew.ends(1) == []
    crew.start(0)
    new = crew.change(1, 0, 1)
    assert new.verdicts == (Verdict(7, 2, Fate.REDO),)
    assert crew.ends(1) == [Returned(1, 0, (0, 1, 2))]
    assert crew.seen[0][-1] == Run(2, 1, (0, 1))


def test_an_operation_without_its_root_raises_and_the_group_goes_on() -> None:
    crew = Crew(3)
    crew.start(0, root=2)
    crew.change(1, 0, 1)
    assert crew.ends(0) == [Raised(1, 2)]
    crew.start(1, root=2)
    crew.drain()
    assert crew.ends(1) == [Raised(1, 2)], "whoever asks for it later raises as well"
    crew.start(0, 1)
    crew.complete(0, 1)
    crew.deliver()
    assert crew.ends(0)[-1] == crew.ends(1)[-1] == Returned(2, 1, (0, 1))


def test_who_is_behind_by_operations_that_raised_raises_them_too() -> None:
    crew = Crew(4)
    crew.change(1, 0, 1, 2)
    for _ in range(2):
        crew.start(0, 1, root=3)
    crew.change(2, 0, 1, 2)
    for _ in range(2):
        crew.start(2, root=3)
    crew.drain()
    assert crew.ends(0) == crew.ends(1) == crew.ends(2) == [Raised(1, 3), Raised(2, 3)]


def test_an_operation_asked_for_while_frozen_begins_with_the_view() -> None:
    crew = Crew(2)
    assert crew[0].freeze() == State(7, (0, 1), 0)
    crew.start(0)
    crew.drain()
    assert crew.seen[0] == []
    crew[0].install(view(1, 0))
    crew.drain()
    assert crew.seen[0] == [Run(1, 1, (0,))]


def test_a_frozen_attempt_neither_completes_nor_sends_tokens_nor_returns() -> None:
    crew = Crew(2)
    crew.start()
    crew.complete(1)
    crew.drain()
    assert crew[0].freeze() == State(7, (0, 1), 0, 1, 0)
    crew.complete(0)
    crew.deliver()
    assert crew.ends(0) == []
    assert crew.tokens == []
    assert crew[0].age(1, 0) is Age.PAST
    assert crew[0].age(1, 1) is Age.FUTURE


def test_a_second_operation_at_once_is_an_error() -> None:
    crew = Crew(2)
    crew.start(0)
    with pytest.raises(RuntimeError, match="operation 1 is not over"):
        crew.start(0)


def test_a_view_that_commits_what_is_not_complete_is_refused() -> None:
    crew = Crew(2)
    crew.start()
    with pytest.raises(RemoteProtocolError, match="commits operation 1, which is not complete"):
        crew[0].install(view(1, 0, verdicts=(Verdict(7, 1, Fate.COMMIT),)))


# The schedules that break without a rule. Each is played with the rule, and without it.


@pytest.mark.parametrize("is_frozen", [True, False])
def test_who_goes_on_after_its_answer_returns_what_the_others_redo(is_frozen: bool) -> None:
    """Rank 2 has sent all its tokens and dies. Rank 1 says it is not complete; then its last bytes arrive."""
    crew = Crew(3)
    crew.start()
    crew.complete(0, 2)
    crew.drain()
    states = {rank: (crew[rank].freeze(),) for rank in (0, 1)}
    if not is_frozen:
        crew[0]._is_frozen = crew[1]._is_frozen = False
    crew.complete(1)
    crew.deliver()
    assert crew.ends(1) == ([] if is_frozen else [Returned(1, 0, (0, 1, 2))])
    new = view(1, 0, 1, verdicts=judge(states))
    assert new.verdicts == (Verdict(7, 1, Fate.REDO),), "this is what the others do"


@pytest.mark.parametrize("is_marked", [True, False])
def test_a_token_of_an_older_attempt_would_speak_for_who_is_not_complete(is_marked: bool) -> None:
    """Rank 0's token of attempt 0 is on the way to rank 1 when rank 2 dies; it arrives in attempt 1."""
    crew = Crew(3)
    crew.start()
    crew.complete(0)
    crew.drain()
    late = next(token for source, to, token in crew.tokens if (source, to) == (0, 1))
    crew.tokens.clear()
    crew.change(1, 0, 1)
    crew.complete(1)
    crew[1].received(0, late if is_marked else msgspec.structs.replace(late, attempt=1))
    crew.drain()
    assert crew.ends(1) == ([] if is_marked else [Returned(1, 1, (0, 1))])
    if not is_marked:
        with pytest.raises(RemoteProtocolError, match="not complete here"):  # rank 1 returned, rank 0 never can
            crew.change(2, 0, 1)


@pytest.mark.parametrize("is_in_view", [True, False])
def test_a_verdict_that_is_judged_again_differs_when_another_has_died(is_in_view: bool) -> None:
    """Ranks 0 and 1 are complete, 2 is not. View 1 is accepted and installed at 0 only; then 2 and the proposer die."""
    crew = Crew(4)
    crew.start()
    crew.complete(0, 1)
    crew.drain()
    states = {rank: (crew[rank].freeze(),) for rank in (0, 1, 2)}
    accepted = view(1, 0, 1, 2, verdicts=judge(states))
    crew[0].install(accepted)
    found = accepted if is_in_view else msgspec.structs.replace(accepted, verdicts=judge({1: states[1]}))
    crew[1].install(found)
    crew.drain()
    assert crew.seen[0][-1] == Run(1, 1, (0, 1, 2)), "rank 0 runs it again without rank 3"
    assert crew.seen[1][-1] == (Run(1, 1, (0, 1, 2)) if is_in_view else Returned(1, 0, (0, 1, 2, 3)))
