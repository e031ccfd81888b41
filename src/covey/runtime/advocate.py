"""The keeper of nodes of a cluster, among the nodes: it takes part in no run, and tells all how its own processes are.

A stopped process says nothing, and if it is the only one on its machine, nobody else there does. On the control loop.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from covey.runtime.gathering import Gathering
from covey.runtime.wards import Rounds, Wards
from covey.wire import messages

if TYPE_CHECKING:
    from covey.base.config import GroupConfig
    from covey.net.clusters import Cluster
    from covey.runtime.acquaintance import Acquaintance
    from covey.runtime.seat import Seat

RUNNING_LOOK_SECONDS: Final = 2.0
"""How often the folder of this host is looked at, once the run is going on."""


class Advocate(Gathering):
    """Meets the nodes of a cluster, finds those of its own keeper among them, and vouches for these to all.

    Nobody finds it, so nobody has to be told that it is none of them.
    """

    purpose = "keeper"

    def __init__(self, cluster: Cluster, config: GroupConfig, seat: Seat) -> None:
        super().__init__(cluster, config, seat, announce=False)
        self.survives: bool | None = False
        """Whether the run goes on when somebody is lost; None if only one of its own could say, and has not yet. May be
        read on any thread."""
        self._over: messages.Ended | None = None
        """That the run of its own processes is over, because its work is done."""
        self._was_told = False
        self._run = b""
        self._wards = Wards()
        self._rounds = Rounds(self._wards, self._vouch)

    async def open(self) -> None:
        await super().open()
        self._rounds.look()

    async def close(self) -> None:
        self._rounds.look()  # a keeper ends when its last process has: the others should hear why
        self._rounds.close()
        await super().close()

    def met_someone(self, someone: Acquaintance) -> None:
        if self._is_own(someone.card):
            self.survives = self.survives if self._was_told else None
            self._wards.watch(someone.card, time.monotonic())
            self._rounds.look()
            if self._over is not None:
                someone.send(self._over)
        someone.send(self._wards.vouch())

    def lost_someone(self, someone: Acquaintance) -> None:
        self._rounds.look_closely(someone.card.life)

    def heard(self, someone: Acquaintance, message: messages.Control) -> None:
        if isinstance(message, messages.Founded) and self._is_own(someone.card):
            self.survives, self._was_told = bool(self.survives) or message.on_loss == "continue", True
            self._run, self._over = message.origin, None
            self.search.look_seconds = RUNNING_LOOK_SECONDS
        elif isinstance(message, messages.Ended) and message.lineage == self._run and message.is_finished:
            self._over = message
            for each in self.met.values():  # a process that was just started again may not have met a member
                if self._is_own(each.card):
                    each.send(message)

    @property
    def is_over(self) -> bool:
        """Whether the run of its own processes is over, because its work is done. May be read on any thread."""
        return self._over is not None

    def _is_own(self, card: messages.Card) -> bool:
        """Tell whether a node is a process that our keeper started: others may claim so, but not from this host."""
        return card.keeper == self.card.id and card.contact.host == self.card.contact.host

    def _vouch(self, vouch: messages.Vouch) -> None:
        if vouch.processes:
            for someone in list(self.met.values()):
                someone.send(vouch)
