"""Checkpoints on covey groups, torch's own and covey's: from one number of ranks to another."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tests.support.torch_ranks import Lost, run_torch_ranks
from tests.support.waiting import DEADLINE
from tests.torch.equality import adam, batch, moments, share, small_model, start, whole
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import covey
import covey.torch
from covey.base.errors import CheckpointError, ConfigError
from covey.torch.training.checkpoint import steps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def sharded(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for index in (0, 2, 4):
        fully_shard(model[index], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def step_on(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, rows: slice) -> None:
    optimizer.zero_grad()
    model(batch(step)[rows]).square().mean().backward()
    optimizer.step()


def go_on(rank: int, size: int, store: str, folder: str, turn: int, kind: str) -> None:
    """Go on from what the ranks of the turn before left, make a step, and leave it to those of the next."""
    start(rank, size, store)
    warnings.simplefilter("ignore", FutureWarning)
    reference = small_model()
    optimizer = adam(reference)
    for step in range(turn):
        step_on(reference, optimizer, step, slice(None))

    model = sharded(small_model()) if kind == "sharded" else DistributedDataParallel(small_model())
    ours = adam(model)
    if turn:
        with torch.no_grad():  # nothing of what is loaded is there already
            for parameter in model.parameters():
                parameter.fill_(rank)
        _load(model, ours, f"{folder}/{turn - 1}")
        torch.testing.assert_close(
            [*map(whole, model.parameters()), *moments(ours)],
            [*map(whole, reference.parameters()), *moments(optimizer)],
            rtol=1e-4,
            atol=1e-5,
        )
    step_on(model, ours, turn, share(rank, size))
    _save(model, ours, f"{folder}/{turn}", is_async=turn % 2 == 1)


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def _load(model: nn.Module, optimizer: torch.optim.Optimizer, path: str) -> None:
    state = _state(model, optimizer)
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def _save(model: nn.Module, optimizer: torch.optim.Optimizer, path: str, *, is_async: bool) -> None:
    """Save; in the background the ranks go on with operations of the same group while the writers have theirs."""
    if not is_async:
        dcp.save(_state(model, optimizer), checkpoint_id=path)
        return
    saving = dcp.async_save(_state(model, optimizer), checkpoint_id=path)
    for step in range(5):
        step_on(model, optimizer, step, slice(None))
    saving.result(timeout=DEADLINE)


@pytest.mark.parametrize(
    "turns",
    [
        [(2, "sharded"), (3, "sharded"), (1, "sharded")],
        pytest.param([(2, "whole"), (3, "sharded"), (2, "whole")], marks=pytest.mark.thorough),
    ],
    ids=["sharded", "whole"],
)
def test_torch_loads_on_any_number_of_ranks_what_others_saved(tmp_path: Path, turns: list[tuple[int, str]]) -> None:
    for turn, (size, kind) in enumerate(turns):
        run_torch_ranks(size, go_on, str(tmp_path), turn, kind)


def wrapped(rank: int, size: int, store: str, folder: str, turn: int) -> None:
    """The same with covey.torch.save and load, in the background."""
    start(rank, size, store)
    reference, model = small_model(), sharded(small_model())
    state = {"model": model, "optimizer": adam(model), "steps": turn}
    if turn:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(rank)
        assert covey.torch.load(state, folder) == state["steps"] == turn
    optimizer = adam(reference)
    for step in range(turn + 1):
        step_on(reference, optimizer, step, slice(None))
    step_on(model, state["optimizer"], turn, share(rank, size))
    torch.testing.assert_close(
        [*map(whole, model.parameters()), *moments(state["optimizer"])],
        [*map(whole, reference.parameters()), *moments(optimizer)],
        rtol=1e-4,
        atol=1e-5,
    )
    saving = covey.torch.save(state | {"steps": turn + 1}, folder, step=turn + 1, async_=True)
    dist.all_reduce(torch.ones(3))
    saving.wait(DEADLINE)


def test_a_state_saved_by_covey_is_loaded_on_another_number_of_ranks(tmp_path: Path) -> None:
    for turn, size in enumerate((2, 4)):
        run_torch_ranks(size, wrapped, str(tmp_path / "kept"), turn)


def without_a_folder(rank: int, size: int, store: str, turn: int) -> None:
    """Rows sharded over some ranks, columns over others, and a model; no folder is given."""
    sys.argv[0] = "/train.py"  # names the folder of a program
    start(rank, size, store)
    mesh = init_device_mesh("cpu", (size,) if size < 4 else (2, 2))
    whole_rows, uneven = torch.arange(35.0).view(5, 7), torch.arange(3.0) - 1
    places = {2: [Shard(0)], 3: [Shard(1)], 4: [Shard(1), Shard(0)]}[size]
    model = small_model()
    optimizer = adam(model)

    def state(factor: float) -> dict[str, Any]:
        rows = distribute_tensor(whole_rows * factor, mesh, places)
        few = distribute_tensor(uneven * factor, mesh, [Shard(0), Replicate()][: mesh.ndim])
        return {"model": model, "optimizer": optimizer, "data": [rows, {"few": few}], "steps": (turn, "done")}

    with pytest.raises(ConfigError, match=r"rank 1 cannot save its state|state\.odd is a object"):
        covey.torch.save({"odd": object() if rank == 1 else 0}, step=turn, process_group=dist.group.WORLD)
    if turn:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(rank)
        found = state(0)
        assert covey.torch.load(found) == turn - 1
        assert found["steps"] == (turn - 1, "done")
        assert torch.equal(found["data"][0].full_tensor(), whole_rows * turn)
        assert torch.equal(found["data"][1]["few"].full_tensor(), uneven * turn)
    reference = small_model()
    ours = adam(reference)
    for step in range(turn + 1):
        step_on(reference, ours, step, slice(None))
    step_on(model, optimizer, turn, slice(None))
    torch.testing.assert_close([*model.parameters(), *moments(optimizer)], [*reference.parameters(), *moments(ours)])
    saving = covey.torch.save(state(turn + 1), step=turn, async_=True)
    dist.all_reduce(torch.ones(3))
    saving.wait(DEADLINE)


def test_a_state_without_a_folder_is_loaded_on_other_meshes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COVEY_HOME", str(tmp_path))
    for turn, size in enumerate((2, 4, 3)):
        run_torch_ranks(size, without_a_folder, turn)


class OddError(Exception):
    """One that other processes cannot make again."""

    def __init__(self, what: str, where: str) -> None:
        super().__init__(f"{what} in {where}")


class Broken:
    """What cannot tell its state."""

    def state_dict(self) -> dict[str, Any]:
        raise OddError("a fuse", "the attic")

    def load_state_dict(self, _: dict[str, Any]) -> None:
        raise AssertionError


@contextlib.contextmanager
def no_room_for(size: int) -> Iterator[None]:
    """Have a disk that is full after `size` bytes of any file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def fail_on_one(rank: int, size: int, store: str, folder: str) -> list[tuple[type, str]]:
    """Save where something is wrong on one rank only; return what this one was told each time."""
    start(rank, size, store)
    kept = Path(folder) / "kept"
    (Path(folder) / "file").touch()
    mesh = init_device_mesh("cpu", (size,))
    rows = torch.arange(size * 4096.0)

    def state(step: int, **more: Any) -> dict[str, Any]:
        return {"rows": distribute_tensor(rows * step, mesh, [Shard(0)]), "step": step, **more}

    told: list[tuple[type, str]] = []

    def fail(place: Any = kept, *, room: int | None = None, async_: bool = False, **more: Any) -> None:
        limited = no_room_for(room) if room is not None else contextlib.nullcontext()
        with limited, pytest.raises((ConfigError, CheckpointError, OSError)) as raised:
            covey.torch.save(state(2, **more), place, step=2, async_=async_).wait(DEADLINE)
        told.append((type(raised.value), str(raised.value)))
        dist.barrier()
        assert os.listdir(kept) == ["step-0000000001"]
        loaded = state(7)
        assert covey.torch.load(loaded, kept) == loaded["step"] == 1
        assert torch.equal(loaded["rows"].full_tensor(), rows)

    covey.torch.save(state(1), kept, step=1)
    for async_ in (False, True):
        fail(value=(lambda: 0) if rank == 1 else None, async_=async_)
        fail(value=Broken() if rank == 2 else None, async_=async_)
        fail(kept if rank != 1 else Path(folder) / "file" / "below", async_=async_)
        fail(room=8192 if rank == 2 else None, async_=async_)
        fail(room=1000 if rank == 0 else None, async_=async_, value="long " * 1000)

    saving = covey.torch.save(state(3), kept if rank != 1 else Path(folder) / "file", step=3, async_=True)
    if rank == 0:
        with pytest.raises(CheckpointError, match="step 3 could not be written: rank 1"):
            saving.wait(DEADLINE)
    with pytest.raises(CheckpointError, match="step 3 could not be written: rank 1"):  # the others did not ask yet
        covey.torch.save(state(4), kept, step=4)
    covey.torch.save(state(4), kept, step=4)
    assert sorted(os.listdir(kept)) == ["step-0000000001", "step-0000000004"]
    return told


def test_a_save_that_fails_on_one_rank_fails_on_all_and_leaves_the_earlier_one_and_no_other(tmp_path: Path) -> None:
    for told in run_torch_ranks(3, fail_on_one, str(tmp_path)):
        assert told[5:] == told[:5]  # in the background as well
        kinds = [ConfigError, CheckpointError, CheckpointError, CheckpointError, OSError]
        assert [kind for kind, _ in told[:5]] == kinds
        unpicklable, odd, in_the_way, full, full_at_once = (text for _, text in told[:5])
        assert "value of the state cannot be saved: " in unpicklable
        assert "<lambda>" in unpicklable
        assert odd == "OddError: a fuse in the attic"
        assert "the checkpoint of step 2 could not be written: rank 1: NotADirectoryError" in in_the_way
        assert "the checkpoint of step 2 could not be written: rank 2: " in full
        assert "File too large" in full_at_once


def leave_while_it_is_written(_rank: int, _size: int, _store: str, folder: str) -> None:
    go_on, fsync = threading.Event(), os.fsync

    def fsync_slowly(fd: Any) -> None:
        if go_on.wait(DEADLINE):
            fsync(fd)

    os.fsync = fsync_slowly  # a slow disk
    saving = covey.torch.save({"x": torch.arange(1 << 23)}, folder, step=5, async_=True)
    with pytest.raises(covey.DeadlineError, match="still being written"):
        saving.wait(0.001)
    threading.Timer(0.2, go_on.set).start()  # this process would have ended by then


def test_a_process_does_not_end_before_what_it_saves_is_written(tmp_path: Path) -> None:
    run_torch_ranks(1, leave_while_it_is_written, str(tmp_path))
    x = torch.zeros(1 << 23, dtype=torch.int64)
    assert covey.torch.load(state := {"x": x}, tmp_path) == 5
    assert state["x"] is x  # in place
    assert torch.equal(x, torch.arange(1 << 23))
    other = {"x": torch.zeros(2, 2)}
    covey.torch.load(other, tmp_path)
    assert other["x"].shape == (1 << 23,)  # the shape does not allow that


def die_in_a_save(rank: int, size: int, store: str, folder: str, async_: bool) -> tuple[str, float]:
    """Rank 1 is killed when it opens its file of the second checkpoint; return what the others are told, and when."""
    start(rank, size, store)
    mesh = init_device_mesh("cpu", (size,))
    rows = torch.arange(size * 10.0)
    covey.torch.save({"rows": distribute_tensor(rows, mesh, [Shard(0)])}, folder, step=1, async_=async_).wait(DEADLINE)

    def die(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and str(arguments[0]).endswith("__1_0.distcp"):
            os.kill(os.getpid(), signal.SIGKILL)

    if rank == 1:
        sys.addaudithook(die)
    began = time.monotonic()
    with pytest.raises(covey.PeerLostError) as raised:
        covey.torch.save({"rows": distribute_tensor(rows * 2, mesh, [Shard(0)])}, folder, step=2, async_=async_).wait(
            DEADLINE
        )
    return str(raised.value), time.monotonic() - began


@pytest.mark.parametrize("async_", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_a_rank_killed_in_a_save_is_named_by_the_others_and_the_earlier_checkpoint_is_there(
    tmp_path: Path, async_: bool, promised: Callable[[float], float]
) -> None:
    first, lost, last = run_torch_ranks(3, die_in_a_save, str(tmp_path), async_)
    assert lost is Lost
    for text, seconds in (first, last):
        assert "rank 1" in text
        assert seconds < promised(10)
    assert steps(tmp_path) == [1]
    state = {"rows": torch.zeros(30)}
    assert covey.torch.load(state, tmp_path) == 1
    assert state["rows"].tolist() == list(range(30))
