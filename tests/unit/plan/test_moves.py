import numpy as np
from tests.support.in_turn import in_turn

from covey.plan.moves import part, pieces, segmented_parts, segments


@in_turn(size=range(1, 9))
@in_turn(count=[0, 1, 7, 8, 9, 30])
def test_parts_are_those_of_array_split(count: int, size: int) -> None:
    split = [list(chunk) for chunk in np.array_split(np.arange(count), size)]
    assert [list(range(*part(count, size, index))) for index in range(size)] == split
    assert [list(range(*piece)) for piece in pieces(0, count, size)] == split


def test_segments_are_full_but_for_the_last() -> None:
    assert segments(3, 12, 4) == [(3, 7), (7, 11), (11, 12)]
    assert segments(3, 11, 4) == [(3, 7), (7, 11)]


def test_an_empty_range_is_one_empty_segment() -> None:
    assert segments(5, 5, 4) == [(5, 5)]


@in_turn(length=[1, 2, 3, 1000])
@in_turn(size=range(1, 9))
@in_turn(count=[0, 1, 7, 8, 9, 30])
def test_segmented_parts_cover_their_part_in_equally_many_short_pieces(count: int, size: int, length: int) -> None:
    cuts = segmented_parts(count, size, length)
    assert len({len(row) for row in cuts}) == 1
    for index, row in enumerate(cuts):
        start, stop = part(count, size, index)
        assert [element for piece in row for element in range(*piece)] == list(range(start, stop))
        assert all(piece[1] - piece[0] <= length for piece in row)


def test_nothing_is_not_cut_into_many_empty_pieces() -> None:
    assert segmented_parts(0, 3, 1) == [[(0, 0)]] * 3
    assert segmented_parts(2, 3, 1) == [[(0, 1)], [(1, 2)], [(2, 2)]]
