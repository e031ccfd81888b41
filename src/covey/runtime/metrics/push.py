"""Samples for programs that push their metrics: a function is called with them every few seconds, on a thread."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Final, Self

from covey.base.errors import ConfigError
from covey.runtime.metrics.samples import samples

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.wire.reports import Sample

logger = logging.getLogger("covey")

SAMPLES_PUSH_SECONDS: Final = 10.0
"""How often samples are pushed by default."""
LEAST_SAMPLES_PUSH_SECONDS: Final = 0.1
LAST_SAMPLES_PUSH_SECONDS: Final = 5.0
"""How long `close` waits for the last push."""


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
