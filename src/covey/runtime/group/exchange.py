"""Many messages at once with several ranks, beside those of the user: post them, then take each as it is over."""

from __future__ import annotations

import contextlib
import queue
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import numpy as np

from covey.base.dtypes import dtype_code
from covey.base.errors import DeadlineError, MismatchError, PeerLostError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from covey.proto.message import Received
    from covey.runtime.group.group import Group
    from covey.runtime.work import Work
    from covey.wire.manifest import Bytes

RESERVED_TAGS: Final = 1 << 62
"""Where our tags begin. `Group` refuses tags this large, so no user's message has one: the next 30 bits say which
exchange a message belongs to, the last 32 which of its messages it is."""
_BYTE: Final = dtype_code(np.dtype(np.uint8))


def _contents(received: Received) -> Bytes | None:
    return received.data


class ExchangedMessage(NamedTuple):
    """A message that is over: it has left, it is here, or its peer is lost or sent something else."""

    peer: int
    number: int
    result: Any
    """What the receive made of it; None for a message that was sent."""
    error: PeerLostError | MismatchError | None


class Exchange:
    """The messages of one exchange, until `deadline` (of time.monotonic()). Leaving the `with` block ends them all."""

    def __init__(self, group: Group, exchange: int, deadline: float) -> None:
        """`exchange` is the same on all ranks and another for each exchange, or else late messages are mistaken."""
        self._engine, self._deadline = group._engine, deadline
        self._messenger = self._engine.routing.messenger()
        self._tag = RESERVED_TAGS | (exchange % (1 << 30)) << 32
        self._over: queue.SimpleQueue[tuple[int, int, Work[Any] | PeerLostError]] = queue.SimpleQueue()
        self._works: set[Work[Any]] = set()
        self._waiting = 0

    @property
    def is_waiting(self) -> bool:
        """Whether there are messages that `next` has not returned."""
        return self._waiting > 0

    def send(self, contents: Bytes, peer: int, number: int) -> None:
        """Start to send; `contents` are read until it is over."""
        tag = self._tag | number
        self._post(
            peer,
            number,
            lambda: self._messenger.post_send(
                contents.data, peer, tag, _BYTE, contents.shape, is_object=False, deadline=self._deadline
            ),
        )

    def receive(
        self, peer: int, number: int, out: Bytes | None = None, *, then: Callable[[Received], Any] = _contents
    ) -> None:
        """Start to receive, into `out` if given.

        `then` makes the letter's result of it (default: the contents) on the thread that moves the bytes: at once, but
        nothing else moves meanwhile.
        """
        tag, memory = self._tag | number, None if out is None else out.data
        expect = None if out is None else (_BYTE, out.shape)
        self._post(peer, number, lambda: self._messenger.post_recv(peer, tag, memory, expect, self._deadline, then))

    def next(self, late: Sequence[int]) -> ExchangedMessage:
        """Return the next message that is over.

        Raises:
            DeadlineError: none was in time; it names `late`.
            CoveyError: a message failed for another reason than that its rank is lost, and the group goes on without
                it, or that the rank sent something of another size.
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
        if isinstance(error, PeerLostError | MismatchError) and not self._engine.is_over:
            return ExchangedMessage(peer, number, None, error)
        raise error

    def _post(self, peer: int, number: int, start: Callable[[], Work[Any]]) -> None:
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
                with contextlib.suppress(Exception):  # it ends here: nobody touches its memory afterwards
                    self._messenger.wait(work, time.monotonic())
