"""What a thread that closes a group sees while the control loop notes the last calls of another rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from covey.base.numbers import Rank
from covey.proto.call_inquiries import Parting
from covey.runtime.collectives.call_log import CallLog, make_call
from covey.runtime.collectives.closure import Farewell
from covey.runtime.collectives.evidence import CallEvidence
from covey.runtime.collectives.stalls import StallDiagnosis
from covey.wire.messages import CallRun, Calls

CALL = make_call("all_reduce", 0, (3,), op="sum")
LAST, OTHER = 40, Rank(1)


ROSTER: Any = SimpleNamespace(
    rank=0, ranks=(0, 1), node=None, peer=lambda _rank: SimpleNamespace(failure=None, is_gone=False)
)
"""What a rank of two knows of its group."""


class Watched(CallLog):
    """A log at which another thread looks after each call that is noted."""

    look: Any = None

    def heard(self, *args: Any) -> bool:
        differs = super().heard(*args)
        self.look()
        return differs


def test_a_rank_that_closes_the_group_compares_only_what_is_noted_whole() -> None:
    log, unused = Watched(), cast("Any", None)
    evidence = CallEvidence(7, log, ROSTER, unused, unused)
    stalls = StallDiagnosis(unused, ROSTER, unused, unused, log, evidence, unused)
    for sequence in range(1, LAST + 1):
        log.enter(sequence, CALL)
    calls = {sequence: call.fingerprint for sequence, call in log.recent()}
    core, farewell = (
        Parting(calls, LAST, [OTHER], 0.0, is_in_doubt=True),
        Farewell(ROSTER, evidence, unused, stalls, unused),
    )
    log.look = lambda: farewell._tell(core, OTHER, 0)
    stalls.recall(OTHER, Calls(7, (CallRun(1, LAST, CALL.fingerprint, CALL.text),), in_order=True))
    assert core.differs_at == 0
    farewell._tell(core, OTHER, 0)
    assert (core.differs_at, core.is_over) == (0, True)
