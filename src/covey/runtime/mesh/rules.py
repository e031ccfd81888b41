"""Which nodes may be here, as it changes while a process runs. On the control loop.

Two things change it: the file of the cluster, which commands of this machine write, and a charter that a member passes
on. The file is looked at every second, so a running process obeys within two.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from covey.base import pace
from covey.base.errors import AuthError, CoveyError
from covey.net.keys import charter as charters
from covey.net.keys import clusters
from covey.runtime.log_limiter import LimitedLog
from covey.runtime.loop import aside
from covey.wire import messages
from covey.wire.machine import machine_of

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from covey.net.keys.clusters import Cluster
    from covey.wire.secret import ClusterSecret

logger = logging.getLogger("covey")

WATCH_SECONDS: Final = 1.0
"""How often the cluster's file is looked at."""
TOLD_SECONDS: Final = 30.0
WRITES_RATE, WRITES_BURST = 0.5, 8.0
"""How often nodes that wait for approval are written down, a second and at once: every holder of the secret can
come."""


class Rules:
    """What a running node knows of its cluster, and of the nodes that may be in it."""

    def __init__(
        self,
        cluster: Cluster,
        here: str,
        changed: Callable[[Cluster], None],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        """`here` is the name of this node. `changed` is called after a change, with the cluster as it was before."""
        self.cluster = cluster
        self._here, self._changed, self._spawn = here, changed, spawn
        self._waiting: dict[bytes, messages.Card] = {}
        """By machine: nodes that were refused because the owner has not approved them, the last one last."""
        self._writes = pace.Bucket(WRITES_RATE, WRITES_BURST)
        self._log = LimitedLog(TOLD_SECONDS)
        self._stamp: object = None
        self._seen: ClusterSecret | None = None
        """The secret that the file held at the last look."""

    @property
    def charter(self) -> messages.Charter | None:
        return self.cluster.charter

    def objection(self, card: messages.Card) -> str:
        """Return why a node may not be here, or nothing; one that only lacks approval is remembered."""
        reason = charters.objection(self.cluster, card, self._here)
        if reason and self.is_waiting(card):
            self._remember(card)
        return reason

    def is_waiting(self, card: messages.Card) -> bool:
        """Tell whether approval by the owner is all that a node lacks."""
        return charters.is_waiting(self.cluster, card)

    def _remember(self, card: messages.Card) -> None:
        machine = machine_of(card)
        is_new = machine not in self._waiting
        self._waiting.pop(machine, None)
        self._waiting[machine] = card
        if len(self._waiting) > messages.WAITING_LIMIT:
            del self._waiting[next(iter(self._waiting))]
        if is_new and self._writes.take(time.monotonic()):
            self._spawn(self._write(clusters.remember_waiting, self.cluster.name, machine, card.name))

    def waiting(self) -> tuple[messages.Waiting, ...]:
        """Return the nodes that wait for approval."""
        return tuple(
            messages.Waiting(machine, card.name, card.host_name, next((a.ip for a in card.contact.addresses), ""))
            for machine, card in self._waiting.items()
        )

    def take_approved(self) -> list[messages.Card]:
        """Return the nodes that waited for approval and do not any more, and forget them."""
        approved = [machine for machine, card in self._waiting.items() if not charters.is_waiting(self.cluster, card)]
        return [self._waiting.pop(machine) for machine in approved]

    def heard(self, charter: messages.Charter, teller: str) -> None:
        """A node passes a charter on. It counts if it is later than ours and the owner has signed it."""
        try:
            if not charters.is_news(self.cluster, charter):
                return
        except AuthError as error:
            self._log.log(logging.WARNING, "a charter from %s was refused: %s", teller, error)
            return
        self._adopt(replace(self.cluster, charter=charter))
        self._spawn(self._write(charters.keep, self.cluster, charter))

    async def watch(self) -> None:
        """Follow the cluster's file until cancelled."""
        while True:
            try:
                stamp, saved = await aside(_look, self.cluster.name, self._stamp)
                self._stamp = stamp
                if saved is not None:
                    self.saved(saved)
            except (CoveyError, OSError) as error:  # being replaced, or out of descriptors: the next look may work
                self._log.log(logging.WARNING, "the file of cluster %r cannot be read: %s", self.cluster.name, error)
            await asyncio.sleep(WATCH_SECONDS)

    def saved(self, cluster: Cluster) -> None:
        """The file holds this now."""
        self._adopt(_merged(self.cluster, cluster, self._seen))
        self._seen = cluster.secret

    def _adopt(self, cluster: Cluster) -> None:
        if cluster != self.cluster:
            before, self.cluster = self.cluster, cluster
            self._changed(before)

    async def _write(self, function: Callable[..., None], *args: object) -> None:
        try:
            await aside(function, *args)
        except (CoveyError, OSError) as error:  # it holds all the same for as long as this process lives
            self._log.log(logging.WARNING, "what the cluster's file should say cannot be written: %s", error)


def _look(name: str, last: object) -> tuple[object, Cluster | None]:
    """Return a stamp of the cluster's file, and what it says unless the stamp is the last one. Reads from disk."""
    path = clusters.cluster_path(name)
    try:
        status = path.stat()
    except FileNotFoundError:
        return None, None
    stamp = (status.st_mtime_ns, status.st_ino, status.st_size)
    return stamp, None if stamp == last else clusters.load(name)


def _merged(running: Cluster, saved: Cluster, seen: ClusterSecret | None) -> Cluster:
    """Return what a process goes by, when the file says `saved`; before, the file held the secret `seen`.

    The file may be about another cluster of the same name, or the process may have got a later secret another way.
    """
    if running.owner and saved.owner and running.owner != saved.owner:
        return replace(running, denied=saved.denied)
    charter = charters.latest(running.charter, saved.charter)
    if running.secret == saved.secret or (saved.owner and running.secret in (saved.previous, seen)):
        return replace(saved, seeds=running.seeds, charter=charter)
    return replace(running, denied=saved.denied, charter=charter if running.owner else None)
