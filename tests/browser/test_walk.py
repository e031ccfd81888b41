"""The walk in the page and in the terminal beside it: both say within three seconds what happened, to whom and why.

And machines that ask to join, which a person approves, denies or puts off in the page.
"""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING

import pytest
from tests.browser.viewer import GUARD, Chromium, chromium_on, until_text
from tests.support.walks import ATTIC, NORTH, RUN, SOUTH, WELL, sentence_of, walking

from covey.net.keys.identity import id_text

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


def test_machines_that_wait_are_put_off_denied_and_approved_in_the_page(browser_path: str, tmp_path: Path) -> None:
    with walking(tmp_path) as walk:
        walk.covey(NORTH, "allow", "--ask", "on", "--yes").said("may be in 'home'")
        walk.run(NORTH, 2, "--min", "2").said("ready", 2)
        served = walk.covey(NORTH, "ui", RUN, "--json")
        link = json.loads(served.said("link")[0])["link"]
        with Chromium(chromium_on(walk.host(NORTH), browser_path, tmp_path)) as chromium, chromium.viewer() as viewer:
            page = viewer.page(link)
            until_text(page, "#sentences .text", "2 ranks", GUARD)
            ids = {machine: walk.id_of(machine) for machine in (SOUTH, ATTIC)}
            waiting = {machine: walk.run(machine, 1) for machine in ids}
            for id in ids.values():
                until_text(page, ".applicants li", id, GUARD)

            def press(word: str, machine: int) -> None:
                page.wait_for_timeout(1100)  # one action a second
                page.click(f".applicants li:has-text('{ids[machine]}') button:has-text('{word}')")

            press("Later", SOUTH)
            page.wait_for_function("() => document.querySelectorAll('.applicants li').length === 1")
            press("Approve", ATTIC)
            waiting[ATTIC].said("ready")
            until_text(page, "#figures", "on 2 machines", GUARD)
            until_text(page, ".machine .name", "attic", GUARD)
            page.wait_for_selector("#applicants", state="hidden")
            page = viewer.page(link.partition("#")[0])
            until_text(page, ".applicants li", ids[SOUTH], GUARD)  # it was put off in the other tab, not answered
            press("Deny", SOUTH)
            page.wait_for_selector("#applicants", state="hidden")
            waiting[SOUTH].said("is denied")
            assert not [line for line in waiting[SOUTH].lines if "ready" in line]
            assert viewer.complaints == []
        for event, machine in (("list-changed", ATTIC), ("denied", SOUTH)):
            (noted,) = walk.covey(NORTH, "audit", "--json", "--event", event).said("from the page")
            assert id_text(bytes.fromhex(json.loads(noted)["node"])) == ids[machine]
