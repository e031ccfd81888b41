"""Watching over members on other machines: a pulled cable ends no connection, so somebody has to notice. On the loop.

Only the silence of a whole machine is acted upon: its kernel acknowledges what we send as long as it runs and can be
reached. A process that does not answer may be busy in a call that keeps the interpreter's lock, for minutes.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import TYPE_CHECKING

from covey.proto import health
from covey.wire import messages

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.runtime.node import Node, Peer


class Vigil:
    """Judges the ranks of a run that are on other hosts."""

    def __init__(self, node: Node, lost: Callable[[int, str], None]) -> None:
        """`lost(rank, reason)` is called for a rank whose machine was not heard any more."""
        self._node, self._lost = node, lost
        self._health = health.Health(node.host, time.monotonic())
        self._pings: dict[int, tuple[int, float]] = {}
        """By rank: the last one, and when it was sent."""

    async def keep(self) -> None:
        """Watch until cancelled, or until nobody is left to watch."""
        for peer in self._node.peers.values():
            self._watch(peer)
        while True:
            self._perform()
            pause = self._health.next_deadline() - time.monotonic()
            if pause == float("inf"):
                return
            await asyncio.sleep(max(0.001, pause))
            self._health.tick(time.monotonic())

    def heard(self, rank: int) -> None:
        """A rank said something, whatever it was."""
        self._health.heard(_id(rank), time.monotonic())

    def answered(self, rank: int, number: int) -> None:
        """A rank answered a ping."""
        sent, at = self._pings.pop(rank, (-1, 0.0))
        if sent == number:
            self._health.round_trip(_id(rank), time.monotonic() - at)

    def forget(self, rank: int) -> None:
        """A rank is gone: there is nothing more to find out."""
        self._health.forget(_id(rank))

    def _watch(self, peer: Peer) -> None:
        if peer.link is not None and peer.contact is not None and peer.contact.host != self._node.host:
            now = time.monotonic()
            self._health.watch(_id(peer.rank), peer.contact.host, now)
            self._health.link_up(_id(peer.rank), now)

    def _perform(self) -> None:
        for effect in self._health.effects():
            peer = self._node.peers[int.from_bytes(effect.peer, "big")]
            match effect:
                case health.Ping():
                    self._ping(peer)
                case health.Dead(_, health.Cause.HOST_SILENT, _):
                    self._health.forget(effect.peer)
                    self._lost(peer.rank, f"nothing was heard from {peer.host_name or 'its host'} any more")
                case health.Dead():
                    self._watch(peer)  # its machine is there, so it is busy
                case _:
                    pass

    def _ping(self, peer: Peer) -> None:
        if peer.link is None:
            return
        age = peer.link.acknowledged_seconds_ago()
        if age is not None:
            self._health.acknowledged(_id(peer.rank), time.monotonic() - age)
        number = secrets.randbits(32)
        self._pings[peer.rank] = number, time.monotonic()
        self._node.send(peer.rank, messages.Ping(number))


def _id(rank: int) -> bytes:
    return rank.to_bytes(4, "big")
