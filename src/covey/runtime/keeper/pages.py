"""The pages that `covey run --http` serves for all ranks that it has started: their metrics and checks together."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

from covey.base.errors import ConfigError, RemoteProtocolError
from covey.runtime.http_server import LOOPBACK, HttpServer, by_path
from covey.runtime.metrics.inspection import CHECKS, METRICS, STACKS
from covey.runtime.metrics.pages import SampleCollector, checks_page, metrics_page, stacks_page
from covey.wire import messages
from covey.wire.reports import CheckResult, Sample, decode_checks, decode_samples

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Ask = Callable[[messages.Inspect, float], dict[int, messages.Inspected | None]]

INSPECT_SECONDS: Final = 4.0
"""How long ranks may take to answer: longer than their checks, and less than the 10 s that Prometheus waits."""


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
