"""Every collective on covey and on gloo, in the same processes with the same inputs, side by side."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Tensors = list[torch.Tensor]

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64)
ARITHMETIC = ("SUM", "PRODUCT", "MIN", "MAX")
BITS = ("BAND", "BOR", "BXOR")
SHAPES = ((), (0,), (5,), (3, 4), (70_001,))


def values(shape: tuple[int, ...], rank: int, dtype: torch.dtype = torch.float32, salt: int = 0) -> torch.Tensor:
    """Return small whole numbers that differ by rank and position: their sums and products are exact in any dtype."""
    count = torch.Size(shape).numel()
    numbers = (torch.arange(count) * 7 + rank * 3 + salt) % 4 + 1
    return numbers.reshape(shape).to(torch.bool if dtype is torch.bool else dtype)


def compare(rank: int, size: int, store: str) -> dict[str, int | list[str]]:
    """Return how many cases were compared, and those in which covey and gloo differ."""
    dist.init_process_group("covey", init_method=f"file://{store}", rank=rank, world_size=size)
    gloo = dist.new_group(backend="gloo")
    different, count = [], 0
    for name, case in cases(rank, size):
        want, got = case(gloo), case(dist.group.WORLD)
        count += 1
        is_same = len(want) == len(got) and all(
            mine.dtype == theirs.dtype and mine.shape == theirs.shape and torch.equal(mine, theirs)
            for mine, theirs in zip(got, want, strict=True)
        )
        if not is_same:
            different.append(f"{name}: covey {got}, gloo {want}")
    dist.destroy_process_group(gloo)
    return {"count": count, "different": different}


def cases(rank: int, size: int) -> Iterator[tuple[str, Callable[[Any], Tensors]]]:
    """Yield a name and what to call with a group for the results."""
    for dtype, op, shape in product((*FLOATS, *INTEGERS), (*ARITHMETIC, *BITS), SHAPES):
        if op in BITS and dtype not in INTEGERS:
            continue
        for is_async in (False, True):
            yield f"all_reduce {dtype} {op} {shape} {is_async}", _all_reduce(rank, dtype, op, shape, is_async)
        if shape in ((5,), (3, 4)):
            yield f"reduce {dtype} {op} {shape}", _reduce(rank, size, dtype, op, shape)
    for dtype, shape in product((*FLOATS, *INTEGERS, torch.bool), SHAPES):
        for name, case in (
            ("broadcast", _broadcast),
            ("all_gather", _all_gather),
            ("gather", _gather),
            ("scatter", _scatter),
            ("all_gather_single", _all_gather_single),
            ("all_to_all_single", _all_to_all_single),
        ):
            if shape or name not in ("all_gather_single", "all_to_all_single"):
                yield f"{name} {dtype} {shape}", case(rank, size, dtype, shape)
    for dtype, op in product((torch.float32, torch.int64), ARITHMETIC):
        yield f"reduce_scatter {dtype} {op}", _reduce_scatter(rank, size, dtype, op)
        yield f"reduce_scatter_single {dtype} {op}", _reduce_scatter_single(rank, size, dtype, op)
        yield f"coalesced {dtype} {op}", _coalesced(rank, dtype, op)
    yield "average", _average(rank)
    yield "complex", _complex(rank)
    yield "sparse", _sparse(rank)
    yield "uneven all_to_all_single", _uneven(rank, size)
    yield "all_to_all", _all_to_all(rank, size)
    yield "objects", _objects(rank, size)


def _op(name: str) -> Any:
    return getattr(dist.ReduceOp, name)


def _finish(work: Any) -> None:
    if work is not None:
        work.wait()


def _all_reduce(rank: int, dtype: torch.dtype, op: str, shape: tuple[int, ...], is_async: bool) -> Any:
    def case(group: Any) -> Tensors:
        x = values(shape, rank, dtype)
        _finish(dist.all_reduce(x, _op(op), group=group, async_op=is_async))
        return [x]

    return case


def _reduce(rank: int, size: int, dtype: torch.dtype, op: str, shape: tuple[int, ...]) -> Any:
    def case(group: Any) -> Tensors:
        x = values(shape, rank, dtype)
        dist.reduce(x, size - 1, _op(op), group=group)
        return [x] if rank == size - 1 else []  # elsewhere gloo leaves what it happened to compute

    return case


def _broadcast(rank: int, size: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Any:
    def case(group: Any) -> Tensors:
        x = values(shape, rank, dtype)
        _finish(dist.broadcast(x, size - 1, group=group, async_op=True))
        return [x]

    return case


def _all_gather(rank: int, size: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Any:
    def case(group: Any) -> Tensors:
        outs = [torch.zeros(shape, dtype=dtype) for _ in range(size)]
        dist.all_gather(outs, values(shape, rank, dtype), group=group)
        return outs

    return case


def _gather(rank: int, size: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Any:
    def case(group: Any) -> Tensors:
        outs = [torch.zeros(shape, dtype=dtype) for _ in range(size)] if rank == size - 1 else None
        dist.gather(values(shape, rank, dtype), outs, dst=size - 1, group=group)
        return outs or []

    return case


def _scatter(rank: int, size: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Any:
    def case(group: Any) -> Tensors:
        out = torch.zeros(shape, dtype=dtype)
        parts = [values(shape, rank, dtype, salt) for salt in range(size)] if rank == 0 else None
        dist.scatter(out, parts, src=0, group=group)
        return [out]

    return case


def _all_gather_single(rank: int, size: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Any:
    def case(group: Any) -> Tensors:
        out = torch.zeros((size * shape[0], *shape[1:]), dtype=dtype)
        dist.all_gather_single(out, values(shape, rank, dtype), group=group)
        return [out]

    return case


def _all_to_all_single(rank: int, size: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Any:
    def case(group: Any) -> Tensors:
        whole = values((size * shape[0], *shape[1:]), rank, dtype)
        out = torch.zeros_like(whole)
        dist.all_to_all_single(out, whole, group=group)
        return [out]

    return case


def _reduce_scatter(rank: int, size: int, dtype: torch.dtype, op: str) -> Any:
    def case(group: Any) -> Tensors:
        out = torch.zeros(3, 4, dtype=dtype)
        dist.reduce_scatter(out, [values((3, 4), rank, dtype, salt) for salt in range(size)], _op(op), group=group)
        return [out]

    return case


def _reduce_scatter_single(rank: int, size: int, dtype: torch.dtype, op: str) -> Any:
    def case(group: Any) -> Tensors:
        out = torch.zeros(3, 4, dtype=dtype)
        dist.reduce_scatter_single(out, values((3 * size, 4), rank, dtype), _op(op), group=group)
        return [out]

    return case


def _coalesced(rank: int, dtype: torch.dtype, op: str) -> Any:
    def case(group: Any) -> Tensors:
        xs = [values(shape, rank, dtype) for shape in ((2,), (3, 4), (1, 5))]
        with dist._coalescing_manager(group=group):
            for x in xs:
                dist.all_reduce(x, _op(op), group=group)
        return xs

    return case


def _average(rank: int) -> Any:
    def case(group: Any) -> Tensors:
        x = 6 * values((4, 5), rank)
        dist.all_reduce(x, dist.ReduceOp.AVG, group=group)
        return [x]

    return case


def _complex(rank: int) -> Any:
    def case(group: Any) -> Tensors:
        x = torch.complex(values((4, 5), rank), values((4, 5), rank, salt=1))
        dist.all_reduce(x, group=group)
        return [x]

    return case


def _sparse(rank: int) -> Any:
    def case(group: Any) -> Tensors:
        indices = torch.tensor([[0, 1 + rank, 5], [0, 1, rank]])
        x = torch.sparse_coo_tensor(indices, values((3, 2), rank), (6, 4, 2), check_invariants=True)
        dist.all_reduce(x, group=group)
        return [x.to_dense()]

    return case


def _uneven(rank: int, size: int) -> Any:
    """Rank r gives rank s r + s rows."""

    def case(group: Any) -> Tensors:
        splits = [rank + other for other in range(size)]
        out = torch.zeros(sum(splits), 3)
        dist.all_to_all_single(out, values((sum(splits), 3), rank), splits, splits, group=group)
        return [out]

    return case


def _all_to_all(rank: int, size: int) -> Any:
    def case(group: Any) -> Tensors:
        ins = [values((3, 2), rank, salt=other) for other in range(size)]
        outs = [torch.zeros(3, 2) for _ in range(size)]
        dist.all_to_all(outs, ins, group=group)
        return outs

    return case


def _objects(rank: int, size: int) -> Any:
    def case(group: Any) -> Tensors:
        everything: list[Any] = [None] * size
        dist.all_gather_object(everything, {"rank": rank, "text": "x" * (10 * rank)}, group=group)
        told = [f"from {rank}"] if rank == 0 else [None]
        dist.broadcast_object_list(told, 0, group=group)
        assert told == ["from 0"]
        return [torch.tensor([item["rank"] * 100 + len(item["text"]) for item in everything])]

    return case
