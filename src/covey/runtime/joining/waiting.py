"""What a node waits for, as data for the commands that ask: `covey doctor` and `covey status`. On the control loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from covey.wire.messages import MAX_MEMBERS, TROUBLES_LIMIT, AddressTrouble, Wait

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from covey.proto.formation import Formation
    from covey.runtime.peers.peer_table import PeerTable
    from covey.runtime.peers.remote_process import RemoteProcess
    from covey.runtime.views.views import Views
    from covey.wire.formation import Terms


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
