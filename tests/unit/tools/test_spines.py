"""The spines of a join and of a loss are functions of the tree, and run in their order."""

from __future__ import annotations

import importlib
import operator

import pytest
from tools import spines


def test_every_function_of_a_spine_exists() -> None:
    for function in {each for spine in spines.SPINES.values() for each in spine}:
        module, _, name = function.partition(":")
        outer = name.partition(".<locals>")[0]
        assert callable(operator.attrgetter(outer)(importlib.import_module(f"covey.{module}"))), function


def test_a_function_that_does_not_run_in_its_turn_is_named() -> None:
    spine = ("a:one", "b:two", "a:one", "c:three")
    assert spines.missing(spine, ["a:one", "x:other", "b:two", "a:one", "c:three"]) is None
    assert spines.missing(spine, ["a:one", "a:one", "b:two", "c:three"]) == "a:one"


@pytest.mark.thorough
@pytest.mark.parametrize("name", spines.SPINES)
def test_a_spine_is_what_runs(name: str) -> None:
    assert spines.missing(spines.SPINES[name], spines.walk(name)) is None
