"""What this rank can tell the others of a group's calls: its own last ones, and headers that it found on its lanes.

The thread that runs an operation looks at the lanes that it uses. While no operation runs, any thread may look, the
control loop too, once it has stopped the attempt: an operation that begins then touches no lane before it has seen the
stop, and the compiled lanes show nothing while their runner moves bytes. What is looked at is the first transfer of
each lane that was not read, and the header for which a shortcut has handed over its call.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final

from covey.base.errors import RemoteProtocolError
from covey.base.numbers import NO_RANK
from covey.runtime.collectives.call_log import describe_header
from covey.wire.header import TRANSFER_HEADER_BYTES, unpack

if TYPE_CHECKING:
    from covey.base.numbers import Rank
    from covey.runtime.collectives.call_log import CallLog
    from covey.runtime.collectives.operation import CurrentAttempt
    from covey.runtime.collectives.roster import CollectiveLanes, GroupRoster
    from covey.wire import messages
    from covey.wire.header import TransferHeader

PARTING_LIMIT: Final = 200
"""Characters of each call in the list that a rank sends when it closes a group or testifies to a loss."""


class CallEvidence:
    """The last calls of this rank as messages tell them, what it found of others, and which ranks have parted."""

    def __init__(
        self, group: int, call_log: CallLog, roster: GroupRoster, lanes: CollectiveLanes, attempt: CurrentAttempt
    ) -> None:
        """`group` is the id of the group."""
        self._group, self._log, self._roster, self._lanes, self._attempt = group, call_log, roster, lanes, attempt
        self._lock = threading.Lock()
        self._found: dict[tuple[Rank, int], TransferHeader] = {}
        """By rank and operation: the headers that lanes have shown."""
        self._has_looked = False
        self.parted: set[Rank] = set()
        """Ranks that have sent their last calls because they close the group, this one among them."""
        self.in_order: set[Rank] = set()
        """Those of them whose programs close the group without an error."""

    def look(self) -> None:
        """Note the first header of each lane that was not read. On a thread to which the lanes belong; see above.

        Nothing can be received from the lanes afterwards.
        """
        lanes = self._lanes.arrived()
        with self._lock:
            arrived = {self._roster.rank_of.get(seat, NO_RANK): _peek(lane) for seat, lane in lanes.items()}
            arrived |= self._attempt.read_headers()
            for rank, data in arrived.items():
                if rank >= 0 and (header := self._header(data)) is not None:
                    self._found[rank, header.sequence] = header
            self._has_looked = True

    def found(self) -> list[tuple[Rank, TransferHeader]]:
        """Return the headers that lanes have shown, with the ranks that sent them, in the order of ranks."""
        with self._lock:
            return [(rank, header) for (rank, _), header in sorted(self._found.items())]

    def given(self) -> tuple[tuple[messages.CallRun, ...], tuple[messages.FoundCall, ...]]:
        """Return the last calls of this rank, and what it has found of others: first of those that are gone."""
        from covey.wire import messages  # slow to load; a program that joins a run has it already

        if not self._has_looked:
            return (), ()
        here = set(self._attempt.live)
        told = [
            messages.FoundCall(rank, header.sequence, header.fingerprint, describe_header(header))
            for rank, header in sorted(self.found(), key=lambda item: (item[0] in here, item[0], item[1].sequence))
        ]
        return self.recent_runs(), tuple(told[: messages.TOLD_CALLS_LIMIT])

    def part(self, *, in_order: bool = False) -> None:
        """Send this rank's last calls to the others, once: a rank that only sends may exit before they compare.

        `in_order` if the program closes the group without an error. Ranks whose links are idle hear of a difference
        from those that notice it.
        """
        if self._roster.node is None or self._roster.rank in self.parted:
            return
        self.parted.add(self._roster.rank)
        from covey.wire import messages  # slow to load; a program that joins a run has it already

        self._roster.tell_others(messages.Calls(self._group, self.recent_runs(), in_order), wakes=False)

    def recent_runs(self) -> tuple[messages.CallRun, ...]:
        """Return this rank's last calls, as messages tell them."""
        from covey.wire import messages  # slow to load; a program that joins a run has it already

        runs: list[messages.CallRun] = []
        for sequence, call in self._log.recent():
            last = runs[-1] if runs else None
            if last is not None and (last.first + last.count, last.fingerprint) == (sequence, call.fingerprint):
                runs[-1] = messages.CallRun(last.first, last.count + 1, last.fingerprint, last.call)
            else:
                runs.append(messages.CallRun(sequence, 1, call.fingerprint, call.text[:PARTING_LIMIT]))
        return tuple(runs)

    def _header(self, data: bytes) -> TransferHeader | None:
        """Return the header of a transfer of this group; None for other bytes, such as the middle of a payload."""
        if len(data) != TRANSFER_HEADER_BYTES:
            return None
        try:
            header = unpack(data)
        except RemoteProtocolError:
            return None
        is_whole = header.pack() == data  # what is zero in every header is zero here
        return header if is_whole and header.group == self._group and header.attempt == 0 else None


def _peek(lane: Any) -> bytes:
    """Return the first bytes that a lane has not read; none if another thread has just closed it."""
    try:
        return bytes(lane.peek())
    except (OSError, ValueError):
        return b""
