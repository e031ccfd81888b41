"""What a program can do after a loss: agree with the remaining ranks, make a group of them, restore newcomers.

Each of these makes a second group of the same ranks, or of those that remain, which has its own lanes and order.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from covey.base.errors import RemoteProtocolError
from covey.runtime.group.issuer import Issuer
from covey.runtime.group.moves import Moves
from covey.runtime.group.reductions import Reductions

if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping, Sequence

    from covey.runtime.collectives.engine import Engine
    from covey.runtime.group.restore import RestoreReport


class Survival:
    """The groups beside one group that carry out what is left to do after a loss. It makes their engines."""

    def __init__(self, engine: Engine, tell_keeper: Callable[[], None] | None) -> None:
        """`tell_keeper` tells the keeper that the program goes on although its group ends; None without a run."""
        self._engine, self._tell_keeper = engine, tell_keeper
        self._assembly: Engine | None = None
        """A group of the same ranks whose operations survive losses, for the use of a failed group.

        Each rank makes it when it first needs it. All ranks must use it in the same order.
        """
        self._restores = 0

    def agree(self, flag: bool, timeout: float | None) -> bool:
        """Return whether `flag` is true on all remaining ranks."""
        return bool(Reductions(Issuer(self._agreeing())).all_reduce(bool(flag), "and", timeout=timeout))

    def shrink(self, timeout: float | None) -> tuple[Engine, int]:
        """Return the engine of a group of the remaining ranks, and the last operation that returned on all of them."""
        engine = self._engine
        used = self._agreeing()
        if used is not engine and engine.node is not None and self._tell_keeper is not None:
            self._tell_keeper()
        said = Moves(Issuer(used)).all_gather(np.array([engine.last_returned]), timeout=timeout)
        numbers = _numbers(said)
        members, number = tuple(engine.members[rank] for rank in numbers), used.operation.sequence
        made = engine.subgroup(f"{engine.id}/survivors/{number}", members, f"{engine.name}/survivors.{number}")
        return made, min(numbers.values())

    def _agreeing(self) -> Engine:
        """Return the engine whose operations the remaining ranks agree on: where losses end the group, a second one."""
        engine = self._engine
        if engine.generation is None or engine.survives:
            return engine
        if self._assembly is None:
            config = replace(engine.config, on_loss="continue")
            name = f"{engine.name}/assembly"
            self._assembly = engine.subgroup(f"{engine.id}/assembly", engine.members, name, config)
        return self._assembly

    def restore(self, state: MutableMapping[str, Any], **options: Any) -> RestoreReport:
        """Bring newcomers to the state of the others; see `Group.restore`.

        In a group that survives losses a second group carries it out. If the restore fails, its unfinished messages end
        with the lanes of that group and do not disturb the program's messages.
        """
        from covey.runtime.group.restore import restore  # slow to load, and many programs restore nothing

        engine = self._engine
        if not engine.survives:
            return restore(Issuer(engine), state, **options)
        engine.failure.require_open()
        self._restores += 1
        side = engine.subgroup(f"{engine.id}/restore/{self._restores}", engine.members, f"{engine.name}/restore")
        with contextlib.closing(side):
            report = restore(Issuer(side), state, **options)
        self._record(report)
        return report

    def _record(self, report: RestoreReport) -> None:
        """Add a restore to the events of the run."""
        engine = self._engine
        if report.receivers and engine.node is not None and engine.generation is not None:
            from covey.runtime.events import Event  # loaded with the node

            generation, phases = engine.generation, {"restore": round(1e3 * report.seconds, 3)}
            place = generation.number, generation.view.number
            engine.node.events.add(Event("restored", time.time(), *place, report.receivers, phases=phases))

    def close(self) -> None:
        """Free what was made to agree."""
        if self._assembly is not None:
            self._assembly.close()


def _numbers(said: Sequence[Any]) -> dict[int, int]:
    """Return the number that each remaining rank sent; raise RemoteProtocolError for anything else."""
    for rank, array in enumerate(said):
        if array is not None and array.shape != (1,):
            raise RemoteProtocolError(f"shrink: rank {rank} sent an array of shape {array.shape} instead of a number")
    return {rank: int(array[0]) for rank, array in enumerate(said) if array is not None}
