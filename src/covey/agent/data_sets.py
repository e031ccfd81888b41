"""Data sets: their names, and the list of their files with a digest for each chunk. No I/O.

A data set is known by the SHA-256 of its encoded list. So a machine that has the list by that digest can take every
chunk from any other machine, however little it trusts it.
"""

from __future__ import annotations

import bisect
import hashlib
import re
from itertools import accumulate
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

import msgspec

from covey.agent.requests import PATH_BYTES, Number, PathSet
from covey.base.errors import ConfigError
from covey.base.text import printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

DATA_CHUNK_BYTES: Final = 1 << 20
"""What is checked, and sent again if it differs, as a whole. A file begins a chunk of its own."""
DATA_FILES_LIMIT: Final = 200_000
DATA_CHUNKS_LIMIT: Final = 1 << 20
"""Chunks of one data set: 1 TiB of large files."""
DATA_MANIFEST_LIMIT: Final = 96 << 20
DATA_SETS_LIMIT: Final = 256
"""Data sets of one machine."""
DATA_SOURCES_LIMIT: Final = 64
"""Other machines from which one machine takes a data set."""
_FORMAT: Final = 1
_DIGEST_BYTES: Final = 32
_DATA_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")

DataName = Annotated[str, msgspec.Meta(min_length=1, max_length=100)]
Digest = Annotated[bytes, msgspec.Meta(min_length=_DIGEST_BYTES, max_length=_DIGEST_BYTES)]
NodeId = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class DataFile(msgspec.Struct, frozen=True, array_like=True):
    """One file of a data set."""

    path: Annotated[str, msgspec.Meta(min_length=1, max_length=PATH_BYTES)]
    """Relative to its folder, with `/`."""
    size: Number
    chunks: bytes
    """The SHA-256 of each of its chunks, one after the other."""
    is_executable: bool = False

    @property
    def count(self) -> int:
        """How many chunks it has."""
        return -(-self.size // DATA_CHUNK_BYTES)


class _Encoded(msgspec.Struct, frozen=True, array_like=True):
    format: int
    is_file: bool
    files: tuple[DataFile, ...]


class ChunkSpot(NamedTuple):
    """Where a chunk is."""

    file: int
    """The number of its file in the list."""
    offset: int
    size: int
    digest: bytes


class DataManifest:
    """The list of the files of a data set, sorted by path. Chunks are numbered through all files."""

    def __init__(self, files: Sequence[DataFile], *, is_file: bool = False) -> None:
        """`is_file` says that the data set is one file, and no folder.

        Raises:
            ConfigError: it is no list of a data set: too long, paths that cannot be used, digests that are missing.
        """
        self.files, self.is_file = tuple(files), is_file
        paths = PathSet()
        for file in self.files:
            paths.add(file.path)
            if len(file.chunks) != _DIGEST_BYTES * file.count:
                raise ConfigError(f"the list of a data set has {file.path!r} without a digest for each chunk")
        self._starts = list(accumulate((file.count for file in self.files), initial=0))
        self.chunks = self._starts.pop()
        self.size = sum(file.size for file in self.files)
        if is_file and len(self.files) != 1:
            raise ConfigError("the list of a data set that is one file has several")
        if len(self.files) > DATA_FILES_LIMIT or self.chunks > DATA_CHUNKS_LIMIT:
            raise ConfigError(
                f"a data set may have {DATA_FILES_LIMIT} files and {DATA_CHUNKS_LIMIT * DATA_CHUNK_BYTES >> 40} TiB; "
                "pack small files into archives, or push parts under several names"
            )
        self.encoded = msgspec.msgpack.encode(_Encoded(_FORMAT, is_file, self.files))
        if len(self.encoded) > DATA_MANIFEST_LIMIT:
            raise ConfigError("the names of the files are too long for one data set; pack the files into archives")
        self.digest = hashlib.sha256(self.encoded).digest()

    @classmethod
    def decode(cls, data: bytes, digest: bytes) -> DataManifest:
        """Return the list with this digest; ConfigError if the bytes are something else."""
        if hashlib.sha256(data).digest() != digest:
            raise ConfigError("the list of files has another digest than announced")
        try:
            read = msgspec.msgpack.decode(data, type=_Encoded)
        except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
            raise ConfigError(f"the list of files cannot be read: {printable(str(error), 200)}") from None
        if read.format > _FORMAT:
            raise ConfigError("the data set was pushed by a later release of covey; update covey on this machine")
        return cls(read.files, is_file=read.is_file)

    def spot(self, chunk: int) -> ChunkSpot:
        """Return where a chunk is."""
        number = bisect.bisect_right(self._starts, chunk) - 1
        inner = chunk - self._starts[number]
        file, offset = self.files[number], inner * DATA_CHUNK_BYTES
        digest = file.chunks[inner * _DIGEST_BYTES : (inner + 1) * _DIGEST_BYTES]
        return ChunkSpot(number, offset, min(DATA_CHUNK_BYTES, file.size - offset), digest)

    def chunks_of(self, file: int) -> range:
        """Return the numbers of the chunks of a file."""
        return range(self._starts[file], self._starts[file] + self.files[file].count)

    def digests(self) -> Iterator[tuple[int, bytes]]:
        """Yield the number and the digest of every chunk."""
        for number, file in enumerate(self.files):
            for inner in range(file.count):
                yield self._starts[number] + inner, file.chunks[inner * _DIGEST_BYTES : (inner + 1) * _DIGEST_BYTES]


class FetchRequest(msgspec.Struct, frozen=True, array_like=True):
    """Asks an agent to get a data set."""

    name: DataName
    digest: Digest
    size: Annotated[int, msgspec.Meta(ge=1, le=DATA_MANIFEST_LIMIT)]
    """Bytes of the encoded list."""
    peers: Annotated[tuple[NodeId, ...], msgspec.Meta(max_length=DATA_SOURCES_LIMIT)]
    """Agents that have the data set, or get it at the same time."""
    is_here: bool = True
    """Whether the terminal has it, too."""

    def __post_init__(self) -> None:
        check_data_name(self.name)


class FetchProgress(msgspec.Struct, frozen=True, array_like=True):
    """How far an agent is with a data set."""

    there: Number
    """Bytes that it has, and has checked."""
    size: Number
    from_terminal: Number
    from_peers: Number
    """Bytes that came over the network."""
    is_published: bool = False
    """Whether programs find it: nothing follows."""
    was_there: bool = False
    """Whether it was there before."""


class DataReport(msgspec.Struct, frozen=True, array_like=True):
    """A data set that a machine has."""

    name: DataName
    digest: Digest
    files: Number
    size: Number
    there: Number
    """Bytes that are there; fewer than `size` if it is incomplete."""
    manifest_size: Number
    came_from: Annotated[str, msgspec.Meta(max_length=200)]
    """The machine that sent it."""
    at: float
    """When it came, by the clock of its machine."""
    path: Annotated[str, msgspec.Meta(max_length=4096)]
    is_complete: bool = True
    is_used: bool = False
    """Whether a program uses it now."""


def check_data_name(name: str) -> str:
    """Return the name of a data set; ConfigError if it cannot be one."""
    if not _DATA_NAME.fullmatch(name):
        raise ConfigError(
            f"{printable(name, 100)!r} is no name of a data set: it has 1 to 100 of A-Z a-z 0-9 . _ - and begins with "
            "a letter or a digit; choose one with --name"
        )
    return name
