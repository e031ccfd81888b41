"""A kind of lane is one row and one module: here is another one, which no other part of covey has heard of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast, get_args

import numpy as np
import pytest
from tests.support.lane_pairs import open_pair

from covey.base import settings
from covey.base.lane_kinds import LANE_KINDS, LaneKind, LaneName, LaneReach, named_kinds, register
from covey.base.setting_kinds import OneOf
from covey.base.settings import LANES
from covey.net.lanes.stream import StreamLane
from covey.runtime.lanes.opener import LaneOpener, opener_class
from covey.testing.threads import run_threads

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator

    import covey
    from covey.runtime.lanes.opener import Directs
    from covey.wire import messages


class LoudLane(StreamLane):
    """A stream that counts what it sends."""

    sent = 0

    def transmit(self, out: Any) -> bool:
        before = out.sent
        moved = super().transmit(out)
        LoudLane.sent += out.sent - before
        return moved


class LoudOpener(LaneOpener):
    def make(self, socks: list[socket.socket], offer: messages.Offer, directs: Directs, *, dialler: bool) -> Any:
        return socks[0] if offer.purpose == "messages" else LoudLane(socks[0], "loud")


@pytest.fixture
def loud(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    register(LaneKind("loud", LaneReach.HOST, f"{__name__}:LoudOpener"))
    row = settings.SETTINGS["lanes"]  # made of the kinds that there are when it is imported
    monkeypatch.setitem(cast("dict[str, Any]", settings.SETTINGS), "lanes", row._replace(kind=OneOf(named_kinds())))
    monkeypatch.setattr(LoudLane, "sent", 0)
    yield "loud"
    del LANE_KINDS["loud"]


def test_a_kind_that_is_registered_is_a_lane_like_any_other(loud: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COVEY_NATIVE", "0")  # its lane is one of the executor in Python

    def body(group: covey.Group) -> tuple[dict[int, str], float]:
        x = np.arange(100_000.0) + group.rank
        group.all_reduce(x)
        if group.rank == 0:
            group.send(np.ones(3), dst=1)
        elif group.rank == 1:
            assert group.recv(src=0, timeout=30.0).tolist() == [1.0, 1.0, 1.0]
        group.barrier()
        return dict(group.lanes()), float(x[-1])

    results = run_threads(3, body, lanes=loud)
    assert [total for _, total in results] == [3 * 99_999.0 + 3] * 3
    assert all(set(kinds.values()) == {"loud"} for kinds, _ in results)
    assert LoudLane.sent > 100_000 * 8
    assert "loud" in named_kinds()


def test_its_two_ends_are_made_as_those_of_any_kind(loud: str) -> None:
    one, other = open_pair(loud)
    assert isinstance(one, LoudLane)
    one.close()
    other.close()


def test_every_kind_can_be_named_by_programs_and_their_type_checkers() -> None:
    assert (*get_args(LaneName),) == named_kinds()
    assert ("auto", *named_kinds()) == LANES


@pytest.mark.parametrize("kind", LANE_KINDS.values(), ids=lambda kind: kind.name)
def test_what_a_row_says_fits_together(kind: LaneKind) -> None:
    assert issubclass(opener_class(kind), LaneOpener)
    assert not kind.instead or LANE_KINDS[kind.instead].reach is kind.reach
    assert kind.is_of_network or not (kind.is_sealed or kind.is_resumable or kind.can_spread)
