"""One member's part in beginning a checkpoint of the run after the same operation on all ranks.

The first member of an *epoch* (the members of a view, in order) is its *leader*. It asks all members where they are,
proposes a sequence number that none of them has reached, and begins the checkpoint when all have accepted. A program
sees the checkpoint (`state_at`) at the first look at which it has issued that many operations. A look between the
acceptance of a proposal and its outcome has to wait, and nothing else does: operations go on.

All ranks issue the same operations in the same order, so "as many operations issued" is the same point of the program
on all ranks, whether operations are blocking or not, and whatever happens to them.

Invariants:

1. If the programs of two members of a view look after the same number of operations of a generation, both see the same
   checkpoint, or none, unless they have ended it. A member accepts a number only if no look can have been made at it,
   makes all later looks at it wait, and the checkpoint begins only when all members have accepted.
2. A checkpoint that has begun at one living member begins at all: the leader of a later epoch first hears from all
   members, and finds it. None of them heeds an earlier leader after it has told the later one where it stands.
3. One checkpoint at a time: the leader proposes none before all members know that the last one is over.
4. A checkpoint whose name was given to a requester takes place while a member that accepted a number for it is in the
   run: leaders go on with one that a member holds, also in the next generation, where it begins again.

Members repeat what they say until it has an effect, so a lost message delays, and does no more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from covey.base.errors import RemoteProtocolError
from covey.proto.checkpoint_leader import CheckpointLeader
from covey.wire import checkpoint as wire

if TYPE_CHECKING:
    from collections.abc import Callable

LOST_MESSAGE_SECONDS: Final = 1.0
"""After this time a message counts as lost."""
NO_SEQUENCE: Final = (1 << 53) - 1
"""The sequence number of a checkpoint that has none: more operations than any program issues."""
GENERATION_SHIFT: Final = 32
"""An epoch is the number of a generation, and in the lower bits that of a view."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that all ranks are to save now."""

    id: str
    path: str
    """As it was requested; empty if the request has none."""
    since: int
    """The number of operations after which it began, the same on all ranks."""


class SendToMember(NamedTuple):
    """Send a message to a member."""

    peer: int
    message: wire.CheckpointMessage


class Begun(NamedTuple):
    """A checkpoint has begun on all members."""

    checkpoint: Checkpoint


class CheckpointEnded(NamedTuple):
    """A checkpoint is over on all members; `failed` are those that could not save it."""

    order: wire.CheckpointOrder
    failed: tuple[wire.Unsaved, ...]


class Named(NamedTuple):
    """The requests that wait here are for this checkpoint."""

    id: str


class LookAgain(NamedTuple):
    """Looks that wait may have an answer."""


Effect = SendToMember | Begun | CheckpointEnded | Named | LookAgain


class Checkpointing:
    """The checkpoints of a run at one member; members are known by their seats. A `TimedCore`."""

    no_limit: Final = NO_SEQUENCE
    """The limit while no checkpoint is under way."""

    def __init__(self, me: int, issued: Callable[[], int]) -> None:
        """Begin without an epoch. `issued` returns how many operations the program has issued in this generation."""
        self._me, self._issued = me, issued
        self.limit = NO_SEQUENCE
        """A program that has issued fewer operations need not call `state_at`: no checkpoint is pending for it."""
        self._epoch, self._members = -1, ()  # type: tuple[int, tuple[int, ...]]
        self._round = 0
        self._wanted: wire.CheckpointOrder | None = None
        self._held: wire.Held | None = None
        self._over: wire.Over | None = None
        self._ids: list[str] = []
        """The last checkpoints that are over."""
        self._leader: CheckpointLeader | None = None
        """If this member leads the epoch."""
        self._early: dict[int, tuple[int, wire.CheckpointMessage]] = {}
        """By member: its last message of an epoch that this member does not know yet."""
        self._mine: list[wire.CheckpointMessage] = []
        """Messages of this member to itself."""
        self._is_delivering = False
        self._retry_at = math.inf
        self._effects: list[Effect] = []

    # The program

    @property
    def has_begun(self) -> bool:
        """Whether a checkpoint has begun here and is not over on all members."""
        return self._held is not None and self._held.has_begun

    def state_of(self, checkpoint_id: str) -> str:
        """Return "requested", "pending" or "over", as far as this member knows; empty if it knows no such one."""
        held = self._held
        if checkpoint_id in self._ids:
            return "over"
        if held is not None and held.id == checkpoint_id:
            return "pending" if held.has_begun else "requested"
        return "requested" if self._wanted is not None and self._wanted.id == checkpoint_id else ""

    def failures(self, checkpoint_id: str) -> tuple[wire.Unsaved, ...]:
        """Return which members could not save a checkpoint; nothing if it is not the last one that ended."""
        return self._over.failed if self._over is not None and self._over.order.id == checkpoint_id else ()

    def state_at(self, issued: int) -> Checkpoint | bool | None:
        """Return the checkpoint that a look after so many operations sees, or None; False: the look has to wait."""
        held = self._held
        if held is None or issued < held.sequence or held.is_saved:
            return None
        return Checkpoint(held.id, held.path, held.sequence) if held.has_begun else False

    def request(self, order: wire.CheckpointOrder, now: float) -> str | None:
        """Ask for a checkpoint; return the name of the one that is under way, or of this one if it is over.

        None: `Named` will say which one it is, this one or another member's.
        """
        if order.id in self._ids:
            return order.id
        if self._held is not None:
            return self._held.id
        if self._wanted is None:
            self._wanted = order
            self._report(now)
        return None

    def end(self, error: str, now: float) -> bool:
        """Note that the program has saved the checkpoint that it sees, or why not; False if it sees none."""
        if not isinstance(self.state_at(self._issued()), Checkpoint):
            return False
        held = self._held
        assert held is not None
        self._hold(wire.Held(held.id, held.path, held.sequence, True, True, error))
        self._report(now)
        return True

    # The other members

    def configure(self, epoch: int, members: tuple[int, ...], now: float) -> None:
        """Take the members of a view, in order."""
        if epoch <= self._epoch:
            return
        held = self._held
        if held is not None and epoch >> GENERATION_SHIFT != self._epoch >> GENERATION_SHIFT:
            self._hold(wire.Held(held.id, held.path, NO_SEQUENCE, False))
        self._epoch, self._members, self._round = epoch, members, 0
        leads = bool(members) and members[0] == self._me
        self._leader = CheckpointLeader(members, self._to) if leads else None
        if self._wanted is not None or self._held is not None:
            self._report(now)
        early, self._early = self._early, {}
        for peer, (its_epoch, message) in early.items():
            self.heard(peer, its_epoch, message, now)

    def heard(self, peer: int, epoch: int, message: wire.CheckpointMessage, now: float) -> None:
        """Take a message of another member.

        Raises:
            RemoteProtocolError: the leader begins a checkpoint at a number that this member has not accepted.
        """
        if epoch > self._epoch:
            self._early[peer] = epoch, message
        elif epoch == self._epoch and peer in self._members:
            self._take(peer, message, now)
            self._deliver(now)

    def repeat(self, peer: int, now: float) -> None:
        """Repeat what may be lost with the last link to a member."""
        if self._members and peer in (self._members[0], *(self._members if self._leader is not None else ())):
            self._retry(now)

    # The core

    def effects(self) -> list[Effect]:
        """Return what to do, in order, and clear it."""
        effects, self._effects = self._effects, []
        return effects

    def next_deadline(self) -> float:
        """Return when to call `tick`."""
        return self._retry_at

    def tick(self, now: float) -> None:
        """Repeat what has had no effect."""
        if now >= self._retry_at:
            self._retry(now)

    # Helpers

    @property
    def _is_waiting(self) -> bool:
        """Whether this member waits for the leader."""
        held = self._held
        return self._wanted is not None or (held is not None and (held.is_saved or not held.has_begun))

    def _retry(self, now: float) -> None:
        if self._leader is not None:
            self._leader.repeat()
        if self._is_waiting:
            self._report(now)
        self._deliver(now)

    def _report(self, now: float) -> None:
        """Tell the leader where this member stands."""
        if self._members:
            standing = wire.Standing(
                self._issued(), self._round, self._wanted, self._held, self._over, tuple(self._ids)
            )
            self._to(self._members[0], standing)
            self._deliver(now)

    def _to(self, peer: int, message: wire.CheckpointMessage) -> None:
        if peer == self._me:
            self._mine.append(message)
        else:
            self._effects.append(SendToMember(peer, message))

    def _deliver(self, now: float) -> None:
        """Take this member's messages to itself, and set the time of the next repetition."""
        if self._is_delivering:
            return
        self._is_delivering = True
        try:
            while self._mine:
                self._take(self._me, self._mine.pop(0), now)
        finally:
            self._is_delivering = False
        is_open = self._is_waiting or (self._leader is not None and self._leader.is_waiting)
        self._retry_at = now + LOST_MESSAGE_SECONDS if is_open else math.inf

    def _take(self, peer: int, message: wire.CheckpointMessage, now: float) -> None:
        if isinstance(message, wire.Standing):
            if self._leader is not None:
                self._leader.standing(peer, message)
            return
        if peer != self._members[0]:
            return  # only the leader says anything else
        match message:
            case wire.ProposeStart():
                self._proposed(message)
            case wire.Begin(order, sequence):
                self._begin(order, sequence)
            case wire.Over():
                self._end(message)
            case wire.Query():
                pass
        self._report(now)

    def _proposed(self, message: wire.ProposeStart) -> None:
        order, sequence = message.order, message.sequence
        if message.round <= self._round or self.has_begun or order.id in self._ids:
            return  # repeated, or the leader does not know yet what the report says
        self._round = message.round
        # The limit first: a look that the program makes after `issued` was read then waits.
        self._hold(wire.Held(order.id, order.path, sequence, False))
        if self._issued() >= sequence:
            self._hold(wire.Held(order.id, order.path, NO_SEQUENCE, False))
        self._name(order.id)

    def _begin(self, order: wire.CheckpointOrder, sequence: int) -> None:
        held = self._held
        if order.id in self._ids or self.has_begun:
            return
        if held is None or (held.id, held.sequence) != (order.id, sequence):
            raise RemoteProtocolError(
                f"checkpoint {order.id} begins after operation {sequence}, which was not accepted"
            )
        self._hold(wire.Held(order.id, order.path, sequence, True))
        self._effects.append(Begun(Checkpoint(order.id, order.path, sequence)))

    def _end(self, over: wire.Over) -> None:
        if over.order.id in self._ids:
            return
        self._ids = [*self._ids, over.order.id][-wire.IDS_LIMIT :]
        self._over = over
        if self._held is not None and self._held.id == over.order.id:
            self._hold(None)
            self._effects.append(CheckpointEnded(over.order, over.failed))
        if self._wanted is not None and self._wanted.id == over.order.id:
            self._name(over.order.id)

    def _hold(self, held: wire.Held | None) -> None:
        self._held = held
        self.limit = NO_SEQUENCE if held is None or held.is_saved else held.sequence
        self._effects.append(LookAgain())

    def _name(self, checkpoint_id: str) -> None:
        """Let requests of this process be for this checkpoint."""
        self._wanted = None
        self._effects.append(Named(checkpoint_id))
