"""What tests of several machines share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.support.machines import Lab, new_lab

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def lab() -> Iterator[Lab]:
    """Machines of one test, which are gone with it."""
    with new_lab() as made:
        yield made
