"""Nodes that are refused are told of once for each reason, and not without end."""

from __future__ import annotations

from covey.runtime.peers.problems import TOLD_LIMIT, Problems
from covey.runtime.state.audit import SILENT
from covey.wire.messages import Address, Card, Contact


def card(name: str) -> Card:
    return Card(b"i" * 32, b"l" * 16, name, "host", 1, Contact("h", (Address("10.0.0.1", 4),), ""))


def test_a_refused_node_is_told_of_once_for_each_reason() -> None:
    told: list[tuple[str, str]] = []
    listens = False

    def note(name: str, reason: str) -> bool:
        if listens:
            told.append((name, reason))
        return listens

    problems = Problems((), "here", SILENT, note)
    problems.refuse(card("early"), "nothing listens yet", "10.0.0.1")
    listens = True
    for reason in ("denied", "denied", "another version"):
        problems.refuse(card("north"), reason, "10.0.0.1")
    assert told == [("north (10.0.0.1)", "denied"), ("north (10.0.0.1)", "another version")]


def test_a_flood_of_refusals_does_not_hide_other_events() -> None:
    told: list[str] = []

    def note(name: str, _reason: str) -> bool:
        told.append(name)
        return True

    problems = Problems((), "here", SILENT, note)
    for number in range(3 * TOLD_LIMIT):
        problems.refuse(card(f"node {number}"), "denied", "10.0.0.1")
    assert len(told) == TOLD_LIMIT
