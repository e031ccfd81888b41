"""How long a rank looks for the reason before it tells its program of a mismatch or a loss."""

from __future__ import annotations

from covey.proto.evidence import STOPPED_SILENCE
from covey.runtime.collectives.evidence import COMPARE_SECONDS, HEARING_SECONDS
from covey.runtime.collectives.lane_trouble import CAUSE_SECONDS
from covey.runtime.collectives.operation import ANNOUNCE_SECONDS


def test_a_mismatch_and_a_loss_are_told_within_a_second() -> None:
    assert ANNOUNCE_SECONDS + COMPARE_SECONDS < 1.0, "a rank waits, asks the others, and compares"
    assert STOPPED_SILENCE + HEARING_SECONDS < 1.0, "its keeper sees that a process is stopped"
    assert CAUSE_SECONDS + HEARING_SECONDS < 1.0, "a lane ends; the rank waits for the reason, and for other ranks"
