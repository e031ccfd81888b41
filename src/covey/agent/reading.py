"""Shows the output of programs on several machines, for `covey logs`."""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING, Final, Protocol

from covey.base.errors import CoveyError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from covey.agent.callers import AgentCaller
    from covey.agent.requests import OutputBatch

BATCHES_LIMIT: Final = 8
"""Batches of one machine that wait to be shown."""


class OutputView(Protocol):
    """What shows the output of programs."""

    def show(self, machine: str, stream: int, data: bytes, at: float = 0.0) -> None:
        """Show output of a machine, which was written at a time of its clock; 0 if that is not known."""

    def ended(self, machine: str) -> None:
        """Show unfinished lines of a machine."""

    def note(self, text: str) -> None:
        """Show a line about the run."""


def read_output(programs: Mapping[AgentCaller, int], screen: OutputView, *, to_end: bool) -> None:
    """Show what programs have written; `to_end`, also what they still write, until all have ended.

    Raises:
        CoveyError: an agent cannot be reached; the output of the others is shown first.
    """
    errors: list[CoveyError] = []
    if to_end:
        _read_together(programs, screen, errors)
    else:
        for agent, number in programs.items():
            try:
                for batch in agent.stream("follow", number, 0, False, False):
                    _show(agent.name, batch, screen)
            except CoveyError as error:
                errors.append(error)
            screen.ended(agent.name)
    if errors:
        raise errors[0]


def _read_together(programs: Mapping[AgentCaller, int], screen: OutputView, errors: list[CoveyError]) -> None:
    batches: queue.Queue[tuple[AgentCaller, OutputBatch | CoveyError | None]] = queue.Queue(
        BATCHES_LIMIT * len(programs)
    )

    def read(agent: AgentCaller, number: int) -> None:
        try:
            for batch in agent.stream("follow", number, 0, False, True):
                batches.put((agent, batch))
            batches.put((agent, None))
        except CoveyError as error:
            batches.put((agent, error))

    for agent, number in programs.items():
        threading.Thread(target=read, args=(agent, number), name="covey-logs", daemon=True).start()
    left = len(programs)
    while left:
        agent, batch = batches.get()
        if batch is None or isinstance(batch, CoveyError):
            screen.ended(agent.name)
            left -= 1
            errors += [] if batch is None else [batch]
        else:
            _show(agent.name, batch, screen)


def _show(machine: str, batch: OutputBatch, screen: OutputView) -> None:
    if batch.missing:
        screen.note(f"{machine}: {batch.missing} bytes of output are no longer there")
    times = batch.times or (0.0,) * len(batch.records)
    for (stream, data), at in zip(batch.records, times, strict=False):
        screen.show(machine, stream, data, at)
