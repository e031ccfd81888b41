"""Checkpoints that are written atomically, on top of torch.distributed.checkpoint.

A checkpoint is written under a name that starts with a dot, synced to disk, and then renamed. `checkpoint_files` has
the layout. Its structure is a pickle: load only checkpoints that you trust.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import shutil
import threading
import warnings
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from covey.base.errors import CheckpointError, ConfigError, DeadlineError
from covey.net.host.run_notes import note_checkpoint
from covey.torch.backend.description import apart
from covey.torch.training.checkpoint_files import (
    STRUCTURE,
    complete_in,
    find,
    fingerprint,
    remove_old,
    sync,
    verify,
    versions_in,
    write_manifest,
)
from covey.torch.training.stored import fill, group_to_save_in, read_structure, save_to_machines
from covey.torch.training.structure import (
    TensorKey,
    holder_of,
    parameters_by_state,
    put_together,
    state_of,
    take_apart,
    tensor_keys,
)

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Mapping

T = TypeVar("T")

EARLIER_TENSOR_KEYS = {("covey.torch.structure", "Slot"), ("covey.torch.training.structure", "Slot")}
"""The names of `TensorKey` in checkpoints of earlier versions."""


class Saving:
    """A save that may still be running."""

    def __init__(self, future: Future[Path]) -> None:
        self._future, self._asked = future, False

    def done(self) -> bool:
        """Return whether the save has finished or failed."""
        return self._future.done()

    def wait(self, timeout: float | None = None) -> Path:
        """Return the folder of the checkpoint once it is complete.

        Raises:
            DeadlineError: not complete within `timeout` seconds; the save continues.
            CheckpointError, OSError: the checkpoint could not be written.
        """
        try:
            error = self._future.exception(timeout)
        except TimeoutError:
            raise DeadlineError(f"the checkpoint is still being written after the timeout of {timeout} s") from None
        self._asked = True
        if error is not None:
            raise error
        return self._future.result()

    def settle(self) -> None:
        """Wait until the save has ended; raise its error unless `wait` has raised it before."""
        if not (self._asked and self._future.done()):
            self.wait()


def save(
    state: dict[str, Any],
    folder: str | os.PathLike[str] | None = None,
    *,
    step: int,
    keep: int | None = 3,
    process_group: Any = None,
    async_: bool = False,
) -> Saving:
    """Save `state` as the checkpoint of `step` in `folder`, and remove all but the `keep` latest (None: keep all).

    `state` holds modules, optimizers, samplers and other objects with a `state_dict`, and tensors and plain values in
    dicts, lists and tuples. All ranks of the group call this, with a folder that they share. Each rank writes its
    shards of sharded tensors (DTensors). Of everything else one copy is written, so it must be equal on all ranks.
    Without a process group this process saves alone.

    Without a `folder`, each machine keeps what its ranks write in a folder of its own, as `group.checkpoint.save` does;
    nothing needs to be shared. `process_group` is then one of covey, or a covey group, such as that of `Elastic`. The
    state may have plain values of Python and numpy.

    With `async_`, return once the state is copied to host memory. A thread writes it, over a second group, and the
    process does not exit before that. The next save waits for it, and raises its error if `wait` has not.

    An error on one rank is raised on all ranks, and the files written so far are removed.

    Raises:
        ConfigError: the state cannot be saved, or the ranks do not share the folder.
        CheckpointError, OSError: the checkpoint could not be written. Earlier checkpoints are unchanged.
        PeerLostError: a rank was lost meanwhile. Earlier checkpoints are unchanged.
    """
    global _last
    if folder is None:
        _settle_last()
        group = group_to_save_in(process_group)
        saving = Saving(save_to_machines(lambda: _states_of(state), group, step, keep))
        if async_:
            _last = saving
        else:
            saving.wait()
        return saving
    ranks = _Ranks(process_group)
    frozen, tensors = b"", dict[str, Any]()

    def freeze() -> None:
        nonlocal frozen, tensors
        _settle_last()
        if step < 0 or (keep is not None and keep < 1):
            raise ConfigError(f"step={step}, keep={keep}: step must be at least 0, and keep at least 1")
        structure, tensors = take_apart(_states_of(state))
        frozen = _pickled(structure)
        if async_:
            tensors = BlockingAsyncStager().stage(tensors)

    ranks.each(freeze)
    future: Future[Path] = Future()
    if not async_:
        future.set_result(_write(frozen, tensors, Path(folder), step, keep, ranks))
        return Saving(future)
    apart = ranks.apart()

    def work() -> None:
        try:
            future.set_result(_write(frozen, tensors, Path(folder), step, keep, apart))
        except BaseException as error:
            future.set_exception(error)

    _last = Saving(future)
    threading.Thread(target=work, name="covey-save").start()
    return _last


def load(
    state: dict[str, Any],
    folder: str | os.PathLike[str] | None = None,
    *,
    step: int | None = None,
    process_group: Any = None,
) -> int:
    """Load the entries of `state` from the checkpoint of `step`, or the latest, and return its step.

    For objects with `load_state_dict` that is called; other entries of `state` are replaced. Tensors are loaded in
    place if their shape is the same, and sharded as they are here, whatever number of ranks saved them. Optimizers
    need not have made a step. Every file is checked first, by one of the ranks.

    Without a `folder`, the checkpoint is looked for on the machines of all ranks, as `save` without a folder keeps it:
    a rank gets from others what its machine does not have.

    Raises:
        ConfigError: there is no such checkpoint in the folder, or it lacks an entry.
        CheckpointError: files are damaged; the message names them.
    """
    if folder is None:
        group = group_to_save_in(process_group)
        stored = read_structure(group, step)
        _check_entries(state, stored.structure, f"the checkpoint of step {stored.step}")
        tensors = _room_for(state, stored.structure, stored.form)
        fill(group, stored, tensors)
        _put_back(state, stored.structure, tensors)
        return stored.step
    ranks, home = _Ranks(process_group), Path(folder)
    number, name = ranks.first(lambda: find(home, step))
    path = home / name
    wrong = [line for found in ranks.each(lambda: verify(path, ranks.rank, ranks.size)) for line in found]
    if wrong:
        others = [other for other in steps(home) if other != number]
        raise CheckpointError(
            f"{path} is damaged: {', '.join(f'{file} {what}' for file, what in wrong)}; other steps here: {others}",
            files=tuple(file for file, _ in wrong),
        )
    structure: dict[str, Any] = _StructureUnpickler(io.BytesIO((path / STRUCTURE).read_bytes())).load()
    _check_entries(state, structure, str(path))
    reader = dcp.FileSystemReader(path)
    saved = reader.read_metadata().state_dict_metadata
    tensors = _room_for(state, structure, lambda key: (saved[key].size, saved[key].properties.dtype))
    with ranks.as_torch_wants(f"{path} could not be loaded") as arguments:
        dcp.load(tensors, storage_reader=reader, **arguments)
    _put_back(state, structure, tensors)
    return number


def _states_of(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: state_of(value) for key, value in state.items()}


def _check_entries(state: Mapping[str, Any], structure: Mapping[str, Any], where: str) -> None:
    if missing := sorted(state.keys() - structure.keys()):
        raise ConfigError(f"{where} has no {', '.join(missing)}; it has {', '.join(sorted(structure))}")


def _room_for(
    state: Mapping[str, Any], structure: Mapping[str, Any], form: Callable[[str], tuple[torch.Size, torch.dtype]]
) -> dict[str, torch.Tensor]:
    """Return the tensors to load the entries of `state` into, sharded as they are here; `form` tells what is saved."""
    _, present = take_apart(_states_of(state))
    owners = parameters_by_state(state)
    tensors: dict[str, torch.Tensor] = {}
    for key in tensor_keys({key: structure[key] for key in state}):
        size, dtype = form(key)
        owner = owners.get(key.rpartition(".")[0])
        if key in present and present[key].shape == size:
            tensors[key] = present[key]
        elif owner is not None and owner.shape == size:
            tensors[key] = torch.empty_like(owner, dtype=dtype, requires_grad=False)
        else:
            tensors[key] = torch.empty(size, dtype=dtype)
    return tensors


def _put_back(state: dict[str, Any], structure: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    for key, value in state.items():
        holder, whole = holder_of(value), put_together(structure[key], tensors)
        if hasattr(holder, "load_state_dict"):
            holder.load_state_dict(whole)
        else:
            state[key] = whole


def steps(folder: str | os.PathLike[str]) -> list[int]:
    """Return the steps of the complete checkpoints in `folder`, lowest first."""
    return sorted(complete_in(Path(folder)))


def latest(folder: str | os.PathLike[str]) -> int | None:
    """Return the highest step that has a complete checkpoint in `folder`, if any."""
    return max(steps(folder), default=None)


_last: Saving | None = None
"""The last asynchronous save, until the next save has waited for it."""


def _settle_last() -> None:
    global _last
    if _last is not None:
        last, _last = _last, None
        last.settle()


def _pickled(structure: dict[str, Any]) -> bytes:
    try:
        return pickle.dumps(structure)
    except Exception as error:  # pickling a class of the program may raise anything
        raise ConfigError(f"{_unpicklable_in(structure)} of the state cannot be saved: {error}") from error


class _StructureUnpickler(pickle.Unpickler):
    """Reads structures, including those that earlier versions wrote."""

    def find_class(self, module: str, name: str) -> Any:
        is_old = (module, name) in EARLIER_TENSOR_KEYS
        return TensorKey if is_old else super().find_class(module, name)


def _unpicklable_in(structure: dict[str, Any]) -> str:
    for name, value in structure.items():
        try:
            pickle.dumps(value)
        except Exception:
            return name
    return "something"


class _Ranks:
    """The ranks that save or load together: the ranks of a process group, or this process alone."""

    def __init__(self, group: Any) -> None:
        self._alone = not (dist.is_available() and dist.is_initialized())
        self._group = None if self._alone else group or dist.group.WORLD
        self.rank = 0 if self._alone else dist.get_rank(self._group)
        self.size = 1 if self._alone else dist.get_world_size(self._group)

    def each(self, action: Callable[[], T]) -> list[T]:
        """Return what `action` returns on each rank; if it raises on one, raise that error on all ranks."""
        outcome: tuple[T | None, Exception | None]
        try:
            outcome = action(), None
        except Exception as error:
            if self._alone:
                raise
            outcome = None, _portable(error)
        outcomes = [outcome] * self.size
        if not self._alone:
            dist.all_gather_object(outcomes, outcome, group=self._group)
        for rank, (_, failure) in enumerate(outcomes):
            if failure is not None:
                failure.add_note(f"raised on rank {rank}")
                raise failure
        return [value for value, _ in outcomes]  # type: ignore[misc]

    def first(self, action: Callable[[], T]) -> T:
        """Return on every rank what `action` returns on the first rank, or raise what it raises there."""
        return self.each(lambda: action() if self.rank == 0 else None)[0]  # type: ignore[return-value]

    def apart(self) -> _Ranks:
        """Return the same ranks with a second group, whose operations may run beside those of the caller."""
        if self._alone:
            return self
        return _Ranks(apart(self._group))

    @contextlib.contextmanager
    def as_torch_wants(self, failure: str) -> Iterator[dict[str, Any]]:
        """Yield torch's arguments for these ranks; turn its error into a CheckpointError with the reasons of all."""
        with warnings.catch_warnings() if self._alone else contextlib.nullcontext():
            if self._alone:  # torch would warn that there is no process group
                warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
            try:
                yield {"process_group": self._group, "no_dist": self._alone}
            except CheckpointException as error:
                reasons = [f"rank {rank}: {reason[0]!r}" for rank, reason in sorted(error.failures.items())]
                raise CheckpointError(f"{failure}: {'; '.join(reasons)}") from error


def _portable(error: Exception) -> Exception:
    """Return an error that can be sent to other ranks: `error`, or one with its text if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return CheckpointError(f"{type(error).__name__}: {error}")
    return error


def _write(structure: bytes, tensors: dict[str, Any], folder: Path, step: int, keep: int | None, ranks: _Ranks) -> Path:
    """Write a checkpoint, and return its folder; if that fails on a rank, remove what was written."""
    try:
        return _write_hidden(structure, tensors, folder, step, keep, ranks)
    except BaseException:
        if ranks.rank == 0:
            for rest in folder.glob(".step-*"):
                shutil.rmtree(rest, ignore_errors=True)
        raise


def _write_hidden(
    structure: bytes, tensors: dict[str, Any], folder: Path, step: int, keep: int | None, ranks: _Ranks
) -> Path:
    """Write a checkpoint under a hidden name, sync it to disk and rename it; return its folder."""

    def begin() -> str:
        if not folder.exists():
            folder.mkdir(parents=True)
            sync(folder.parent)
        for rest in folder.glob(".step-*"):  # left by an interrupted save or removal
            shutil.rmtree(rest)
        version = max((v for s, v, _ in versions_in(folder) if s == step), default=-1) + 1
        name = f"step-{step:010d}" + (f".{version}" if version else "")
        (folder / f".{name}").mkdir()
        (folder / f".{name}" / STRUCTURE).write_bytes(structure)
        return name

    def check_own() -> dict[str, tuple[int, str]]:
        mine = f"__{ranks.rank}_"  # as torch names the files of a rank
        names = [file.name for file in hidden.iterdir()]
        return {
            name: fingerprint(hidden / name, is_synced=True)
            for name in sorted(names)
            if name.startswith(mine) or (ranks.rank == 0 and not name.startswith("__"))
        }

    def end() -> None:
        for file, (size, _) in files.items():
            if not (hidden / file).is_file() or (hidden / file).stat().st_size != size:
                raise ConfigError(
                    f"{file} was written but is not in {hidden} here; give a folder that all ranks share, "
                    "such as one on a network file system"
                )
        write_manifest(hidden, step, files)
        sync(hidden)
        hidden.rename(folder / name)
        sync(folder)
        remove_old(folder, step, keep)

    name = ranks.first(begin)
    hidden = folder / f".{name}"
    with ranks.as_torch_wants(f"the checkpoint of step {step} could not be written") as arguments:
        dcp.save(tensors, storage_writer=dcp.FileSystemWriter(hidden, sync_files=False), **arguments)
    files = {file: print_ for own in ranks.each(check_own) for file, print_ in own.items()}
    ranks.first(end)
    if ranks.rank == 0:
        note_checkpoint(str(folder / name))
    return folder / name
