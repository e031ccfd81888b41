"""Metrics for Prometheus: a collector of samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

from covey.runtime.metrics.table import TABLE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from prometheus_client.core import Metric

    from covey.wire.reports import Sample


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
