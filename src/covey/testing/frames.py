"""Reads and forges Ethernet frames, as an attacker does: multicast, dials, TCP flows and resets."""

from __future__ import annotations

import ipaddress
import struct
from dataclasses import dataclass, field
from typing import Final, NamedTuple

IPV4: Final = b"\x08\x00"
IPV6: Final = b"\x86\xdd"
_ETHERNET: Final = 14
_TCP_PROTOCOL, _UDP, _ICMP6 = 6, 17, 58
_NEIGHBOUR_DISCOVERY: Final = range(133, 138)
_FIN, _SYN, _RST, _ACK = 0x01, 0x02, 0x04, 0x10


class Segment(NamedTuple):
    """A TCP segment and the frame's halves of its flow, as numbers and raw addresses."""

    source: bytes
    source_port: int
    destination: bytes
    destination_port: int
    sequence: int
    acknowledged: int
    flags: int
    payload: bytes

    @property
    def flow(self) -> tuple[bytes, int, bytes, int]:
        return self[:4]

    @property
    def next_sequence(self) -> int:
        """The number of the byte after this segment; SYN and FIN count as one each."""
        return (self.sequence + len(self.payload) + bool(self.flags & _SYN) + bool(self.flags & _FIN)) % 2**32


def is_stoppable_multicast(frame: bytes) -> bool:
    """Tell whether a network without multicast would lose this frame and still carry IP.

    IPv6 finds its neighbours by multicast, so a network that lost those frames too would have no IPv6 at all.
    """
    if frame[:3] == b"\x01\x00\x5e":
        return True
    if frame[:2] != b"\x33\x33" or frame[2] == 0xFF:
        return False
    return not (len(frame) > 54 and frame[20] == _ICMP6 and frame[54] in _NEIGHBOUR_DISCOVERY)


def is_dial(frame: bytes) -> bool:
    """Tell whether this frame opens a TCP connection: SYN without ACK."""
    protocol, at, _ = _transport(frame)
    return protocol == _TCP_PROTOCOL and len(frame) > at + 13 and frame[at + 13] & (_SYN | _ACK) == _SYN


def flow_key(frame: bytes) -> bytes:
    """Return a cheap key that frames of one direction of a TCP connection share, or b"" for anything else."""
    kind = frame[12:14]
    if kind == IPV4 and frame[23:24] == b"\x06" and frame[14] == 0x45:
        return frame[26:38]
    if kind == IPV6 and frame[20:21] == b"\x06":
        return frame[22:58]
    return b""


def parse_segment(frame: bytes) -> Segment | None:
    """Return the TCP segment in a frame, if there is one."""
    protocol, at, end = _transport(frame)
    if protocol != _TCP_PROTOCOL or len(frame) < at + 20:
        return None
    source, destination = (frame[26:30], frame[30:34]) if frame[12:14] == IPV4 else (frame[22:38], frame[38:54])
    source_port, destination_port, sequence, acknowledged, offset, flags = struct.unpack_from("!HHIIBB", frame, at)
    payload = frame[at + 4 * (offset >> 4) : end]
    return Segment(source, source_port, destination, destination_port, sequence, acknowledged, flags, payload)


def _transport(frame: bytes) -> tuple[int, int, int]:
    """Return the protocol inside IP, and where it begins and ends in the frame; protocol 0 if there is none.

    Short frames are padded, so the end is not always the frame's.
    """
    if frame[12:14] == IPV4 and len(frame) >= 34:
        return frame[23], _ETHERNET + 4 * (frame[14] & 15), _ETHERNET + int.from_bytes(frame[16:18])
    if frame[12:14] == IPV6 and len(frame) >= 54:
        return frame[20], _ETHERNET + 40, _ETHERNET + 40 + int.from_bytes(frame[18:20])
    return 0, 0, 0


def forge_resets(frame: bytes) -> tuple[bytes, bytes] | None:
    """Return resets for both ends of a connection, given the last frame seen in it: (to its receiver, to its sender).

    Each carries exactly the sequence number its victim expects next, as RFC 5961 demands of a reset.
    """
    seen = parse_segment(frame)
    if seen is None:
        return None
    onward = seen._replace(sequence=seen.next_sequence, flags=_RST, payload=b"")
    back = onward._replace(
        source=seen.destination,
        source_port=seen.destination_port,
        destination=seen.source,
        destination_port=seen.source_port,
        sequence=seen.acknowledged,
    )
    return _build(onward, to=frame[:6], sender=frame[6:12]), _build(back, to=frame[6:12], sender=frame[:6])


def _build(segment: Segment, *, to: bytes, sender: bytes) -> bytes:
    """Return a frame around a TCP segment without options."""
    ports = (segment.source_port, segment.destination_port, segment.sequence, 0, 5 << 4, segment.flags, 0)
    length = 20 + len(segment.payload)
    addresses = segment.source + segment.destination
    pseudo = addresses + struct.pack("!BBH", 0, _TCP_PROTOCOL, length)  # the longer form of IPv6 adds up to the same
    checksum = _checksum(pseudo + struct.pack("!HHIIBBHHH", *ports, 0, 0) + segment.payload)
    tcp = struct.pack("!HHIIBBHHH", *ports, checksum, 0) + segment.payload
    if len(segment.source) == 16:
        return to + sender + IPV6 + struct.pack("!IHBB", 6 << 28, length, _TCP_PROTOCOL, 64) + addresses + tcp
    words = (0x45, 0, 20 + length, 0, 0x4000, 64, _TCP_PROTOCOL)
    checksum = _checksum(struct.pack("!BBHHHBBH", *words, 0) + addresses)
    return to + sender + IPV4 + struct.pack("!BBHHHBBH", *words, checksum) + addresses + tcp


def _checksum(data: bytes) -> int:
    total: int = sum(struct.unpack(f"!{(len(data) + 1) // 2}H", data + b"\0" * (len(data) % 2)))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


@dataclass
class Capture:
    """Every frame that a switch carried, in order; `needle in capture` searches what an eavesdropper could read."""

    frames: list[bytes] = field(default_factory=list)
    complete: bool = True
    """Whether all frames were kept. If not, the absence of bytes proves nothing."""

    def __contains__(self, needle: bytes) -> bool:
        return any(needle in frame for frame in self.frames) or any(needle in text for text in self.streams().values())

    def streams(self) -> dict[tuple[str, int, str, int], bytes]:
        """Return the bytes of each direction of each TCP connection put together, by (address, port) of both ends."""
        segments: dict[tuple[bytes, int, bytes, int], list[Segment]] = {}
        for segment in filter(None, map(parse_segment, self.frames)):
            if segment.payload:
                segments.setdefault(segment.flow, []).append(segment)
        return {_readable(flow): _put_together(seen) for flow, seen in segments.items()}

    def datagrams(self, port: int) -> list[bytes]:
        """Return the payload of every UDP datagram to `port`, in order."""
        found = []
        for frame in self.frames:
            protocol, at, end = _transport(frame)
            if protocol == _UDP and int.from_bytes(frame[at + 2 : at + 4]) == port:
                found.append(frame[at + 8 : end])
        return found


def _readable(flow: tuple[bytes, int, bytes, int]) -> tuple[str, int, str, int]:
    source, source_port, destination, destination_port = flow
    return str(ipaddress.ip_address(source)), source_port, str(ipaddress.ip_address(destination)), destination_port


def _put_together(segments: list[Segment]) -> bytes:
    """Return the stream that segments carry: in order, each byte once, gaps closed."""
    first = segments[0].sequence
    offsets: dict[int, bytes] = {}
    for segment in segments:  # numbers wrap; no segment is 2 GiB before the first one
        at = (segment.sequence - first + 2**31) % 2**32 - 2**31
        if len(segment.payload) > len(offsets.get(at, b"")):
            offsets[at] = segment.payload
    stream, end = bytearray(), min(offsets)
    for at in sorted(offsets):
        stream += offsets[at][max(0, end - at) :]
        end = max(end, at + len(offsets[at]))
    return bytes(stream)
