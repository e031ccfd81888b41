"""What a program can do after a loss: agree with the remaining ranks, make a group of them, restore newcomers."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from covey.base.errors import ConfigError, RemoteProtocolError
from covey.runtime import loop as control
from covey.runtime.events import Event

if TYPE_CHECKING:
    from collections.abc import MutableMapping, Sequence

    from covey.runtime.collectives.engine import Engine
    from covey.runtime.group.group import Group
    from covey.runtime.group.restore import RestoreReport


class Assembly:
    """A second group of the same ranks whose operations survive losses, for the use of a failed group.

    Each rank makes it when it first needs it. All ranks must use it in the same order.
    """

    def __init__(self, group: Group) -> None:
        engine = group._engine
        if engine.generation is None:
            raise ConfigError(f"group {group.name!r} has too many members to agree on which of them remain")
        config = replace(engine.config, on_loss="continue")
        self._group = group
        self._engine = engine.subgroup(f"{engine.id}/assembly", engine.members, f"{engine.name}/assembly", config)

    def agree(self, flag: bool, timeout: float | None) -> bool:
        """Return whether `flag` is true on all remaining ranks."""
        return bool(self._of_group().all_reduce(bool(flag), "and", timeout=timeout))

    def shrink(self, timeout: float | None) -> tuple[Group, int]:
        """Return a group of the remaining ranks, and the last operation of the old one that returned on all of them."""
        engine = self._group._engine
        if engine.node is not None:
            control.soon(engine.node.generation_table.tell_keeper_of_survival)
        returned = self._of_group().all_gather(np.array([engine.last_returned]), timeout=timeout)
        numbers = _numbers(returned)
        return survivors(self._group, list(numbers), self._engine.operation.sequence), min(numbers.values())

    def _of_group(self) -> Group:
        return type(self._group)(self._engine, local_rank=self._group.local_rank)

    def close(self) -> None:
        """Free what the assembly holds."""
        self._engine.close()


def survivors(group: Group, ranks: list[int], number: int) -> Group:
    """Return a group of some ranks of `group`; `number` is a different one each time, and the same on all of them."""
    engine = group._engine
    members = tuple(engine.members[rank] for rank in ranks)
    new = engine.subgroup(f"{engine.id}/survivors/{number}", members, f"{engine.name}/survivors.{number}")
    return type(group)(new, local_rank=group.local_rank)


def _numbers(said: Sequence[Any]) -> dict[int, int]:
    """Return the number that each remaining rank sent; raise RemoteProtocolError for anything else."""
    for rank, array in enumerate(said):
        if array is not None and array.shape != (1,):
            raise RemoteProtocolError(f"shrink: rank {rank} sent an array of shape {array.shape} instead of a number")
    return {rank: int(array[0]) for rank, array in enumerate(said) if array is not None}


def shrink(group: Group, timeout: float | None) -> tuple[Any, int]:
    """Return a group of the remaining ranks, and the last operation that returned on all of them."""
    engine = group._engine
    if engine.generation is None or engine.config.on_loss == "continue":
        # In a group that survives losses, every operation agrees on the remaining ranks.
        numbers = _numbers(group.all_gather(np.array([engine.last_returned]), timeout=timeout))
        return survivors(group, list(numbers), engine.operation.sequence), min(numbers.values())
    return group._assembly().shrink(timeout)


def restore(group: Group, state: MutableMapping[str, Any], **options: Any) -> RestoreReport:
    """Bring newcomers to the state of the others; see `Group.restore`.

    In a group that survives losses a second group carries it out. If the restore fails, its unfinished messages end
    with the lanes of that group and do not disturb the program's messages.
    """
    from covey.runtime.group import restore as restoring

    engine = group._engine
    if not engine.survives:
        return restoring.restore(group, state, **options)
    if engine.is_over:
        engine.failure.require_open()
    group._restores += 1
    side = engine.subgroup(f"{engine.id}/restore/{group._restores}", engine.members, f"{engine.name}/restore")
    with contextlib.closing(type(group)(side, local_rank=group.local_rank)) as side_group:
        report = restoring.restore(side_group, state, **options)
    _record(report, engine)
    return report


def _record(report: RestoreReport, engine: Engine) -> None:
    """Add a restore to the events of the run."""
    if report.receivers and engine.node is not None and engine.generation is not None:
        generation, phases = engine.generation, {"restore": round(1e3 * report.seconds, 3)}
        engine.node.events.add(
            Event("restored", time.time(), generation.number, generation.view.number, report.receivers, phases=phases)
        )
