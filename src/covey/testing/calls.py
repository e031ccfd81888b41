"""Nodes of one process that call each other without a network: a double of `group.node` for tests of programs."""

from __future__ import annotations

import functools
from collections import deque
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np

from covey.base.config import GroupConfig
from covey.base.errors import ConfigError, CoveyError, PeerLostError
from covey.base.numbers import Rank, Seat
from covey.runtime.calls.service import CallService
from covey.runtime.calls.transport import BackgroundTransport
from covey.runtime.group.node import Node

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from covey.runtime.calls.transport import CallListener, PartsTaker


class _MemoryTransport(BackgroundTransport):
    """Hands messages to the other services of its network, on the thread that sends them."""

    def __init__(self, network: LinkedNodes, seat: Seat, listener: CallListener) -> None:
        self._network, self.seat = network, seat
        network.listeners[seat] = listener

    def lists_handles(self) -> bool:
        """Return True: all nodes are of this release."""
        return True

    def is_member(self, seat: Seat) -> bool:
        """Tell whether there is such a node, or was."""
        return seat < len(self._network)

    def may_be_member(self, seat: int) -> bool:
        """Tell the same: no node learns of another later than the rest."""
        return self.is_member(Seat(seat))

    def send(self, messages: list[tuple[Seat, bytes]]) -> None:
        """Deliver messages."""
        for peer, data in messages:
            if peer in self._network.listeners and self.seat in self._network.listeners:
                self._network.listeners[peer].heard([(self.seat, data)])

    def send_parts(self, peer: Seat, tag: int, parts: Sequence[Any], priority: int, share: float = 1.0) -> None:
        """Keep copies of parts for the receiver."""
        copies = [np.frombuffer(part, np.uint8).copy() for part in parts]
        self._network.parts.setdefault((self.seat, peer, tag), deque()).append(copies)

    def fetch_parts(self, peer: Seat, tag: int, sizes: Sequence[int], then: PartsTaker) -> None:
        """Take the parts that the sender has left."""
        then(self._network.parts[peer, self.seat, tag].popleft())

    def refuse_parts(self, peer: Seat, tag: int, count: int) -> None:
        """Drop the parts that the sender has left."""
        self._network.parts[peer, self.seat, tag].popleft()

    def lost_error(self, peer: Seat, rank: int, operation: str) -> CoveyError:
        """Return the error of a call to a lost node."""
        return PeerLostError(f"{operation}: rank {rank}, which was called, is lost", rank=rank, operation=operation)

    def cut_off(self, peer: Seat, error: CoveyError) -> None:
        """Treat the node as lost."""
        self._network.lose(peer)

    def shut(self) -> None:
        """Leave the network."""
        self._network.lose(self.seat)


class _DoubleRanks:
    """The ranks of the network, as one node sees them."""

    name, node = "linked nodes", None

    def __init__(self, network: LinkedNodes, rank: int, size: int) -> None:
        self._network = network
        self.rank, self.size = Rank(rank), size
        self.ranks = [Rank(each) for each in range(size)]
        self.seats = [Seat(each) for each in range(size)]
        self.roster = self.facts = self
        self.rank_of = dict(zip(self.seats, self.ranks, strict=True))

    @property
    def live(self) -> tuple[Rank, ...]:
        return tuple(rank for rank in self.ranks if Seat(rank) in self._network.listeners)

    def peer(self, rank: Rank) -> None:
        return None


class LinkedNodes:
    """Several `covey.Node`s of this process, by rank, which call each other as the nodes of a run do.

    Calls, deadlines, cancellation, streams, handles and errors are those of a run, and arguments are encoded and
    decoded; there is no network. Use it in `with`, or `close` it.
    """

    def __init__(self, size: int, *, timeout: float = 30.0, call_handlers: int = 64, call_bytes: int = 1 << 30) -> None:
        """Make `size` nodes; the other arguments are settings of the run."""
        if size < 1:
            raise ConfigError(f"size={size} must be at least 1")
        config = GroupConfig(timeout=timeout, call_handlers=call_handlers, call_bytes=call_bytes)
        self.listeners: dict[Seat, CallListener] = {}
        """The nodes that are not lost."""
        self.parts: dict[tuple[int, int, int], deque[list[Any]]] = {}
        """By sender, receiver and tag: parts that were sent and not taken."""
        self._services = [
            CallService(functools.partial(_MemoryTransport, self, Seat(rank)), config, f"node {rank}")
            for rank in range(size)
        ]
        self._nodes = [
            Node(cast("Any", _DoubleRanks(self, rank, size)), service, None)
            for rank, service in enumerate(self._services)
        ]

    def __getitem__(self, rank: int) -> Node:
        return self._nodes[rank]

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes)

    def lose(self, rank: int) -> None:
        """Let a node be lost: calls with it end with PeerLostError."""
        if self.listeners.pop(Seat(rank), None) is not None:
            for listener in list(self.listeners.values()):
                listener.lost(Seat(rank))

    def close(self) -> None:
        """Close all nodes. Closing twice is fine."""
        for service in self._services:
            service.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
