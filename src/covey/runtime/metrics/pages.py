"""How metrics leave a process: pages over HTTP, metrics of prometheus_client, and samples that are pushed.

The pages also have its checks and the stacks of its threads. Programs that push their metrics give a function, which a
thread calls with samples every few seconds.
"""

from __future__ import annotations

import json
import logging
import threading
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, Self

from covey.base.errors import ConfigError
from covey.runtime.checks import are_alive, are_ready
from covey.runtime.http_server import LOOPBACK, HttpServer, Response, by_path, text
from covey.runtime.metrics.samples import TABLE, samples
from covey.runtime.tracebacks import stacks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from prometheus_client.core import Metric

    from covey.runtime.http_server import Request
    from covey.wire.reports import CheckResult, Sample

logger = logging.getLogger("covey")

SAMPLES_PUSH_SECONDS: Final = 10.0
"""How often samples are pushed by default."""
LEAST_SAMPLES_PUSH_SECONDS: Final = 0.1
LAST_SAMPLES_PUSH_SECONDS: Final = 5.0
"""How long `close` waits for the last push."""


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


class SamplePush:
    """Calls a function with all samples of this process every few seconds, until it is closed.

    One call runs at a time, and nothing is queued: while a call takes longer than the pause, samples are left out, and
    the next call has those of its own time. An exception is logged, and those that follow it are not until a call
    has succeeded again.
    """

    def __init__(self, function: Callable[[list[Sample]], object], every: float = SAMPLES_PUSH_SECONDS) -> None:
        """See `covey.metrics.push`."""
        if not callable(function):
            raise ConfigError(f"function={function!r} must be callable with a list of samples")
        if not LEAST_SAMPLES_PUSH_SECONDS <= every < float("inf"):
            raise ConfigError(f"every={every!r} must be a number of seconds from {LEAST_SAMPLES_PUSH_SECONDS} up")
        self._function, self._every = function, every
        self._has_failed = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="covey-push", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._closing.wait(self._every)
            self._push()

    def _push(self) -> None:
        try:
            self._function(samples())
        except Exception:
            if not self._has_failed:
                logger.exception("metrics cannot be pushed; the next attempts fail without a word until one succeeds")
            self._has_failed = True
        else:
            if self._has_failed:
                logger.info("metrics are pushed again")
            self._has_failed = False

    def close(self) -> None:
        """Push once more, wait for that for up to five seconds, and push no more. Closing twice is fine."""
        self._closing.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(LAST_SAMPLES_PUSH_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
