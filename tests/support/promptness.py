"""Promises of so many seconds: asked for where nothing else runs.

How soon something happens depends on what else a machine does. A test with the fixture `promised` runs twice: in `make
test` it asks what happens and in which order; in `make test-all`, with nothing beside it, it asks how soon as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.support.waiting import DEADLINE

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture(
    params=[
        pytest.param(False, id="at last"),
        pytest.param(True, id="in time", marks=[pytest.mark.thorough, pytest.mark.alone]),
    ]
)
def promised(request: pytest.FixtureRequest) -> Callable[[float], float]:
    """Return what turns promised seconds into the limit of this test: the same if it runs alone, else the deadline."""
    is_alone: bool = request.param
    return lambda seconds: seconds if is_alone else DEADLINE
