from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.in_turn import in_turn
from tests.unit.plan.cases import at_every_size, lengths

from covey.base.errors import ConfigError
from covey.plan import check, choose, direct, doubling, ring, trees

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from covey.plan.moves import Plan

FAMILIES = ("ring", "stream")
DEFAULT = choose.DEFAULT_PLAN_SIZES


def segment(itemsize: int) -> int:
    return DEFAULT.segment_bytes // itemsize


@in_turn(lanes=FAMILIES)
@in_turn(itemsize=[1, 2, 4, 8, 16])
def test_two_ranks_swap_small_buffers_and_own_halves_of_large_ones(lanes: str, itemsize: int) -> None:
    limit = DEFAULT.exchange_bytes // itemsize
    for rank in (0, 1):
        assert choose.all_reduce(rank, 2, limit, itemsize, lanes, None, DEFAULT) == direct.exchange(rank, 2, limit)
        owned = direct.owner_reduce(rank, 2, limit + 1, segment(itemsize))
        assert choose.all_reduce(rank, 2, limit + 1, itemsize, lanes, None, DEFAULT) == owned


@pytest.mark.parametrize("size", [3, 4, 8])
def test_more_ranks_take_few_rounds_for_small_buffers_and_few_bytes_for_large_ones(size: int) -> None:
    large: dict[str, Callable[..., Plan]] = {"ring": direct.owner_reduce, "stream": ring.all_reduce}
    for lanes in FAMILIES:
        limit = DEFAULT.doubling_bytes // 4
        for rank in range(size):
            assert choose.all_reduce(rank, size, limit, 4, lanes, None, DEFAULT) == doubling.all_reduce(
                rank, size, limit
            )
            expected = large[lanes](rank, size, limit + 1, segment(4))
            assert choose.all_reduce(rank, size, limit + 1, 4, lanes, None, DEFAULT) == expected


@pytest.mark.parametrize(("chosen", "small", "large"), [
    (choose.broadcast, trees.broadcast, ring.broadcast),
    (choose.reduce, trees.reduce, ring.reduce),
])  # fmt: skip
def test_rooted_operations_use_a_tree_up_to_the_limit_and_a_chain_above(chosen: Any, small: Any, large: Any) -> None:
    limit = DEFAULT.tree_bytes // 8
    for rank in range(5):
        assert chosen(rank, 5, 2, limit, 8, None, DEFAULT) == small(rank, 5, 2, limit)
        assert chosen(rank, 5, 2, limit + 1, 8, None, DEFAULT) == large(rank, 5, 2, limit + 1, segment(8))
        assert chosen(rank, 5, 2, 3, 8, "ring", DEFAULT) == large(rank, 5, 2, 3, segment(8))
        assert chosen(rank, 5, 2, 1 << 20, 8, "tree", DEFAULT) == small(rank, 5, 2, 1 << 20)


def test_gathered_blocks_go_directly_through_memory_and_round_the_ring_on_a_wire() -> None:
    lengths = (5, 0, 7)
    assert choose.all_gather(1, lengths, "ring", None) == direct.all_gather(1, lengths)
    assert choose.all_gather(1, lengths, "stream", None) == ring.all_gather(1, lengths)
    assert choose.all_gather(1, lengths, "ring", "ring") == ring.all_gather(1, lengths)
    assert choose.all_gather(1, lengths, "stream", "direct") == direct.all_gather(1, lengths)


def test_hundreds_of_ranks_on_one_host_need_few_lanes() -> None:
    """Each rank has a lane for every peer that its plans name: two in a ring, and one for each round of doubling."""
    for size in (choose.DIRECT_RANKS, choose.DIRECT_RANKS + 1, 128, 1024):
        rounds = (size - 1).bit_length()
        large = choose.all_reduce(5, size, 1 << 18, 4, "ring", None, DEFAULT)
        gathered = choose.all_gather(5, (3,) * size, "ring", None)
        small = choose.all_reduce(5, size, 100, 4, "ring", None, DEFAULT)
        moves: list[list[Any]] = [[*plan.sends, *plan.recvs] for plan in (large, gathered, small)]
        peers = [len({move.peer for move in plan}) for plan in moves]
        assert peers[:2] == [size - 1 if size <= choose.DIRECT_RANKS else 2] * 2
        assert peers[2] <= rounds + 1


@pytest.mark.parametrize("algorithm", choose.ALL_REDUCE_PLANS)
def test_every_all_reduce_algorithm_has_nothing_to_do_alone(algorithm: str) -> None:
    for count in (0, 1, 1 << 20):
        plan = choose.all_reduce(0, 1, count, 4, "ring", algorithm, DEFAULT)
        assert not plan.sends
        assert not plan.recvs


@pytest.mark.parametrize("call", [
    lambda name: choose.all_reduce(0, 3, 5, 4, "ring", name, DEFAULT),
    lambda name: choose.broadcast(0, 3, 0, 5, 4, name, DEFAULT),
    lambda name: choose.reduce(0, 3, 0, 5, 4, name, DEFAULT),
    lambda name: choose.all_gather(0, (1, 2), "stream", name),
], ids=["all_reduce", "broadcast", "reduce", "all_gather"])  # fmt: skip
def test_an_unknown_algorithm_is_named_with_the_known_ones(call: Callable[[str], Plan]) -> None:
    with pytest.raises(ConfigError, match=r"algorithm='magic' does not exist for .*ring"):
        call("magic")


def test_an_exchange_among_three_says_that_it_is_for_two() -> None:
    with pytest.raises(ConfigError, match="exchange is for two ranks"):
        choose.all_reduce(0, 3, 5, 4, "ring", "exchange", DEFAULT)


def test_a_choice_is_the_same_however_often_it_is_made() -> None:
    assert choose.all_reduce(1, 4, 1000, 4, "stream", None, DEFAULT) is choose.all_reduce(
        1, 4, 1000, 4, "stream", None, DEFAULT
    )


@at_every_size
def test_rows_of_one_array_are_gathered_and_exchanged_also_if_some_are_left_out(size: int) -> None:
    rows, count = tuple(range(1, 2 * size, 2)), 2  # every other row, as if the ranks between were lost

    def array(*present: int, sender: int | None = None) -> list[Hashable]:
        """An array with these rows, and nothing elsewhere; by default each comes from the rank it is the row of."""
        return [
            (row if sender is None else sender, row, e) if row in present else None
            for row in range(2 * size)
            for e in range(count)
        ]

    for lanes in FAMILIES:
        plans = [choose.all_gather_rows(rank, rows, count, lanes, None) for rank in range(size)]
        full: list[dict[int, list[Hashable]]] = [{1: array(*rows)}] * size
        check.prove(plans, [[[], array(row)] for row in rows], full)
    plans = [choose.all_to_all_rows(rank, rows, count) for rank in range(size)]
    sent = [array(*rows, sender=row) for row in rows]
    mine = [slice(row * count, row * count + count) for row in rows]
    received = []
    for rank in range(size):
        received.append(array())
        for other in range(size):
            if other != rank:
                received[rank][mine[other]] = sent[other][mine[rank]]
    nothing = [array() for _ in rows]
    check.prove(
        plans,
        [*map(list, zip(sent, nothing, strict=True))],
        [{0: s, 1: r} for s, r in zip(sent, received, strict=True)],
    )


@at_every_size
def test_parts_of_one_array_are_reduced_also_if_some_are_left_out(size: int) -> None:
    counts = tuple(lengths(size, 2 * size + 3))
    starts = tuple(
        1 + end - count + rank for rank, (end, count) in enumerate(zip(accumulate(counts), counts, strict=True))
    )
    whole = starts[-1] + counts[-1] + 1
    inputs: list[list[Hashable]] = [[(rank, e) for e in range(whole)] for rank in range(size)]
    plans = [choose.reduce_scatter(rank, starts, counts, 4, DEFAULT) for rank in range(size)]
    parts = [slice(start, start + count) for start, count in zip(starts, counts, strict=True)]
    sums: list[Hashable] = [frozenset((rank, e) for rank in range(size)) for e in range(whole)]
    initial = [[x, x[part]] for x, part in zip(inputs, parts, strict=True)]
    check.prove(plans, initial, [{0: x, 1: sums[part]} for x, part in zip(inputs, parts, strict=True)], final=True)
