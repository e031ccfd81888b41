"""The rules of a keeper, for every number of members from none on."""

from __future__ import annotations

import itertools

from covey.proto.keeper import RunFate, lost_ranks, without_members

SIZES = range(5)


def test_a_process_that_exists_is_lost_only_if_another_member_runs_on() -> None:
    for size in SIZES:
        for states in itertools.product(["exited", "stopped", "running", "leaving"], repeat=size):
            ranks = {state: {rank for rank in range(size) if states[rank] == state} for state in states}
            exited, stopped = ranks.get("exited", set()), ranks.get("stopped", set())
            remaining = set(range(size)) - ranks.get("leaving", set())
            lost = lost_ranks(exited, stopped, remaining)
            runs_on = bool(ranks.get("running"))
            assert lost == (exited | stopped if runs_on else exited), states


def test_a_run_in_which_a_member_finished_never_begins_again() -> None:
    for size, waiting, late in itertools.product(range(1, 5), range(1, 5), (False, True)):
        for fewest in (0, 1, 2):
            told = without_members(has_finished=True, size=size, expected=size, fewest=[fewest] * waiting, is_late=late)
            assert told is RunFate.OVER


def decided(size: int, waiting: int, *, expected: int, fewest: int = 0, is_late: bool = False) -> RunFate:
    return without_members(has_finished=False, size=size, expected=expected, fewest=[fewest] * waiting, is_late=is_late)


def test_a_run_without_members_begins_with_all_its_processes_only() -> None:
    for size in range(1, 5):
        for waiting in range(1, size + 1):
            for late in (False, True):
                expected = RunFate.BEGIN if waiting == size else RunFate.WAIT
                assert decided(size, waiting, expected=size, is_late=late) is expected, (size, waiting, late)


def test_a_process_that_waits_for_more_than_can_come_is_told() -> None:
    for size in range(2, 5):
        for left in range(1, size):
            assert decided(size, left, expected=left) is RunFate.HOPELESS
            assert decided(size, left, expected=left, fewest=left + 1) is RunFate.HOPELESS
            assert decided(size, left, expected=left, fewest=left) is RunFate.BEGIN


def test_with_a_least_size_the_run_begins_once_the_others_had_time_to_come() -> None:
    assert decided(3, 1, expected=3, fewest=1) is RunFate.WAIT
    assert decided(3, 1, expected=3, fewest=1, is_late=True) is RunFate.BEGIN
    assert decided(3, 1, expected=3, fewest=2, is_late=True) is RunFate.WAIT
    mixed = without_members(has_finished=False, size=3, expected=3, fewest=[1, 0], is_late=True)
    assert mixed is RunFate.WAIT  # one of them asked for nothing, so it waits for all
