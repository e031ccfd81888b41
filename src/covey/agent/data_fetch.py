"""Gets a data set onto this machine, chunk by chunk, from all machines that have some of it at the same time.

The terminal that pushes is asked only for chunks that no other machine is known to have: its uplink carries a data set
little more than once, however many machines get it. Of the chunks that may be asked for, a random one is taken, so that
machines that get the data set together soon have different ones to give.

A machine that does not answer, or gives other bytes than the list says, is asked no more; the others are.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Final

import numpy as np

from covey.agent.requests import OUTPUT_CHUNK_BYTES
from covey.base.errors import ConfigError, CoveyError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from covey.agent.data_line import DataSource
    from covey.agent.data_store import PartialData, StoredData
    from covey.runtime.calls.work import CallWork

PIECES_AT_ONCE: Final = 20
"""Pieces of chunks that one machine is asked for: together they are less than what a link holds for a slow peer."""
CHUNKS_AT_ONCE: Final = 8
"""Chunks that are asked for together if they are small."""
LOOK_AGAIN_SECONDS: Final = 0.5
"""How often another machine is asked which chunks it has got meanwhile."""
SPARED_SECONDS: Final = 3.0
"""How long the terminal is not asked because it is not known yet what the others have."""
STALL_SECONDS: Final = 40.0
"""A machine that has had nothing to give for so long, while nothing came from others, is asked no more."""


class _Supplier:
    """A machine that has some of the data set."""

    def __init__(self, source: DataSource, count: int, *, is_terminal: bool) -> None:
        self.source, self.is_terminal = source, is_terminal
        self.has = np.full(count, is_terminal)
        self.looked_at = 0.0
        self.is_over = False


class DataFetch:
    """Fills a version of a data set. Threads of its own do the work; any thread may look."""

    def __init__(
        self,
        partial: PartialData,
        earlier: list[StoredData],
        terminal: DataSource | None,
        peers: Sequence[DataSource],
    ) -> None:
        """`earlier` are versions whose chunks may be the same."""
        self._partial, self._earlier, self._manifest = partial, earlier, partial.manifest
        self._suppliers = [_Supplier(each, self._manifest.chunks, is_terminal=False) for each in peers]
        if terminal is not None:
            self._suppliers.append(_Supplier(terminal, self._manifest.chunks, is_terminal=True))
        self._changed = threading.Condition()
        self._taken = np.zeros(self._manifest.chunks, bool)
        self._problems: list[str] = []
        self._works: set[CallWork[bytes]] = set()
        self._last_at = self._began_at = time.monotonic()
        """When the last chunk came, and when the first one could be asked for."""
        self._is_stopped = self._has_checked = False
        self._error: CoveyError | None = None
        self._threads = [threading.Thread(target=self._work, name="covey-data", daemon=True)]
        self._random = random.Random()

    def start(self) -> None:
        """Begin."""
        self._threads[0].start()

    def wait(self, seconds: float) -> bool:
        """Wait for the end; return whether all chunks are there.

        Raises:
            CoveyError: it cannot go on; the text says why.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_over(), seconds)
            if self._error is not None:
                raise self._error
            return self._has_checked and bool(self._partial.there.all())

    @property
    def is_stopped(self) -> bool:
        """Whether it was told to end before all chunks were there."""
        return self._is_stopped

    def cancel(self) -> None:
        """Let it end; return at once. What is there stays."""
        with self._changed:
            self._is_stopped = True
            works = list(self._works)
            self._changed.notify_all()
        for work in works:
            work.cancel()

    def stop(self) -> None:
        """Let it end, and wait for its threads."""
        self.cancel()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def received(self, *, from_terminal: bool) -> int:
        """Return how many bytes came over the network, from the terminal or from others."""
        return sum(each.source.received for each in self._suppliers if each.is_terminal == from_terminal)

    def _is_over(self) -> bool:
        return self._is_stopped or self._error is not None or (self._has_checked and bool(self._partial.there.all()))

    def _work(self) -> None:
        """Look what is here already, and start a thread for each machine that has the rest."""
        try:
            self._partial.check(lambda: self._is_stopped, self._earlier)
        except CoveyError as error:
            return self._fail(error)
        finally:
            for each in self._earlier:
                each.close()
        with self._changed:
            self._has_checked, self._last_at = True, time.monotonic()
            self._began_at = self._last_at
            self._changed.notify_all()
            if self._is_over():
                return
            for supplier in self._suppliers:
                thread = threading.Thread(target=self._serve, args=(supplier,), name="covey-data", daemon=True)
                self._threads.append(thread)
                thread.start()
            if not self._suppliers:
                self._error = self._nobody()

    def _fail(self, error: CoveyError) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _serve(self, supplier: _Supplier) -> None:
        """Ask one machine for chunks until all are there."""
        flight, chosen = _PiecesAhead(self, supplier), deque[int]()
        try:
            while not self._is_over():
                self._look(supplier)
                while flight.has_room():
                    if not chosen:
                        chosen.extend(self._choose(supplier))
                    if not chosen:
                        break
                    flight.begin(chosen.popleft())
                if not flight.take_one():
                    self._rest(supplier)
        except CoveyError as error:
            self._drop(supplier, str(error))
        except BaseException as error:
            self._fail(ConfigError(f"a fault while data was fetched: {error!r}"))
            raise
        finally:
            flight.close()
            with self._changed:
                self._taken[[*flight.chunks, *chosen]] = False
                supplier.is_over = True
                self._changed.notify_all()

    def _look(self, supplier: _Supplier) -> None:
        """Ask again which chunks a machine has, now and then, unless it has all."""
        now = time.monotonic()
        if now - supplier.looked_at < LOOK_AGAIN_SECONDS or supplier.has.all():
            return
        has = supplier.source.chunks_there(self._manifest.digest, self._manifest.chunks)
        with self._changed:
            supplier.has, supplier.looked_at = has, time.monotonic()
            self._changed.notify_all()

    def _choose(self, supplier: _Supplier) -> list[int]:
        """Return chunks to ask a machine for; they are taken then."""
        with self._changed:
            wanted = ~(self._partial.there | self._taken) & supplier.has
            if supplier.is_terminal:
                unknown = any(
                    not each.looked_at and not each.is_over for each in self._suppliers if each is not supplier
                )
                if unknown and time.monotonic() - self._began_at < SPARED_SECONDS:
                    return []
                for other in self._suppliers:
                    if not other.is_terminal and not other.is_over:
                        wanted &= ~other.has
            found = np.flatnonzero(wanted)
            if not len(found):
                return []
            first = self._random.randrange(len(found))
            chunks = [int(each) for each in found[first : first + CHUNKS_AT_ONCE]]
            total = 0
            for number, chunk in enumerate(chunks):
                total += self._manifest.spot(chunk).size
                if total >= PIECES_AT_ONCE * OUTPUT_CHUNK_BYTES:
                    chunks = chunks[: number + 1]
                    break
            self._taken[chunks] = True
            return chunks

    def _rest(self, supplier: _Supplier) -> None:
        """Wait until something has changed; give up a machine that has long had nothing to give."""
        with self._changed:
            if self._is_over():
                return
            if time.monotonic() - self._last_at > STALL_SECONDS:
                raise ConfigError(f"{supplier.source.name} does not have the rest")
            self._changed.wait(LOOK_AGAIN_SECONDS)

    def arrived(self, supplier: _Supplier, chunk: int, data: bytes) -> None:
        """Take a whole chunk. Raises ConfigError if it is not what the list says."""
        try:
            is_right = self._partial.put(chunk, data)
        except CoveyError as error:  # it cannot be written, from whichever machine it comes
            return self._fail(error)
        if not is_right:
            path = self._manifest.files[self._manifest.spot(chunk).file].path
            raise ConfigError(
                f"{path} has changed on the machine that pushes it; push again"
                if supplier.is_terminal
                else f"{supplier.source.name} gave other bytes of {path} than were announced"
            )
        supplier.source.received += len(data)
        with self._changed:
            self._taken[chunk] = False
            self._last_at = time.monotonic()
            self._changed.notify_all()

    def note(self, work: CallWork[bytes], *, is_open: bool) -> None:
        """Note a call that `stop` has to end, or that has ended."""
        with self._changed:
            (self._works.add if is_open else self._works.discard)(work)
            is_stopped = self._is_stopped
        if is_open and is_stopped:
            work.cancel()

    def _drop(self, supplier: _Supplier, problem: str) -> None:
        with self._changed:
            supplier.is_over = True
            if not self._is_over():
                self._problems.append(problem)
                if all(each.is_over for each in self._suppliers):
                    self._error = self._nobody()
            self._changed.notify_all()

    def _nobody(self) -> CoveyError:
        said = "; ".join(dict.fromkeys(self._problems)) or "no machine that has it is linked"
        return ConfigError(
            f"not all of the data set could be got: {said}. What has come stays: push again for the rest"
        )


class _PiecesAhead:
    """The pieces that one machine was asked for and that have not come yet, in order."""

    def __init__(self, fetch: DataFetch, supplier: _Supplier) -> None:
        self._fetch, self._supplier = fetch, supplier
        self._manifest = fetch._partial.manifest
        self._waiting: deque[tuple[int, CallWork[bytes]]] = deque()
        self._parts: dict[int, bytearray] = {}

    @property
    def chunks(self) -> list[int]:
        """The chunks that are under way."""
        return list(self._parts)

    def has_room(self) -> bool:
        return len(self._waiting) < PIECES_AT_ONCE

    def begin(self, chunk: int) -> None:
        """Ask for a chunk."""
        self._parts[chunk] = bytearray()
        for offset in range(0, self._manifest.spot(chunk).size, OUTPUT_CHUNK_BYTES):
            while not self.has_room():
                self.take_one()
            work = self._supplier.source.begin_piece(self._manifest.digest, chunk, offset)
            self._fetch.note(work, is_open=True)
            self._waiting.append((chunk, work))

    def take_one(self) -> bool:
        """Wait for the next piece; return False if there is none."""
        if not self._waiting:
            return False
        chunk, work = self._waiting.popleft()
        try:
            data = work.wait_or_cancel()
        finally:
            self._fetch.note(work, is_open=False)
        part, size = self._parts[chunk], self._manifest.spot(chunk).size
        if len(data) != min(OUTPUT_CHUNK_BYTES, size - len(part)):
            data = b""  # then the chunk is not what was announced
            size = len(part)
        part += data
        if len(part) >= size:
            self._fetch.arrived(self._supplier, chunk, bytes(part))
            del self._parts[chunk]
        return True

    def close(self) -> None:
        """End the calls that are under way."""
        for _, work in self._waiting:
            work.cancel()
            self._fetch.note(work, is_open=False)
