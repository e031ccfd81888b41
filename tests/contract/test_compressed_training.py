"""A small model trains to the same loss with compressed gradients; `tools.compression_proof` trains it with all."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.support.sets import first
from tools.compression_proof import Training, Trial, train

from covey.testing import run_threads

if TYPE_CHECKING:
    from tools.compression_proof import Curve

    from covey import Group

SMALL = Training(steps=250, batch=32, hidden=32, points=1)
NONE, WITHOUT = Trial("none", False), Trial("topk(0.03)", False)
GOOD = (Trial("topk(0.03)", True), Trial("int8", False), Trial("int4", True))


@pytest.mark.parametrize("good", first(1, [GOOD[:1], GOOD]), ids=["one", "all"])
def test_the_final_loss_is_within_two_percent_and_without_feedback_topk_is_clearly_worse(
    good: tuple[Trial, ...],
) -> None:
    trials = (NONE, *good, WITHOUT)

    def body(group: Group) -> dict[Trial, Curve]:
        return {trial: train(group, trial, SMALL) for trial in trials}

    by_rank = run_threads(3, body)
    for trial in trials:
        assert len({curves[trial].digest for curves in by_rank}) == 1, f"{trial}: the parameters of the ranks differ"
    curves = by_rank[0]
    plain = curves[NONE].losses[-1]
    assert plain < 0.65 * curves[NONE].losses[0], "nothing was learnt, so nothing is tested"
    for trial in good:
        assert abs(curves[trial].losses[-1] - plain) < 0.02 * plain, trial
        assert curves[trial].ratio > 3.5
    assert curves[WITHOUT].losses[-1] > 1.05 * plain
