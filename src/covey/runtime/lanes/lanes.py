"""The lanes of groups: what groups, links and views ask of them.

Any thread can ask for a lane; it is opened on the control loop. One end of each pair dials (`lanes.dialler`),
the other accepts (`lanes.acceptor`). `lanes.table` has the lanes; `lanes.kinds` has the rules for
their kind.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from covey.base.errors import ConnectError, DeadlineError
from covey.base.lane_kinds import LANE_KINDS
from covey.net.host.descriptors import FREE_DESCRIPTOR_SECONDS, ScarceError
from covey.net.lanes.factory import LaneFactory
from covey.runtime import loop as control
from covey.runtime.lanes.acceptor import LaneAcceptor
from covey.runtime.lanes.connections import LaneConnections, LaneMaker, StripedLanes
from covey.runtime.lanes.dialler import LaneDialler
from covey.runtime.lanes.kinds import LaneRules
from covey.runtime.lanes.opener import OwnEnd, opener_class
from covey.runtime.lanes.resumption import LaneResumption
from covey.runtime.lanes.table import LaneKey, LaneTable, lane_key
from covey.runtime.lanes.tuning.moves import LaneMoves
from covey.runtime.lanes.tuning.path_monitor import PathMonitor
from covey.runtime.lanes.tuning.stripes import Stripes, may_stripe
from covey.runtime.lanes.tuning.trials import StreamTrials, may_try_streams
from covey.wire import messages

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from covey.base.config import GroupConfig
    from covey.base.numbers import Seat
    from covey.runtime.lanes.groups import GroupRegistry
    from covey.runtime.links.acceptor import Acceptor
    from covey.runtime.peers.peer_table import Inbox, PeerTable, Routes
    from covey.runtime.peers.remote_process import RemoteProcess
    from covey.runtime.tasks import Tasks

REPLACE_SECONDS: Final = (0.3, 1.5)
"""Seconds after the replacement of a link at which its lanes for messages are replaced: first and second try."""


class Lanes:
    """The lanes of one process, open or being opened: wires the parts that open, move and tune them."""

    def __init__(
        self,
        config: GroupConfig,
        contact: messages.Contact,
        acceptor: Acceptor,
        routes: Routes,
        *,
        peers: PeerTable,
        tasks: Tasks,
        groups: GroupRegistry,
        tell: Callable[[str, RemoteProcess, str], None],
    ) -> None:
        """`contact` is where this process listens; `tell` adds an event about a peer.

        Raises:
            ConfigError: the settings demand what this system does not have.
        """
        self._acceptor, self._peers, self._tasks, self._groups = acceptor, peers, tasks, groups
        credentials, limit = routes.credentials, config.limit
        is_clear = credentials.tls is None
        demanded = LANE_KINDS.get(config.lanes)
        may_seal = not is_clear or (demanded is not None and demanded.is_sealed)
        self.factory: LaneFactory = LaneFactory(may_seal=may_seal, kernel_copy=config.kernel_copy)
        """Makes the lanes, for the compiled executor or for the one in Python."""
        end = OwnEnd(self.factory, contact, credentials, acceptor)
        self.openers = openers = {kind.name: opener_class(kind)(kind, end) for kind in LANE_KINDS.values()}
        """By kind of lane."""
        self._rules = LaneRules(config, peers, openers, self.factory, is_clear=is_clear)
        connections = LaneConnections(routes, openers, limit, peers, tasks, groups.urgency)
        self.limit = connections.limit
        """Spaces out what is sent: it is told of what is urgent."""
        self.resumption = LaneResumption(
            config, peers, tasks, connections, leave_path=lambda seat: self.paths.stuck(seat), tell=tell
        )
        """Opens other connections for lanes whose path dies."""
        striped, can_stripe = StripedLanes(tasks), self.factory.is_native and may_stripe(config)
        maker = LaneMaker(openers, connections, self.resumption, striped)
        self.table = table = LaneTable(peers, tasks, groups, tell)
        self.dialler = LaneDialler(peers, tasks, groups, table, self._rules, openers, connections, maker)
        self.acceptor = LaneAcceptor(
            peers, tasks, groups, table, self._rules, connections, maker, self.resumption, may_stripe=can_stripe
        )
        self.moves = moves = LaneMoves(
            peers,
            tasks,
            groups,
            table,
            self.dialler,
            is_resuming=self.resumption.is_resuming,
            reason=lambda seat: self.stream_trials.reason(seat),
            tell=tell,
        )
        stripes = Stripes(routes, peers, table, moves, is_allowed=can_stripe)
        can_try = self.factory.is_native and may_try_streams(config)
        self.stream_trials = StreamTrials(groups, table, self._rules, moves, tell, is_allowed=can_try)
        self.paths = PathMonitor(
            routes, peers, tasks, groups, table, moves, stripes, self.stream_trials, tell, has_limit=bool(limit)
        )
        """Looks for better paths to the peers that this end dials."""
        acceptor.give_lanes(self.acceptor.claim)

    def take_from(self, inbox: Inbox) -> None:
        """Take the messages of members that concern lanes."""
        inbox.give(messages.Dial, self.dialler.asked)
        inbox.give(messages.Offer, self.acceptor.offered)
        inbox.give(messages.Expect, lambda seat, expect: self.dialler.accepted(seat, expect.lane, expect.udp_port))
        inbox.give(messages.NoLane, lambda seat, no: self.dialler.refused(
            lane_key(no.group, seat, no.purpose, no.attempt), no.reason
        ))  # fmt: skip
        inbox.give(messages.Allowance, lambda seat, allowance: self.limit.allowed(seat, allowance.rate))
        inbox.give(messages.MoveLane, self._heard_of_move)
        inbox.give(messages.StreamNews, self.resumption.heard)

    def _heard_of_move(self, seat: Seat, message: messages.MoveLane) -> None:
        if message.step != "leave":
            self.moves.heard(seat, message)
        elif self._peers[seat].is_dialled:
            self.paths.stuck(seat)

    # For groups, on any thread

    def kind(self, peer: Seat) -> str:
        """Return the kind of lane that this end offers; ConfigError if the settings demand one that it cannot have."""
        return self._rules.offered_kind(peer, "collectives").name

    def shares_memory(self, peer: Seat) -> bool:
        """Tell whether ranks like these share memory, whatever their executors can do: equal on all ranks."""
        return self._rules.kind_to(peer).has_rings

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
            name = self._peers.name_of(peer)
            if not self._peers[peer].is_dialled:
                for shortage in (self._acceptor.shortage, self.acceptor.shortage):
                    if shortage.has_lasted(FREE_DESCRIPTOR_SECONDS):
                        raise ScarceError(f"the lane that {name} dials cannot be accepted: {shortage.reason}") from None
            raise DeadlineError(f"no lane to {name} within the timeout of {timeout:g} s") from None

    def _request(self, key: LaneKey) -> Future[Any]:
        future = self.table.want(key)
        if not future.done():
            control.soon(self.dialler.open, key)
            if self._peers[key.peer].is_gone:
                self.table.failed(key, ConnectError(f"{self._peers.name_of(key.peer)} is gone"))
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

    def forget(self, group: int, sequence: int) -> None:
        """Close the lanes of a group, whose last operation was `sequence`, and refuse later ones."""
        self._groups.forget(group, sequence)
        self.table.forget(group)

    def retire(self, group: int, attempt: int) -> None:
        """Close the lanes of a group's attempts before this one. No thread may be using them."""
        self.table.retire(group, attempt)

    def abandon(self, unwanted: Callable[[LaneKey], bool], error: BaseException) -> None:
        """Fail the waits for lanes that will not open."""
        self.table.abandon(unwanted, error)

    def close(self) -> None:
        """Close all lanes, and what carries them."""
        self.table.close()
        for opener in self.openers.values():
            opener.close()

    # For links and views, on the control loop

    def part_with(self, peer: Seat) -> None:
        """Shut down the lanes to a peer that a view excluded, and fail the waits for them.

        What the peer sent before is still read; the users of the lanes close them. If the peer said goodbye, lanes for
        collectives stay open: the last bytes of its part may still be on the way to a group that ends with its first
        loss.
        """
        self.table.abandon(lambda key: key.peer == peer, ConnectError(f"{self._peers.name_of(peer)} is gone"))
        self.acceptor.stop_expecting(peer)
        self.table.shut_down(peer, collectives=not self._peers[peer].has_left)

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

    def _replace(self, key: LaneKey, before: Future[Any]) -> None:
        """Replace a lane for messages, unless it was replaced already."""
        if self.table.get(key) is before and self._peers[key.peer].link is not None and not self._tasks.is_closing:
            self.dialler.replace(key)
