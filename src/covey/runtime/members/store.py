"""Key-value stores of a run: one process owns the entries, and the others ask it over their links."""

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
from covey.base.numbers import Seat
from covey.proto.store import KeyValueStore, Reply
from covey.runtime import loop as control
from covey.wire import messages
from covey.wire import store as wire

if TYPE_CHECKING:
    from covey.runtime.members.node import Node

STORES_LIMIT: Final = 8
"""Stores that a process owns; one more drops the oldest."""
ASK_AGAIN_SECONDS: Final = 10.0
"""After this time a question is repeated, if that does no harm: the link may have been replaced unnoticed."""

Outcome: TypeAlias = "Future[wire.Done]"


@dataclass
class _Request:
    """A question that waits for its answer."""

    owner: Seat
    store_id: int
    question: wire.Question
    outcome: Outcome = field(default_factory=Future)
    is_sent: bool = False

    def fail(self, error: CoveyError) -> None:
        if not self.outcome.done():
            self.outcome.set_exception(error)


class Stores:
    """The stores that this process owns, and its questions to other owners. On the control loop."""

    def __init__(self, node: Node | None) -> None:
        """Begin without stores; `node` is None for a process that is alone."""
        self._node = node
        self._me = node.seat if node is not None else Seat(0)
        self._stores: dict[int, KeyValueStore] = {}
        self._requests: dict[int, _Request] = {}
        self._is_closed = False

    def keep(self, store_id: int) -> None:
        """Begin an empty store."""
        self._stores[store_id] = KeyValueStore()
        while len(self._stores) > STORES_LIMIT:
            del self._stores[next(iter(self._stores))]

    def ask(self, number: int, request: _Request) -> None:
        """Send a question, or send it again."""
        if self._is_closed or (self._node is not None and self._node.is_closing):
            request.fail(ClosedError("the run is closed, and its store with it; join again"))
            return
        self._requests[number] = request
        if request.owner == self._me:
            self._answer(self._me, request.store_id, number, request.question)
            return
        assert self._node is not None
        peer = self._node.peers[request.owner]
        if peer.is_gone:
            self._fail(number, self._lost(request.owner))
        elif peer.link is not None:
            request.is_sent = True
            self._send(request.owner, request.store_id, number, request.question)

    def withdraw(self, number: int) -> None:
        """Cancel a question: its caller does not wait any more."""
        request = self._requests.pop(number, None)
        if request is None:
            return
        if request.owner != self._me:
            self._send(request.owner, request.store_id, number, wire.Withdraw())
        elif request.store_id in self._stores:
            self._stores[request.store_id].withdraw(self._me, number)

    def heard(self, seat: Seat, posting: messages.Posting) -> None:
        """Take a question or an answer from another process."""
        body = wire.decode_body(posting.body)
        if self._node is not None and self._node.peers[seat].is_excluded:
            return
        if isinstance(body, wire.Done | wire.Refused):
            request = self._requests.get(posting.number)
            if request is not None and request.owner == seat:
                self._answered(posting.number, body)
        elif isinstance(body, wire.Withdraw):
            if posting.store in self._stores:
                self._stores[posting.store].withdraw(seat, posting.number)
        else:
            self._answer(seat, posting.store, posting.number, body)

    def link_up(self, seat: Seat) -> None:
        """Repeat, on the new link with a process, the questions that may be lost with the last one."""
        self._broken(seat)
        for number, request in list(self._requests.items()):
            if request.owner == seat:
                self.ask(number, request)

    def link_down(self, seat: Seat) -> None:
        """Forget the questions of a process whose link ended; it may link again and repeat them."""
        self._broken(seat)
        for store in self._stores.values():
            store.forget(seat)

    def peer_gone(self, seat: Seat) -> None:
        """Fail the questions to a process that is gone."""
        for number in [number for number, request in self._requests.items() if request.owner == seat]:
            self._fail(number, self._lost(seat))

    def close(self) -> None:
        """Fail all questions."""
        self._is_closed = True
        for number in list(self._requests):
            self._fail(number, ClosedError("the run was closed while its store was asked"))

    # Helpers

    def _answer(self, seat: Seat, store_id: int, number: int, question: wire.Question) -> None:
        if store_id in self._stores:
            replies = self._stores[store_id].ask(seat, number, question)
        else:
            replies = [Reply(seat, number, wire.Refused("this store is closed; the process group was made anew"))]
        for reply in replies:
            if reply.asker == self._me:
                self._answered(reply.number, reply.answer)
            else:
                self._send(Seat(reply.asker), store_id, reply.number, reply.answer)

    def _answered(self, number: int, answer: wire.Answer) -> None:
        request = self._requests.pop(number, None)
        if request is None or request.outcome.done():
            return
        if isinstance(answer, wire.Done):
            request.outcome.set_result(answer)
        else:
            request.fail(ConfigError(answer.reason))

    def _broken(self, seat: Seat) -> None:
        """Fail the questions to `seat` that may have arrived before the link ended, and must not be repeated."""
        for number, request in list(self._requests.items()):
            if request.owner == seat and request.is_sent and not isinstance(request.question, wire.REPEATABLE):
                what = type(request.question).__name__.lower()
                self._fail(number, ConnectError(f"the link to the store's owner broke in the middle of {what}()"))

    def _fail(self, number: int, error: CoveyError) -> None:
        self._requests.pop(number).fail(error)

    def _lost(self, seat: Seat) -> PeerLostError:
        assert self._node is not None
        peer = self._node.peers[seat]
        name = f"rank 0 ({peer.name or 'unnamed'}, on {peer.host_name or 'this host'})"
        text = f"{name}, which owns the store, {peer.how_it_went()}"
        return PeerLostError(text, rank=0, host=peer.host_name, operation="store")

    def _send(self, seat: Seat, store_id: int, number: int, body: wire.Body) -> None:
        if self._node is not None:
            self._node.send(seat, messages.Posting(store_id, number, wire.encode_body(body)))


class StoreClient:
    """Asks one store. On any thread."""

    _numbers = itertools.count()

    def __init__(self, stores: Stores, store_id: int, owner: Seat) -> None:
        self._stores, self._owner = stores, owner
        self.store_id = store_id
        """The number of the store, the same on all ranks and unique to it."""

    def ask(self, question: wire.Question, timeout: float) -> wire.Done:
        """Return the answer.

        Raises:
            DeadlineError: there was no answer within `timeout` seconds.
            PeerLostError: the process that owns the store is gone.
            ConnectError: the link to the owner broke, and whether the question arrived is not known.
            ConfigError: the store is full, or the question is malformed.
            ClosedError: this process has left the run.
        """
        _check(question)
        number, request = next(self._numbers), _Request(self._owner, self.store_id, question)
        until = time.monotonic() + timeout
        is_repeatable = isinstance(question, wire.REPEATABLE)
        try:
            while True:
                control.soon(self._stores.ask, number, request)
                left = max(0.0, until - time.monotonic())
                try:
                    return request.outcome.result(min(left, ASK_AGAIN_SECONDS) if is_repeatable else left)
                except TimeoutError:
                    if request.outcome.done():  # with a TimeoutError as its outcome
                        raise
                    if time.monotonic() >= until:
                        raise DeadlineError(f"no answer within the timeout of {timeout:g} s") from None
        except BaseException:  # Ctrl-C, too
            control.soon(self._stores.withdraw, number)
            raise


def _check(question: wire.Question) -> None:
    """Raise ConfigError for a question that the owner would take for a broken protocol, which ends the link."""
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
