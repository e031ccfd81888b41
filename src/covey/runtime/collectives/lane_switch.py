"""Replaces a lane of an attempt by another one to the same rank, at an operation that both ranks agree on.

Both ends of a lane must use the new one from the same operation on: what they have sent belongs to one of the two. The
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
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from covey.base.numbers import Slot
    from covey.net.lanes.lane import Lane
    from covey.runtime.collectives.attempt import Attempt

UNCOUNTED: Final = 1
"""Operations that may have begun and are not counted yet."""
AHEAD: Final = 2
"""How many operations later than possible a switch is proposed, so that the answer is usually there in time."""
MOST_AHEAD: Final = 1_000_000
"""A switch that is further ahead than this is refused: the operations until then could not take the shortcut."""
WAIT_SECONDS: Final = 0.2
"""How long to wait for the answer before checking whether the group has failed."""


@dataclass
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

    def propose(self, attempt: Attempt, slot: Slot, lane: Lane, least: int) -> int:
        """Return the operation, `least` or later, from which `lane` should be used; this end waits for the answer."""
        with self._lock:
            attempt.close_shortcut()  # before the count is read
            self._drop(slot)
            sequence = max(least, attempt.engine.operation.sequence + UNCOUNTED + AHEAD)
            self.pending.append(_Pending(slot, lane, sequence, is_agreed=False))
            self._changed.notify_all()
            return sequence

    def accept(self, attempt: Attempt, slot: Slot, lane: Lane, sequence: int) -> int:
        """Agree to use `lane` from an operation on; return 0, or, if that is refused, how many have begun here."""
        with self._lock:
            attempt.close_shortcut()
            begun = attempt.engine.operation.sequence + UNCOUNTED
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

    def begin(self, attempt: Attempt) -> None:
        """Replace the lanes that an operation, which is about to begin, must not use any more.

        Raises whatever ends the operation while it waits for the answer of another rank.
        """
        sequence, since = attempt.engine.operation.sequence, time.monotonic()
        while True:
            with self._lock:
                due = [each for each in self.pending if each.sequence <= sequence]
                open_questions = tuple(each.slot for each in due if not each.is_agreed)
                if not open_questions:
                    self.pending = [each for each in self.pending if each.sequence > sequence]
                    break
                self._changed.wait(WAIT_SECONDS)
            attempt.check()
            if time.monotonic() >= since + WAIT_SECONDS:
                attempt.stalled(since, open_questions)
        for each in due:
            attempt.replace_lane(each.slot, each.lane)

    def open_shortcut(self, attempt: Attempt) -> None:
        """Let calls take the shortcut, unless a switch is pending."""
        with self._lock:
            if not self.pending:
                attempt.open_native_shortcut()
