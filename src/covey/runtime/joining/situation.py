"""What a joining node waits for, in words: for its log and for the error when time is up. On the control loop."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Final

from covey.base.pace import Seldom
from covey.base.text import printable

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.proto.formation import Formation
    from covey.runtime.peers.cluster_mesh import ClusterMesh

logger = logging.getLogger("covey")

FIRST_LOG_SECONDS: Final = 3.0
"""After this much waiting, the log says what is waited for."""
NEXT_LOG_SECONDS: Final = 5.0
"""How soon the log says that something has changed: strangers can change it all the time."""
FIRST_REMINDER_SECONDS: Final = 5.0
"""How long a join may wait before a line says what for..."""
REMINDER_SECONDS: Final = 30.0
"""... and how long until the next line."""
REFUSED_LIMIT: Final = 8
"""Refused nodes that are listed with a reason."""
FOREIGN_SHOWN: Final = 4
"""Addresses of nodes with another secret that are listed."""
SITUATION_LIMIT: Final = 4000
"""Characters of the whole text."""


class Situation:
    """Describes what one joining node waits for."""

    def __init__(self, mesh: ClusterMesh, formation: Formation) -> None:
        self._mesh, self._formation = mesh, formation

    def text(self) -> str:
        """Return what is waited for, which nodes are here, and which were refused and why."""
        waiting, refused = self._parts()
        if (more := len(refused) - REFUSED_LIMIT) > 0:
            refused = [*refused[:REFUSED_LIMIT], f"and {more} more"]
        if strangers := self._mesh.endpoint.acceptor.about_strangers():
            refused.append(strangers)
        if foreign := self._about_foreign():
            refused.append(foreign)
        return printable(f"{waiting}; problems: {'; '.join(refused)}" if refused else waiting, SITUATION_LIMIT)

    def _parts(self) -> tuple[str, list[str]]:
        """Return what is waited for with the nodes that are here, and a sorted text for each node that is not."""
        report = self._formation.report()
        reasons = {**self._mesh.report_problems(), **dict(report.refused)}
        waiting = f"{report.waiting}; here: {', '.join(report.here)}"
        if report.gone:
            waiting += f"; was here before, and has left: {', '.join(report.gone)}"
        return waiting, sorted(_problem(name, reason) for name, reason in reasons.items())

    def _about_foreign(self) -> str:
        """Return where nodes with another secret announce themselves, while no node of this cluster is linked."""
        foreign = self._mesh.search.foreign_ips() if not self._mesh.met else ()
        if not foreign:
            return ""
        shown, more = ", ".join(foreign[:FOREIGN_SHOWN]), len(foreign) - FOREIGN_SHOWN
        where = f"{shown}{f' and {more} more' if more > 0 else ''} {'announce' if foreign[1:] else 'announces'}"
        return (
            f"{where} another secret than cluster {self._mesh.cluster.name!r} has here: if that machine should be in "
            "it, type `covey pair` here and `covey enroll` there"
        )

    async def keep_logging(self, is_decided: Callable[[], bool]) -> None:
        """Log the situation until `is_decided()`: at first, on changes, on each newly refused node, and as reminder."""
        last, logged, logged_at, seldom = "", set[str](), 0.0, Seldom(NEXT_LOG_SECONDS)
        began = time.monotonic()
        await asyncio.sleep(FIRST_LOG_SECONDS)
        while not is_decided():
            (waiting, refused), now = self._parts(), time.monotonic()
            refused += [foreign] if (foreign := self._about_foreign()) else []
            is_reminder = now > logged_at + REMINDER_SECONDS
            if is_reminder:
                logged.clear()
            is_news = not logged.issuperset(refused) or waiting != last or is_reminder
            if is_news and seldom.may(now):
                last, logged_at = waiting, now
                logged.update(refused)
                logger.warning("waiting for run %r (%.0f s): %s", self._mesh.run, now - began, self.text())
            await asyncio.sleep(1.0)


def _problem(where: str, reason: str) -> str:
    """Return the problem with a node or an address as one phrase; an address that does not answer refuses nothing."""
    for verb in ("cannot be reached: ", "says: "):
        if reason.startswith(verb):
            return f"{where} {verb}{reason.removeprefix(verb).removeprefix(f'{where}: ')}"
    return f"{where}: {reason}"
