"""A member that says whatever it likes: the others raise nothing, keep little, and go on without it.

`python -m covey.lab.hostile --from N --seeds 1` repeats a seed; `make fuzz` plays more of them.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.seeds import batches

from covey.lab import hostile
from covey.lab.hostile import Mode, Quarrel
from covey.lab.invariants import BrokenError
from covey.proto.decision import Decision
from covey.proto.membership import checks, installer

if TYPE_CHECKING:
    from covey.wire.formation import Standing

BATCH = 9
MOST_SEEDS = 300
"""In which a broken member has to be noticed; most are within the first twenty."""


@pytest.mark.parametrize("batch", batches(2))
def test_a_hostile_member_breaks_no_honest_one(batch: int) -> None:
    totals: Counter[str] = Counter()
    for seed in range(BATCH * batch, BATCH * batch + BATCH):
        try:
            totals += hostile.perform(seed)
        except BrokenError as broken:
            pytest.fail(f"seed {seed}: {str(broken)[:4000]}")
    assert totals["lies"] > 1000
    assert totals["links closed"] > 10
    assert totals["views"] > 50


def nothing(*_: Any, **__: Any) -> None:
    """Take the place of a check."""


def hear_without_counting(self: Decision, rank: int, standing: Standing) -> None:
    for index, row in enumerate(standing.rows):
        if row.promised > self.rows[index].promised:
            self.rows[index] = row
    self._ended_for[rank] = frozenset(standing.ended)


KEEPS, ANYTHING = hostile.Mode
TALKATIVE = {"lies": 1500}
LONG = {"lies": 1400, "seconds": 12.0, "delays": (0.002,), "losses": (0.0,)}
MUTANTS: dict[str, tuple[Mode, dict[str, Any], tuple[Any, str, Any]]] = {
    "does not look whether a view can follow": (ANYTHING, TALKATIVE, (checks, "check_follows", nothing)),
    "takes any view for sound": (ANYTHING, TALKATIVE, (checks, "is_sound", lambda view, last: True)),
    "takes any ballot": (KEEPS, TALKATIVE, (checks, "check_ballot", nothing)),
    "keeps all views": (KEEPS, LONG, (installer, "PAST_VIEWS", 1 << 30)),
}

FIRST_NOTICED = {"does not look whether a view can follow": 6, "takes any view for sound": 27}
"""Seeds before these show nothing; looking at them takes long."""


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_play_notices_a_member_that(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mode, circumstances, patch = MUTANTS[mutant]
    for name, value in circumstances.items():
        monkeypatch.setattr(Quarrel, name, value)
    Quarrel(0, mode).perform()
    monkeypatch.setattr(*patch)
    for seed in range(FIRST_NOTICED.get(mutant, 0), MOST_SEEDS):
        try:
            Quarrel(seed, mode).perform()
        except BrokenError:
            return
    pytest.fail("not noticed")


def test_the_play_notices_a_joiner_that_does_not_count_the_rows_of_a_standing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Decision, "heard", hear_without_counting)
    with pytest.raises(BrokenError, match="IndexError"):  # noqa: PT012 - any of the seeds may notice
        for seed in range(6, MOST_SEEDS):
            hostile.HostileStory(seed).perform()
