"""Checkpoints: whole or not at all, damage is named, and any number of ranks can load them."""

from __future__ import annotations

import collections
import json
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.waiting import DEADLINE
from tests.torch.gloo_ranks import be_a_rank, run_ranks
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from covey.base.errors import CheckpointError, ConfigError
from covey.net.host.run_notes import noted_checkpoints
from covey.torch.training.checkpoint import latest, load, save, steps
from covey.torch.training.sampler import ElasticSampler

Point = collections.namedtuple("Point", "x y")


def model_of(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 3))


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.5}])


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Two steps on gradients that differ by parameter, position and step, and need no forward pass of the group."""
    for step in (1, 2):
        for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            parameter.grad = parameter.detach() * (number + step)
        optimizer.step()


def whole(state: Any) -> Any:
    """The state with every sharded tensor put together."""
    if isinstance(state, dict):
        return {key: whole(value) for key, value in state.items()}
    if isinstance(state, DTensor):
        return state.full_tensor()
    return state.clone() if isinstance(state, torch.Tensor) else state


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def trained(seed: int) -> dict[str, Any]:
    model = model_of(seed)
    optimizer = optimizer_of(model)
    train(model, optimizer)
    return {"model": model, "optimizer": optimizer}


def fresh() -> dict[str, Any]:
    model = model_of(77)
    return {"model": model, "optimizer": optimizer_of(model)}


def states(state: dict[str, Any]) -> dict[str, Any]:
    return {key: whole(value.state_dict()) for key, value in state.items()}


def test_all_kinds_of_state_come_back_into_objects_that_never_made_a_step(tmp_path: Path) -> None:
    sampler = ElasticSampler(40, seed=3)
    sampler.take(7)
    loose = {3: torch.arange(4), "list": [torch.tensor(2.5), "text", (1, torch.ones(2, dtype=torch.bfloat16))]}
    state = trained(1) | {"sampler": sampler, "loose": loose, "step": 12, "point": Point(torch.zeros(0), None)}
    path = save(state, tmp_path, step=12).wait()
    assert path == tmp_path / "step-0000000012"
    loaded = fresh() | {"sampler": ElasticSampler(40), "loose": None, "step": None, "point": None}
    assert load(loaded, tmp_path) == 12
    for key in ("model", "optimizer", "sampler"):
        assert same(loaded[key].state_dict(), state[key].state_dict()), key
    assert same([loaded["loose"], loaded["step"], loaded["point"]], [loose, 12, state["point"]])
    part = {"step": 0}
    load(part, tmp_path)
    assert part == {"step": 12}
    with pytest.raises(ConfigError, match="has no scheduler; it has loose, model, optimizer, point, sampler, step"):
        load({"scheduler": None}, tmp_path)


def test_the_last_ones_are_kept_and_a_step_can_be_saved_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "new" / "folder"
    monkeypatch.setenv("COVEY_KEPT_FOLDER", str(tmp_path))
    assert latest(folder) is None
    with pytest.raises(ConfigError, match="no checkpoint in"):
        load({}, folder)
    for step in (1, 2, 30, 4):
        save({"value": step, "tensor": torch.tensor(step)}, folder, step=step, keep=2)
    assert steps(folder) == [4, 30]
    save({"value": "again", "tensor": torch.tensor(5)}, folder, step=30, keep=2)
    assert sorted(os.listdir(folder)) == ["step-0000000004", "step-0000000030.1"]
    assert noted_checkpoints(tmp_path)[-2:] == [str(folder / "step-0000000004"), str(folder / "step-0000000030.1")]
    state: dict[str, Any] = {"value": None, "tensor": None}
    assert load(state, folder) == latest(folder) == 30
    assert (state["value"], state["tensor"].item()) == ("again", 5)
    save({"value": "early"}, folder, step=2, keep=1)
    assert steps(folder) == [2, 30]  # what was just saved stays
    for step in (31, 32):
        save({"value": step}, folder, step=step, keep=None)
    assert steps(folder) == [2, 30, 31, 32]
    save({"value": 33}, folder, step=33)
    assert steps(folder) == [31, 32, 33]
    with pytest.raises(ConfigError, match=r"no checkpoint of step 4 .* there are \[31, 32, 33\]"):
        load(state, folder, step=4)
    with pytest.raises(ConfigError, match="keep=0"):
        save({}, folder, step=1, keep=0)
    with pytest.raises(ConfigError, match=r"models\.a is a Linear; put it at the top"):
        save({"models": {"a": torch.nn.Linear(1, 1)}}, folder, step=5)
    with pytest.raises(ConfigError, match=r"two tensors of the state are called a\.b"):
        save({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}, folder, step=5)


def test_a_damaged_file_is_named_and_nothing_is_loaded(tmp_path: Path) -> None:
    path = save(trained(1), tmp_path, step=1).wait()
    save(trained(2), tmp_path, step=2)
    names = sorted(os.listdir(path))
    assert names == [".metadata", "__0_0.distcp", "manifest.json", "structure.pickle"]
    state = fresh()
    untouched = states(state)
    for name in names:
        content = (path / name).read_bytes()
        flipped = bytearray(content)
        flipped[len(content) // 2] ^= 1
        for damage in (bytes(flipped), content[:-1], b"", None):
            (path / name).unlink()
            if damage is not None:
                (path / name).write_bytes(damage)
            if damage is None and name == "manifest.json":
                assert steps(tmp_path) == [2]  # not a checkpoint at all
                continue
            with pytest.raises(CheckpointError, match=rf"{name} .*other steps here: \[2\]") as caught:
                load(state, tmp_path, step=1)
            assert caught.value.files == (name,)
        (path / name).write_bytes(content)
    assert same(states(state), untouched)
    load(state, tmp_path, step=1)
    assert same(states(state), states(trained(1)))


def test_an_asynchronous_save_keeps_what_was_there_and_its_failure_is_not_lost(tmp_path: Path) -> None:
    state = trained(1)
    expected = states(state)
    saving = save(state, tmp_path, step=1, async_=True)
    train(state["model"], state["optimizer"])
    saving.wait(DEADLINE)
    assert saving.done()
    loaded = fresh()
    load(loaded, tmp_path)
    assert same(states(loaded), expected)
    (tmp_path / "file").write_text("in the way")
    save(state, tmp_path / "file", step=2, async_=True)
    with pytest.raises(OSError, match="file"):
        save(state, tmp_path, step=3)
    save(state, tmp_path, step=3)
    assert steps(tmp_path) == [1, 3]
    until = time.monotonic() + 500
    while any(thread.name == "covey-save" for thread in threading.enumerate()):
        assert time.monotonic() < until
        time.sleep(0.01)


def test_killed_at_any_moment_the_old_ones_or_the_new_one_can_be_used(tmp_path: Path) -> None:
    [deaths] = run_ranks("tests.torch.test_checkpoint", 1, tmp_path, "die", str(tmp_path))
    assert set(deaths) == {"open", *CHANGES}
    assert len(deaths) > 12


def die_at_every_moment(folder: Path) -> list[str]:
    """Save in a process that is killed before its n-th change to the folder, for every n; return what it died of."""
    dist.destroy_process_group()
    prepared, used = folder / "prepared", folder / "used"
    for step in (1, 2):
        save({"step": step, "tensor": torch.full((100,), float(step))}, prepared, step=step, keep=2)
    deaths: list[str] = []
    while True:
        shutil.copytree(prepared, used)
        report, tell = os.pipe()
        if (child := os.fork()) == 0:
            save_and_die(used, len(deaths), tell)
        os.close(tell)
        with open(report) as lines:
            event = lines.read()
        _, status = os.waitpid(child, 0)
        state: dict[str, Any] = {"step": None, "tensor": None}
        for found in steps(used):  # each that looks complete is
            assert load(state, used, step=found) == state["step"] == state["tensor"][7], event
        assert found in (2, 3), event
        assert found == 3 or steps(used) == [1, 2], event
        save({"step": 4, "tensor": torch.full((100,), 4.0)}, used, step=4, keep=2)  # and life goes on
        assert load(state, used) == 4
        assert len(os.listdir(used)) == 2
        shutil.rmtree(used)
        if status == 0:
            assert found == 3
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            return deaths
        assert os.WTERMSIG(status) == signal.SIGKILL
        deaths.append(event)


CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")


def save_and_die(folder: Path, moment: int, tell: int) -> None:
    touched = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal touched
        if event in CHANGES or (event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)):
            if touched == moment:
                os.write(tell, event.encode())
                os.kill(os.getpid(), signal.SIGKILL)
            touched += 1

    sys.addaudithook(hook)
    try:
        save({"step": 3, "tensor": torch.full((100,), 3.0)}, folder, step=3, keep=2)
    except BaseException:
        os._exit(1)
    os._exit(0)


def sharded(*, seed: int = 77) -> dict[str, Any]:
    """A model of FSDP2, which holds its parameters as DTensors, and its optimizer."""
    model = model_of(seed)
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    return {"model": model, "optimizer": optimizer_of(model)}


def in_two_ranks(rank: int, folder: Path) -> dict[str, Any]:
    result: dict[Any, Any] = {}
    state = sharded()
    assert load(state, folder / "one") == 1
    assert all(isinstance(parameter, DTensor) for parameter in state["model"].parameters())
    assert isinstance(state["optimizer"].state_dict()["state"][0]["exp_avg"], DTensor)
    result["from one"] = states(state)

    state = sharded(seed=5)
    train(state["model"], state["optimizer"])
    result["two"] = states(state)
    saving = save(state, folder / "two", step=8, async_=True)
    for number in range(20):  # the group is free for other things
        total = torch.tensor(float(rank + number))
        dist.all_reduce(total)
        assert total == 1 + 2 * number
    train(state["model"], state["optimizer"])
    saving.wait(DEADLINE)
    save(state, folder / "two", step=9)
    result["files"] = sorted(os.listdir(folder / "two" / "step-0000000009"))

    for step in (8, 9):
        load(again := sharded(), folder / "two", step=step)
        result["two again", step] = states(again)

    wrapped = DistributedDataParallel(model_of(rank))
    save({"model": wrapped}, folder / "wrapped", step=1)
    result["wrapped"] = wrapped.module.state_dict()

    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    save({"rank": rank, "t": torch.tensor(rank)}, folder / f"of {rank}", step=rank, process_group=alone)
    mine: dict[str, Any] = {"rank": None, "t": torch.tensor(9)}
    assert load(mine, folder / f"of {rank}", process_group=alone) == mine["rank"] == mine["t"] == rank

    errors = []
    for attempt in (
        lambda: save(state, folder / f"of {rank} only", step=1),
        lambda: load(sharded(), folder / "two", step=7),
        lambda: load(sharded(), folder / "damaged"),
    ):
        dist.barrier()
        try:
            attempt()
        except (ConfigError, CheckpointError) as error:
            errors.append(f"{type(error).__name__} {error}")
        if rank == 0 and len(errors) == 2:
            shutil.copytree(folder / "two", folder / "damaged")
            (folder / "damaged" / "step-0000000009" / "__1_0.distcp").write_bytes(b"something else")
    result["errors"] = errors
    return result


def test_other_numbers_of_ranks_can_load_what_some_saved(tmp_path: Path) -> None:
    one = trained(1)
    save(one, tmp_path / "one", step=1)
    results = run_ranks("tests.torch.test_checkpoint", 2, tmp_path, "reshard", str(tmp_path))
    for result in results:
        assert same(result["from one"], states(one))
        assert same(result["two again", 8], result["two"])
        assert not same(result["two again", 9], result["two"])
        assert result["files"] == [".metadata", "__0_0.distcp", "__1_0.distcp", "manifest.json", "structure.pickle"]
        not_shared, no_step, damaged = result["errors"]
        assert "ConfigError __1_0.distcp was written but is not in" in not_shared
        assert "no checkpoint of step 7" in no_step
        assert "CheckpointError" in damaged
        assert "__1_0.distcp has 14 bytes instead of" in damaged
    for step in (8, 9):
        load(state := fresh(), tmp_path / "two", step=step)
        assert same(states(state), results[0]["two again", step])
    load(state := {"model": model_of(3)}, tmp_path / "wrapped")  # without the wrapper
    assert same(states(state)["model"], dict(results[0]["wrapped"]))
    manifest = json.loads((tmp_path / "two" / "step-0000000009" / "manifest.json").read_text())
    assert manifest["step"] == 9


if __name__ == "__main__":
    be_a_rank(
        lambda rank, what, folder: (
            die_at_every_moment(Path(folder)) if what == "die" else in_two_ranks(rank, Path(folder))
        )
    )
