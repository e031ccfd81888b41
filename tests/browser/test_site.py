"""The documentation as `make docs` builds it, opened as files in a real browser: copying, width, search, no network."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.support.waiting import DEADLINE
from tools import consoles
from tools.cast import FIRST_SHOWN
from tools.site import site_path

if TYPE_CHECKING:
    from playwright.sync_api import Page
    from tests.browser.viewer import Chromium, Viewer

pytestmark = [pytest.mark.thorough, pytest.mark.alone]

ROOT = Path(__file__).parents[2]
SOURCES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
CONSOLE = re.compile(r"^```console\n(.*?)^```", re.DOTALL | re.MULTILINE)

TOO_WIDE = """() => [...document.querySelectorAll('pre, pre > code')]
    .filter((each) => each.scrollWidth > each.clientWidth).map((each) => each.textContent)"""
WRAPPED = """() => [...document.querySelectorAll('.language-python pre > code')]
    .filter((each) => each.clientHeight - 2 * parseFloat(getComputedStyle(each).paddingTop)
        > (each.textContent.trimEnd().split('\\n').length + 0.5) * parseFloat(getComputedStyle(each).lineHeight))
    .map((each) => each.textContent)"""
"""Blocks of Python whose lines do not fit: longer lines of other programs are wrapped, as a terminal does it."""


def address(site: Path, source: Path) -> str:
    """Return where a page is that comes from this file."""
    return (site / site_path(str(source.relative_to(ROOT)))).with_suffix(".html").as_uri()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, browser_path: str) -> Path:
    """Give the site, in a folder."""
    assert importlib.util.find_spec("mkdocs"), "the site needs what `make .venv/.docs` installs"
    folder = tmp_path_factory.mktemp("site")
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)],
        cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=True, timeout=DEADLINE,
    )  # fmt: skip
    return folder


def pasted(page: Page) -> str:
    """Return what is in the clipboard."""
    page.evaluate("window.into = document.body.appendChild(document.createElement('textarea')); into.focus()")
    page.keyboard.press("Control+V")
    text = page.evaluate("into.value")
    page.evaluate("into.remove()")
    return str(text)


def asked_for_files_alone(viewer: Viewer, site: Path) -> bool:
    """Return whether all requests were for files of the site; what a page said in the console fails."""
    assert viewer.complaints == []
    assert viewer.requests
    return [each for each in viewer.requests if not each.startswith((site.as_uri(), "data:", "about:"))] == []


def test_buttons_copy_commands_without_prompts_comments_and_output(chromium: Chromium, site: Path) -> None:
    with chromium.viewer() as viewer:
        page = viewer.page()
        for source in SOURCES:
            blocks = CONSOLE.findall(source.read_text())
            if not blocks:
                continue
            page.goto(address(site, source))
            page.wait_for_selector(".md-code__button")
            copied = []
            for button in page.query_selector_all(".console .md-code__button"):
                button.click()
                copied += pasted(page).split("\n")
            assert copied == [typed.command for block in blocks for typed in consoles.commands(block)], source
            assert not [line for line in copied if re.match(r"[\w-]*\$ |#", line)], source
        page.goto(address(site, ROOT / "docs/concepts/lanes-and-plans.md"))
        page.click(".language-pycon .md-code__button")
        assert pasted(page).startswith("from covey")
        assert asked_for_files_alone(viewer, site)


def test_code_fits_its_column_and_pages_fit_every_window(chromium: Chromium, site: Path) -> None:
    with chromium.viewer() as viewer:
        page = viewer.page()
        for source in SOURCES:
            page.set_viewport_size({"width": 1280, "height": 900})
            page.goto(address(site, source))
            assert page.evaluate(TOO_WIDE) == [], source
            assert page.evaluate(WRAPPED) == [], source
            assert page.evaluate("document.documentElement.scrollWidth") <= 1280, source
            page.set_viewport_size({"width": 390, "height": 844})
            assert page.evaluate("document.documentElement.scrollWidth") <= 390, source
        assert asked_for_files_alone(viewer, site)


def test_the_search_finds_a_word_without_a_server_and_a_network(chromium: Chromium, site: Path) -> None:
    with chromium.viewer() as viewer:
        page = viewer.page()
        page.goto(address(site, ROOT / "README.md"))
        page.fill(".md-search__input", "tie-breaker")
        page.click(".md-search-result__item a[href*='guides/elastic.html']")
        page.wait_for_selector("h1:has-text('When machines leave and join')")
        assert asked_for_files_alone(viewer, site)


def test_the_recording_shows_its_first_lines_at_once_on_a_light_and_a_dark_page(chromium: Chromium, site: Path) -> None:
    for scheme in ("light", "dark"):
        with chromium.viewer(color_scheme=scheme) as viewer:
            page = viewer.page()
            page.goto((site / "demo.svg").as_uri())
            page.evaluate("document.documentElement.getAnimations({subtree: true}).forEach((each) => each.pause())")
            shown = page.evaluate(
                "[...document.querySelectorAll('text')].filter((each) => getComputedStyle(each).opacity === '1').length"
            )
            assert FIRST_SHOWN <= shown < 60
            page.goto(address(site, ROOT / "README.md"))
            picture = page.query_selector("img[src='demo.svg']")
            assert picture is not None
            picture.scroll_into_view_if_needed()
            box = picture.bounding_box()
            assert box is not None
            assert box["width"] > 600
