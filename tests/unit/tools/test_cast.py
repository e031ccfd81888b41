"""The recording of the demo: a picture that shows every line, and the one in the README is of a whole demo."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

from tools import cast

ROOT = Path(__file__).parents[3]
TEXT = "{http://www.w3.org/2000/svg}text"


def shown(svg: str) -> list[str]:
    return [node.text or "" for node in ElementTree.fromstring(svg).iter(TEXT)]


def test_a_recording_shows_every_line_that_is_not_empty() -> None:
    lines = [cast.Line(0.5 * number, f"line {number} <&>") for number in range(60)]
    assert shown(cast.draw([*lines, cast.Line(31.0, "")])) == [line.text for line in lines]


def test_a_line_appears_at_its_time_and_a_full_screen_scrolls() -> None:
    svg = cast.draw([cast.Line(float(number), "x") for number in range(cast.ROWS + 1)])
    assert (
        f"@keyframes l8 {{0% {{opacity: 0}} {100 * 8 / (cast.ROWS + cast.LAST_PAUSE):.2f}%, 100% {{opacity: 1}}}}"
        in svg
    )
    assert f"translateY({-cast.LINE_HEIGHT:.0f}px)" in svg


def test_the_first_frame_has_the_first_lines() -> None:
    svg = cast.draw([cast.Line(2.0 * number, f"line {number}") for number in range(9)])
    rules = re.findall(r"animation: l(\d+) 22\.0s step-end (-?[\d.]+)s infinite", svg)
    begins = {-float(delay) for _, delay in rules}
    assert begins == {2.0 * (cast.FIRST_SHOWN - 1)}, "all lines start to play at one moment"
    shown_at = {int(number): 2.0 * int(number) for number, _ in rules}
    assert [number for number, at in shown_at.items() if at <= min(begins)] == [1, 2, 3, 4]


def test_the_recording_in_the_readme_is_of_a_demo_that_lost_a_node_and_got_it_back() -> None:
    text = "\n".join(shown((ROOT / "docs" / "demo.svg").read_text()))
    assert "is killed: SIGKILL" in text
    assert "parameters bit-identical on all nodes: yes" in text
    assert "node 2 was lost and came back: yes" in text
    assert "docs/demo.svg" in (ROOT / "README.md").read_text()
