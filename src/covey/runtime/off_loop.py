"""Runs a blocking call on a thread of its own, for programs that run on asyncio."""

from __future__ import annotations

import contextlib
import contextvars
import threading
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


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
