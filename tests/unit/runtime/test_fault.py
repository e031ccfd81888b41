"""What other ranks are told of the error that ends a program, and of a loss under each policy."""

from __future__ import annotations

import pytest

from covey.runtime.fault import describe, is_failure
from covey.runtime.views.generation import text_of_loss
from covey.wire.messages import REASON_LIMIT


class WordlessError(Exception):
    """An error that cannot even be shown."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("cannot divide the cake"), "ValueError: cannot divide the cake"),
        (ValueError("\n first line\nsecond"), "ValueError: first line"),
        (KeyError(), "KeyError"),
        (OSError("\x1b[2J\x07owned"), r"OSError: \x1b[2J\x07owned"),
        (WordlessError(), "WordlessError"),
        (SystemExit(5), "exit code 5"),
        (SystemExit("no data"), "SystemExit: no data"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
    ],
)
def test_an_error_is_told_in_one_printable_line_of_bounded_length(error: BaseException, text: str) -> None:
    assert describe(error) == text
    assert is_failure(error)
    long = describe(ValueError("x" * 10_000))
    assert len(long) == REASON_LIMIT
    assert long.endswith("...")


@pytest.mark.parametrize("error", [None, SystemExit(), SystemExit(0)])
def test_a_program_that_ends_well_has_not_failed(error: BaseException | None) -> None:
    assert not is_failure(error)


ONE, TWO = ("rank 1 (north)",), ("rank 1 (north)", "rank 3 (east)")


@pytest.mark.parametrize(
    ("names", "failures", "rest", "left", "on_loss", "text"),
    [
        (ONE, [""], (0, 2), [False], "continue", "rank 1 (north) is lost; ranks 0 and 2 continue"),
        (ONE, [""], (0,), [False], "continue", "rank 1 (north) is lost; rank 0 continues"),
        (TWO, ["", ""], (0, 2, 4), [True, True], "continue",
         "rank 1 (north) and rank 3 (east) have left; ranks 0, 2 and 4 continue"),
        (TWO, ["", ""], (0,), [True, False], "continue",
         "rank 3 (east) is lost, rank 1 (north) has left; rank 0 continues"),
        (ONE, ["ValueError: no"], (0, 2), [True], "continue",
         "rank 1 (north) failed with ValueError: no; ranks 0 and 2 continue"),
        (TWO, ["ValueError: no", ""], (0,), [True, False], "continue",
         "rank 3 (east) is lost, rank 1 (north) failed with ValueError: no; rank 0 continues"),
        (ONE, [""], (0, 2), [False], "raise", "rank 1 (north) is lost; the group ends with an error on ranks 0 and 2"),
        (ONE, ["ValueError: no"], (0,), [True], "raise",
         "rank 1 (north) failed with ValueError: no; the group ends with an error on rank 0"),
        (ONE, [""], (0, 2), [True], "raise", "rank 1 (north) has left"),
    ],
)  # fmt: skip
def test_a_loss_is_told_with_what_it_means_under_the_policy(names, failures, rest, left, on_loss, text) -> None:
    assert text_of_loss(names, failures, left, rest, on_loss=on_loss) == text
