"""Which cases of a test are in `make test`, and which ones only in `make test-all`."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.sets import first, pairs


def is_kept(case: Any) -> bool:
    return not (isinstance(case, type(pytest.param())) and [mark.name for mark in case.marks] == ["thorough"])


def test_the_first_cases_are_in_both_sets() -> None:
    cases = first(2, range(5))
    assert [is_kept(case) for case in cases] == [True, True, False, False, False]
    assert cases[:2] == [0, 1]
    assert [case.values for case in cases[2:]] == [(2,), (3,), (4,)]


@pytest.mark.parametrize(("ones", "others"), [("abc", range(5)), (range(5), "abc"), ("ab", "cd"), ("a", "bcd")])
def test_of_all_pairs_every_member_of_either_list_is_in_both_sets(ones: Any, others: Any) -> None:
    cases = pairs(ones, others)
    everything = [case if is_kept(case) else case.values for case in cases]
    assert everything == [(one, other) for one in ones for other in others]
    kept = [case for case in cases if is_kept(case)]
    assert len(kept) == max(len(ones), len(others))
    assert {one for one, _ in kept} == set(ones)
    assert {other for _, other in kept} == set(others)
