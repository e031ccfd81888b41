"""Metrics for Prometheus: a collector of samples, and a server of the page that Prometheus reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from covey.base.errors import ConfigError
from covey.runtime.metrics.table import TABLE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

    from covey.wire.flight import Sample

LOOPBACK = "127.0.0.1"


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
        for common, samples in self._read():
            for sample in samples:
                if sample.name in parts:  # a process may be of another version
                    found[parts[sample.name]].add_sample(sample.name, {**dict(sample.labels), **common}, sample.value)
        yield from (metric for metric in found.values() if metric.samples)

    def describe(self) -> list[Metric]:
        """Return nothing, so that registering this reads no counters."""
        return []


class MetricsServer:
    """Serves metrics over HTTP, on a thread of its own, until it is closed."""

    def __init__(self, collector: SampleCollector, port: int, host: str = LOOPBACK) -> None:
        """Listen at once; port 0 takes a free one.

        Raises:
            ConfigError: the address cannot be listened at.
        """
        from prometheus_client import CollectorRegistry, start_http_server

        self.registry: CollectorRegistry = CollectorRegistry(auto_describe=False)
        self.registry.register(collector)
        try:
            self._server, self._thread = start_http_server(port, host, self.registry)
        except OSError as error:
            raise ConfigError(
                f"metrics cannot be served at {host}:{port}: {error.strerror}; use another port"
            ) from error
        self.port: int = self._server.server_port
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}/metrics"

    def close(self) -> None:
        """Listen no more. Closing twice is fine."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
