"""What a program can do about losses: agree, make a group of those who are left, leave."""

from __future__ import annotations

import contextlib
import hashlib
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from covey.base.errors import ConfigError, RemoteProtocolError
from covey.runtime import loop as control
from covey.runtime.collectives.engine import Engine
from covey.runtime.events import Event

if TYPE_CHECKING:
    from collections.abc import MutableMapping, Sequence

    from covey.runtime.group.group import Group
    from covey.runtime.group.restore import RestoreReport


class Assembly:
    """A second group of the same ranks whose operations survive losses: where those of a failed group meet.

    It is made when it is first needed, on every rank that needs it: all ranks use it in the same order.
    """

    def __init__(self, group: Group) -> None:
        engine = group._engine
        if engine.generation is None:
            raise ConfigError(f"group {group.name!r} has too many members to agree on who is left")
        config = replace(engine.config, on_loss="continue")
        name = f"{engine.name}/assembly"
        self._group = group
        self._engine = Engine(
            engine.node, _derived(engine.id, "assembly"), engine.members, name, config, generation=engine.generation
        )

    def agree(self, flag: bool, timeout: float | None) -> bool:
        """Return whether all who are left said so."""
        return bool(self._of_group().all_reduce(bool(flag), "and", timeout=timeout))

    def shrink(self, timeout: float | None) -> tuple[Group, int]:
        """Return a group of those who are left, and the last operation of the old one that returned on all of them."""
        engine = self._group._engine
        if engine.node is not None:
            control.soon(engine.node.generation_table.tell_keeper_of_survival)
        returned = self._of_group().all_gather(np.array([engine.last_returned]), timeout=timeout)
        numbers = _numbers(returned)
        return survivors(self._group, list(numbers), self._engine.operation.sequence), min(numbers.values())

    def _of_group(self) -> Group:
        return type(self._group)(self._engine, local_rank=self._group.local_rank)

    def close(self) -> None:
        """Free what it holds."""
        self._engine.close()


def survivors(group: Group, ranks: list[int], number: int) -> Group:
    """Return the group of some ranks of another; `number` tells those of the same ranks apart."""
    engine = group._engine
    members = tuple(engine.members[rank] for rank in ranks)
    node = engine.node if len(members) > 1 else None
    new = Engine(
        node,
        _derived(engine.id, f"survivors/{number}"),
        members if node is not None else (0,),
        f"{engine.name}/survivors.{number}",
        engine.config,
        generation=engine.generation if node is not None else None,
    )
    return type(group)(new, local_rank=group.local_rank)


def _numbers(said: Sequence[Any]) -> dict[int, int]:
    """Return the number that each rank said which is left; RemoteProtocolError if one said something else."""
    for rank, array in enumerate(said):
        if array is not None and array.shape != (1,):
            raise RemoteProtocolError(f"shrink: rank {rank} sent an array of shape {array.shape} instead of a number")
    return {rank: int(array[0]) for rank, array in enumerate(said) if array is not None}


def _derived(group: int, purpose: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{group}/{purpose}".encode(), digest_size=8).digest(), "little")


def shrink(group: Group, timeout: float | None) -> tuple[Any, int]:
    """Return a group of the ranks that are left, and the last operation that returned on all of them."""
    engine = group._engine
    if engine.generation is None or engine.config.on_loss == "continue":
        # What survives losses has them behind it; who is left is agreed on by any operation.
        numbers = _numbers(group.all_gather(np.array([engine.last_returned]), timeout=timeout))
        return survivors(group, list(numbers), engine.operation.sequence), min(numbers.values())
    return group._assembly().shrink(timeout)


def restore(group: Group, state: MutableMapping[str, Any], **options: Any) -> RestoreReport:
    """Bring newcomers to the state of the others; see `Group.restore`.

    A group that goes on without lost ranks has a second one for it: what a restore that failed has left of large
    messages ends with that one's lanes, and disturbs none of the program's messages.
    """
    from covey.runtime.group import restore as restoring

    engine = group._engine
    if not engine.survives:
        return restoring.restore(group, state, **options)
    if engine.is_over:
        engine.failure.require_open()
    group._restores += 1
    side = Engine(
        engine.node, _derived(engine.id, f"restore/{group._restores}"), engine.members, f"{engine.name}/restore",
        engine.config, generation=engine.generation,
    )  # fmt: skip
    with contextlib.closing(type(group)(side, local_rank=group.local_rank)) as way:
        report = restoring.restore(way, state, **options)
    _tell_of(report, engine)
    return report


def _tell_of(report: RestoreReport, engine: Engine) -> None:
    if report.receivers and engine.node is not None and engine.generation is not None:
        generation, phases = engine.generation, {"restore": round(1e3 * report.seconds, 3)}
        engine.node.events.add(
            Event("restored", time.time(), generation.number, generation.view.number, report.receivers, phases=phases)
        )
