"""A program on covey ends: with its groups destroyed or not, right after asynchronous work, and after failures.

This module is also the program: it forks ranks from a process that has imported torch once, and they fall off its end
as a script does, through the whole finalization of the interpreter. (Children of multiprocessing skip that.)
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.support import forked
from tests.support.seeds import seeds
from tests.support.waiting import DEADLINE

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[2]
TURNS = len(seeds(2))
"""Of two ranks each."""


def ends_of(scene: str, times: int) -> tuple[list[list[int]], str]:
    """Play a scene so many times; return how each of its ranks ended each time, and all that was said to stderr."""
    with tempfile.TemporaryDirectory() as folder:
        process = forked.FinalizedTorchPopen(
            [sys.executable, "-m", "tests.torch.test_exit", scene, str(times), folder],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=forked.PIPE,
            stderr=forked.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            out, errors = process.communicate(timeout=DEADLINE)
            assert process.returncode == 0, errors
            return [[int(word) for word in line.split()] for line in out.splitlines()], errors
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # the forks too
                process.communicate()


@pytest.mark.parametrize("scene", [pytest.param("destroy", marks=pytest.mark.thorough), "leave"])
def test_ranks_that_have_just_done_something_end_without_a_word(scene: str) -> None:
    ends, errors = ends_of(scene, TURNS)
    assert ends == [[0, 0]] * TURNS
    assert errors == ""


@pytest.mark.parametrize(
    "scene", ["lose", *(pytest.param(scene, marks=pytest.mark.thorough) for scene in ("wait_in_vain", "abort"))]
)
def test_ranks_that_saw_a_failure_end_as_others_do(scene: str) -> None:
    ends, errors = ends_of(scene, TURNS - 1)
    assert "Traceback" not in errors, errors
    assert ends == [[0, 0, -signal.SIGKILL] if scene == "lose" else [0, 0]] * (TURNS - 1)
    assert "terminate" not in errors


def test_a_rank_that_raises_ends_with_its_traceback_and_not_in_the_middle_of_another_thread() -> None:
    ends, errors = ends_of("blunder", TURNS - 1)
    assert ends == [[1, 1]] * (TURNS - 1)
    assert errors.count("ZeroDivisionError") == 2 * (TURNS - 1)


# The program


def destroy(rank: int, store: str) -> None:
    leave(rank, store)
    dist.destroy_process_group()


def leave(rank: int, store: str) -> None:
    """Return while callbacks of what has just ended may still run."""
    dist.init_process_group("covey", init_method=f"file://{store}", rank=rank, world_size=2)
    works = [dist.all_reduce(torch.full((1000,), float(rank + step)), async_op=True) for step in range(4)]
    ends = [work.get_future().then(lambda ended: ended.value()[0].sum().item()) for work in works]
    assert ends[0].wait() == 1000
    works[-1].wait()


def lose(rank: int, store: str) -> None:
    """Rank 2 is killed while the others wait for it; one of them destroys its groups then, the other does not."""
    dist.init_process_group("covey", init_method=f"file://{store}", rank=rank, world_size=3)
    kept = dist.FileStore(f"{store}-word", 3)
    if rank == 2:
        kept.wait(["posted by 0", "posted by 1"], timedelta(seconds=DEADLINE))
        os.kill(os.getpid(), signal.SIGKILL)
    work = dist.all_reduce(torch.ones(1000), async_op=True)
    future = work.get_future()
    kept.set(f"posted by {rank}", "yes")
    with pytest.raises(covey.PeerLostError, match="rank 2"):
        work.wait()
    with pytest.raises(RuntimeError, match="rank 2"):
        future.wait()
    if rank == 0:
        dist.destroy_process_group()


def wait_in_vain(rank: int, store: str) -> None:
    """Rank 1 comes to nothing before rank 0 has given up; rank 0 leaves without a destroy."""
    dist.init_process_group("covey", init_method=f"file://{store}", rank=rank, world_size=2)
    group = dist.new_group([0, 1], timeout=timedelta(seconds=0.2))
    kept = dist.FileStore(f"{store}-word", 2)
    if rank == 0:
        with pytest.raises(covey.DeadlineError, match="rank 1"):
            dist.all_reduce(torch.ones(3), group=group)
        kept.set("given up", "yes")
    else:
        kept.wait(["given up"], timedelta(seconds=DEADLINE))
        dist.destroy_process_group()


def abort(rank: int, store: str) -> None:
    """Both wait for messages that never come, rank 0 with nobody who asks what became of it."""
    dist.init_process_group("covey", init_method=f"file://{store}", rank=rank, world_size=2)
    receiving = dist.irecv(torch.ones(3), 1 - rank)
    kept = dist.FileStore(f"{store}-word", 2)
    if rank == 0:
        receiving.get_future().then(lambda ended: ended.value())
        kept.wait(["posted"], timedelta(seconds=DEADLINE))
        dist.distributed_c10d._abort_process_group()
    else:
        kept.set("posted", "yes")
        with pytest.raises(covey.ClosedError, match="rank 0"):
            receiving.wait()


def blunder(rank: int, store: str) -> None:
    leave(rank, store)
    print(1 // 0)


SCENES = (destroy, leave, lose, wait_in_vain, abort, blunder)


def play(scene: Callable[[int, str], None], times: int, folder: str) -> tuple[int, str] | None:
    """Fork the ranks of each time and print how they ended; return rank and store in the forks, None at the end."""
    for turn in range(times):
        ranks = []
        for rank in range(3 if scene is lose else 2):
            ranks.append(os.fork())
            if ranks[-1] == 0:
                return rank, f"{folder}/{turn}"
        print(*[os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks], flush=True)
    return None


if __name__ == "__main__":
    import torch
    import torch.distributed as dist

    import covey
    import covey.torch.backend.backend

    torch.set_num_threads(1)
    gc.freeze()  # a fork would copy all of torch to look for garbage in it at its end
    chosen = next(scene for scene in SCENES if scene.__name__ == sys.argv[1])
    if (place := play(chosen, int(sys.argv[2]), sys.argv[3])) is not None:
        chosen(*place)
