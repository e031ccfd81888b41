"""Every collective on covey and on gloo, in the same processes with the same inputs, side by side.

A case is a function of a `Seat` that returns tensors: what this rank has once it has called something on the group.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Tensors = list[torch.Tensor]
    Shape = tuple[int, ...]

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64)
COMPLEX = (torch.complex64, torch.complex128)
ARITHMETIC = ("SUM", "PRODUCT", "MIN", "MAX")
BITS = ("BAND", "BOR", "BXOR")
SHAPES = ((), (0,), (5,), (3, 4))
LONG = (70_001,)
"""Beyond what goes into one message; too slow for all dtypes in large worlds."""


@dataclass(frozen=True)
class Seat:
    """A rank of a group, and the group's size."""

    group: Any
    rank: int
    size: int


def values(shape: Shape, rank: int, dtype: torch.dtype = torch.float32, salt: int = 0) -> torch.Tensor:
    """Return small whole numbers that differ by rank and position: their sums and products are exact in any dtype."""
    numbers = (torch.arange(torch.Size(shape).numel()) * 7 + rank * 3 + salt) % 4 + 1
    if dtype is torch.bool:
        numbers = numbers % 2
    if dtype.is_complex:
        numbers = torch.complex(numbers.double(), numbers.flip(0).double() + rank)
    return numbers.reshape(shape).to(dtype)


def compare(rank: int, size: int, store: str) -> dict[str, Any]:
    """Return how many cases were compared, and those in which covey and gloo differ."""
    dist.init_process_group("cpu:covey", init_method=f"file://{store}", rank=rank, world_size=size)
    gloo = dist.new_group(backend="gloo")
    warnings.simplefilter("ignore", FutureWarning)  # torch calls its coalesced forms deprecated
    different, count = [], 0

    def hold(named: Iterator[tuple[str, Callable[[Seat], Tensors]]], ours: Any, theirs: Any, where: str = "") -> None:
        nonlocal count
        for name, case in named:
            want = case(Seat(theirs, dist.get_rank(theirs), dist.get_world_size(theirs)))
            try:
                got = case(Seat(ours, dist.get_rank(ours), dist.get_world_size(ours)))
            except (TypeError, ValueError, NotImplementedError) as error:
                different.append(f"{name}{where}: {error!r}")
                continue
            count += 1
            if len(want) != len(got) or not all(map(_is_same, got, want)):
                different.append(f"{name}{where}: covey {got}, gloo {want}")

    hold(cases(size), dist.group.WORLD, gloo)
    members = list(range(1, size))
    if members:
        ours, theirs = dist.new_group(members), dist.new_group(members, backend="gloo")
        if rank in members:
            hold(compact_cases(), ours, theirs, " in a sub-group")
            dist.destroy_process_group(theirs)
    dist.destroy_process_group(gloo)
    return {"count": count, "different": different}


def _is_same(got: torch.Tensor, want: torch.Tensor) -> bool:
    return got.dtype == want.dtype and got.shape == want.shape and torch.equal(got, want)


def cases(size: int) -> Iterator[tuple[str, Callable[[Seat], Tensors]]]:
    """Yield the name of each case and what to call."""
    for number, (dtype, op, shape) in enumerate(reductions(size)):
        words = {"dtype": dtype, "op": op, "shape": shape, "is_async": number % 2 == 0}
        for case in (all_reduce, reduce, reduce_scatter, reduce_scatter_single):
            if shape or case is not reduce_scatter_single:
                yield f"{case.__name__} {words}", partial(case, **words)
    for number, (dtype, shape) in enumerate(product((*FLOATS, *INTEGERS, *COMPLEX, torch.bool), (*SHAPES, LONG))):
        if shape == LONG and size > 2 and dtype not in (torch.float32, torch.bool):
            continue
        words = {"dtype": dtype, "shape": shape, "is_async": number % 2 == 0}
        for move in (broadcast, all_gather, gather, scatter, all_gather_single, all_to_all_single, all_to_all):
            if (shape or move not in (all_gather_single, all_to_all_single)) and (
                move is not gather or not dtype.is_complex
            ):
                yield f"{move.__name__} {words}", partial(move, **words)
    yield from compact_cases()
    yield "module_gradients", module_gradients  # torch takes roots of the world for its own there: no sub-groups


def reductions(size: int) -> Iterator[tuple[torch.dtype, str, Shape]]:
    """Yield what can be reduced, how, and in which shapes."""
    for dtype, op in product((*FLOATS, *INTEGERS, torch.bool), (*ARITHMETIC, *BITS, "AVG")):
        if (op in BITS and dtype.is_floating_point) or (op == "AVG" and not dtype.is_floating_point):
            continue
        is_long = size < 3 or (op == "SUM" and dtype in (torch.float32, torch.bfloat16))
        yield from ((dtype, op, shape) for shape in (*SHAPES, *[LONG] * is_long))
    yield from product(COMPLEX, ("SUM", "AVG"), SHAPES[1:])


def compact_cases() -> Iterator[tuple[str, Callable[[Seat], Tensors]]]:
    """Yield those that take no dtype, op and shape, and one of each that does."""
    for case in (all_reduce, reduce, reduce_scatter, reduce_scatter_single):
        yield case.__name__, partial(case, dtype=torch.float32, op="SUM", shape=(3, 4), is_async=False)
    for move in (broadcast, all_gather, gather, scatter, all_gather_single, all_to_all_single, all_to_all):
        yield move.__name__, partial(move, dtype=torch.int64, shape=(3, 4), is_async=True)
    for dtype, op in product((torch.bfloat16, torch.float32, torch.int64), ARITHMETIC):
        yield f"coalesced {dtype} {op}", partial(coalesced, dtype=dtype, op=op)
    for dtype in (torch.float32, torch.float64, torch.int64):
        yield f"sparse {dtype}", partial(sparse, dtype=dtype)
    for alone in (coalesced_parts, lists_at_once, strided, uneven_single, objects, neighbours, any_source, batch):
        yield alone.__name__, alone
    for each in (functional, functional_coalesced, functional_gradients):
        yield each.__name__, each


def _op(name: str) -> Any:
    return getattr(dist.ReduceOp, name)


def _finish(work: Any) -> None:
    if work is not None:
        work.wait()


# Reductions


def _numbers(seat: Seat, shape: Shape, dtype: torch.dtype, op: str) -> torch.Tensor:
    """Return values whose mean is exact too."""
    x = values(shape, seat.rank, dtype)
    return 12 * x if op == "AVG" else x


def all_reduce(seat: Seat, dtype: torch.dtype, op: str, shape: Shape, is_async: bool) -> Tensors:
    x = _numbers(seat, shape, dtype, op)
    _finish(dist.all_reduce(x, _op(op), group=seat.group, async_op=is_async))
    return [x]


def reduce(seat: Seat, dtype: torch.dtype, op: str, shape: Shape, is_async: bool) -> Tensors:
    x, root = _numbers(seat, shape, dtype, op), seat.size - 1
    _finish(dist.reduce(x, op=_op(op), group=seat.group, async_op=is_async, group_dst=root))
    return [x] if seat.rank == root else []  # elsewhere gloo leaves what it happened to compute


def reduce_scatter(seat: Seat, dtype: torch.dtype, op: str, shape: Shape, is_async: bool) -> Tensors:
    parts = [_numbers(seat, shape, dtype, op).roll(shift) for shift in range(seat.size)]
    out = torch.zeros(shape, dtype=dtype)
    _finish(dist.reduce_scatter(out, parts, _op(op), group=seat.group, async_op=is_async))
    return [out]


def reduce_scatter_single(seat: Seat, dtype: torch.dtype, op: str, shape: Shape, is_async: bool) -> Tensors:
    whole, out = _numbers(seat, (seat.size * shape[0], *shape[1:]), dtype, op), torch.zeros(shape, dtype=dtype)
    _finish(dist.reduce_scatter_single(out, whole, _op(op), group=seat.group, async_op=is_async))
    return [out]


def sparse(seat: Seat, dtype: torch.dtype) -> Tensors:
    """Entries that meet others', that do not, that come twice, and none at all on the last rank of several."""
    indices = torch.tensor([[0, 1 + seat.rank, 6, 6], [0, 1, seat.rank, seat.rank]])
    entries = values((4, 2), seat.rank, dtype)
    if seat.rank and seat.rank == seat.size - 1:
        indices, entries = indices[:, :0], entries[:0]
    x = torch.sparse_coo_tensor(indices, entries, (7, 4, 2), check_invariants=True)
    dist.all_reduce(x, group=seat.group)
    return [x.to_dense()]


# Moves


def broadcast(seat: Seat, dtype: torch.dtype, shape: Shape, is_async: bool) -> Tensors:
    x = values(shape, seat.rank, dtype)
    _finish(dist.broadcast(x, group=seat.group, async_op=is_async, group_src=seat.size - 1))
    return [x]


def all_gather(seat: Seat, dtype: torch.dtype, shape: Shape, is_async: bool) -> Tensors:
    outs = [torch.zeros(shape, dtype=dtype) for _ in range(seat.size)]
    _finish(dist.all_gather(outs, values(shape, seat.rank, dtype), group=seat.group, async_op=is_async))
    return outs


def gather(seat: Seat, dtype: torch.dtype, shape: Shape, is_async: bool) -> Tensors:
    root, x = seat.size - 1, values(shape, seat.rank, dtype)
    outs = [torch.zeros(shape, dtype=dtype) for _ in range(seat.size)] if seat.rank == root else None
    _finish(dist.gather(x, outs, group=seat.group, async_op=is_async, group_dst=root))
    return outs or []


def scatter(seat: Seat, dtype: torch.dtype, shape: Shape, is_async: bool) -> Tensors:
    out = torch.zeros(shape, dtype=dtype)
    parts = [values(shape, salt, dtype, salt) for salt in range(seat.size)] if seat.rank == 0 else None
    _finish(dist.scatter(out, parts, group=seat.group, async_op=is_async, group_src=0))
    return [out]


def all_gather_single(seat: Seat, dtype: torch.dtype, shape: Shape, is_async: bool) -> Tensors:
    out = torch.zeros((seat.size * shape[0], *shape[1:]), dtype=dtype)
    _finish(dist.all_gather_single(out, values(shape, seat.rank, dtype), group=seat.group, async_op=is_async))
    return [out]


def all_to_all_single(seat: Seat, dtype: torch.dtype, shape: Shape, is_async: bool) -> Tensors:
    whole = values((seat.size * shape[0], *shape[1:]), seat.rank, dtype)
    out = torch.zeros_like(whole)
    _finish(dist.all_to_all_single(out, whole, group=seat.group, async_op=is_async))
    return [out]


def all_to_all(seat: Seat, dtype: torch.dtype, shape: Shape, is_async: bool) -> Tensors:
    ins = [values(shape, seat.rank, dtype, salt=other) for other in range(seat.size)]
    outs = [torch.zeros(shape, dtype=dtype) for _ in range(seat.size)]
    _finish(dist.all_to_all(outs, ins, group=seat.group, async_op=is_async))
    return outs


def uneven_single(seat: Seat) -> Tensors:
    """Rank r gives rank s r + s rows."""
    splits = [seat.rank + other for other in range(seat.size)]
    out = torch.zeros(sum(splits), 3)
    dist.all_to_all_single(out, values((sum(splits), 3), seat.rank), splits, splits, group=seat.group)
    return [out]


# Several at once, and other shapes of memory


def coalesced(seat: Seat, dtype: torch.dtype, op: str) -> Tensors:
    xs = [values(shape, seat.rank, dtype) for shape in ((2,), (3, 4), (1, 5))]
    with dist._coalescing_manager(group=seat.group, async_ops=True) as manager:
        for x in xs:
            dist.all_reduce(x, _op(op), group=seat.group)
    manager.wait()
    return xs


def coalesced_parts(seat: Seat) -> Tensors:
    outs = [torch.zeros(seat.size * rows, 2) for rows in (1, 3)]
    with dist._coalescing_manager(group=seat.group):
        for rows, out in zip((1, 3), outs, strict=True):
            dist.all_gather_single(out, values((rows, 2), seat.rank), group=seat.group)
    parts = [torch.zeros(rows, 2) for rows in (1, 3)]
    with dist._coalescing_manager(group=seat.group):
        for rows, part in zip((1, 3), parts, strict=True):
            dist.reduce_scatter_single(part, values((seat.size * rows, 2), seat.rank), group=seat.group)
    return [*outs, *parts]


def lists_at_once(seat: Seat) -> Tensors:
    xs = [values(shape, seat.rank) for shape in ((2,), (3, 4))]
    outs = [[torch.zeros_like(x) for x in xs] for _ in range(seat.size)]
    dist.all_gather_coalesced(outs, [x.clone() for x in xs], group=seat.group)
    dist.all_reduce_coalesced(xs, group=seat.group)
    return [*xs, *[out for each in outs for out in each]]


def strided(seat: Seat) -> Tensors:
    """Transposed, and every second row."""
    turned, sent = values((3, 4), seat.rank).t(), values((8, 3), seat.rank, salt=1)[::2]
    dist.all_reduce(turned, group=seat.group)
    gathered = [torch.zeros(4, 3) for _ in range(seat.size)]
    dist.all_gather(gathered, sent.contiguous() if seat.rank % 2 else sent, group=seat.group)
    return [turned, *gathered]


# Messages and objects


def neighbours(seat: Seat) -> Tensors:
    """Two tags that are received in the other order than they are sent."""
    if seat.size == 1:
        return []
    right, left = (seat.rank + 1) % seat.size, (seat.rank - 1) % seat.size
    rooms = [torch.zeros(2, 3, dtype=torch.int64) for _ in range(2)]
    given = [values((2, 3), seat.rank, torch.int64, salt) for salt in range(2)]
    works = [dist.isend(given[tag], group=seat.group, tag=tag, group_dst=right) for tag in (0, 1)]
    works += [dist.irecv(rooms[tag], group=seat.group, tag=tag, group_src=left) for tag in (1, 0)]
    for work in works:
        work.wait()
    return rooms


def any_source(seat: Seat) -> Tensors:
    if seat.rank:
        dist.send(values((4,), seat.rank), group=seat.group, tag=5, group_dst=0)
        return []
    rooms = {}
    for _ in range(seat.size - 1):
        room = torch.zeros(4)
        rooms[dist.recv(room, group=seat.group, tag=5)] = room
    return [torch.tensor(sorted(rooms)), *[rooms[source] for source in sorted(rooms)]]


def batch(seat: Seat) -> Tensors:
    others = [other for other in range(seat.size) if other != seat.rank]
    rooms = [torch.zeros(3) for _ in others]
    calls = [dist.P2POp(dist.isend, values((3,), seat.rank), group=seat.group, group_peer=other) for other in others]
    calls += [
        dist.P2POp(dist.irecv, room, group=seat.group, group_peer=other)
        for room, other in zip(rooms, others, strict=True)
    ]
    for work in dist.batch_isend_irecv(calls) if calls else []:
        work.wait()
    return rooms


def objects(seat: Seat) -> Tensors:
    mine = {"rank": seat.rank, "text": "x" * (10 * seat.rank)}
    everything: list[Any] = [None] * seat.size
    dist.all_gather_object(everything, mine, group=seat.group)
    told = [mine, seat.rank] if seat.rank == 0 else [None, None]
    dist.broadcast_object_list(told, group=seat.group, group_src=0)
    gathered: list[Any] | None = [None] * seat.size if seat.rank == 0 else None
    dist.gather_object(mine, gathered, group=seat.group, group_dst=0)
    dealt: list[Any] = [None]
    dist.scatter_object_list(
        dealt, [[seat.rank, other] for other in range(seat.size)], group=seat.group, group_src=seat.size - 1
    )
    passed = [None, None]
    if seat.size > 1 and seat.rank == 0:
        dist.send_object_list(["over", mine], group=seat.group, group_dst=1)
    elif seat.rank == 1:
        dist.recv_object_list(passed, group=seat.group, group_src=0)
    found = repr((everything, told, gathered, dealt, passed))
    return [torch.tensor(list(found.encode()))]


# Functions: what the compiler, DTensor and autograd call, through C++


def functional(seat: Seat) -> Tensors:
    import torch.distributed._functional_collectives as functions

    group, x = seat.group, values((2 * seat.size, 3), seat.rank)
    splits = [2] * seat.size
    return [
        tensor.clone()
        for tensor in (
            *(functions.all_reduce(x, op, group) for op in ("sum", "avg", "max", "min", "product")),
            functions.broadcast(x, 0, group),
            *(functions.all_gather_tensor(x, dim, group) for dim in (0, 1)),
            functions.reduce_scatter_tensor(x, "sum", 0, group),
            functions.all_to_all_single(x, splits, splits, group),
            functions.all_to_all_single(x, None, None, group),
        )
    ]


def functional_coalesced(seat: Seat) -> Tensors:
    import torch.distributed._functional_collectives as functions

    xs = [values((seat.size, 3), seat.rank), values((2 * seat.size,), seat.rank, salt=1)]
    return [
        tensor.clone()
        for tensor in (
            *functions.all_reduce_coalesced(xs, "sum", seat.group),
            *functions.all_gather_into_tensor_coalesced(xs, seat.group),
            *functions.reduce_scatter_tensor_coalesced(xs, "sum", [0, 0], seat.group),
        )
    ]


def functional_gradients(seat: Seat) -> Tensors:
    import torch.distributed._functional_collectives as functions

    found = []
    for call in (
        lambda x: functions.all_gather_tensor_autograd(x, 0, seat.group),
        lambda x: functions.reduce_scatter_tensor_autograd(x, "sum", 0, seat.group),
        lambda x: functions.all_to_all_single_autograd(x, [2] * seat.size, [2] * seat.size, seat.group),
    ):
        x = values((2 * seat.size, 3), seat.rank).requires_grad_()
        out = call(x)
        (out * values(tuple(out.shape), seat.rank, salt=2)).sum().backward()
        found += [out.detach().clone(), x.grad]
    return found


def module_gradients(seat: Seat) -> Tensors:
    """torch.distributed.nn: the collectives as functions with gradients."""
    import torch.distributed.nn.functional as functions

    found = []
    for call in (
        lambda x: functions.all_reduce(x, group=seat.group),
        lambda x: functions.broadcast(x, 0, seat.group),
        lambda x: torch.cat(functions.all_gather(x, seat.group)),
        lambda x: torch.cat(
            functions.all_to_all([torch.zeros(2, 3) for _ in range(seat.size)], list(x.split(2)), seat.group)
        ),
        lambda x: functions.all_to_all_single(torch.zeros_like(x), x, group=seat.group),
        lambda x: functions.reduce_scatter(torch.zeros(2, 3), list(x.split(2)), group=seat.group),
    ):
        x = values((2 * seat.size, 3), seat.rank).requires_grad_()
        out = call(x)
        (out * values(tuple(out.shape), seat.rank, salt=2)).sum().backward()
        found += [out.detach().clone(), x.grad]
    return found
