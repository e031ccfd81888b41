"""The control loop: the one asyncio loop of the process, on its own thread. It never carries tensor bytes."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import threading
import time
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Coroutine
    from concurrent.futures import Future

T = TypeVar("T")

MAKE_SECONDS: Final = 5.0
"""How long a cancelled coroutine may take to clean up."""
LOOP_SECONDS: Final = 10.0
"""How long the control loop may take for a call that waits for no other process."""
LOOK_UP_EVERY: Final = 0.5
"""Seconds after which a waiting thread executes Python code, so that handlers of signals run."""

_loop: asyncio.AbstractEventLoop | None = None
_thread: threading.Thread | None = None
_starting = threading.Lock()


def control_loop() -> asyncio.AbstractEventLoop:
    """Return the running loop, started on first use."""
    global _loop, _thread
    if _loop is not None:  # without the lock: the garbage collector may call this on a thread that holds it
        return _loop
    with _starting:
        if _loop is None:
            import asyncio  # here, because importing it takes half as long as numpy

            loop = asyncio.new_event_loop()
            _thread = threading.Thread(target=loop.run_forever, name="covey-control", daemon=True)
            _thread.start()
            _loop = loop
    return _loop


def is_here() -> bool:
    """Tell whether the caller runs on the loop's thread, where it must not wait for the loop."""
    return threading.current_thread() is _thread


def start(coroutine: Coroutine[Any, Any, T]) -> Future[T]:
    """Run a coroutine on the loop; the future can be waited for on any thread."""
    loop = control_loop()
    import asyncio

    return asyncio.run_coroutine_threadsafe(coroutine, loop)


def result_of(future: Future[T], within: float = math.inf) -> T:
    """Return the result of a future; TimeoutError if it is not done within so many seconds.

    Python runs the handlers of signals on the main thread, when that executes Python code. A signal that the kernel
    gives to another thread does not end a wait of the main thread, so it looks up now and then: else Ctrl-C would be
    noticed at the end of the wait.
    """
    until = time.monotonic() + within
    while True:
        try:
            return future.result(max(0.0, min(LOOK_UP_EVERY, until - time.monotonic())))
        except TimeoutError:
            if future.done():
                return future.result()
            if time.monotonic() >= until:
                raise


def run(coroutine: Coroutine[Any, Any, T], within: float) -> T:
    """Run a coroutine on the loop and return its result; TimeoutError, and it is cancelled, if it takes longer."""
    future = start(coroutine)
    try:
        return result_of(future, within)
    finally:
        future.cancel()


def make(coroutine: Coroutine[Any, Any, T], *, discard: Callable[[T], object], otherwise: Callable[[], object]) -> T:
    """Return the object that a coroutine makes on the loop, without a timeout.

    If the caller is interrupted (Ctrl-C), the coroutine is cancelled. If it has made its object all the same, `discard`
    is called with it. If it made none or failed, `otherwise` is called once it has cleaned up, or MAKE_SECONDS later.
    """
    loop = control_loop()
    from concurrent.futures import Future

    outcome: Future[T] = Future()  # made before the loop is called: an interrupt may come at any point after that
    tasks: list[asyncio.Task[T]] = []

    def begin() -> None:
        tasks.append(loop.create_task(coroutine))
        tasks[0].add_done_callback(end)

    def end(task: asyncio.Task[T]) -> None:
        if task.cancelled():
            outcome.cancel()
        elif (error := task.exception()) is not None:
            outcome.set_exception(error)
        else:
            outcome.set_result(task.result())

    def give_up() -> None:
        if tasks:
            tasks[0].cancel()
        else:  # the interrupt came first
            coroutine.close()
            outcome.cancel()

    try:
        loop.call_soon_threadsafe(begin)
        return result_of(outcome)
    except BaseException:
        loop.call_soon_threadsafe(give_up)
        try:
            made = outcome.result(MAKE_SECONDS)
        except BaseException:  # no object was made, and none will be
            otherwise()
        else:
            discard(made)
        raise


def finish(coroutine: Coroutine[Any, Any, object], within: float, then: Callable[[], object]) -> None:
    """Run a coroutine on the loop that unregisters descriptors, then call `then`, which closes them.

    Returns after `within` seconds even if the loop is busy; the rest is then done later on another thread. The order
    matters: if a socket is closed while the loop has it registered, the next socket with its number is never read.
    """
    future = start(coroutine)
    try:
        future.exception(within)
    except BaseException as error:  # Ctrl-C, too
        later = threading.Thread(target=_finish_later, args=(future, then), name="covey-finish", daemon=True)
        try:
            later.start()
        except RuntimeError:  # the system starts no more threads
            future.add_done_callback(lambda _: then())
        if not isinstance(error, TimeoutError):
            raise
    else:
        then()
        future.result()


def _finish_later(future: Future[object], then: Callable[[], object]) -> None:
    with contextlib.suppress(BaseException):  # no caller is left to raise it to
        future.result()
    then()


def soon(function: Callable[..., object], *args: Any) -> None:
    """Call `function` on the loop, without waiting for it."""
    control_loop().call_soon_threadsafe(function, *args)


async def aside(function: Callable[..., T], *args: Any) -> T:
    """Call `function`, which may block, on a new thread; the program may end before it returns.

    Raises:
        The exception of `function`; OSError if the system starts no more threads.
    """
    import asyncio

    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def conclude(result: T | None, error: BaseException | None) -> None:
        if not done.done():
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(cast("T", result))

    def work() -> None:
        result, error = None, None
        try:
            result = function(*args)
        except BaseException as failure:
            error = failure
        with contextlib.suppress(RuntimeError):  # the loop was closed
            loop.call_soon_threadsafe(conclude, result, error)

    try:
        threading.Thread(target=work, name="covey-aside", daemon=True).start()
    except RuntimeError as error:  # callers handle refusals of the system as OSError
        raise OSError(errno.EAGAIN, str(error)) from error
    return await done


def _forget_in_child() -> None:
    global _loop, _starting
    _loop, _starting = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_in_child)
