"""What a caller holds of its call: a work, or a stream of items."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, Self, TypeVar

from covey.runtime import loop as control
from covey.runtime.work import Work

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from covey.base.errors import CoveyError
    from covey.base.numbers import Seat

T = TypeVar("T")

STREAM_CREDIT: Final = 16
"""Items of a stream that may be under way or wait for their reader."""


class CallMaker(Protocol):
    """What works and streams need of the calls of their node."""

    def cancel(self, peer: Seat, number: int) -> bool:
        """Cancel a call; return False if it had ended already. On any thread."""

    def taken(self, peer: Seat, number: int, items: int) -> None:
        """Ask for more items of a stream. On any thread."""

    def drive(self, work: Work[Any], deadline: float | None) -> None:
        """Wait for a call, and receive messages meanwhile."""

    def work_ended(self) -> None:
        """Wake the thread that waits for a call which has ended. On any thread."""

    def aside(self, job: Callable[[], None]) -> None:
        """Run a callback of the program where it holds nothing up. On any thread."""

    def ending_error(self, what: str) -> CoveyError:
        """Return the error of a call that ended because this node is not in the run any more."""


class CallWork(Work[T]):
    """A call that was started with `call_async`: wait for it, await it, or cancel it.

    A cancelled `await` cancels the call. Its own `timeout=` ends it, whether or not a thread waits for it.
    """

    def __init__(self, description: str, maker: CallMaker) -> None:
        super().__init__(description, drive=maker.drive)
        self._maker = maker
        self._key: tuple[Seat, int] | None = None
        self._decode: Callable[[], T] | None = None
        self._decoding = threading.Lock()

    def began(self, peer: Seat, number: int) -> None:
        """Note which call this is."""
        self._key = peer, number

    def cancel(self) -> bool:
        """Cancel the call, and its function on the other node; return whether it had not ended yet."""
        return self._key is not None and self._maker.cancel(*self._key)

    def conclude(self, result: Any, error: BaseException | None) -> None:
        """End the call, and wake the thread that waits for it."""
        super().conclude(result, error)
        if self._drive is not None:  # else this process is a fork, and threads of the parent may have held locks
            self._maker.work_ended()

    def call_back(self, callbacks: list[Callable[[Work[T]], None]]) -> None:
        """Have callbacks of the program called on a thread that meanwhile receives nothing for other calls."""
        if self._drive is not None:
            self._maker.aside(lambda: super(CallWork, self).call_back(callbacks))

    def answered(self, decode: Callable[[], T]) -> None:
        """End with a result, which `decode` computes on the thread that first asks for it."""
        self._decode = decode
        self.finish(None)  # type: ignore[arg-type]

    def forked(self, error: BaseException) -> None:
        """End the call in a forked process; other threads of the parent may have held the locks."""
        self._decoding, self._drive = threading.Lock(), None
        super().forked(error)

    def _complete(self) -> None:
        with self._decoding:
            if self._decode is not None:
                try:
                    self._result = self._decode()
                except Exception as error:
                    self._error = error
                self._decode = None

    def wait_or_cancel(self) -> T:
        """Wait for the end of a call that only its caller has; cancel it if the wait is interrupted (Ctrl-C)."""
        try:
            return self.take()
        except BaseException:
            self.cancel()
            raise

    def __await__(self) -> Generator[Any, None, T]:
        try:
            return (yield from super().__await__())
        except BaseException:
            self.cancel()
            raise
        finally:
            del self  # as in `Work.wait`


class _Slot:
    """An item in the order of the stream; its parts may still be on the way."""

    __slots__ = ("decode",)

    def __init__(self) -> None:
        self.decode: Callable[[], Any] | None = None


class StreamState:
    """The items of one stream that have come and are not taken. Any thread may call any method."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._slots: deque[_Slot] = deque()
        self._error: BaseException | None = None
        self._is_over = False
        self.listeners: list[Callable[[], None]] = []
        """Called when `take` may have something else to say; with no lock held."""

    def reserve(self) -> _Slot:
        """Keep a place for the next item."""
        with self._changed:
            self._slots.append(slot := _Slot())
            return slot

    def arrived(self, slot: _Slot, decode: Callable[[], Any]) -> None:
        """Fill a place."""
        with self._changed:
            slot.decode = decode
            self._changed.notify_all()
        self._tell()

    def end(self, error: BaseException | None) -> None:
        """End the stream after the items that have come; with an error (the first one), after those that are whole."""
        with self._changed:
            self._is_over, self._error = True, self._error or error
            self._changed.notify_all()
        self._tell()

    def forked(self, error: BaseException) -> None:
        """End the stream in a forked process; other threads of the parent may have held the lock."""
        self._changed = threading.Condition()
        self.end(error)

    def _tell(self) -> None:
        for listener in list(self.listeners):
            listener()

    def take(self) -> Callable[[], Any] | None:
        """Return what decodes the next item; None if it has not come; raise StopIteration or the error at the end."""
        with self._changed:
            return self._take()

    def _take(self) -> Callable[[], Any] | None:
        if self._slots and self._slots[0].decode is not None:
            return self._slots.popleft().decode
        if self._is_over and (self._error is not None or not self._slots):
            if self._error is not None:
                raise self._error
            raise StopIteration
        return None

    def wait(self) -> Callable[[], Any]:
        """Return what decodes the next item, once it has come; the stream's own timeout ends the wait."""
        with self._changed:
            while (found := self._take()) is None:
                self._changed.wait()
            return found


class CallStream(Generic[T]):
    """The items that a generator on another node makes: iterate over it with `for` or `async for`.

    The generator runs only a few items ahead of the reader. Leaving the loop early, `close`, or dropping the stream
    closes the generator.
    """

    def __init__(self, maker: CallMaker, peer: Seat, number: int, state: StreamState) -> None:
        self._maker, self._peer, self._number, self._state = maker, peer, number, state
        self._taken = 0
        self._dropped = weakref.finalize(self, control.soon, maker.cancel, peer, number)
        self._dropped.atexit = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        return self._decoded(self._state.wait())

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        import asyncio

        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def tell() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(changed.set)

        self._state.listeners.append(tell)
        try:
            while True:
                try:
                    decode = self._state.take()
                except StopIteration:
                    raise StopAsyncIteration from None
                if decode is not None:
                    return self._decoded(decode)
                await changed.wait()
                changed.clear()
        finally:
            self._state.listeners.remove(tell)

    def _decoded(self, decode: Callable[[], T]) -> T:
        self._taken += 1
        if self._taken >= STREAM_CREDIT // 2:
            self._maker.taken(self._peer, self._number, self._taken)
            self._taken = 0
        return decode()

    def close(self) -> None:
        """Close the stream, and its generator on the other node. Closing twice is fine."""
        self._dropped.detach()
        self._maker.cancel(self._peer, self._number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
