"""How long a rank looks for the reason before it tells its program of a mismatch or a loss."""

from __future__ import annotations

from covey.proto.call_inquiries import TESTIMONY_PATIENCE, Hearing
from covey.proto.evidence import STOPPED_SILENCE
from covey.runtime.collectives.failure import CAUSE_SECONDS
from covey.runtime.collectives.stalls import COMPARE_SECONDS
from covey.runtime.collectives.trouble import ANNOUNCE_SECONDS


def test_a_mismatch_and_a_loss_are_told_within_a_second() -> None:
    assert ANNOUNCE_SECONDS + COMPARE_SECONDS < 1.0, "a rank waits, asks the others, and compares"
    assert STOPPED_SILENCE + CAUSE_SECONDS < 1.0, (
        "its keeper sees that a process is stopped; a lane ends without a reason"
    )
    hearing = Hearing([1, 2])
    hearing.looked({1: 7}, [], 10.0)
    hearing.gone(1)
    hearing.heard(2, {1: 7}, [])
    assert hearing.is_over, "a rank that has heard all others waits for nothing"


def test_a_rank_that_proves_a_mismatch_is_waited_for_until_it_has_compared() -> None:
    assert TESTIMONY_PATIENCE > CAUSE_SECONDS + 2 * COMPARE_SECONDS, (
        "it waits for a reason, asks the others, and compares"
    )
