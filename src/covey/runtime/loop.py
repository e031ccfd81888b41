"""The one asyncio loop of the process, on a thread of its own. It carries control, never tensor bytes."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Coroutine
    from concurrent.futures import Future

T = TypeVar("T")

MAKE_SECONDS: Final = 5.0
"""How long a coroutine may clean up behind itself when what it makes is not wanted any more."""

_loop: asyncio.AbstractEventLoop | None = None
_thread: threading.Thread | None = None
_starting = threading.Lock()


def control_loop() -> asyncio.AbstractEventLoop:
    """Return the running loop, started on first use."""
    global _loop, _thread
    if _loop is not None:  # without the lock: the garbage collector may ask, on a thread that holds it
        return _loop
    with _starting:
        if _loop is None:
            import asyncio  # here, because it costs half as much to import as numpy

            loop = asyncio.new_event_loop()
            _thread = threading.Thread(target=loop.run_forever, name="covey-control", daemon=True)
            _thread.start()
            _loop = loop
    return _loop


def is_here() -> bool:
    """Tell whether the caller runs on the loop's thread, and so must not wait for the loop."""
    return threading.current_thread() is _thread


def start(coroutine: Coroutine[Any, Any, T]) -> Future[T]:
    """Run a coroutine on the loop; the future can be waited for on any thread."""
    loop = control_loop()
    import asyncio

    return asyncio.run_coroutine_threadsafe(coroutine, loop)


def run(coroutine: Coroutine[Any, Any, T], within: float) -> T:
    """Run a coroutine on the loop and return what it returns; it ends with a TimeoutError if it takes longer."""
    future = start(coroutine)
    try:
        return future.result(within)
    finally:
        future.cancel()


def make(coroutine: Coroutine[Any, Any, T], *, discard: Callable[[T], object], otherwise: Callable[[], object]) -> T:
    """Return what a coroutine makes on the loop, however long it takes.

    If it fails or the caller is interrupted (Ctrl-C), what the coroutine made all the same goes to `discard`; if it
    made nothing, `otherwise` is called once it has cleaned up behind itself, or MAKE_SECONDS later.
    """
    loop = control_loop()
    from concurrent.futures import Future

    outcome: Future[T] = Future()  # here before the loop hears of anything: an interrupt may come in the middle of that
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
        return outcome.result()
    except BaseException:
        loop.call_soon_threadsafe(give_up)
        try:
            made = outcome.result(MAKE_SECONDS)
        except BaseException:  # there is no such thing, nor will there be
            otherwise()
        else:
            discard(made)
        raise


def finish(coroutine: Coroutine[Any, Any, object], within: float, then: Callable[[], object]) -> None:
    """Run a coroutine on the loop that takes things from it, then call `then`, which frees them.

    Returns after `within` seconds even if the loop is kept busy; then the rest is done on another thread, later. For a
    socket that is closed while the loop has it leaves its number there, and the next with that number is never heard.
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
    with contextlib.suppress(BaseException):  # what it raises, nobody is there to hear
        future.result()
    then()


def soon(function: Callable[..., object], *args: Any) -> None:
    """Call `function` on the loop, soon."""
    control_loop().call_soon_threadsafe(function, *args)


async def aside(function: Callable[..., T], *args: Any) -> T:
    """Call `function`, which may block, on a thread of its own; nobody waits for it when the program ends.

    Raises:
        What `function` raises; OSError if the system starts no more threads.
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
        with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
            loop.call_soon_threadsafe(conclude, result, error)

    try:
        threading.Thread(target=work, name="covey-aside", daemon=True).start()
    except RuntimeError as error:  # callers expect what the system refuses to be an OSError
        raise OSError(errno.EAGAIN, str(error)) from error
    return await done


def _forget_in_child() -> None:
    global _loop, _starting
    _loop, _starting = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_in_child)
