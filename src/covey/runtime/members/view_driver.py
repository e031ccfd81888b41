"""Drives the membership of one generation: its messages, its clock, its disk. On the control loop only."""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from typing import TYPE_CHECKING, Protocol

from covey.base.errors import ConfigError
from covey.proto import changes
from covey.proto.membership import PATIENCE, Membership
from covey.wire import membership as wire
from covey.wire import messages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from covey.base.errors import CoveyError
    from covey.wire.membership import Record, State, View


class ViewHost(Protocol):
    """Who does what a council decides."""

    def send(self, place: int, message: messages.Control) -> None:
        """Give a message to the link with a place, if there is one: a rank of the generation, or its keeper."""

    def freeze(self, number: int) -> None:
        """Stop all operations, then call `ViewDriver.frozen` with this number; until a view comes nothing goes on."""

    def installed(self, view: View, lost: tuple[int, ...]) -> None:
        """Do what the verdicts of a view say, without the `lost`, and thaw."""

    def excluded(self, view: View) -> None:
        """The others go on without this node."""

    def waiting(self, effect: changes.Waiting) -> None:
        """Too few members are heard to agree on a view."""

    def quorum_lost(self, effect: changes.QuorumLost) -> None:
        """Patience is over without a view: everything pending ends."""

    def failed(self, error: CoveyError) -> None:
        """What was promised cannot be made durable, so nothing more can be."""


def place_id(place: int) -> bytes:
    """Return what stands for a member that has no key of its own, and for a keeper."""
    return place.to_bytes(32, "big")


def seats_of(founded: messages.Founded) -> list[wire.Seat]:
    """Return who has which place in a generation, as its records name them."""
    cards = (member.card for member in founded.members)
    return [wire.Seat(card.id or place_id(rank), card.life) for rank, card in enumerate(cards)]


class ViewDriver:
    """One node's part in the views of a generation. Places are the generation's ranks; the keeper's comes after."""

    def __init__(
        self,
        generation: int,
        record: Record,
        place: int,
        life: bytes,
        view_host: ViewHost,
        *,
        has_keeper: bool = False,
        min_size: int = 1,
        quorum: changes.Quorum = changes.Quorum.MAJORITY,
        patience: float = PATIENCE,
        store: Callable[[Record], None] | None = None,
    ) -> None:
        """`store` makes a record durable before it returns."""
        self.generation = generation
        self._view_host, self._store = view_host, store
        self._size = len(record.members)
        ids = [seat.id for seat in record.members]
        keeper = place_id(self._size) if has_keeper else None
        self._ids = ids if keeper is None else [*ids, keeper]
        self._places = {id: place for place, id in enumerate(self._ids)}
        self._core = Membership(
            record,
            self._ids[place],
            life,
            random.Random(secrets.randbits(64)),
            time.monotonic(),
            keeper=keeper,
            min_size=min_size,
            quorum=quorum,
            patience=patience,
        )
        if store is not None:
            store(record)  # a life that ends before its first promise votes in the next one, too
        self._timer: asyncio.TimerHandle | None = None
        self._is_performing = self._is_closed = False

    @property
    def view(self) -> View:
        """The last installed view."""
        return self._core.view

    @property
    def is_member(self) -> bool:
        """Whether this node is in the view."""
        return self._core.is_member

    @property
    def hears_quorum(self) -> bool:
        """Whether a quorum of the view is heard and stays."""
        return self._core.hears_quorum

    def is_leaving(self, place: int) -> bool:
        """Tell whether a member said that it leaves."""
        return place in self._core.leaving

    def leader(self) -> int | None:
        """Return the rank that leads, as far as this node knows."""
        return self._core.leader(time.monotonic())

    # What happens.

    def link_up(self, place: int, life: bytes) -> None:
        """There is a link with this life of who has a place."""
        self._core.link_up(self._ids[place], life, time.monotonic())
        self._perform()

    def link_down(self, place: int) -> None:
        """The link with a place is gone."""
        self._core.link_down(self._ids[place], time.monotonic())
        self._perform()

    def judged(self, place: int, *, is_dead: bool) -> None:
        """Health believes that a member is dead, or trusts it again."""
        self._core.judged(self._ids[place], time.monotonic(), is_dead=is_dead)
        self._perform()

    def vouched(self, place: int) -> None:
        """A keeper says that the process of a member is alive, and not stopped."""
        self._core.vouched(self._ids[place], time.monotonic())

    def disturbed(self, number: int) -> None:
        """Something of the attempt of this number failed that may be nobody's death."""
        self._core.disturbed(number, time.monotonic())
        self._perform()

    def leave(self, *, is_finished: bool = False) -> None:
        """Ask for a view without this node; `ViewHost.excluded` tells that it has come."""
        self._core.leave(time.monotonic(), is_finished=is_finished)
        self._perform()

    def succeed(self, successor: wire.Successor) -> None:
        """Ask for the view that ends this generation; `ViewHost.installed` tells that it has come."""
        self._core.succeed(successor, time.monotonic())
        self._perform()

    def frozen(self, number: int, states: Iterable[State]) -> None:
        """All operations have stopped, in these states."""
        self._core.frozen(number, states, time.monotonic())
        self._perform()

    def received(self, place: int, body: bytes) -> None:
        """Take what a place said; RemoteProtocolError if no member says such a thing."""
        message = wire.decode_membership(body)
        if not isinstance(message, wire.Seated):  # for nodes that do not know their seat
            self._core.received(self._ids[place], message, time.monotonic())
            self._perform()

    def close(self) -> None:
        """Take no more part."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()

    # What follows.

    def _perform(self) -> None:
        if self._is_performing or self._is_closed:
            return  # what an effect brings about is done after it
        self._is_performing = True
        try:
            while effects := self._core.effects():
                for effect in effects:
                    self._do(effect)
        except ConfigError as error:
            self.close()
            self._view_host.failed(error)
        finally:
            self._is_performing = False
        self._wind()

    def _do(self, effect: changes.Effect) -> None:
        match effect:
            case changes.Send(peer, message):
                body = wire.encode_membership(message)
                self._view_host.send(self._places[peer], messages.Agreeing(self.generation, body))
            case changes.Persist(record):
                if self._store is not None:
                    self._store(record)
            case changes.Freeze(number):
                self._view_host.freeze(number)
            case changes.Installed(view, lost):
                self._view_host.installed(view, lost)
            case changes.Excluded(view):
                self._view_host.excluded(view)
            case changes.Waiting():
                self._view_host.waiting(effect)
            case changes.QuorumLost():
                self._view_host.quorum_lost(effect)

    def _wind(self) -> None:
        """Set the clock for the next thing that time brings."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        at = self._core.next_deadline()
        if at != float("inf") and not self._is_closed:
            pause = max(0.001, at - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(pause, self._tick)

    def _tick(self) -> None:
        self._timer = None
        try:
            self._core.tick(time.monotonic())
        finally:
            self._perform()  # and wind the clock again, whatever happened
