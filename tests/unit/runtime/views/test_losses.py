"""What the end of a link means: that of a direct one is reported at once, that of a relayed one if no other follows."""

from __future__ import annotations

import asyncio
import errno
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from covey.base.config import GroupConfig
from covey.base.numbers import Seat
from covey.runtime.peers.remote_process import PeerEvent, RemoteProcess
from covey.runtime.views import losses as losses_module
from covey.runtime.views.losses import Losses
from covey.wire.messages import Card, Contact

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

SEAT = Seat(1)


class _Node:
    """What `Losses` uses of a node, and what it was told."""

    def __init__(self, peer: RemoteProcess, on_loss: str) -> None:
        self.unlinked = self.gone = 0
        self.peers, self.config = {peer.seat: peer}, GroupConfig(on_loss=on_loss)
        self.is_closing, self.launcher_mesh, self.generation = False, None, SimpleNamespace(number=0)
        self.events = SimpleNamespace(phase=lambda _name: None)
        self.lanes = SimpleNamespace(
            dialler=SimpleNamespace(link_lost=lambda _seat: None), abandon=lambda *_: None, part_with=lambda _: None
        )
        self.stores = SimpleNamespace(peer_gone=lambda _seat: None)
        self.audit = SimpleNamespace(note=lambda *_, **__: None)
        self.generation_table = SimpleNamespace(link_down=self._link_down, name_of=str)
        self.groups = SimpleNamespace(peer_gone=self._peer_gone)

    def _link_down(self, _seat: Seat) -> None:
        self.unlinked += 1

    def _peer_gone(self, _peer: RemoteProcess) -> None:
        self.gone += 1


def play(
    relay: str,
    on_loss: str,
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
        node: Any = _Node(peer, on_loss)
        Losses(node).link_ended(SEAT)
        told.append(node.unlinked + node.gone)
        then(peer)
        await asyncio.sleep(2 * losses_module.UNLINKED_SECONDS)
        told.append(node.unlinked + node.gone)

    asyncio.run(work())
    return told


def relinked(peer: RemoteProcess) -> None:
    link: Any = SimpleNamespace(relay="192.0.2.9:47690")
    peer.link = link


def test_a_relay_that_ends_takes_no_member_with_it_that_is_linked_again_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(losses_module, "UNLINKED_SECONDS", 0.02)
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
