"""How operations of a process group are issued, what torch gets of them, and what it raises if they fail.

`TorchIssuer` issues them: at once on the calling thread, or queued for the thread of the group. `TorchWork` is torch's
handle of started operations, around covey's; threads of its own run the callbacks of its future.

What fails raises the class that covey raises without torch, and at the same time one of torch's, which frameworks
catch, be it an operation, the store, or the making of a group: `dist.DistBackendError`, or `dist.DistNetworkError` if a
rank is lost or cannot be reached. Both are RuntimeErrors.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections import deque
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from covey.arrays.torch_devices import order, settle
from covey.base.errors import ConnectError, CoveyError, GroupChangedError, PeerLostError, QuorumLostError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from covey.runtime.work import Work
    from covey.torch.backend.exchange import TensorGroup

OF_THE_NETWORK: Final = (PeerLostError, ConnectError, QuorumLostError, GroupChangedError)
"""Errors about the way to other ranks; all others are torch's DistBackendError."""


def as_torchs(error: BaseException) -> BaseException:
    """Return an error of covey as one that is also torch's, with the same text, attributes, cause and traceback.

    Errors of the program, and those that are torch's already, are returned as they are.
    """
    if not isinstance(error, CoveyError) or isinstance(error, RuntimeError):
        return error
    remake, (kind, args, facts) = CoveyError.__reduce__(error)
    made: CoveyError = remake(_class_of(kind), args, facts)
    made.__cause__, made.__suppress_context__ = error.__cause__, True
    return made.with_traceback(error.__traceback__)


@contextlib.contextmanager
def torchs_errors() -> Iterator[None]:
    """Raise errors of covey as ones that are also torch's."""
    try:
        yield
    except CoveyError as error:
        raise as_torchs(error) from error.__cause__


@functools.cache
def _class_of(kind: type[CoveyError]) -> type[CoveyError]:
    torchs = dist.DistNetworkError if issubclass(kind, OF_THE_NETWORK) else dist.DistBackendError

    def reduced(self: CoveyError) -> tuple[Any, ...]:
        remake, (_, args, facts) = CoveyError.__reduce__(self)
        return remake, (kind, args, facts)  # the process that reads it may have no torch

    named = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind.__name__, (kind, torchs), {**named, "__reduce__": reduced})


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


LENT_ELEMENTS: Final = 64
LENT_WORKS: Final = 1024
"""The last LENT_WORKS works on up to LENT_ELEMENTS elements are kept alive, and no large tensor with them."""


class TorchIssuer:
    """Issues the operations of one process group. Any thread may call; the calls are issued one after the other."""

    def __init__(self, group: TensorGroup, size: int, seconds: float) -> None:
        self._group = group
        self.seconds = seconds
        """The timeout of operations that are called without one."""
        self._survives = group.on_loss == "continue"
        self.notices = Notices()
        self._everyone = list(range(size))
        self._lock = threading.Lock()
        self._last: Work[Any] | None = None
        """The last collective that was queued."""
        self._lent: deque[TorchWork] = deque(maxlen=LENT_WORKS)
        """Works that Python may have passed to C++ and dropped, as DDP's join does: C++ alone cannot wait for them."""

    def issue(
        self, opts: Any, filled: list[torch.Tensor], operation: Callable[..., Any], calls: Sequence[tuple[Any, ...]]
    ) -> TorchWork:
        """Call `operation` with each of `calls`: now if torch waits at once and nothing is queued, else queue them.

        Errors are also torch's.
        """
        timeout = opts.timeout.total_seconds()
        if timeout <= 0:
            timeout = self.seconds
        is_async = opts.asyncOp
        works: list[Work[Any]] = []
        contributors = self._everyone
        try:
            with self._lock:
                if not is_async and (self._last is None or self._last.done()):
                    self._last = None
                    for args in calls:
                        operation(*args, timeout=timeout)
                        if self._survives and len(self._group.contributors) < len(contributors):
                            contributors = list(self._group.contributors)
                else:
                    works = [operation(*args, timeout=timeout, async_op=True) for args in calls]
                    self._last = works[-1] if works else self._last
        except CoveyError as error:
            raise as_torchs(error) from error.__cause__
        work = self._work(works, filled, contributors)
        if not is_async:
            if works:
                work.wait()
        elif len(filled) == 1 and filled[0].numel() <= LENT_ELEMENTS:
            self._lent.append(work)
        return work

    def _work(self, works: list[Work[Any]], filled: list[torch.Tensor], contributors: list[int]) -> TorchWork:
        """Return the handle of started operations."""
        return TorchWork(works, filled, self.notices, contributors)
