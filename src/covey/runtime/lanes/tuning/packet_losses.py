"""Lanes on which packets get lost use BBR, Linux's congestion control that does not take a loss for a jam.

CUBIC, which Linux uses by default, halves what it sends whenever a packet is lost. On Wi-Fi or a long line packets are
lost without a jam, and 1 % of loss makes CUBIC ten times as slow as BBR (docs/benchmarks.md). Where nothing is lost,
CUBIC is as good and shares a network better, so a lane begins with what the system uses. The kernel changes it in the
middle of a transfer. On the control loop.
"""

from __future__ import annotations

import logging
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from covey.net.host import tcp
from covey.runtime.tasks import Recurring

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

    from covey.runtime.tasks import Tasks

logger = logging.getLogger("covey")

LOSS_SAMPLE_EVERY: Final = 1.0
"""How often the kernel is asked how many packets were sent, and how many of them again."""
LEAST_PACKETS: Final = 500
"""Smallest sample, in packets, from which a loss rate is computed."""
LOSSY: Final = 0.005
"""A path that loses this share of its packets, or more, is a lossy one."""
LOSSY_ADDRESSES: Final = 1024
"""Addresses that are remembered as lossy; then all are forgotten."""


@dataclass
class _Watched:
    """A connection, and what was known of it when a share of losses was last taken."""

    sock: weakref.ref[socket.socket]
    address: str
    packets: tcp.SentPackets


class PacketLosses:
    """Watches the connections of one node's lanes."""

    def __init__(self, tasks: Tasks) -> None:
        self._watched = list[_Watched]()
        self._lossy: set[str] = set()
        """Addresses to which a path is lossy: new connections to them use BBR from the beginning."""
        self._is_told = False
        self._looking = Recurring(tasks.spawn, LOSS_SAMPLE_EVERY, self._look, is_needed=lambda: self._watched)

    def watch(self, socks: Sequence[socket.socket]) -> None:
        """Watch the connections of a lane until they are closed. Only TCP of Linux tells of losses."""
        for sock in socks:
            sent = tcp.sent_packets(sock)
            if sent is None or tcp.congestion_control(sock) in ("", tcp.BBR):
                continue
            try:
                own, address = (str(name[0]) for name in (sock.getsockname(), sock.getpeername()))
            except OSError:  # it is closed already
                continue
            if own == address or (address in self._lossy and tcp.use_bbr(sock)):
                continue
            self._watched.append(_Watched(weakref.ref(sock), address, sent))
        self._looking.begin()

    def _look(self, _seconds: float) -> None:
        self._watched = [each for each in self._watched if self._is_still_watched(each)]

    def _is_still_watched(self, watched: _Watched) -> bool:
        """Look at a connection; return whether to look again: it is open, and has not changed to BBR."""
        sock = watched.sock()
        sent = None if sock is None else tcp.sent_packets(sock)
        if sock is None or sent is None:
            return False
        if sent.sent - watched.packets.sent < LEAST_PACKETS:
            return True
        lost, watched.packets = sent.lost_since(watched.packets), sent
        if lost < LOSSY:
            return True
        if len(self._lossy) >= LOSSY_ADDRESSES:
            self._lossy.clear()
        self._lossy.add(watched.address)
        if tcp.use_bbr(sock):
            logger.info(
                "%.1f %% of the packets to %s are lost: the lane uses BBR from now on", 100 * lost, watched.address
            )
            return False
        if not self._is_told:
            self._is_told = True
            logger.warning(
                "%.1f %% of the packets to %s are lost, which makes lanes slow, and this system does not let covey use "
                "BBR: as root, `modprobe tcp_bbr` and `sysctl -w net.ipv4.tcp_congestion_control=bbr`",
                100 * lost,
                watched.address,
            )
        return False
