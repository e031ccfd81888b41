"""The checker refuses broken plans, for the right reason, and what it accepts runs right in any order."""

from __future__ import annotations

import random
import re
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from tests.support.in_turn import in_turn
from tests.unit.plan.cases import StuckError, each_rank, run

from covey.base.errors import ConfigError
from covey.plan import check, direct, doubling, ring, trees
from covey.plan.check import PlanError
from covey.plan.moves import FINAL, LEFT_OPERAND, REDUCE, STORE, Plan, Recv, Send

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence

    Breakage = Callable[[Sequence[Plan]], Iterator[list[Plan]]]

COUNT = 7


class Subject(NamedTuple):
    """An all-reduce of COUNT elements, to be broken."""

    name: str
    plans: list[Plan]


SUBJECTS = [
    Subject("exchange", each_rank(2, direct.exchange, 2, COUNT)),
    Subject("owners-2", each_rank(2, direct.owner_reduce, 2, COUNT, 1)),
    Subject("owners-4", each_rank(4, direct.owner_reduce, 4, COUNT, 1)),
    Subject("ring-2", each_rank(2, ring.all_reduce, 2, COUNT, 2)),
    Subject("ring-4", each_rank(4, ring.all_reduce, 4, COUNT, 1)),
    Subject("doubling-3", each_rank(3, doubling.all_reduce, 3, COUNT)),
    Subject("doubling-4", each_rank(4, doubling.all_reduce, 4, COUNT)),
]
each_subject = in_turn(plans=[s.plans for s in SUBJECTS])


def with_moves(plans: Sequence[Plan], rank: int, kind: str, moves: Sequence[Any]) -> list[Plan]:
    return [plan._replace(**{kind: tuple(moves)}) if r == rank else plan for r, plan in enumerate(plans)]


def with_move(plans: Sequence[Plan], rank: int, kind: str, index: int, **changes: int) -> list[Plan]:
    moves = list(getattr(plans[rank], kind))
    moves[index] = moves[index]._replace(**changes)
    return with_moves(plans, rank, kind, moves)


def every_move(plans: Sequence[Plan]) -> Iterator[tuple[int, str, int, Send | Recv]]:
    for rank, plan in enumerate(plans):
        for kind in ("sends", "recvs"):
            for index, move in enumerate(getattr(plan, kind)):
                yield rank, kind, index, move


def dropped(plans: Sequence[Plan]) -> Iterator[list[Plan]]:
    for rank, kind, index, _ in every_move(plans):
        moves = list(getattr(plans[rank], kind))
        del moves[index]
        yield with_moves(plans, rank, kind, moves)


def shifted(plans: Sequence[Plan]) -> Iterator[list[Plan]]:
    for rank, kind, index, move in every_move(plans):
        if move.start < move.stop:
            for by in (-1, 1):
                yield with_move(plans, rank, kind, index, start=move.start + by, stop=move.stop + by)


def shortened(plans: Sequence[Plan]) -> Iterator[list[Plan]]:
    for rank, kind, index, move in every_move(plans):
        if move.start < move.stop:
            yield with_move(plans, rank, kind, index, stop=move.stop - 1)


def misdirected(plans: Sequence[Plan]) -> Iterator[list[Plan]]:
    for rank, kind, index, move in every_move(plans):
        yield with_move(plans, rank, kind, index, peer=(move.peer + 1) % len(plans))


def hasty(plans: Sequence[Plan]) -> Iterator[list[Plan]]:
    """Drop each `after` that no earlier move of the rank waits for as well."""
    for rank, plan in enumerate(plans):
        for kind in ("sends", "recvs"):
            longest = 0
            for index, move in enumerate(getattr(plan, kind)):
                if move.after > longest and move.start < move.stop:
                    yield with_move(plans, rank, kind, index, after=0)
                longest = max(longest, move.after)


def action_changed(plans: Sequence[Plan], change: Callable[[int], int]) -> Iterator[list[Plan]]:
    for rank, plan in enumerate(plans):
        for index, recv in enumerate(plan.recvs):
            if recv.start < recv.stop and change(recv.action) != recv.action:
                yield with_move(plans, rank, "recvs", index, action=change(recv.action))


def not_final(plans: Sequence[Plan]) -> Iterator[list[Plan]]:
    return action_changed(plans, lambda action: action & ~FINAL)


def final_too_early(plans: Sequence[Plan]) -> Iterator[list[Plan]]:
    return action_changed(plans, lambda action: action | FINAL if action & REDUCE else action)


def stored_not_reduced(plans: Sequence[Plan]) -> Iterator[list[Plan]]:
    return action_changed(plans, lambda action: STORE)


def reduced_not_stored(plans: Sequence[Plan]) -> Iterator[list[Plan]]:
    return action_changed(plans, lambda action: action if action & REDUCE else REDUCE)


def operands_swapped(plans: Sequence[Plan]) -> Iterator[list[Plan]]:
    return action_changed(plans, lambda action: action ^ LEFT_OPERAND if action & REDUCE else action)


def doubled(plans: Sequence[Plan]) -> Iterator[list[Plan]]:
    """Make one transfer twice, at both ends."""
    for rank, plan in enumerate(plans):
        for index, send in enumerate(plan.sends):
            nth = sum(other.peer == send.peer for other in plan.sends[:index])
            target = [i for i, recv in enumerate(plans[send.peer].recvs) if recv.peer == rank][nth]
            changed = list(plans)
            for peer, kind, at in ((rank, "sends", index), (send.peer, "recvs", target)):
                other_kind = "recvs" if kind == "sends" else "sends"
                moves = list(getattr(changed[peer], kind))
                moves.insert(at, moves[at])
                waits = [m._replace(after=m.after + (m.after > at)) for m in getattr(changed[peer], other_kind)]
                changed = with_moves(with_moves(changed, peer, kind, moves), peer, other_kind, waits)
            yield changed


FATAL = [
    dropped,
    shifted,
    shortened,
    misdirected,
    hasty,
    not_final,
    final_too_early,
    stored_not_reduced,
    reduced_not_stored,
]
HARMLESS_AT_TIMES = [operands_swapped, doubled]


@each_subject
@in_turn(breakage=FATAL)
def test_a_broken_all_reduce_is_refused(breakage: Breakage, plans: list[Plan]) -> None:
    check.all_reduce(plans, COUNT)
    for broken in breakage(plans):
        if broken != plans:
            with pytest.raises(PlanError):
                check.all_reduce(broken, COUNT)


@each_subject
@in_turn(breakage=[*FATAL, *HARMLESS_AT_TIMES])
def test_what_is_accepted_runs_right_in_any_order(breakage: Breakage, plans: list[Plan]) -> None:
    rng = random.Random(len(plans))
    for changed in [plans, *breakage(plans)]:
        try:
            check.all_reduce(changed, COUNT)
        except PlanError:
            continue
        for room in (0, 0, 1, 1, 1000, 1000):
            assert sums_right(changed, rng, room)


@each_subject
def test_a_race_that_is_refused_does_give_wrong_sums_in_some_order(plans: list[Plan]) -> None:
    rng = random.Random(5)
    for broken in hasty(plans):
        assert not all(sums_right(broken, rng, 1000) for _ in range(400))


def sums_right(plans: Sequence[Plan], rng: random.Random, room: int) -> bool:
    """Run an all-reduce in a random order; tell whether every rank ends with the same, whole sum."""
    memory = [[[f"{rank}.{element}" for element in range(COUNT)]] for rank in range(len(plans))]
    try:
        run(plans, memory, rng, room)
    except StuckError:
        return False
    whole = [sorted(f"{rank}.{element}" for rank in range(len(plans))) for element in range(COUNT)]
    return (
        all(buffers == memory[0] for buffers in memory)
        and [sorted(re.findall(r"[\d.]+", value)) for value in memory[0][0]] == whole
    )


@pytest.mark.parametrize(
    "plans",
    [
        SUBJECTS[0].plans,
        each_rank(4, doubling.all_reduce, 4, COUNT),
        each_rank(7, doubling.all_reduce, 7, COUNT),
    ],
    ids=["exchange", "doubling-4", "doubling-7"],
)
def test_operands_swapped_on_one_rank_only_are_refused_where_several_ranks_compute_the_sum(plans: list[Plan]) -> None:
    for rank, plan in enumerate(plans):
        for index, recv in enumerate(plan.recvs):
            if recv.action & FINAL:
                with pytest.raises(PlanError, match="another order"):
                    check.all_reduce(with_move(plans, rank, "recvs", index, action=recv.action ^ LEFT_OPERAND), COUNT)


@each_subject
def test_a_contribution_counted_twice_is_refused(plans: list[Plan]) -> None:
    changes = list(doubled(plans))
    assert len(changes) == sum(len(plan.sends) for plan in plans)
    refusals = []
    for changed in changes:
        try:
            check.all_reduce(changed, COUNT)
        except PlanError as error:
            refusals.append(str(error))
    reduces = sum(bool(recv.action & REDUCE) and recv.start < recv.stop for plan in plans for recv in plan.recvs)
    assert len(refusals) >= reduces
    assert any("twice" in refusal or "final already" in refusal for refusal in refusals)


def test_an_error_names_rank_move_and_reason_and_asks_for_a_fix() -> None:
    plans = with_move(SUBJECTS[4].plans, 2, "sends", 3, stop=5)
    with pytest.raises(PlanError, match=r"rank 2, Send\(peer=3, .*: rank 3 receives it by Recv") as caught:
        check.all_reduce(plans, COUNT)
    assert caught.value.rank == 2
    assert caught.value.move == plans[2].sends[3]
    assert caught.value.remedy is ConfigError.remedy


def test_a_transfer_that_no_rank_receives_or_sends_is_refused() -> None:
    with pytest.raises(PlanError, match="rank 1 does not receive it"):
        check.broadcast([Plan((Send(1, 0, 0, 0),)), Plan()], 0, 0)
    with pytest.raises(PlanError, match="rank 0 does not send it"):
        check.broadcast([Plan(), Plan((), (Recv(0, 0, 0, 0),))], 0, 0)


@pytest.mark.parametrize(
    ("send", "reason"),
    [
        (Send(0, 0, 0, 1), "not another rank"),
        (Send(2, 0, 0, 1), "not another rank"),
        (Send(1, 1, 0, 1), "1 buffers"),
        (Send(1, 0, 2, 1), "not a range"),
        (Send(1, 0, 0, 4), "not a range of 3"),
        (Send(1, 0, 0, 1, 1), "waits for 1 of 0"),
    ],
)
def test_a_move_that_makes_no_sense_is_refused(send: Send, reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        check.broadcast([Plan((send,)), Plan((), (Recv(0, 0, 0, 1),))], 0, 3)


@pytest.mark.parametrize("action", [LEFT_OPERAND, FINAL, LEFT_OPERAND | FINAL, 8, -1])
def test_flags_without_a_reduction_are_refused(action: int) -> None:
    with pytest.raises(PlanError, match="no action"):
        check.broadcast([Plan((Send(1, 0, 0, 3),)), Plan((), (Recv(0, 0, 0, 3, action),))], 0, 3)


def test_ranks_that_each_wait_for_the_other_are_a_deadlock() -> None:
    plans = [Plan((Send(1 - r, r, 0, 1, 1),), (Recv(1 - r, 1 - r, 0, 1),)) for r in range(2)]
    with pytest.raises(PlanError, match="deadlock: send 0 waits for 1 receives"):
        check.all_gather(plans, [1, 1])


def test_an_order_that_only_roomy_lanes_survive_is_a_deadlock() -> None:
    plans = [
        Plan((Send(1, 0, 0, 1), Send(2, 0, 0, 1)), ()),
        Plan((), (Recv(2, 1, 0, 1), Recv(0, 0, 0, 1))),
        Plan((Send(1, 0, 0, 1, 1),), (Recv(0, 0, 0, 1),)),
    ]
    initial: list[list[list[Hashable]]] = [[["x"], [None]], [[None], [None]], [[None], [None]]]
    expected = [{0: ["x"]}, {0: ["x"], 1: ["x"]}, {0: ["x"]}]
    with pytest.raises(PlanError, match="deadlock: send 0 waits for receive 0 of rank 1"):
        check.prove(plans, initial, expected)
    in_order = Plan((), (Recv(0, 0, 0, 1), Recv(2, 1, 0, 1)))
    check.prove([plans[0], in_order, plans[2]], initial, expected)


@pytest.mark.parametrize("after", [0, 1])
def test_a_swap_in_place_must_finish_its_send_first(after: int) -> None:
    plans = [Plan((Send(1 - r, 0, 0, 2),), (Recv(1 - r, 0, 0, 2, STORE, after),)) for r in range(2)]
    initial = [[["a", "b"]], [["c", "d"]]]
    swapped = [{0: ["c", "d"]}, {0: ["a", "b"]}]
    if after:
        check.prove(plans, initial, swapped)
    else:
        with pytest.raises(PlanError, match="unordered with send 0"):
            check.prove(plans, initial, swapped)


def test_what_a_peer_must_have_heard_orders_moves_without_after() -> None:
    plans = [Plan((Send(1, 0, 0, 1),), (Recv(1, 0, 0, 1),)), Plan((Send(0, 0, 0, 1, 1),), (Recv(0, 0, 0, 1, REDUCE),))]
    check.prove(plans, [[["a"]], [["b"]]], [{0: [frozenset("ab")]}] * 2)


def test_sending_what_was_never_written_is_refused() -> None:
    plans = [Plan((Send(1, 1, 0, 2),)), Plan((), (Recv(0, 1, 0, 2),))]
    with pytest.raises(PlanError, match="never written"):
        check.all_gather(plans, [0, 2])


def test_a_missing_and_a_surplus_contributor_are_named() -> None:
    reduces = each_rank(3, trees.reduce, 3, 0, 1)
    with pytest.raises(PlanError, match=r"lacks \(0, 0\), \(2, 0\)"):
        check.reduce(reduces, 1, 1)
    with pytest.raises(PlanError, match=r"should not have \(1, 0\), \(2, 0\)"):
        check.broadcast(reduces, 0, 1)


def test_an_input_that_should_be_spared_is_guarded() -> None:
    plans = each_rank(3, lambda rank: direct.reduce_scatter(rank, [2, 2, 2], 2))
    scribbling = [Plan(p.sends, tuple(recv._replace(buffer=r) for recv in p.recvs)) for r, p in enumerate(plans)]
    with pytest.raises(PlanError, match=r"buffer 0\[0\] should not have"):
        check.reduce_scatter(scribbling, [2, 2, 2])


def test_nothing_may_be_written_where_nothing_is_expected() -> None:
    plans = [Plan((Send(1, 0, 0, 1),)), Plan((), (Recv(0, 1, 0, 1),))]
    with pytest.raises(PlanError, match=r"buffer 1\[0\] should not have \(0, 0\)"):
        check.prove(plans, [[[(0, 0)], [None]]] * 2, [{}, {1: [None]}])
