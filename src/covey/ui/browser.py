"""Opens the page in the browser of this user."""

from __future__ import annotations

import contextlib
import html
import os
import sys
import webbrowser
from typing import TYPE_CHECKING

from covey.net.host.folders import write_private

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextlib.contextmanager
def opened(link: str, folder: Path) -> Iterator[bool]:
    """Open a link in a browser; gives whether there is one. A file in the private folder is removed at the end.

    The browser gets the path of a file that redirects it: all users can read the arguments of processes, and the link
    is what lets one in. A browser that may not read the folder (in a snap) shows an error, so print the link as well.
    """
    if not _has_screen():
        yield False
        return
    path = folder / f"open-{os.getpid()}.html"
    page = f'<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url={html.escape(link)}">'
    write_private(path, page.encode())
    try:
        yield webbrowser.open(path.as_uri())
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def _has_screen() -> bool:
    """Tell whether a browser would be a window: without one, some would take the terminal instead."""
    if os.environ.get("BROWSER") or sys.platform == "darwin":
        return True
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
