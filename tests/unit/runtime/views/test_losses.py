"""What the end of a link means: that of a direct one is reported at once, that of a relayed one if no other follows."""

from __future__ import annotations

import asyncio
import errno
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from covey.base.config import GroupConfig
from covey.base.numbers import Seat
from covey.runtime.peers.peer_table import PeerTable
from covey.runtime.peers.remote_process import PeerEvent, RemoteProcess
from covey.runtime.tasks import Tasks
from covey.runtime.views import losses as losses_module
from covey.runtime.views.health_monitor import ClockOffsets
from covey.runtime.views.losses import Losses
from covey.wire.messages import Card, Contact

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from covey.base.settings import OnLoss

SEAT = Seat(1)


class _Run:
    """What `Losses` uses of a run, and how often it was told that a process is unlinked, or gone."""

    def __init__(self, peer: RemoteProcess, on_loss: OnLoss) -> None:
        self.told = 0
        do_nothing: Any = SimpleNamespace(
            tell_of_peer=note, link_ended=note, phase=note, note=note, link_lost=note, excluded=note
        )
        generations: Any = SimpleNamespace(current=SimpleNamespace(number=0), link_down=self._count)
        listener: Any = SimpleNamespace(link_lost=note, gone=self._count)
        self.losses = Losses(
            generations,
            PeerTable(Seat(0), {peer.seat: peer}),
            do_nothing,
            listener,
            config=GroupConfig(on_loss=on_loss),
            host="here",
            clocks=ClockOffsets(),
            tasks=Tasks("a test"),
            events=do_nothing,
            audit=do_nothing,
        )

    def _count(self, *_: object) -> None:
        self.told += 1


def note(*_: object, **__: object) -> None:
    """Take what somebody else would act on."""


def play(
    relay: str,
    on_loss: OnLoss,
    then: Callable[[RemoteProcess], None] = lambda _: None,
    reason: str = "",
    error: BaseException | None = None,
) -> list[int]:
    """End a link, do something before the time of relayed ones is over, and return what was told before and after."""
    told = []

    async def work() -> None:
        card = Card(b"i" * 16, b"l" * 16, "n", "h", 0, Contact("elsewhere", (), ""))
        peer = RemoteProcess(card, seat=SEAT, is_dialled=True)
        peer.note(PeerEvent.READY)
        peer.reason = reason
        link: Any = SimpleNamespace(relay=relay, error=error, catch_up=lambda: None)
        peer.link = link
        run = _Run(peer, on_loss)
        run.losses.link_ended(SEAT)
        told.append(run.told)
        then(peer)
        await asyncio.sleep(2 * losses_module.UNLINKED_SECONDS)
        told.append(run.told)

    asyncio.run(work())
    return told


def relinked(peer: RemoteProcess) -> None:
    link: Any = SimpleNamespace(relay="192.0.2.9:47690")
    peer.link = link


def test_a_relay_that_ends_takes_no_member_with_it_that_is_linked_again_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(losses_module, "UNLINKED_SECONDS", 0.02)
    on_loss: OnLoss
    for on_loss, reported in (("continue", 1), ("raise", 2)):  # the views; and the groups, where no view decides
        assert play("", on_loss) == [reported, reported], on_loss
        assert play("192.0.2.8:47690", on_loss) == [0, reported], on_loss
        assert play("192.0.2.8:47690", on_loss, relinked) == [0, 0], on_loss
        assert play("192.0.2.8:47690", on_loss, reason="silent") == [reported, reported], on_loss


def test_a_path_that_dies_takes_no_member_with_it_and_a_process_that_ends_its_link_is_lost_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(losses_module, "UNLINKED_SECONDS", 0.02)
    for number in (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN):
        error = OSError(number, "")
        assert play("", "raise", error=error) == [0, 2], error
        assert play("", "raise", relinked, error=error) == [0, 0], error
        assert play("", "raise", error=error, reason="silent") == [2, 2], error
        assert play("", "continue", error=error) == [1, 1], "the members decide"
    for reset in (ConnectionResetError(errno.ECONNRESET, ""), BrokenPipeError(errno.EPIPE, ""), None):
        assert play("", "raise", error=reset) == [2, 2], reset
