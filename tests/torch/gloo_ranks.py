"""Ranks of a gloo group: forks of one process that runs a test module as its program, so torch is imported once."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from tests.support import forked

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[2]


def run_ranks(module: str, size: int, folder: Path, *arguments: str, timeout: float = 60.0) -> list[Any]:
    """Run `python -m module` and return what `be_a_rank` in it left for each rank, in order of ranks."""
    folder.mkdir(parents=True, exist_ok=True)
    process = forked.TorchPopen(
        [sys.executable, "-m", module, str(size), str(folder), *arguments],
        cwd=ROOT,
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        stderr=forked.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        _, errors = process.communicate(timeout=timeout)
        assert process.returncode == 0, errors
        return [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(size)]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # the forks too
            process.communicate()


def be_a_rank(body: Callable[..., Any]) -> None:
    """Be the program of `run_ranks`: run `body(rank, *arguments)` as every rank of a group and leave the results."""
    size, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    store = folder / "store"
    store.unlink(missing_ok=True)
    ranks = []
    for rank in range(size):
        ranks.append(os.fork())
        if ranks[-1] == 0:
            try:
                dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
                (folder / f"{rank}.pickle").write_bytes(pickle.dumps(body(rank, *sys.argv[3:])))
                dist.barrier()
                dist.destroy_process_group()
            except BaseException:
                print(f"rank {rank}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
                os._exit(1)
            os._exit(0)
    sys.exit(any([os.waitpid(rank, 0)[1] for rank in ranks]))  # all of them are waited for
