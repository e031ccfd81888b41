"""Ranks on covey that are killed, late or at odds: the others say who it was, in time."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from tests.support.sets import first
from tests.support.torch_ranks import Lost, all_here, run_torch_ranks
from tests.support.waiting import DEADLINE
from tests.torch.equality import batch, share, small_model, start, train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import covey

if TYPE_CHECKING:
    from collections.abc import Callable


def replicated(model: nn.Module, _size: int) -> nn.Module:
    return DistributedDataParallel(model, bucket_cap_mb=0.0005)


def sharded(model: nn.Module, size: int) -> nn.Module:
    mesh = init_device_mesh("cpu", (size,))
    for index in (0, 2, 4):
        fully_shard(model[index], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def lose_one(rank: int, size: int, store: str, wrap: Any) -> tuple[str, str, float]:
    """The last rank is killed in the middle of backward; return what the others say, and within what time."""
    start(rank, size, store)
    model = wrap(small_model(), size)
    train(model, rows=share(rank, size))
    middle = getattr(model, "module", model)[2]
    if rank == size - 1:
        middle.register_full_backward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    all_here(rank, size, store)
    began = time.monotonic()
    try:
        model(batch(0)).sum().backward()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return "nothing", "", 0.0


@pytest.mark.parametrize("wrap", first(1, [replicated, sharded]), ids=lambda wrap: wrap.__name__)
def test_a_rank_killed_in_backward_is_named_by_the_others_within_two_seconds(
    wrap: Any, promised: Callable[[float], float]
) -> None:
    *survivors, lost = run_torch_ranks(3, lose_one, wrap)
    assert lost is Lost
    for kind, text, seconds in survivors:
        assert kind in ("RuntimeError", "PeerLostError")
        assert "rank 2" in text
        assert seconds < promised(2)


def start_again(rank: int, size: int, store: str) -> tuple[list[str], int]:
    """Rank 1 is killed; the others destroy their groups, meet anew with other ranks, and train on."""
    start(rank, size, store)
    pair = dist.new_group([0, 2])
    all_here(rank, size, store)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    said = []
    for group in (None, None):  # both are told of the loss
        with pytest.raises(covey.CoveyError) as raised:
            dist.all_reduce(torch.ones(3), group=group)
        said.append(f"{type(raised.value).__name__} {raised.value}")
    x = torch.full((2,), rank + 1.0)
    dist.all_reduce(x, group=pair)  # nobody is missing there
    assert x.tolist() == [4.0, 4.0]
    dist.destroy_process_group()
    start(rank // 2, 2, f"{store}-again")
    train(replicated(small_model(), 2), rows=share(rank // 2, 2)).close_to(train(small_model()))
    return said, dist.get_world_size()


def test_after_a_loss_the_others_destroy_their_groups_and_start_again() -> None:
    first, lost, last = run_torch_ranks(3, start_again)
    assert lost is Lost
    for said, size in (first, last):
        assert size == 2
        assert all(words.startswith("PeerLostError rank 1") for words in said)


def fork_while_waiting(rank: int, size: int, store: str) -> tuple[int, list[float]]:
    """Rank 0 forks in the middle of an operation, while a thread tells of another; return how the fork ended."""
    start(rank, size, store)
    x = torch.full((3,), rank + 1.0)
    code = 0
    if rank == 0:
        work = dist.all_reduce(x, async_op=True)
        future = work.get_future()
        with work._notices._changed:
            child = os.fork()
            if not child:
                os._exit(0 if future.done() else 1)
        until = time.monotonic() + DEADLINE
        while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < until:
            time.sleep(0.01)
        if not ended[0]:
            os.kill(child, signal.SIGKILL)
            ended = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(ended[1])
        dist.send(x, 1)
        work.wait()
    else:
        dist.recv(torch.empty(3), 0)
        dist.all_reduce(x)
    return code, x.tolist()


def test_futures_of_a_fork_are_ended_whoever_was_at_them() -> None:
    assert run_torch_ranks(2, fork_while_waiting) == [(0, [3.0, 3.0, 3.0])] * 2
