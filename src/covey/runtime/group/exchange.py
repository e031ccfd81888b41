"""Many concurrent messages with several ranks, apart from the user's: start them, then take each as it ends."""

from __future__ import annotations

import contextlib
import queue
import time
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from covey.base.arithmetic import BYTE_CODE
from covey.base.errors import DeadlineError, MismatchError, PeerLostError
from covey.proto.matching import RESERVED_TAGS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from covey.proto.message import Received
    from covey.runtime.group.issuer import Issuer
    from covey.runtime.work import Work
    from covey.wire.manifest import Bytes


def _contents(received: Received) -> Bytes | None:
    return received.data


class ExchangedMessage(NamedTuple):
    """A message that has ended: sent, received, or failed because its peer is lost or sent something else."""

    peer: int
    number: int
    result: Any
    """What `then` returned for a received message; None for a sent one."""
    error: PeerLostError | MismatchError | None


class Exchange:
    """The messages of one exchange, until `deadline` on time.monotonic(). Leaving the `with` block ends all of them."""

    def __init__(self, issuer: Issuer, exchange: int, deadline: float) -> None:
        """`exchange` is equal on all ranks and new for each exchange, so that late messages match no other."""
        self._failure, self._deadline = issuer.engine.failure, deadline
        self._messenger = issuer.engine.routing.messenger()
        self._tag = RESERVED_TAGS | (exchange % (1 << 30)) << 32
        self._over: queue.SimpleQueue[tuple[int, int, Work[Any] | PeerLostError]] = queue.SimpleQueue()
        self._works: set[Work[Any]] = set()
        self._waiting = 0

    @property
    def is_waiting(self) -> bool:
        """Whether `next` has yet to return a message."""
        return self._waiting > 0

    def send(self, contents: Bytes, peer: int, number: int) -> None:
        """Start a send; `contents` must not change until `next` returns it."""
        tag = self._tag | number
        self._start(
            peer,
            number,
            lambda: self._messenger.start_send(
                contents.data, peer, tag, BYTE_CODE, contents.shape, is_object=False, deadline=self._deadline
            ),
        )

    def receive(
        self, peer: int, number: int, out: Bytes | None = None, *, then: Callable[[Received], Any] = _contents
    ) -> None:
        """Start a receive, into `out` if given.

        `then` computes the result (default: the contents). It runs at once on the thread that moves the bytes, and
        other messages wait for it.
        """
        tag, memory = self._tag | number, None if out is None else out.data
        expect = None if out is None else (BYTE_CODE, out.shape)
        self._start(
            peer, number, lambda: self._messenger.start_receive(peer, tag, memory, expect, self._deadline, then)
        )

    def next(self, late: Sequence[int]) -> ExchangedMessage:
        """Return the next message that ended.

        Raises:
            DeadlineError: none ended in time; the error names `late`.
            CoveyError: the group has ended. A lost peer or a message of another size is returned, not raised, while
                the group continues.
        """
        self._messenger.progress_in_background()
        try:
            peer, number, work = self._over.get(timeout=max(0.0, self._deadline - time.monotonic()))
        except queue.Empty:
            names = ", ".join(map(str, late))
            raise DeadlineError(f"the timeout ended before anything came from rank {names}", late=tuple(late)) from None
        self._waiting -= 1
        error: BaseException | None = None
        if isinstance(work, PeerLostError):
            error = work
        else:
            self._works.discard(work)
            if (error := work.exception()) is None:
                return ExchangedMessage(peer, number, work.result(), None)
        if isinstance(error, PeerLostError | MismatchError) and not self._failure.is_over:
            return ExchangedMessage(peer, number, None, error)
        raise error

    def _start(self, peer: int, number: int, start: Callable[[], Work[Any]]) -> None:
        self._waiting += 1
        try:
            work = start()
        except PeerLostError as error:
            self._over.put((peer, number, error))
            return
        self._works.add(work)
        work.add_done_callback(lambda work: self._over.put((peer, number, work)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for work in self._works:
            if not work.done():
                with contextlib.suppress(Exception):  # it must not touch its memory after this
                    self._messenger.wait(work, time.monotonic())
