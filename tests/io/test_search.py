"""The search for nodes goes on through trouble of the moment."""

from __future__ import annotations

import asyncio
import os
import secrets
from typing import TYPE_CHECKING

import pytest
from tests.support.waiting import DEADLINE

from covey.base.config import GroupConfig
from covey.base.errors import ConfigError
from covey.net.keys.clusters import Cluster
from covey.net.keys.identity import NodeIdentity
from covey.runtime.peers.endpoint import cluster_endpoint
from covey.runtime.peers.search import Search
from covey.wire.secret import ClusterSecret

if TYPE_CHECKING:
    from covey.wire import messages

CONFIG = GroupConfig(interfaces="lo")


pytestmark = pytest.mark.usefixtures("home")


def new_cluster() -> Cluster:
    return Cluster(ClusterSecret("lab", secrets.token_bytes(32)))


def is_there(path: str) -> bool:
    return os.path.exists(path)


def test_a_seed_that_cannot_be_tried_now_ends_neither_the_search_nor_the_announcement() -> None:
    """An interface that was down for a moment, or no free descriptor: the node must still be found afterwards."""

    async def work() -> None:
        cluster = Cluster(new_cluster().secret, seeds=("127.0.0.1:9",))
        endpoint = cluster_endpoint(cluster, CONFIG, run="r", ports=(0,), identity=NodeIdentity.ephemeral())
        assert endpoint.host_registry is not None
        troubles: list[Exception] = [ConfigError("nothing matches that is up"), OSError(24, "Too many open files")]
        tried_again = asyncio.Event()

        async def try_seed(_seed: str, _addresses: tuple[messages.Address, ...]) -> None:
            if troubles:
                raise troubles.pop(0)
            tried_again.set()

        search = Search(
            cluster,
            endpoint.card,
            "lo",
            endpoint.host_registry,
            found=lambda _hint, _origin: None,
            try_seed=try_seed,
        )
        searching = asyncio.create_task(search.run())
        try:
            async with asyncio.timeout(DEADLINE):
                await tried_again.wait()
            assert is_there(endpoint.card.contact.socket)
        finally:
            searching.cancel()
            await asyncio.gather(searching, return_exceptions=True)
            await endpoint.acceptor.close()
            endpoint.on_close()

    asyncio.run(work())
