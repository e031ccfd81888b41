"""Gives every node its calls: they are awaited from the moment it joins a run, and loaded when the first one is made.

Most programs make no calls, and what serves them takes as long to load as the rest of covey.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from covey.runtime.calls.lane_transport import LaneTransport

if TYPE_CHECKING:
    from covey.base.config import GroupConfig
    from covey.base.errors import CoveyError
    from covey.base.numbers import Seat
    from covey.runtime.calls.functions import FunctionRegistry
    from covey.runtime.calls.lanes import CallingNode
    from covey.runtime.calls.service import CallService
    from covey.runtime.fault import Fault


class AwaitedCalls:
    """The calls of one node before the first one is made or comes: makes the service then. Any thread may call it."""

    def __init__(self, node: CallingNode, functions: FunctionRegistry | None = None) -> None:
        self._node, self._functions = node, functions
        self._making = threading.Lock()
        self._service: CallService | None = None
        self._lost: set[Seat] = set()
        self._fault: Fault | None = None
        self._is_closed = self._is_draining = False
        self._transport = LaneTransport(node, self)

    def service(self) -> CallService:
        """Return the service; make it on first use."""
        with self._making:
            if self._service is None:
                from covey.runtime.calls.service import CallService

                self._service = CallService(
                    lambda _: self._transport, self._node.config, self._node.run, self._functions
                )
                self._transport.listener = self._service
                for peer in self._lost:
                    self._service.lost(peer)
                if self._fault is not None:
                    self._service.ended(self._fault)
                if self._is_draining:
                    self._service.drain()
                if self._is_closed:
                    self._service.close()
            return self._service

    @property
    def functions(self) -> FunctionRegistry | None:
        """The functions that were registered, if any were."""
        return self._functions if self._service is None else self._service.functions

    # What the transport reports until there is a service

    def heard(self, messages: list[tuple[Seat, bytes]]) -> None:
        """Pass on messages of other nodes."""
        self.service().heard(messages)

    def lost(self, peer: Seat) -> None:
        """Note that a node is gone."""
        with self._making:
            self._lost.add(peer)
            service = self._service
        if service is not None:
            service.lost(peer)

    def broke_protocol(self, peer: Seat, error: CoveyError) -> None:
        """Pass on that a node broke the protocol."""
        self.service().broke_protocol(peer, error)

    def ended(self, fault: Fault) -> None:
        """Note that the other nodes have nothing to do with this one any more."""
        with self._making:
            self._fault = self._fault or fault
            service = self._service
        if service is not None:
            service.ended(fault)

    def forked(self) -> None:
        """Make the calls unusable: this process is a fork of the one that joined."""
        self._making, self._is_closed = threading.Lock(), True  # a thread of the parent may have held the lock
        if self._service is not None:
            self._service.forked()

    def deliver_answers(self) -> None:
        """Wait until the answers that were given are delivered, as long as they move; for half a minute at most."""
        if self._service is not None:
            self._service.deliver_answers()

    def drain(self) -> None:
        """Refuse calls of other nodes from now on; those that have come are served."""
        with self._making:
            self._is_draining = True
            service = self._service
        if service is not None:
            service.drain()

    @property
    def is_busy(self) -> bool:
        """Whether calls of other nodes have no answer yet."""
        return self._service is not None and self._service.is_busy

    def close(self) -> None:
        """Free the lanes."""
        with self._making:
            self._is_closed = True
            service = self._service
        if service is not None:
            service.close()
        else:
            self._transport.shut()


def calls_alone(config: GroupConfig, name: str) -> CallService:
    """Return the calls of a node that is alone: it can call itself."""
    from covey.runtime.calls.service import CallService

    return CallService(lambda _: None, config, name)
