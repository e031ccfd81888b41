"""The lanes of groups: what groups, links and views ask of them.

Any thread can ask for a lane; it is opened on the control loop. One end of each pair dials (`lanes.dialler`),
the other accepts (`lanes.acceptor`). `lanes.table` has the lanes; `lanes.kinds` has the rules for
their kind.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from covey.base.errors import ConnectError, DeadlineError
from covey.net.host.descriptors import FREE_DESCRIPTOR_SECONDS, ScarceError
from covey.net.lanes.factory import LaneFactory
from covey.runtime import loop as control
from covey.runtime.lanes.acceptor import LaneAcceptor
from covey.runtime.lanes.dialler import LaneDialler
from covey.runtime.lanes.kinds import SEALED_KINDS, kind_to, offered_kind
from covey.runtime.lanes.quic import QuicPaths
from covey.runtime.lanes.resumption import LaneResumption
from covey.runtime.lanes.table import LaneKey, LaneTable
from covey.runtime.lanes.tuning.moves import LaneMoves
from covey.runtime.lanes.tuning.packet_losses import PacketLosses
from covey.runtime.lanes.tuning.receiving_limit import ReceivingLimit
from covey.runtime.lanes.tuning.sending_limit import SendingLimit

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from covey.base.numbers import Seat
    from covey.runtime.members.node import Node

REPLACE_SECONDS: Final = (0.3, 1.5)
"""Seconds after the replacement of a link at which its lanes for messages are replaced: first and second try."""


class Lanes:
    """The lanes of one node, open or being opened."""

    def __init__(self, node: Node) -> None:
        self._node = node
        may_seal = node.credentials.tls is not None or node.config.lanes in SEALED_KINDS
        self.factory: LaneFactory = LaneFactory(may_seal=may_seal, kernel_copy=node.config.kernel_copy)
        """Makes the lanes, for the compiled executor or for the one in Python."""
        self.limit = SendingLimit(node)
        """Spaces out what the lanes send, if there is a limit here or at the other end."""
        self.receiving_limit = ReceivingLimit(node)
        """Tells peers how fast they may send, if there is a limit."""
        self.losses = PacketLosses(node)
        """Changes how lanes send on which packets get lost."""
        self.quic = QuicPaths(node)
        """Carries the lanes that go by QUIC."""
        self.resumption = LaneResumption(node)
        """Opens other connections for lanes whose path dies."""
        self.table = LaneTable(node)
        self.dialler = LaneDialler(node, self.table)
        self.acceptor = LaneAcceptor(node, self.table)
        self.moves = LaneMoves(node, self.table, self.dialler)

    # For groups, on any thread

    def kind(self, peer: Seat) -> str:
        """Return the kind of lane that this end offers; ConfigError if the settings demand one that it cannot have."""
        return offered_kind(self._node, peer, "collectives")

    def shares_memory(self, peer: Seat) -> bool:
        """Tell whether ranks like these share memory, whatever their executors can do: equal on all ranks."""
        return kind_to(self._node, peer) in ("shm", "memory")

    def open(self, group: int, peer: Seat, purpose: str, timeout: float, attempt: int = 0) -> Any:
        """Return the lane (for collectives) or the socket (for messages) to `peer`, opened if need be.

        Raises:
            ConnectError: the peer is gone, or refused; a ScarceError if this process has had no free descriptor for it
                for `SCARCE_SECONDS`.
            ClosedError: the group, or the attempt, is over here.
            DeadlineError: the lane did not open in time; call again to go on waiting.
        """
        future = self._request(LaneKey(group, peer, purpose, attempt))
        try:
            return control.result_of(future, timeout)
        except TimeoutError:
            name = self._node.generation_table.name_of(peer)
            if not self._node.peers[peer].is_dialled:
                for shortage in (self._node.acceptor.shortage, self.acceptor.shortage):
                    if shortage.has_lasted(FREE_DESCRIPTOR_SECONDS):
                        raise ScarceError(f"the lane that {name} dials cannot be accepted: {shortage.reason}") from None
            raise DeadlineError(f"no lane to {name} within the timeout of {timeout:g} s") from None

    def _request(self, key: LaneKey) -> Future[Any]:
        future = self.table.want(key)
        if not future.done():
            control.soon(self.dialler.open, key)
            if self._node.peers[key.peer].is_gone:
                self.table.failed(key, ConnectError(f"{self._node.generation_table.name_of(key.peer)} is gone"))
        return future

    def renew(self, group: int, peer: Seat, ended: Any) -> Future[Any]:
        """Ask for a lane for messages to replace `ended`; the future has it, or the error that `open` would raise."""
        key = LaneKey(group, peer, "messages")
        self.table.discard(key, ended)
        return self._request(key)

    def give_up(self, group: int, peer: Seat) -> None:
        """Stop replacing the lane for messages with a peer: its stream cannot be resumed."""
        self.table.give_up(LaneKey(group, peer, "messages"))

    def arrived(self, group: int, purpose: str) -> dict[Seat, Any]:
        """Return the open lanes of a group, by peer."""
        return self.table.of_group(group, purpose)

    def ended(self, group: int, sequence: int) -> bool:
        """Tell whether a group was closed here before operation `sequence`."""
        return self.table.is_closed_before(group, sequence)

    def has_closed(self, group: int) -> bool:
        """Tell whether a group was closed here."""
        return self.table.has_closed(group)

    def forget(self, group: int, sequence: int) -> None:
        """Close the lanes of a group, whose last operation was `sequence`, and refuse later ones."""
        self.table.forget(group, sequence)

    def retire(self, group: int, attempt: int) -> None:
        """Close the lanes of a group's attempts before this one. No thread may be using them."""
        self.table.retire(group, attempt)

    def abandon(self, unwanted: Callable[[LaneKey], bool], error: BaseException) -> None:
        """Fail the waits for lanes that will not open."""
        self.table.abandon(unwanted, error)

    def close(self) -> None:
        """Close all lanes."""
        self.table.close()

    # For links and views, on the control loop

    def part_with(self, peer: Seat) -> None:
        """Shut down the lanes to a peer that a view excluded, and fail the waits for them.

        What the peer sent before is still read; the users of the lanes close them. If the peer said goodbye, lanes for
        collectives stay open: the last bytes of its part may still be on the way to a group that ends with its first
        loss.
        """
        self.table.abandon(
            lambda key: key.peer == peer, ConnectError(f"{self._node.generation_table.name_of(peer)} is gone")
        )
        self.acceptor.stop_expecting(peer)
        self.table.shut_down(peer, collectives=not self._node.peers[peer].has_left)

    def link_up(self, peer: Seat) -> None:
        """Ask again, on the new link with a peer, for the lanes that are waited for.

        Where a link broke, lanes may have broken unnoticed. Lanes for messages are replaced, which loses nothing, a
        moment later: by then both ends know which of them dials.
        """
        loop = asyncio.get_running_loop()
        self.moves.link_up(peer)
        for key, future in self.table.of_peer(peer):
            if not future.done():
                self.dialler.open(key)
            elif key.purpose == "messages":
                for seconds in REPLACE_SECONDS:
                    loop.call_later(seconds, self._replace, key, future)

    def replace_messages(self, peer: Seat) -> None:
        """Open the lanes for messages with a peer anew, which loses nothing."""
        for key, future in self.table.of_peer(peer):
            if key.purpose == "messages" and future.done() and future.exception() is None:
                self.dialler.replace(key)

    def _replace(self, key: LaneKey, before: Future[Any]) -> None:
        """Replace a lane for messages, unless it was replaced already."""
        if self.table.get(key) is before and self._node.peers[key.peer].link is not None and not self._node.is_closing:
            self.dialler.replace(key)
