"""Pieces of checkpoints: every element is written once and found again, against brute force over numpy arrays."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.in_turn import in_turn
from tests.support.seeds import examples, seeds

from covey.base.errors import ConfigError, MismatchError, RemoteProtocolError
from covey.proto.shards.boxes import Box, elements, gap, overlap, split, whole
from covey.proto.shards.choice import needed, sendings
from covey.proto.shards.layout import CUT_BYTES, CheckpointLayout, copy_targets, file_layout, folders_of, share_out
from covey.proto.shards.safetensors import FORMAT_DTYPES, FileTensor, decode_tensors, header_bytes, lay_out
from covey.proto.shards.verdict import judge, wanted_boxes, whole_arrays
from covey.wire.shards import (
    CHUNK_DIGEST_BYTES,
    SHARD_CHUNK_BYTES,
    SavedArray,
    SavedCheckpoint,
    SavedPiece,
    SavedShard,
    StateArray,
    Written,
)

SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@st.composite
def boxed(draw: Any, count: int = 2) -> tuple[tuple[int, ...], list[Box]]:
    shape = draw(SHAPES)
    boxes = []
    for _ in range(count):
        starts = [draw(st.integers(0, size)) for size in shape]
        sizes = [draw(st.integers(0, size - start)) for start, size in zip(starts, shape, strict=True)]
        boxes.append(Box(tuple(starts), tuple(sizes)))
    return shape, boxes


def mask(shape: tuple[int, ...], box: Box) -> Any:
    found = np.zeros(shape, int)
    found[box.key] = 1
    return found


@settings(max_examples=examples(200), deadline=None)
@given(boxed())
def test_boxes_overlap_where_their_elements_do(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, (one, other) = case
    both = mask(shape, one) * mask(shape, other)
    shared = overlap(one, other)
    assert (shared is not None) == both.any()
    if shared is not None:
        assert (mask(shape, shared) == both).all()
        numbers = np.arange(one.volume).reshape(one.shape)[shared.within(one).key]
        assert elements(shared, one) == (numbers.min(), numbers.max() + 1)


@settings(max_examples=examples(200), deadline=None)
@given(boxed(3))
def test_boxes_make_up_an_array_if_each_element_is_in_one(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = case
    times = sum(mask(shape, box) for box in boxes)
    assert (gap(shape, boxes) == "") == bool(np.all(times == 1))


@in_turn(seed=seeds(100))
def test_cuts_of_an_array_make_it_up_and_one_changed_box_does_not(seed: int) -> None:
    chance = random.Random(seed)
    shape = tuple(chance.randint(1, 9) for _ in range(chance.randint(1, 3)))
    boxes = [whole(shape)]
    for _ in range(chance.randint(0, 8)):  # cut any box anywhere, along any axis
        box = boxes.pop(chance.randrange(len(boxes)))
        axis = chance.randrange(len(shape))
        at = chance.randint(0, box.shape[axis])
        for start, count in ((0, at), (at, box.shape[axis] - at)):
            offset = tuple(o + start * (n == axis) for n, o in enumerate(box.offset))
            boxes.append(Box(offset, tuple(count if n == axis else s for n, s in enumerate(box.shape))))
    chance.shuffle(boxes)
    assert gap(shape, boxes) == ""
    full = [box for box in boxes if box.volume]
    if len(full) > 1:
        assert gap(shape, full[1:])
        assert "overlap" in gap(shape, [full[1], *full[1:]])


def some_state(chance: random.Random, ranks: list[int]) -> tuple[dict[int, list[StateArray]], dict[str, Any]]:
    """Return what each rank tells of a random state, and the whole arrays of it."""
    told: dict[int, list[StateArray]] = {rank: [] for rank in ranks}
    arrays: dict[str, Any] = {}
    for number in range(chance.randint(0, 8)):
        dtype = chance.choice([name for name in FORMAT_DTYPES if not name.startswith("float8")])
        shape = tuple(chance.choice([0, 1, 2, 3, 7, 64]) for _ in range(chance.randint(0, 3)))
        if chance.random() < 0.2:
            shape = (CUT_BYTES // 8 + 1, 2)
        name = f"a{number}"
        arrays[name] = np.random.default_rng(number).integers(0, 2, shape).astype(FORMAT_DTYPES[dtype])
        kind = chance.choice(["all", "axis", "grid"]) if shape else "all"
        axis = chance.randrange(len(shape)) if shape else 0
        for index, rank in enumerate(ranks):
            if kind == "all":
                told[rank].append(StateArray(name, dtype, shape))
            elif kind == "axis":
                told[rank].append(StateArray(name, dtype, split(shape, axis, index, len(ranks)).shape, axis))
            else:  # some ranks have the same box
                box = split(shape, axis, index // 2, (len(ranks) + 1) // 2)
                told[rank].append(StateArray(name, dtype, box.shape, axis, shape, box.offset))
    return told, arrays


def checkpoint(told: dict[int, list[StateArray]]) -> SavedCheckpoint:
    arrays, owned = whole_arrays(told)
    given = share_out(arrays, sorted(told), owned)
    shards = []
    for rank in sorted(told):
        nbytes = file_layout(arrays, given[rank]).nbytes
        digests = bytes(-(-nbytes // SHARD_CHUNK_BYTES) * CHUNK_DIGEST_BYTES)
        shards.append(SavedShard(tuple(SavedPiece(p.array, *p.box) for p in given[rank]), nbytes, digests))
    return SavedCheckpoint("0" * 16, 1, 1, 0.0, arrays, tuple(shards), b"")


@in_turn(seed=seeds(100))
def test_every_element_is_written_once_by_a_rank_that_has_it_and_evenly(seed: int) -> None:
    chance = random.Random(seed)
    ranks = sorted(chance.sample(range(12), chance.randint(1, 6)))
    told, wholes = some_state(chance, ranks)
    arrays, owned = whole_arrays(told)
    assert {array.name: array.shape for array in arrays} == {name: each.shape for name, each in wholes.items()}
    given = share_out(arrays, ranks, owned)
    times = [np.zeros(array.shape, int) for array in arrays]
    for rank, pieces in given.items():
        for piece in pieces:
            times[piece.array][piece.box.key] += 1
            assert arrays[piece.array].axis < 0 or (piece.array, piece.box) in owned[rank]
    assert all((each == 1).all() for each in times)
    if all(array.axis < 0 for array in arrays):
        sizes = [file_layout(arrays, given[rank]).nbytes for rank in ranks]
        assert max(sizes) - min(sizes) < 2 * CUT_BYTES
    CheckpointLayout(checkpoint(told))


@in_turn(seed=seeds(60))
def test_what_any_number_of_ranks_wants_is_in_the_chunks_that_they_get(seed: int) -> None:
    chance = random.Random(seed)
    told, wholes = some_state(chance, list(range(chance.randint(1, 5))))
    saved = checkpoint(told)
    layout = CheckpointLayout(saved)
    count = chance.randint(1, 5)
    boxes = wanted_boxes(saved.arrays, dict.fromkeys(range(count)))
    folders = {bytes([n]) * 16: [n] for n in range(count)}
    holders = [chance.sample(list(folders), chance.randint(1, count)) for _ in saved.shards]
    damaged = {(place, n) for n, having in enumerate(holders) for place in having if chance.random() < 0.2}
    needs = {rank: needed(layout, boxes[rank]) for rank in range(count)}
    moves, gone = sendings(needs, folders, holders, damaged)
    served = {rank: {(m.shard, m.chunk) for m in moves if m.receiver == rank} for rank in needs}
    for move in moves:
        place = next(place for place, having in folders.items() if move.sender in having)
        assert place in holders[move.shard]
        assert (place, move.shard) not in damaged
    wanted = {need for each in needs.values() for need in each}
    lost = {n for n, having in enumerate(holders) if all((place, n) in damaged for place in having)}
    assert set(gone) == lost & {shard for shard, _ in wanted}
    for rank, own in boxes.items():
        assert served[rank] == {need for need in needs[rank] if need[0] not in lost}
        for number, box in own.items():  # brute force: the chunk of each element
            left = np.zeros(wholes[saved.arrays[number].name].shape, int)
            left[box.key] = 1
            for shard, at_place in layout.by_array.get(number, ()):
                piece, start = layout.shards[shard].pieces[at_place], layout.shards[shard].starts[at_place]
                at = start + np.arange(piece.box.volume).reshape(piece.box.shape) * layout.itemsize(number)
                chunks = [chunk for n, chunk in needs[rank] if n == shard]
                left[piece.box.key] *= ~np.isin(at // SHARD_CHUNK_BYTES, chunks)
            assert not left.any()


@in_turn(seed=seeds(60))
def test_copies_are_on_other_machines_where_there_are_any(seed: int) -> None:
    chance = random.Random(seed)
    size, copies = chance.randint(1, 9), chance.randint(0, 3)
    reports = {}
    for rank in range(size):
        place = chance.randrange(1, 6)
        reports[rank] = (bytes([place]) * 16, f"host {place % 3}")
    folders = folders_of(reports)
    assert sorted(rank for each in folders for rank in each.ranks) == list(range(size))
    targets = copy_targets(folders, copies)
    for folder in folders:
        others = [each for each in folders if each.id != folder.id]
        hosts = {each.host for each in others if each.host != folder.host}
        for rank in folder.ranks:
            having = [next(each for each in folders if target in each.ranks) for target in targets[rank]]
            assert len(having) == len({each.id for each in having}) == min(copies, len(others))
            assert folder.id not in {each.id for each in having}
            away = [each.host for each in having if each.host != folder.host]
            assert len(set(away)) == min(copies, len(hosts)), "as many machines as possible"


def told_by(**parts: Any) -> dict[int, list[StateArray]]:
    return {int(rank[1:]): [part] for rank, part in parts.items()}


@pytest.mark.parametrize(
    ("told", "text"),
    [
        (told_by(r0=StateArray("w", "int8", (3,)), r1=StateArray("w", "int8", (4,))), "pass covey.Shard"),
        (told_by(r0=StateArray("w", "int8", (3,)), r1=StateArray("v", "int8", (3,))), "'v'"),
        (told_by(r0=StateArray("w", "int8", (3,)), r1=StateArray("w", "int8", (3,), 0)), "sharded along axis 0"),
        (told_by(r0=StateArray("w", "int8", (3, 2), 0), r1=StateArray("w", "int8", (3, 3), 0)), "cannot be joined"),
        ({0: [], 1: [StateArray("w", "int8", (3,))]}, "rank 1 has 1"),
    ],
)
def test_ranks_with_different_states_are_named(told: dict[int, list[StateArray]], text: str) -> None:
    with pytest.raises(MismatchError, match=text):
        whole_arrays(told)


def test_parts_that_leave_a_hole_or_overlap_are_refused() -> None:
    for offset, text in (((3,), "5 of 6 elements"), ((2,), "overlap")):
        parts = told_by(
            r0=StateArray("w", "int8", (3,), 0, (6,), (0,)),
            r1=StateArray("w", "int8", (2 if offset == (3,) else 3,), 0, (6,), offset),
        )
        arrays, owned = whole_arrays(parts)
        with pytest.raises(MismatchError, match=text):
            share_out(arrays, [0, 1], owned)


def test_a_shard_is_safe_if_its_writer_or_a_copier_remains_and_all_have_the_same() -> None:
    one, two = b"a" * CHUNK_DIGEST_BYTES, b"b" * CHUNK_DIGEST_BYTES
    told = {0: Written(one, ((1, two),)), 1: Written(two, ((0, one),))}
    assert judge([0, 1], [100, 100], told).holders == ((0, 1), (1, 0))
    assert judge([0, 1], [100, 100], {0: told[0]}).is_whole
    assert judge([0, 1], [100, 100], {0: Written(one)}).holders == ((0,), ())
    assert judge([0, 1], [100, 100], told | {1: Written(failure="full")}).failed == {1: "full"}
    differing = judge([0, 1], [100, 100], {0: Written(one, ((1, one),)), 1: Written(two, ((0, one),))})
    assert list(differing.failed) == [0]
    assert not differing.is_whole
    assert not judge([0], [SHARD_CHUNK_BYTES + 1], {0: Written(one)}).is_whole, "as many digests as chunks"


# Files


@in_turn(seed=seeds(40))
def test_a_file_has_every_tensor_where_its_header_says(seed: int) -> None:
    chance = random.Random(seed)
    tensors = [
        FileTensor(f"t{n} é[0:1]", chance.choice(list(FORMAT_DTYPES)), tuple(chance.randint(0, 4) for _ in range(3)))
        for n in range(chance.randint(0, 6))
    ]
    layout = lay_out(tensors)
    length = header_bytes(layout.header[:8])
    assert len(layout.header) == 8 + length
    assert len(layout.header) % 64 == 0
    found = decode_tensors(layout.header[8:], layout.nbytes - len(layout.header))
    assert [(name, dtype.name, shape) for name, (dtype, shape, _) in found.items()] == [tuple(t) for t in tensors]
    assert [start + len(layout.header) for _, _, start in found.values()] == list(layout.starts)


def test_a_header_that_reaches_out_of_its_file_is_refused() -> None:
    header = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    assert decode_tensors(header, 8)
    for wrong in (
        header.replace(b"[0,8]", b"[4,12]"),
        header.replace(b"[0,8]", b"[-4,4]"),
        header.replace(b"[2]", b"[3]"),
        header.replace(b"[2]", b"[-2]"),
        header.replace(b"[2]", b"[1e9]"),
        header.replace(b"F32", b"F31"),
        header.replace(b'"F32"', b"[]"),
        b'{"__metadata__":{"complex128":"[\\"a\\"]"},' + header[1:],
        b"[" * 100_000,
        b"{}x",
        b"\xff",
    ):
        with pytest.raises(ConfigError):
            decode_tensors(wrong, 8)
    for start in (b"", b"\xff" * 8):
        with pytest.raises(ConfigError):
            header_bytes(start)


def test_a_manifest_of_a_peer_that_contradicts_itself_is_refused() -> None:
    arrays = (SavedArray("w", "float32", (4, 2)),)
    good = checkpoint({0: [StateArray("w", "float32", (4, 2))], 1: [StateArray("w", "float32", (4, 2))]})
    CheckpointLayout(good)
    shard = next(each for each in good.shards if each.pieces)
    change = msgspec.structs.replace
    for wrong in (
        change(good, arrays=(SavedArray("w", "object", (4, 2)),)),
        change(good, arrays=(SavedArray("w", "float32", (5, 2)),)),
        change(good, arrays=(SavedArray("w", "float32", (4, 2), 2),)),
        change(good, arrays=(SavedArray("w\n", "float32", (4, 2)),)),
        change(good, arrays=arrays * 2),
        change(good, arrays=()),
        change(good, shards=(change(shard, pieces=(SavedPiece(0, (1, 0), (4, 2)),)),)),
        change(good, shards=(change(shard, pieces=(SavedPiece(0, (0,), (4,)),)),)),
        change(good, shards=(change(shard, pieces=shard.pieces * 2),)),
        change(good, shards=(change(shard, nbytes=shard.nbytes + 1),)),
        change(good, shards=(change(shard, pieces=()),)),
    ):
        with pytest.raises(RemoteProtocolError):
            CheckpointLayout(wrong)
