# ruff: noqa: SIM117 - a run and its page, then a viewer
"""Take pictures of the page for README and docs, from a real run of four ranks of which one is killed.

python -m tools.shots docs
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from pathlib import Path

from tests.browser.viewer import Chromium, RealPage, RealRun, until_text

from tools.browser import HOW, found

GUARD_SECONDS = 120.0


def main() -> None:
    folder, path = Path(sys.argv[1]), found()
    if path is None:
        sys.exit(HOW)
    with tempfile.TemporaryDirectory() as made, Chromium(path) as chromium:
        with RealRun(Path(made), "train", "--on-loss", "continue") as run, RealPage(Path(made), "train") as served:
            with chromium.viewer(1180, 860) as viewer:
                page = viewer.page(served.link)
                page.wait_for_timeout(20_000)  # so that there are curves to see
                os.kill(run.pids[2], signal.SIGKILL)
                until_text(page, "#sentences .text", "Rank 2", GUARD_SECONDS)
                page.wait_for_timeout(8_000)
                page.screenshot(path=folder / "ui-light.png", full_page=True)
                page.emulate_media(color_scheme="dark")
                page.screenshot(path=folder / "ui-dark.png", full_page=True)
                page.set_viewport_size({"width": 390, "height": 844})
                page.wait_for_timeout(1_500)
                page.screenshot(path=folder / "ui-phone.png")


if __name__ == "__main__":
    main()
