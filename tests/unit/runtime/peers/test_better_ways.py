"""A direct way to a node is sought whenever its link goes through a relay."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tests.support.waiting import DEADLINE

from covey.runtime.peers import better_ways
from covey.runtime.peers.better_ways import BetterWays
from covey.runtime.peers.listener import LinkListener
from covey.runtime.peers.remote_process import RemoteProcess
from covey.runtime.tasks import Tasks
from covey.wire.messages import Address, Card, Contact

if TYPE_CHECKING:
    import pytest

CARD = Card(bytes(32), bytes(16), "one", "host", 1, Contact("here", (Address("192.0.2.1", 1),), ""))


def test_a_direct_way_is_sought_again_when_the_link_falls_back_to_the_relay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The link is direct for less time than the search for a nearer relay takes to notice."""
    monkeypatch.setattr(better_ways, "RELAY_CHECK_EVERY", 2 * DEADLINE)
    ended = asyncio.Event()
    direct, relayed = SimpleNamespace(relay=""), SimpleNamespace(relay="192.0.2.9:47690")

    async def dial(*_: Any, **__: Any) -> None:
        await asyncio.sleep(0)  # until the other search has begun
        remote.link = direct  # type: ignore[assignment]

    unused: Any = SimpleNamespace(tell=lambda _: None, shorter=lambda *_: None, dial=dial)
    remote = RemoteProcess(CARD)

    async def work() -> None:
        tasks = Tasks("the test")
        ways = BetterWays(CARD, unused, unused, LinkListener(), tasks, tells_log=False)
        seek_direct = ways.seek_direct

        async def seek_and_tell(sought: RemoteProcess) -> None:
            await seek_direct(sought)
            ended.set()

        monkeypatch.setattr(ways, "seek_direct", seek_and_tell)
        for _ in range(2):
            ended.clear()
            remote.link = relayed  # type: ignore[assignment]
            ways.seek(remote)
            await asyncio.wait_for(ended.wait(), DEADLINE)
            await asyncio.sleep(0)
            assert ways._seeking == {(remote, False)}
        await tasks.close()

    asyncio.run(work())
