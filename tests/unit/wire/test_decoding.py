from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.base.errors import RemoteProtocolError
from covey.wire.decoding import FRAME_LENGTH, Framer, frame, frame_length


@given(bodies=st.lists(st.binary(max_size=50)), cuts=st.lists(st.integers(1, 40), min_size=1))
def test_frames_do_not_depend_on_how_bytes_arrive(bodies: list[bytes], cuts: list[int]) -> None:
    wire = b"".join(map(frame, bodies))
    framer = Framer(50)
    frames: list[bytes] = []
    at = turn = 0
    while at < len(wire):
        frames += framer.feed(wire[at : at + cuts[turn % len(cuts)]])
        at += cuts[turn % len(cuts)]
        turn += 1
    assert frames == bodies
    assert framer.feed(b"") == []


def test_a_frame_at_the_limit_passes_and_one_above_is_refused_before_its_body_comes() -> None:
    assert Framer(10).feed(frame(bytes(10))) == [bytes(10)]
    with pytest.raises(RemoteProtocolError, match="11 bytes was announced; the limit is 10"):
        Framer(10).feed(FRAME_LENGTH.pack(11))
    with pytest.raises(RemoteProtocolError):
        frame_length(b"\xff\xff\xff\xff", 1 << 20)


@given(st.binary(max_size=200))
def test_any_bytes_give_frames_or_a_protocol_error_and_never_hold_more_than_the_limit(data: bytes) -> None:
    framer = Framer(16)
    try:
        frames = framer.feed(data)
    except RemoteProtocolError:
        return
    assert all(len(body) <= 16 for body in frames)
    assert len(framer._buffer) < FRAME_LENGTH.size + 16
