"""The relay that `covey run --relay-limit` and `covey up --relay-limit` offer to the nodes of their cluster."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from covey.base.settings import RELAY_PORT

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.net.keys.clusters import Cluster
    from covey.runtime.relaying.server import RelayThread
    from covey.wire.secret import ClusterSecret

PORTS_TRIED: Final = range(RELAY_PORT, RELAY_PORT + 8)
"""The first free one is used, or else any: the nodes of this machine tell others which."""


class MemberRelay:
    """A relay for one cluster. Listens from `start` to `close`."""

    def __init__(self, cluster: Callable[[], Cluster], rate: float) -> None:
        """`cluster` returns what is known of the cluster now; `rate` is what all pipes get, in bytes a second."""
        self._cluster, self._rate = cluster, rate
        self._thread: RelayThread | None = None
        self._keys: dict[ClusterSecret, bytes] = {}

    @property
    def port(self) -> int:
        """The port at which it listens; 0 if it does not."""
        return 0 if self._thread is None else self._thread.port

    def start(self) -> None:
        """Listen on all interfaces; ConfigError if that is not possible."""
        from covey.runtime.peers.endpoint import listen_everywhere
        from covey.runtime.relaying.server import RelayLimits, RelayThread

        limits = RelayLimits(bytes_per_second=self._rate)
        self._thread = RelayThread(listen_everywhere(PORTS_TRIED), limits, self._clusters)

    def close(self) -> None:
        """Close every connection. Closing twice is fine."""
        if self._thread is not None:
            self._thread.close()

    def _clusters(self) -> set[bytes]:
        """Return the public keys of the cluster: of its secret, and of the one before while that is good."""
        from covey.wire.relay import RelayKey

        cluster = self._cluster()
        good = [each for each in (cluster.secret, cluster.earlier(time.time())) if each is not None]
        self._keys = {each: self._keys.get(each) or RelayKey(each).cluster for each in good}
        return set(self._keys.values())
