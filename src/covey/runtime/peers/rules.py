"""Which nodes may be in the cluster, as this changes while a process runs. On the control loop.

Two things change it: the file of the cluster, which commands on this machine write, and a charter that a node passes
on. The file is checked every second, so a running process follows a command within two.

The file may also bring a new secret. New connections use the secret as it is now, and accept the one before it until
its time is over. Links that stand are not affected.
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
from covey.net.keys import clusters, owner
from covey.runtime.backoff import LimitedLog
from covey.runtime.loop import aside
from covey.wire import messages
from covey.wire.signed import machine_of

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from covey.net.keys.clusters import Cluster
    from covey.runtime.peers.endpoint import Endpoint
    from covey.runtime.peers.relays import Relays
    from covey.runtime.peers.remote_process import RemoteProcess
    from covey.runtime.peers.search import Search
    from covey.runtime.tasks import Tasks
    from covey.wire.secret import ClusterSecret

logger = logging.getLogger("covey")

WATCH_SECONDS: Final = 1.0
"""How often the cluster's file is checked."""
PROBLEM_LOG_SECONDS: Final = 30.0
"""The log reports each kind of problem at most this often."""
WRITES_RATE, WRITES_BURST = 0.5, 8.0
"""How often nodes that wait for approval are written to disk, rate a second and burst: every holder of the secret can
cause it."""
SECRET_LOG_SECONDS: Final = 10.0
"""The log reports refused secrets at most this often."""


class Rules:
    """The cluster as a running node knows it, and the nodes that wait for approval."""

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
        """By machine: nodes that were refused because the owner has not approved them, the latest last."""
        self._writes = pace.Bucket(WRITES_RATE, WRITES_BURST)
        self._log = LimitedLog(PROBLEM_LOG_SECONDS)
        self._stamp: object = None
        self._seen: ClusterSecret | None = None
        """The secret that the file held when it was last read."""

    @property
    def charter(self) -> messages.Charter | None:
        return self.cluster.charter

    def objection(self, card: messages.Card) -> str:
        """Return why a node may not be in the cluster, or ""; remember a node that only lacks approval."""
        reason = charters.objection(self.cluster, card, self._here)
        if reason and self.is_waiting(card):
            self._remember(card)
        return reason

    def is_waiting(self, card: messages.Card) -> bool:
        """Tell whether a node lacks nothing but the owner's approval."""
        return charters.is_waiting(self.cluster, card)

    def _remember(self, card: messages.Card) -> None:
        machine = machine_of(card)
        is_new = machine not in self._waiting
        self._waiting.pop(machine, None)
        self._waiting[machine] = card
        if len(self._waiting) > messages.WAITING_NODES_LIMIT:
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
        """Return the nodes that no longer wait for approval, and forget them."""
        approved = [machine for machine, card in self._waiting.items() if not charters.is_waiting(self.cluster, card)]
        return [self._waiting.pop(machine) for machine in approved]

    def heard(self, charter: messages.Charter, teller: str) -> None:
        """Adopt a charter that a node passed on, if it is later than the known one and the owner has signed it."""
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
            except (CoveyError, OSError) as error:  # such as no free descriptor: the next check may work
                self._log.log(logging.WARNING, "the file of cluster %r cannot be read: %s", self.cluster.name, error)
            await asyncio.sleep(WATCH_SECONDS)

    def saved(self, cluster: Cluster) -> None:
        """Adopt what the cluster's file holds now."""
        self._adopt(_merged(self.cluster, cluster, self._seen))
        self._seen = cluster.secret

    def _adopt(self, cluster: Cluster) -> None:
        if cluster != self.cluster:
            before, self.cluster = self.cluster, cluster
            self._changed(before)

    async def _write(self, function: Callable[..., None], *args: object) -> None:
        try:
            await aside(function, *args)
        except (CoveyError, OSError) as error:  # this process follows the change all the same
            self._log.log(logging.WARNING, "a change of the cluster's file cannot be written: %s", error)


def _look(name: str, last: object) -> tuple[object, Cluster | None]:
    """Return a stamp of the cluster's file, and its contents unless the stamp equals `last`. Reads from disk."""
    path = clusters.cluster_path(name)
    try:
        status = path.stat()
    except FileNotFoundError:
        return None, None
    stamp = (status.st_mtime_ns, status.st_ino, status.st_size)
    return stamp, None if stamp == last else clusters.load(name)


def _merged(running: Cluster, saved: Cluster, seen: ClusterSecret | None) -> Cluster:
    """Return what a process follows when the file says `saved`, and held the secret `seen` before.

    The file may describe another cluster of the same name, or the process may have received a later secret from a node.
    """
    if running.owner and saved.owner and running.owner != saved.owner:
        return replace(running, denied=saved.denied)
    charter = charters.latest(running.charter, saved.charter)
    if running.secret == saved.secret or (saved.owner and running.secret in (saved.previous, seen)):
        return replace(saved, seeds=running.seeds, relays=running.relays, charter=charter)
    return replace(running, denied=saved.denied, charter=charter if running.owner else None)


class SecretChanges:
    """Takes new secrets that the owner sends; applies the cluster's secret to the endpoint, the search and relays."""

    def __init__(self, rules: Rules, endpoint: Endpoint, search: Search, relays: Relays, tasks: Tasks) -> None:
        self._rules, self._endpoint, self._search, self._tasks = rules, endpoint, search, tasks
        self._relays = relays
        self._log = LimitedLog(SECRET_LOG_SECONDS)

    def receive(self, remote: RemoteProcess, message: messages.NewSecret) -> None:
        """Check a new secret, write it to disk and answer; one at a time for each node, others are dropped."""
        if not remote.is_changing_secret:
            remote.is_changing_secret = True
            self._tasks.spawn(self._store(remote, message))

    async def _store(self, remote: RemoteProcess, message: messages.NewSecret) -> None:
        problem, cluster = "", self._rules.cluster
        try:
            self._rules.saved(await aside(owner.keep_secret, cluster, self._endpoint.card.id, message))
        except (CoveyError, OSError) as error:
            problem = str(error)
            self._log.log(logging.WARNING, "a new secret from %s was refused: %s", remote.card.name, problem)
        else:
            logger.warning("the secret of cluster %r was changed by its owner", cluster.name)
        finally:
            remote.is_changing_secret = False
        reason = f"not kept: {problem}" if problem else "kept"
        address = remote.link.remote_ip if remote.link is not None else ""
        audit = self._endpoint.audit
        audit.note_paced("secret-received", remote.card.id, remote.card, address=address, reason=reason)
        remote.send(messages.SecretKept(problem))

    def apply(self) -> None:
        """Use the secret as it is now for new connections; again when the one before it is no longer good."""
        cluster = self._rules.cluster
        self._endpoint.follow(cluster)
        self._relays.follow(cluster)
        try:
            self._search.follow(cluster)
        except CoveyError as error:
            logger.warning("nodes of this host that hold the new secret of the cluster are not found: %s", error)
        if cluster.earlier(time.time()) is not None:
            self._tasks.spawn(self._apply_later(cluster.previous_until - time.time()))

    async def _apply_later(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self.apply()


def secrets_of(cluster: Cluster) -> tuple[object, ...]:
    """Return what `SecretChanges.apply` depends on."""
    return cluster.secret, cluster.previous, cluster.previous_until
