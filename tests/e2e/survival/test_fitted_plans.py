"""Ranks that are lost while links are measured, or after that: the others measure anew, or go on with the figures."""

from __future__ import annotations

import time
from typing import Any

import pytest
from tests.support.survivors import Members, covey, np, say, signal
from tests.support.waiting import DEADLINE

SIZE = 4
VICTIM = 2
OTHERS = (0, 1, 3)


def measure_and_lose(victim: int, when: str, on_loss: covey.OnLoss) -> Any:
    """Add large arrays up; the victim kills itself in the second round of a measurement, or two sums later."""
    import os

    from covey.plan import measurement
    from covey.runtime.collectives.link_probes import Arrivals

    measurement.LEAST_PART_SECONDS = 600.0  # type: ignore[misc] # each pass is done in one sum
    speed, rounds = Arrivals.speed, [0]

    def fatal(self: Any, piece: int, round_trip: float) -> float:
        rounds[0] += 1
        if rounds[0] == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return speed(self, piece, round_trip)

    told: list[Any] = []
    with covey.join(on_loss=on_loss, plan="always") as group:  # type: ignore[arg-type]
        if group.rank == victim and when == "in the middle":
            Arrivals.speed = fatal  # type: ignore[method-assign]
        wrong, at = 0, []
        try:
            for number in range(8):
                if group.rank == victim and when == "later" and number == 5:
                    os.kill(os.getpid(), signal.SIGKILL)
                x = np.full(1 << 18, 4.0**group.rank, np.float32) + np.arange(1 << 18, dtype=np.float32) % 7
                group.all_reduce(x)
                ones = np.arange(1 << 18, dtype=np.float32) % 7 * len(group.contributors)
                wrong += not np.array_equal(x, ones + np.float32(sum(4.0**rank for rank in group.contributors)))
                at.append(group.node.topology().measured_at)
                report = group.explain(x.nbytes)
                told.append([report.algorithm, report.order, report.why, report.predicted_seconds])
            group.barrier()  # no rank leaves before all have told
        except covey.PeerLostError:
            say("lost")
            return None
        return {"wrong": wrong, "at": at, "told": told, "live": group.contributors}


def test_after_a_loss_in_the_middle_of_measuring_the_others_measure_anew_and_choose_alike() -> None:
    with Members(SIZE, measure_and_lose, VICTIM, "in the middle", "continue", lanes="secure") as ranks:
        results = ranks.results(OTHERS, timeout=DEADLINE)
        ranks.await_exit(OTHERS)
    for result in results:
        assert result["wrong"] == 0
        assert result["live"] == list(OTHERS)
        assert result["at"][-1] is not None
        assert result["told"] == results[0]["told"]


@pytest.mark.thorough
def test_after_a_later_loss_the_others_go_on_with_what_was_measured() -> None:
    began_at = time.time()
    with Members(SIZE, measure_and_lose, VICTIM, "later", "continue", lanes="tcp") as ranks:
        results = ranks.results(OTHERS, timeout=DEADLINE)
        ranks.await_exit(OTHERS)
    for result in results:
        assert result["wrong"] == 0
        assert result["live"] == list(OTHERS)
        measured_at = result["at"][2]
        assert measured_at is not None
        assert began_at <= measured_at <= time.time()
        assert result["at"][2:] == [measured_at] * 6
        assert result["told"] == results[0]["told"]
        assert result["told"][5][3] is not None, "the first sum without the victim has a plan for the others"


@pytest.mark.thorough
def test_a_loss_in_the_middle_of_measuring_is_an_error_where_losses_are() -> None:
    with Members(SIZE, measure_and_lose, VICTIM, "in the middle", "raise", lanes="tcp") as ranks:
        ranks.hear("lost", OTHERS, timeout=DEADLINE)
        assert ranks.results(OTHERS, timeout=DEADLINE) == [None] * 3
