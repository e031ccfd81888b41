"""Asks ranks for their last operations; writes those of a keeper's ranks to files when the keeper gets SIGUSR1."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from covey.base.errors import CoveyError, RemoteProtocolError
from covey.runtime.metrics.flight import path_for, store
from covey.runtime.metrics.inspection import OPERATIONS_PAGE
from covey.wire import messages
from covey.wire.reports import REPORTED_GROUPS_LIMIT, Flight, decode_flight, joined

if TYPE_CHECKING:
    from collections.abc import Callable

    Ask = Callable[[messages.Inspect, float], dict[int, messages.Inspected | None]]

logger = logging.getLogger("covey")

OPERATIONS_SECONDS: Final = 5.0
"""How long ranks may take to tell a page of their last operations."""


def collect(ask: Ask) -> list[Flight]:
    """Return the last operations of all ranks that answer; `ask` asks all of them, and returns answers by rank."""
    pages: dict[int, list[Flight]] = {}
    for page in range(REPORTED_GROUPS_LIMIT):
        answers = ask(messages.Inspect(OPERATIONS_PAGE, page), OPERATIONS_SECONDS)
        told = {rank: answer for rank, answer in answers.items() if answer is not None and page < answer.pages}
        if not told:
            break
        for rank, answer in told.items():
            try:
                pages.setdefault(rank, []).append(decode_flight(answer.body))
            except RemoteProtocolError as error:
                logger.warning("what rank %d told cannot be read: %s", rank, error)
    pages = {rank: flights for rank, flights in pages.items() if flights}
    return [joined(flights) for _, flights in sorted(pages.items())]


def write_flights(ask: Ask) -> None:
    """Write a file for each rank that answers. On a thread of its own."""
    try:
        for flight in collect(ask):
            store(flight, path_for(flight))
    except CoveyError as error:
        logger.warning("the last operations of the ranks could not be written: %s", error)
