"""Writes the audit log of this machine. Called on the control loop, which never waits for the disk.

A thread writes the entries in batches, and ends when there is nothing left to write. Events that other nodes and
strangers can cause are limited: the first few of each source get their own entries, the rest one entry with a count.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Final

from covey.base.errors import AuthError, ConfigError, ConnectError, CoveyError
from covey.base.pace import Bucket, Buckets
from covey.net.audit import audit_log
from covey.net.audit.audit_log import Note
from covey.runtime.links.acceptor import TurnedAwayError
from covey.runtime.links.limits import source_of

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable
    from pathlib import Path

    from covey.wire import messages

SOURCE_ENTRIES_BURST: Final = 8.0
SOURCE_ENTRIES_RATE: Final = 1 / 300
"""Entries a second of one event that one source can cause, after the burst."""
STRANGERS_BURST: Final = 64.0
MEMBERS_BURST: Final = 1024.0
ENTRIES_TOTAL_RATE: Final = 1 / 30
"""The same for all sources together; nodes that prove the secret have the larger burst."""
SUMMARY_SECONDS: Final = 300.0
"""How soon the number of events without an entry of their own is written."""
GATHER_SECONDS: Final = 0.2
"""How long the thread waits for more entries before it writes."""
PENDING_LIMIT: Final = 4096
"""Entries that wait to be written; further ones are only counted."""
ENTRIES_FLUSH_SECONDS: Final = 1.0
"""How long a node that leaves waits for its last entries to be written."""
_MEMBERS: Final = frozenset({"met", "visited", "secret-received"})
ENTRY_NAMES_LIMIT: Final = 16
"""Names of members in one entry."""


class Auditor:
    """Writes what happens to the nodes of one process in a cluster. Without a cluster it writes nothing."""

    def __init__(self, cluster: str = "", run: str = "") -> None:
        """Open the log; if that is not possible, warn once and write nothing."""
        self._cluster, self._run = cluster, run
        self._folder: Path | None = None
        self._paces: dict[str, _Pace] = {}
        self._timer: asyncio.TimerHandle | None = None
        if cluster:
            try:
                self._folder = audit_log.made_folder()
            except ConfigError as error:
                _writer.warn_once(error)

    # Events

    def note(
        self,
        event: str,
        card: messages.Card | None = None,
        *,
        address: str = "",
        reason: str = "",
        generation: int = 0,
        count: int = 1,
        once: bool = False,
    ) -> None:
        """Write an entry about a node, or about the cluster. Returns at once.

        With `once`, one entry is written although other processes of this machine report the same about the same life
        of that node.
        """
        if self._folder is None:
            return
        node, life, name = (card.id, card.life, card.name) if card is not None else (b"", b"", "")
        made = Note(self._cluster, event, self._run, generation, node, life, name, address, reason, count, once)
        _writer.put(made, self._folder)

    def note_paced(
        self, event: str, source: Hashable, card: messages.Card | None = None, *, address: str = "", reason: str = "",
        once: bool = False,
    ) -> None:  # fmt: skip
        """Write an entry about an event that `source` can cause as often as it likes, within the limits."""
        if self._folder is None:
            return
        pace = self._paces.setdefault(event, _Pace(MEMBERS_BURST if event in _MEMBERS else STRANGERS_BURST))
        if pace.take(source, time.monotonic()):
            self.note(event, card, address=address, reason=reason, once=once)
            return
        pace.leave_out(address, reason)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(SUMMARY_SECONDS, self._sum_up)

    def refused(self, address: str, reason: str, card: messages.Card | None = None) -> None:
        """Write that a connection or a node was refused; `card` also names an address if none is known."""
        source = card.id if card is not None else source_of(address)
        if card is not None and not address:
            address = next((each.ip for each in card.contact.addresses), "")
        self.note_paced("refused", source, card, address=address, reason=reason)

    def refused_key(self, address: str, reason: str) -> None:
        """Write that a connection was refused with a key or certificate that is not accepted."""
        self.refused(address, f"key: {reason}")

    def refused_connection(self, address: str, error: BaseException) -> None:
        """Write that a connection was closed during the handshake.

        A connection that just ended is not written: a node that dials several addresses of another drops all but one,
        at any moment of the handshake, and a node that ends drops its dials.
        """
        is_turned_away = isinstance(error, TurnedAwayError)
        cause = error.__cause__ if isinstance(error, ConnectError) else None
        if isinstance(error, AuthError):
            self.refused(address, f"secret: {error}")
        elif isinstance(error, TimeoutError) or isinstance(cause, TimeoutError):
            self.refused(address, "silent: it did not finish the handshake in time")
        elif is_turned_away or (cause is not None and not isinstance(cause, ConnectionError)):
            self.refused(address, f"limited: {error}")
        elif isinstance(error, CoveyError) and not isinstance(error, ConnectError):
            self.refused(address, f"protocol: {error}")

    def founded(
        self, generation: int, rank: int, members: Iterable[messages.Card], newcomers: Iterable[messages.Card],
        own: messages.Card,
    ) -> None:  # fmt: skip
        """Write that this node is in a generation of its run, as this rank."""
        names = [card.name for card in members]
        listed = ", ".join(names[:ENTRY_NAMES_LIMIT]) + (", ..." if len(names) > ENTRY_NAMES_LIMIT else "")
        reason = f"rank {rank} of {len(names)}: {listed}"
        self.note("generation" if generation else "began", own, reason=reason, generation=generation)
        for card in newcomers:
            self.note("joined", card, generation=generation, once=True)

    # The end

    def _sum_up(self) -> None:
        """Write how many events got no entry of their own."""
        self._timer = None
        for event, pace in self._paces.items():
            if pace.left_out:
                count, address, reason = pace.sum_up()
                self.note(event, address=address, reason=reason, count=count)

    def close(self) -> None:
        """Write the remaining counts. On the control loop, if any event was limited; closing twice is fine."""
        if self._timer is not None:
            self._timer.cancel()
        self._sum_up()

    def flush(self) -> None:
        """Wait until everything is written, at most ENTRIES_FLUSH_SECONDS. Not on the control loop."""
        if self._folder is not None:
            _writer.flush(ENTRIES_FLUSH_SECONDS)


class _Pace:
    """Limits how often an event that other nodes can cause is written."""

    def __init__(self, burst: float) -> None:
        self._sources, self._all = Buckets(SOURCE_ENTRIES_RATE, SOURCE_ENTRIES_BURST), Bucket(ENTRIES_TOTAL_RATE, burst)
        self.left_out = 0
        self._address = self._reason = ""

    def take(self, source: Hashable, now: float) -> bool:
        """Tell whether an event of this source gets an entry of its own."""
        return self._sources.take(source, now) and self._all.take(now)

    def leave_out(self, address: str, reason: str) -> None:
        """Count an event that gets no entry."""
        self._address = address if not self.left_out or address == self._address else "several"
        self._reason = reason
        self.left_out += 1

    def sum_up(self) -> tuple[int, str, str]:
        """Return how many were left out, their address, and the reason of the last; then count anew."""
        count, self.left_out = self.left_out, 0
        return count, self._address, f"{self._reason} (the last one)"


class _Writer:
    """The thread that writes, while there is something to write. One per process, for all clusters."""

    def __init__(self) -> None:
        self.forked()
        self._has_warned = False

    def forked(self) -> None:
        """Start empty in a forked process: the parent writes its own entries."""
        self._changed = threading.Condition()
        self._pending: deque[tuple[Note, Path]] = deque()
        self._dropped = 0
        self._is_running = self._is_hurried = False

    def put(self, note: Note, folder: Path) -> None:
        with self._changed:
            if len(self._pending) < PENDING_LIMIT:
                self._pending.append((note, folder))
            else:
                self._dropped += 1
            if self._is_running:
                return
            self._is_running = True
        try:
            threading.Thread(target=self._work, name="covey-audit", daemon=True).start()
        except RuntimeError:  # the system starts no more threads: the next entry tries again
            with self._changed:
                self._is_running = False

    def flush(self, within: float) -> None:
        with self._changed:
            self._is_hurried = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._is_running, within)
            self._is_hurried = False

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_hurried, GATHER_SECONDS)
                batch = list(self._pending)
                folder = batch[0][1]
                batch = [each for each in batch if each[1] == folder]
            is_written = self._write([note for note, _ in batch], folder)
            with self._changed:
                if is_written:
                    written = {id(each) for each in batch}
                    self._pending = deque(each for each in self._pending if id(each) not in written)
                if not self._pending or not is_written:  # what cannot be written waits for the next entry
                    self._is_running = False
                    self._changed.notify_all()
                    return

    def _write(self, notes: list[Note], folder: Path) -> bool:
        with self._changed:
            dropped = self._dropped
        if dropped:
            reason = "the log could not be written for a while"
            notes.append(Note(notes[0].cluster, "dropped", reason=reason, count=dropped))
        try:
            audit_log.append(notes, folder)
        except ConfigError as error:
            self.warn_once(error)
            return False
        with self._changed:
            self._dropped -= dropped
        return True

    def warn_once(self, error: ConfigError) -> None:
        if not self._has_warned:
            self._has_warned = True
            audit_log.warn(error)


_writer = _Writer()
SILENT: Final = Auditor()
"""Writes nothing: for runs of one machine, and for visits."""


def _at_exit() -> None:
    with contextlib.suppress(Exception):
        _writer.flush(ENTRIES_FLUSH_SECONDS)


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_writer.forked)
