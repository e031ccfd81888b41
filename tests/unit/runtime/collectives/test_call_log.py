from __future__ import annotations

import numpy as np

from covey.base.arithmetic import DTYPES, dtype_code
from covey.base.numbers import OPERATIONS
from covey.runtime.collectives.call_log import LOGGED, CallLog, make_call

FLOAT = dtype_code(np.dtype(np.float32))
BARRIER = make_call("barrier", None, None)
REDUCE = make_call("all_reduce", FLOAT, (2, 3), op="sum", algorithm=None)


def test_a_call_reads_as_a_person_would_write_it() -> None:
    assert BARRIER.text == "barrier()"
    assert REDUCE.text == "all_reduce(float32[2, 3], op=sum)"
    assert make_call("gather", FLOAT, None, root=2).text == "gather(float32, root=2)"
    assert OPERATIONS[REDUCE.operation] == "all_reduce"
    assert DTYPES[REDUCE.dtype] == np.float32


def test_calls_have_equal_fingerprints_exactly_if_all_that_must_agree_agrees() -> None:
    variations = [
        make_call("all_reduce", FLOAT, (2, 3), op="sum"),
        make_call("reduce", FLOAT, (2, 3), op="sum"),
        make_call("all_reduce", FLOAT + 1, (2, 3), op="sum"),
        make_call("all_reduce", FLOAT, (3, 2), op="sum"),
        make_call("all_reduce", FLOAT, (6,), op="sum"),
        make_call("all_reduce", FLOAT, (2, 3), op="max"),
        make_call("all_reduce", FLOAT, (2, 3), op="sum", algorithm="ring"),
    ]
    assert variations[0].fingerprint == REDUCE.fingerprint
    assert len({call.fingerprint for call in variations}) == len(variations)


def test_a_call_log_remembers_the_latest_calls_only() -> None:
    call_log = CallLog()
    assert call_log.at(0) is None
    for sequence in range(1, LOGGED + 11):
        call_log.enter(sequence, make_call("broadcast", FLOAT, (sequence,), root=0))
    assert call_log.entered == LOGGED + 10
    assert call_log.at(10) is None
    assert call_log.at(LOGGED + 11) is None
    for sequence in (11, LOGGED, LOGGED + 10):
        call = call_log.at(sequence)
        assert call is not None
        assert f"[{sequence}]" in call.text


def test_only_another_call_at_the_same_place_is_a_contradiction() -> None:
    call_log = CallLog()
    call_log.enter(1, BARRIER)
    call_log.enter(2, REDUCE)
    assert not call_log.heard(1, 2, 2, REDUCE.fingerprint, REDUCE.text)
    assert not call_log.heard(1, 3, 3, BARRIER.fingerprint, BARRIER.text), "this rank has not come to 3"
    assert not call_log.heard(2, 1, 2, 0, ""), "that rank has not come to 2"
    assert call_log.heard(2, 2, 2, BARRIER.fingerprint, BARRIER.text)
    assert call_log.heard(3, 1, 1, REDUCE.fingerprint, REDUCE.text)


def test_the_late_are_the_ranks_that_do_not_answer_or_else_those_furthest_behind() -> None:
    call_log = CallLog()
    call_log.enter(5, BARRIER)
    ranks = range(4)
    assert call_log.late(5, ranks, me=0) == (1, 2, 3)
    assert call_log.excuse(5, (1, 2, 3)) == "do not answer"
    call_log.heard(1, 5, 5, BARRIER.fingerprint, BARRIER.text)
    call_log.heard(2, 3, 5, 0, "")
    assert call_log.late(5, ranks, me=0) == (3,)
    assert call_log.excuse(5, (3,)) == "does not answer"
    call_log.heard(3, 4, 5, 0, "")
    assert call_log.late(5, ranks, me=0) == (2,)
    assert call_log.excuse(5, (2,)) == "has not called it yet"
    assert call_log.excuse(5, (1,)) == "has called it, but its data did not arrive"
    call_log.heard(2, 5, 5, BARRIER.fingerprint, BARRIER.text)
    assert call_log.late(5, ranks, me=0) == (3,)
    call_log.heard(3, 6, 6, 0, "")
    assert call_log.late(5, ranks, me=0) == ()


def test_what_a_rank_says_late_does_not_take_back_what_it_said_before() -> None:
    call_log = CallLog()
    call_log.enter(5, BARRIER)
    call_log.heard(1, 5, 5, BARRIER.fingerprint, BARRIER.text)
    call_log.heard(1, 3, 3, 0, "")
    assert call_log.late(5, range(2), me=0) == ()


def test_the_story_puts_ranks_that_called_the_same_together() -> None:
    call_log = CallLog()
    call_log.enter(1, BARRIER)
    for rank in (1, 3):
        call_log.heard(rank, 1, 1, REDUCE.fingerprint, REDUCE.text)
    call_log.heard(2, 1, 1, BARRIER.fingerprint, BARRIER.text)
    assert call_log.story(1, range(6), me=0, parted={2, 5}) == (
        "ranks 0, 2 called barrier(); ranks 1, 3 called all_reduce(float32[2, 3], op=sum); rank 4 called nothing yet; "
        "rank 5 called nothing, and closed the group"
    )


def test_what_others_say_takes_bounded_memory() -> None:
    call_log = CallLog()
    for sequence in range(10 * LOGGED):
        call_log.heard(1, sequence, sequence, BARRIER.fingerprint, BARRIER.text)
    assert len(call_log._others[1].calls) == LOGGED
