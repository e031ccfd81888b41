"""The walk in the page and in the terminal beside it: both say within three seconds what happened, to whom and why."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING

import pytest
from tests.browser.viewer import GUARD, Chromium, chromium_on, until_text
from tests.support.walks import NORTH, RUN, WELL, sentence_of, walking

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.thorough, pytest.mark.alone]

SOON = 3.0 * float(os.environ.get("TEST_SLACK", "1"))


def test_the_page_and_top_say_what_happens_to_a_run_on_two_machines_to_whom_and_why(
    browser_path: str, tmp_path: Path
) -> None:
    with walking(tmp_path) as walk:
        walk.begin()
        served = walk.covey(NORTH, "ui", RUN, "--json")
        link = json.loads(served.said("link")[0])["link"]
        path = chromium_on(walk.host(NORTH), browser_path, tmp_path)
        with Chromium(path) as chromium, chromium.viewer() as viewer, walk.top() as terminal:
            page = viewer.page(link)
            until_text(page, "#sentences .text", WELL, GUARD)
            terminal.wait_for(lambda text: WELL in sentence_of(text))
            for what, words in walk.course():
                began = time.monotonic()
                for word in words:
                    until_text(page, "#sentences .text", word, SOON)
                assert time.monotonic() - began < SOON, what
                terminal.wait_for(lambda text: all(word in sentence_of(text) for word in words))  # noqa: B023
                assert time.monotonic() - began < SOON, what
            assert viewer.complaints == []
