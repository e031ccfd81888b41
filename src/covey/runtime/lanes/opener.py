"""How both ends of a pair open lanes of one kind. A kind that needs more than connections has an opener of its own.

The end that dials prepares, offers, connects and then makes its lane; the other end makes its own of the connections
that it has accepted (`lanes.dialler`, `lanes.acceptor`). On the control loop.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from covey.base.lane_kinds import LANE_KINDS

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

    from covey.base.config import GroupConfig
    from covey.base.lane_kinds import LaneKind
    from covey.net.lanes.factory import LaneFactory
    from covey.runtime.links.acceptor import Acceptor
    from covey.runtime.links.handshake import LinkCredentials, Where
    from covey.wire import messages

    Directs = Sequence[bool] | None
    """For a lane that can go on over other connections: of each, whether the kernel counts what the other end has."""


@dataclass(frozen=True)
class OwnEnd:
    """What openers may use of this process."""

    factory: LaneFactory
    contact: messages.Contact
    """Where it listens."""
    credentials: LinkCredentials
    acceptor: Acceptor


class Prepared:
    """What the dialling end has made before its offer, and hands over afterwards. Nothing, for most kinds."""

    capacity = 0
    """The bytes of a ring; 0 without rings."""

    def release(self) -> None:
        """Free what was not handed over."""


class LaneOpener:
    """Opens lanes of one kind in one process."""

    def __init__(self, kind: LaneKind, end: OwnEnd) -> None:
        self.kind, self._end = kind, end

    @classmethod
    def check(cls, config: GroupConfig) -> None:
        """Raise ConfigError if the settings demand this kind, and this process can have no such lane."""

    def obstacle(self) -> str:
        """Return why this process can have no such lane; empty if it can."""
        return ""

    def carries(self, purpose: str) -> bool:
        """Tell whether lanes of this kind are for a purpose, too; others take the place of this one."""
        return True

    def capacities(self, config: GroupConfig) -> tuple[int, ...]:
        """Return the sizes of rings that an offered lane may have, the largest first; none without rings."""
        return ()

    # The end that dials

    def prepare(self, capacity: int) -> Prepared:
        """Make what has to exist before a lane is offered, with a ring of so many bytes.

        Raises:
            OSError: this process cannot have such a lane now; `LaneKind.instead` takes its place.
            ScarceError: it has no free descriptor.
        """
        return Prepared()

    def ways(self, ways: list[Where], port: int) -> list[Where]:
        """Return where to dial for a lane of this kind, from the ways to a peer by TCP.

        `port` is what the other end has said. ConfigError or OSError if this end can dial none.
        """
        return ways

    async def dialled(
        self, prepared: Prepared, socks: list[socket.socket], offer: messages.Offer, directs: Directs
    ) -> Any:
        """Return the lane (for collectives) or the socket (for messages) of connections that this end has dialled."""
        return self.make(socks, offer, directs, dialler=True)

    # The end that accepts

    def port(self) -> int:
        """Return the UDP port at which this end accepts such lanes, if not where links are accepted; else 0.

        Raises:
            ConfigError, OSError: it cannot accept any.
        """
        return 0

    async def accepted(self, socks: list[socket.socket], offer: messages.Offer, directs: Directs) -> Any:
        """Return the lane (for collectives) or the socket (for messages) of connections that this end has accepted."""
        return self.make(socks, offer, directs, dialler=False)

    # Both

    def make(self, socks: list[socket.socket], offer: messages.Offer, directs: Directs, *, dialler: bool) -> Any:
        """Return this end of a lane over connections. Takes ownership of them."""
        raise NotImplementedError

    def close(self) -> None:
        """Free what lanes share. On any thread."""


class StreamOpener(LaneOpener):
    """Opens lanes over one stream socket, in clear text."""

    def make(self, socks: list[socket.socket], offer: messages.Offer, directs: Directs, *, dialler: bool) -> Any:
        if offer.purpose == "messages":
            return socks[0]
        return self._end.factory.stream(socks[0], offer.kind, directs=directs)


class SealedOpener(LaneOpener):
    """Opens lanes that encrypt what they carry."""

    def make(self, socks: list[socket.socket], offer: messages.Offer, directs: Directs, *, dialler: bool) -> Any:
        factory = self._end.factory
        if offer.purpose == "messages":
            from covey.net.lanes.sealed import SealedSocket  # slow to import; ranks of one host need none

            return SealedSocket(socks[0], offer.secret, offer.lane, dialler=dialler)
        if offer.is_striped:
            return factory.striped(socks, offer.secret, offer.lane, dialler=dialler, directs=directs)
        return factory.sealed(socks, offer.secret, offer.lane, dialler=dialler, directs=directs, kind=offer.kind)


def opener_class(kind: LaneKind) -> type[LaneOpener]:
    """Return what opens lanes of a kind; its module is loaded now."""
    module, _, name = kind.opener.partition(":")
    found: type[LaneOpener] = getattr(importlib.import_module(module), name)
    return found


def check_demanded(config: GroupConfig) -> None:
    """Raise ConfigError if the settings demand a kind of lanes, and this process can have no such lane."""
    if (kind := LANE_KINDS.get(config.lanes)) is not None:
        opener_class(kind).check(config)
