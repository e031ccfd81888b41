"""The leader's part of `proto.checkpointing` in one epoch: it decides when a checkpoint begins, and when it is over."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Final

from covey.wire import checkpoint as wire
from covey.wire.messages import MAX_MEMBERS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

FIRST_MARGIN: Final = 1
"""How far the first proposal is beyond the member that is furthest."""
MARGIN_FACTOR: Final = 4
"""How much further each proposal is than the last one that came too late: members may issue operations fast."""
MOST_MARGIN: Final = 1 << 40


class _Stage(enum.Enum):
    """What the leader waits for."""

    IDLE = enum.auto()
    """For a member that wants a checkpoint, or knows of one."""
    COLLECT = enum.auto()
    """For all members to tell where they stand."""
    PROPOSE = enum.auto()
    """For all members to answer the proposal."""
    BEGIN = enum.auto()
    """For all members to save."""
    END = enum.auto()
    """For all members to know that the checkpoint is over."""


class CheckpointLeader:
    """What the leader knows of the members, and what it has told them."""

    def __init__(self, members: tuple[int, ...], send: Callable[[int, wire.FromLeader], None]) -> None:
        self._members, self._send = members, send
        self._stage = _Stage.IDLE
        self._said: wire.FromLeader = wire.Query()
        """What members have to answer in this stage."""
        self._standings: dict[int, wire.Standing] = {}
        """By member: what it said last."""
        self._round, self._margin = 0, FIRST_MARGIN

    @property
    def is_waiting(self) -> bool:
        """Whether members have not answered. A member that saves has answered, and tells by itself when it is done."""
        return self._stage is not _Stage.IDLE and any(True for _ in self._silent())

    def standing(self, member: int, standing: wire.Standing) -> None:
        """Take what a member says of itself, and do what follows."""
        if self._stage is _Stage.IDLE:
            if standing.wanted is None and standing.held is None:
                return
            self._standings = {member: standing}
            self._enter(_Stage.COLLECT, wire.Query())
        else:
            self._standings[member] = standing
        if any(True for _ in self._silent()):
            return
        standings = self._standings.values()
        if self._stage is _Stage.PROPOSE and isinstance(self._said, wire.ProposeStart):
            proposal = self._said
            if all(_accepts(each, proposal) for each in standings):
                self._begin(proposal.order, proposal.sequence)
            else:
                self._margin = min(self._margin * MARGIN_FACTOR, MOST_MARGIN)
                self._propose(proposal.order)
        elif self._stage is not _Stage.BEGIN:
            self._choose()
        elif all(each.held is not None and each.held.is_saved for each in standings):
            self._end_begun()

    def repeat(self) -> None:
        """Say again what members have not answered."""
        if self._stage is not _Stage.IDLE:
            for member in list(self._silent()):
                self._send(member, self._said)

    # Stages

    def _enter(self, stage: _Stage, said: wire.FromLeader) -> None:
        self._stage, self._said = stage, said
        self.repeat()

    def _silent(self) -> Iterable[int]:
        """Yield the members that have not answered what they were told last."""
        said = self._said
        for member in self._members:
            standing = self._standings.get(member)
            if standing is None:
                yield member
            elif isinstance(said, wire.ProposeStart):
                if standing.round != said.round:
                    yield member
            elif isinstance(said, wire.Begin):
                if standing.held is None or not standing.held.has_begun:
                    yield member
            elif isinstance(said, wire.Over) and said.order.id not in standing.ids:
                yield member

    def _choose(self) -> None:
        """Go on with what members know, now that all have told: one that is over, one that has begun, one to begin."""
        standings = [self._standings[member] for member in self._members]
        ended = {name for each in standings for name in each.ids}
        helds = [each.held for each in standings if each.held is not None]
        orders = [wire.CheckpointOrder(held.id, held.path) for held in helds]
        orders += [each.wanted for each in standings if each.wanted is not None]
        over = next((order for order in orders if order.id in ended), None)
        begun = next((held for held in helds if held.has_begun), None)
        if over is not None:
            known = (each.over for each in standings if each.over is not None and each.over.order.id == over.id)
            self._enter(_Stage.END, next(known, wire.Over(over)))
        elif begun is not None:
            self._begin(wire.CheckpointOrder(begun.id, begun.path), begun.sequence)
        elif orders:
            self._margin = FIRST_MARGIN
            self._propose(orders[0])  # one that a member holds, if there is one: its requester was told its name
        else:
            self._stage = _Stage.IDLE
            self._standings.clear()

    def _propose(self, order: wire.CheckpointOrder) -> None:
        self._round += 1
        furthest = max(standing.issued for standing in self._standings.values())
        self._enter(_Stage.PROPOSE, wire.ProposeStart(self._round, order, furthest + self._margin))

    def _begin(self, order: wire.CheckpointOrder, sequence: int) -> None:
        self._enter(_Stage.BEGIN, wire.Begin(order, sequence))
        if all(each.held is not None and each.held.is_saved for each in self._standings.values()):
            self._end_begun()

    def _end_begun(self) -> None:
        """End the checkpoint that all members have saved, or could not save."""
        helds = [(member, self._standings[member].held) for member in self._members]
        held = next(held for _, held in helds if held is not None)
        failed = [wire.Unsaved(member, each.error) for member, each in helds if each is not None and each.error]
        self._enter(_Stage.END, wire.Over(wire.CheckpointOrder(held.id, held.path), tuple(failed[:MAX_MEMBERS])))


def _accepts(standing: wire.Standing, proposal: wire.ProposeStart) -> bool:
    held = standing.held
    return held is not None and (held.id, held.sequence) == (proposal.order.id, proposal.sequence)
