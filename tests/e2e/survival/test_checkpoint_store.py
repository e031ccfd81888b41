"""Checkpoints of real processes that are killed at any moment: what was saved is loaded by those that come after."""

from __future__ import annotations

import json
import random
import shutil
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.sets import first
from tests.support.survivors import Members, covey, np, os, say, signal, threading

if TYPE_CHECKING:
    from pathlib import Path

ROWS = 500_000


def save_until_killed(folders: list[str], on_loss: covey.OnLoss, rows: int, count: int) -> dict[str, Any]:
    with covey.join(on_loss=on_loss) as group:
        place = folders[group.rank]
        saved: list[Any] = []
        for step in range(1, count + 1):
            say("saving", step=step)
            state = {"w": np.random.default_rng(step).standard_normal(rows), "step": step}
            try:
                report = group.checkpoint.save(state, step, folder=place).wait()
            except covey.CoveyError as error:
                return {"saved": saved, "error": type(error).__name__, "text": str(error)}
            saved.append([step, list(report.ranks)])
        return {"saved": saved, "error": "", "text": ""}


def load_all(folders: list[str], rows: int) -> int:
    with covey.join() as group:
        loaded, step = group.checkpoint.load(folder=folders[group.rank])
        assert loaded["step"] == step
        assert loaded["w"].tobytes() == np.random.default_rng(step).standard_normal(rows).tobytes()
        assert group.all_gather_object(step) == [step] * group.size
        return step


def loaded_by(folders: list[str]) -> int:
    with Members(len(folders), load_all, folders, ROWS) as members:
        (step,) = set(members.results(range(len(folders))))
        return int(step)


@pytest.fixture
def folders(tmp_path: Path) -> list[str]:
    return [str(tmp_path / f"machine-{rank}") for rank in range(3)]


@pytest.mark.parametrize("on_loss", first(1, ["continue", "raise"]))
def test_a_rank_that_is_killed_while_it_saves_takes_no_checkpoint_with_it(on_loss: str, folders: list[str]) -> None:
    count = 6
    with Members(3, save_until_killed, folders, on_loss, ROWS, count) as members:
        members.await_said(2, "saving", 4)
        threading.Event().wait(random.random() * 0.2)
        members.kill(2)
        told = members.results([0, 1])
    shutil.rmtree(folders[2])  # for good, with its disk
    last = told[0]["saved"][-1][0]
    if on_loss == "continue":
        assert [each["error"] for each in told] == ["", ""]
        assert [each["saved"] for each in told] == [told[0]["saved"]] * 2
        assert told[0]["saved"][-1] == [count, [0, 1]]
        assert loaded_by(folders[:2]) == count
        assert loaded_by([folders[0]]) == count, "it has a copy of the other's"
    else:
        assert {each["error"] for each in told} <= {"PeerLostError", "ClosedError"}
        assert all("rank 2" in each["text"] for each in told)
        assert loaded_by(folders[:2]) in (last, last + 1)


def save_with_parts(folders: list[str]) -> dict[str, Any]:
    with covey.join(on_loss="continue") as group:
        place = folders[group.rank]
        whole = np.arange(30.0)
        part = covey.Shard(whole[10 * group.rank : 10 * group.rank + 10])
        group.checkpoint.save({"w": part}, 1, folder=place).wait()
        if group.rank == 2:
            say("saved")
            threading.Event().wait()  # until it is killed
        group.barrier()  # ends when rank 2 is lost; ranks that looked at `live` could call it different times
        box = covey.Shard(part.array, shape=(30,), offset=(10 * group.rank,))
        work = group.checkpoint.save({"w": box}, 2, folder=place)
        error = work.exception()
        loaded = group.checkpoint.load({"w": covey.Shard(np.zeros(15))}, folder=place)
        return {"error": str(error), "step": loaded.step, "part": loaded.state["w"].array.tolist()}


def test_the_last_checkpoint_stays_if_a_part_of_the_state_is_lost(folders: list[str]) -> None:
    with Members(3, save_with_parts, folders) as members:
        members.await_said(2, "saved")
        members.kill(2)
        told = members.results([0, 1])
    assert all("'w'" in each["error"] and "20 of 30 elements" in each["error"] for each in told)
    assert [each["step"] for each in told] == [1, 1]
    assert told[0]["part"] + told[1]["part"] == [float(n) for n in range(30)], "with the part of the lost rank"


def save_and_die(folders: list[str], rows: int, first_step: int, fuse: int) -> int:
    """Save two checkpoints, and let rank 0 kill itself before its `fuse`-th operation on files in the second."""
    from covey.runtime.shards import folder as module

    class Fused:
        left = 0

        def __getattr__(self, name: str) -> Any:
            if name in ("write", "fsync", "rename", "mkdir", "close", "link", "unlink", "open", "listdir"):
                self.left -= 1
                if self.left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
            return getattr(os, name)

    fused = Fused()
    vars(module)["os"] = fused
    with covey.join() as group:
        for step in (first_step, first_step + 1):
            if step > first_step and group.rank == 0:
                fused.left = fuse
            state = {"w": np.random.default_rng(step).standard_normal(rows), "step": step}
            group.checkpoint.save(state, step, folder=folders[group.rank]).wait()
            say("saved", step=step)
        fused.left = 0
        return first_step + 1


@pytest.mark.parametrize("part", first(1, range(4)))
def test_a_process_that_dies_before_any_write_leaves_a_whole_checkpoint(part: int, folders: list[str]) -> None:
    two, step = folders[:2], 1
    for fuse in range(1 + 3 * part, 70, 12):
        with Members(2, save_and_die, two, ROWS, step, fuse) as members:
            members.await_said(1, "saved")
            for rank in range(2):
                members._processes[rank].wait(60)
            ended = members.all_said(0, "saved")
        loaded = loaded_by(two)
        assert loaded in ((step, step + 1) if len(ended) < 2 else (step + 1,)), f"fuse {fuse}: {json.dumps(ended)}"
        step = loaded + 1
