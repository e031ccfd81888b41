"""Asks the nodes of runs for the links that they have measured."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from covey.base.errors import RemoteProtocolError
from covey.cli.status.network import combined
from covey.runtime.metrics.inspection import NETWORK
from covey.wire import messages
from covey.wire.reports import decode_network

if TYPE_CHECKING:
    from collections.abc import Sequence

    from covey.base.errors import CoveyError
    from covey.cli.status.network import RunNetwork
    from covey.runtime.peers.visit import Visit
    from covey.wire.reports import MeasuredNetwork


def measured_networks(
    visit: Visit, cards: Sequence[messages.Card], stories: Sequence[messages.Answer | CoveyError], within: float
) -> dict[str, RunNetwork | None]:
    """Return what the nodes of each run have measured; `stories` are their answers to Ask."""
    runs = {
        card.id: (card, tell.run)
        for card, tell in zip(cards, stories, strict=True)
        if isinstance(tell, messages.Tell) and tell.state == "running"
    }
    told: dict[str, list[MeasuredNetwork]] = {run: [] for run in sorted({run for _, run in runs.values()})}
    asked = [card for card, _ in runs.values()]
    for card, answer in zip(asked, visit.ask_all(asked, messages.Inspect(NETWORK), within), strict=True):
        if isinstance(answer, messages.Inspected) and answer.what == NETWORK and answer.pages:
            with contextlib.suppress(RemoteProtocolError):
                told[runs[card.id][1]].append(decode_network(answer.body))
    return {run: combined(each) for run, each in told.items()}
