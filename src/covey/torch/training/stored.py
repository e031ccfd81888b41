"""States of torch in the checkpoints of `group.checkpoint`, which need no shared folder.

Each rank passes the parts of sharded tensors that it holds, so that any number of ranks, on any mesh, can load them.
The structure around the tensors travels as plain values, with the shapes and dtypes of the tensors: no pickle is read.
"""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from covey.base.errors import ConfigError
from covey.runtime.group.group import Group
from covey.runtime.shards.tree import Shard
from covey.torch.backend.below import covey_group_of
from covey.torch.training.structure import from_plain, take_apart, to_plain
from covey.wire import objects

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from covey.runtime.group.shard_saver import SaveReport
    from covey.runtime.work import Work

STRUCTURE_KEY = "(structure)"


class StoredState:
    """What a checkpoint without a shared folder has besides the elements of its tensors."""

    def __init__(self, step: int, encoded: bytes) -> None:
        self.step = step
        plain, self._forms = objects.decode(encoded)
        self.structure: dict[str, Any] = from_plain(plain)

    def form(self, key: str) -> tuple[torch.Size, torch.dtype]:
        """Return the shape and the dtype of a tensor."""
        shape, dtype = self._forms[key]
        return torch.Size(shape), getattr(torch, dtype)


def group_to_save_in(process_group: Any) -> Group:
    """Return the covey group whose machines keep the checkpoint: `process_group`, or the group behind it.

    Raises:
        ConfigError: there is none.
    """
    if isinstance(process_group, Group):
        return process_group
    is_ready = process_group is not None or (torch.distributed.is_available() and torch.distributed.is_initialized())
    group = covey_group_of(process_group) if is_ready else None
    if group is None:
        raise ConfigError(
            'a checkpoint without a folder is kept on the machines of a covey group: call init_process_group("covey"), '
            "pass process_group=, which may be Elastic's group, or pass a folder"
        )
    return group


def save_to_machines(state: Callable[[], Mapping[str, Any]], group: Group, step: int, keep: int | None) -> Future[Path]:
    """Start to save what `state()` returns, modules and optimizers replaced by their states; see `covey.torch.save`."""
    content: dict[str, Any] = {}

    def describe() -> None:
        if keep is None:
            raise ConfigError("keep=None needs a folder; give the number of checkpoints that each machine keeps")
        structure, tensors = take_apart(state())
        forms = {key: [list(tensor.shape), str(tensor.dtype).removeprefix("torch.")] for key, tensor in tensors.items()}
        content.update({key: _part_of(tensor) for key, tensor in tensors.items()})
        content[STRUCTURE_KEY] = objects.encode([to_plain(structure), forms])

    _on_each(group, describe)
    done: Future[Path] = Future()

    def tell(work: Work[SaveReport]) -> None:
        error = work.exception()
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(Path(work.result().path))

    assert keep is not None
    group.checkpoint.save(content, step, keep=keep).add_done_callback(tell)
    return done


def read_structure(group: Group, step: int | None) -> StoredState:
    """Return what the checkpoint of `step`, or the newest one, has besides tensors; equal on all ranks.

    Raises:
        CheckpointError: there is none.
        MismatchError: it was not saved by `covey.torch.save`.
    """
    loaded = group.checkpoint.load({STRUCTURE_KEY: b""}, step=step)
    return StoredState(loaded.step, loaded.state[STRUCTURE_KEY])


def fill(group: Group, stored: StoredState, tensors: Mapping[str, torch.Tensor]) -> None:
    """Fill tensors, or the parts of sharded tensors that this rank holds, from a checkpoint."""
    wanted: dict[str, Any] = {}
    copied: list[tuple[torch.Tensor, torch.Tensor]] = []
    for key, tensor in tensors.items():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        local = local.detach()
        memory = local
        if not (local.is_cpu and local.is_contiguous()):
            memory = torch.empty(local.shape, dtype=local.dtype)
            copied.append((local, memory))
        wanted[key] = _part_of(tensor, memory)
    group.checkpoint.load(wanted, step=stored.step)
    for local, memory in copied:
        local.copy_(memory)


def _part_of(tensor: torch.Tensor, memory: torch.Tensor | None = None) -> Any:
    """Return what a state for `group.checkpoint` has for a tensor: itself, or this rank's part of a sharded one."""
    if not isinstance(tensor, DTensor):
        return tensor.detach() if memory is None else memory
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    local = tensor.to_local().detach() if memory is None else memory
    if not tensor.dim():
        return local
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    if tuple(shape) != tuple(local.shape):
        raise ConfigError(f"a tensor of shape {list(tensor.shape)} is sharded as {tensor.placements}: give a folder")
    return Shard(local, shape=tuple(tensor.shape), offset=tuple(offset))


def _on_each(group: Group, action: Callable[[], None]) -> None:
    """Call `action` on each rank; if it raises on one, raise an error on all."""
    failure: Exception | None = None
    try:
        action()
    except Exception as error:  # the other ranks must learn of it before this one raises
        failure = error
    texts = group.all_gather_object("" if failure is None else f"{type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    for rank, text in enumerate(texts):
        if text:
            raise ConfigError(f"rank {rank} cannot save its state: {text}")
