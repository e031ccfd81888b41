"""A lost member is dialled again and again, also while an attempt hangs."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.waiting import DEADLINE

from covey.base.pace import Growing
from covey.runtime.links import address_race
from covey.runtime.peers import dialer
from covey.runtime.peers import dialer as redial_module
from covey.runtime.peers.dialer import ATTEMPTS_AT_ONCE, BetterWays, Dialer
from covey.runtime.peers.hints import DialOutcome
from covey.runtime.peers.mesh import LinkListener
from covey.runtime.peers.remote_process import RemoteProcess
from covey.runtime.tasks import Tasks
from covey.wire.messages import Address, Card, Contact

if TYPE_CHECKING:
    import pytest

CONTACT = Contact("host", (Address("192.0.2.1", 1),), "")


class _Dialer(Dialer):
    """A dialer whose first dials hang, as through a relay whose machine is gone."""

    def __init__(self, hanging: int) -> None:
        self.hanging, self.begun, self.running, self.most, self.is_linked = hanging, 0, 0, 0, False
        unused: Any = None
        endpoint: Any = SimpleNamespace(card=SimpleNamespace(contact=CONTACT))
        super().__init__(endpoint, "", unused, unused, unused)

    async def dial(self, *_: Any, **__: Any) -> DialOutcome:
        self.begun += 1
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            if self.begun <= self.hanging:
                await asyncio.Event().wait()
            self.is_linked = True
            return DialOutcome.LINKED
        finally:
            self.running -= 1


def test_the_next_attempt_does_not_wait_for_one_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address_race, "NEXT_SECONDS", 0.001)
    monkeypatch.setattr(redial_module, "NODE_DIAL_PAUSES", Growing(0.001, 0.001))
    monkeypatch.setattr(address_race, "DIAL_ATTEMPT_SECONDS", 60.0)
    node = _Dialer(hanging=ATTEMPTS_AT_ONCE - 1)

    async def work() -> None:
        await asyncio.wait_for(node.redial(CONTACT, lambda: not node.is_linked), 30)
        await asyncio.sleep(0)

    asyncio.run(work())
    assert (node.begun, node.running) == (ATTEMPTS_AT_ONCE, 0), "attempts that hang are given up"


def test_attempts_that_hang_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address_race, "NEXT_SECONDS", 0.001)
    monkeypatch.setattr(redial_module, "NODE_DIAL_PAUSES", Growing(0.001, 0.001))
    monkeypatch.setattr(address_race, "DIAL_ATTEMPT_SECONDS", 0.02)
    node = _Dialer(hanging=3 * ATTEMPTS_AT_ONCE)
    asyncio.run(asyncio.wait_for(node.redial(CONTACT, lambda: not node.is_linked), 30))
    assert node.most <= ATTEMPTS_AT_ONCE
    assert node.begun == 3 * ATTEMPTS_AT_ONCE + 1


CARD = Card(bytes(32), bytes(16), "one", "host", 1, Contact("here", (Address("192.0.2.1", 1),), ""))


def test_a_direct_way_is_sought_again_when_the_link_falls_back_to_the_relay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The link is direct for less time than the search for a nearer relay takes to notice."""
    monkeypatch.setattr(dialer, "RELAY_CHECK_EVERY", 2 * DEADLINE)
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
