"""The pages that a process serves over HTTP: its metrics, its checks, and the stacks of its threads; and what makes
metrics of prometheus_client from samples.
"""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import TYPE_CHECKING

from covey.runtime.checks import are_alive, are_ready
from covey.runtime.http_server import LOOPBACK, HttpServer, Response, by_path, text
from covey.runtime.metrics.samples import TABLE, samples
from covey.runtime.tracebacks import stacks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from prometheus_client.core import Metric

    from covey.runtime.http_server import Request
    from covey.wire.reports import CheckResult, Sample


class SampleCollector:
    """Makes metrics of prometheus_client from samples, each time that they are asked for."""

    def __init__(self, read: Callable[[], Iterable[tuple[Mapping[str, str], Iterable[Sample]]]]) -> None:
        """`read` returns samples of one or several processes, each with the labels that all of its samples get."""
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics that have samples, in the order of the table."""
        from prometheus_client.core import Metric

        rows = [(row, row.name.removesuffix("_total")) for row in TABLE]
        found = {name: Metric(name, row.help, row.kind) for row, name in rows}
        parts = {row.name: name for row, name in rows}
        for row, name in rows:
            if row.kind == "histogram":
                parts |= {name + end: name for end in ("_bucket", "_count", "_sum")}
        for common, found_here in self._read():
            for sample in found_here:
                if sample.name in parts:  # a process may be of another version
                    found[parts[sample.name]].add_sample(sample.name, {**dict(sample.labels), **common}, sample.value)
        yield from (metric for metric in found.values() if metric.samples)

    def describe(self) -> list[Metric]:
        """Return nothing, so that registering this reads no counters."""
        return []


def serve_http(port: int = 0, host: str = LOOPBACK) -> HttpServer:
    """Serve `/healthz`, `/readyz`, `/metrics` and `/debug/stacks` of this process until the result is closed.

    Port 0 takes a free one: see `url` and `port` of the result. Every program that reaches the address may read the
    pages, except `/debug/stacks`, which is for this machine only.

    Raises:
        ConfigError: the address cannot be listened at.
    """
    collector = SampleCollector(lambda: [({}, samples())])
    pages = {
        "/healthz": lambda _request: checks_page(are_alive()),
        "/readyz": lambda _request: checks_page(are_ready()),
        "/metrics": lambda request: metrics_page(collector, request),
        "/debug/stacks": lambda request: stacks_page(request, stacks),
    }
    return HttpServer(by_path(pages), port, host)


def checks_page(results: Iterable[CheckResult]) -> Response:
    """Return the results as JSON, with the status 503 if a check has failed."""
    found = {each.name: {"ok": each.is_ok, "reason": each.reason} for each in results}
    is_ok = all(each["ok"] for each in found.values())
    body = json.dumps({"ok": is_ok, "checks": found}, indent=1) + "\n"
    status = HTTPStatus.OK if is_ok else HTTPStatus.SERVICE_UNAVAILABLE
    return Response(status, "application/json", body.encode())


def metrics_page(collector: SampleCollector, request: Request) -> Response:
    """Return the metrics in the form that the client accepts."""
    from prometheus_client import CollectorRegistry
    from prometheus_client.exposition import choose_encoder

    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    encode, content_type = choose_encoder(request.header("accept"))
    return Response(HTTPStatus.OK, content_type, encode(registry))


def stacks_page(request: Request, read: Callable[[], str]) -> Response:
    """Return what `read` returns: where each thread is; 403 for other machines."""
    if not request.is_local:
        return text("stacks are shown on this machine only\n", HTTPStatus.FORBIDDEN)
    return text(read())
