"""One generation of a run: its members, the views they agree on, and the groups that views stop and resume.

Ranks of a generation are those of its first group. Each rank belongs to a *seat*, a number that its process keeps while
it is in the run. Methods run on the control loop unless they say otherwise.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
import time
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from covey.base.numbers import Rank
from covey.base.text import LISTED_ITEMS, listed_briefly, listed_ranks
from covey.proto.ballot import first_record
from covey.proto.changes import Quorum
from covey.proto.overlay import topology_of
from covey.proto.views import check_room, forget_oldest, is_quorum
from covey.runtime import loop as control
from covey.runtime.events import Event
from covey.runtime.fault import Fault
from covey.runtime.peers.remote_process import PeerEvent
from covey.runtime.views.view_driver import ViewDriver, member_keys
from covey.wire.membership import Bound, Seated, State, Successor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from covey.base.config import GroupConfig
    from covey.base.errors import CoveyError
    from covey.base.numbers import Seat
    from covey.proto.changes import QuorumAwaited, QuorumLost
    from covey.runtime.events import Events
    from covey.runtime.links.keeper_link import KeeperLink
    from covey.runtime.peers.peer_table import MemberLinks, PeerTable
    from covey.runtime.peers.remote_process import RemoteProcess
    from covey.wire import messages
    from covey.wire.membership import Record, View

logger = logging.getLogger("covey")

UNHEARD: Final = "other members have given it up"
"""Why a member is lost of which this node has heard nothing else."""


class Freezable(Protocol):
    """The operations of one group that survives losses, which views stop and resume."""

    @property
    def group(self) -> int:
        """The id of the group."""

    @property
    def size(self) -> int:
        """The number of ranks in the group, including lost ones."""

    @property
    def view_number(self) -> int:
        """The number of the view in which the operations run."""

    def halt(self, number: int) -> State | None:
        """Stop the current operation for the view `number`; return its state, or None if stopping takes a while."""

    def install(self, view: View) -> None:
        """Resume in this view."""


class ViewListener(Protocol):
    """What follows from views for the groups, lanes and state of this process. Called on the control loop."""

    def begun(self) -> None:
        """This process is in the run, and its first generation has begun."""

    def view(self, generation: int, number: int, seats: Sequence[Seat], tie_breaker: Seat) -> None:
        """A view has these members; half of them can decide the next one if the tie-breaker is among them."""

    def sealed(self) -> None:
        """This process has accepted another view after the last one, or that one names the next generation."""

    def without_views(self, seats: Sequence[Seat]) -> None:
        """The run has these members, and is too large for views."""

    def link_up(self, seat: Seat) -> None:
        """A process has a new link after its last one ended."""

    def link_lost(self, seat: Seat) -> None:
        """The link with a process has ended; what was said on it may be lost."""

    def gone(self, peer: RemoteProcess) -> None:
        """Nobody waits for a process any more."""

    def excluded(self, seat: Seat) -> None:
        """A view goes on without a process."""

    def generation_ended(self, generation: Generation, fault: Fault, *, only_surviving: bool) -> None:
        """This process is in a generation no more; with `only_surviving`, groups that need no views go on."""

    def run_failed(self, fault: Fault) -> None:
        """The run has to end now, with this error."""

    def heard_early(self, seat: Seat, message: messages.Control) -> None:
        """A process that has got a seat sent this before."""


class Judge(Protocol):
    """Follows the members of the current generation, and acts when one of them is lost."""

    def watch(self, seats: Sequence[Seat]) -> None:
        """Judge the members of a new generation."""

    def exclude(self, seat: Seat) -> None:
        """Go on without a process, as a view says."""


@dataclass(frozen=True)
class RunParts:
    """What the generations of one run share."""

    run: str
    config: GroupConfig
    floor: int
    """No view has fewer members."""
    store: Callable[[Bound], None] | None
    """Makes durable what this node has promised."""
    peers: PeerTable
    links: MemberLinks
    events: Events
    judge: Judge
    listener: ViewListener


class Generation:
    """The agreed members of a run, until the next generation."""

    def __init__(
        self,
        parts: RunParts,
        founded: messages.Founded,
        *,
        keeper: KeeperLink | None = None,
        record: Record | None = None,
    ) -> None:
        """Begin a generation of which this node is a member; `keeper` is the link with the one that decides its views.

        `record` is what this node has promised in it already, if it voted before it knew that it is a member.
        """
        self._parts, self.founded = parts, founded
        self._peers, self._keeper = parts.peers, keeper
        self.is_current = True
        """Whether no later generation has begun here. In an earlier one, this node only votes."""
        self.number = founded.generation
        self.seats = tuple(member.seat for member in founded.members)
        """By rank."""
        config = parts.config
        self.patience = config.patience
        # Where a loss ends the group, every rank has to notice.
        may_be_sparse = parts.links.can_rest and founded.on_loss == "continue"
        self.topology = topology_of(config.topology, len(self.seats)) if may_be_sparse else "full"
        """Which links stay awake."""
        self.rank = Rank(self.seats.index(parts.peers.seat))
        self.ranks = {seat: Rank(rank) for rank, seat in enumerate(self.seats)}
        """By seat."""
        self._lock = threading.Lock()
        self._groups: weakref.WeakValueDictionary[int, Freezable] = weakref.WeakValueDictionary()
        self._dismissed: dict[int, State] = {}
        self._is_frozen = False
        self._freeze_number = -1
        self._waiting: set[int] = set()
        self._states: dict[int, State] = {}
        self.is_over = False
        """Whether this node is in no view of it any more."""
        self.fault: Fault | None = None
        """Why, once it is over."""
        self._left = threading.Event()
        self._ended = threading.Event()
        """Set when a view names the next generation, or this node is in no view any more."""
        if record is None:
            record = first_record(
                member_keys(founded), founded.lineage, anchor=founded.tie_breaker, has_keeper=founded.is_kept
            )
        self.view = record.view
        self.view_driver = ViewDriver(
            self.number,
            record,
            self.rank,
            founded.members[self.rank].card.life,
            self,
            has_keeper=founded.is_kept,
            min_size=parts.floor,
            quorum=Quorum(config.quorum),
            patience=config.patience,
            store=None if parts.store is None else functools.partial(self._keep, parts.store),
        )

    def _keep(self, store: Callable[[Bound], None], record: Record) -> None:
        store(Bound(self.number, record, self.founded.origin, self.founded.tie_breaker))

    @property
    def is_sparse(self) -> bool:
        """Whether links between most members rest."""
        return self.topology != "full"

    def open(self) -> None:
        """Begin to agree on views with the members that have links."""
        for rank, seat in enumerate(self.seats):
            peer = self._peers.get(seat)
            if peer is not None and peer.link is not None:
                self.view_driver.link_up(rank, peer.life)
        if self._keeper is not None and self.founded.is_kept:
            self.view_driver.link_up(len(self.seats), b"")

    def ranks_of(self, seats: Sequence[Seat]) -> tuple[Rank, ...]:
        """Return the ranks of some seats."""
        return tuple(self.ranks[seat] for seat in seats)

    def rank_of(self, seat: Seat) -> Rank | None:
        """Return the rank of a seat, or None if the seat is not in this generation."""
        return self.ranks.get(seat)

    # Groups, on any thread

    def enroll(self, operations: Freezable) -> None:
        """Stop and resume the operations of a group with every view from now on."""
        with self._lock:
            check_room((each.size for each in self._groups.values()), operations.size)
            self._groups[operations.group] = operations
            if self._is_frozen:
                operations.halt(-1)  # it has begun no operation, so its state need not be reported
            elif operations.view_number != self.view.number:
                operations.install(self.view)  # installed while the group was being made

    def dismiss(self, group: int, state: State) -> None:
        """Report a group as closed here in later views, in case other ranks try to go on with it."""
        with self._lock:
            if self._groups.pop(group, None) is None:
                return
            self._remember(state)
            is_awaited = group in self._waiting
        if is_awaited:
            control.soon(self.halted, group, -1, state)

    def drop(self, group: int, ranks: tuple[int, ...]) -> None:
        """Report a group as given up: the program has dropped it without closing it."""
        with self._lock:
            if group not in self._dismissed:
                self._remember(State(group, ranks, 0, gives_up=True))

    def _remember(self, state: State) -> None:
        self._dismissed[state.group] = state
        forget_oldest(self._dismissed)

    def leave(self, within: float, *, is_finished: bool = False) -> bool:
        """Ask for a view without this node; return whether it came within so many seconds. Not on the control loop.

        With `is_finished`, other members get a moment to finish too, so that all learn that the run is over.
        """
        if not self._left.is_set():
            control.soon(functools.partial(self.withdraw, is_finished=is_finished))
        return self._left.wait(within)

    def withdraw(self, *, is_finished: bool = False) -> None:
        """Ask for a view without this node."""
        if not self.is_over:
            self.view_driver.leave(is_finished=is_finished)

    def end_with(self, successor: Successor, within: float) -> Successor | None:
        """Agree with the other members that `successor` follows; return it as agreed, without members lost meanwhile.

        Return None if this node is in no view any more (`fault` says why), or if there was no agreement within so many
        seconds. Not on the control loop.
        """
        control.soon(self.view_driver.succeed, successor)
        self._ended.wait(within)
        return self.view.successor

    # Effects of the view driver

    def send(self, rank: int, message: messages.Control, *, wakes: bool) -> None:
        if rank < len(self.seats):
            self._peers.send_vote(self.seats[rank], message, wakes=wakes)
        elif self._keeper is not None:
            self._keeper.send(message)

    def freeze(self, number: int) -> Iterable[State] | None:
        with self._lock:
            self._is_frozen = True
            groups = dict(self._groups.items())
            self._states = dict(self._dismissed)
            self._waiting = set(groups)
        self._freeze_number = number
        self._phase("freeze")
        for group, operations in groups.items():
            state = operations.halt(number)
            if state is not None:
                self._collect(group, state)
        return None if self._waiting else self._states.values()

    def halted(self, group: int, number: int, state: State) -> None:
        """Note that a group has stopped, whose operation was running when `freeze` came."""
        if number in (-1, self._freeze_number):
            self._collect(group, state)
            if self._is_frozen and not self._waiting:
                self.view_driver.frozen(self._freeze_number, self._states.values())

    def _collect(self, group: int, state: State) -> None:
        with self._lock:
            self._waiting.discard(group)
            self._states[group] = state

    def accepted(self) -> None:
        if self.is_current:
            self._parts.listener.sealed()

    def installed(self, view: View, lost: tuple[int, ...]) -> None:
        self._phase("agree")
        with self._lock:
            self.view, self._is_frozen = view, False
            self._waiting.clear()
            groups = list(self._groups.values())
        if view.successor is not None:
            self._ended.set()
        if not self.is_current:
            for operations in groups:
                operations.install(view)
            return
        for rank in lost:
            if self.view_driver.is_leaving(rank):
                self._peers[self.seats[rank]].note(PeerEvent.SAID_GOODBYE)
            self._parts.judge.exclude(self.seats[rank])
        self._tell_of(view, lost)
        seats = [self.seats[rank] for rank in view.ranks]
        self._parts.listener.view(self.number, view.number, seats, self.seats[view.tie_breaker])
        if view.successor is not None:
            self._parts.listener.sealed()
        for operations in groups:
            operations.install(view)

    def _tell_of(self, view: View, lost: tuple[int, ...]) -> None:
        """Add an event, and log the loss."""
        left = [self._peers[self.seats[rank]].has_left or self.view_driver.is_leaving(rank) for rank in lost]
        names = tuple(self._name((rank,)) for rank in lost)
        kind = "view" if not lost else "left" if all(left) else "lost"
        peers = [self._peers[self.seats[rank]] for rank in lost]
        unheard = ("" if has_left else UNHEARD for has_left in left)  # this node has noticed nothing itself
        reasons = (peer.failure or peer.reason or other for peer, other in zip(peers, unheard, strict=True))
        why = ", ".join(dict.fromkeys(filter(None, reasons)))
        self._parts.events.add(Event(kind, time.time(), self.number, view.number, lost, names, text=why))
        if lost:
            failures = [peer.failure for peer in peers]
            level = logging.INFO if all(left) and not any(failures) else logging.WARNING
            text = text_of_loss(names, failures, left, view.ranks, on_loss=self._parts.config.on_loss)
            logger.log(level, "%s: %s (view %d)", self._parts.run, text, view.number)

    def excluded(self, view: View) -> None:
        if view.ranks:
            what = (
                f"the run continues without this process since view {view.number} of generation {self.number}: it left"
            )
            rest = "or the others could not hear it; join the run again to be in its next generation"
        else:
            what = f"the run is over since view {view.number} of generation {self.number}: its members have left"
            rest = "or could not be heard by a quorum of them"
        self._end(Fault("GroupChangedError", f"{what}, {rest}"))
        if not view.ranks and self.is_current:
            self._parts.links.run_ended(self.founded.origin, is_finished=view.is_finished)

    def left_behind(self, number: int) -> None:
        """End: the other members are in a later generation, without this node."""
        if not self.is_over:
            text = f"the run is in generation {number}, and this process in generation {self.number}: the others could "
            self._end(Fault("GroupChangedError", f"{text}not hear it; join the run again to be in its next generation"))

    def over(self) -> None:
        """End: other nodes say that the run is over."""
        self._end(
            Fault("GroupChangedError", "the run is over: a quorum of its members decided so without this process")
        )

    def seated(self) -> Seated:
        """Return the message for nodes that have a seat in this generation and may not know it."""
        founded = self.founded
        members = tuple(member_keys(founded))
        return Seated(founded.origin, Successor(self.number, founded.lineage, members, founded.tie_breaker))

    def waiting(self, effect: QuorumAwaited) -> None:
        logger.warning("%s: waiting up to %.0f s for %s: without a quorum of the %d members, or half of them with the "
                       "tie-breaker, %s, this process does not continue", self._parts.run, effect.seconds,
                       self._name(effect.missing), len(self.view.ranks), self._name((effect.tie_breaker,)))  # fmt: skip

    def quorum_lost(self, effect: QuorumLost) -> None:
        if self.founded.is_kept:
            text = (
                f"the keeper of this run (`covey run`) did not answer for {self.patience:g} s, and only the keeper "
                "decides which processes are in it; is it stopped? Continue it, or start the run anew"
            )
        else:
            missing = self._name(effect.missing) or "Some of these members"
            size = len(self.view.ranks)
            answered = f"only {len(effect.here)} of the {size} members of view {self.view.number} answered"
            if is_quorum(self.view, effect.here):
                answered = (
                    f"{len(effect.here)} of the {size} members of view {self.view.number} are linked with this one, "
                )
                answered += "but too few of them answered"
            text = (
                f"{answered}; a quorum needs {size // 2 + 1}, or half of them with the tie-breaker, "
                f"{self._name((effect.tie_breaker,))}. {missing} did not answer within {self.patience:g} s. Start the "
                "missing ones again and join anew, set a longer patience=, or pass quorum='any' if two halves may "
                "continue separately"
                + (f". min_size={self._parts.floor} must be reached, too" if self._parts.floor > 1 else "")
            )
        # Groups that end with their first loss continue without views.
        self._end(Fault("QuorumLostError", text, tuple(map(Rank, effect.missing))), only_surviving=True)

    def failed(self, error: CoveyError) -> None:
        self._end(Fault("ClosedError", f"this process cannot be in the run any more: {error}"))

    def _end(self, fault: Fault, *, only_surviving: bool = False) -> None:
        self.is_over, self.fault = True, fault
        self._left.set()
        self._ended.set()
        self._parts.listener.generation_ended(self, fault, only_surviving=only_surviving)

    def _name(self, ranks: Sequence[int]) -> str:
        members = self.founded.members
        names = [f"rank {rank} ({members[rank].card.host_name or members[rank].card.name})" for rank in ranks]
        return ", ".join(names) if len(names) <= LISTED_ITEMS else listed_briefly(names)

    # Inputs

    def disturbed(self, attempt: int, pause: float = 0.0) -> None:
        """Ask for a view after `pause` seconds, because something in an attempt failed."""
        if pause:
            asyncio.get_running_loop().call_later(pause, self.disturbed, attempt)
        elif not self.is_over and attempt == self.view.number:
            self._phase("detect")
            self.view_driver.disturbed(attempt)

    def _phase(self, name: str) -> None:
        if self.is_current:
            self._parts.events.phase(name)

    def forked(self) -> None:
        """Make this generation unusable: this process is a fork of the one that joined."""
        self._lock, self._left = threading.Lock(), threading.Event()  # another thread of the parent may have held them
        self._ended = threading.Event()
        self.is_over = True
        self._left.set()
        self._ended.set()

    def close(self) -> None:
        """Take no more part."""
        self.is_over = True
        self._left.set()
        self._ended.set()
        self.view_driver.close()


def text_of_loss(
    names: Sequence[str], failures: Sequence[str], left: Sequence[bool], rest: Sequence[int], *, on_loss: str
) -> str:
    """Describe which members are gone, how each ended if it said so, and what follows for the ranks that remain.

    `left` tells which of them said that they leave.
    """
    members = list(zip(names, failures, left, strict=True))
    lost = [name for name, failure, has_left in members if not failure and not has_left]
    parted = [name for name, failure, has_left in members if not failure and has_left]
    gone = [f"{listed_briefly(lost)} {'are' if lost[1:] else 'is'} lost"] if lost else []
    gone += [f"{listed_briefly(parted)} {'have' if parted[1:] else 'has'} left"] if parted else []
    gone += [f"{name} failed with {failure}" for name, failure, _ in members if failure]
    ranks = f"rank{'s' if rest[1:] else ''} {listed_ranks(rest)}"
    if on_loss == "continue":
        return f"{', '.join(gone)}; {ranks} continue{'' if rest[1:] else 's'}"
    if all(left) and not any(failures):
        return ", ".join(gone)  # in a group that ends with its first loss, members may leave at different times
    return f"{', '.join(gone)}; the group ends with an error on {ranks}"
