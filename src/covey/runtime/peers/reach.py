"""Answers to `Reach`: a node tries the addresses of another node that asks, for `covey doctor`. On the control loop.

Invariant: only addresses are tried that the asking node advertises and has connected from, by a link or by a probe that
is proved to be its own. So no node can be used to scan a third machine.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from covey.base import pace
from covey.base.errors import ConfigError
from covey.net.discovery.interfaces import recent_interfaces
from covey.runtime.links.link import plain_ip
from covey.runtime.links.probe import Sounding, sound_each
from covey.wire import messages

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from covey.runtime.links.limits import DialLimits
    from covey.runtime.peers.endpoint import Endpoint
    from covey.runtime.peers.remote_process import RemoteProcess

REACH_RATE, REACH_BURST = 0.5, 3.0
"""How often addresses are tried for one key: rate a second, and burst."""
REACH_TOTAL_RATE, REACH_TOTAL_BURST = 4.0, 8.0
"""The same for all keys together: a holder of the secret can make any number of keys."""
NOT_TRIED: Final = "not tried: nothing has come from there"
"""The answer for an address that may belong to another machine."""
TOO_OFTEN: Final = "not tried: it was asked too often"


class ReachAnswers:
    """Tries addresses for other nodes, within limits, and answers."""

    def __init__(
        self,
        endpoint: Endpoint,
        pattern: str,
        limits: DialLimits,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self._endpoint, self._pattern, self._limits, self._spawn = endpoint, pattern, limits, spawn
        self._by_key = pace.Buckets(REACH_RATE, REACH_BURST)
        self._total = pace.Bucket(REACH_TOTAL_RATE, REACH_TOTAL_BURST)

    def asked(self, remote: RemoteProcess, question: messages.Reach, linked_from: set[str]) -> None:
        """Answer a question; `linked_from` are the addresses from which links with the asking node's key come."""
        now = time.monotonic()
        if remote.is_probing or not self._by_key.take(remote.card.id, now) or not self._total.take(now):
            _tell(remote, [Sounding(problem=TOO_OFTEN)] * len(question.addresses))
            return
        remote.is_probing = True
        self._spawn(self._try(remote, question, linked_from))

    async def _try(self, remote: RemoteProcess, question: messages.Reach, linked_from: set[str]) -> None:
        came_from = linked_from | self._endpoint.acceptor.probed_from(question.token)
        advertised = remote.card.contact.addresses
        port = advertised[0].port
        own = {plain_ip(address.ip) for address in advertised} & came_from
        tried = [each for each in question.addresses if each.port == port and plain_ip(each.ip) in own]
        try:
            interfaces = recent_interfaces(self._pattern)
            same_host = remote.card.contact.host == self._endpoint.card.contact.host
            found = await sound_each(tried, interfaces, self._endpoint.credentials, self._limits, same_host=same_host)
        except (ConfigError, OSError) as error:
            found = [Sounding(problem=str(error))] * len(tried)
        finally:
            remote.is_probing = False
        results = dict(zip(tried, found, strict=True))
        _tell(remote, [results.get(each, Sounding(problem=NOT_TRIED)) for each in question.addresses])


def _tell(remote: RemoteProcess, results: list[Sounding]) -> None:
    round_trips = tuple(result.round_trip for result in results)
    remote.send(messages.Reached(round_trips, tuple(result.problem for result in results)))
