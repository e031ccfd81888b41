"""What Linux knows about a TCP connection: when the other machine last acknowledged, and whether the path is dead.

And what it can do with one: space out what it sends, and send on in spite of losses.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import sys
from typing import Final, NamedTuple, Protocol

STUCK_TIMEOUTS: Final = 3
"""Retransmission timeouts in a row, each twice as long as the one before, after which a path is taken to be dead..."""
STUCK_SENDER_SECONDS: Final = 2.0
"""... if nothing was acknowledged for so long either. On a local network both together take two to three seconds."""
SLOW_TIMEOUTS: Final = 2
"""So many are enough if they alone took STUCK_SENDER_SECONDS. Where round trips were long before, the kernel begins
with a long timeout, and the third one would end after seven times that."""

SUSPECT_TIMEOUTS: Final = 2
"""Retransmission timeouts in a row after which a lane with other streams uses those: on a local network 0.6 s. Nothing
is lost if the path was not dead."""
LEAST_SENDING_US: Final = 50_000
LEAST_BUSY_BYTES: Final = 1 << 18
"""Microseconds of sending, and bytes that were sent, after which a lane takes a speed from them."""

PATH_CHECK_SECONDS: Final = 0.5
"""How often an operation that makes no progress checks whether the path is dead."""

STUCK: Final = "does not acknowledge what is sent: the path is dead, or swallows long packets (MTU)"
"""What to say of the other end of a connection that is stuck."""

_TIMEOUTS_AND_PROBES: Final = struct.Struct("=2xBB")
_NEXT_TIMEOUT: Final = struct.Struct("=8xI")
_LAST_ACK: Final = struct.Struct("=56xI")
"""Offsets in Linux's struct tcp_info: tcpi_retransmits, tcpi_probes, tcpi_rto (microseconds), tcpi_last_ack_recv
(milliseconds)."""


_INFO_BYTES: Final = 184
_ACKED_AND_BUSY: Final = struct.Struct("=120xQ40xQ")
"""tcpi_bytes_acked, and tcpi_busy_time: microseconds in which something was being sent."""
_ACKED_BUSY_AND_BLOCKED: Final = struct.Struct("=120xQ40xQQ")
"""The same, and tcpi_rwnd_limited: microseconds of that in which the receiver had no room."""
_ACKED_AND_UNSENT: Final = struct.Struct("=24xI92xQ16xI")
"""tcpi_unacked, tcpi_bytes_acked, and tcpi_notsent_bytes."""
_RECEIVED: Final = struct.Struct("=128xQ")
"""tcpi_bytes_received."""
_LEAST_ROUND_TRIP: Final = struct.Struct("=148xI")
"""tcpi_min_rtt: microseconds."""
_QUEUE: Final = struct.Struct("=68xI48xQ16xII8xQ")
"""tcpi_rtt, tcpi_bytes_acked, tcpi_notsent_bytes, tcpi_min_rtt, and tcpi_delivery_rate (bytes a second)."""
_RETRANSMITTED: Final = struct.Struct("=100xI32xI")
"""tcpi_total_retrans and tcpi_segs_out: packets that were sent again, and all."""
_UNKNOWN: Final = 0xFFFFFFFF
"""What the kernel says of a round trip that it has not measured."""
_SIOCOUTQNSD: Final = 0x894B
"""Request of Linux for the number of bytes that were not sent."""
_SO_MAX_PACING_RATE: Final = 47
"""Option of Linux for which the socket module has no name."""
LEAST_SPEED_BYTES: Final = 1 << 20
"""A speed is known after so many bytes; the first ones travel while a connection still looks for its speed."""


class Connection(Protocol):
    """The part of a socket's interface that is needed here."""

    @property
    def family(self) -> int:
        """Return the family of its addresses."""

    def getsockopt(self, level: int, name: int, size: int, /) -> bytes:
        """Return an option of the socket."""


class Acknowledgements(NamedTuple):
    """What the other machine's kernel has acknowledged."""

    seconds_ago: float
    """When it last acknowledged anything."""
    unacknowledged: int
    """Segments that were sent and not acknowledged."""
    timeouts: int
    """Retransmissions in a row without an acknowledgement."""
    next_timeout: float
    """Seconds of the timeout that runs now: twice the one before."""
    unsent: int = 0
    """Bytes that the kernel has not sent yet."""
    probes: int = 0
    """How often in a row the kernel tried in vain to send some of them. The interface is gone, or this machine's own
    firewall drops the packets; a receiver that only does not read answers such probes."""

    @property
    def is_stuck(self) -> bool:
        """Whether the path is dead. The kernel of a receiver that does not read still acknowledges."""
        is_overdue = self.timeouts >= STUCK_TIMEOUTS and self.seconds_ago >= STUCK_SENDER_SECONDS
        # `seconds_ago` cannot tell for how long bytes have been on the way: the connection may have been idle before.
        is_slow = self.timeouts >= SLOW_TIMEOUTS and self.timed_out_seconds >= STUCK_SENDER_SECONDS
        is_held_back = self.unsent > 0 and self.probes >= STUCK_TIMEOUTS and self.seconds_ago >= STUCK_SENDER_SECONDS
        return (self.unacknowledged > 0 and (is_overdue or is_slow)) or is_held_back

    @property
    def timed_out_seconds(self) -> float:
        """How long the timeouts took that are over: with a first one of 1 s, two took 3 s, and the next takes 4 s."""
        return self.next_timeout * (1 - 0.5**self.timeouts)


def _tcp_info(sock: Connection, *forms: struct.Struct) -> list[int] | None:
    """Return parts of Linux's struct tcp_info; None on other systems, for sockets that are not TCP, and closed ones."""
    if sys.platform != "linux" or sock.family == socket.AF_UNIX:
        return None
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        return [value for form in forms for value in form.unpack_from(info)]
    except (OSError, struct.error):
        return None


def acknowledgements(sock: Connection) -> Acknowledgements | None:
    """Return what the kernel knows; None on other systems, and for sockets that are not TCP."""
    known = _tcp_info(sock, _LAST_ACK, _TIMEOUTS_AND_PROBES, _NEXT_TIMEOUT, _ACKED_AND_UNSENT)
    if known is None:
        return None
    last, timeouts, probes, next_timeout, unacked, _, unsent = known
    return Acknowledgements(last / 1e3, unacked, timeouts, next_timeout / 1e6, unsent, probes)


def is_stuck(sock: Connection, *, has_moved: bool = False) -> bool:
    """Tell whether the path of a connection is dead.

    `has_moved` says that the other machine was found to be reached over another network only: then one timeout is
    enough.
    """
    is_silent = getattr(sock, "is_silent", None)
    if is_silent is not None:  # a connection by QUIC
        return bool(is_silent(has_moved=has_moved))
    known = acknowledgements(sock)
    if known is None:
        return False
    return known.is_stuck or (has_moved and known.unacknowledged > 0 and known.timeouts > 0)


def sending_speed(sock: Connection) -> float | None:
    """Return how many bytes a second a connection has sent while it was sending; None if that is not known."""
    known = _tcp_info(sock, _ACKED_AND_BUSY)
    if known is None:
        return None
    acked, busy = known
    return acked / busy * 1e6 if acked >= LEAST_SPEED_BYTES and busy else None


def flow(sock: Connection) -> tuple[int, int] | None:
    """Return the bytes that the other machine has got, and the microseconds in which the network held up the others.

    Time in which the receiver had no room does not count: its program does not read, and the network is not to blame.
    None if that is not known.
    """
    known = _tcp_info(sock, _ACKED_BUSY_AND_BLOCKED)
    if known is None:
        return None
    acked, busy, blocked = known
    return acked, max(0, busy - blocked)


class SendingProgress(NamedTuple):
    """How far a connection has sent."""

    acknowledged: int
    """Bytes that the other machine has, since the connection was made."""
    is_sending: bool
    """Whether there is something that it does not have."""


class PathFacts(NamedTuple):
    """What the kernel knows of the path of a connection."""

    acknowledged: int
    """Bytes that the other machine has."""
    busy: int
    """Microseconds in which something was being sent."""
    is_suspect: bool
    """Whether the path may be dead: see SUSPECT_TIMEOUTS."""
    round_trip: float
    """The shortest one of the last minutes, in seconds: without the queues that the connection itself fills."""


def path_facts(sock: Connection) -> PathFacts | None:
    """Return what the kernel knows of a path; None if that is nothing, or if the socket is closed."""
    known = _tcp_info(sock, _ACKED_AND_BUSY, _ACKED_AND_UNSENT, _TIMEOUTS_AND_PROBES, _LEAST_ROUND_TRIP)
    if known is None:
        return None
    acked, busy, unacked, _, unsent, timeouts, probes, least = known
    # Where the interface is gone, nothing is even sent: the kernel only probes. Any answer begins both counts anew.
    is_silent = (unacked > 0 and timeouts >= SUSPECT_TIMEOUTS) or (unsent > 0 and probes >= SUSPECT_TIMEOUTS)
    return PathFacts(acked, busy, is_silent, 0.0 if least == _UNKNOWN else least / 1e6)


def progress(sock: Connection) -> SendingProgress | None:
    """Return how far a connection has sent; None if that is not known, or if the socket is closed."""
    known = _tcp_info(sock, _ACKED_AND_UNSENT)
    if known is None:
        return None
    unacked, acked, unsent = known
    return SendingProgress(acked, unacked + unsent > 0)


class SendingQueue(NamedTuple):
    """What a connection that sends fills."""

    acknowledged: int
    """Bytes that the other machine has, since the connection was made."""
    has_unsent: bool
    """Whether the kernel has bytes that it has not sent yet."""
    delay: float
    """How much longer than the shortest one its round trips are, in seconds."""
    speed: int
    """Bytes a second that have arrived, as the kernel has last measured them."""


def sending_queue(sock: Connection) -> SendingQueue | None:
    """Return what a connection fills; None if that is not known, or if the socket is closed."""
    known = _tcp_info(sock, _QUEUE)
    if known is None:
        return None
    round_trip, acked, unsent, least, speed = known
    return SendingQueue(acked, unsent > 0, max(0, round_trip - least) / 1e6, speed)


def received_bytes(sock: Connection) -> int | None:
    """Return how much has arrived on a connection; None if that is not known, or if the socket is closed."""
    known = _tcp_info(sock, _RECEIVED)
    return None if known is None else known[0]


BBR: Final = "bbr"
"""A congestion control of Linux that measures what a path carries, instead of waiting for losses."""
_NAME_BYTES: Final = 16


class SentPackets(NamedTuple):
    """The packets of a connection since it was made."""

    sent: int
    """All, those that were sent again included."""
    again: int

    def lost_since(self, before: SentPackets) -> float:
        """Return the share of the packets since then that were sent again."""
        return (self.again - before.again) / max(1, self.sent - before.sent)


def sent_packets(sock: Connection) -> SentPackets | None:
    """Return what a connection has sent; None if that is not known, or if the socket is closed."""
    known = _tcp_info(sock, _RETRANSMITTED)
    if known is None:
        return None
    again, sent = known
    return SentPackets(sent, again)


def congestion_control(sock: Connection) -> str:
    """Return the name of a connection's congestion control; empty if that is not known."""
    try:
        name = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _NAME_BYTES)
    except (AttributeError, OSError):
        return ""
    return name.partition(b"\0")[0].decode("ascii", "replace")


def use_bbr(sock: socket.socket) -> bool:
    """Let a connection use BBR from now on; return whether the system permits it."""
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, BBR.encode())
    except (AttributeError, OSError):
        return False
    return True


UNPACED: Final = 2 ** (8 * struct.calcsize("@L")) - 1
"""The rate of a connection whose packets the kernel does not space out."""


def pace(sock: socket.socket, bytes_per_second: int) -> None:
    """Let the kernel space out what a connection sends; OSError if it cannot, or if the socket is closed."""
    sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("@L", bytes_per_second))


def limit_unsent(descriptor: int, most: int) -> None:
    """Let the kernel take more of a TCP connection only while it has not sent less than `most` bytes; 0: no limit.

    Does nothing where that is not possible.
    """
    with contextlib.suppress(AttributeError, OSError), socket.socket(fileno=os.dup(descriptor)) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, most)


def unsent_bytes(descriptor: int) -> int:
    """Return how many bytes of a connection the kernel has not sent yet; 0 if that is not known."""
    try:
        return int(struct.unpack("i", fcntl.ioctl(descriptor, _SIOCOUTQNSD, bytes(4)))[0])
    except OSError:
        return 0


def can_pace() -> bool:
    """Tell whether this system can space out what a connection sends."""
    if sys.platform != "linux":
        return False
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
            pace(sock, LEAST_SPEED_BYTES)
    except OSError:
        return False
    return True
