"""Saves a checkpoint that needs no shared folder, on one rank of a group; all ranks do it at the same time.

1. All ranks tell what they have, and compute which rank writes what.
2. Each writes its shard, and sends it to its neighbours on other machines, which write it, too.
3. All tell whether everything is on disk. If so, each machine writes the manifest: from the first one on, the
   checkpoint is complete.
4. All tell whether that is done. Only then does each machine delete what is old.

A rank that is lost before 4 starts it all again among those that remain, if the group survives losses.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from covey.base.errors import (
    CheckpointError,
    ConfigError,
    CoveyError,
    MismatchError,
    PeerLostError,
    RemoteProtocolError,
)
from covey.base.text import TEXT_LIMIT, printable
from covey.net.host.descriptors import explain
from covey.net.host.locks import try_lock
from covey.net.host.run_notes import note_checkpoint
from covey.proto.shards.choice import FoundCheckpoint, found_checkpoints, next_serial, to_delete
from covey.proto.shards.layout import copy_targets, file_layout, folders_of, share_out
from covey.proto.shards.verdict import judge, whole_arrays
from covey.runtime.group.chunk_transfer import ChunksIn, ChunksOut, transfer
from covey.runtime.group.exchange import Exchange
from covey.runtime.group.object_moves import ObjectMoves
from covey.runtime.shards.folder import checkpoint_name, digest_of, open_folder
from covey.runtime.shards.tree import first_difference
from covey.wire import objects
from covey.wire.shards import (
    SHARD_CHUNK_BYTES,
    FolderReport,
    SavedCheckpoint,
    SavedPiece,
    SavedShard,
    SaveTerms,
    StateArray,
    Written,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from covey.proto.shards.boxes import Box
    from covey.proto.shards.layout import RanksFolder, ShardPiece
    from covey.proto.shards.safetensors import FileLayout
    from covey.runtime.group.issuer import Issuer
    from covey.runtime.shards.folder import ShardFolder, ShardWriter
    from covey.wire.manifest import Bytes
    from covey.wire.shards import SavedArray

    Array = np.ndarray[Any, np.dtype[Any]]

TERMS_BYTES = 64 << 20
"""The longest message in which a rank tells what it has."""


@dataclass(frozen=True, kw_only=True)
class SaveReport:
    """What a save did."""

    step: int
    path: str
    """Path of this machine's part."""
    bytes_written: int
    """That this rank wrote: its shard, and copies of others."""
    total_bytes: int
    """Bytes of all shards, without copies."""
    ranks: tuple[int, ...]
    """Whose state is in the checkpoint: those that were not lost."""
    seconds: float


class StateCopy:
    """A copy of the state of one rank, as it is saved; or why there is none."""

    def __init__(
        self, tree: Any = None, arrays: Sequence[tuple[StateArray, Array]] = (), failure: Exception | None = None
    ) -> None:
        self.tree, self.failure = tree, failure
        self.arrays = tuple(array for array, _ in arrays)
        self.contents = tuple(content for _, content in arrays)


def folder_report(folder: ShardFolder, issuer: Issuer, *, with_parts: bool = True) -> FolderReport:
    """Return what a rank tells of its folder."""
    roster = issuer.engine.roster
    kept = tuple(each.part for each in folder.parts()) if with_parts else ()
    name = roster.host_name(roster.rank) or os.uname().nodename
    return FolderReport(folder.identity, roster.host(roster.rank)[:TEXT_LIMIT], printable(name)[:TEXT_LIMIT], kept)


def short(error: Exception) -> str:
    """Return why a rank cannot take part, for the others."""
    text = explain(error) if isinstance(error, OSError) and not isinstance(error, CoveyError) else str(error)
    return printable(text or type(error).__name__)[:TEXT_LIMIT]


class TermsExchange:
    """What the ranks of one save or load tell each other."""

    def __init__(self, issuer: Issuer, deadline: float) -> None:
        self.issuer, self.deadline = issuer, deadline

    def of(self, value: Any) -> dict[int, Any]:
        """Return what each remaining rank passed, all of one type."""
        left = max(self.deadline - time.monotonic(), 0.001)
        told = ObjectMoves(self.issuer).gather_all(value, type(value), False, left, False, most_bytes=TERMS_BYTES)
        return {rank: each for rank, each in enumerate(told) if each is not None}


def raise_failures(told: Mapping[int, str], what: str, own: Exception | None = None) -> None:
    """Raise an error that names the ranks that failed, the same on all ranks; none if none did."""
    failed = {rank: printable(text)[:TEXT_LIMIT] for rank, text in told.items() if text}
    if failed:
        text = "; ".join(f"rank {rank}: {why}" for rank, why in failed.items())
        raise CheckpointError(f"{what}: {text}", ranks=tuple(failed)) from own


class ShardSaver:
    """One save on one rank."""

    def __init__(
        self,
        issuer: Issuer,
        path: Path | ConfigError,
        snapshot: StateCopy,
        *,
        step: int,
        keep: int,
        copies: int,
        live: tuple[int, ...],
        deadline: float,
    ) -> None:
        """`issuer` belongs to a group that is used for nothing else. The path may be the reason why there is none.

        `live` are the ranks that remained when the program called.
        """
        self._issuer, self._path, self._snapshot = issuer, path, snapshot
        self._step, self._keep, self._copies, self._deadline = step, keep, copies, deadline
        self._live = live
        self._gathering = TermsExchange(issuer, deadline)
        self._folder: ShardFolder | None = None
        self._made: list[str] = []
        """The checkpoints that this save has begun in the folder, and not finished."""
        self._lost: set[int] = set()
        self._written = 0
        self._began_at = time.monotonic()

    def run(self) -> SaveReport:
        """Save; return when the checkpoint is complete and old ones are deleted.

        Raises:
            CheckpointError: a rank could not write. Earlier checkpoints are unchanged.
            MismatchError: the ranks have different states.
            PeerLostError, CoveyError: the group has ended.
        """
        for attempt in range(self._issuer.size):
            terms = self._gathering.of(self._own_terms())
            self._lost = {rank for each in terms.values() for rank in each.live} - set(terms)
            report = self._attempt(attempt, terms)
            if report is not None:
                return report
        raise CheckpointError(f"the checkpoint of step {self._step} was not saved: ranks were lost again and again")

    def _own_terms(self) -> SaveTerms:
        save_id = secrets.token_hex(8)
        plain = (self._step, self._keep, self._copies, save_id)
        try:
            if self._snapshot.failure is not None:
                raise self._snapshot.failure
            if isinstance(self._path, ConfigError):
                raise self._path
            self._folder = open_folder(self._path)
            report = folder_report(self._folder, self._issuer)
            tree = objects.encode(self._snapshot.tree)
            return SaveTerms(*plain, report, self._snapshot.arrays, tree, self._live)
        except Exception as error:  # the other ranks must learn of it before this one raises
            self._snapshot.failure = error
            return SaveTerms(*plain, failure=short(error))

    def _attempt(self, attempt: int, terms: Mapping[int, SaveTerms]) -> SaveReport | None:
        """Save among these ranks; None if one of them was lost meanwhile and what it had is not safe."""
        arrays, owned = self._agreed(terms)
        ranks, me = sorted(terms), self._issuer.rank
        pieces = share_out(arrays, ranks, owned)
        reports = {rank: each.report for rank, each in terms.items() if each.report is not None}
        places = folders_of({rank: (report.place, report.host) for rank, report in reports.items()})
        own = next(place for place in places if me in place.ranks)
        targets = copy_targets(places, self._copies)
        layouts = {rank: file_layout(arrays, pieces[rank]) for rank in ranks}
        save_id, leads = terms[ranks[0]].id, own.ranks[0] == me
        self._made.append(save_id)
        assert self._folder is not None
        folder = self._folder
        with _locked(folder, leads) as lock_problem:
            may_be_whole = False
            try:
                written = self._write(attempt, save_id, ranks, pieces, layouts, targets, owned[me], lock_problem)
                told = self._gathering.of(written)
                verdict = judge(ranks, [layouts[rank].nbytes for rank in ranks], told)
                raise_failures(verdict.failed, f"the checkpoint of step {self._step} was not saved")
                if not verdict.is_whole:
                    return None
                kept = {report.place: report.kept for report in reports.values()}
                names = {rank: report.host_name for rank, report in reports.items()}
                saved = SavedCheckpoint(
                    id=save_id,
                    serial=next_serial(kept),
                    step=self._step,
                    saved_at=self._agreed_time(told),
                    arrays=arrays,
                    shards=tuple(
                        SavedShard(
                            tuple(SavedPiece(piece.array, *piece.box) for piece in pieces[rank]),
                            layouts[rank].nbytes,
                            verdict.digests[number],
                            tuple(dict.fromkeys(names[each] for each in verdict.holders[number])),
                        )
                        for number, rank in enumerate(ranks)
                    ),
                    tree=terms[ranks[0]].tree,
                )
                may_be_whole = True
                failure = self._commit(saved, leads=leads)
                ended = self._gathering.of(Written(failure=failure))
                raise_failures(
                    {rank: each.failure for rank, each in ended.items()},
                    f"the checkpoint of step {self._step} was not saved",
                )
            except CoveyError as error:
                if leads and (isinstance(error, CheckpointError) or not may_be_whole):
                    self._clean()
                raise
            holders = tuple(tuple(each for each in having if each in ended) for having in verdict.holders)
            if not all(holders):
                return None
            self._made.remove(save_id)
            if leads:
                new = FoundCheckpoint(saved.serial, self._step, save_id, b"", (own.id,), ((own.id,),))
                self._prune(kept, own, new)
        path = folder.path / checkpoint_name(self._step, save_id)
        if leads:
            note_checkpoint(str(path))
        return SaveReport(
            step=self._step,
            path=str(path),
            bytes_written=self._written,
            total_bytes=sum(layout.nbytes for layout in layouts.values()),
            ranks=tuple(ranks),
            seconds=time.monotonic() - self._began_at,
        )

    def _agreed_time(self, told: Mapping[int, Written]) -> float:
        return min(each.at for each in told.values())

    def _agreed(
        self, terms: Mapping[int, SaveTerms]
    ) -> tuple[tuple[SavedArray, ...], dict[int, list[tuple[int, Box]]]]:
        """Return the arrays of the state and the ranks that hold them; the same error on all ranks if they differ."""
        raise_failures(
            {rank: each.failure for rank, each in terms.items()},
            f"the checkpoint of step {self._step} was not saved",
            self._snapshot.failure,
        )
        ranks = sorted(terms)
        first = terms[ranks[0]]
        for rank, each in terms.items():
            if each.report is None:
                raise RemoteProtocolError(f"rank {rank} told nothing of its folder")
            for what in ("step", "keep", "copies"):
                if getattr(each, what) != getattr(first, what):
                    raise MismatchError(
                        f"group.checkpoint.save: rank {ranks[0]} passed {what}={getattr(first, what)}, and rank {rank} "
                        f"{what}={getattr(each, what)}"
                    )
            if each.tree != first.tree:
                where = first_difference(objects.decode(first.tree), objects.decode(each.tree))
                raise MismatchError(
                    f"group.checkpoint.save: {where or 'the state'} differs between rank {ranks[0]} and rank {rank}; "
                    "values must be equal on all ranks, and parts of arrays are passed as covey.Shard"
                )
        try:
            arrays, owned = whole_arrays({rank: each.arrays for rank, each in terms.items()})
            share_out(arrays, ranks, owned)
        except MismatchError as error:
            if not self._lost:
                raise MismatchError(f"group.checkpoint.save: {error}") from None
            raise self._lost_parts(str(error)) from None
        joined = [array.name for array in first.arrays if array.axis >= 0 and not array.shape]
        if self._lost and joined:
            raise self._lost_parts(f"{joined[0]!r} consists of the parts of all ranks")
        return arrays, owned

    def _lost_parts(self, text: str) -> CheckpointError:
        lost = tuple(sorted(self._lost))
        named = f"rank{'s' * (len(lost) > 1)} {', '.join(map(str, lost))}"
        return CheckpointError(
            f"the checkpoint of step {self._step} was not saved: {named} was lost, and no other rank has its part of "
            f"the state: {text}",
            ranks=lost,
        )

    def _write(
        self,
        attempt: int,
        save_id: str,
        ranks: Sequence[int],
        pieces: Mapping[int, Sequence[ShardPiece]],
        layouts: Mapping[int, FileLayout],
        targets: Mapping[int, Sequence[int]],
        boxes: Sequence[tuple[int, Box]],
        lock_problem: str,
    ) -> Written:
        """Write the shard of this rank and copies of others; return what is on disk."""
        assert self._folder is not None
        folder, me = self._folder, self._issuer.rank
        number_of = {rank: number for number, rank in enumerate(ranks)}
        source = _ShardSource(layouts[me], pieces[me], self._snapshot.contents, dict(boxes))
        senders = [rank for rank in ranks if me in targets[rank]]
        problems = [lock_problem] if lock_problem else []
        writers: dict[int, ShardWriter] = {}
        digests: dict[int, list[bytes]] = {}
        try:
            try:
                folder.begin(self._step, save_id)
            except OSError as error:
                problems.append(f"{folder.path}: {explain(error)}")
            for rank in (me, *senders):
                writers[rank] = folder.writer(self._step, save_id, number_of[rank], len(ranks))
                digests[rank] = []
            for number in range(source.chunks):
                chunk = source.chunk(number)
                digests[me].append(digest_of(chunk.data))
                writers[me].write(chunk.data)
            with Exchange(self._issuer, attempt, self._deadline) as exchange:
                failed = transfer(
                    exchange,
                    {rank: ChunksOut(source.chunks, source.chunk) for rank in targets[me]},
                    {rank: self._copying(layouts[rank].nbytes, writers[rank], digests[rank]) for rank in senders},
                )
            for rank, writer in writers.items():
                writer.finish()
                if writer.problem:
                    problems.append(writer.problem)
                self._written += 0 if writer.problem else layouts[rank].nbytes
            try:
                folder.sync(self._step, save_id)
            except OSError as error:
                problems.append(f"{folder.path}: {explain(error)}")
            problems += [
                f"rank {rank}: {error}" for rank, error in failed.items() if not isinstance(error, PeerLostError)
            ]
        finally:
            for writer in writers.values():
                writer.close()
        copies = tuple((number_of[rank], b"".join(digests[rank])) for rank in senders if rank not in failed)
        return Written(b"".join(digests[me]), copies, "; ".join(problems)[:TEXT_LIMIT], time.time())

    @staticmethod
    def _copying(nbytes: int, writer: ShardWriter, digests: list[bytes]) -> ChunksIn:
        """Return what writes the chunks of another rank's shard, which may come in any order, in theirs."""
        sizes = [min(SHARD_CHUNK_BYTES, nbytes - start) for start in range(0, nbytes, SHARD_CHUNK_BYTES)]
        waiting: dict[int, bytes] = {}

        def take(number: int, chunk: Bytes) -> None:
            waiting[number] = chunk.tobytes()
            while (next_one := waiting.pop(len(digests), None)) is not None:
                digests.append(digest_of(next_one))
                writer.write(next_one)

        return ChunksIn(sizes, take)

    def _commit(self, saved: SavedCheckpoint, *, leads: bool) -> str:
        """Write the manifest, if this rank is the one that does; return why that failed."""
        assert self._folder is not None
        if leads:
            try:
                self._folder.commit(saved)
            except OSError as error:
                return f"{self._folder.path}: {explain(error)}"
        return ""

    def _prune(self, kept: Mapping[bytes, Any], own: RanksFolder, new: FoundCheckpoint) -> None:
        """Delete what is old on this machine. What cannot be deleted stays for the next save."""
        assert self._folder is not None
        old = to_delete(kept[own.id], found_checkpoints(kept), new, self._keep)
        with contextlib.suppress(OSError):
            self._folder.delete([*old, *self._made])

    def _clean(self) -> None:
        """Delete what this save has begun."""
        assert self._folder is not None
        with contextlib.suppress(OSError):
            self._folder.delete(self._made)


@contextlib.contextmanager
def _locked(folder: ShardFolder, leads: bool) -> Iterator[str]:
    """Keep other programs from saving into a folder meanwhile; yield why that is impossible, or an empty text."""
    if not leads:
        yield ""
        return
    path, descriptor, problem = folder.path / "lock", -1, ""
    try:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            if not try_lock(descriptor, path):
                problem = f"another program saves into {folder.path}; give each its own folder="
        except (OSError, ConfigError) as error:
            problem = f"{path}: {short(error)}"
        yield problem
    finally:
        if descriptor >= 0:
            os.close(descriptor)


class _ShardSource:
    """The bytes of the file that a rank writes, chunk by chunk, out of its arrays."""

    def __init__(
        self, layout: FileLayout, pieces: Sequence[ShardPiece], contents: Sequence[Array], boxes: Mapping[int, Box]
    ) -> None:
        """`boxes` say which part of a sharded array its content is."""
        self._layout = layout
        self.chunks = -(-layout.nbytes // SHARD_CHUNK_BYTES)
        parts: list[tuple[int, Callable[[], Bytes]]] = [(0, lambda: np.frombuffer(layout.header, np.uint8))]
        for piece, start in zip(pieces, layout.starts, strict=True):
            box = boxes.get(piece.array)
            content = contents[piece.array]
            parts.append((start, _PieceBytes(content, piece.box if box is None else piece.box.within(box))))
        self._parts = parts

    def chunk(self, number: int) -> Bytes:
        """Return one chunk."""
        start, end = number * SHARD_CHUNK_BYTES, min((number + 1) * SHARD_CHUNK_BYTES, self._layout.nbytes)
        out, at = np.empty(end - start, np.uint8), self._first(start)
        while at < len(self._parts) and self._parts[at][0] < end:
            begin, content = self._parts[at]
            data = content()
            low, high = max(begin, start), min(begin + data.size, end)
            if low < high:
                out[low - start : high - start] = data[low - begin : high - begin]
            at += 1
        return out

    def _first(self, start: int) -> int:
        """Return the number of the last part that begins at `start` or before."""
        low, high = 0, len(self._parts)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._parts[middle][0] <= start else (low, middle)
        return low


class _PieceBytes:
    """The bytes of a box of an array; those of a box that is not contiguous are copied once."""

    def __init__(self, content: Array, box: Box) -> None:
        self._content, self._box = content, box

    def __call__(self) -> Bytes:
        return self._bytes

    @functools.cached_property
    def _bytes(self) -> Bytes:
        return np.ascontiguousarray(self._content[self._box.key]).reshape(-1).view(np.uint8)
