"""Whose state wins, what keeps it from being given, and fetching it while donors die or lie in any order."""

from __future__ import annotations

import random

import numpy as np
import pytest
from tests.support.in_turn import in_turn

from covey.proto.restore import DONOR_WINDOW_BYTES, WINDOW_CHUNKS, Fetch, Orders, differing, elect, listed, objection
from covey.wire.manifest import STATE_CHUNK_BYTES, Manifest, ManifestEntry, Tagger

TAGGER = Tagger([b"a", b"b"])


def manifest(*, is_fresh: bool = False, is_writable: bool = True, **arrays: object) -> Manifest:
    entries = []
    for name, value in sorted(arrays.items()):
        array = np.asarray(value)
        tags = TAGGER.tags(array.reshape(-1).view(np.uint8))
        code = {"int64": 4, "float32": 11, "float64": 12}[array.dtype.name]
        shape, writable = array.shape, is_writable
        entries.append(
            ManifestEntry(name=name, is_array=True, dtype_code=code, shape=shape, tags=tags, is_writable=writable)
        )
    return Manifest(is_fresh=is_fresh, entries=tuple(entries))


def votes(letters: str) -> dict[int, Manifest]:
    """Make a rank of each letter: equal letters are equal states, capitals are fresh, a dot is a lost rank."""
    return {
        rank: manifest(w=[ord(letter.lower())] * 3, is_fresh=letter.isupper())
        for rank, letter in enumerate(letters)
        if letter != "."
    }


@pytest.mark.parametrize(
    ("letters", "donors", "receivers", "drifted", "is_first"),
    [
        ("aaa", (0, 1, 2), (), (), False),
        ("aXa", (0, 2), (1,), (), False),
        ("Xaa", (1, 2), (0,), (), False),
        ("baa", (1, 2), (0,), (0,), False),
        ("ba", (0,), (1,), (1,), False),
        ("abba", (0, 3), (1, 2), (1, 2), False),
        ("BBBa", (3,), (0, 1, 2), (), False),
        ("aAXb", (0, 1), (2, 3), (3,), False),
        ("XYX", (0, 2), (1,), (), True),
        ("XX", (0, 1), (), (), True),
        (".ba", (1,), (2,), (2,), False),
        (".YX", (1,), (2,), (), True),
    ],
)
def test_most_votes_win_and_the_lowest_rank_breaks_a_tie(
    letters: str, donors: tuple[int, ...], receivers: tuple[int, ...], drifted: tuple[int, ...], is_first: bool
) -> None:
    got = elect(votes(letters))
    assert (got.donors, got.receivers, got.drifted, got.is_first) == (donors, receivers, drifted, is_first)


def test_the_first_name_that_cannot_be_filled_is_named_with_both_sides() -> None:
    old = manifest(a=[1.0], b=[[1, 2]], c=[1])
    new = manifest(is_fresh=True, a=[2.0], b=[[1], [2]], c=[1.0])
    manifests = {1: old, 3: new}
    assert objection(manifests, elect(manifests)) == "'b' is int64[1, 2] on rank 1, but int64[2, 1] on rank 3"
    assert (
        objection({1: old, 3: (other := manifest(is_fresh=True, a=[5.0], zz=[1]))}, elect({1: old, 3: other})) is None
    )


def test_what_is_read_only_is_an_objection_only_where_it_would_change() -> None:
    old = manifest(a=[1.0], b=[2.0], is_writable=False)
    for rank_1, expected in (
        (manifest(is_fresh=True, is_writable=False, a=[1.0]), None),
        (manifest(is_fresh=True, is_writable=False, a=[3.0]), "'a' is read-only on rank 1; pass a copy"),
    ):
        manifests = {0: old, 1: rank_1}
        assert objection(manifests, elect(manifests)) == expected


def test_names_that_differ_are_those_with_other_contents_kinds_or_missing_on_one_side() -> None:
    assert differing(manifest(a=[1], b=[2], c=[3]), manifest(a=[1], b=[3], d=[3])) == ["b", "c", "d"]
    assert listed([str(i) for i in range(7)]) == "'0', '1', '2', '3', '4' and 2 more"


def test_chunks_are_compared_one_by_one_and_numbered_alike() -> None:
    old = np.arange(STATE_CHUNK_BYTES // 8 * 2 + 5)
    new = old.copy()
    new[-1] += 1
    winner, mine = manifest(a=[7], w=old), manifest(w=new)
    chunks = winner.chunks()
    assert [(c.name, c.start, c.stop) for c in chunks] == [
        ("a", 0, 8),
        ("w", 0, STATE_CHUNK_BYTES),
        ("w", STATE_CHUNK_BYTES, 2 * STATE_CHUNK_BYTES),
        ("w", 2 * STATE_CHUNK_BYTES, 2 * STATE_CHUNK_BYTES + 40),
    ]
    assert [mine.lacks(chunk, winner) for chunk in chunks] == [True, False, False, True]
    assert Tagger([b"a", b"c"]).tag(old.view(np.uint8)) != TAGGER.tag(old.view(np.uint8))


def test_receivers_start_at_different_donors_and_spread_over_all() -> None:
    first = [Fetch(dict.fromkeys(range(6), 10), (4, 7, 9), start).ask() for start in range(4)]
    assert first[0] == [(4, 0), (7, 1), (9, 2), (4, 3), (7, 4), (9, 5)]
    assert [asked[0] for asked in first] == [(4, 0), (7, 0), (9, 0), (4, 0)]


def test_no_donor_is_asked_for_more_than_a_window_and_the_window_moves() -> None:
    large = Fetch(dict.fromkeys(range(100), STATE_CHUNK_BYTES), (0, 1), 0)
    asked = large.ask()
    assert len(asked) == 2 * DONOR_WINDOW_BYTES // STATE_CHUNK_BYTES
    assert large.ask() == []
    large.arrived(*asked[0], is_right=True)
    assert large.ask() == [(0, len(asked))]
    assert len(Fetch(dict.fromkeys(range(1000), 1), (0,), 0).ask()) == WINDOW_CHUNKS


def test_a_donor_sends_two_chunks_at_a_time_to_each_receiver_in_the_order_of_their_requests() -> None:
    orders = Orders((3, 5))
    assert orders.asked(3, [7, 8, 9]) == [7, 8]
    assert orders.asked(5, [1]) == [1]
    assert orders.asked(3, [2]) == []
    assert orders.sent(3) == [9]
    assert orders.sent(5) == []
    assert orders.sent(3) == [2]
    assert orders.sent(3) == orders.sent(3) == []
    assert orders.asked(3, [4, 5, 6]) == [4, 5]


@in_turn(seed=range(300))
def test_whatever_donors_do_each_chunk_comes_once_or_nobody_is_left(seed: int) -> None:
    rng = random.Random(seed)
    sizes = {chunk: rng.choice((1, 1000, STATE_CHUNK_BYTES)) for chunk in rng.sample(range(500), rng.randint(0, 60))}
    donors = tuple(rng.sample(range(9), rng.randint(1, 4)))
    dies_after = {donor: rng.choice((0, 1, 5, 20, 1000)) for donor in donors}
    lies = {donor: rng.choice((0.0, 0.0, 0.05)) for donor in donors}
    fetch = Fetch(sizes, donors, rng.randint(0, 5))
    under_way: list[tuple[int, int]] = []
    given: set[int] = set()
    failed: set[int] = set()
    while not fetch.is_complete and not fetch.is_stuck:
        asked = fetch.ask()
        assert not {donor for donor, _ in asked} & failed, "asked of a donor that had failed"
        under_way += asked
        chunks = [chunk for _, chunk in under_way]
        assert len(set(chunks)) == len(chunks), "a chunk was asked of two donors at once"
        assert not set(chunks) & given, "a chunk was asked for again"
        assert fetch.waits_for() == tuple(sorted({donor for donor, _ in under_way}))
        donor, chunk = under_way.pop(rng.randrange(len(under_way)))
        dies_after[donor] -= 1
        if dies_after[donor] < 0:
            failed.add(donor)
            fetch.failed(donor, chunk)
        elif rng.random() < lies[donor]:
            failed.add(donor)
            fetch.arrived(donor, chunk, is_right=False)
        else:
            given.add(chunk)
            fetch.arrived(donor, chunk, is_right=True)
    if fetch.is_complete:
        assert given == set(sizes)
        assert not under_way
    else:
        assert failed == set(donors)
        assert fetch.donors == ()
