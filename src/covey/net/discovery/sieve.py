"""Which multicast packets are parsed: those about covey, of a usual size, within a rate.

Any machine on the network can send such packets, from any address. A packet that does not pass costs only its receipt.
"""

from __future__ import annotations

from typing import Final

from covey.base.pace import Bucket, Buckets

MOST_BYTES: Final = 1500
"""Bytes of a packet; covey sends at most half of that."""
MOST_RECORDS: Final = 16
"""Records of a packet, questions included."""
PACKET_RATE, PACKET_BURST = 20.0, 60.0
"""Packets from one address: rate a second, and burst. Several nodes may share it, and send a few as they start."""
ALL_PACKETS_RATE, ALL_PACKETS_BURST = 200.0, 400.0
"""The same for all addresses together: addresses can be forged."""
_HEADER_BYTES: Final = 12
_TRUNCATED: Final = 0x02
_RESPONSE: Final = 0x80
_COVEY_NAME: Final = b"\x06_covey\x04_tcp\x05local"


class Sieve:
    """Decides for each packet whether to parse it, and counts those that do not pass."""

    def __init__(self) -> None:
        self.dropped = 0
        """Packets about covey that did not pass."""
        self._by_source = Buckets(PACKET_RATE, PACKET_BURST)
        self._total = Bucket(ALL_PACKETS_RATE, ALL_PACKETS_BURST)

    def passes(self, packet: bytes, source: str, now: float) -> bool:
        """Tell whether a packet is worth parsing."""
        if _COVEY_NAME not in packet:
            return False
        is_usual = len(packet) <= MOST_BYTES and _records(packet) <= MOST_RECORDS and not packet[2] & _TRUNCATED
        if is_usual and self._by_source.take(source, now) and self._total.take(now):
            return True
        self.dropped += 1
        return False


def is_response(packet: bytes) -> bool:
    """Tell whether a DNS packet is a response, not a query."""
    return len(packet) > 2 and bool(packet[2] & _RESPONSE)


def _records(packet: bytes) -> int:
    """Return the number of records that a DNS packet claims to have."""
    header = packet[:_HEADER_BYTES]
    return sum(int.from_bytes(header[at : at + 2], "big") for at in range(4, _HEADER_BYTES, 2))
