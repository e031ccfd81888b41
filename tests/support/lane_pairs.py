"""Both ends of a lane of any kind, made by what opens its lanes in a run."""

from __future__ import annotations

import asyncio
import secrets
import socket
from typing import TYPE_CHECKING, Any

from covey.base.lane_kinds import LANE_KINDS
from covey.base.native import native
from covey.net.host.machine import native_crypto
from covey.net.lanes import shm
from covey.net.lanes.factory import LaneFactory
from covey.runtime.lanes.opener import OwnEnd, Prepared, opener_class
from covey.runtime.links.acceptor import Acceptor
from covey.runtime.links.handshake import LinkCredentials
from covey.runtime.peers.remote_process import NOWHERE
from covey.wire import messages

if TYPE_CHECKING:
    from covey.base.lane_kinds import LaneKind
    from covey.runtime.lanes.opener import LaneOpener

RING_BYTES = 128 << 10


def usable_kinds(*, is_native: bool = native().module is not None) -> list[LaneKind]:
    """Return the kinds that a process with the compiled executor, or without it, can have here."""
    obstacle = shm.obstacle_here(is_native=is_native)
    return [
        kind
        for kind in LANE_KINDS.values()
        if not (kind.name == "shm" and obstacle) and not (is_native and kind.is_sealed and native_crypto())
    ]


def open_pair(name: str, *, is_native: tuple[bool, bool] = (False, False), streams: int = 1) -> tuple[Any, Any]:
    """Return both ends of a lane for collectives, the dialling one first; each moved by the executor named."""
    dialling, accepting = (opener_of(LANE_KINDS[name], is_native=each) for each in is_native)
    pairs = [_connected(name) for _ in range(streams)]
    prepared = dialling.prepare(RING_BYTES) if LANE_KINDS[name].has_rings else Prepared()
    offer = messages.Offer(
        secrets.token_bytes(16), secrets.token_bytes(32), 1, "collectives", name, prepared.capacity, streams, 0
    )

    async def both() -> tuple[Any, Any]:
        dialled, accepted = ([pair[end] for pair in pairs] for end in range(2))
        for sock in (*dialled, *accepted):
            sock.setblocking(False)
        return await asyncio.gather(
            dialling.dialled(prepared, dialled, offer, None), accepting.accepted(accepted, offer, None)
        )

    try:
        return asyncio.run(both())
    finally:
        prepared.release()


def opener_of(kind: LaneKind, *, is_native: bool = False) -> LaneOpener:
    """Return what opens lanes of a kind in a process that is in no run."""
    factory = LaneFactory(may_seal=kind.is_sealed)
    factory.is_native = is_native
    credentials = LinkCredentials.of_token(b"")
    end = OwnEnd(factory, NOWHERE, credentials, Acceptor((), credentials.door_key, "a test"))
    return opener_class(kind)(kind, end)


def _connected(name: str) -> tuple[socket.socket, socket.socket]:
    """Return a connection as lanes of a kind have it."""
    if not LANE_KINDS[name].is_of_network:
        return socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    return one, other
