"""Links to the pages that this user serves on this machine: for `covey ui --link`, and for a browser to open.

A server writes its port and the key for new links to a private file, and holds a lock beside it as long as it lives.
The port in the file of a dead server may be another user's by now, who would answer with a link of theirs.
"""

from __future__ import annotations

import contextlib
import html
import http.client
import os
import sys
import webbrowser
from typing import TYPE_CHECKING, Final, Self

import msgspec

from covey.base.errors import ConfigError
from covey.base.version import NewerFormatError, check_format, newer_file
from covey.net.host.folders import existing, home, private_folder, read_private, write_private
from covey.net.host.locks import LockHolder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LINK_FORMAT: Final = 1
"""The format of these files."""
NEW_LINK_SECONDS: Final = 5.0
"""How long a server may take to answer."""
PAGE_FOLDER: Final = "ui"


class _ServedPage(msgspec.Struct):
    port: int
    key: str
    format: int = LINK_FORMAT


class LinkFile:
    """The private file of one server, from its start to its end."""

    def __init__(self, port: int, key: str) -> None:
        """Write the file.

        Raises:
            ConfigError: the folder is not private, or cannot be written.
        """
        self.folder = private_folder(home() / PAGE_FOLDER)
        self._path = self.folder / f"{port}.json"
        self._lock_path = self.folder / f"{port}.lock"
        self._lock = LockHolder.take(self._lock_path, f"another `covey ui` has port {port}; use another port")
        write_private(self._path, msgspec.json.encode(_ServedPage(port, key)))

    def close(self) -> None:
        """Remove the file."""
        for path in (self._path, self._lock_path):
            with contextlib.suppress(OSError):
                path.unlink()
        self._lock.let_go()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def link_to(port: int, ticket: str) -> str:
    """Return the address with which a browser enters. A browser does not send what follows the #."""
    return f"http://127.0.0.1:{port}/#ticket={ticket}"


def new_link(port: int | None = None) -> str:
    """Return a new link to the page that runs on this machine: at a port, or the one that was started last.

    Raises:
        ConfigError: none runs, or it does not answer.
    """
    for path in sorted(existing(PAGE_FOLDER).glob("*.json"), key=_age):
        with contextlib.suppress(FileNotFoundError):
            served = _read(path)
            if port in (None, served.port) and _is_alive(path):
                return link_to(served.port, _ask_for_ticket(served))
    where = "" if port is None else f" at port {port}"
    raise ConfigError(f"no `covey ui` of yours runs{where} on this machine; `covey ui` starts one")


def _age(path: Path) -> float:
    with contextlib.suppress(OSError):
        return -path.stat().st_mtime
    return 0.0


def _read(path: Path) -> _ServedPage:
    try:
        served = msgspec.json.decode(read_private(path), type=_ServedPage)
        check_format(served.format, LINK_FORMAT)
    except NewerFormatError as error:
        raise newer_file(path, error) from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is damaged: {error}; remove it") from error
    return served


def _is_alive(path: Path) -> bool:
    """Tell whether the server of a file lives; remove the file if it does not."""
    lock_path = path.with_suffix(".lock")
    try:
        lock = LockHolder.take(lock_path, "alive")
    except ConfigError:
        return True
    for each in (path, lock_path):
        with contextlib.suppress(OSError):
            os.unlink(each)
    lock.let_go()
    return False


def _ask_for_ticket(served: _ServedPage) -> str:
    address = f"127.0.0.1:{served.port}"
    headers = {
        "Authorization": f"Bearer {served.key}",
        "Content-Type": "application/json",
        "Origin": f"http://{address}",
    }
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=NEW_LINK_SECONDS)
    try:
        connection.request("POST", "/api/link", b"{}", headers)
        answer = connection.getresponse()
        body = answer.read(1 << 16)
    except (OSError, http.client.HTTPException) as error:
        raise ConfigError(f"`covey ui` at {address} does not answer: {error}; end it, and start another") from error
    finally:
        connection.close()
    if answer.status != http.client.OK:
        raise ConfigError(f"`covey ui` at {address} gives no link: {answer.status} {answer.reason}")
    return msgspec.json.decode(body, type=dict[str, str])["ticket"]


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
