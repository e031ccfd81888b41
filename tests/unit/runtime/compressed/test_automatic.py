"""What `compress="auto"` makes of the times of calls: on lines that allow bursts, the later ones count."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from tests.support.in_turn import in_turn
from tests.support.token_buckets import Bucket, Lines

import covey
from covey.compress.choice import Auto, Speed
from covey.runtime.collectives.planner import TIMED_PLAIN_CALLS
from covey.runtime.compressed.automatic import REVIEWS, CodecStanding, Size, judged

if TYPE_CHECKING:
    from covey.compress.codec import Codec

FAST = Speed(2e9, 2e9)
MBIT = 1e6 / 8


def codecs_used(rate: float, burst: float, nbytes: int, pause: float, speed: Speed, hiccup: int = 0) -> list[str]:
    """Return what each call of a class of two ranks uses; the rank stands still in call number `hiccup`."""
    line = Bucket(rate, burst)
    lines, size, standing = Lines([line]), Size(nbytes // 4, 4), CodecStanding()
    speeds: dict[Codec, Speed] = {covey.Int8(): speed}
    shortest, used = float("inf"), []
    for call in range(1, 16):
        if call in REVIEWS:
            standing = judged(2, Auto(), size, standing, shortest, speeds)
            shortest = float("inf")
        codec = standing.choice.codec if call > TIMED_PLAIN_CALLS else None
        lines.wait(pause)
        began = lines.now
        lines.send([([line], codec.wire_bytes(size.elements) if codec is not None else nbytes)])
        lines.wait(0.0 if codec is None else nbytes / speed.encode + nbytes / speed.decode_add)
        seconds = lines.now - began + (1.0 if call == hiccup else 0.0)
        shortest = seconds if call == TIMED_PLAIN_CALLS else min(shortest, seconds)
        used.append("none" if codec is None else codec.name)
    return used


@in_turn(case=itertools.product([1, 10, 100], [0, 64, 256], [64, 256, 1024], [0.0, 0.01]))
def test_on_a_slow_line_the_codec_is_used_from_the_eighth_call_on_whatever_bursts_it_allows(
    case: tuple[int, int, int, float],
) -> None:
    rate, burst, nbytes, pause = case[0] * MBIT, case[1] << 10, case[2] << 10, case[3]
    if burst > 4 * nbytes or pause > 0.1 * nbytes / rate:
        return  # more calls than eight pass at once, or the line has time to recover
    used = codecs_used(rate, burst, nbytes, pause, FAST)
    assert used[:TIMED_PLAIN_CALLS] == ["none"] * TIMED_PLAIN_CALLS
    assert set(used[REVIEWS[-1] - 1 :]) == {"int8"}, used


def test_a_codec_that_lost_against_a_burst_is_taken_again() -> None:
    speeds: dict[Codec, Speed] = {covey.Int8(): Speed(4e7, 4e7)}
    before = judged(2, Auto(), Size(1 << 16, 4), CodecStanding(), 0.06, speeds)
    assert before.choice.codec == covey.Int8()
    lost = judged(2, Auto(), Size(1 << 16, 4), before, 0.07, speeds)
    assert lost.choice.codec is None
    again = judged(2, Auto(), Size(1 << 16, 4), lost, 0.21, speeds)
    assert again.choice.codec == covey.Int8()
    assert again.choice.reason == "int8: 70 ms with int8, 210 ms without"
    assert judged(2, Auto(), Size(1 << 16, 4), again, 0.07, speeds).choice.codec == covey.Int8()


def test_a_codec_that_was_chosen_because_a_rank_stood_still_is_given_up() -> None:
    used = codecs_used(1e9, 0, 1 << 20, 0.0, Speed(1e8, 1e8), hiccup=TIMED_PLAIN_CALLS)
    assert "int8" in used
    assert set(used[REVIEWS[-1] - 1 :]) == {"none"}, used
