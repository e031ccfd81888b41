"""A real browser for the checks of the page: headless Chromium, driven by Playwright."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from tests.browser.viewer import Chromium
from tools.browser import HOW, found

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def browser_path() -> str:
    """Give the path of a browser; without one the test fails, unless TEST_NO_BROWSER is set."""
    if os.environ.get("TEST_NO_BROWSER"):
        pytest.skip("TEST_NO_BROWSER is set")
    path = found()
    assert path is not None, f"the checks of the page need a browser: {HOW}, or set TEST_NO_BROWSER=1 to leave them out"
    return path


@pytest.fixture(scope="module")
def chromium(browser_path: str) -> Iterator[Chromium]:
    """Give a browser."""
    with Chromium(browser_path) as browser:
        yield browser
