"""Connects `proto.membership` with one generation: its messages, its effects, and the record on disk.

On the control loop only.
"""

from __future__ import annotations

import random
import secrets
import time
from typing import TYPE_CHECKING, Protocol

from covey.proto import changes
from covey.proto.membership import VIEW_PATIENCE, Membership
from covey.runtime.counters import process
from covey.runtime.tasks import CoreDriver
from covey.wire import membership as wire
from covey.wire import messages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from covey.base.errors import ConfigError, CoveyError
    from covey.wire.membership import Record, State, View


class ViewHost(Protocol):
    """Performs the effects of a view driver."""

    def send(self, rank: int, message: messages.Control, *, wakes: bool) -> None:
        """Send a message to a rank of the generation, or to its keeper, if there is a link; one that `wakes`, too."""

    def freeze(self, number: int) -> Iterable[State] | None:
        """Stop all operations until the next view, and return their states.

        If some take a while to stop, return None, and call `ViewDriver.frozen` with this number once all have stopped.
        """

    def accepted(self) -> None:
        """Note that this node is about to say that it accepts a view after the last one."""

    def installed(self, view: View, lost: tuple[int, ...]) -> None:
        """Do what the verdicts of a view say, exclude the `lost` ranks, and go on."""

    def excluded(self, view: View) -> None:
        """End everything: the other members go on without this node."""

    def waiting(self, effect: changes.QuorumAwaited) -> None:
        """Report that too few members are heard to agree on a view."""

    def quorum_lost(self, effect: changes.QuorumLost) -> None:
        """End everything pending: there was no view within the patience."""

    def failed(self, error: CoveyError) -> None:
        """End everything: a promise could not be made durable, so this node can make no more."""


def rank_id(rank: int) -> bytes:
    """Return the id of a member that has no key of its own, or of a keeper."""
    return rank.to_bytes(32, "big")


def member_keys(founded: messages.Founded) -> list[wire.MemberKey]:
    """Return the members of a generation by rank, as records name them."""
    cards = (member.card for member in founded.members)
    return [wire.MemberKey(card.id or rank_id(rank), card.life) for rank, card in enumerate(cards)]


class ViewDriver:
    """One node's part in the views of a generation. A keeper has the rank after the last member's."""

    def __init__(
        self,
        generation: int,
        record: Record,
        rank: int,
        life: bytes,
        view_host: ViewHost,
        *,
        has_keeper: bool = False,
        min_size: int = 1,
        quorum: changes.Quorum = changes.Quorum.MAJORITY,
        patience: float = VIEW_PATIENCE,
        store: Callable[[Record], None] | None = None,
    ) -> None:
        """Begin at `record`, which `store` makes durable before it returns."""
        self.generation = generation
        self._view_host, self._store = view_host, store
        self._size = len(record.members)
        ids = [seat.id for seat in record.members]
        keeper = rank_id(self._size) if has_keeper else None
        self._ids = ids if keeper is None else [*ids, keeper]
        self._ranks = {id: rank for rank, id in enumerate(self._ids)}
        self._core = Membership(
            record,
            self._ids[rank],
            life,
            random.Random(secrets.randbits(64)),
            time.monotonic(),
            keeper=keeper,
            min_size=min_size,
            quorum=quorum,
            patience=patience,
        )
        if store is not None:
            store(record)  # so that a later life votes even if this one ends before its first promise
        self._driver = CoreDriver(self._core, self)

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
        """Whether a quorum of the view is heard and does not leave."""
        return self._core.hears_quorum

    @property
    def is_electing(self) -> bool:
        """Whether a ballot about the next view holds up operations."""
        return self._core.is_electing

    def is_leaving(self, rank: int) -> bool:
        """Tell whether a member said that it leaves."""
        return rank in self._core.leaving

    @property
    def has_finished(self) -> bool:
        """Whether a member left because its program had ended."""
        return self._core.view.is_finished or bool(self._core.finished)

    def leader(self) -> int | None:
        """Return the leading rank, as far as this node knows."""
        return self._core.leader(time.monotonic())

    def expected_leader(self) -> int | None:
        """Return the leading rank, or the one that leads next, as far as this node knows."""
        return self._core.expected_leader(time.monotonic())

    # Inputs

    def link_up(self, rank: int, life: bytes) -> None:
        """Note a link with this life of a rank's node."""
        self._core.link_up(self._ids[rank], life, time.monotonic())
        self._driver.settle()

    def link_down(self, rank: int) -> None:
        """Note that the link with a rank ended."""
        self._core.link_down(self._ids[rank], time.monotonic())
        self._driver.settle()

    def judged(self, rank: int, *, is_dead: bool) -> None:
        """Note that health gave a member up, or trusts it again."""
        self._core.judged(self._ids[rank], time.monotonic(), is_dead=is_dead)
        self._driver.settle()

    def vouched(self, rank: int) -> None:
        """Note that a keeper says that the process of a member is alive and not stopped."""
        self._core.vouched(self._ids[rank], time.monotonic())

    def disturbed(self, number: int) -> None:
        """Ask for a view because something in the attempt of this number failed, though perhaps no member is lost."""
        self._core.disturbed(number, time.monotonic())
        self._driver.settle()

    def leave(self, *, is_finished: bool = False) -> None:
        """Ask for a view without this node; `ViewHost.excluded` is called when it is decided."""
        self._core.leave(time.monotonic(), is_finished=is_finished)
        self._driver.settle()

    def succeed(self, successor: wire.Successor) -> None:
        """Ask for the view that ends this generation; `ViewHost.installed` is called when it is decided."""
        self._core.succeed(successor, time.monotonic())
        self._driver.settle()

    def frozen(self, number: int, states: Iterable[State]) -> None:
        """Note that all operations have stopped, in these states, after `ViewHost.freeze` returned None."""
        self._core.frozen(number, states, time.monotonic())
        self._driver.settle()

    def received(self, rank: int, body: bytes) -> None:
        """Take a message from a rank; RemoteProtocolError if it breaks the protocol."""
        message = wire.decode_membership(body)
        if not isinstance(message, wire.Seated):  # meant for nodes that do not know their seat
            self._core.received(self._ids[rank], message, time.monotonic())
            self._driver.settle()

    def close(self) -> None:
        """Take no more part."""
        self._driver.close()

    # Effects

    def perform(self, effect: changes.Effect) -> None:
        """Perform one effect of the core."""
        match effect:
            case changes.SendToNode(peer, message):
                body = wire.encode_membership(message)
                # The leader and the neighbours hear of trouble: enough to start a ballot, which asks all members.
                wakes = not isinstance(message, wire.Trouble)
                self._view_host.send(self._ranks[peer], messages.Agreeing(self.generation, body), wakes=wakes)
            case changes.Persist(record):
                if self._store is not None:
                    self._store(record)
                if record.accepted is not None:
                    self._view_host.accepted()
            case changes.Freeze(number):
                process.elections += 1
                if (states := self._view_host.freeze(number)) is not None:
                    self._core.frozen(number, states, time.monotonic())
            case changes.Installed(view, lost):
                self._view_host.installed(view, lost)
            case changes.Excluded(view):
                self._view_host.excluded(view)
            case changes.QuorumAwaited():
                self._view_host.waiting(effect)
            case changes.QuorumLost():
                self._view_host.quorum_lost(effect)

    def settled(self) -> None:
        """All that follows from an effect is done by then."""

    def failed(self, error: ConfigError) -> None:
        """Take no more part: a promise could not be written to disk."""
        self.close()
        self._view_host.failed(error)
