"""What a checkpoint of shards consists of: its manifest, a file on every machine, and what ranks tell of it.

A checkpoint has arrays, which are cut into pieces: boxes of elements. The pieces that one rank writes are its shard, a
file in the format of safetensors. `proto.shards` checks what is decoded here, and says what it means.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from covey.base.errors import RemoteProtocolError
from covey.wire.decoding import read_from_peer
from covey.wire.message_header import MAX_BYTES, MAX_MESSAGE_NDIM
from covey.wire.messages import MAX_MEMBERS

ARRAYS_LIMIT: Final = 1 << 18
"""Arrays of a checkpoint."""
PIECES_LIMIT: Final = 1 << 20
"""Pieces in one shard."""
ARRAY_NAME_LIMIT: Final = 1000
TREE_BYTES: Final = 16 << 20
"""The longest encoded structure: all of a state but its arrays."""
SHARD_CHUNK_BYTES: Final = 4 << 20
"""A shard travels, and is checked, in chunks of this size."""
CHUNK_DIGEST_BYTES: Final = 16
SHARD_MANIFEST_LIMIT: Final = 256 << 20
"""The longest encoded manifest."""
TOLD_CHECKPOINTS_LIMIT: Final = 1000
"""Checkpoints of which one machine tells."""

Number = Annotated[int, msgspec.Meta(ge=0, le=MAX_BYTES)]
Text = Annotated[str, msgspec.Meta(max_length=ARRAY_NAME_LIMIT)]
SaveId = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}\Z", min_length=16, max_length=16)]
Dimensions = Annotated[tuple[Number, ...], msgspec.Meta(max_length=MAX_MESSAGE_NDIM)]


class SavedArray(msgspec.Struct, frozen=True, array_like=True):
    """An array of a state, as a whole."""

    name: Text
    dtype: Annotated[str, msgspec.Meta(max_length=20)]
    shape: Dimensions
    axis: Annotated[int, msgspec.Meta(ge=-1, lt=MAX_MESSAGE_NDIM)] = -1
    """Along which it is split between ranks unless they ask for other parts; -1 if every rank has all of it."""


class SavedPiece(msgspec.Struct, frozen=True, array_like=True):
    """A box of one array."""

    array: Number
    offset: Dimensions
    shape: Dimensions


class SavedShard(msgspec.Struct, frozen=True, array_like=True):
    """What one rank has written: one file."""

    pieces: Annotated[tuple[SavedPiece, ...], msgspec.Meta(max_length=PIECES_LIMIT)]
    """In the order of the file."""
    nbytes: Number
    """Bytes of the file."""
    digests: bytes
    """DIGEST_BYTES for each chunk of the file, in order."""
    hosts: Annotated[tuple[Text, ...], msgspec.Meta(max_length=MAX_MEMBERS)] = ()
    """The names of the machines that got it, for messages: the writer's first."""


class SavedCheckpoint(msgspec.Struct, frozen=True, array_like=True):
    """A whole checkpoint. The same on every machine."""

    id: SaveId
    serial: Number
    """Greater than that of every checkpoint that the ranks knew of when they saved it."""
    step: Number
    saved_at: float
    """Seconds since 1970."""
    arrays: Annotated[tuple[SavedArray, ...], msgspec.Meta(max_length=ARRAYS_LIMIT)]
    shards: Annotated[tuple[SavedShard, ...], msgspec.Meta(max_length=MAX_MEMBERS, min_length=1)]
    tree: Annotated[bytes, msgspec.Meta(max_length=TREE_BYTES)]
    """The state with the numbers of arrays in the place of arrays, encoded."""


class CheckpointPart(msgspec.Struct, frozen=True, array_like=True):
    """What one machine has of a checkpoint."""

    id: SaveId
    step: Number
    serial: Number = 0
    """0 if the machine has no manifest of it."""
    digest: Annotated[bytes, msgspec.Meta(max_length=CHUNK_DIGEST_BYTES)] = b""
    """Digest of the manifest; empty if there is none."""
    sizes: Annotated[tuple[Number, ...], msgspec.Meta(max_length=MAX_MEMBERS)] = ()
    """Bytes of each shard, by the manifest."""
    files: Annotated[tuple[tuple[Number, Number], ...], msgspec.Meta(max_length=MAX_MEMBERS)] = ()
    """The shards that are here: number and bytes."""


class FolderReport(msgspec.Struct, frozen=True, array_like=True):
    """The folder of one rank, and what is in it."""

    place: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    """Names the folder: ranks that share it tell the same."""
    host: Text
    """Equal for ranks on one machine."""
    host_name: Text
    kept: Annotated[tuple[CheckpointPart, ...], msgspec.Meta(max_length=TOLD_CHECKPOINTS_LIMIT)] = ()


_checkpoints: msgspec.msgpack.Decoder[SavedCheckpoint] = msgspec.msgpack.Decoder(SavedCheckpoint)
encode_saved_checkpoint = msgspec.msgpack.Encoder().encode


def decode_saved_checkpoint(data: bytes) -> SavedCheckpoint:
    """Decode the manifest of a checkpoint; RemoteProtocolError for anything else."""
    saved = read_from_peer(_checkpoints, data, "the manifest of a checkpoint")
    if any(-(-shard.nbytes // SHARD_CHUNK_BYTES) * CHUNK_DIGEST_BYTES != len(shard.digests) for shard in saved.shards):
        raise RemoteProtocolError("the manifest of a checkpoint has a shard whose digests do not fit its size")
    return saved


class StateArray(msgspec.Struct, frozen=True, array_like=True):
    """What one rank has of an array that is to be saved, or wants of one that is loaded."""

    name: Text
    dtype: Annotated[str, msgspec.Meta(max_length=20)]
    part: Dimensions
    """The shape of what it has."""
    axis: Annotated[int, msgspec.Meta(ge=-1, lt=MAX_MESSAGE_NDIM)] = -1
    """As that of `SavedArray`."""
    shape: Dimensions = ()
    """Shape of the whole array; empty if it follows from the parts of all ranks."""
    offset: Dimensions = ()
    """Where the part begins in it."""


class SaveTerms(msgspec.Struct, frozen=True, array_like=True):
    """What a rank is about to save."""

    step: Number
    keep: Number
    copies: Number
    id: SaveId
    """That of the checkpoint, if this is the lowest rank."""
    report: FolderReport | None = None
    arrays: Annotated[tuple[StateArray, ...], msgspec.Meta(max_length=ARRAYS_LIMIT)] = ()
    tree: Annotated[bytes, msgspec.Meta(max_length=TREE_BYTES)] = b""
    live: Annotated[tuple[Number, ...], msgspec.Meta(max_length=MAX_MEMBERS)] = ()
    """The ranks that remained when the program called."""
    failure: str = ""
    """Why this rank cannot take part; empty if it can."""


class Written(msgspec.Struct, frozen=True, array_like=True):
    """What a rank has on disk: its own shard, and copies of others."""

    digests: bytes = b""
    """Digests of its own chunks."""
    copies: Annotated[tuple[tuple[Number, bytes], ...], msgspec.Meta(max_length=MAX_MEMBERS)] = ()
    """By the number of the shard."""
    failure: str = ""
    at: float = 0.0
    """When, in seconds since 1970."""


class LoadTerms(msgspec.Struct, frozen=True, array_like=True):
    """What a rank is about to load."""

    step: Annotated[int, msgspec.Meta(ge=-1, le=MAX_BYTES)]
    """-1 for the newest."""
    report: FolderReport | None = None
    arrays: Annotated[tuple[StateArray, ...], msgspec.Meta(max_length=ARRAYS_LIMIT)] | None = None
    """What it wants; None if it takes all as it comes."""
    failure: str = ""


class StillMissing(msgspec.Struct, frozen=True, array_like=True):
    """What a rank still lacks."""

    missing: tuple[tuple[Number, Number], ...] = ()
    """By shard and chunk."""
    damaged: tuple[tuple[Annotated[bytes, msgspec.Meta(max_length=16)], Number], ...] = ()
    """The files that are not what was written, by folder and shard."""
    failure: str = ""
