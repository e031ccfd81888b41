"""The loop over cases of a test: all are tried, and the one that fails is named."""

from __future__ import annotations

import pytest
from tests.support.in_turn import in_turn

TRIED: list[tuple[int, str, str]] = []


@pytest.fixture
def fixed() -> str:
    return "fixed"


@pytest.mark.parametrize("turn", [0, 1])
@in_turn(size=range(2), name=["a", "b"])
def test_all_combinations_are_tried_beside_fixtures_and_parameters(
    name: str, fixed: str, size: int, turn: int, request: pytest.FixtureRequest
) -> None:
    if (size, name) == (0, "a"):
        TRIED.clear()
    TRIED.append((size, name, fixed))
    assert request.node.name.endswith(f"[{turn}]")
    if (size, name) == (1, "b"):
        assert TRIED == [(0, "a", "fixed"), (0, "b", "fixed"), (1, "a", "fixed"), (1, "b", "fixed")]


def test_the_case_that_fails_is_named_and_the_last_to_be_tried() -> None:
    tried: list[int] = []

    @in_turn(seed=range(5), of=[len])
    def fails(seed: int, of: object) -> None:
        tried.append(seed)
        assert seed < 3

    with pytest.raises(AssertionError) as caught:
        fails()
    assert caught.value.__notes__ == ["with seed=3, of=len"]
    assert tried == [0, 1, 2, 3]


def test_a_long_value_is_cut_and_a_loop_over_nothing_is_refused() -> None:
    @in_turn(text=["x" * 1000])
    def fails(text: str) -> None:
        raise ValueError(text)

    with pytest.raises(ValueError, match="xx") as caught:
        fails()
    assert caught.value.__notes__ == [f"with text='{'x' * 199}..."]
    with pytest.raises(AssertionError, match="nothing to try"):
        in_turn(seed=range(0))
    with pytest.raises(AssertionError, match="fails lacks one of"):
        in_turn(seed=[1])(fails)
