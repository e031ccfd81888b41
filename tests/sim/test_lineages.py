"""Whole runs of one name in a world with disks: one run never becomes two, and all machines find together again.

A failing seed prints its story; `python -m covey.lab.lineages --seed N` tells it again.
"""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.plays import performed
from tests.support.seeds import batches

from covey.base.errors import CoveyError
from covey.lab.invariants import BrokenError
from covey.lab.lineages import Story
from covey.proto.formation import Formation
from covey.proto.joining import Joining
from covey.proto.lineages import Lineages
from covey.proto.membership import Membership
from covey.proto.membership.state import ViewPosition
from covey.wire.membership import View


@pytest.mark.parametrize("batch", batches(4))
def test_fifty_runs_among_cuts_crashes_and_newcomers_never_become_two(batch: int) -> None:
    stories = [performed(Story(seed)) for seed in range(50 * batch, 50 * batch + 50)]
    assert sum(len(story.foundings) for story in stories) > 50
    assert any(story.ended[lineage] is False for story in stories for lineage in story.foundings & story.ended.keys())


def succeed_alone(self: Membership, successor: Any, now: float) -> None:
    """Go on in the next generation without asking the others."""
    if not self.is_last and self.is_member:
        view = self.view
        self._installer.install(
            View(view.lineage, view.number + 1, view.ranks, view.tie_breaker, successor=successor), now
        )


MUTANTS: dict[str, tuple[type, str, Any]] = {
    "founds a run although it knows of one": (Lineages, "current", property(lambda self: b"")),
    "forgets what it was told": (Lineages, "learn", lambda *_, **__: None),
    "accepts a founding without writing it down": (Joining, "_bind_to_accepted", lambda self: None),
    "ends a run without a quorum": (ViewPosition, "is_quorum", lambda self, ranks: bool(ranks)),
    "goes to the next generation by itself": (Membership, "succeed", succeed_alone),
    "does not vote where it never heard of its seat": (Joining, "_heard_of_seat", lambda self, seated, now: None),
    "forgets the view that excluded it": (Joining, "_excluded", lambda self, view, now: self._unbind()),
    "goes on beside an older run": (Formation, "_heard_of_lineages", lambda self, here, now: None),
}

FIRST_NOTICED = {"does not vote where it never heard of its seat": 480}
"""Seeds before these show nothing; looking at them takes long."""


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_simulation_notices_a_node_that(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, rule = MUTANTS[mutant]
    monkeypatch.setattr(owner, name, rule)
    first = FIRST_NOTICED.get(mutant, 0)
    for seed in range(first, first + 1000):
        try:
            Story(seed).perform()
        except (CoveyError, BrokenError, KeyError):
            return
    pytest.fail(f"1000 stories with a node that {mutant}, and nothing was noticed")
