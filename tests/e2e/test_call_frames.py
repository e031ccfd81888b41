"""How long the walk of a small call is: each layer that is added to it shows here."""

from __future__ import annotations

import pytest
from tests.support.sets import first
from tools.call_frames import MOST_FRAMES, walk


@pytest.mark.parametrize("lanes", first(1, MOST_FRAMES))
def test_a_small_call_takes_few_frames_on_both_nodes(lanes: str) -> None:
    found = walk(lanes)
    assert min(len(found.caller), len(found.called)) > 10
    assert max(len(found.caller), len(found.called)) <= MOST_FRAMES[lanes], str(found)
