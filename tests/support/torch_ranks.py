"""Ranks of torch as real processes, forked from one that has imported torch already: that takes seconds each time."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from tests.support.waiting import DEADLINE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess


_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "pytest",
        "torch.distributed",
        "torch.distributed.checkpoint",
        "torch.distributed.optim",
        "torch.distributed.pipelining",
        "torch.nn.parallel",
        "torch.distributed.fsdp",
        "torch.distributed.tensor",
        "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook",
        "covey.torch.backend.backend",
    ]
)


def all_here(rank: int, size: int, store: str) -> None:
    """Return once all ranks are here, without covey: a rank that dies then is missed in no operation before."""
    kept = dist.FileStore(f"{store}-here", size)
    kept.set(str(rank), "")
    kept.wait([str(other) for other in range(size)], timedelta(seconds=DEADLINE))


class Lost:
    """What a rank that was killed returned."""


def run_torch_ranks(size: int, program: Callable[..., Any], *args: Any, deadline: float = DEADLINE) -> list[Any]:
    """Run `program(rank, size, store, *args)` as every rank; return what they returned, `Lost` for those killed.

    `store` is the path of a file for `init_method="file://..."`.
    """
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        ranks = [stack.enter_context(_rank(rank, size, f"{folder}/store", program, args)) for rank in range(size)]
        ends = {connection: process for process, connection in ranks}
        results: dict[Connection, Any] = {}
        until = time.monotonic() + deadline
        while len(results) < size:
            left = [end for end in ends if end not in results]
            ready = wait(left, max(0.0, until - time.monotonic()))
            assert ready, f"{len(left)} of {size} ranks did not end within {deadline} s"
            for end in ready:
                assert end in ends
                results[end] = _result(end)
        for process, _ in ranks:
            process.join(max(0.0, until - time.monotonic()))
            assert process.exitcode in (0, -9), f"a rank ended with {process.exitcode}"
        return [results[connection] for _, connection in ranks]


def _result(end: Any) -> Any:
    try:
        error, result = end.recv()
    except EOFError:
        return Lost
    assert not error, error
    return result


@contextlib.contextmanager
def _rank(
    rank: int, size: int, store: str, program: Callable[..., Any], args: tuple[Any, ...]
) -> Iterator[tuple[BaseProcess, Connection]]:
    here, there = _context.Pipe(duplex=False)
    process = _context.Process(target=_serve, args=(there, rank, size, store, program, args), daemon=True)
    try:
        process.start()
    except BaseException:
        here.close()
        raise
    finally:
        there.close()
    try:
        yield process, here
    finally:
        here.close()
        process.kill()
        process.join()
        process.close()


def _serve(
    there: Connection, rank: int, size: int, store: str, program: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.chdir(Path(store).parent)
    try:
        there.send(("", program(rank, size, store, *args)))
    except BaseException:
        there.send((f"rank {rank}:\n{traceback.format_exc()}", None))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
