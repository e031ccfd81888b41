"""The keeper of nodes of a cluster, among the nodes: it takes part in no run, and tells all how its own processes are.

A stopped process says nothing, and if it is the only one on its machine, nobody else there does. On the control loop.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING, Final

from covey.net.discovery.interfaces import is_own_address
from covey.runtime.members.process_table import ProcessTable, Rounds
from covey.runtime.mesh.mesh import Mesh
from covey.wire import messages

if TYPE_CHECKING:
    from covey.base.config import GroupConfig
    from covey.net.keys.clusters import Cluster
    from covey.runtime.mesh.endpoint import Endpoint
    from covey.runtime.mesh.remote_node import RemoteNode

RUNNING_LOOK_SECONDS: Final = 2.0
"""How often the folder of this host is looked at, once the run is going on."""


class ClusterKeeper(Mesh):
    """Meets the nodes of a cluster, finds those of its own keeper among them, and vouches for these to all.

    Nobody finds it, so nobody has to be told that it is none of them.
    """

    purpose = "keeper"

    def __init__(self, cluster: Cluster, config: GroupConfig, endpoint: Endpoint) -> None:
        super().__init__(cluster, config, endpoint, announce=False)
        self.survives: bool | None = False
        """Whether the run goes on when somebody is lost; None if only one of its own could say, and has not yet. May be
        read on any thread."""
        self._over: messages.Ended | None = None
        """That the run of its own processes is over, because its work is done."""
        self._was_told = False
        self.ranks: dict[int, int] = {}
        """The ranks of its own processes, by their sessions. May be read on any thread."""
        self._run: messages.Founded | None = None
        """The generation that one of its own was in last."""
        self._process_table = ProcessTable()
        self.rounds = Rounds(self._process_table, self._vouch)

    async def open(self) -> None:
        await super().open()
        self.rounds.look()

    async def close(self) -> None:
        self.rounds.look()  # a keeper ends when its last process has: the others should hear why
        self.rounds.close()
        await super().close()

    def met_someone(self, remote: RemoteNode) -> None:
        if self._is_own(remote):
            self.survives = self.survives if self._was_told else None
            self._process_table.watch(remote.card, time.monotonic())
            self.rounds.look()
            if self._over is not None:
                remote.send(self._over)
        remote.send(self._process_table.vouch())

    def lost_someone(self, remote: RemoteNode) -> None:
        self.rounds.look_closely(remote.card.life)

    def heard(self, remote: RemoteNode, message: messages.Control) -> None:
        if isinstance(message, messages.Founded) and self._is_own(remote):
            self.survives, self._was_told = bool(self.survives) or message.on_loss == "continue", True
            self._run, self._over = message, None
            self._note_ranks(message)
            self.search.look_seconds = RUNNING_LOOK_SECONDS
        elif isinstance(message, messages.Ended) and message.is_finished and self._is_of_run(remote, message.lineage):
            self._over = message
            for each in self.met.values():  # a process that was just started again may not have met a member
                if self._is_own(each):
                    each.send(message)

    def _note_ranks(self, founded: messages.Founded) -> None:
        """Note which ranks its own processes have in a generation; the keeper started each in a session of its own."""
        ranks = dict[int, int]()
        for rank, member in enumerate(founded.members):
            card = member.card
            if card.keeper == self.card.id and card.contact.host == self.card.contact.host:
                with contextlib.suppress(OSError):  # it has ended
                    ranks.setdefault(os.getsid(card.pid), rank)
        self.ranks = ranks

    def _is_of_run(self, remote: RemoteNode, lineage: bytes) -> bool:
        """Tell whether a node is in the run of this lineage, in which one of our own was: it knows whether it is over.

        Only the node's key counts: it may have been started again since.
        """
        run = self._run
        if run is None or run.origin != lineage:
            return False
        return self._is_own(remote) or any(member.card.id == remote.card.id for member in run.members)

    @property
    def is_over(self) -> bool:
        """Whether the run of its own processes is over, because its work is done. May be read on any thread."""
        return self._over is not None

    def _is_own(self, remote: RemoteNode) -> bool:
        """Tell whether a node is a process that our keeper started: others may claim so, but not from this host."""
        card, link = remote.card, remote.link
        is_claimed = card.keeper == self.card.id and card.contact.host == self.card.contact.host
        return is_claimed and link is not None and is_own_address(link.remote_ip)

    def _vouch(self, vouch: messages.Vouch) -> None:
        if vouch.processes:
            for remote in list(self.met.values()):
                remote.send(vouch)
