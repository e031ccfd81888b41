"""Find a Chromium for the tests of the page, or install Debian's.

    python -m tools.browser

Prints its path. On Debian and Ubuntu, root gets it by apt-get; anybody else is told what to install. COVEY_CHROMIUM
names another one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import Final

NAMES: Final = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
INSTALL: Final = ("apt-get", "install", "--yes", "--quiet", "--no-install-recommends", "chromium", "fonts-dejavu-core")
HOW: Final = "install chromium (on Debian: apt-get install chromium), or name one with COVEY_CHROMIUM"
ARGUMENTS: Final = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
"""Of every Chromium that tests and pictures start: it reaches nobody by itself."""


def found() -> str | None:
    """Return the path of a Chromium; None if there is none."""
    if chosen := os.environ.get("COVEY_CHROMIUM"):
        return chosen
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def main() -> None:
    if found() is None and os.geteuid() == 0 and shutil.which("apt-get"):
        subprocess.run(["apt-get", "update", "--quiet"], check=False)
        subprocess.run(INSTALL, check=False, env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"})
    path = found()
    print(path or f"there is no Chromium for the tests of the page: {HOW}", file=sys.stdout if path else sys.stderr)
    sys.exit(0 if path else 1)


if __name__ == "__main__":
    main()
