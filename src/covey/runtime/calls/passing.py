"""Handles in the values of calls: listed with the payload when it is sent, claimed before anything reads it.

A payload lists the handles that its value has, so that the receiver can claim them as soon as they come, and whether or
not a value is ever made of it. What was claimed belongs to the payload until the value is decoded: a payload that is
dropped, because its call was refused or cancelled, drops its handles.

All messages about handles go through the effects of the calls (`CallService`), which are performed in order: a node
that has a handle has told the owner so before it calls its object, and drops it after that.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Protocol

from covey.base.errors import CallRefusedError, RemoteProtocolError
from covey.base.numbers import Seat
from covey.proto.calling.effects import SendMessage
from covey.runtime.calls.objects import Handle, HandleOwner
from covey.wire import calls as wire

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from covey.base.errors import CoveyError
    from covey.proto.calling.effects import CountReference, GiveUpHandles, TakeHandles
    from covey.runtime.calls.objects import ExportedObjects


class PassingCalls(HandleOwner, Protocol):
    """What the passing of handles needs of the calls of its node."""

    def tell_owner(self, effect: SendMessage) -> None:
        """Send a message about a handle after all that wait to be sent. On any thread; sends nothing itself."""

    def let_go(self, objects: list[Any]) -> None:
        """Drop objects of the program, whose destructors may run then."""

    def broke_protocol(self, peer: Seat, error: CoveyError) -> None:
        """Have nothing more to do with a peer."""


class HandlePassing:
    """The handles on their way from and to one node. Effects are performed by one thread at a time."""

    def __init__(
        self, calls: PassingCalls, seat: Seat, exported: ExportedObjects, is_member: Callable[[Seat], bool]
    ) -> None:
        """`is_member` tells whether a seat is that of a node of the run."""
        self._calls, self._seat, self._exported, self._is_member = calls, seat, exported, is_member
        self._claimed: dict[int, tuple[weakref.ref[wire.CallPayload], list[Handle | None]]] = {}
        """By the identity of a payload that has come: its handles, until its value is decoded."""

    def share(self, peer: Seat, handles: Sequence[wire.PassedHandle]) -> None:
        """Count handles that are about to be sent to a peer. On the thread that sends them.

        Raises:
            CallRefusedError: the object of one was released; nothing is counted.
        """
        for position, handle in enumerate(handles):
            if handle.owner == self._seat:
                try:
                    self._exported.hand_out(handle.target, peer)
                except CallRefusedError:
                    self._withdraw(peer, handles[:position])
                    raise
            elif handle.owner != peer:
                share = wire.ReferenceShare(handle.target, peer)
                self._calls.tell_owner(SendMessage(handle.owner, share))

    def give_up(self, effect: GiveUpHandles) -> None:
        """Withdraw the handles of a payload that is not sent."""
        self._withdraw(Seat(effect.peer), effect.payload.handles)

    def _withdraw(self, peer: Seat, handles: Sequence[wire.PassedHandle]) -> None:
        for handle in handles:
            if handle.owner == self._seat:
                self._calls.let_go(self._exported.take_back(handle.target, peer))
            elif handle.owner != peer:
                share = wire.ReferenceShare(handle.target, peer, is_withdrawn=True)
                self._calls.tell_owner(SendMessage(handle.owner, share))

    def take(self, effect: TakeHandles) -> None:
        """Claim the handles of a payload that has come."""
        peer, payload = Seat(effect.peer), effect.payload
        claimed = [self._claim(peer, handle) for handle in payload.handles]
        number = id(payload)

        def forget(_: object) -> None:
            self._claimed.pop(number, None)

        self._claimed[number] = weakref.ref(payload, forget), claimed

    def _claim(self, giver: Seat, handle: wire.PassedHandle) -> Handle | None:
        """Return a handle, or None for an object that was released, or whose node is not known here."""
        owner = Seat(handle.owner)
        if owner == self._seat:
            if not self._exported.took_back(handle.target, giver, handle.key):
                return None
        elif not self._is_member(owner):
            return None
        elif owner != giver:
            claim = wire.ReferenceClaim(handle.target, giver, handle.key)
            self._calls.tell_owner(SendMessage(owner, claim))
        return Handle(self._calls, owner, handle.target, "object", handle.key)

    def taken(self, payload: wire.CallPayload) -> Sequence[Handle | None]:
        """Return the handles of a payload, for what decodes its value: it has them alone from now on."""
        found = self._claimed.pop(id(payload), None)
        return () if found is None else found[1]

    def count(self, effect: CountReference) -> None:
        """Count what another node says of handles of this one's objects."""
        try:
            self._calls.let_go(self._exported.count(Seat(effect.peer), effect.message))
        except RemoteProtocolError as error:
            self._calls.broke_protocol(Seat(effect.peer), error)
