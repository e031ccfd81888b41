"""Every collective against numpy: every lane, one to five ranks and eight, sizes around every threshold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.support.sets import in_part, pairs
from tests.support.values import LANES, all_values, around_thresholds, combined, same, total, values
from tests.support.waiting import DEADLINE

from covey import ConfigError
from covey.plan import choose
from covey.runtime.group import movements
from covey.testing.threads import run_threads

if TYPE_CHECKING:
    from covey import Group, Op

    Array = np.ndarray[Any, np.dtype[Any]]

on_lanes_in_turn = in_part("lanes", LANES)
with_ranks = pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
at_all_sizes = pytest.mark.parametrize(("size", "lanes"), [(1, "memory"), *pairs([2, 3, 4], LANES)])
"""Plans are proved for more ranks in tests/unit/plan; three sizes meet all executors."""
MIB = 1 << 20


@at_all_sizes
def test_all_reduce_combines_in_place_and_returns_its_argument(size: int, lanes: str) -> None:
    def body(group: Group) -> None:
        assert set(group.lanes().values()) <= {lanes}
        for count in around_thresholds(size, 4, parts=size):
            x = values(group.rank, count, np.float32, seed=count)
            sums = total("sum", size, count, np.float32, seed=count)
            assert group.all_reduce(x) is x
            same(x, sums)
            group.all_reduce(x, "mean")
            same(x, sums)

    run_threads(size, body, lanes=lanes)


@at_all_sizes
def test_every_all_reduce_algorithm_gives_the_same_numbers(size: int, lanes: str) -> None:
    def body(group: Group) -> None:
        for algorithm in choose.ALL_REDUCE_PLANS:
            for count in (0, 1, size - 1, size, 5 * size + 1, 100_003):
                for op in ("sum", "mean", "max"):
                    x = values(group.rank, count, np.float64, seed=count)
                    if algorithm == "exchange" and size > 2:
                        with pytest.raises(ConfigError, match="exchange is for two ranks"):
                            group.all_reduce(x, op, algorithm=algorithm)
                        continue
                    group.all_reduce(x, op, algorithm=algorithm)
                    same(x, total(op, size, count, np.float64, seed=count))

    run_threads(size, body, lanes=lanes)


@at_all_sizes
def test_reduce_changes_the_root_only(size: int, lanes: str) -> None:
    def body(group: Group) -> None:
        for seed, count in enumerate(around_thresholds(size, 8, parts=1)):
            root = seed % size
            for op in ("sum", "mean"):
                x = values(group.rank, count, np.int64 if op == "sum" else np.float64, seed)
                before = x.copy()
                assert group.reduce(x, root, op) is x
                same(x, total(op, size, count, x.dtype, seed) if group.rank == root else before)

    run_threads(size, body, lanes=lanes)


@at_all_sizes
def test_broadcast_copies_the_root_to_every_rank(size: int, lanes: str) -> None:
    def body(group: Group) -> None:
        for seed, count in enumerate(around_thresholds(size, 4, parts=1)):
            root = seed % size
            x = values(group.rank, count, np.int32, seed)
            assert group.broadcast(x, root) is x
            same(x, values(root, count, np.int32, seed))

    run_threads(size, body, lanes=lanes)


@pytest.mark.parametrize(("size", "lanes"), pairs([3, 5, 1], LANES))
def test_rooted_algorithms_agree_for_every_root(size: int, lanes: str) -> None:
    def body(group: Group) -> None:
        for algorithm in choose.ROOTED_PLANS:
            for root in range(size):
                for count in (0, 1, 7, 300_001):
                    x = values(group.rank, count, np.float32, seed=root)
                    group.broadcast(x, root, algorithm=algorithm)
                    same(x, values(root, count, np.float32, seed=root))
                    x = values(group.rank, count, np.float32, seed=root)
                    group.reduce(x, root, algorithm=algorithm)
                    sums = total("sum", size, count, np.float32, seed=root)
                    same(x, sums if group.rank == root else values(group.rank, count, np.float32, seed=root))

    run_threads(size, body, lanes=lanes)


@at_all_sizes
def test_all_gather_returns_the_blocks_of_all_ranks_even_of_other_shapes(size: int, lanes: str) -> None:
    def body(group: Group) -> None:
        for algorithm in (None, "direct", "ring"):
            for count in (0, 1, 1000, 70_001):
                shape = (group.rank, count) if group.rank % 2 else (count,)
                mine = values(group.rank, shape, np.int16)
                got = group.all_gather(mine, algorithm=algorithm)
                assert len(got) == size
                for rank, block in enumerate(got or []):
                    same(block, values(rank, (rank, count) if rank % 2 else (count,), np.int16))
                assert not np.shares_memory(got[group.rank], mine)

                rows = np.full((size, 2, count), -1, np.float32)
                x = values(group.rank, (2, count), np.float32)
                assert group.all_gather(x, out=rows, algorithm=algorithm) is rows
                same(rows, np.stack(all_values(size, (2, count), np.float32)))
        scalars = group.all_gather(np.array(2.5 + group.rank))
        assert [(each.shape, each.item()) for each in scalars] == [((), 2.5 + rank) for rank in range(size)]

    run_threads(size, body, lanes=lanes)


@at_all_sizes
def test_gather_scatter_and_all_to_all_move_uneven_blocks(size: int, lanes: str) -> None:
    def body(group: Group) -> None:
        me = group.rank
        for seed, count in enumerate((0, 1, 333, 80_001)):
            root = seed % size
            got = group.gather(values(me, (me + 1, count), np.uint16, seed), root)
            if me == root:
                for rank, block in enumerate(got or []):
                    same(block, values(rank, (rank + 1, count), np.uint16, seed))
            else:
                assert got is None

            blocks = [values(rank, (count, rank), np.complex64, seed) for rank in range(size)]
            part = group.scatter(blocks if me == root else None, root)
            same(part, blocks[me])
            assert not any(np.shares_memory(part, block) for block in blocks)

            sent = [values(10 * me + to, (to + 1) * count // (me + 1), np.float64, seed) for to in range(size)]
            received = group.all_to_all(sent)
            for rank, block in enumerate(received):
                same(block, values(10 * rank + me, (me + 1) * count // (rank + 1), np.float64, seed))

    run_threads(size, body, lanes=lanes)


@pytest.mark.parametrize(("size", "lanes"), pairs([2, 4, 1], LANES))
def test_blocks_around_the_size_that_travels_with_its_shape_arrive_whole(size: int, lanes: str) -> None:
    most = movements.RECORD_INLINE_BYTES

    def block(sender: int, receiver: int, shift: int) -> Array:
        """Some blocks fit, some do not, and each rank has both kinds for the others."""
        return values(10 * sender + receiver, most - 1 + (sender + 2 * receiver + shift) % 4, np.uint8)

    def body(group: Group) -> None:
        me = group.rank
        for shift in range(4):
            for rank, array in enumerate(group.all_gather(block(me, 0, shift))):
                same(array, block(rank, 0, shift))
            for rank, array in enumerate(group.all_to_all([block(me, to, shift) for to in range(size)])):
                same(array, block(rank, me, shift))
            root = shift % size
            for rank, array in enumerate(group.gather(block(me, root, shift), root) or ()):
                same(array, block(rank, root, shift))
            blocks = [block(root, to, shift) for to in range(size)] if me == root else None
            same(group.scatter(blocks, root), block(root, me, shift))

    run_threads(size, body, lanes=lanes)


@at_all_sizes
def test_all_to_all_into_an_array_moves_rows(size: int, lanes: str) -> None:
    def body(group: Group) -> None:
        for seed, count in enumerate((0, 1, 1001, 80_001)):
            sent = values(group.rank, (size, 2, count), np.int32, seed)
            before, out = sent.copy(), np.full_like(sent, -1)
            received = np.stack([values(rank, (size, 2, count), np.int32, seed)[group.rank] for rank in range(size)])
            assert group.all_to_all(sent, out=out) is out
            same(out, received)
            same(sent, before)
            assert group.all_to_all(sent, out=sent) is sent
            same(sent, received)

    run_threads(size, body, lanes=lanes)


@at_all_sizes
def test_blocks_of_all_to_all_and_scatter_may_have_dtypes_of_their_own(size: int, lanes: str) -> None:
    kinds = ["uint8", "float32", "complex128", "bool", "int16"]

    def body(group: Group) -> None:
        me = group.rank
        received = group.all_to_all([values(me, 5 + to, kinds[(me + to) % 5]) for to in range(size)])
        for rank, block in enumerate(received):
            same(block, values(rank, 5 + me, kinds[(me + rank) % 5]))
        mine = group.scatter(
            [values(7, rank, kinds[rank]) for rank in range(size)] if me == size - 1 else None, size - 1
        )
        same(mine, values(7, me, kinds[me]))

    run_threads(size, body, lanes=lanes)


@at_all_sizes
def test_reduce_scatter_returns_the_own_rows_and_leaves_the_argument(size: int, lanes: str) -> None:
    def body(group: Group) -> None:
        me = group.rank
        for seed, shape in enumerate(
            [(0,), (1,), (size - 1, 3), (size, 0), (2 * size + 1, 5), (100_003,), (7, 50_001)]
        ):
            for op in ("sum", "mean"):
                x = values(me, shape, np.float64, seed)
                before = x.copy()
                expected = np.array_split(total(op, size, shape, np.float64, seed), size)
                same(group.reduce_scatter(x, op), expected[me])
                out = np.full_like(expected[me], -1)
                assert group.reduce_scatter(x, op, out=out) is out
                same(out, expected[me])
                same(x, before)
        counts = [(3 * rank) % 4 for rank in range(size)]
        x = values(me, (sum(counts), 2), np.int32)
        rows = np.split(total("sum", size, x.shape, np.int32), np.cumsum(counts)[:-1])
        same(group.reduce_scatter(x, counts=counts), rows[me])
        same(group.reduce_scatter(x, counts=counts, out=np.full_like(rows[me], -1)), rows[me])
        same(group.reduce_scatter(x, counts=np.array(counts)), rows[me])  # type: ignore[call-overload]
        for wrong in ([1] * (size + 1), [*counts[:-1], counts[-1] + 1], [-1, *counts[1:]]):
            with pytest.raises(ConfigError, match="counts="):
                group.reduce_scatter(x, counts=wrong)
        with pytest.raises(TypeError, match="axis 0"):
            group.reduce_scatter(np.array(1.0))

    run_threads(size, body, lanes=lanes)


@at_all_sizes
def test_scan_and_exscan_return_the_combination_of_the_ranks_before(size: int, lanes: str) -> None:
    def body(group: Group) -> None:
        me = group.rank
        for count in (0, 1, 1001, 90_001):
            op: Op
            for op, neutral in (("sum", 0), ("prod", 1), ("max", -128), ("min", 127), ("and", -1), ("xor", 0)):
                x = values(me, (count, 1), np.int8, seed=count)
                before = x.copy()
                same(group.scan(x, op), total(op, me + 1, (count, 1), np.int8, seed=count))
                expected = total(op, me, (count, 1), np.int8, seed=count) if me else np.full_like(x, neutral)
                same(group.exscan(x, op), expected)
                same(x, before)
        for call in (group.scan, group.exscan):
            with pytest.raises(ConfigError, match="mean"):
                call(np.ones(3), "mean")

    run_threads(size, body, lanes=lanes)


@on_lanes_in_turn
def test_eight_ranks_agree_with_numpy_on_everything(lanes: str) -> None:
    def body(group: Group) -> None:
        me, size = group.rank, group.size
        for count in (1, 7, 9, 30_001):
            everything = all_values(size, count, np.float32, seed=count)
            for algorithm in ("doubling", "direct", "ring"):
                same(group.all_reduce(everything[me].copy(), algorithm=algorithm), combined("sum", everything))
            same(group.reduce_scatter(everything[me]), np.array_split(combined("sum", everything), size)[me])
            same(group.scan(everything[me]), combined("sum", everything[: me + 1]))
            for rank, block in enumerate(group.all_gather(everything[me])):
                same(block, everything[rank])
            for rank, block in enumerate(group.all_to_all([everything[me][: to + 1] for to in range(size)])):
                same(block, everything[rank][: me + 1])
            group.barrier()

    run_threads(8, body, lanes=lanes)


@pytest.mark.parametrize(("size", "lanes"), pairs([2, 3], LANES))
def test_arrays_of_several_mebibytes_and_an_odd_tail_are_combined(size: int, lanes: str) -> None:
    def body(group: Group) -> None:
        count = 8 * MIB // 4 + 3
        ramp = np.arange(count, dtype=np.int32)
        x = ramp * (group.rank + 1)
        group.all_reduce(x)
        same(x, ramp * (size * (size + 1) // 2))
        x = ramp + group.rank
        group.broadcast(x, size - 1)
        same(x, ramp + size - 1)
        x = ramp * (group.rank + 1)
        group.reduce(x, 1)
        same(x, ramp * (size * (size + 1) // 2) if group.rank == 1 else ramp * (group.rank + 1))

    run_threads(size, body, lanes=lanes)


def test_a_hundred_megabytes_are_combined() -> None:
    def body(group: Group) -> None:
        x = np.arange(25_000_000, dtype=np.int32)
        x += group.rank
        group.all_reduce(x)
        assert x[0] == 1
        assert x[-1] == 2 * 24_999_999 + 1
        assert int(x.sum(dtype=np.int64)) == 25_000_000 * 24_999_999 + 25_000_000

    run_threads(2, body, lanes="shm" if "shm" in LANES else "unix")


@on_lanes_in_turn
def test_no_rank_leaves_a_barrier_before_all_have_come(lanes: str) -> None:
    arrived: list[tuple[int, int]] = []

    def body(group: Group) -> None:
        for turn in range(30):
            arrived.append((turn, group.rank))
            group.barrier()
            assert {rank for when, rank in list(arrived) if when == turn} == set(range(group.size))

    run_threads(5, body, lanes=lanes)


@pytest.mark.parametrize("lanes", ["memory", "unix"])
def test_weights_count_a_rank_that_many_times(lanes: str) -> None:
    weights = [3, 0.5, 0, 12]

    def body(group: Group) -> None:
        me = group.rank
        for dtype in (np.float32, np.float64, np.complex64):
            arrays = all_values(4, 1003, dtype)
            expected = sum(w * a for w, a in zip(weights, arrays, strict=True)) / sum(weights)
            x = arrays[me].copy()
            assert group.all_reduce(x, "mean", weight=weights[me]) is x
            np.testing.assert_allclose(x, expected, rtol=1e-5)
        assert group.all_reduce(float(me), "mean", weight=weights[me]) == pytest.approx((0.5 + 3 * 12) / 15.5)
        with pytest.raises(ConfigError, match="op='mean'"):
            group.all_reduce(np.ones(2), "sum", weight=1)
        for wrong in (-1, float("nan"), float("inf")):
            with pytest.raises(ConfigError, match="weight="):
                group.all_reduce(np.ones(2), "mean", weight=wrong)

    run_threads(4, body, lanes=lanes)


def test_a_rank_of_weight_zero_contributes_nothing_not_even_a_nan() -> None:
    def body(group: Group) -> None:
        x = np.array([np.nan, np.inf, 4.0]) if group.rank == 1 else np.array([2.0, 4.0, 6.0])
        group.all_reduce(x, "mean", weight=(2, 0, 6)[group.rank])
        np.testing.assert_allclose(x, [2.0, 4.0, 6.0])

    run_threads(3, body)


def test_weights_that_add_up_to_nothing_are_refused_everywhere_and_the_group_lives_on() -> None:
    def body(group: Group) -> None:
        for _ in range(10):
            with pytest.raises(ConfigError, match="add up to 0"):
                group.all_reduce(np.ones(4), "mean", weight=0)
            assert group.all_reduce(1) == group.size

    run_threads(3, body)


@with_ranks
def test_python_numbers_come_back_as_numbers(size: int) -> None:
    def body(group: Group) -> None:
        me = group.rank
        cases: list[tuple[Any, Op, Any]] = [
            (me + 1, "sum", size * (size + 1) // 2),
            (me + 1, "max", size),
            (me + 1, "mean", (size + 1) / 2),
            (me + 0.5, "sum", sum(rank + 0.5 for rank in range(size))),
            (complex(me, 1), "sum", complex(sum(range(size)), size)),
            (me == 0, "or", True),
            (me == 0, "and", size == 1),
            (True, "sum", size),
            (np.float32(me), "min", 0.0),
            (np.int8(me), "sum", sum(range(size))),
            (np.bool_(me == 0), "or", True),
        ]
        for x, op, expected in cases:
            got = group.all_reduce(x, op)
            assert got == expected
            assert type(got) is type(expected)
            assert group.all_reduce(x, op, async_op=True).wait(DEADLINE) == expected
        assert group.all_reduce(2.0, algorithm="doubling") == 2.0 * size
        with pytest.raises(ConfigError, match="no-such"):
            group.all_reduce(2.0, algorithm="no-such")
        wrong: Any
        for wrong, op in (
            (1 << 70, "sum"),
            (10**400, "mean"),
            ("text", "sum"),
            (None, "sum"),
            (1j, "max"),
            (1.5, "xor"),
        ):
            with pytest.raises(TypeError):
                group.all_reduce(wrong, op)

    run_threads(size, body)


def test_a_call_that_cannot_work_is_refused_before_anything_is_sent() -> None:
    def body(group: Group) -> None:
        x = np.ones(4)
        refused: list[tuple[type[Exception], str, Any]] = [
            (ConfigError, "op='average'", lambda: group.all_reduce(x, "average")),  # type: ignore[call-overload]
            (ConfigError, "algorithm='magic'", lambda: group.all_reduce(x, algorithm="magic")),
            (ConfigError, "algorithm='doubling'", lambda: group.broadcast(x, algorithm="doubling")),
            (ConfigError, "algorithm='tree'", lambda: group.all_gather(x, algorithm="tree")),
            (ConfigError, "algorithm='tree'", lambda: group.all_gather(x, out=np.ones((3, 4)), algorithm="tree")),
            (ConfigError, "root=3", lambda: group.reduce(x, 3)),
            (ConfigError, "root=-1", lambda: group.broadcast(x, -1)),
            (ConfigError, "root='0'", lambda: group.gather(x, "0")),  # type: ignore[call-overload]
            (ConfigError, "one array for each of the 3", lambda: group.all_to_all([x, x])),
            (ConfigError, "one array for each of the 3", lambda: group.scatter(None, group.rank)),
            (ConfigError, "one element for each of the 3", lambda: group.scatter_object([1], group.rank)),
            (ConfigError, "timeout=0", lambda: group.all_reduce(x, timeout=0)),
            (ConfigError, "timeout=-1", lambda: group.barrier(timeout=-1)),
            (ConfigError, "color='red'", lambda: group.split("red")),  # type: ignore[call-overload]
            (TypeError, "out must be", lambda: group.all_gather(x, out=np.ones((3, 5)))),
            (TypeError, "out must be", lambda: group.all_gather(x, out=np.ones((3, 4), np.float32))),
            (TypeError, "out must be", lambda: group.reduce_scatter(x, out=np.ones(3))),
            (TypeError, "out must be", lambda: group.all_to_all(np.ones((3, 2)), out=np.ones((3, 1)))),
            (ConfigError, "row for each of 3 ranks", lambda: group.all_to_all(x, out=x)),
            (TypeError, "read-only", lambda: group.all_reduce(np.broadcast_to(1.0, 4))),
        ]
        for kind, text, call in refused:
            with pytest.raises(kind, match=text):
                call()
        assert group.all_reduce(group.rank) == 3

    run_threads(3, body)
