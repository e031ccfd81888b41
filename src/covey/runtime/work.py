"""The handle of a started operation; waits for several of them; blocking calls on a thread, for asyncio programs."""

from __future__ import annotations

import _thread
import contextlib
import contextvars
import logging
import threading
import time
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from covey.base.config import check_timeout
from covey.base.errors import CancelledError, ConfigError, DeadlineError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Mapping


logger = logging.getLogger("covey")

ENDING_SECONDS: Final = 5.0
"""How long a work that cannot be cancelled any more may take to end, until what it took is given back later."""

T = TypeVar("T")


class Work(Generic[T]):
    """An operation that was started with `async_op=True`.

    It runs whether or not a thread waits for it. A wait that times out does not cancel the operation; its own
    `timeout=` ends it, and `cancel` while nothing of it was sent. A cancelled `await` withdraws a `recv` or a `probe`,
    as `asyncio.wait_for` needs: a message that came meanwhile goes to the next `recv`. It changes nothing else;
    `asyncio.shield(work)` keeps the receive, too.
    """

    def __init__(
        self,
        description: str,
        *,
        drive: Callable[[Work[Any], float | None], None] | None = None,
        cancel: Callable[[Work[Any]], bool] | None = None,
        then: Callable[[Any], T] | None = None,
        give_back: Callable[[], None] | None = None,
    ) -> None:
        """Waiting threads call `drive(work, deadline)` to make progress until the work is done.

        `cancel(work)` ends the work if nothing of it was sent, and tells whether it did; without it, that is too late.
        `then` turns the value of the operation into the result. `give_back()` undoes an operation that is done, so that
        another one gets what it took; without it, that is impossible or of no use.
        """
        self.description = description
        self.contributors: tuple[int, ...] = ()
        """Once a collective is done: the ranks whose input is in its result."""
        self.info: Mapping[str, Any] = {}
        """Once a compressed collective is done: `codec`, `reason` (why "auto" chose it), `sent_bytes` and
        `plain_bytes`, which this rank would have sent without compression."""
        self._then = then
        self._drive, self._cancel, self._give_back = drive, cancel, give_back
        self._awaits = 0
        self._is_taken = False
        """Whether a caller has the result of a work that could give it back."""
        self.has_ended = False
        """What `done` returns."""
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[Work[T]], None]] = []
        self._wakers: list[Callable[[Work[T]], None]] = []
        """Callbacks of covey itself, which return at once and raise nothing."""
        self._result: T
        self._error: BaseException | None = None
        self._completion: Callable[[Any], T] | None = None

    def done(self) -> bool:
        """Tell whether the operation has ended, with or without an error."""
        return self.has_ended

    def wait_until_done(self, timeout: float | None) -> bool:
        """Wait for another thread to end the operation; return whether it has within `timeout` seconds."""
        return self._done.wait(timeout)

    def wait(self, timeout: float | None = None) -> T:
        """Wait for the end of the operation, and return the result.

        Raises:
            DeadlineError: it did not end within `timeout` seconds; it continues. Or its own timeout ended.
            Exception: the error of the operation.
        """
        if not self.has_ended:
            if self._drive is not None:
                self._drive(self, None if timeout is None else time.monotonic() + timeout)
            if not self._done.wait(timeout if self._drive is None else 0):
                raise DeadlineError(
                    f"{self.description} is not done after the timeout of {timeout} s; it continues in the background"
                )
        self._complete()
        if self._give_back is not None:
            with self._lock:
                self._is_taken = self._error is None
        if self._error is not None:
            try:
                raise self._error
            finally:
                del self  # the traceback has this frame: the error, which the work has, would refer to the work
        return self._result

    def complete_with(self, completion: Callable[[Any], T]) -> None:
        """Let the first thread that asks for the result make it: what the thread that ends works has no time for.

        Called before any other thread has this work.
        """
        self._completion = completion

    def _complete(self) -> None:
        """Do what is left to do for the result, on the thread that asks for it, once the operation has ended."""
        if self._completion is None:
            return
        with self._lock:
            completion, self._completion = self._completion, None
            if completion is None or self._error is not None:
                return
            try:
                self._result = completion(self._result)
            except Exception as failure:
                self._error = failure

    def take(self) -> T:
        """Wait for the end of the operation, and return the result or raise the error, for the last time."""
        try:
            return self.wait()
        finally:
            self._error = None  # as `forget_error`

    def forget_error(self) -> None:
        """Drop the error, which was raised: for a work that only its caller has.

        The traceback has frames that refer to the work; with the error, both would wait for the cyclic collector.
        """
        self._error = None

    def result(self) -> T:
        """Wait for the end of the operation, and return the result."""
        return self.wait()

    def exception(self) -> BaseException | None:
        """Wait for the end of the operation; return its error, or None if it succeeded."""
        if self.has_ended and self._error is not None:
            # Not raised: an error that other works have too would keep all that the frames of this call refer to.
            return self._error
        try:
            self.wait()
        except BaseException:
            if self._error is None:  # the wait itself failed, by Ctrl-C for instance
                raise
        return self._error

    def cancel(self) -> bool:
        """Cancel a message, or a queued collective, of which nothing was sent; return whether it was cancelled.

        A `recv` or `probe` that is not done can be cancelled: `out` is not written any more, and the message goes to
        the next `recv` that matches. A `send` can be cancelled while it waits because the receiver has too many
        messages; once it was announced to the receiver, it cannot. A collective that was issued inside of
        `group.cancellable()` can be cancelled until its turn comes on this rank, and is cancelled on all ranks then;
        others cannot, because the other ranks count on them. The work then raises CancelledError; otherwise it goes on
        as if this was not called.
        """
        return self._cancel is not None and not self.has_ended and self._cancel(self)

    @property
    def failure(self) -> BaseException | None:
        """The error of an operation that has ended, as far as it is known now; None without one."""
        return self._error

    def release(self, *, is_taken: bool = False) -> None:
        """Withdraw a receive, or give back what it took, because no caller will use the result; other works ignore it.

        A caller that has the result and drops it passes `is_taken`.
        """
        if self._give_back is None or self.cancel():
            return
        with self._lock:
            self._is_taken = self._is_taken and not is_taken
        # Its message is here, and another thread ends the work now. The next receive must not overtake the message.
        if self._done.wait(ENDING_SECONDS):
            self._return()
        else:
            self.add_waker(Work._return)

    def _return(self) -> None:
        with self._lock:
            if self._error is not None or self._is_taken:
                return
            self._error = CancelledError(f"{self.description} was cancelled")
            give_back = self._give_back
        assert give_back is not None
        give_back()

    def add_done_callback(self, callback: Callable[[Work[T]], None]) -> None:
        """Call `callback(self)` when the operation ends, on the thread that ends it; at once if it has ended.

        Its exceptions are logged. It may start operations with `async_op=True`, but must not wait for collectives.
        """
        with self._lock:
            if not self.has_ended:
                self._callbacks.append(callback)
                return
        self._call(callback)

    def remove_done_callback(self, callback: Callable[[Work[T]], None]) -> None:
        """Do not call `callback` any more, if the operation has not ended."""
        with self._lock:
            self._callbacks = [each for each in self._callbacks if each != callback]

    def add_waker(self, waker: Callable[[Work[T]], None]) -> None:
        """Call `waker(self)` when the operation ends, before the callbacks of the program; at once if it has ended."""
        with self._lock:
            if not self.has_ended:
                self._wakers.append(waker)
                return
        waker(self)

    def remove_waker(self, waker: Callable[[Work[T]], None]) -> None:
        """Do not call `waker` any more, if the operation has not ended."""
        with self._lock:
            self._wakers = [each for each in self._wakers if each != waker]

    def finish(self, result: T) -> None:
        """End the operation with a result. Called by the thread that runs it."""
        self.conclude(result, None)
        if self._wakers or self._callbacks:  # none is added to an operation that has ended
            self.notify()

    def fail(self, error: BaseException) -> None:
        """End the operation with `error`."""
        self.conclude(None, error)
        if self._wakers or self._callbacks:
            self.notify()

    def forked(self, error: BaseException) -> None:
        """End the operation in a forked process; other threads of the parent may have held the locks."""
        self._lock, self._done, self.has_ended = threading.Lock(), threading.Event(), False
        self.fail(error)

    def conclude(self, result: Any, error: BaseException | None) -> None:
        """End the operation; `notify` calls the callbacks later."""
        if error is None and self._then is not None:
            try:
                result = self._then(result)
            except Exception as failure:
                error = failure
        with self._lock:
            self._result, self._error = result, error
            self.has_ended = True
            self._done.set()

    def notify(self) -> None:
        """Wake what awaits an operation that has ended, and call its callbacks."""
        with self._lock:
            wakers, self._wakers = self._wakers, []
            callbacks, self._callbacks = self._callbacks, []
        for waker in wakers:
            waker(self)
        if callbacks:
            self.call_back(callbacks)

    def call_back(self, callbacks: list[Callable[[Work[T]], None]]) -> None:
        """Call callbacks of the program."""
        for callback in callbacks:
            self._call(callback)

    def _call(self, callback: Callable[[Work[T]], None]) -> None:
        try:
            callback(self)
        except BaseException as error:  # SystemExit, too: it must not end the thread that runs all operations
            logger.exception("a callback of %s failed", self.description)
            if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
                _thread.interrupt_main()  # Ctrl-C came while the callback ran: it comes again when this work is done

    def __await__(self) -> Generator[Any, None, T]:
        import asyncio

        loop = asyncio.get_running_loop()
        ended = loop.create_future()

        def wake() -> None:
            if not ended.done():  # the await may have been cancelled
                ended.set_result(None)

        def tell(_: Work[T]) -> None:
            if not loop.is_closed():  # else nothing awaits it
                loop.call_soon_threadsafe(wake)

        self.add_waker(tell)
        self._awaits += 1
        try:
            yield from ended
        except BaseException:  # the await was cancelled
            self.remove_waker(tell)
            if self._awaits == 1:
                self.release()
            raise
        finally:
            self._awaits -= 1
        try:
            return self.wait(0)
        finally:
            del self  # as in `wait`

    def __repr__(self) -> str:
        state = "pending" if not self.done() else "failed" if self._error else "done"
        return f"<Work {self.description}: {state}>"

    def _repr_html_(self) -> str:
        from covey.base.html import Mark, line  # only notebooks ask

        if not self.done():
            return line(Mark(f"{self.description}: pending", "busy"))
        if self._error is not None:
            return line(Mark(f"{self.description}: {type(self._error).__name__}: {self._error}", "bad"))
        of = f", with the input of {len(self.contributors)} ranks" if self.contributors else ""
        return line(Mark(f"{self.description}: done{of}", "good"))


def wait_all(works: Iterable[Work[T]], *, timeout: float | None = None) -> list[T]:
    """Wait until all works have ended, and return their results, in the order of the works.

    Raises:
        DeadlineError: some did not end within `timeout` seconds; they continue.
        Exception: the error of the first work that failed, once all have ended; notes name the other failures.
    """
    listed = list(works)
    deadline = None if timeout is None else time.monotonic() + check_timeout(timeout)
    for work in listed:
        try:
            work.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        except Exception:
            if not work.done():
                break
    if late := [work.description for work in listed if not work.done()]:
        raise DeadlineError(
            f"{len(late)} of {len(listed)} works are not done after the timeout of {timeout} s, and continue in the "
            f"background: {'; '.join(late[:5])}"
        )
    failures = [(work, error) for work in listed if (error := work.exception()) is not None]
    if failures:
        first = failures[0][1]
        for work, error in failures[1:]:
            if error is not first:
                first.add_note(f"{work.description} failed, too: {type(error).__name__}: {error}")
        raise first
    return [work.wait() for work in listed]


def wait_any(works: Iterable[Work[Any]], *, timeout: float | None = None) -> int:
    """Wait until a work has ended, with or without an error; return the position of the first that has.

    Raises:
        DeadlineError: none ended within `timeout` seconds; they continue.
        ConfigError: there are no works.
    """
    listed = list(works)
    if not listed:
        raise ConfigError("wait_any needs at least one work")
    limit = None if timeout is None else check_timeout(timeout)
    ended = threading.Event()

    def tell(_: Work[Any]) -> None:
        ended.set()

    for work in listed:
        work.add_waker(tell)
    try:
        ended.wait(limit)
    finally:
        for work in listed:
            work.remove_waker(tell)
    for position, work in enumerate(listed):
        if work.done():
            return position
    raise DeadlineError(
        f"none of {len(listed)} works is done after the timeout of {timeout} s; they continue in the background"
    )


async def off_loop(function: Callable[..., T], *args: Any, discard: Callable[[T], None] | None = None, **kw: Any) -> T:
    """Return `function(*args, **kw)`, called on a new thread; the event loop stays free meanwhile.

    Not a thread of the loop's executor: calls that wait for other machines would take all of those. A cancelled await
    does not end the call; what it returns then is given to `discard`.
    """
    import asyncio  # slow to load; a program that gets here has done so

    loop = asyncio.get_running_loop()
    ended: asyncio.Future[T] = loop.create_future()
    context = contextvars.copy_context()

    def settle(result: Any, error: BaseException | None) -> None:
        if ended.cancelled():
            if error is None and discard is not None:
                threading.Thread(target=discard, args=(result,), name="covey-discard", daemon=True).start()
        elif error is None:
            ended.set_result(result)
        else:
            ended.set_exception(error)

    def call() -> None:
        result, error = None, None
        try:
            result = context.run(function, *args, **kw)
        except BaseException as failure:
            error = failure
        try:
            loop.call_soon_threadsafe(settle, result, error)
        except RuntimeError:  # the loop is closed: nothing awaits the result
            if error is None and discard is not None:
                with contextlib.suppress(Exception):
                    discard(result)  # type: ignore[arg-type]

    threading.Thread(target=call, name="covey-off-loop", daemon=True).start()
    return await ended
