"""A lost member is dialled again and again, also while an attempt hangs."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from covey.base.pace import Growing
from covey.runtime.links import address_race
from covey.runtime.peers import dialer as redial_module
from covey.runtime.peers.dialer import ATTEMPTS_AT_ONCE, Dialer
from covey.runtime.peers.follower import DialOutcome
from covey.wire.messages import Address, Contact

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
