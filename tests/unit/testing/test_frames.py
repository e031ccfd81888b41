"""What an eavesdropper makes of frames."""

from __future__ import annotations

import random

import pytest
from tests.support.in_turn import in_turn

from covey.testing.frames import (
    IPV4,
    IPV6,
    Capture,
    Segment,
    _build,
    flow_key,
    forge_resets,
    is_dial,
    is_stoppable_multicast,
    parse_segment,
)

HERE, THERE = b"\x02\0\0\0\0\x01", b"\x02\0\0\0\0\x02"
SYN, RST, ACK = 2, 4, 16
ENDS = {
    4: (bytes([10, 0, 0, 1]), 1111, bytes([10, 0, 0, 2]), 2222),
    6: (bytes.fromhex("fd00" + 13 * "00" + "01"), 1111, bytes.fromhex("fd00" + 13 * "00" + "02"), 2222),
}


def frame_of(version: int, sequence: int = 0, payload: bytes = b"", flags: int = ACK) -> bytes:
    return _build(Segment(*ENDS[version], sequence, 0, flags, payload), to=THERE, sender=HERE)


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("payload", [b"", b"x", b"hello world"])
def test_a_segment_is_read_as_it_was_built(version: int, payload: bytes) -> None:
    frame = frame_of(version, 77, payload) + (b"\0" * 6 if version == 4 else b"")  # short frames are padded
    assert parse_segment(frame) == Segment(*ENDS[version], 77, 0, ACK, payload)


@pytest.mark.parametrize("version", [4, 6])
def test_only_the_first_frame_of_a_connection_dials(version: int) -> None:
    assert [is_dial(frame_of(version, flags=flags)) for flags in (SYN, SYN | ACK, ACK, RST)] == [True, *3 * [False]]


@pytest.mark.parametrize("version", [4, 6])
def test_resets_carry_the_number_each_end_expects(version: int) -> None:
    frame = bytearray(_build(Segment(*ENDS[version], 2**32 - 2, 0, ACK, b"abcde"), to=THERE, sender=HERE))
    at = 42 if version == 4 else 62
    frame[at : at + 4] = (900).to_bytes(4)  # what the sender has heard of the other
    resets = forge_resets(bytes(frame))
    assert resets is not None
    onward, back = map(parse_segment, resets)
    assert onward == Segment(*ENDS[version], 3, 0, RST, b"")
    assert back == Segment(*ENDS[version][2:], *ENDS[version][:2], 900, 0, RST, b"")


def test_only_ip_version_6_keeps_the_multicast_that_it_cannot_do_without() -> None:
    def icmp(to: str, kind: int) -> bytes:
        return bytes.fromhex(to) + HERE + IPV6 + bytes(6) + bytes([58, 255]) + bytes(32) + bytes([kind, 0])

    assert is_stoppable_multicast(bytes.fromhex("01005e0000fb") + HERE + IPV4 + bytes(40))
    assert is_stoppable_multicast(bytes.fromhex("3333000000fb") + HERE + IPV6 + bytes(60))
    assert is_stoppable_multicast(icmp("333300000001", 128))  # a ping to every host
    assert not is_stoppable_multicast(icmp("333300000001", 134))
    assert not is_stoppable_multicast(icmp("3333ff000002", 135))
    assert not is_stoppable_multicast(b"\xff" * 6 + HERE + b"\x08\x06" + bytes(28))
    assert not is_stoppable_multicast(frame_of(4))


@in_turn(seed=range(20))
@in_turn(start=[0, 2**32 - 5_000])
def test_a_stream_is_put_together_from_frames_in_any_order_some_of_them_twice(seed: int, start: int) -> None:
    rng = random.Random(seed)
    data = rng.randbytes(20_000)
    frames, at = [], 0
    while at < len(data):
        size = rng.randint(1, 1448)
        frames.append(frame_of(4, (start + at) % 2**32, data[at : at + size]))
        at += rng.randint(1, size)  # some of it comes again in the next frame
    first, rest = frames[0], frames[1:]
    rng.shuffle(rest)
    assert Capture([first, *rest, *rest[:5]]).streams() == {("10.0.0.1", 1111, "10.0.0.2", 2222): data}
    assert data[5_000:9_000] in Capture([first, *rest])
    assert data[5_000:9_000][::-1] not in Capture([first, *rest])


def test_frames_share_a_key_exactly_if_they_go_the_same_way_in_one_connection() -> None:
    assert flow_key(frame_of(4, 1, b"a")) == flow_key(frame_of(4, 2, b"b", SYN)) != b""
    assert flow_key(frame_of(6, 1, b"a")) == flow_key(frame_of(6, 2, b"b", SYN)) != b""
    turned = _build(Segment(*ENDS[4][2:], *ENDS[4][:2], 1, 0, ACK, b""), to=HERE, sender=THERE)
    assert flow_key(turned) not in (b"", flow_key(frame_of(4)))
    assert flow_key(b"\xff" * 6 + HERE + b"\x08\x06" + bytes(28)) == b""


@pytest.mark.parametrize("version", [4, 6])
def test_cut_off_frames_are_nothing_and_no_error(version: int) -> None:
    frame = frame_of(version, payload=b"some text")
    for size in range(14, len(frame)):
        for function in (parse_segment, is_dial, is_stoppable_multicast, flow_key, forge_resets):
            function(frame[:size])
        Capture([frame[:size]]).datagrams(1)
