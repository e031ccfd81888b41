"""What a node waits for. On the control loop.

A `Situation` has it in words, for the log of a joining node and for the error when time is up; `of_joiner` and
`of_member` return it as data for the commands that ask: `covey doctor` and `covey status`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Final

from covey.base.pace import Seldom
from covey.base.text import printable
from covey.wire.messages import MAX_MEMBERS, TROUBLES_LIMIT, AddressTrouble, Wait

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from covey.proto.formation import Formation
    from covey.runtime.peers.cluster_mesh import ClusterMesh
    from covey.runtime.peers.peer_table import PeerTable
    from covey.runtime.peers.remote_process import RemoteProcess
    from covey.runtime.views.views import Views
    from covey.wire.formation import Terms

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


def of_joiner(formation: Formation, terms: Terms, problems: Mapping[str, str], seeds: Sequence[str]) -> Wait | None:
    """Return what a joining node waits for; None if it is about to get a seat.

    `problems` are those of its mesh, by seed, address or node.
    """
    cause, report = formation.waits_for(), formation.report()
    if not cause:
        return None
    refused = dict(report.refused)
    others = {where: why for where, why in problems.items() if where not in seeds and where not in refused}
    return Wait(
        cause=cause,
        text=report.waiting,
        program=terms.program,
        size=terms.size,
        min_size=terms.min_size,
        max_size=terms.max_size,
        version=str(terms.speaks),
        lanes=terms.lanes,
        on_loss=terms.on_loss,
        here=report.here[:MAX_MEMBERS],
        missing=report.awaited[:MAX_MEMBERS],
        seeds=_troubles((seed, problems[seed]) for seed in seeds if seed in problems),
        refused=_troubles(refused.items()),
        problems=_troubles(others.items()),
    )


def of_member(views: Views, peers: PeerTable) -> Wait | None:
    """Return which members of its generation a node does not hear from; None if it hears from all of them."""
    generation = views.generation
    if generation is None or generation.is_over:
        return None
    names = {member.seat: member.card.name for member in generation.founded.members}
    in_view = [(rank, generation.seats[rank]) for rank in generation.view.ranks]
    unheard = [(rank, seat) for rank, seat in in_view if seat in peers and _is_unheard(peers[seat])]
    if not unheard:
        return None
    said = ", ".join(f"rank {rank} ({names[seat]})" for rank, seat in unheard)
    has_quorum = views.generations.hears_quorum
    needed = "" if has_quorum else "; the members that are heard are no quorum, so the run cannot continue without them"
    return Wait(
        cause="members" if has_quorum else "quorum",
        text=f"{said} cannot be heard{needed}",
        missing=tuple(names[seat] for _, seat in unheard),
    )


def _is_unheard(peer: RemoteProcess) -> bool:
    return not (peer.has_left or peer.is_excluded) and (peer.link is None or peer.is_suspected)


def _troubles(found: Iterable[tuple[str, str]]) -> tuple[AddressTrouble, ...]:
    return tuple(AddressTrouble(where, bare_reason(where, why)) for where, why in found)[:TROUBLES_LIMIT]


def bare_reason(where: str, why: str) -> str:
    """Return why `where` was not reached, without repeating `where`."""
    return why.removeprefix("cannot be reached: ").removeprefix(f"{where}: ")
