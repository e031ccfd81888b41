"""Ranks of torch as real processes, forked from one that has imported torch already: that takes seconds each time."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from tests.support import forked
from tests.support.waiting import DEADLINE

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection
    from typing import Self


SOURCE, ROOT = Path(__file__).parents[2] / "src", Path(__file__).parents[2]


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
        store = f"{folder}/store"
        ranks = [stack.enter_context(Started(_be_a_rank, rank, size, store, program, args)) for rank in range(size)]
        ends = [rank.end for rank in ranks]
        results: dict[Connection, Any] = {}
        until = time.monotonic() + deadline
        while len(results) < size:
            left = [end for end in ends if end not in results]
            ready = wait(left, max(0.0, until - time.monotonic()))
            assert ready, f"{len(left)} of {size} ranks did not end within {deadline} s"
            for end in ready:
                assert end in ends
                results[end] = _result(end)
        for rank in ranks:
            code = rank.process.wait(max(0.1, until - time.monotonic()))
            assert code in (0, -9), f"a rank ended with {code}"
        return [results[rank.end] for rank in ranks]


def _result(end: Any) -> Any:
    try:
        error, result = end.recv()
    except EOFError:
        return Lost
    assert not error, error
    return result


class Started:
    """A process that calls `function(connection, *args)`; the other end of the connection is `end`."""

    def __init__(self, function: Callable[..., None], *args: Any) -> None:
        self.end, there = multiprocessing.Pipe()
        path = os.pathsep.join((str(SOURCE), str(ROOT)))
        program = f"from tests.support.torch_ranks import serve; serve({there.fileno()})"
        try:
            self.process = forked.TorchPopen(
                [sys.executable, "-c", program],
                env=os.environ | {"PYTHONPATH": path},
                stdin=forked.DEVNULL,
                pass_fds=[there.fileno()],
            )
            self.end.send((function, args))
        except BaseException:
            self.end.close()
            raise
        finally:
            there.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end.close()
        self.process.kill()
        self.process.wait()


# In the process


def serve(descriptor: int) -> None:
    """Be the program of `Started`."""
    torch.set_num_threads(1)
    os.set_inheritable(descriptor, False)
    there = multiprocessing.connection.Connection(descriptor)
    function, args = there.recv()
    function(there, *args)


def _be_a_rank(
    there: Connection, rank: int, size: int, store: str, program: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    os.chdir(Path(store).parent)
    try:
        there.send(("", program(rank, size, store, *args)))
    except BaseException:
        there.send((f"rank {rank}:\n{traceback.format_exc()}", None))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
