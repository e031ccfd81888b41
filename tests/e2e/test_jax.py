"""`covey.jax` inside compiled programs: the same numbers as `Group`, in the order of the program."""

from __future__ import annotations

import numpy as np
import pytest

import covey

pytestmark = pytest.mark.thorough
pytest.importorskip("jax")


def test_every_operation_works_inside_one_compiled_program_in_its_order() -> None:
    from tests.support.jax_ranks import call_everything

    covey.launch(call_everything, 3)


def test_operations_may_be_in_loops_branches_and_gradients() -> None:
    from tests.support.jax_ranks import differentiate

    covey.launch(differentiate, 2)


def test_an_error_of_covey_is_in_the_error_of_jax() -> None:
    from tests.support.jax_ranks import call_different_things

    assert covey.launch(call_different_things, 2) == ["JaxRuntimeError"] * 2


def test_the_compiled_step_of_the_guide_to_arrays_runs_on_two_ranks() -> None:
    from tests.support.jax_ranks import run_the_guide

    assert covey.launch(run_the_guide, 2) == [[0.9, 0.9]] * 2


def test_without_a_group_the_error_says_what_to_do() -> None:
    from covey.jax import all_reduce

    with pytest.raises(covey.ConfigError, match=r"call covey\.join\(\) first, or pass group="):
        all_reduce(np.ones(2))
