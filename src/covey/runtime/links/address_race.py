"""Dials the addresses of one process, each with a short head start, and again while the process is lost."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, TypeVar

from covey.base.errors import AuthError, ConnectError
from covey.net.host.descriptors import ScarceError
from covey.runtime.links.handshake import NO_ANSWER, HungUpError, RefusedError
from covey.runtime.links.sockets import RelayedWay

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from covey.runtime.backoff import Backoff
    from covey.runtime.links.handshake import Where

HEAD_START: Final = 0.15
"""Seconds between the dial of an address and the dial of the next, worse one."""
RELAY_HEAD_START: Final = 0.6
"""Seconds for which the addresses of a node are tried before a relay; none, once all of them have failed."""
DIAL_ATTEMPT_SECONDS: Final = 1.5
"""How long one attempt to dial a lost process may take: a new dial repeats a lost first packet sooner than TCP does."""
RELAY_SECONDS: Final = 2.5
"""How much longer an attempt may take that tries relays after the addresses: a relay needs more round trips."""
NEXT_SECONDS: Final = 1.0
"""How long the next attempt waits for one that has neither worked nor failed."""
T = TypeVar("T")


async def keep_dialling(
    attempt: Callable[[], Coroutine[Any, Any, str]], is_wanted: Callable[[], bool], tries: Backoff, *, at_once: int = 1
) -> None:
    """Try to link with a process, with growing pauses, while `is_wanted()`; `attempt` returns why it has failed.

    An attempt tries each way once, and lasts as long as one of them neither works nor fails. Meanwhile another way may
    begin to work: a relay may have returned to which the process is not registered yet. So up to `at_once` attempts
    run at a time. That is 1 where only one link is kept: of two that come together, each end might keep another.
    """
    attempts = set[asyncio.Future[str]]()
    try:
        while is_wanted():
            tries.begin()
            if len(attempts) < at_once:
                attempts.add(asyncio.ensure_future(attempt()))
            done, attempts = await asyncio.wait(attempts, timeout=NEXT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            problems = [each.result() for each in done]
            if is_wanted():
                tries.failed(problems[0] if problems else NO_ANSWER)
                await tries.rest()
    finally:
        for each in attempts:
            each.cancel()


def attempt_seconds(*, is_relayed: bool) -> float:
    """Return how long one attempt to dial a lost process may take, with relays or without."""
    return DIAL_ATTEMPT_SECONDS + (RELAY_SECONDS if is_relayed else 0.0)


async def first_of(
    wheres: list[Where], open_one: Callable[[Where], Coroutine[Any, Any, T]], drop: Callable[[T], object]
) -> tuple[T, Where]:
    """Try addresses, each with a short head start; return the result of the first that works, and the address.

    Results of the others are dropped.

    Raises:
        ConnectError: there is no address.
        What `open_one` raises, if no address works: the most informative error of all addresses.
    """
    if not wheres:
        raise ConnectError("the peer has no address that can be dialled from here")
    if len(wheres) == 1:
        return await open_one(wheres[0]), wheres[0]
    remaining, tasks, errors = list(wheres), list[asyncio.Future[T]](), list[BaseException]()
    won: asyncio.Future[T] | None = None

    def drop_late(task: asyncio.Future[T]) -> None:
        if not task.cancelled() and task.exception() is None:
            drop(task.result())

    try:
        while won is None and (remaining or len(errors) < len(tasks)):
            if remaining:
                tasks.append(asyncio.ensure_future(open_one(remaining.pop(0))))
            await _give_head_start([task for task in tasks if not task.done()], wheres[: len(tasks)], remaining)
            errors = [error for task in tasks if task.done() and (error := task.exception()) is not None]
            won = next((task for task in tasks if task.done() and task.exception() is None), None)
    finally:
        for task in tasks:
            if task is not won:
                task.cancel()
                task.add_done_callback(drop_late)
    if won is None:
        raise min(errors, key=_information)
    return won.result(), wheres[tasks.index(won)]


async def _give_head_start(running: list[asyncio.Future[T]], dialled: list[Where], remaining: list[Where]) -> None:
    """Return when a running dial has ended, or when it is time for the next address.

    A relay is not dialled as soon as one address has failed: the others keep their head start.
    """
    waits_for_relay = bool(remaining) and isinstance(remaining[0], RelayedWay)
    is_first_relay = waits_for_relay and not any(isinstance(where, RelayedWay) for where in dialled)
    until = asyncio.get_running_loop().time() + RELAY_HEAD_START
    while running:
        pause = HEAD_START if remaining else None
        if is_first_relay:
            pause = max(0.0, until - asyncio.get_running_loop().time())
        done, _ = await asyncio.wait(running, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
        running = [task for task in running if not task.done()]
        if not is_first_relay or not done or any(task.exception() is None for task in done):
            return


def _information(error: BaseException) -> int:
    kinds = (RefusedError, AuthError, HungUpError, ScarceError, ConnectError)
    return next((index for index, kind in enumerate(kinds) if isinstance(error, kind)), len(kinds))
