"""The lanes of one attempt: opened on first use, watched while they stall, and replaced by others to the same rank.

Both ends of a lane must use a new one from the same operation on: what they have sent belongs to one of the two. The
end that dialled the new lane proposes the number of an operation, and the other end accepts it if it has not begun that
one (`lanes.tuning.moves` carries both messages). An end that has accepted keeps to it, so only the proposing end may
have to wait: when its program comes to the operation before the answer does.

Invariant: the shortcut is closed while a switch is pending, because it looks at nothing but its lanes; the next
operation that goes the long way opens it again. An operation that the shortcut has begun may not be counted yet, so the
agreed one is at least two above the count.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from covey.base.errors import ClosedError, ConnectError, DeadlineError
from covey.base.pace import Growing
from covey.net.host import tcp
from covey.net.host.descriptors import FREE_DESCRIPTOR_SECONDS, ScarceError, explain, is_exhausted
from covey.net.lanes.lane import LaneClosedError
from covey.net.lanes.stream import SocketLane, is_resumable

if TYPE_CHECKING:
    from covey.base.numbers import Rank, Slot
    from covey.net.lanes.lane import Lane, LanePath
    from covey.runtime.bell import Bell
    from covey.runtime.collectives.operation import CurrentOperation
    from covey.runtime.collectives.roster import CollectiveLanes, GroupFacts, GroupRoster
    from covey.runtime.collectives.trouble import OperationTrouble

BELL_PAUSES: Final = Growing(0.02, 0.2)
"""Between tries to open a descriptor when the process has no more of them."""
UNCOUNTED: Final = 1
"""Operations that may have begun and are not counted yet."""
AHEAD: Final = 2
"""How many operations later than possible a switch is proposed, so that the answer is usually there in time."""
MOST_AHEAD: Final = 1_000_000
"""A switch that is further ahead than this is refused: the operations until then could not take the shortcut."""
ANSWER_LOOK_SECONDS: Final = 0.2
"""How long to wait for the answer before checking whether the group has failed."""


class LaneHost(Protocol):
    """An attempt, as far as its lanes need it. A `peer` is a slot."""

    operation: CurrentOperation
    wake_fd: int
    """The descriptor of the bell, once that is open."""

    def check(self) -> None:
        """Raise if the attempt must end."""

    def stalled(self, since: float, waiting_for: tuple[int, ...]) -> float:
        """Handle a stall; raise if the deadline has passed."""

    def lane_closed(self, peer: int, error: LaneClosedError | ConnectError) -> None:
        """Raise the error for a lane that has ended, or cannot be opened."""

    def replace_lane(self, slot: Slot, lane: Lane) -> None:
        """Use another lane to a slot from now on."""

    def close_shortcut(self) -> None:
        """Let all calls go the long way."""


class ShortcutRunner(Protocol):
    """What runs repeated small calls (`native_executor`)."""

    is_open: bool


class AttemptLanes:
    """The lanes between the ranks of one attempt and this one. For the thread that runs the operation."""

    def __init__(
        self,
        number: int,
        ranks: tuple[Rank, ...],
        facts: GroupFacts,
        roster: GroupRoster,
        lanes: CollectiveLanes,
        trouble: OperationTrouble,
        bell: Bell,
    ) -> None:
        """`number` is that of the attempt, and `ranks` are its ranks, by slot."""
        self._number, self._ranks, self._group = number, ranks, facts.name
        self._roster, self._lanes, self._trouble, self._bell = roster, lanes, trouble, bell
        self.by_slot: list[Lane | None] = [None] * len(ranks)
        self._paths: list[tuple[str, str] | None] = [None] * len(ranks)
        """The addresses of both ends of the link with each peer when its lane was opened."""

    def open(self, slot: int, host: LaneHost) -> Lane:
        """Return the lane to a slot, which is opened; raise what ends the operation meanwhile."""
        rank = self._ranks[slot]
        self.open_bell(host)
        since = time.monotonic()
        while True:
            host.check()
            try:
                lane = self._lanes.open(rank, self._number)
            except DeadlineError:
                host.stalled(since, (slot,))
            except ScarceError as error:  # of this process: the others hear that it gave up, and why
                raise ConnectError(f"{host.operation.describe()} cannot continue: {error}") from error
            except ConnectError as error:
                host.lane_closed(slot, error)
            except ClosedError:
                host.check()
                raise
            else:
                self.use(slot, lane)
                return lane

    def use(self, slot: int, lane: Lane) -> None:
        """Use a lane to a slot from now on."""
        self.by_slot[slot], self._paths[slot] = lane, self._path_to(slot)
        self._lanes.opened(self._ranks[slot], lane.kind)

    def open_bell(self, host: LaneHost) -> None:
        """Open the bell; if the process has no descriptor left for it, wait a while for one.

        Raises:
            OSError: there is none after `FREE_DESCRIPTOR_SECONDS`.
            DeadlineError: the operation's deadline has passed before.
        """
        from covey.runtime.backoff import Backoff  # slow to load; a program that joins a run has it already

        shortage = Backoff(f"a free descriptor for group {self._group!r}", BELL_PAUSES, within=FREE_DESCRIPTOR_SECONDS)
        while True:
            try:
                self._bell.open()
            except OSError as error:
                if not is_exhausted(error):
                    raise
                host.check()
                self._trouble.check_deadline(explain(error))
                shortage.failed(explain(error))
                if shortage.is_over:
                    raise
                time.sleep(shortage.pause)
            else:
                host.wake_fd = self._bell.fd
                return

    def watch(self, host: LaneHost) -> None:
        """Report lanes whose bytes do not arrive any more, while the operation stalls."""
        for slot, lane in enumerate(self.by_slot):
            # The streams of a resumable lane find another path by themselves (`lanes.resumption`).
            if lane is None or is_resumable(lane):
                continue
            if lane.is_stuck(has_moved=self._has_moved(slot)):
                self._lanes.stuck(self._ranks[slot])  # so that the node leaves the path before another lane is opened
                host.lane_closed(slot, LaneClosedError(f"the other end {tcp.STUCK}"))

    def _path_to(self, slot: int) -> tuple[str, str] | None:
        peer = self._roster.peer(self._ranks[slot])
        link = None if peer is None else peer.link
        return None if link is None else (link.local_ip, link.remote_ip)

    def _has_moved(self, slot: int) -> bool:
        """Tell whether the link with a peer goes over other addresses than when the lane was opened."""
        before, now = self._paths[slot], self._path_to(slot)
        return before is not None and now is not None and before != now

    # What is open, for any thread

    def of(self, rank: Rank) -> Lane | None:
        """Return the open lane to a rank, if there is one."""
        return self.by_slot[self._ranks.index(rank)] if rank in self._ranks else None

    def paths_of(self, rank: Rank) -> tuple[LanePath, ...]:
        """Return the networks that the lane to a rank goes over, if it goes over several."""
        lane = self.of(rank)
        return lane.paths() if lane is not None else ()

    def streams_of(self, rank: Rank) -> int:
        """Return how many connections the lane to a rank has; 0 if it is not open, or shares memory."""
        lane = self.of(rank)
        return len(lane.sockets()) if isinstance(lane, SocketLane) else 0

    def kind_of(self, rank: Rank) -> str:
        """Return the kind of the lane to a rank: of the open one, or of the one that would be opened."""
        lane = self.of(rank)
        return self._lanes.kind(rank) if lane is None else lane.kind

    def close(self) -> None:
        """Forget the lanes. Their owner closes them."""
        self.by_slot = [None] * len(self._ranks)


@dataclass(eq=False, repr=False)
class _Pending:
    """A lane that is to be replaced."""

    slot: Slot
    lane: Lane
    sequence: int
    """The first operation that uses the new lane."""
    is_agreed: bool


class LaneSwitch:
    """The lanes of one attempt that are to be replaced. The control loop adds them, the operation's thread switches."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self.pending: list[_Pending] = []

    # The control loop

    def propose(self, attempt: LaneHost, slot: Slot, lane: Lane, least: int) -> int:
        """Return the operation, `least` or later, from which `lane` should be used; this end waits for the answer."""
        with self._lock:
            attempt.close_shortcut()  # before the count is read
            self._drop(slot)
            sequence = max(least, attempt.operation.sequence + UNCOUNTED + AHEAD)
            self.pending.append(_Pending(slot, lane, sequence, is_agreed=False))
            self._changed.notify_all()
            return sequence

    def accept(self, attempt: LaneHost, slot: Slot, lane: Lane, sequence: int) -> int:
        """Agree to use `lane` from an operation on; return 0, or, if that is refused, how many have begun here."""
        with self._lock:
            attempt.close_shortcut()
            begun = attempt.operation.sequence + UNCOUNTED
            if not begun < sequence <= begun + MOST_AHEAD:
                return begun
            self._drop(slot)
            self.pending.append(_Pending(slot, lane, sequence, is_agreed=True))
            return 0

    def agree(self, slot: Slot, sequence: int) -> None:
        """Take the answer that the other end uses the new lane from this operation on, too."""
        with self._lock:
            for each in self.pending:
                each.is_agreed |= (each.slot, each.sequence) == (slot, sequence)
            self._changed.notify_all()

    def cancel(self, slot: Slot) -> None:
        """Keep the lane of a slot: the other end did not accept another one."""
        with self._lock:
            self._drop(slot)
            self._changed.notify_all()

    def _drop(self, slot: Slot) -> None:
        self.pending = [each for each in self.pending if each.slot != slot]

    # The thread that runs an operation

    def begin(self, attempt: LaneHost) -> None:
        """Replace the lanes that an operation, which is about to begin, must not use any more.

        Raises whatever ends the operation while it waits for the answer of another rank.
        """
        sequence, since = attempt.operation.sequence, time.monotonic()
        while True:
            with self._lock:
                due = [each for each in self.pending if each.sequence <= sequence]
                open_questions = tuple(each.slot for each in due if not each.is_agreed)
                if not open_questions:
                    self.pending = [each for each in self.pending if each.sequence > sequence]
                    break
                self._changed.wait(ANSWER_LOOK_SECONDS)
            attempt.check()
            if time.monotonic() >= since + ANSWER_LOOK_SECONDS:
                attempt.stalled(since, open_questions)
        for each in due:
            attempt.replace_lane(each.slot, each.lane)

    def open_shortcut(self, runner: ShortcutRunner) -> None:
        """Let calls take the shortcut, unless a switch is pending."""
        with self._lock:
            if not self.pending:
                runner.is_open = True
