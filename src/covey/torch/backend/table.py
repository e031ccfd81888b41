"""The table of supported operations and dtypes, made by trying all: `python -m covey.torch.backend.table`."""

from __future__ import annotations

from functools import partial, reduce
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from covey.arrays.torch_devices import BLOCKING, STREAMED
from covey.base.errors import ConfigError, CoveyError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

    Numbers = list[torch.Tensor]

REDUCTIONS: Final = ("SUM", "AVG", "PREMUL_SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
ELEMENTS: Final = 3


def table(device: str = "cpu") -> str:
    """Return a Markdown table of what the default process group supports on `device`. Every rank calls it.

    Operations that support the same dtypes share a row, and dtypes that the same operations support share a column.

    Raises:
        AssertionError: an operation returned a wrong result.
    """
    dtypes = _dtypes()
    taken = {name: tuple(_is_taken(name, attempt, dtype, device) for dtype in dtypes) for name, attempt in _attempts()}
    columns = _alike(range(len(dtypes)), lambda column: tuple(row[column] for row in taken.values()))
    rows = _alike(taken, lambda name: taken[name])
    lines = [
        ["", *(", ".join(f"`{str(dtypes[column]).removeprefix('torch.')}`" for column in same) for same in columns)],
        ["---"] * (len(columns) + 1),
        *([_names(names), *("yes" if taken[names[0]][same[0]] else "" for same in columns)] for names in rows),
    ]
    return "\n".join(f"| {' | '.join(cells)} |".replace("  ", " ") for cells in lines)


def guide() -> str:
    """Return the text of the guide: the table, and the supported devices."""
    staged = ", ".join(f"`{kind}`" for kind in (*STREAMED, *BLOCKING))
    return f"{table()}\n\nOn every device alike: `cpu` tensors are used in place, {staged} go through host memory."


def _attempts() -> list[tuple[str, Callable[[torch.dtype, str], tuple[Numbers, Numbers]]]]:
    """Return all operations by name; each returns the expected result on this rank, and the actual one."""
    reducing = {
        "all_reduce": _all_reduce,
        "reduce": _reduce,
        "reduce_scatter": _reduce_scatter,
        "reduce_scatter_single": _reduce_scatter_single,
    }
    moving = {
        "broadcast": _broadcast,
        "all_gather": _all_gather,
        "all_gather_single": _all_gather_single,
        "gather": _gather,
        "scatter": _scatter,
        "all_to_all": _all_to_all,
        "all_to_all_single": _all_to_all_single,
        "send/recv": _send,
    }
    reductions = [(f"{name} {op}", partial(attempt, op)) for op in REDUCTIONS for name, attempt in reducing.items()]
    return [*moving.items(), *reductions, ("all_reduce SUM of sparse COO", _sparse)]


def _dtypes() -> list[torch.dtype]:
    """Return the dtypes that torch can fill with numbers."""
    found = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    usable = []
    for dtype in sorted(
        found, key=lambda dtype: (dtype.is_complex, dtype.is_floating_point, dtype.itemsize, str(dtype))
    ):
        try:
            if not dtype.is_complex or dtype.itemsize > 4:  # torch warns that complex32 is experimental
                torch.ones(1).to(dtype)
                usable.append(dtype)
        except (RuntimeError, NotImplementedError):
            continue
    return usable


def _is_taken(
    name: str, attempt: Callable[[torch.dtype, str], tuple[Numbers, Numbers]], dtype: torch.dtype, device: str
) -> bool:
    """Tell whether the operation supports the dtype; if not, it raises before anything is sent."""
    try:
        expected, got = attempt(dtype, device)
    except (TypeError, ValueError, RuntimeError, ConfigError) as error:
        if isinstance(error, CoveyError) and not isinstance(error, ConfigError):
            raise
        return False
    for right, result in zip(expected, got, strict=True):
        wide = torch.complex128 if dtype.is_complex else torch.float64
        if not torch.allclose(result.cpu().to(wide), right.to(dtype).to(wide), rtol=0.01):
            raise AssertionError(f"{name} of {dtype} gave {result}, not {right}")
    return True


def _numbers(rank: int, dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    """Return the input of `rank`: ones and fours, which every dtype can hold, also float8 without a mantissa."""
    numbers = torch.tensor([4 if (index + rank + salt) % 2 else 1 for index in range(ELEMENTS)])
    return numbers * (1 + 1j) if dtype.is_complex else numbers


def _input(dtype: torch.dtype, device: str, salt: int = 0) -> torch.Tensor:
    return _numbers(dist.get_rank(), dtype, salt).to(dtype).to(device)


def _combined(op: str, dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    """Return the combination of the inputs of all ranks."""
    rows = [_numbers(rank, dtype, salt) for rank in range(dist.get_world_size())]
    combine: dict[str, Callable[[Any, Any], Any]] = {
        "PRODUCT": torch.mul,
        "MIN": torch.minimum,
        "MAX": torch.maximum,
        "BAND": torch.bitwise_and,
        "BOR": torch.bitwise_or,
        "BXOR": torch.bitwise_xor,
    }
    rows = [row.bool().long() for row in rows] if dtype is torch.bool else rows
    total: torch.Tensor = reduce(combine.get(op, torch.add), rows)
    return total / len(rows) if op == "AVG" else total * 2 if op == "PREMUL_SUM" else total


def _operation(op: str) -> Any:
    return dist._make_nccl_premul_sum(2.0) if op == "PREMUL_SUM" else getattr(dist.ReduceOp, op)


def _all_reduce(op: str, dtype: torch.dtype, device: str) -> tuple[Numbers, Numbers]:
    x = _input(dtype, device)
    dist.all_reduce(x, _operation(op))
    return [_combined(op, dtype)], [x]


def _reduce(op: str, dtype: torch.dtype, device: str) -> tuple[Numbers, Numbers]:
    x = _input(dtype, device)
    dist.reduce(x, 0, _operation(op))
    return ([_combined(op, dtype)], [x]) if dist.get_rank() == 0 else ([], [])


def _reduce_scatter(op: str, dtype: torch.dtype, device: str) -> tuple[Numbers, Numbers]:
    out = torch.zeros(ELEMENTS, dtype=dtype, device=device)
    dist.reduce_scatter(out, _shares(dtype, device), _operation(op))
    return [_combined(op, dtype, dist.get_rank())], [out]


def _reduce_scatter_single(op: str, dtype: torch.dtype, device: str) -> tuple[Numbers, Numbers]:
    out = torch.zeros(ELEMENTS, dtype=dtype, device=device)
    dist.reduce_scatter_single(out, torch.cat(_shares(dtype, device)), _operation(op))
    return [_combined(op, dtype, dist.get_rank())], [out]


def _broadcast(dtype: torch.dtype, device: str) -> tuple[Numbers, Numbers]:
    x = _input(dtype, device)
    dist.broadcast(x, 0)
    return [_numbers(0, dtype)], [x]


def _all_gather(dtype: torch.dtype, device: str) -> tuple[Numbers, Numbers]:
    outs = _rooms(dtype, device)
    dist.all_gather(outs, _input(dtype, device))
    return [_numbers(rank, dtype) for rank in range(dist.get_world_size())], outs


def _all_gather_single(dtype: torch.dtype, device: str) -> tuple[Numbers, Numbers]:
    out = torch.cat(_rooms(dtype, device))
    dist.all_gather_single(out, _input(dtype, device))
    return [torch.cat([_numbers(rank, dtype) for rank in range(dist.get_world_size())])], [out]


def _gather(dtype: torch.dtype, device: str) -> tuple[Numbers, Numbers]:
    outs = _rooms(dtype, device) if dist.get_rank() == 0 else None
    dist.gather(_input(dtype, device), outs)
    return [_numbers(rank, dtype) for rank in range(len(outs or []))], outs or []


def _scatter(dtype: torch.dtype, device: str) -> tuple[Numbers, Numbers]:
    out = torch.zeros(ELEMENTS, dtype=dtype, device=device)
    dist.scatter(out, _shares(dtype, device) if dist.get_rank() == 0 else None)
    return [_numbers(0, dtype, dist.get_rank())], [out]


def _all_to_all(dtype: torch.dtype, device: str) -> tuple[Numbers, Numbers]:
    outs = _rooms(dtype, device)
    dist.all_to_all(outs, _shares(dtype, device))
    return [_numbers(rank, dtype, dist.get_rank()) for rank in range(len(outs))], outs


def _all_to_all_single(dtype: torch.dtype, device: str) -> tuple[Numbers, Numbers]:
    out = torch.cat(_rooms(dtype, device))
    dist.all_to_all_single(out, torch.cat(_shares(dtype, device)))
    return [torch.cat([_numbers(rank, dtype, dist.get_rank()) for rank in range(dist.get_world_size())])], [out]


def _send(dtype: torch.dtype, device: str) -> tuple[Numbers, Numbers]:
    rank, size = dist.get_rank(), dist.get_world_size()
    out = torch.zeros(ELEMENTS, dtype=dtype, device=device)
    sending = dist.isend(_input(dtype, device), (rank + 1) % size)
    dist.recv(out, (rank - 1) % size)
    sending.wait()
    return [_numbers((rank - 1) % size, dtype)], [out]


def _sparse(dtype: torch.dtype, device: str) -> tuple[Numbers, Numbers]:
    if dtype.is_complex:
        raise TypeError("torch gives every backend a copy of a complex sparse tensor, so that the sum is lost")
    x = torch.sparse_coo_tensor(
        torch.arange(ELEMENTS, device=device)[None], _input(dtype, device), check_invariants=True
    )
    dist.all_reduce(x)
    return [_combined("SUM", dtype)], [x.to_dense()]


def _shares(dtype: torch.dtype, device: str) -> Numbers:
    """Return the input of this rank for each rank."""
    return [_input(dtype, device, rank) for rank in range(dist.get_world_size())]


def _rooms(dtype: torch.dtype, device: str) -> Numbers:
    return [torch.zeros(ELEMENTS, dtype=dtype, device=device) for _ in range(dist.get_world_size())]


def _alike(things: Iterable[Any], key: Callable[[Any], Hashable]) -> list[list[Any]]:
    """Return the things in lists by equal key, in order."""
    found: dict[Hashable, list[Any]] = {}
    for thing in things:
        found.setdefault(key(thing), []).append(thing)
    return list(found.values())


def _names(operations: list[str]) -> str:
    """Return the names of operations for a row; reductions with their operators."""
    by_op = _alike((name.partition(" ") for name in operations), lambda parts: parts[2])
    names = [(", ".join(name for name, _, _ in same), same[0][2]) for same in by_op]
    rows = _alike(names, lambda row: (row[0], bool(row[1])))
    return "<br>".join(f"{same[0][0]} {', '.join(op for _, op in same)}".strip() for same in rows)


if __name__ == "__main__":
    dist.init_process_group("covey", store=dist.HashStore(), rank=0, world_size=1)
    print(guide())
    dist.destroy_process_group()
