"""The keeper as a node of the cluster: it takes part in no run, and tells the other nodes how its own processes are.

A stopped process sends nothing, and it may be the only one on its machine. On the control loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from typing import TYPE_CHECKING, Final

from covey.net.discovery.interfaces import is_own_address
from covey.runtime.metrics.inspection import READINGS, PacedAnswers
from covey.runtime.peers.cluster_mesh import ClusterMesh
from covey.runtime.peers.mesh import MeshListener
from covey.runtime.views.process_table import ProcessTable, Rounds
from covey.wire import messages

if TYPE_CHECKING:
    from covey.base.config import GroupConfig
    from covey.net.keys.clusters import Cluster
    from covey.runtime.peers.endpoint import Endpoint
    from covey.runtime.peers.remote_process import RemoteProcess

CHECKPOINT_ANSWER_SECONDS: Final = 30.0
"""How long a process may take to answer a request for a checkpoint."""


class ClusterKeeper(MeshListener):
    """Links with the nodes of a cluster, recognises its own processes among them, and vouches for these to all.

    It is not announced, so that no node takes it for a member.
    """

    def __init__(self, cluster: Cluster, config: GroupConfig, endpoint: Endpoint) -> None:
        self.mesh = ClusterMesh(cluster, config, endpoint, self, purpose="keeper", announce=False)
        self.survives: bool | None = False
        """Whether the run goes on when a member is lost; None until one of the keeper's processes has said so. May be
        read on any thread."""
        self._over: messages.Ended | None = None
        """The message that the run of its own processes is over, because its work is done."""
        self._was_told = False
        self.ranks: dict[int, int] = {}
        """The ranks of its own processes, by their sessions. May be read on any thread."""
        self.ids: dict[int, bytes] = {}
        """The node ids of its own processes, by their sessions, also of ended ones. May be read on any thread."""
        self._run: messages.Founded | None = None
        """The last generation that one of its own processes was in."""
        self._process_table = ProcessTable()
        self.rounds = Rounds(self._process_table, self._vouch)
        self._answers = PacedAnswers()

    async def open(self) -> None:
        """Start to search for the nodes of the cluster."""
        await self.mesh.open()
        self.rounds.look()

    async def close(self) -> None:
        """Tell the other nodes how the last process ended, and close every link."""
        self.rounds.look()
        self.rounds.close()
        await self.mesh.close()

    async def inspect(self, question: messages.Inspect, within: float) -> dict[int, messages.Inspected | None]:
        """Ask its own processes that have a rank; return the answers by rank, None for those that did not come."""
        members = () if self._run is None else self._run.members
        remotes = {rank: self.mesh.met.get(member.card.id) for rank, member in enumerate(members)}
        own = {rank: remote for rank, remote in remotes.items() if remote is not None and self._is_own(remote)}
        asked = (remote.ask(question, within) for remote in own.values())
        answers = await asyncio.gather(*asked, return_exceptions=True)
        return {
            rank: answer if isinstance(answer, messages.Inspected) else None
            for rank, answer in zip(own, answers, strict=True)
        }

    def request_checkpoint(self) -> None:
        """Have one of its own processes ask the other members for a checkpoint."""
        members = () if self._run is None else self._run.members
        remotes = (self.mesh.met.get(member.card.id) for member in members)
        own = next((remote for remote in remotes if remote is not None and self._is_own(remote)), None)
        if own is not None:
            self.mesh.spawn(_request(own))

    def linked(self, remote: RemoteProcess) -> None:
        if self._is_own(remote):
            self.survives = self.survives if self._was_told else None
            self._process_table.watch(remote.card, time.monotonic())
            with contextlib.suppress(OSError):  # the process has ended
                self.ids[os.getsid(remote.card.pid)] = remote.card.id
            self.rounds.look()
            if self._over is not None:
                remote.send(self._over)
        remote.send(self._process_table.vouch())

    def lost(self, remote: RemoteProcess) -> None:
        self.rounds.look_closely(remote.card.life)

    def heard(self, remote: RemoteProcess, message: messages.Control) -> None:
        if isinstance(message, messages.Inspect):
            if message.what == READINGS and self._is_own(remote):  # one of its processes is asked by a view
                self._answers.answer(message, remote.card.id, remote.send)
        elif isinstance(message, messages.Founded) and self._is_own(remote):
            self.survives, self._was_told = bool(self.survives) or message.on_loss == "continue", True
            self._run, self._over = message, None
            self._note_ranks(message)
            self.mesh.search.slow_down()
        elif isinstance(message, messages.Ended) and message.is_finished and self._is_of_run(remote, message.lineage):
            self._over = message
            for each in self.mesh.met.values():  # a process that was just started again may be linked with no member
                if self._is_own(each):
                    each.send(message)

    def _note_ranks(self, founded: messages.Founded) -> None:
        """Note the ranks of its own processes in a generation; the keeper started each in a session of its own."""
        ranks, own = dict[int, int](), self.mesh.card
        for rank, member in enumerate(founded.members):
            card = member.card
            if card.keeper == own.id and card.contact.host == own.contact.host:
                with contextlib.suppress(OSError):  # the process has ended
                    ranks.setdefault(os.getsid(card.pid), rank)
        self.ranks = ranks

    def _is_of_run(self, remote: RemoteProcess, lineage: bytes) -> bool:
        """Tell whether a node is in the run of this lineage, so that it knows whether the run is over.

        One of the keeper's processes must have been in that run. Only the node's key counts: it may have been started
        again since.
        """
        run = self._run
        if run is None or run.origin != lineage:
            return False
        return self._is_own(remote) or any(member.card.id == remote.card.id for member in run.members)

    @property
    def is_over(self) -> bool:
        """Whether the run of its own processes is over, because its work is done. May be read on any thread."""
        return self._over is not None

    def _is_own(self, remote: RemoteProcess) -> bool:
        """Tell whether a node is a process that this keeper started: nodes of other hosts may claim so, too."""
        card, link, own = remote.card, remote.link, self.mesh.card
        is_claimed = card.keeper == own.id and card.contact.host == own.contact.host
        return is_claimed and link is not None and is_own_address(link.remote_ip)

    def _vouch(self, vouch: messages.Vouch) -> None:
        if vouch.processes:
            for remote in list(self.mesh.met.values()):
                remote.send(vouch)


async def _request(remote: RemoteProcess) -> None:
    """Request a checkpoint, and take the answer, which must not be taken for that to a later question."""
    with contextlib.suppress(TimeoutError):
        await remote.ask(messages.RequestCheckpoint("", ""), CHECKPOINT_ANSWER_SECONDS)
