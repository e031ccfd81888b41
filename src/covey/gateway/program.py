"""One program that has registered: its rank, and what it may have open at a time.

A program has at most one collective, one Send and one Receive open, so its memory is bounded by the size of one array
for each. What has begun between the ranks cannot be taken back: if its call is over, the next one waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from covey.base.errors import ClosedError
from covey.coordinator.refusal import Reason, RefusalError
from covey.gateway.pieces import check_size, malformed
from covey.runtime.group.internals import engine_of
from covey.runtime.work import off_loop

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from covey.base.errors import CoveyError
    from covey.gateway.pieces import ArrayKind
    from covey.gateway.ranks import ProgramRank, Wish
    from covey.runtime.events import Event
    from covey.runtime.group.group import Group
    from covey.runtime.work import Work

    Array = np.ndarray[Any, np.dtype[Any]]

SESSION_BYTES: Final = 16
KEPT_BYTES: Final = 64 << 20
"""Memory that is kept for the next array; that of a larger one is given back after its operation."""
LOOK_EVERY: Final = 0.5
"""How often a program's group is looked at, to tell the program when it has ended."""


class CallTurn:
    """The operations of one kind of a program, one at a time. On the loop of the gateway."""

    def __init__(self, what: str) -> None:
        """`what` names the kind, for messages."""
        self._what, self._is_taken = what, False
        self._begun: asyncio.Future[Any] | None = None
        """What was begun last, which the other ranks may count on."""
        self._memory = np.empty(0, np.uint8)

    @contextlib.asynccontextmanager
    async def take(self) -> AsyncIterator[CallTurn]:
        """Take the turn, once what an earlier call has begun is over.

        Raises:
            RefusalError: another call has the turn.
        """
        if self._is_taken:
            raise RefusalError(
                Reason.CONTRADICTION, f"this program has another {self._what} open; wait for its end, then call again"
            )
        self._is_taken = True
        try:
            if self._begun is not None:
                await asyncio.wait([self._begun])
            yield self
        finally:
            self._is_taken = False
            if self._memory.nbytes > KEPT_BYTES:
                self._memory = np.empty(0, np.uint8)

    async def carry_out(self, begin: Callable[..., Work[Any]], *args: Any, **named: Any) -> Work[Any]:
        """Begin an operation, and return its work once that is done; raise its error.

        A caller that is cancelled leaves the operation to itself: the next one waits for it.

        Raises:
            RefusalError: the arguments cannot work; nothing was begun.
        """
        work = _begun(begin, args, named)
        self._begun = asyncio.ensure_future(_settled(work))
        await asyncio.shield(self._begun)
        work.wait(0)
        return work

    async def withdrawable(self, begin: Callable[..., Work[Any]], *args: Any, **named: Any) -> Any:
        """Return the result of a probe or a receive; a caller that is cancelled withdraws it.

        Raises:
            RefusalError: the arguments cannot work; nothing was begun.
        """
        work = _begun(begin, args, named)
        try:
            await _ended(work)
        except asyncio.CancelledError:
            self._begun = asyncio.ensure_future(_withdrawn(work))
            raise
        return work.wait(0)

    def array(self, kind: ArrayKind) -> Array:
        """Return memory for an array of this turn, with any contents; its pages are taken when they are written."""
        if self._memory.nbytes < kind.nbytes:
            self._memory = np.empty(kind.nbytes, np.uint8)
        return self._memory[: kind.nbytes].view(kind.dtype).reshape(kind.shape)


def _begun(begin: Callable[..., Work[Any]], args: tuple[Any, ...], named: dict[str, Any]) -> Work[Any]:
    """Begin an operation; RefusalError for arguments that cannot work."""
    try:
        return begin(*args, **named, async_op=True)
    except (TypeError, ValueError) as error:  # ConfigError is one
        raise malformed(str(error)) from None


async def _ended(work: Work[Any]) -> None:
    """Return when an operation has ended; its result can still be given back."""
    loop = asyncio.get_running_loop()
    ended = loop.create_future()

    def wake() -> None:
        if not ended.done():  # the call may have been cancelled
            ended.set_result(None)

    def tell(_: Work[Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(wake)

    work.add_waker(tell)
    await ended


async def _withdrawn(work: Work[Any]) -> None:
    """Withdraw an operation. A message that has begun to arrive is written to its memory for as long as that takes."""
    await off_loop(work.release)  # which may wait: other programs go on
    await _ended(work)


async def _settled(work: Work[Any]) -> None:
    with contextlib.suppress(Exception):
        await work


class RegisteredProgram:
    """A program from its registration to the end of its rank. On the loop of the gateway."""

    def __init__(self, wish: Wish, identity: str, rank: ProgramRank, most_bytes: int) -> None:
        """`identity` is that of the caller that registers; no other may call for the program."""
        self.name, self.identity, self.most_bytes = wish.program, identity, most_bytes
        self.session = secrets.token_bytes(SESSION_BYTES)
        self.collective, self.gathered = CallTurn("collective"), CallTurn("AllGather")
        self.sending, self.receiving = CallTurn("Send"), CallTurn("Receive")
        self.has_left_in_order = False
        self._rank = rank
        self._joining: asyncio.Future[Group] | None = None
        self._group: Group | None = None
        self._news = asyncio.Event()
        self._has_left = False
        self._loop = asyncio.get_running_loop()

    @property
    def group(self) -> Group:
        """The group of the rank; RefusalError if the program has left it, or was lost."""
        if self._group is None or self._has_left:
            raise RefusalError(Reason.NOT_FOUND, f"program {self.name!r} has left its run; register again")
        return self._group

    @property
    def state(self) -> str:
        """Whether calls can work: `open`, `over` or `none`."""
        if self._group is None or self._has_left:
            return "none"
        return "over" if engine_of(self._group).is_over else "open"

    async def join(self) -> Group:
        """Join the run, once all ranks are there. `lose` frees a join that was cancelled."""
        self._joining = asyncio.ensure_future(off_loop(self._rank.join))
        try:
            self._group = await asyncio.shield(self._joining)
        except asyncio.CancelledError:
            self._rank.interrupt()
            raise
        self._group.on_change(self._hear)
        return self._group

    @property
    def has_joined(self) -> bool:
        """Whether the program has got its rank."""
        return self._group is not None

    async def changes(self) -> AsyncIterator[tuple[int, ...]]:
        """Tell which ranks are left whenever some are lost, until the program has left.

        Raises:
            CoveyError: the group has ended.
        """
        group = self.group
        told = group.live
        while not self._has_left:
            self._news.clear()
            engine = engine_of(group)
            if engine.is_over and not self._has_left:
                raise _ending(group)
            if group.live != told:
                told = group.live
                yield told
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_EVERY):
                    await self._news.wait()

    async def leave(self) -> None:
        """Leave the run in order.

        Raises:
            RefusalError: an operation is open.
            MismatchError: the ranks called different operations, and this one was not told before.
        """
        group = self.group
        async with self.collective.take(), self.sending.take(), self.receiving.take():
            if engine_of(group).is_over:
                self._news.set()  # the registration ends, and gives the rank up
                raise _ending(group)
            self._has_left = True
            try:
                await off_loop(self._rank.leave)
                self.has_left_in_order = True
            finally:
                self._news.set()

    async def lose(self, error: Exception) -> None:
        """Leave as a rank that has failed with `error`, unless the program has left; returns when all is freed."""
        if self._group is None and self._joining is not None:
            with contextlib.suppress(Exception):  # a join that fails has freed what it took
                self._group = await self._joining
        if self._group is not None and not self._has_left:
            self._has_left = True
            await off_loop(self._rank.lose, error)

    def check_result(self, nbytes: int) -> None:
        """Raise RefusalError if a result is above the limit of an array."""
        check_size(nbytes, self.most_bytes)

    def _hear(self, _: Event) -> None:
        """Look at the group again: its members have changed. On a thread of the run."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._news.set)


def _ending(group: Group) -> CoveyError:
    """Return the error that has ended a group."""
    return engine_of(group).failure.message_error() or ClosedError(f"group {group.name!r} is closed")
