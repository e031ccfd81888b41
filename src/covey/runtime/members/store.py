"""Stores on the control plane: entries that one process of a run keeps, and all others ask it for over their links."""

from __future__ import annotations

import itertools
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeAlias

from covey.base.errors import (
    ClosedError,
    ConfigError,
    ConnectError,
    CoveyError,
    DeadlineError,
    PeerLostError,
    RemoteProtocolError,
)
from covey.proto.board import Board, Reply
from covey.runtime import loop as control
from covey.wire import board as wire
from covey.wire import messages

if TYPE_CHECKING:
    from covey.runtime.members.node import Node

STORES_LIMIT: Final = 8
"""Stores that a process keeps; the oldest goes when there is one more."""
ASK_AGAIN_SECONDS: Final = 10.0
"""After so long a question is repeated, if that does no harm: one link may have followed another unnoticed."""

Outcome: TypeAlias = "Future[wire.Done]"


@dataclass
class _Asked:
    """A question under way."""

    keeper: int
    board: int
    question: wire.Question
    outcome: Outcome = field(default_factory=Future)
    is_sent: bool = False

    def fail(self, error: CoveyError) -> None:
        if not self.outcome.done():
            self.outcome.set_exception(error)


class Stores:
    """The boards that this process keeps, and what it asks of others. On the control loop, but for `Desk`."""

    def __init__(self, node: Node | None) -> None:
        """`node` is None for a process that is alone."""
        self._node = node
        self._me = node.rank if node is not None else 0
        self._kept: dict[int, Board] = {}
        self._asked: dict[int, _Asked] = {}
        self._is_closed = False

    def keep(self, board: int) -> None:
        """Begin a board."""
        self._kept[board] = Board()
        while len(self._kept) > STORES_LIMIT:
            del self._kept[next(iter(self._kept))]

    def ask(self, number: int, asked: _Asked) -> None:
        """Put a question, or put it again."""
        if self._is_closed or (self._node is not None and self._node.is_closing):
            asked.fail(ClosedError("the run is closed, and its store with it; join again"))
            return
        self._asked[number] = asked
        if asked.keeper == self._me:
            self._answer(self._me, asked.board, number, asked.question)
            return
        assert self._node is not None
        peer = self._node.peers[asked.keeper]
        if peer.is_gone:
            self._fail(number, self._lost(asked.keeper))
        elif peer.link is not None:
            asked.is_sent = True
            self._send(asked.keeper, asked.board, number, asked.question)

    def withdraw(self, number: int) -> None:
        """Nobody waits for an answer any more."""
        asked = self._asked.pop(number, None)
        if asked is None:
            return
        if asked.keeper != self._me:
            self._send(asked.keeper, asked.board, number, wire.Withdraw())
        elif asked.board in self._kept:
            self._kept[asked.board].withdraw(self._me, number)

    def heard(self, seat: int, posting: messages.Posting) -> None:
        """Take what another process says about a board."""
        body = wire.decode_body(posting.body)
        if self._node is not None and self._node.peers[seat].is_excluded:
            return
        if isinstance(body, wire.Done | wire.Refused):
            asked = self._asked.get(posting.number)
            if asked is not None and asked.keeper == seat:
                self._answered(posting.number, body)
        elif isinstance(body, wire.Withdraw):
            if posting.board in self._kept:
                self._kept[posting.board].withdraw(seat, posting.number)
        else:
            self._answer(seat, posting.board, posting.number, body)

    def link_up(self, seat: int) -> None:
        """There is another link with a process: what may be lost with the last one is asked again."""
        self._broken(seat)
        for number, asked in list(self._asked.items()):
            if asked.keeper == seat:
                self.ask(number, asked)

    def link_down(self, seat: int) -> None:
        """The link with a process has ended; another may follow."""
        self._broken(seat)
        for board in self._kept.values():
            board.forget(seat)

    def peer_gone(self, seat: int) -> None:
        """A process is lost for good."""
        for number in [number for number, asked in self._asked.items() if asked.keeper == seat]:
            self._fail(number, self._lost(seat))

    def close(self) -> None:
        """End all that waits."""
        self._is_closed = True
        for number in list(self._asked):
            self._fail(number, ClosedError("the run was closed while its store was asked"))

    # Small things

    def _answer(self, seat: int, board: int, number: int, question: wire.Question) -> None:
        if board in self._kept:
            replies = self._kept[board].ask(seat, number, question)
        else:
            replies = [Reply(seat, number, wire.Refused("this store is closed; the process group was made anew"))]
        for reply in replies:
            if reply.asker == self._me:
                self._answered(reply.number, reply.answer)
            else:
                self._send(reply.asker, board, reply.number, reply.answer)

    def _answered(self, number: int, answer: wire.Answer) -> None:
        asked = self._asked.pop(number, None)
        if asked is None or asked.outcome.done():
            return
        if isinstance(answer, wire.Done):
            asked.outcome.set_result(answer)
        else:
            asked.fail(ConfigError(answer.reason))

    def _broken(self, seat: int) -> None:
        """Fail the questions to `seat` of which nobody knows whether they were heard, and that may not be repeated."""
        for number, asked in list(self._asked.items()):
            if asked.keeper == seat and asked.is_sent and not isinstance(asked.question, wire.REPEATABLE):
                what = type(asked.question).__name__.lower()
                self._fail(number, ConnectError(f"the link to the store's keeper broke in the middle of {what}()"))

    def _fail(self, number: int, error: CoveyError) -> None:
        self._asked.pop(number).fail(error)

    def _lost(self, seat: int) -> PeerLostError:
        assert self._node is not None
        peer = self._node.peers[seat]
        name = f"rank 0 ({peer.name or 'unnamed'}, on {peer.host_name or 'this host'})"
        text = f"{name}, which keeps the store, {peer.how_it_went()}"
        return PeerLostError(text, rank=0, host=peer.host_name, operation="store")

    def _send(self, seat: int, board: int, number: int, body: wire.Body) -> None:
        if self._node is not None:
            self._node.send(seat, messages.Posting(board, number, wire.encode_body(body)))


class StoreClient:
    """One process's way to one board, for any thread."""

    _numbers = itertools.count()

    def __init__(self, stores: Stores, board: int, keeper: int) -> None:
        self._stores, self._keeper = stores, keeper
        self.board = board
        """The board's number, which is the same on all ranks and on no other board."""

    def ask(self, question: wire.Question, timeout: float) -> wire.Done:
        """Return the answer.

        Raises:
            DeadlineError: there was none within `timeout` seconds.
            PeerLostError: the process that keeps the board is gone.
            ConnectError: the link to it broke, and whether it was heard is not known.
            ConfigError: the board has no room, or the question makes no sense.
            ClosedError: the run was left.
        """
        _check(question)
        number, asked = next(self._numbers), _Asked(self._keeper, self.board, question)
        until = time.monotonic() + timeout
        is_repeatable = isinstance(question, wire.REPEATABLE)
        try:
            while True:
                control.soon(self._stores.ask, number, asked)
                left = max(0.0, until - time.monotonic())
                try:
                    return asked.outcome.result(min(left, ASK_AGAIN_SECONDS) if is_repeatable else left)
                except TimeoutError:
                    if asked.outcome.done():  # with an error of ours
                        raise
                    if time.monotonic() >= until:
                        raise DeadlineError(f"no answer within the timeout of {timeout:g} s") from None
        except BaseException:  # Ctrl-C, too
            control.soon(self._stores.withdraw, number)
            raise


def _check(question: wire.Question) -> None:
    """Refuse here what would be nonsense to the process that keeps the board, and end the link with it."""
    try:
        body = wire.encode_body(question)
        wire.decode_body(body)
    except (RemoteProtocolError, OverflowError) as error:
        raise ConfigError(
            f"a store has keys of up to {wire.KEY_LIMIT} characters, values of up to {wire.VALUE_LIMIT} bytes and "
            f"numbers of 64 bits: {error.__cause__ or error}"
        ) from None
    if len(body) > wire.BODY_LIMIT:
        raise ConfigError(f"a store takes {wire.BODY_LIMIT} bytes at a time, not {len(body)}; use several calls")
