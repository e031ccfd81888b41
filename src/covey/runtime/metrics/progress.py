"""How far this process is, for views that ask every rank once a second.

Everything is read from counters that operations keep anyway: what is asked for costs an operation nothing. An answer
takes some tens of microseconds, and runs on the control loop.
"""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Any, Final

from covey.base.numbers import NAME_LIMIT
from covey.base.text import printable
from covey.base.version import __version__
from covey.net.discovery.interfaces import all_interfaces
from covey.net.host import tcp
from covey.net.lanes.stream import SocketLane
from covey.runtime.counters import process
from covey.runtime.recorder import clock_ns
from covey.wire import progress as wire
from covey.wire.reports import PastEvent

if TYPE_CHECKING:
    from collections.abc import Iterator

    from covey.runtime.counters import GroupCounters
    from covey.runtime.events import Event

INTERFACES_SECONDS: Final = 10.0
"""How long the list of network interfaces is used before it is read again."""
PHRASE_LETTERS: Final = 160
WELL: Final = ("active", "expected")
"""States of members that need no word."""


def encode_own(page: int) -> bytes:
    """Return how far this process is, with events after those that the asker knows; empty if it is in no run yet.

    `page` is `next_event` of the last answer, 0, or NO_EVENTS.
    """
    node: Any = next(iter(list(process.nodes)), None)
    if node is None:
        return b""
    events: list[Event] = []
    first = count = node.events.count
    if page != wire.NO_EVENTS:
        events, first = node.events.after(count - (count - page) % wire.NO_EVENTS)
    return wire.encode_progress(
        _progress(node), [_past(event) for event in events[: wire.PROGRESS_EVENTS_LIMIT]], first
    )


def _progress(node: Any) -> wire.RankProgress:
    now, groups = clock_ns(), process.groups()
    largest = sorted(groups, key=lambda group: -len(group.seats))[: wire.PROGRESS_GROUPS_LIMIT]
    generation, moved, (coded, plain) = node.generation, process.moved(), process.coded()
    coder = next((group for group in reversed(groups) if group.codec), None)
    log = node.reports
    return wire.RankProgress(
        run=node.run,
        run_id=node.run_id,
        rank=node.rank,
        generation=0 if generation is None else generation.number,
        view=0 if generation is None else generation.view.number,
        live=node.size if generation is None else len(generation.view.ranks),
        size=node.size if generation is None else len(generation.seats),
        began=node.since,
        taken_ns=now,
        spent_ns=process.spent_ns(),
        sent=sum(sent for sent, _ in moved.values()),
        received=sum(received for _, received in moved.values()),
        coded=coded,
        plain=plain,
        pid=os.getpid(),
        host=node.card.host_name,
        version=__version__,
        groups=tuple(_group(group, now) for group in largest),
        codec="" if coder is None else coder.codec,
        codec_reason="" if coder is None else printable(coder.codec_reason, PHRASE_LETTERS),
        plan=printable(node.events.plan, PHRASE_LETTERS),
        report=log.latest(),
        reported=log.count,
        doubts=tuple(_doubts(node))[: wire.DOUBTS_LIMIT],
        peers=tuple(_peers(node, moved)),
        is_recovering=node.events.is_recovering,
        program=printable(" ".join(os.path.basename(word) for word in sys.argv[:1]), PHRASE_LETTERS),
    )


def _group(group: GroupCounters, now: int) -> wire.GroupProgress:
    progress = group.recorder.progress()
    is_running = bool(progress.sequence) and not progress.ended_ns
    since = progress.begun_ns if is_running else progress.ended_ns
    return wire.GroupProgress(
        printable(group.name, NAME_LIMIT),
        group.rank,
        len(group.seats),
        progress.sequence,
        progress.operation,
        is_running,
        max(0, now - since) if since else 0,
        group.recorder.spent(),
        printable(group.fault, PHRASE_LETTERS),
    )


def _doubts(node: Any) -> Iterator[wire.Doubt]:
    """Yield the members of the generation that are not well, those that changed last first."""
    generation, now = node.generation, time.time()
    found = [(peer.since, seat, peer) for seat, peer in list(node.peers.items()) if peer.state.value not in WELL]
    for since, seat, peer in sorted(found, key=lambda each: -each[0])[: 4 * wire.DOUBTS_LIMIT]:
        rank = seat if generation is None else generation.rank_of(seat)
        if rank is not None:
            state = "left" if peer.state.value == "released" else peer.state.value
            why = peer.failure or peer.reason or ("it is not heard" if peer.is_suspected else "")
            yield wire.Doubt(rank, state, max(0.0, now - since), printable(why, PHRASE_LETTERS))


def _peers(node: Any, moved: dict[Any, tuple[int, int]]) -> Iterator[wire.PeerProgress]:
    """Yield the links with the ranks that most was moved to and from; of others those on further machines."""
    generation = node.generation
    most = sorted(
        node.peers,
        key=lambda seat: (-sum(moved.get(seat, (0, 0))), node.peers[seat].card.contact.host == node.host, seat),
    )
    groups: list[Any] = sorted(node.groups, key=lambda group: -len(group.members))
    for seat in most[: wire.PROGRESS_PEERS_LIMIT]:
        peer, rank = node.peers[seat], seat if generation is None else generation.rank_of(seat)
        if rank is None or peer.is_gone:
            continue
        lane = next((lane for group in groups if (lane := group.lane_to(seat)) is not None), None)
        link, is_here = peer.link, peer.card.contact.host == node.host
        own = "" if link is None else link.local_ip
        round_trip = next((taken for taken in (peer.last_ping, peer.round_trip) if taken >= 0), -1.0)
        rate, acknowledged, busy_us = _flow(lane)
        yield wire.PeerProgress(
            rank,
            *moved.get(seat, (0, 0)),
            "" if lane is None else lane.kind,
            "local" if is_here else _medium(own),
            round_trip,
            rate,
            bool(link is not None and link.relay),
            acknowledged,
            busy_us,
        )


def _flow(lane: Any) -> tuple[float, int, int]:
    """Return what a lane has sent a second while it was sending, the bytes that arrived, and how long it was sending.

    The speed is -1, and the others are 0, if that is not known; the time is in microseconds.
    """
    if not isinstance(lane, SocketLane):
        return -1.0, 0, 0
    try:
        sockets = lane.sockets()
        speeds = [speed for sock in sockets if (speed := tcp.sending_speed(sock)) is not None]
        flows = [flow for sock in sockets if (flow := tcp.flow(sock)) is not None]
    except OSError:  # its thread has closed it
        return -1.0, 0, 0
    acknowledged, busy = sum(acked for acked, _ in flows), max((busy for _, busy in flows), default=0)
    return sum(speeds) if speeds else -1.0, acknowledged, busy


_media: dict[str, str] = {}
"""By address of this machine: the medium of its interface."""
_media_read_at: list[float] = []


def _medium(address: str) -> str:
    now = time.monotonic()
    if not _media_read_at or now > _media_read_at[0] + INTERFACES_SECONDS:
        _media.clear()
        _media.update({each: interface.kind for interface in all_interfaces() for each in interface.addresses})
        _media_read_at[:] = [now]
    return _media.get(address, "unknown")


def _past(event: Event) -> PastEvent:
    return PastEvent(
        event.kind, event.time, event.generation, event.view, event.ranks, event.names, dict(event.phases), event.text
    )
