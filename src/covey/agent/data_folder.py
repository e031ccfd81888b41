"""The data set of a person who pushes it: a folder or a file of this machine, read once for its digests, and then again
for what other machines ask for.

What may leave the machine is decided as for programs (`folder`). A file whose time and size are those of the last push
is not read again for its digests; a receiver checks every chunk, so that a wrong guess costs a message and no more.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import threading
import time
from typing import IO, TYPE_CHECKING, Final, Self

import msgspec

from covey.agent.data_sets import DATA_CHUNK_BYTES, DATA_FILES_LIMIT, DataFile, DataManifest
from covey.agent.folder import DATA_ADVICE, FOLDER_FLAGS, FolderReader, LeftOut, ReadFile, check_named, open_below
from covey.agent.ignore import HEAD_BYTES, is_private_key
from covey.agent.requests import FileEntry
from covey.base.errors import ConfigError
from covey.net.host.folders import read_private, write_private

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from types import TracebackType

OPEN_FILES: Final = 16
"""Files of one data set that are open at a time."""
SETTLED_SECONDS: Final = 2.0
"""A file that was changed so lately may change again without another time of change."""


class _Seen(msgspec.Struct, frozen=True, array_like=True):
    """What a file looked like when its digests were made."""

    stamp: tuple[int, int, int, int]
    chunks: bytes


_seen_decoder: Final = msgspec.msgpack.Decoder(dict[str, _Seen])


class OpenFiles:
    """Reads parts of many files, of which a few are open. Any thread may call any method."""

    def __init__(self, opened: Callable[[int], int]) -> None:
        """`opened` returns a new descriptor of a file, by its number."""
        self._opened, self._lock = opened, threading.Lock()
        self._descriptors: dict[int, int] = {}
        self._is_closed = False

    def read(self, file: int, offset: int, size: int) -> bytes:
        """Return the bytes of a file at an offset: fewer at its end; ConfigError if it cannot be read."""
        with self._lock:
            if self._is_closed:
                raise ConfigError("the data set is closed")
            try:
                descriptor = self._descriptors.pop(file, -1)
                if descriptor < 0:
                    descriptor = self._opened(file)
                self._descriptors[file] = descriptor  # the last one is the one that was used last
                if len(self._descriptors) > OPEN_FILES:
                    os.close(self._descriptors.pop(next(iter(self._descriptors))))
                return os.pread(descriptor, size, offset)
            except OSError as error:
                raise ConfigError(f"a file of the data set cannot be read: {error.strerror}") from error

    def close(self) -> None:
        """Close all files."""
        with self._lock:
            self._is_closed = True
            while self._descriptors:
                os.close(self._descriptors.popitem()[1])


class DataFolder:
    """A folder or a file that is pushed. Use it in `with`, or call `close`."""

    def __init__(self, path: Path, manifest: DataManifest, inner: Sequence[str], left_out: Sequence[LeftOut]) -> None:
        """`inner` has, by file, its path below the folder that is really read: files may be links to others."""
        self.path, self.manifest, self.left_out = path, manifest, tuple(left_out)
        self.folder = path
        self._root = os.open(path.parent if manifest.is_file else path, FOLDER_FLAGS)
        self._files = OpenFiles(lambda number: open_below(self._root, inner[number]))

    @property
    def entries(self) -> tuple[FileEntry, ...]:
        """Its files, as a person sees them before they are sent."""
        return tuple(FileEntry(each.path, each.size, bytes(32)) for each in self.manifest.files)

    @property
    def size(self) -> int:
        return self.manifest.size

    def has(self) -> list[bool] | None:
        """Return which chunks are here: None for all."""
        return None

    def read(self, chunk: int, offset: int, size: int) -> bytes:
        """Return bytes of a chunk; ConfigError if its file cannot be read."""
        spot = self.manifest.spot(chunk)
        return self._files.read(spot.file, spot.offset + offset, min(size, spot.size - offset))

    def close(self) -> None:
        """Close all files."""
        self._files.close()
        os.close(self._root)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def read_data(path: Path, includes: Sequence[str], cache: Path, read: Callable[[int], None]) -> DataFolder:
    """Read a folder, or a file, that is to be pushed. `cache` is a file with the digests of the last time.

    `read` gets the number of bytes that were read, again and again.

    Raises:
        ConfigError: it may not leave this machine, or cannot be read, or has too many files.
    """
    path = path.resolve()
    check_named(path)
    seen = _SeenFiles(cache)
    if path.is_dir():
        reader = _DataReader(path, includes, seen, read)
        reader.walk()
        taken = sorted(reader.taken, key=lambda each: each[0].path)
        folder = DataFolder(
            path, DataManifest([file for file, _ in taken]), [inner for _, inner in taken], reader.left_out
        )
    else:
        folder = _one_file(path, includes, seen, read)
    if not folder.manifest.files:
        folder.close()
        raise ConfigError(f"{path} has no file that can be sent; push a folder with files")
    seen.keep()
    return folder


def _one_file(path: Path, includes: Sequence[str], seen: _SeenFiles, read: Callable[[int], None]) -> DataFolder:
    if includes:
        raise ConfigError(f"--include names files of a folder, and {path} is a file; leave it out")
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; give the path of a folder or a file") from error
    with open(descriptor, "rb", buffering=0) as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{path} is neither a folder nor a file, and cannot be pushed")
        if is_private_key(os.pread(descriptor, HEAD_BYTES, 0)):
            raise ConfigError(f"{path} is a private key, and is not sent; {DATA_ADVICE}")
        size, chunks = seen.digests(file, path.name, read)
    one = DataFile(path.name, size, chunks, bool(status.st_mode & stat.S_IXUSR))
    return DataFolder(path, DataManifest([one], is_file=True), [path.name], [])


class _SeenFiles:
    """The digests of files, as they were read now, and as they were the last time."""

    def __init__(self, cache: Path) -> None:
        self._cache = cache
        self._before: dict[str, _Seen] = {}
        self._now: dict[str, _Seen] = {}
        with contextlib.suppress(FileNotFoundError, ConfigError, msgspec.DecodeError):  # then everything is read
            self._before = _seen_decoder.decode(read_private(cache, most=1 << 28))

    def digests(self, file: IO[bytes], path: str, read: Callable[[int], None]) -> tuple[int, bytes]:
        """Return the size of a file and the digests of its chunks; ConfigError if it changes while it is read."""
        stamp, began_at = _stamp(file), time.time()
        if (known := self._before.get(path)) is not None and known.stamp == stamp:
            self._now[path] = known
            read(stamp[1])
            return stamp[1], known.chunks
        digests = bytearray()
        file.seek(0)
        try:
            while data := _read_chunk(file):
                digests += hashlib.sha256(data).digest()
                read(len(data))
                if len(digests) > 32 * (stamp[1] // DATA_CHUNK_BYTES + 1):
                    break  # it grows, and may have no end
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
        if _stamp(file) != stamp:
            raise ConfigError(f"{path} changes while it is read; stop what writes it, and push again")
        if began_at - stamp[0] / 1e9 > SETTLED_SECONDS:
            self._now[path] = _Seen(stamp, bytes(digests))
        return stamp[1], bytes(digests)

    def keep(self) -> None:
        """Write the digests for the next time."""
        with contextlib.suppress(ConfigError):  # then everything is read again
            write_private(self._cache, msgspec.msgpack.encode(self._now))


def _read_chunk(file: IO[bytes]) -> bytes:
    """Return the next chunk of an unbuffered file: a read may return less."""
    parts, left = [], DATA_CHUNK_BYTES
    while left and (data := file.read(left)):
        parts.append(data)
        left -= len(data)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _stamp(file: IO[bytes]) -> tuple[int, int, int, int]:
    status = os.fstat(file.fileno())
    return status.st_mtime_ns, status.st_size, status.st_ino, status.st_ctime_ns


class _DataReader(FolderReader):
    """Makes the list of the files of one folder."""

    advice = DATA_ADVICE

    def __init__(self, folder: Path, includes: Sequence[str], seen: _SeenFiles, read: Callable[[int], None]) -> None:
        super().__init__(folder, None, includes, files_limit=DATA_FILES_LIMIT)
        self._seen, self._read = seen, read
        self.taken: list[tuple[DataFile, str]] = []
        """Each file, and where it really is below the folder."""
        self._inner, self._digests = "", b""

    def _take_file(self, root: int, path: str, inner: str, at: tuple[int, ...]) -> None:
        self._inner = inner
        super()._take_file(root, path, inner, at)

    def _read_file(self, file: IO[bytes], path: str) -> ReadFile:
        size, self._digests = self._seen.digests(file, path, self._read)
        return ReadFile(size, bytes(32), os.pread(file.fileno(), HEAD_BYTES, 0))

    def _keep(self, entry: FileEntry) -> None:
        self.taken.append((DataFile(entry.path, entry.size, self._digests, entry.is_executable), self._inner))


def folder_size(path: Path) -> int:
    """Return about how many bytes are to be read, for a progress bar."""
    if path.is_file():
        return path.stat().st_size
    total = 0
    for place, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(place, name)).st_size
    return total
