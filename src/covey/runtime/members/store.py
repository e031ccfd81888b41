"""Key-value stores of a run, of which all members hold copies: connects `proto.replication` with links and views."""

from __future__ import annotations

import itertools
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeAlias

from covey.base.errors import ClosedError, ConfigError, CoveyError, DeadlineError, PeerLostError, RemoteProtocolError
from covey.base.numbers import Seat
from covey.proto.replication import Answered, Replica
from covey.runtime import loop as control
from covey.wire import messages
from covey.wire import store as wire

if TYPE_CHECKING:
    from collections.abc import Sequence

    from covey.runtime.members.node import Node

Outcome: TypeAlias = "Future[wire.Done]"


class Stores:
    """This process's copies of the stores of its run, and its questions. On the control loop."""

    def __init__(self, node: Node | None) -> None:
        """Begin without members: questions wait for the first view. `node` is None for a process that is alone."""
        self._node = node
        self._me = node.seat if node is not None else Seat(0)
        self._replica = Replica(self._me)
        self._outcomes: dict[int, Outcome] = {}
        """By number of a question."""
        self._is_closed = False
        if node is None:
            self._replica.configure(0, (self._me,), is_first=True)

    def view(self, generation: int, view: int, seats: Sequence[Seat]) -> None:
        """Take the members of a view. The one that is longest in the run orders the changes."""
        is_first = generation == view == 0
        self._replica.configure((generation << 32) + view, tuple(sorted(seats)), is_first=is_first)
        self._perform()

    def ask(self, store_id: int, number: int, question: wire.Question | wire.Open, outcome: Outcome) -> None:
        """Ask a question; `outcome` gets the answer."""
        if self._is_closed or (self._node is not None and self._node.is_closing):
            _fail(outcome, ClosedError("the run is closed, and its store with it; join again"))
            return
        self._outcomes[number] = outcome
        self._replica.ask(store_id, number, question)
        self._perform()
        self._fail_if_lost()

    def withdraw(self, number: int) -> None:
        """Cancel a question: its caller does not wait any more."""
        if self._outcomes.pop(number, None) is not None:
            self._replica.withdraw(number)
            self._perform()

    def heard(self, seat: Seat, posting: messages.Posting) -> None:
        """Take a message of another process."""
        body = wire.decode_body(posting.body)
        if self._node is None or not self._node.peers[seat].is_excluded:
            self._replica.heard(seat, posting.store, posting.number, body)
            self._perform()

    def link_up(self, seat: Seat) -> None:
        """Repeat, on the new link with a process, what may be lost with the last one."""
        self._replica.repeat(seat)
        self._perform()

    def peer_gone(self, seat: Seat) -> None:
        """Note that a process is gone. In a run that continues after losses, the next view says what follows."""
        if self._node is not None and self._node.config.on_loss == "continue":
            return
        self._replica.drop(seat)
        self._perform()
        self._fail_if_lost()

    def close(self) -> None:
        """Fail all questions."""
        self._is_closed = True
        self.fail(ClosedError("the run was closed while its store was asked"))

    def fail(self, error: CoveyError) -> None:
        """Fail the questions that wait now."""
        outcomes, self._outcomes = self._outcomes, {}
        for number, outcome in outcomes.items():
            self._replica.withdraw(number)
            _fail(outcome, error)
        self._perform()

    # Helpers

    def _perform(self) -> None:
        for effect in self._replica.effects():
            if not isinstance(effect, Answered):
                if self._node is not None:
                    body = wire.encode_body(effect.body)
                    self._node.send(Seat(effect.peer), messages.Posting(effect.store, effect.number, body))
                continue
            outcome = self._outcomes.pop(effect.number, None)
            if outcome is None or outcome.done():
                continue
            if isinstance(effect.answer, wire.Done):
                outcome.set_result(effect.answer)
            else:
                _fail(outcome, ConfigError(effect.answer.reason))

    def _fail_if_lost(self) -> None:
        """Fail all questions if the process that orders changes is gone, and no view will name another."""
        owner = self._replica.owner
        if self._node is None or owner is None or owner == self._me or self._node.config.on_loss == "continue":
            return
        peer = self._node.peers[Seat(owner)]
        if not peer.is_gone:
            return
        rank = self._node.generation_table.rank_of(Seat(owner))
        name = f"rank {rank} ({peer.name or 'unnamed'}, on {peer.host_name or 'this host'})"
        error = PeerLostError(
            f"{name}, which orders the changes to the store, {peer.how_it_went()}",
            rank=rank,
            host=peer.host_name,
            operation="store",
        )
        self.fail(error)


def _fail(outcome: Outcome, error: CoveyError) -> None:
    if not outcome.done():
        outcome.set_exception(error)


class StoreClient:
    """Asks one store. On any thread."""

    _numbers = itertools.count(1)

    def __init__(self, stores: Stores, store_id: int) -> None:
        self._stores = stores
        self.store_id = store_id
        """The number of the store, the same on all ranks and unique to it."""

    def ask(self, question: wire.Question | wire.Open, timeout: float) -> wire.Done:
        """Return the answer.

        Raises:
            DeadlineError: there was no answer within `timeout` seconds.
            PeerLostError: in a run that ends with its first loss, the process that orders the changes is gone.
            ConfigError: the store is full, or the question is malformed.
            ClosedError: this process has left the run.
        """
        _check(question)
        outcome: Outcome = Future()
        until = time.monotonic() + timeout
        number = -1
        try:
            number = next(self._numbers)
            control.soon(self._stores.ask, self.store_id, number, question, outcome)
            try:
                return control.result_of(outcome, until - time.monotonic())
            except TimeoutError:
                if outcome.done():  # with a TimeoutError as its outcome
                    raise
                raise DeadlineError(f"no answer within the timeout of {timeout:g} s") from None
        except BaseException:  # Ctrl-C, too
            control.soon(self._stores.withdraw, number)
            raise


def describe(question: wire.Question) -> str:
    """Return a question as errors name it: its kind and up to five of its keys."""
    keys = getattr(question, "keys", ()) or (getattr(question, "key", ""),)
    shown = ", ".join(keys[:5]) + (f" and {len(keys) - 5} more" if len(keys) > 5 else "")
    return f"{type(question).__name__.lower()}({shown})"


def _check(question: wire.Question | wire.Open) -> None:
    """Raise ConfigError for a question that others would take for a broken protocol, which ends the link."""
    try:
        body = wire.encode_body(wire.Submit(0, 0, question))
        wire.decode_body(body)
    except (RemoteProtocolError, OverflowError) as error:
        raise ConfigError(
            f"a store has keys of up to {wire.KEY_LIMIT} characters, values of up to {wire.VALUE_LIMIT} bytes and "
            f"numbers of 64 bits: {error.__cause__ or error}"
        ) from None
    if len(body) > wire.BODY_LIMIT:
        raise ConfigError(f"a store takes {wire.BODY_LIMIT} bytes at a time, not {len(body)}; use several calls")
