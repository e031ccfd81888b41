"""Waits for several works at once."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, TypeVar

from covey.base.config import check_timeout
from covey.base.errors import ConfigError, DeadlineError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from covey.runtime.work import Work

T = TypeVar("T")


def wait_all(works: Iterable[Work[T]], *, timeout: float | None = None) -> list[T]:
    """Wait until all works have ended, and return their results, in the order of the works.

    Raises:
        DeadlineError: some did not end within `timeout` seconds; they continue.
        Exception: the error of the first work that failed, once all have ended; notes name the other failures.
    """
    listed = list(works)
    deadline = None if timeout is None else time.monotonic() + check_timeout(timeout)
    for work in listed:
        try:
            work.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        except Exception:
            if not work.done():
                break
    if late := [work.description for work in listed if not work.done()]:
        raise DeadlineError(
            f"{len(late)} of {len(listed)} works are not done after the timeout of {timeout} s, and go on in the "
            f"background: {'; '.join(late[:5])}"
        )
    failures = [(work, error) for work in listed if (error := work.exception()) is not None]
    if failures:
        first = failures[0][1]
        for work, error in failures[1:]:
            if error is not first:
                first.add_note(f"{work.description} failed, too: {type(error).__name__}: {error}")
        raise first
    return [work.wait() for work in listed]


def wait_any(works: Iterable[Work[Any]], *, timeout: float | None = None) -> int:
    """Wait until a work has ended, with or without an error; return the position of the first that has.

    Raises:
        DeadlineError: none ended within `timeout` seconds; they continue.
        ConfigError: there are no works.
    """
    listed = list(works)
    if not listed:
        raise ConfigError("wait_any needs at least one work")
    limit = None if timeout is None else check_timeout(timeout)
    ended = threading.Event()

    def tell(_: Work[Any]) -> None:
        ended.set()

    for work in listed:
        work.add_waker(tell)
    try:
        ended.wait(limit)
    finally:
        for work in listed:
            work.remove_waker(tell)
    for position, work in enumerate(listed):
        if work.done():
            return position
    raise DeadlineError(f"none of {len(listed)} works is done after the timeout of {timeout} s; they go on")
