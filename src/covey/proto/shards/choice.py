"""Which checkpoint is complete among the machines that are there, which is loaded, which are deleted, who sends what.

A machine has parts: a manifest and files of shards. A checkpoint is complete if a machine has its manifest, and each of
its shards is on a machine, in full length. Manifests are written when all shards are on disk, so one of them is enough.
The serial numbers order checkpoints: a program that went back to an earlier step continues from what it saved last.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from covey.proto.shards.boxes import Box, elements, overlap
from covey.wire.shards import SHARD_CHUNK_BYTES

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from covey.proto.shards.layout import CheckpointLayout
    from covey.wire.shards import CheckpointPart

SHOWN_MISSING: Final = 8


class FoundCheckpoint(NamedTuple):
    """A checkpoint of which a machine has the manifest."""

    serial: int
    step: int
    id: str
    digest: bytes
    """Digest of the manifest."""
    manifests: tuple[bytes, ...]
    """The folders that have the manifest."""
    holders: tuple[tuple[bytes, ...], ...]
    """By shard: the folders that have it."""

    @property
    def is_complete(self) -> bool:
        return all(self.holders)

    @property
    def missing(self) -> tuple[int, ...]:
        return tuple(number for number, having in enumerate(self.holders) if not having)


def found_checkpoints(kept: Mapping[bytes, Sequence[CheckpointPart]]) -> list[FoundCheckpoint]:
    """Return all checkpoints of which there is a manifest, the newest first, from what each folder has."""
    told: dict[tuple[int, int, str, bytes], tuple[int, ...]] = {}
    manifests: dict[tuple[int, int, str, bytes], list[bytes]] = {}
    files: dict[tuple[str, int, int], list[bytes]] = {}
    for place, parts in sorted(kept.items()):
        for part in parts:
            if part.digest:
                key = (part.serial, part.step, part.id, part.digest)
                if told.setdefault(key, part.sizes) == part.sizes:
                    manifests.setdefault(key, []).append(place)
            for number, size in part.files:
                files.setdefault((part.id, number, size), []).append(place)
    return [
        FoundCheckpoint(
            *key,
            tuple(manifests[key]),
            tuple(tuple(files.get((key[2], number, size), ())) for number, size in enumerate(told[key])),
        )
        for key in sorted(told, reverse=True)
    ]


def complete(found: Iterable[FoundCheckpoint]) -> list[FoundCheckpoint]:
    """Return the complete checkpoints, the newest first; of several of one step the newest."""
    steps: set[int] = set()
    whole = []
    for each in found:
        if each.is_complete and each.step not in steps:
            steps.add(each.step)
            whole.append(each)
    return whole


def to_delete(
    parts: Sequence[CheckpointPart], found: Sequence[FoundCheckpoint], new: FoundCheckpoint | None, keep: int
) -> list[str]:
    """Return which checkpoints the machine with these parts deletes once `new` is complete, and `keep` are to remain.

    Without a complete checkpoint that is newer it deletes nothing. What cannot be completed is deleted, too.
    """
    if new is None or not new.is_complete:
        return []
    kept = [new, *(each for each in complete(found) if each.step != new.step and each.id != new.id)][:keep]
    ids = {each.id for each in kept}
    return [part.id for part in parts if part.id not in ids]


def next_serial(kept: Mapping[bytes, Sequence[CheckpointPart]]) -> int:
    """Return a serial number that is greater than all that are known."""
    return 1 + max((part.serial for parts in kept.values() for part in parts), default=0)


Need = tuple[int, int]
"""A shard and the number of a chunk in it."""


def needed(layout: CheckpointLayout, wanted: Mapping[int, Box]) -> list[Need]:
    """Return the chunks that have elements of the wanted boxes, by array."""
    found: set[Need] = set()
    for array, box in wanted.items():
        for number, place in layout.by_array.get(array, ()):
            shard = layout.shards[number]
            held = shard.pieces[place].box
            if (shared := overlap(held, box)) is not None:
                size, start = layout.itemsize(array), shard.starts[place]
                first, end = elements(shared, held)
                chunks = range(
                    (start + first * size) // SHARD_CHUNK_BYTES, (start + end * size - 1) // SHARD_CHUNK_BYTES + 1
                )
                found.update((number, chunk) for chunk in chunks)
    return sorted(found)


class Sending(NamedTuple):
    """A chunk that one rank sends another."""

    sender: int
    receiver: int
    shard: int
    chunk: int


def sendings(
    needs: Mapping[int, Collection[Need]],
    ranks: Mapping[bytes, Sequence[int]],
    holders: Sequence[Sequence[bytes]],
    damaged: Collection[tuple[bytes, int]],
) -> tuple[list[Sending], list[int]]:
    """Return which rank sends which chunks to which, and the shards that no folder has intact.

    `needs` has what each rank cannot read in its own folder; `ranks` are those of each folder, `holders` the folders of
    each shard, and `damaged` the folders whose file of a shard is not what was written.
    """
    load: dict[int, int] = {}
    moves, gone = [], set()
    for receiver, chunks in sorted(needs.items()):
        senders: dict[int, int] = {}
        for shard, chunk in sorted(chunks):
            if shard not in senders:
                having = [place for place in holders[shard] if place in ranks and (place, shard) not in damaged]
                able = [rank for place in having for rank in ranks[place]]
                if not able:
                    gone.add(shard)
                    continue
                senders[shard] = min(able, key=lambda rank: (load.get(rank, 0), rank))
            load[senders[shard]] = load.get(senders[shard], 0) + 1
            moves.append(Sending(senders[shard], receiver, shard, chunk))
    return moves, sorted(gone)


def local_needs(
    needs: Collection[Need], place: bytes, holders: Sequence[Sequence[bytes]], damaged: Collection[tuple[bytes, int]]
) -> tuple[list[Need], list[Need]]:
    """Return what a rank reads in its own folder, and what it has to fetch."""
    here = {shard for shard, having in enumerate(holders) if place in having and (place, shard) not in damaged}
    return [need for need in needs if need[0] in here], [need for need in needs if need[0] not in here]


def none_complete(
    found: Sequence[FoundCheckpoint], step: int | None, hosts: Mapping[tuple[str, int], Sequence[str]]
) -> str:
    """Return why there is no complete checkpoint (of a step): what the ones that were found lack.

    `hosts` names the machines to which a shard went, by checkpoint and shard.
    """
    wanted = [each for each in found if step is None or each.step == step]
    others = [each.step for each in complete(found)]
    named = "no checkpoint" if step is None else f"no checkpoint of step {step}"
    if not wanted:
        return f"{named} is on the machines that are here; complete ones: {others or 'none'}"
    lacking = []
    for each in wanted[:SHOWN_MISSING]:
        which = ", ".join(
            f"{number} ({' and '.join(hosts.get((each.id, number), ())) or 'unknown'} had it)"
            for number in each.missing[:SHOWN_MISSING]
        )
        lacking.append(f"that of step {each.step} lacks {len(each.missing)} of {len(each.holders)} shards: {which}")
    return f"{named} is complete on the machines that are here: {'; '.join(lacking)}; complete ones: {others or 'none'}"
