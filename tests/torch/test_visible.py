"""torch's own tools see the operations of covey's process groups: its profiler, and modes that count them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from tests.support.torch_ranks import run_torch_ranks
from torch.distributed.tensor.debug import CommDebugMode

if TYPE_CHECKING:
    from collections.abc import Callable

    Calls = dict[str, Callable[[], Any]]


def calls(rank: int, size: int) -> Calls:
    """Return one call of each operation, by what torch's dispatcher calls it."""
    x, row, wide = torch.full((4,), 1.0 + rank), torch.zeros(4 * size), torch.arange(4.0 * size)
    rows = [torch.zeros(4) for _ in range(size)]
    lists: dict[str, Any] = {"gather_list": rows} if rank == 0 else {}
    given: dict[str, Any] = {"scatter_list": list(wide.chunk(size))} if rank == 0 else {}
    return {
        "allreduce_": lambda: dist.all_reduce(x.clone()),
        "reduce_": lambda: dist.reduce(x.clone(), 0),
        "broadcast_": lambda: dist.broadcast(x.clone(), 0),
        "allgather_": lambda: dist.all_gather(rows, x),
        "_allgather_base_": lambda: dist.all_gather_into_tensor(row, x),
        "_reduce_scatter_base_": lambda: dist.reduce_scatter_tensor(torch.zeros(4), wide),
        "reduce_scatter_": lambda: dist.reduce_scatter(torch.zeros(4), list(wide.chunk(size))),
        "alltoall_base_": lambda: dist.all_to_all_single(torch.zeros(4 * size), wide),
        "alltoall_": lambda: dist.all_to_all(rows, list(wide.chunk(size))),
        "gather_": lambda: dist.gather(x, **lists),
        "scatter_": lambda: dist.scatter(torch.zeros(4), **given),
        "allreduce_coalesced_": lambda: dist.all_reduce_coalesced([x.clone(), x.clone()]),
    }


def counted(rank: int, size: int, store: str) -> dict[str, dict[str, int]]:
    dist.init_process_group("covey", init_method=f"file://{store}", rank=rank, world_size=size)
    found = {}
    for name, call in calls(rank, size).items():
        with CommDebugMode() as mode:
            call()
            dist.barrier()
        found[name] = {str(op): count for op, count in mode.get_comm_counts().items()}
    x = torch.full((3,), 10.0**rank)
    with CommDebugMode():
        dist.all_reduce(x)
    assert x.tolist() == [11.0] * 3, "what is announced is also done, once"
    dist.destroy_process_group()
    return found


def test_comm_debug_mode_counts_every_operation_once() -> None:
    for found in run_torch_ranks(2, counted):
        assert found == {name: {f"c10d.{name}": 1} for name in found}
        assert len(found) == 12


def profiled(rank: int, size: int, store: str) -> list[tuple[str, str, float]]:
    dist.init_process_group("covey", init_method=f"file://{store}", rank=rank, world_size=size)
    x, message = torch.ones(1000), torch.zeros(5)
    with torch.profiler.profile(record_shapes=True) as profile:
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        dist.all_reduce(x)
        dist.send(message, 1) if rank == 0 else dist.recv(message, 0)
        dist.barrier()
    profile.export_chrome_trace(f"{store}-{rank}.json")
    with open(f"{store}-{rank}.json") as file:
        events = json.load(file)["traceEvents"]
    dist.destroy_process_group()
    shown = ("covey:", "c10d::")
    return [(each["name"], str(each.get("args", {})), each.get("dur", 0)) for each in events
            if each.get("name", "").startswith(shown)]  # fmt: skip


def test_the_profiler_shows_every_operation_with_its_sizes_group_and_duration() -> None:
    for rank, events in enumerate(run_torch_ranks(2, profiled)):
        names = [name for name, _, _ in events]
        assert names.count("covey:allreduce") == names.count("c10d::allreduce_") == 2
        assert names.count("covey:barrier") == 1
        assert names.count("covey:send" if rank == 0 else "covey:recv") == 1
        assert names.count("covey:param_comms") == 4
        assert all(duration > 0 for name, _, duration in events if name.startswith("covey:"))
        (told, *_) = [text for name, text, _ in events if name == "covey:param_comms"]
        for word in ("allreduce", "[1000]", "float32", "Group size"):
            assert word in told, told
