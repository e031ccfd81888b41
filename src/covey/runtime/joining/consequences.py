"""What follows from views, and from links that end, for the lanes, the state and the groups of this process."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from covey.base.errors import ConnectError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from covey.base.config import GroupConfig
    from covey.base.numbers import Seat
    from covey.runtime.fault import Fault
    from covey.runtime.lanes.groups import GroupRegistry
    from covey.runtime.lanes.lanes import Lanes
    from covey.runtime.peers.peer_table import Inbox, PeerTable
    from covey.runtime.peers.remote_process import RemoteProcess
    from covey.runtime.state.checkpoints import Checkpoints
    from covey.runtime.state.store import Stores
    from covey.runtime.views.generation import Generation
    from covey.wire import messages


class Consequences:
    """Passes on to each part what views and links mean for it. On the control loop."""

    def __init__(
        self,
        run: str,
        config: GroupConfig,
        peers: PeerTable,
        *,
        lanes: Lanes,
        stores: Stores,
        checkpoints: Checkpoints,
        groups: GroupRegistry,
        inbox: Inbox,
    ) -> None:
        self._run, self._config, self._peers = run, config, peers
        self._lanes, self._stores, self._checkpoints = lanes, stores, checkpoints
        self._groups, self._inbox = groups, inbox

    def begun(self) -> None:
        self._lanes.paths.start()

    def view(self, generation: int, number: int, seats: Sequence[Seat]) -> None:
        self._stores.view(generation, number, seats)
        self._checkpoints.view(generation, number, seats)

    def without_views(self, seats: Sequence[Seat]) -> None:
        self._checkpoints.view(0, 0, seats)

    def link_up(self, seat: Seat) -> None:
        self._lanes.link_up(seat)
        self._stores.link_up(seat)
        self._checkpoints.link_up(seat)

    def link_lost(self, seat: Seat) -> None:
        self._lanes.dialler.link_lost(seat)

    def gone(self, peer: RemoteProcess) -> None:
        error = ConnectError(f"{self._peers.name_of(peer.seat)} is gone")
        self._lanes.abandon(lambda key: key.peer == peer.seat, error)
        self._stores.peer_gone(peer.seat)
        self._groups.peer_gone(peer)

    def excluded(self, seat: Seat) -> None:
        self._lanes.part_with(seat)

    def generation_ended(self, generation: Generation, fault: Fault, *, only_surviving: bool) -> None:
        self._groups.end(generation, fault, only_surviving=only_surviving)
        needs_views = self._config.on_loss == "continue"
        if generation.is_current and (needs_views or not only_surviving):
            of_store = fault._replace(text=f"the store of the run cannot be asked: {fault.text}")
            self._stores.end(
                functools.partial(
                    of_store.error, rank=generation.rank, host="", operation="store", sequence=0, group=self._run
                )
            )

    def run_failed(self, fault: Fault) -> None:
        for group in self._groups:
            group.fail(fault)

    def heard_early(self, seat: Seat, message: messages.Control) -> None:
        self._inbox.heard_early(seat, message)
