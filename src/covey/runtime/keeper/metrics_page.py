"""The metrics of the ranks that a keeper has started, on one page for Prometheus, with the rank as a label."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

from covey.base.errors import ConfigError, RemoteProtocolError
from covey.runtime.metrics.collector import LOOPBACK, MetricsServer, SampleCollector
from covey.runtime.metrics.inspection import METRICS
from covey.wire import messages
from covey.wire.flight import Sample, decode_samples

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Ask = Callable[[messages.Inspect, float], dict[int, messages.Inspected | None]]

ANSWER_SECONDS: Final = 2.0
"""How long ranks may take to answer: less than the 10 s that Prometheus waits for a page."""


def parse_address(text: str) -> tuple[str, int]:
    """Return the host and port of `--metrics`: `9100`, `0.0.0.0:9100` or `[::]:9100`; by default this machine only.

    Raises:
        ConfigError: it is not an address.
    """
    host, colon, port = text.rpartition(":")
    if not (port.isascii() and port.isdigit() and int(port) < 1 << 16) or bool(colon) != bool(host):
        raise ConfigError(f"--metrics {text!r} must be a port, or an address of this machine with a port: 0.0.0.0:9100")
    return host.removeprefix("[").removesuffix("]") or LOOPBACK, int(port)


def serve_ranks(ask: Ask, host: str, port: int) -> MetricsServer:
    """Serve the metrics of all ranks; `ask` asks them and returns their answers by rank.

    Raises:
        ConfigError: the address cannot be listened at.
    """

    def read() -> Iterator[tuple[dict[str, str], tuple[Sample, ...]]]:
        for rank, answer in sorted(ask(messages.Inspect(METRICS), ANSWER_SECONDS).items()):
            samples: tuple[Sample, ...] = ()
            if answer is not None and answer.what == METRICS and answer.pages:
                with contextlib.suppress(RemoteProtocolError):  # a process of another version counts as silent
                    samples = decode_samples(answer.body).samples
            yield {"rank": str(rank)}, (*samples, Sample("covey_up", (), float(bool(samples))))

    return MetricsServer(SampleCollector(read), port, host)
