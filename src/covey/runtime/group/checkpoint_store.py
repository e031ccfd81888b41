"""Checkpoints as a program uses them: of the run, and of arrays, which need no shared folder.

`CheckpointRequests` requests checkpoints of the run, shows how they are and ends them. `CheckpointStore` is what
`Group.checkpoint` offers: every save and every load has a group of its own, of the same ranks, so that it does not
disturb the operations of the program, and its failure does not end them. `shard_saver` and `shard_loader` do the work.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import numpy as np

from covey.arrays.adapter import adapter_of
from covey.base.config import check_timeout
from covey.base.errors import ClosedError, ConfigError, DeadlineError
from covey.runtime.buffers import StagedOperand, as_array
from covey.runtime.group.issuer import Issuer, whole_number
from covey.runtime.work import Work

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from covey.base.config import GroupConfig
    from covey.base.numbers import Rank, Seat
    from covey.proto.checkpointing import Checkpoint
    from covey.proto.shards.boxes import Box
    from covey.runtime.collectives.engine import Engine
    from covey.runtime.collectives.failure import Failure
    from covey.runtime.collectives.roster import GroupFacts
    from covey.runtime.group.shard_loader import LoadedArrays, ShardLoader
    from covey.runtime.group.shard_saver import SaveReport, StateCopy
    from covey.runtime.shards.tree import Leaf
    from covey.runtime.state.checkpoints import Checkpoints
    from covey.runtime.views.generation import Generation
    from covey.wire.shards import SavedArray, StateArray

    Array = np.ndarray[Any, np.dtype[Any]]

logger = logging.getLogger("covey")

KEEP: Final = 3
"""How many checkpoints a machine keeps unless a program says otherwise."""
CHECKPOINT_STEP_LIMIT: Final = 10**18
CHECKPOINT_COPIES_LIMIT: Final = 16


class StoringEngine(Protocol):
    """The engine of a group whose state is saved (`collectives.engine`)."""

    failure: Failure
    id: int
    name: str
    members: tuple[Seat, ...]
    config: GroupConfig

    @property
    def live(self) -> tuple[Rank, ...]: ...

    def subgroup(self, key: str, members: tuple[Seat, ...], name: str) -> Engine: ...


class LoadedCheckpoint(NamedTuple):
    """What `group.checkpoint.load` returns."""

    state: Any
    step: int


class CheckpointStore:
    """Saves the state of all ranks of a group, and loads it. Every rank calls the same, in the same order."""

    def __init__(self, engine: StoringEngine, run: str, *, is_split: bool) -> None:
        """`run` is the name of a cluster's run; empty for another. A group that `is_split` has no folder of its own."""
        self._engine, self.run, self._is_split = engine, run, is_split
        self._calls = 0
        self._last: Work[SaveReport] | None = None
        self._side: Engine | None = None
        """The group of the save that is under way."""

    def save(
        self,
        state: Any,
        step: int,
        *,
        keep: int = KEEP,
        copies: int = 1,
        folder: str | os.PathLike[str] | None = None,
        timeout: float | None = None,
    ) -> Work[SaveReport]:
        """Save `state` as the checkpoint of `step`, and return at once: `wait()` of the Work returns when it is done.

        The state has arrays, numbers, strings, bytes and None, in dicts, lists and tuples. What is not a `covey.Shard`
        must be equal on all ranks, and is written once: each rank writes a part. The state is copied before this
        returns. The next save waits for this one, and so does `close`.

        Every machine keeps what its ranks write, and `copies` of what others do, in `folder`: a private one of this run
        on each machine, by default `~/.config/covey/checkpoints/RUN`. When all machines have theirs, all but the `keep`
        newest checkpoints are deleted.

        Every rank calls it. If a rank cannot write, or is lost in a group that does not survive that, the Work raises
        the same error on all ranks, and earlier checkpoints are unchanged. With `on_loss="continue"` the remaining
        ranks complete it, unless the lost rank had parts of arrays that no other has.

        Raises (by `wait`):
            CheckpointError: a rank could not write, or was lost with its part; `ranks` has which, the message why.
            MismatchError: the state differs between ranks, or parts do not make up an array.
            PeerLostError, DeadlineError: a rank was lost, or `timeout` passed.
        """
        work: Work[SaveReport] = Work(f"checkpoint.save(step={step})")
        deadline = time.monotonic() + self._timeout(timeout)
        number, live, path = self._next(), self._engine.live, self._folder(folder)
        if self._last is not None and not self._last.wait_until_done(max(0.0, deadline - time.monotonic())):
            seconds = self._timeout(timeout)
            raise DeadlineError(
                f"{self._last.description} did not end within the timeout of {seconds:g} s; it continues"
            )
        snapshot = self._copy(state, step, keep, copies)

        def run() -> None:
            from covey.runtime.group.shard_saver import ShardSaver

            try:
                with self._apart(number) as issuer:
                    saver = ShardSaver(
                        issuer,
                        path,
                        snapshot,
                        step=step if isinstance(step, int) and 0 <= step < CHECKPOINT_STEP_LIMIT else 0,
                        keep=keep if isinstance(keep, int) and keep > 0 else 0,
                        copies=copies if isinstance(copies, int) and copies >= 0 else 0,
                        live=live,
                        deadline=deadline,
                    )
                    report = saver.run()
            except BaseException as error:  # the thread ends with its save
                logger.error("%s failed: %s", work.description, error)
                work.fail(error)
            else:
                work.finish(report)

        self._last = work
        threading.Thread(target=run, name="covey-save").start()
        return work

    def load(
        self,
        state: Any = None,
        *,
        step: int | None = None,
        folder: str | os.PathLike[str] | None = None,
        timeout: float | None = None,
        progress: bool | None = None,
    ) -> LoadedCheckpoint:
        """Return the state and the step of the newest complete checkpoint, or of that of `step`. Every rank calls it.

        It is looked for on the machines of all ranks, and what a rank does not have on its own comes from the others:
        any number of ranks, on any machines, as long as each shard is on one of them. All ranks get the same
        checkpoint, or the same error. Arrays are numpy arrays. A `covey.Shard` comes as a Shard with an even part.

        With `state`, its arrays and those of its Shards are filled in place, whatever part of the array they are, and
        only what it has is loaded. If this fails, their contents are undefined. Values come from the checkpoint. For
        arrays that cannot be changed, such as those of JAX, the state that is returned has new ones.

        Raises:
            CheckpointError: there is no complete checkpoint, or files are damaged on all machines that have them.
            MismatchError: `state` has arrays that the checkpoint has not, or not with this shape and dtype.
            PeerLostError, DeadlineError: a rank was lost, or `timeout` passed.
        """
        from covey.runtime.shards import tree as trees

        deadline = time.monotonic() + self._timeout(timeout)
        wanted: tuple[StateArray, ...] | None = None
        memory: dict[str, Array] = {}
        failure: Exception | None = None
        structure: Any = None
        leaves: list[Leaf] = []
        staged: dict[str, StagedOperand] = {}
        if state is not None:
            try:
                structure, leaves = trees.take_apart(state)
                staged = {leaf.name: operand for leaf in leaves if (operand := _staged(leaf)) is not None}
                memory = {leaf.name: _writable(leaf, staged.get(leaf.name)) for leaf in leaves}
                wanted = tuple(_described(leaf, memory[leaf.name]) for leaf in leaves)
            except (TypeError, ConfigError) as error:
                failure = error

        def target(array: SavedArray, box: Box) -> Array:
            from covey.proto.shards.safetensors import FORMAT_DTYPES

            return memory[array.name] if wanted is not None else np.empty(box.shape, FORMAT_DTYPES[array.dtype])

        with self._loader(folder, step, wanted, failure, target, deadline, progress) as loader:
            loaded = loader.run()
        if state is None:
            return LoadedCheckpoint(trees.put_together(loaded.tree, _as_saved(loaded)), loaded.saved.step)
        names = [array.name for array in loaded.saved.arrays]
        values = trees.put_together(loaded.tree, names)
        leaves = [
            leaf if (operand := staged.get(leaf.name)) is None else leaf.replaced(operand.deliver(None))
            for leaf in leaves
        ]
        return LoadedCheckpoint(trees.merged(structure, leaves, values), loaded.saved.step)

    def steps(self, *, folder: str | os.PathLike[str] | None = None, timeout: float | None = None) -> list[int]:
        """Return the steps of the checkpoints that `load` can load now, lowest first. Every rank calls it."""
        deadline = time.monotonic() + self._timeout(timeout)
        with self._loader(folder, None, None, None, None, deadline, False) as loader:
            return loader.steps()

    def close(self, *, is_finished: bool) -> None:
        """Wait for the save that is under way; end it if the program has failed."""
        if self._last is None or self._last.done():
            return
        if not is_finished and (side := self._side) is not None:
            side.close()
        self._last.wait_until_done(self._engine.config.timeout)

    def _timeout(self, timeout: float | None) -> float:
        return self._engine.config.timeout if timeout is None else check_timeout(timeout)

    def _next(self) -> int:
        self._engine.failure.require_open()
        self._calls += 1
        return self._calls

    @contextlib.contextmanager
    def _apart(self, number: int) -> Iterator[Issuer]:
        """Yield what issues operations of a group of the same ranks, for one call."""
        engine = self._engine
        side = engine.subgroup(f"{engine.id}/checkpoint/{number}", engine.members, f"{engine.name}/checkpoint")
        self._side = side
        try:
            yield Issuer(side)
        finally:
            self._side = None
            side.close()

    @contextlib.contextmanager
    def _loader(
        self, folder: Any, step: int | None, wanted: Any, failure: Any, target: Any, deadline: float, progress: Any
    ) -> Iterator[ShardLoader]:
        from covey.runtime.group.shard_loader import ShardLoader

        number = self._next()
        if self._last is not None:
            self._last.wait_until_done(max(0.0, deadline - time.monotonic()))
        if failure is None and step is not None and not (isinstance(step, int) and 0 <= step < CHECKPOINT_STEP_LIMIT):
            failure, step = ConfigError(f"step={step!r} must be a number from 0 on"), None
        with self._apart(number) as issuer:
            yield ShardLoader(
                issuer,
                self._folder(folder),
                step=step,
                wanted=wanted,
                failure=failure,
                target=target,
                deadline=deadline,
                progress=progress,
            )

    def _folder(self, folder: str | os.PathLike[str] | None) -> Path | ConfigError:
        """Return where checkpoints are; or why nowhere, which the other ranks have to learn, too."""
        from pathlib import Path  # slow to load, and most programs save elsewhere

        from covey.runtime.shards.folder import default_folder

        try:
            if folder is not None:
                return Path(folder).absolute()
            if self._is_split:
                return ConfigError(
                    f"the group {self._engine.name!r} was made by split: pass folder= for its checkpoints"
                )
            if self.run:
                return default_folder(self.run, f"run {self.run}")
            program = os.path.abspath(sys.argv[0] or "python")
            return default_folder(os.path.basename(program).removesuffix(".py"), program)
        except (ConfigError, TypeError) as error:
            return ConfigError(f"folder={folder!r}: {error}")

    def _copy(self, state: Any, step: int, keep: int, copies: int) -> StateCopy:
        from covey.runtime.group.shard_saver import StateCopy
        from covey.runtime.shards import tree as trees

        try:
            if not 0 <= whole_number("step", step) < CHECKPOINT_STEP_LIMIT:
                raise ConfigError(f"step={step} must be from 0 on")
            if whole_number("keep", keep) < 1:
                raise ConfigError(f"keep={keep} must be at least 1")
            if not 0 <= whole_number("copies", copies) <= CHECKPOINT_COPIES_LIMIT:
                raise ConfigError(f"copies={copies} must be 0 to {CHECKPOINT_COPIES_LIMIT}")
            structure, leaves = trees.take_apart(state)
            arrays = []
            for leaf in leaves:
                content = np.array(trees.memory_of(leaf.array), order="C", copy=True)
                arrays.append((_described(leaf, content), content))
            return StateCopy(structure, arrays)
        except Exception as error:  # the other ranks must learn of it before this one raises
            return StateCopy(failure=error)


def _described(leaf: Any, content: Array) -> StateArray:
    from covey.wire.shards import StateArray

    shard, plain = leaf.shard, (leaf.name, content.dtype.name, content.shape)
    if shard is None:
        return StateArray(*plain)
    return StateArray(*plain, shard.axis, shard.shape or (), shard.offset or ())


def _staged(leaf: Leaf) -> StagedOperand | None:
    """Return what fills an array that is on a device, or cannot be changed; None for host memory."""
    adapter = None if type(leaf.array) is np.ndarray else adapter_of(leaf.array)
    if adapter is None or ((memory := adapter.view(leaf.array)) is not None and memory.flags.writeable):
        return None
    return StagedOperand.of(leaf.array, adapter, is_read=False)


def _writable(leaf: Leaf, staged: StagedOperand | None) -> Array:
    from covey.runtime.shards.tree import memory_of

    if staged is not None:
        return memory_of(staged.flat.reshape(staged.shape))
    memory = memory_of(leaf.array)
    try:
        is_own = bool(np.shares_memory(memory, as_array(leaf.array))) or not memory.size
    except (TypeError, BufferError):
        is_own = False
    if not is_own or not memory.flags.writeable:
        raise TypeError(f"{leaf.name!r} cannot be filled in place: pass a numpy array or a torch tensor on the CPU")
    return memory


def _as_saved(loaded: LoadedArrays) -> list[Any]:
    """Return arrays as they were saved, by number: sharded ones as shards."""
    from covey.runtime.shards.tree import Shard

    values: list[Any] = []
    for number, array in enumerate(loaded.saved.arrays):
        content = loaded.arrays[number]
        if array.axis < 0:
            values.append(content)
        else:
            values.append(Shard(content, array.axis, shape=array.shape, offset=loaded.boxes[number].offset))
    return values


CHECKPOINT_CHOICE_SECONDS: Final = 30.0
"""How long the ranks may take to agree which checkpoint a request is for."""


class CheckpointedEngine(Protocol):
    """The engine of the group, whose operations checkpoints begin after (`collectives.engine`)."""

    facts: GroupFacts
    failure: Failure
    generation: Generation | None

    @property
    def issued(self) -> int: ...

    @property
    def is_over(self) -> bool: ...


class CheckpointRequests:
    """Checkpoints, as `Group` offers them. Only the group that `join` or `generations` returns has them."""

    def __init__(self, engine: CheckpointedEngine, of_run: Checkpoints | None, *, is_alone: bool) -> None:
        """`of_run` are the checkpoints of the run, None without a node. A group that `is_alone` has its own."""
        self._engine, self._of_run, self._is_alone = engine, of_run, is_alone
        self._known: Checkpoints | None = None
        """Those of the run, once the program has looked for one, or those of a group that is alone."""

    def pending(self) -> Checkpoint | None:
        """Return the checkpoint that this rank is to save now, or None; see `Group.checkpoint_pending`."""
        if self._known is not None and self._known.is_idle:
            return None
        engine = self._engine
        checkpoints = self._known = self.of_run()
        try:
            return checkpoints.look(engine, engine.facts.config.timeout)
        except ClosedError:
            engine.failure.require_open()  # raises the error that ended the group, if there is one
            raise

    def request_checkpoint(self, path: str = "", *, id: str = "", timeout: float = CHECKPOINT_CHOICE_SECONDS) -> str:
        """Ask all ranks to save a checkpoint, and return its id. On any rank and any thread.

        `path` is passed to the program of each rank as it is. A request with the `id` of an earlier checkpoint, one of
        the last 16, does nothing. If another checkpoint is requested or pending, this returns its id, and the request
        is for that one.

        Raises:
            DeadlineError: the ranks did not answer within `timeout` seconds.
        """
        return self.of_run().request(path, id, check_timeout(timeout))

    def end_checkpoint(self, error: str = "") -> None:
        """Tell that this rank has saved the pending checkpoint, or why it could not.

        When all remaining ranks have, the checkpoint is over, and an event tells so.

        Raises:
            ConfigError: no checkpoint is pending on this rank.
        """
        self.of_run().end(error)

    def of_run(self) -> Checkpoints:
        """Return the checkpoints of the run; raise ConfigError for a group that has none."""
        engine, known = self._engine, self._of_run
        if self._is_alone:
            engine.failure.require_open()
            if known is None:
                from covey.runtime.state.checkpoints import Checkpoints  # a group of one has loaded little of covey

                known = self._of_run = Checkpoints(None)
                known.follow(engine)
            return known
        if known is None or not known.is_of(engine):
            raise ConfigError(
                f"a checkpoint is one of the whole run: use the group that covey.join or covey.generations returned "
                f"last, or torch.distributed.group.WORLD.covey_group if there is one, not {engine.facts.name!r}"
            )
        return known
