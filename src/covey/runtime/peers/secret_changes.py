"""Changes of the cluster's secret while a node runs. On the control loop.

New connections use the secret as it is now, and accept the one before it until its time is over. Links that stand are
not affected.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Final

from covey.base.errors import CoveyError
from covey.net.keys import owner
from covey.runtime.backoff import LimitedLog
from covey.runtime.loop import aside
from covey.wire import messages

if TYPE_CHECKING:
    from covey.net.keys.clusters import Cluster
    from covey.runtime.peers.endpoint import Endpoint
    from covey.runtime.peers.relays import Relays
    from covey.runtime.peers.remote_process import RemoteProcess
    from covey.runtime.peers.rules import Rules
    from covey.runtime.peers.search import Search
    from covey.runtime.tasks import Tasks

logger = logging.getLogger("covey")

SECRET_LOG_SECONDS: Final = 10.0
"""The log reports refused secrets at most this often."""


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
