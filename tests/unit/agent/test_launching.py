"""Whose word counts about a run that agents have started."""

from __future__ import annotations

from typing import Any, cast

from covey.agent.launching import goes_on
from covey.wire import messages

NORTH, STRANGER = b"n" * 32, b"s" * 32


class SaysItRuns:
    """A visit of a cluster in which every node says that it is in the run."""

    def __init__(self, *ids: bytes) -> None:
        contact = messages.Contact("host", (), "", b"", 0)
        self.cards = [messages.Card(each, b"l", "north-aaaa", "north", 1, contact) for each in ids]

    def members(self) -> list[messages.PeerReport]:
        return [messages.PeerReport(card, 0, "", "", "", "", 0.0, 0.0) for card in self.cards]

    def ask_all(self, cards: list[messages.Card], *_: Any) -> list[messages.Tell]:
        return [messages.Tell("train", "running", b"", b"", 1.0, ()) for _card in cards]


def test_only_machines_of_the_run_can_say_that_it_goes_on() -> None:
    visit = cast("Any", SaysItRuns(STRANGER))
    assert goes_on(visit, "train"), "with ssh, the keys of the machines are not known"
    assert not goes_on(visit, "train", {NORTH})
    assert goes_on(cast("Any", SaysItRuns(STRANGER, NORTH)), "train", {NORTH})
    assert not goes_on(visit, "other", {STRANGER})
