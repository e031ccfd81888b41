"""Loads a checkpoint that needs no shared folder, on one rank of a group; all ranks do it at the same time.

All ranks tell what their machines have, and choose the newest checkpoint that is complete. One sends the manifest to
all. Then each reads what it wants from its own disk, and gets the rest from ranks that have it: all of them compute who
sends what, and begin again without the files that turn out to be damaged. Every chunk is checked.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from covey.base.errors import (
    CheckpointError,
    ConfigError,
    CoveyError,
    DeadlineError,
    MismatchError,
    PeerLostError,
    RemoteProtocolError,
)
from covey.base.text import printable
from covey.proto.shards.choice import complete, found_checkpoints, local_needs, needed, none_complete, sendings
from covey.proto.shards.layout import CheckpointLayout
from covey.proto.shards.verdict import wanted_boxes
from covey.runtime.group.chunk_transfer import ChunksIn, ChunksOut, transfer
from covey.runtime.group.exchange import Exchange
from covey.runtime.group.object_moves import ObjectMoves
from covey.runtime.group.shard_saver import TermsExchange, folder_report, raise_failures, short
from covey.runtime.progress_bar import ProgressBar
from covey.runtime.shards.folder import decode_manifest, digest_of, open_folder, shard_name
from covey.runtime.shards.pulled import WantedArrays
from covey.runtime.shards.tree import put_together
from covey.wire import objects
from covey.wire.shards import LoadTerms, StateArray, StillMissing

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from covey.proto.shards.boxes import Box
    from covey.proto.shards.choice import FoundCheckpoint, Need
    from covey.runtime.group.issuer import Issuer
    from covey.runtime.shards.folder import ShardFolder
    from covey.wire.manifest import Bytes
    from covey.wire.shards import CheckpointPart, SavedArray, SavedCheckpoint

    Array = np.ndarray[Any, np.dtype[Any]]
    Target = Callable[[SavedArray, Box], Array]


class LoadedArrays(NamedTuple):
    """What a rank has loaded."""

    saved: SavedCheckpoint
    tree: Any
    boxes: dict[int, Box]
    """The part of each array that this rank has, by number."""
    arrays: dict[int, Array]


class ShardLoader:
    """One load on one rank."""

    def __init__(
        self,
        issuer: Issuer,
        path: Path | ConfigError,
        *,
        step: int | None,
        wanted: tuple[StateArray, ...] | None,
        failure: Exception | None,
        target: Target,
        deadline: float,
        progress: bool | None,
    ) -> None:
        """`target` returns the memory for a box of an array. `wanted` is None for everything as it comes."""
        self._issuer, self._path, self._step, self._wanted = issuer, path, step, wanted
        self._failure, self._target, self._deadline, self._progress = failure, target, deadline, progress
        self._gathering = TermsExchange(issuer, deadline)
        self._folder: ShardFolder | None = None
        self._attempts = 0

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, lowest first."""
        terms = self._terms()
        return sorted(each.step for each in complete(found_checkpoints(_parts_by_folder(terms))))

    def run(self) -> LoadedArrays:
        """Load; all ranks get the same checkpoint, or all the same error.

        Raises:
            CheckpointError: no checkpoint is complete, or its files are damaged on all machines that have them.
            MismatchError: a rank wants what the checkpoint has not.
        """
        for _ in range(self._issuer.size):
            terms = self._terms()
            found = found_checkpoints(_parts_by_folder(terms))
            chosen = next((each for each in complete(found) if self._step in (None, each.step)), None)
            if chosen is None:
                raise CheckpointError(none_complete(found, self._step, self._hosts(found)))
            loaded = self._load(terms, chosen, [each.step for each in complete(found)])
            if loaded is not None:
                return loaded
        raise CheckpointError("no checkpoint was loaded: ranks were lost again and again")

    def _terms(self) -> dict[int, LoadTerms]:
        step = -1 if self._step is None else self._step
        try:
            if self._failure is not None:
                raise self._failure
            if isinstance(self._path, ConfigError):
                raise self._path
            self._folder = open_folder(self._path)
            mine = LoadTerms(step, folder_report(self._folder, self._issuer), self._wanted)
        except Exception as error:  # the other ranks must learn of it before this one raises
            self._failure = error
            mine = LoadTerms(step, failure=short(error))
        terms: dict[int, LoadTerms] = self._gathering.of(mine)
        raise_failures({rank: each.failure for rank, each in terms.items()}, "no checkpoint was loaded", self._failure)
        for rank, each in terms.items():
            if each.report is None:
                raise RemoteProtocolError(f"rank {rank} told nothing of its folder")
            if each.step != step:
                raise MismatchError(
                    f"group.checkpoint.load: ranks passed different steps: {step} and, on rank {rank}, {each.step}"
                )
        return terms

    def _hosts(self, found: Sequence[FoundCheckpoint]) -> dict[tuple[str, int], Sequence[str]]:
        """Return which machines got each shard, by checkpoint; the same on all ranks."""
        assert self._folder is not None
        own = {each.part.id: each.saved for each in self._folder.parts() if each.saved is not None}
        lacking = [each for each in found if not each.is_complete]
        mine = {
            f"{each.id} {number}": list(own[each.id].shards[number].hosts)
            for each in lacking
            if each.id in own
            for number in each.missing
            if number < len(own[each.id].shards)
        }
        hosts: dict[tuple[str, int], Sequence[str]] = {}
        for told in self._gathering.of(mine).values():
            for key, names in told.items():
                save_id, _, number = str(key).partition(" ")
                if number.isdecimal() and isinstance(names, list):
                    hosts.setdefault((save_id, int(number)), [str(name)[:100] for name in names[:8]])
        return hosts

    def _load(self, terms: Mapping[int, LoadTerms], chosen: FoundCheckpoint, steps: list[int]) -> LoadedArrays | None:
        """Load a checkpoint among these ranks; None if one of them was lost meanwhile."""
        ranks, me = sorted(terms), self._issuer.rank
        place_of = {rank: each.report.place for rank, each in terms.items() if each.report is not None}
        try:
            saved = self._manifest(chosen, place_of)
        except PeerLostError:
            if self._issuer.engine.failure.is_over:
                raise
            return None  # the rank that had it was lost
        layout = CheckpointLayout(saved)
        try:
            boxes = wanted_boxes(saved.arrays, {rank: terms[rank].arrays for rank in ranks})
        except MismatchError as error:
            raise MismatchError(f"group.checkpoint.load of step {saved.step}: {error}") from None
        todo = {rank: needed(layout, boxes[rank]) for rank in ranks}
        at: dict[bytes, list[int]] = {}
        for rank in ranks:
            at.setdefault(place_of[rank], []).append(rank)
        damaged: set[tuple[bytes, int]] = set()
        reading, failure = None, ""
        try:
            reading = WantedArrays(saved, layout, boxes[me], todo[me], self._target)
        except (MemoryError, TypeError, CoveyError) as error:  # the program's memory does not fit
            failure = short(error)
        size = sum(layout.chunk_bytes(*need) for need in todo[me])
        with ProgressBar(f"loading step {saved.step}", size, self._progress) as bar:
            while True:
                mine = StillMissing(failure=failure)
                if reading is not None:
                    source = _LocalShards(self._folder, saved, layout)
                    mine = self._round(reading, source, _FetchRound(todo, place_of, at, chosen.holders, damaged), bar)
                told: dict[int, StillMissing] = self._gathering.of(mine)
                if set(told) != set(ranks):
                    return None
                raise_failures({rank: each.failure for rank, each in told.items()}, "no checkpoint was loaded")
                todo = {rank: list(each.missing) for rank, each in told.items()}
                if not any(todo.values()):
                    break
                more = {(place, shard) for each in told.values() for place, shard in each.damaged} - damaged
                if not more:
                    raise RemoteProtocolError("chunks of a checkpoint did not arrive, and no rank says why")
                damaged |= more
                needs = {shard for each in todo.values() for shard, _ in each}
                if gone := [shard for shard in sorted(needs) if not _intact(chosen.holders[shard], shard, at, damaged)]:
                    raise self._damaged(saved, gone, steps)
        assert reading is not None
        tree = objects.decode(saved.tree)
        put_together(tree, [None] * len(saved.arrays))  # raises if it is damaged
        return LoadedArrays(saved, tree, boxes[me], reading.targets)

    @staticmethod
    def _damaged(saved: SavedCheckpoint, gone: Sequence[int], steps: Sequence[int]) -> CheckpointError:
        had = ", ".join(f"{number} ({' and '.join(map(printable, saved.shards[number].hosts))})" for number in gone)
        return CheckpointError(
            f"the checkpoint of step {saved.step} is damaged: no machine has intact files of these shards: {had}; "
            f"other steps: {[step for step in steps if step != saved.step]}",
            files=tuple(shard_name(number, len(saved.shards)) for number in gone),
        )

    def _manifest(self, chosen: FoundCheckpoint, place_of: Mapping[int, bytes]) -> SavedCheckpoint:
        """Return the manifest, which the first rank that has it sends to all."""
        root = min(rank for rank, place in place_of.items() if place in chosen.manifests)
        sent: Any = b""
        if root == self._issuer.rank:
            assert self._folder is not None
            try:
                sent = self._folder.manifest(chosen.step, chosen.id)
            except OSError as error:
                sent = short(error)
        left = max(self._deadline - time.monotonic(), 0.001)
        sent = ObjectMoves(self._issuer).broadcast_object(sent, root, timeout=left)
        if isinstance(sent, str):
            raise_failures({root: sent}, "no checkpoint was loaded")
        if not isinstance(sent, bytes) or digest_of(sent) != chosen.digest:
            raise RemoteProtocolError(f"rank {root} sent another manifest than it told of")
        return decode_manifest(sent, f"the manifest of step {chosen.step}")

    def _round(self, reading: WantedArrays, source: _LocalShards, plan: _FetchRound, bar: ProgressBar) -> StillMissing:
        """Read and fetch what this rank lacks, and send the others what they lack; return what is still missing."""
        me = self._issuer.rank
        own = plan.place_of[me]
        bad: set[tuple[bytes, int]] = set()
        fetched = {
            rank: local_needs(needs, plan.place_of[rank], plan.holders, plan.damaged)[1]
            for rank, needs in plan.todo.items()
        }
        for need in local_needs(plan.todo[me], own, plan.holders, plan.damaged)[0]:
            if time.monotonic() > self._deadline:
                raise DeadlineError("group.checkpoint.load: the timeout ended while files were read")
            if (own, need[0]) not in bad:
                if reading.take(need, source.chunk(need)):
                    bar.show(source.size(need))
                else:
                    bad.add((own, need[0]))
        moves, _ = sendings(fetched, plan.at, plan.holders, plan.damaged)
        outgoing: dict[int, list[Need]] = {}
        incoming: dict[int, list[Need]] = {}
        for move in moves:
            if move.sender == me:
                outgoing.setdefault(move.receiver, []).append((move.shard, move.chunk))
            if move.receiver == me:
                incoming.setdefault(move.sender, []).append((move.shard, move.chunk))

        def taking(sender: int, needs: Sequence[Need]) -> ChunksIn:
            def take(number: int, chunk: Bytes) -> None:
                if reading.take(needs[number], chunk):
                    bar.show(chunk.size)
                else:
                    bad.add((plan.place_of[sender], needs[number][0]))

            return ChunksIn([source.size(need) for need in needs], take)

        def sending(needs: Sequence[Need]) -> ChunksOut:
            return ChunksOut(len(needs), lambda number: source.chunk(needs[number]))

        self._attempts += 1
        with Exchange(self._issuer, self._attempts, self._deadline) as exchange:
            failed = transfer(
                exchange,
                {rank: sending(needs) for rank, needs in outgoing.items()},
                {rank: taking(rank, needs) for rank, needs in incoming.items()},
            )
        for rank, error in failed.items():
            if not isinstance(error, PeerLostError):  # it sent chunks of another size
                bad.update((plan.place_of[rank], shard) for shard, _ in incoming.get(rank, ()))
        return StillMissing(reading.missing, tuple(sorted(bad)))


class _FetchRound(NamedTuple):
    """What all ranks know when they begin to fetch."""

    todo: Mapping[int, Sequence[Need]]
    place_of: Mapping[int, bytes]
    at: Mapping[bytes, Sequence[int]]
    """The ranks of each folder."""
    holders: Sequence[Sequence[bytes]]
    damaged: set[tuple[bytes, int]]


def _parts_by_folder(terms: Mapping[int, LoadTerms]) -> dict[bytes, Sequence[CheckpointPart]]:
    return {each.report.place: each.report.kept for each in terms.values() if each.report is not None}


def _intact(
    holders: Sequence[bytes], shard: int, at: Mapping[bytes, Sequence[int]], damaged: set[tuple[bytes, int]]
) -> bool:
    return any(place in at and (place, shard) not in damaged for place in holders)


class _LocalShards:
    """The chunks that are on the disk of this machine. One that cannot be read is all zeros, which is noticed."""

    def __init__(self, folder: ShardFolder | None, saved: SavedCheckpoint, layout: CheckpointLayout) -> None:
        assert folder is not None
        self._folder, self._saved, self._layout = folder, saved, layout

    def size(self, need: Need) -> int:
        return self._layout.chunk_bytes(*need)

    def chunk(self, need: Need) -> Bytes:
        size, data, (shard, number) = self.size(need), b"", need
        which = (shard, len(self._saved.shards))
        with contextlib.suppress(OSError):
            data = self._folder.read_chunk(self._saved.step, self._saved.id, which, number, size)
        return np.frombuffer(data if len(data) == size else bytes(size), np.uint8)
