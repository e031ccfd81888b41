"""A UDP socket that moves many datagrams with one call, where the kernel can (UDP_SEGMENT and UDP_GRO of Linux)."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
import struct
import sys
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from covey.net.host.descriptors import track

if TYPE_CHECKING:
    from collections.abc import Sequence

    from covey.net.quic.carrier import Address

SOCKET_BUFFER_BYTES: Final = 4 << 20
"""What the kernel is asked to keep of what arrives; it may give less. More than a window would need no more."""
SEGMENTS_LIMIT: Final = 44
"""Datagrams in one call: together shorter than the 64 KiB of one datagram."""
_RECEIVE_BYTES: Final = 1 << 16
_UDP_SEGMENT, _UDP_GRO = 103, 104
_IPV6_PKTINFO: Final = struct.Struct("=16sI")
_IP_PKTINFO: Final = struct.Struct("=I4s4s")
_GRO: Final = struct.Struct("=i")
_SEGMENT: Final = struct.Struct("=H")
_NO_SEGMENTS: Final = frozenset({errno.EIO, errno.EINVAL, errno.ENOPROTOOPT, errno.EOPNOTSUPP})
_CLOSED: Final = frozenset({errno.EBADF, errno.ENOTSOCK})
"""Errors of the socket itself. All others concern one datagram, which is lost, as on the way: the network may come
back, and a source address may be one that nothing can be sent to."""


class Arrived(NamedTuple):
    """Datagrams that came together."""

    datagrams: list[bytes]
    source: Address
    local_ip: str
    """The address they were sent to; empty if the system does not tell."""


class UdpSocket:
    """A UDP socket that does not block, bound to a free port: of all addresses, or of loopback only."""

    def __init__(self, *, is_local: bool = False) -> None:
        """OSError if the system has no socket for it."""
        dual = socket.has_dualstack_ipv6() and not is_local
        self.sock = socket.socket(socket.AF_INET6 if dual else socket.AF_INET, socket.SOCK_DGRAM)
        track(self.sock)
        try:
            self.sock.setblocking(False)
            if dual:
                self.sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
                with contextlib.suppress(OSError):
                    self.sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)
            self._segments = self._receives_many = self._tells_local = False
            if sys.platform == "linux":
                with contextlib.suppress(OSError):
                    self.sock.setsockopt(socket.IPPROTO_UDP, _UDP_GRO, 1)
                    self._segments = self._receives_many = True
                with contextlib.suppress(OSError):
                    level = (socket.IPPROTO_IPV6, socket.IPV6_RECVPKTINFO) if dual else (socket.IPPROTO_IP, 8)
                    self.sock.setsockopt(*level, 1)
                    self._tells_local = True
            self.sock.bind(("127.0.0.1" if is_local else "::" if dual else "0.0.0.0", 0))
        except BaseException:
            self.sock.close()
            raise
        self._dual = dual
        self.port = int(self.sock.getsockname()[1])

    def address(self, way: Sequence[Any]) -> Address:
        """Return an address as this socket takes it; OSError if it cannot reach such addresses."""
        ip, port = str(way[0]), int(way[1])
        if ":" in ip:
            if not self._dual:
                raise OSError(errno.EAFNOSUPPORT, "no IPv6 here")
            return ip.partition("%")[0], port, 0, int(way[3]) if len(way) > 3 else 0
        return (f"::ffff:{ip}", port, 0, 0) if self._dual else (ip, port)

    def receive(self) -> Arrived | None:
        """Return datagrams that wait, from one source; None if there are none."""
        while True:
            try:
                data, ancillary, _, source = self.sock.recvmsg(_RECEIVE_BYTES, 128)
            except BlockingIOError:
                return None
            except OSError as error:  # a report about something that was sent
                if error.errno in _CLOSED:
                    raise
                continue
            break
        size, local = 0, ""
        for level, kind, value in ancillary:
            if level == socket.IPPROTO_UDP and kind == _UDP_GRO and len(value) >= _GRO.size:
                (size,) = _GRO.unpack_from(value)
            elif level == socket.IPPROTO_IPV6 and kind == socket.IPV6_PKTINFO and len(value) >= _IPV6_PKTINFO.size:
                local = _plain(value[:16])
            elif level == socket.IPPROTO_IP and len(value) >= _IP_PKTINFO.size:
                local = _plain(_IP_PKTINFO.unpack_from(value)[2])
        step = size if size > 0 else max(1, len(data))
        datagrams = [data[at : at + step] for at in range(0, len(data), step)]
        ip = str(source[0]).partition("%")[0]
        return Arrived(datagrams, (ip, *source[1:]), local)

    def send(self, datagrams: Sequence[tuple[bytes, Address]]) -> int:
        """Send datagrams, and return how many: fewer than given if the kernel has no room for more now.

        One that cannot be sent, because of the network or of its address, counts as sent: it is lost, as on the way.
        """
        at = 0
        while at < len(datagrams):
            count = _run_length(datagrams, at) if self._segments else 1
            try:
                self._send_run(datagrams[at : at + count])
            except BlockingIOError:
                return at
            except OSError as error:
                if count > 1 and error.errno in _NO_SEGMENTS:
                    self._segments = False  # the device or the kernel cannot cut
                    continue
                if error.errno in _CLOSED:
                    raise
            at += count
        return at

    def _send_run(self, run: Sequence[tuple[bytes, Address]]) -> None:
        first, address = run[0]
        if len(run) == 1:
            self.sock.sendto(first, address)
            return
        cut = [(socket.IPPROTO_UDP, _UDP_SEGMENT, _SEGMENT.pack(len(first)))]
        self.sock.sendmsg([data for data, _ in run], cut, 0, address)

    def close(self) -> None:
        """Close the socket."""
        self.sock.close()


def _run_length(datagrams: Sequence[tuple[bytes, Address]], at: int) -> int:
    """Return how many datagrams from `at` on can be sent with one call: to one address, of one size but the last."""
    first, address = datagrams[at]
    size, count, stop = len(first), 1, min(len(datagrams), at + SEGMENTS_LIMIT)
    for index in range(at + 1, stop):
        data, to = datagrams[index]
        if to != address or len(data) > size:
            break
        count += 1
        if len(data) < size:
            break
    return count


def _plain(packed: bytes) -> str:
    ip = ipaddress.ip_address(packed)
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return str(mapped or ip)


def plain_source(address: Address) -> str:
    """Return the IP address of a datagram's source, as limits count it."""
    ip = str(address[0])
    return ip.removeprefix("::ffff:") if "." in ip else ip
