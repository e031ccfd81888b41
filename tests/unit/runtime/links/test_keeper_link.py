"""A process links with its keeper again, and waits longer and longer if the keeper ends each link at once."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from covey.base.pace import Growing
from covey.runtime.links import keeper_link
from covey.runtime.links.keeper_link import KeeperLink

if TYPE_CHECKING:
    from collections.abc import Callable


class EndedLink:
    """A link that the keeper ends as soon as it is there."""

    error = None

    def attach(self, _message: object, ended: Callable[[], None], _room: object) -> None:
        ended()

    def abort(self) -> None:
        pass


def test_a_keeper_that_ends_every_link_at_once_is_dialled_after_growing_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    dialled = asyncio.Event()

    async def dial(*_: object) -> tuple[Any, None, None]:
        if len(pauses) == 5:
            dialled.set()
        return EndedLink(), None, None

    class Told(Growing):
        def after(self, failures: int) -> float:
            pauses.append(super().after(failures))
            return 0.0

    async def run() -> None:
        link = KeeperLink("", *(SimpleNamespace(),) * 2, on_message=lambda _: None)  # type: ignore[arg-type]
        monkeypatch.setattr(link, "_hello", lambda: None)
        keeping = asyncio.create_task(link.keep())
        await dialled.wait()
        keeping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await keeping

    monkeypatch.setattr(keeper_link, "dial", dial)
    monkeypatch.setattr(keeper_link, "KEEPER_PAUSES", Told(0.01, 1.0, 1.5))
    asyncio.run(run())
    assert pauses[:5] == pytest.approx([0.01, 0.015, 0.0225, 0.03375, 0.050625])
