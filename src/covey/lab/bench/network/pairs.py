"""Measures what one rank sends another over a lane of their own: small messages and answers, and streams of bytes."""

from __future__ import annotations

import math
import statistics
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from covey.base.errors import DeadlineError, RemoteProtocolError
from covey.lab.bench.engines import partner

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from covey.runtime.group.group import Group

PING, TRY, STREAM, END_ORDER = range(4)
"""Orders: answer; take so many bytes and answer; take pieces of so many bytes up to the marked one, and answer."""
MORE, LAST = 0, 1
"""The first byte of each piece of a stream."""
PINGS: Final = 200
PINGS_SECONDS: Final = 0.02
"""Small messages are sent for this long, at most PINGS of them."""
FEW_PINGS: Final = 8
FEW_PINGS_SECONDS: Final = 0.2
"""Or for this long, if they were fewer than FEW_PINGS; then at least two."""
TRY_BYTES: Final = (16 << 10, 128 << 10, 1 << 20)
"""Sizes that are tried in turn, until one takes TRY_SECONDS; they also end the slow start of TCP."""
TRIAL_STREAM_SECONDS: Final = 0.005
STREAM_PIECE_SECONDS: Final = 0.01
"""What a piece of a stream should take, so that a stream ends soon after its time, and calls cost little."""
LEAST_STREAM_PIECE: Final = 16 << 10
MOST_STREAM_PIECE: Final = 4 << 20
TURN_SECONDS: Final = 0.3
"""One turn measures each direction alone and both at once, for a third of this each."""
STREAM_LIMIT_SECONDS: Final = 120.0
"""A stream that has not ended by then never does."""


@dataclass(frozen=True)
class LinkFigures:
    """How fast one rank sends to another, with the pair alone. Checked when built: it comes from other ranks."""

    sender: int
    receiver: int
    lane: str
    """The kind of lane."""
    round_trip: float
    """Seconds for a small message and its answer: the median."""
    bytes_per_second: float
    """The rate of one stream."""
    both_bytes_per_second: float
    """The rate of one stream while the receiver sends one as well."""

    def __post_init__(self) -> None:
        for value in (self.round_trip, self.bytes_per_second, self.both_bytes_per_second):
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{value} is neither a time nor a speed")
        if not (0 < len(self.lane) <= 20 and self.lane.isalpha()):
            raise ValueError("the lane has no name")


def checked(by_rank: Sequence[Sequence[LinkFigures]]) -> list[LinkFigures]:
    """Return the figures of all ranks by sender and receiver.

    Raises:
        RemoteProtocolError: a rank sent figures of another one, or not all of its own.
    """
    ranks = range(len(by_rank))
    for rank, figures in enumerate(by_rank):
        if [(each.sender, each.receiver) for each in figures] != [(rank, other) for other in ranks if other != rank]:
            raise RemoteProtocolError(f"rank {rank} sent figures of links that are not its own, or not all of them")
    return [each for figures in by_rank for each in figures]


def slowest(links: Sequence[LinkFigures]) -> LinkFigures:
    """Return the link with the lowest throughput."""
    return min(links, key=lambda link: link.bytes_per_second)


def used_by(operation: str, links: Sequence[LinkFigures], size: int) -> list[LinkFigures]:
    """Return the links that an operation can be held against: all, but for `send_recv` those between partners."""
    if operation != "send_recv":
        return list(links)
    return [link for link in links if partner(link.sender, size) == link.receiver]


def turns_in(seconds: float) -> tuple[int, float]:
    """Return how many turns fit into `seconds`, at least two, and the seconds of each stream in them."""
    turns = max(2, round(seconds / TURN_SECONDS))
    return turns, seconds / turns / 3


def piece_for(bytes_per_second: float) -> int:
    """Return the bytes of a piece of a stream that is so fast."""
    return int(min(max(bytes_per_second * STREAM_PIECE_SECONDS, LEAST_STREAM_PIECE), MOST_STREAM_PIECE))


def measure_pair(there: Group, back: Group, seconds: float) -> LinkFigures:
    """Measure both directions with the other rank of two groups of two, and return what this rank sends.

    Both ranks call it. The lower one sends in `there`, the other one in `back`; ranks in the result are those of the
    group that both were split from.
    """
    turns, stream_seconds = turns_in(seconds)
    own, other = (there, back) if there.rank == 0 else (back, there)
    sender = Sender(own)
    alone = list[float]()
    for group in (there, back):
        if group is not own:
            follow(group)
            continue
        sender.ping()
        sender.prepare()
        alone += [sender.stream(stream_seconds) for _ in range(turns)]
        sender.end()
    both = list[float]()
    for _ in range(turns):
        there.barrier()
        both.append(_both_ways(lambda: _one_stream(sender, stream_seconds), lambda: follow(other)))
    rank, peer = own.to_parent(own.rank), own.to_parent(1 - own.rank)
    return LinkFigures(rank, peer, own.lanes()[1 - own.rank], sender.round_trip, max(alone), max(both))


class Sender:
    """One end of a group of two: sends, and measures with its own clock."""

    def __init__(self, group: Group) -> None:
        self.round_trip = 0.0
        """The median of the pings, in seconds."""
        self._group, self._rank = group, group.rank
        self._shortest = 0.0
        self._piece = LEAST_STREAM_PIECE
        self._bytes = np.random.default_rng(group.rank).integers(0, 256, MOST_STREAM_PIECE, np.uint8)
        self._order, self._answer = np.zeros(2, np.int64), np.zeros(1, np.int64)

    def ping(self) -> None:
        """Measure the round trip."""
        taken = list[float]()
        first = began = time.perf_counter()
        while len(taken) < 2 or (
            len(taken) < PINGS and began - first < (FEW_PINGS_SECONDS if len(taken) < FEW_PINGS else PINGS_SECONDS)
        ):
            began = time.perf_counter()
            self._tell(PING)
            self._expect(0)
            taken.append(time.perf_counter() - began)
        self.round_trip, self._shortest = statistics.median(taken), min(taken)

    def prepare(self) -> None:
        """Choose the size of pieces by how long a few sizes take."""
        for nbytes in TRY_BYTES:
            began = time.perf_counter()
            self._tell(TRY, nbytes)
            self._send(nbytes, LAST)
            self._expect(nbytes)
            taken = max(time.perf_counter() - began - self._shortest, 1e-6)
            if taken >= TRIAL_STREAM_SECONDS:
                break
        self._piece = piece_for(nbytes / taken)

    def stream(self, seconds: float) -> float:
        """Send for so long, and return the bytes that arrived in a second; the next stream has pieces to match."""
        self._tell(STREAM, self._piece)
        began = time.perf_counter()
        sent, mark = 0, MORE
        while mark == MORE:
            mark = LAST if time.perf_counter() - began >= seconds else MORE
            self._send(self._piece, mark)
            sent += self._piece
        self._expect(sent)
        speed = sent / max(time.perf_counter() - began - self._shortest, seconds)
        self._piece = max(self._piece, piece_for(speed))
        return speed

    def end(self) -> None:
        """Let the receiver return."""
        self._tell(END_ORDER)

    def _tell(self, order: int, nbytes: int = 0) -> None:
        self._order[:] = order, nbytes
        self._group.broadcast(self._order, root=self._rank)

    def _send(self, nbytes: int, mark: int) -> None:
        self._bytes[0] = mark
        self._group.broadcast(self._bytes[:nbytes], root=self._rank)

    def _expect(self, nbytes: int) -> None:
        self._group.broadcast(self._answer, root=1 - self._rank)
        if self._answer[0] != nbytes:
            raise RemoteProtocolError(f"the receiver of {nbytes} bytes says that it has got {self._answer[0]}")


def follow(group: Group) -> None:
    """Take what the other rank of a group of two sends, until it ends that."""
    root = 1 - group.rank
    space, order, answer = np.zeros(MOST_STREAM_PIECE, np.uint8), np.zeros(2, np.int64), np.zeros(1, np.int64)
    while True:
        group.broadcast(order, root=root)
        what, nbytes = map(int, order)
        if what == END_ORDER:
            return
        answer[0] = 0 if what == PING else _take(group, root, _piece(space, what, nbytes), is_row=what == STREAM)
        group.broadcast(answer, root=group.rank)


def _piece(space: np.ndarray[Any, Any], what: int, nbytes: int) -> np.ndarray[Any, Any]:
    if what not in (TRY, STREAM) or not 1 <= nbytes <= MOST_STREAM_PIECE:
        raise RemoteProtocolError(f"the other rank of a pair gave the order {what} for {nbytes} bytes")
    return space[:nbytes]


def _take(group: Group, root: int, piece: np.ndarray[Any, Any], *, is_row: bool) -> int:
    """Receive one piece, or a row of them up to the marked one; return the bytes."""
    count, until = 0, time.monotonic() + STREAM_LIMIT_SECONDS
    while True:
        group.broadcast(piece, root=root)
        count += piece.size
        if not is_row or piece[0] == LAST:
            return count
        if time.monotonic() > until:
            raise DeadlineError(
                f"a stream between two ranks has not ended within the timeout of {STREAM_LIMIT_SECONDS:g} s"
            )


def _one_stream(sender: Sender, seconds: float) -> float:
    speed = sender.stream(seconds)
    sender.end()
    return speed


def _both_ways(send: Callable[[], float], receive: Callable[[], None]) -> float:
    """Return what `send` returns, while another thread receives; raises what either raises."""
    errors = list[BaseException]()

    def run() -> None:
        try:
            receive()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="covey-bench-receiver", daemon=True)
    thread.start()
    speed = send()
    thread.join(STREAM_LIMIT_SECONDS)
    if errors:
        raise errors[0]
    if thread.is_alive():
        raise DeadlineError(
            f"a stream between two ranks has not ended within the timeout of {STREAM_LIMIT_SECONDS:g} s"
        )
    return speed
