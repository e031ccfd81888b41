"""Functions that `covey.launch` runs as ranks, which import this module and nothing that takes long to import."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np


class PickyError(Exception):
    """An exception that pickle alone cannot repeat."""

    def __init__(self, message: str, *, code: int) -> None:
        super().__init__(message)
        self.code = code


class SecretiveError(Exception):
    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.lock = threading.Lock()


def place_and_sum(group: Any, scale: int, word: str) -> tuple[int, int, str, Any]:
    x = np.arange(5.0) * scale + group.rank
    group.all_reduce(x)
    return group.rank, group.size, word, x


def array_of(group: Any, count: int) -> Any:
    return np.arange(count) * (group.rank + 1)


def fail_in_rank_1(group: Any, kind: str) -> Any:
    if group.rank == 1:
        match kind:
            case "value":
                raise ValueError("one is not enough")
            case "picky":
                raise PickyError("fields kept", code=17)
            case "secretive":
                raise SecretiveError("cannot travel")
            case "exit":
                sys.exit(3)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "unpicklable result":
                return lambda: None
    group.all_reduce(np.ones(4))
    group.barrier()


def sum_among_survivors(group: Any, victims: tuple[int, ...]) -> tuple[tuple[int, ...], float]:
    group.barrier()
    if group.rank in victims:
        os.kill(os.getpid(), signal.SIGKILL)
    total = group.all_reduce(np.full(3, 10.0**group.rank))
    live = group.live
    group.barrier()  # no survivor leaves before all have looked
    return live, float(total[2])


def leave_a_child(group: Any, folder: str) -> int:
    return subprocess.Popen(["sleep", "1000"]).pid


def finish_all_but_rank_1(group: Any, folder: str) -> None:
    if group.rank == 1:
        note_pid(folder, "rank1")
    group.barrier()
    if group.rank == 1:
        threading.Event().wait()


def note_pid(folder: str, name: str) -> None:
    draft = Path(folder, f"{name}.draft")
    draft.write_text(str(os.getpid()))
    draft.rename(Path(folder, name))


def count_and_die(group: Any) -> dict[str, Any]:
    """Ranks 0 and 1 are killed, one after the other, while all count: no sum is lost or given twice.

    A split group of one has the store of the run, and its operations go on. Entries end with the ranks that set them.
    """
    alone = group.split(group.rank)
    store = alone.node.store
    store.set(f"alive/{group.rank}", "", until="member")
    sums = []
    for step in range(60):
        if group.rank == step // 20 - 1 and step % 20 == 10:
            os.kill(os.getpid(), signal.SIGKILL)
        sums.append(store.add("count", timeout=500))
        store.set(f"mark {group.rank}", str(sums[-1]))
        assert alone.all_reduce(step) == step
        group.barrier()  # the last sum of a rank counts the steps of all
    own, first, alive = store.get(f"mark {group.rank}"), store.get("mark 0"), store.keys("alive/")
    group.barrier()  # before a rank leaves
    return {"sums": sums, "own": own, "first": first, "alive": alive}
