"""What a keeper asks all of its ranks for: pages of `covey run --http`, and their last operations.

The pages have the metrics and checks of all ranks together. The last operations are written to files when the keeper
gets SIGUSR1, and `covey trace` collects them.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Final

from covey.base.errors import ConfigError, CoveyError, RemoteProtocolError
from covey.runtime.http_server import LOOPBACK, HttpServer, by_path
from covey.runtime.metrics.flight import path_for, store
from covey.runtime.metrics.inspection import CHECKS, METRICS, OPERATIONS_PAGE, STACKS
from covey.runtime.metrics.pages import SampleCollector, checks_page, metrics_page, stacks_page
from covey.wire import messages
from covey.wire.reports import (
    REPORTED_GROUPS_LIMIT,
    CheckResult,
    Flight,
    Sample,
    decode_checks,
    decode_flight,
    decode_samples,
    joined,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Ask = Callable[[messages.Inspect, float], dict[int, messages.Inspected | None]]

logger = logging.getLogger("covey")

INSPECT_SECONDS: Final = 4.0
"""How long ranks may take to answer: longer than their checks, and less than the 10 s that Prometheus waits."""
OPERATIONS_SECONDS: Final = 5.0
"""How long ranks may take to tell a page of their last operations."""


def parse_address(text: str) -> tuple[str, int]:
    """Return the host and port of `--http`: `9100`, `0.0.0.0:9100` or `[::]:9100`; by default this machine only.

    Raises:
        ConfigError: it is not an address.
    """
    host, colon, port = text.rpartition(":")
    if not (port.isascii() and port.isdigit() and int(port) < 1 << 16) or bool(colon) != bool(host):
        raise ConfigError(f"--http {text!r} must be a port, or an address of this machine with a port: 0.0.0.0:9100")
    return host.removeprefix("[").removesuffix("]") or LOOPBACK, int(port)


def serve_ranks(ask: Ask, host: str, port: int) -> HttpServer:
    """Serve the pages of all ranks; `ask` asks them and returns their answers by rank.

    Raises:
        ConfigError: the address cannot be listened at.
    """
    collector = SampleCollector(lambda: _samples(ask))
    pages = {
        "/healthz": lambda _request: checks_page([CheckResult("keeper", True, "")]),
        "/readyz": lambda _request: checks_page(_checks(ask)),
        "/metrics": lambda request: metrics_page(collector, request),
        "/debug/stacks": lambda request: stacks_page(request, lambda: _stacks(ask)),
    }
    return HttpServer(by_path(pages), port, host)


def _samples(ask: Ask) -> Iterator[tuple[dict[str, str], tuple[Sample, ...]]]:
    """Yield the samples of each rank, with its rank as a label, and whether it has answered."""
    for rank, answer in sorted(ask(messages.Inspect(METRICS), INSPECT_SECONDS).items()):
        samples: tuple[Sample, ...] = ()
        if answer is not None and answer.what == METRICS and answer.pages:
            with contextlib.suppress(RemoteProtocolError):  # a process of another version counts as silent
                samples = decode_samples(answer.body).samples
        yield {"rank": str(rank)}, (*samples, Sample("covey_up", (), float(bool(samples))))


def _checks(ask: Ask) -> Iterator[CheckResult]:
    """Yield the checks of all ranks, each with its rank before the name; a silent rank has failed."""
    answers = sorted(ask(messages.Inspect(CHECKS), INSPECT_SECONDS).items())
    if not answers:
        yield CheckResult("ranks", False, "no rank has joined a run")
    for rank, answer in answers:
        results = None
        if answer is not None and answer.what == CHECKS and answer.pages:
            with contextlib.suppress(RemoteProtocolError):  # a process of another version counts as silent
                results = decode_checks(answer.body).results
        if results is None:
            yield CheckResult(f"rank {rank}", False, f"it did not answer within {INSPECT_SECONDS:g} s")
        for result in results or ():
            yield CheckResult(f"rank {rank}: {result.name}"[: messages.NAME_LIMIT], result.is_ok, result.reason)


def _stacks(ask: Ask) -> str:
    """Return the stacks of all ranks, one after the other."""
    parts = []
    for rank, answer in sorted(ask(messages.Inspect(STACKS), INSPECT_SECONDS).items()):
        told = answer is not None and answer.what == STACKS and answer.pages
        parts.append(f"rank {rank}:\n\n{answer.body.decode(errors='replace') if answer and told else 'no answer'}\n")
    return "\n".join(parts) or "no rank has joined a run\n"


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
