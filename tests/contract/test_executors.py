"""Python's executor and the compiled one work together, and the tests choose between them as they say."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from tests.support.compiled import EXECUTORS, needs_native, takes_native, use_executors
from tests.support.values import LANES

from covey.testing.threads import run_threads

if TYPE_CHECKING:
    from covey import Group


@needs_native
@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("chosen", EXECUTORS)
def test_a_group_uses_the_executors_that_were_chosen(chosen: str, lanes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_executors(monkeypatch, chosen)

    def body(group: Group) -> tuple[str, list[float]]:
        x = np.arange(5.0) + group.rank
        return group.lanes().executor, list(group.all_reduce(x))

    uses, sums = zip(*run_threads(3, body, lanes=lanes), strict=True)
    assert uses == tuple("compiled" if takes_native(chosen, rank) else "Python" for rank in range(3))
    assert all(each == [3.0, 6.0, 9.0, 12.0, 15.0] for each in sums)
