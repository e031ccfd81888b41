"""Take pictures of the page for README and docs, from a real run of four ranks on two machines, one of which is killed.

    python -m tools.shots docs

The machines are network namespaces, which need root.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from tests.browser.viewer import Chromium, chromium_on, until_text
from tests.support.walks import NORTH, RUN, WELL, walking

from tools.browser import HOW, found

GUARD_SECONDS = 120.0


def main() -> None:
    folder, path = Path(sys.argv[1]), found()
    if path is None:
        sys.exit(HOW)
    with tempfile.TemporaryDirectory() as made, walking(Path(made)) as walk:
        walk.begin()
        served = walk.covey(NORTH, "ui", RUN, "--json")
        link = json.loads(served.said("link")[0])["link"]
        browser = chromium_on(walk.host(NORTH), path, Path(made))
        with Chromium(browser) as chromium, chromium.viewer(1180, 860) as viewer:
            page = viewer.page(link)
            until_text(page, "#sentences .text", WELL, GUARD_SECONDS)
            page.wait_for_timeout(20_000)  # so that there are curves to see
            for words in (walk.kill(),):
                for word in words:
                    until_text(page, "#sentences .text", word, GUARD_SECONDS)
            page.wait_for_timeout(8_000)
            page.screenshot(path=folder / "ui-light.png", full_page=True)
            page.emulate_media(color_scheme="dark")
            page.screenshot(path=folder / "ui-dark.png", full_page=True)
            page.set_viewport_size({"width": 390, "height": 844})
            page.wait_for_timeout(1_500)
            page.screenshot(path=folder / "ui-phone.png")


if __name__ == "__main__":
    main()
