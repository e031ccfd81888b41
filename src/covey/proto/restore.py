"""The decisions of `restore`: which ranks give their state to which, and which chunk is fetched from which donor.

Every rank computes `elect` and `objection` from the same manifests, so all come to the same result without another
exchange. `Fetch` belongs to one receiver, `Orders` to one donor.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from covey.wire.manifest import Manifest

DONOR_WINDOW_BYTES: Final = 32 * 1024 * 1024
"""Bytes asked of one donor before the first of them arrives: enough to fill a long path."""
WINDOW_CHUNKS: Final = 256
"""The same in chunks: each costs a message."""
MOVING_CHUNKS: Final = 2
"""Chunks that a donor sends to one receiver at a time: one that moves and one that follows without a pause. More would
alternate piece by piece, and each chunk would have left the receiver's cache before it is complete and checked."""
_NAMES_SHOWN: Final = 5


@dataclass(frozen=True)
class StateChoice:
    """The state that all ranks will have."""

    winner: Manifest
    donors: tuple[int, ...]
    """The ranks that have the winner's state."""
    receivers: tuple[int, ...]
    drifted: tuple[int, ...]
    """The receivers that are not fresh."""
    is_first: bool
    """Whether all ranks are fresh."""


def elect(manifests: Mapping[int, Manifest]) -> StateChoice:
    """Choose the state of most ranks that are not fresh; the state of the lowest rank wins a tie.

    If all ranks are fresh, the lowest rank's state wins: any would do, as long as all start with the same.
    """
    ranks = sorted(manifests)
    voters = [rank for rank in ranks if not manifests[rank].is_fresh]
    votes = Counter(manifests[rank].digest for rank in voters or ranks[:1])  # in order of rank, as is most_common
    digest = votes.most_common(1)[0][0]
    donors = tuple(rank for rank in ranks if manifests[rank].digest == digest)
    receivers = tuple(rank for rank in ranks if manifests[rank].digest != digest)
    drifted = tuple(rank for rank in receivers if not manifests[rank].is_fresh)
    return StateChoice(manifests[donors[0]], donors, receivers, drifted, not voters)


def differing(manifest: Manifest, winner: Manifest) -> list[str]:
    """Return the names that are missing in one manifest or have different contents."""
    mine, theirs = manifest.by_name, winner.by_name
    names = sorted(mine.keys() | theirs.keys())
    return [name for name in names if not (name in mine and name in theirs and mine[name].is_same(theirs[name]))]


def objection(manifests: Mapping[int, Manifest], election: StateChoice) -> str | None:
    """Return why some receiver cannot be filled in place, for the first such name; None if all can."""
    donor = election.donors[0]
    for wanted in election.winner.entries:
        for rank in election.receivers:
            mine = manifests[rank].by_name.get(wanted.name)
            if mine is None:
                continue
            if not mine.is_like(wanted):
                return f"{wanted.name!r} is {wanted.kind} on rank {donor}, but {mine.kind} on rank {rank}"
            if mine.is_array and not mine.is_writable and not mine.is_same(wanted):
                return f"{wanted.name!r} is read-only on rank {rank}; pass a copy"
    return None


def listed(names: Sequence[str]) -> str:
    """Return names for an error message; only the first few of many."""
    shown = ", ".join(map(repr, names[:_NAMES_SHOWN]))
    return shown if len(names) <= _NAMES_SHOWN else f"{shown} and {len(names) - _NAMES_SHOWN} more"


class Fetch:
    """The chunks that one receiver misses, and the requests to donors for them.

    Every request that `ask` returns ends in one call of `arrived` or `failed`. A donor that is lost, or sent something
    that does not match its manifest, gets no further requests; its chunks are requested from the others.
    """

    def __init__(self, missing: Mapping[int, int], donors: Sequence[int], start: int) -> None:
        """`missing` maps chunks to their bytes; `start`, modulo the number of donors, is the first donor to ask."""
        self._todo = deque(missing)
        self._bytes = missing
        first = start % len(donors)
        self._donors = [*donors[first:], *donors[:first]]
        self._asked: dict[int, set[int]] = {donor: set() for donor in donors}
        self._asked_bytes = dict.fromkeys(donors, 0)
        self._left = len(missing)

    @property
    def donors(self) -> tuple[int, ...]:
        """The donors that may still be asked."""
        return tuple(self._donors)

    @property
    def is_complete(self) -> bool:
        return not self._left

    @property
    def is_stuck(self) -> bool:
        """Whether no donor is left and no request is under way, but chunks are missing."""
        return bool(self._left) and not self._donors and not any(self._asked.values())

    def waits_for(self) -> tuple[int, ...]:
        """Return the donors with unanswered requests."""
        return tuple(sorted(donor for donor, asked in self._asked.items() if asked))

    def ask(self) -> list[tuple[int, int]]:
        """Return the requests to send now, as donor and chunk: one per donor in turn, until all have enough."""
        requests = []
        donors = deque(self._donors)
        while self._todo and donors:
            donor = donors.popleft()
            asked = self._asked[donor]
            if len(asked) < WINDOW_CHUNKS and self._asked_bytes[donor] < DONOR_WINDOW_BYTES:
                chunk = self._todo.popleft()
                asked.add(chunk)
                self._asked_bytes[donor] += self._bytes[chunk]
                requests.append((donor, chunk))
                donors.append(donor)
        return requests

    def arrived(self, donor: int, chunk: int, *, is_right: bool) -> None:
        """Note that a chunk has arrived; `is_right` if it has the expected tag."""
        if is_right:
            self._end(donor, chunk)
            self._left -= 1
        else:
            self.failed(donor, chunk)

    def failed(self, donor: int, chunk: int) -> None:
        """Note that a chunk will not come, or came wrong: request it elsewhere, and nothing more from this donor."""
        self._end(donor, chunk)
        self._todo.appendleft(chunk)
        if donor in self._donors:
            self._donors.remove(donor)

    def _end(self, donor: int, chunk: int) -> None:
        self._asked[donor].remove(chunk)
        self._asked_bytes[donor] -= self._bytes[chunk]


class Orders:
    """Requests of receivers to one donor. A few chunks per receiver move at a time, in the order of the requests."""

    def __init__(self, receivers: Sequence[int]) -> None:
        self._waiting: dict[int, deque[int]] = {receiver: deque() for receiver in receivers}
        self._moving = dict.fromkeys(receivers, 0)

    def asked(self, receiver: int, chunks: Sequence[int]) -> list[int]:
        """Take a request; return the chunks to send to this receiver now."""
        self._waiting[receiver].extend(chunks)
        return self._next(receiver)

    def sent(self, receiver: int) -> list[int]:
        """Note that a chunk was sent to this receiver; return the chunks to send to it now."""
        self._moving[receiver] -= 1
        return self._next(receiver)

    def _next(self, receiver: int) -> list[int]:
        waiting = self._waiting[receiver]
        count = min(len(waiting), MOVING_CHUNKS - self._moving[receiver])
        self._moving[receiver] += count
        return [waiting.popleft() for _ in range(count)]
