"""The walk in the terminal: `covey top` says within three seconds what happened to a run, to whom and why.

`tests/browser/test_walk.py` takes the same walk with the page beside it.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tests.support.walks import WELL, sentence_of, walking

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SOON = 3.0


def test_top_says_what_happens_to_a_run_on_two_machines_to_whom_and_why(
    tmp_path: Path, promised: Callable[[float], float]
) -> None:
    with walking(tmp_path) as walk:
        walk.begin()
        with walk.top() as terminal:
            terminal.wait_for(lambda text: WELL in sentence_of(text))
            for what, words in walk.course():
                began = time.monotonic()
                terminal.wait_for(lambda text: all(word in sentence_of(text) for word in words))  # noqa: B023
                assert time.monotonic() - began < promised(SOON), what
