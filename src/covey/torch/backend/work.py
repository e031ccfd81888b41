"""torch's handle of started operations, around covey's, and the threads that run the callbacks of its future."""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from covey.arrays.torch_devices import order, settle
from covey.base.errors import CoveyError
from covey.torch.backend.errors import as_torchs, torchs_errors

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.runtime.work import Work

IDLE_WAITER_SECONDS: Final = 10.0
"""How long an idle thread stays."""
CALLBACKS_SECONDS: Final = 5.0
"""How long closing a group waits for running callbacks."""


class TorchWork(dist.Work):  # type: ignore[misc]  # torch is not followed by the type checker
    """The operations of one call, in issue order, and the tensors that they fill. Without operations it is done."""

    def __init__(
        self,
        works: list[Work[Any]],
        tensors: list[torch.Tensor],
        notices: Notices,
        contributors: list[int] | None = None,
        source: int = -1,
    ) -> None:
        """`contributors` of operations that are done already; `source` is the rank that sent a received message."""
        super().__init__()
        self._works, self._tensors, self._notices = works, tensors, notices
        self._contributors, self._source = contributors or [], source
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None

    @property
    def contributors(self) -> list[int]:
        """The ranks of the group whose input is in the result of a finished collective.

        With `on_loss="continue"`, lost ranks are not among them.
        """
        return [rank for rank in self._contributors if all(rank in work.contributors for work in self._works)]

    def is_completed(self) -> bool:
        """Tell whether the operations have ended, with or without an error."""
        return all(work.done() for work in self._works)

    def is_success(self) -> bool:
        """Tell whether the operations have ended without an error."""
        return self.is_completed() and self._error() is None

    def exception(self) -> BaseException | None:
        """Return the error, if the operations have ended with one."""
        return self._error() if self.is_completed() else None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the operations, and raise the error that ended one. A timeout of 0 means none.

        Copies to a device may still run afterwards: the caller's stream waits for them, not the caller.
        """
        if self._works:
            seconds = timeout.total_seconds()
            until = time.monotonic() + seconds if seconds > 0 else None
            try:
                for work in self._works:
                    work.wait(None if until is None else max(0.0, until - time.monotonic()))
            except CoveyError as error:
                raise as_torchs(error) from error.__cause__
        order(self._tensors)
        return True

    def synchronize(self) -> None:
        """Wait for the operations, and raise the error that ended one."""
        self.wait()

    def result(self) -> list[torch.Tensor]:
        """Wait for the operations, and return the tensors."""
        self.wait()
        return self._tensors

    def source_rank(self) -> int:
        """Return the rank that sent a received message."""
        with torchs_errors():
            return int(self._works[0].wait()) if self._works else self._source

    def _source_rank(self) -> int:
        return self.source_rank()

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a future of the tensors.

        C++ takes an exception that was set from Python for a value, and crashes; it handles one that a callback
        raised. So this is the future of a callback.
        """
        if self._future is None:
            raw: torch.futures.Future[Any] = torch.futures.Future()
            self._future = raw.then(_unwrapped)
            if self.is_completed():
                raw.set_result(self._outcome())
            else:
                self._works[-1].add_done_callback(lambda _: self._notices.call(lambda: raw.set_result(self._outcome())))
        return self._future

    def _outcome(self) -> list[torch.Tensor] | BaseException:
        error = self._error()
        if error is None:
            settle(self._tensors)  # the callback may run on any stream
        return error or self._tensors

    def _error(self) -> BaseException | None:
        return next((as_torchs(error) for work in self._works if (error := work.exception()) is not None), None)


def _unwrapped(ended: torch.futures.Future[Any]) -> list[torch.Tensor]:
    outcome: list[torch.Tensor] | BaseException = ended.value()
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


class Notices:
    """Runs the callbacks of futures, each on a free thread.

    A callback may wait for other operations, and so for their callbacks: there must always be another thread. All
    threads end before the interpreter does, which would abort in the middle of a callback.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[Callable[[], None]] = []
        self._idle = 0
        self._threads: set[threading.Thread] = set()
        self._is_closing = False
        self._process = os.getpid()

    def call(self, notice: Callable[[], None]) -> None:
        """Call `notice` on a free thread; on this thread once the notices are closed, and in a forked child."""
        if (
            self._process != os.getpid()
        ):  # a forked child has none of the threads, and one of them may have held the lock
            notice()
            return
        with self._changed:
            if not self._is_closing:
                self._waiting.append(notice)
                if self._idle >= len(self._waiting):
                    self._changed.notify()
                    return
                thread = threading.Thread(target=self._serve, name="covey-torch-notice", daemon=True)
                self._threads.add(thread)
                thread.start()
                return
        notice()

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._idle += 1
                if not self._waiting and not self._is_closing:
                    self._changed.wait(IDLE_WAITER_SECONDS)
                self._idle -= 1
                if not self._waiting:
                    self._threads.discard(threading.current_thread())
                    return
                notice = self._waiting.pop(0)
            notice()
            del notice  # release large tensors before waiting for the next

    def close(self) -> None:
        """Run the pending callbacks, and end the threads. A second call does nothing."""
        if self._process != os.getpid():
            return
        deadline = time.monotonic() + CALLBACKS_SECONDS
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
            threads = list(self._threads)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
