"""The files of a working folder, as they are sent: their paths, sizes and digests, and a copy of their content.

Nothing is sent before the whole folder was read, and what is sent is what was read: a file that changes later changes
nothing. `folder` decides what is in it.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final, Self

from covey.agent.folder import IGNORE_ADVICE, FolderReader, LeftOut, ReadFile, read_some, stamp
from covey.agent.ignore import HEAD_BYTES, IGNORE_FILE
from covey.agent.requests import FileEntry, PathSet
from covey.base.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

SNAPSHOT_FILES_LIMIT: Final = 20_000
FOLDER_BYTES: Final = 2 << 30
CHANGED_FILE_READS: Final = 3
"""How often a file is read that changes while it is read."""


@dataclass(frozen=True)
class Snapshot:
    """A folder and its files, sorted by path. Use it in `with`, or call `close`: it holds a copy of their content."""

    folder: Path
    entries: tuple[FileEntry, ...]
    left_out: tuple[LeftOut, ...]
    content: IO[bytes]
    """A file without a name, with the content of all files."""
    offsets: tuple[int, ...]
    """By number of the entry, where its content begins there."""

    @property
    def size(self) -> int:
        return sum(entry.size for entry in self.entries)

    def read(self, index: int, offset: int, size: int) -> bytes:
        """Return bytes of a file, by the number of its entry. On any thread."""
        data = os.pread(self.content.fileno(), size, self.offsets[index] + offset)
        assert len(data) == size
        return data

    def close(self) -> None:
        """Give up the copy."""
        self.content.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def take_snapshot(folder: Path, apart: Path | None = None, includes: Sequence[str] = ()) -> Snapshot:
    """Read all files below `folder`, except those that its `.coveyignore` names, what is below the folder `apart`, and
    what may hold secrets and is not named by `includes`.

    Raises:
        ConfigError: the folder is one that is never sent (`check_folder`); there are too many files or bytes, a special
            file, a path that cannot be sent, or a pattern of `includes` that names nothing.
    """
    try:
        content = tempfile.TemporaryFile()  # noqa: SIM115 - the snapshot closes it
    except OSError as error:
        raise _no_room(error) from error
    try:
        return _SnapshotReader(folder, apart, includes, content).snapshot()
    except BaseException:
        content.close()
        raise


def with_files(files: Mapping[str, bytes], folder: Snapshot | None = None) -> Snapshot:
    """Return a snapshot of files that exist only here, and of those of a folder, whose copy it takes over.

    Raises:
        ConfigError: a path collides with one of the folder, or there is no room for the files.
    """
    content: IO[bytes] = tempfile.TemporaryFile() if folder is None else folder.content  # noqa: SIM115 - its owner closes it
    entries = [] if folder is None else list(zip(folder.entries, folder.offsets, strict=True))
    paths, end = PathSet(), 0
    for entry, offset in entries:
        paths.add(entry.path)
        end = max(end, offset + entry.size)
    try:
        for path, data in files.items():
            paths.add(path)
            content.seek(end)
            content.write(data)
            entries.append((FileEntry(path, len(data), hashlib.sha256(data).digest()), end))
            end += len(data)
        content.flush()
    except BaseException as error:
        content.close()
        if isinstance(error, OSError):
            raise _no_room(error) from error
        raise
    entries.sort(key=lambda each: each[0].path)
    at, left_out = (Path(), ()) if folder is None else (folder.folder, folder.left_out)
    return Snapshot(at, tuple(each for each, _ in entries), left_out, content, tuple(at for _, at in entries))


def _no_room(error: OSError) -> ConfigError:
    where = tempfile.gettempdir() if tempfile.tempdir is not None else "the temporary folder"
    return ConfigError(
        f"the files cannot be copied to {where} before they are sent: {error.strerror}; make room there, or set TMPDIR "
        "to a folder on a larger disk"
    )


class _SnapshotReader(FolderReader):
    """Copies the files of one folder."""

    def __init__(self, folder: Path, apart: Path | None, includes: Sequence[str], content: IO[bytes]) -> None:
        super().__init__(folder, apart, includes, files_limit=SNAPSHOT_FILES_LIMIT)
        self._content = content
        self._taken: list[tuple[FileEntry, int]] = []
        self._end = 0

    def snapshot(self) -> Snapshot:
        """Read the folder."""
        self.walk()
        taken = sorted(self._taken, key=lambda each: each[0].path)
        entries, offsets = tuple(entry for entry, _ in taken), tuple(offset for _, offset in taken)
        return Snapshot(self._folder, entries, tuple(self.left_out), self._content, offsets)

    def _read_file(self, file: IO[bytes], path: str) -> ReadFile:
        """Copy a file behind the others.

        Raises:
            ConfigError: it changes again and again, or there is no room for it.
        """
        for _ in range(CHANGED_FILE_READS):
            before, size, digest = stamp(file), 0, hashlib.sha256()
            file.seek(0)
            while size <= before[1] and (data := read_some(file, path)):  # one that grows may have no end
                if self._end + size + len(data) > FOLDER_BYTES:
                    raise ConfigError(
                        f"{self._folder} has more than {FOLDER_BYTES >> 30} GiB ({path} has {before[1] >> 20} MiB); "
                        f"leave files out with {IGNORE_FILE}, and send large data with `covey push`, once for all "
                        "programs"
                    )
                self._write(data, self._end + size)
                digest.update(data)
                size += len(data)
            if stamp(file) == before and size == before[1]:
                head = os.pread(self._content.fileno(), min(size, HEAD_BYTES), self._end)
                return ReadFile(size, digest.digest(), head)
        raise ConfigError(f"{path} changes while it is read; stop what writes it, or {IGNORE_ADVICE}")

    def _keep(self, entry: FileEntry) -> None:
        self._taken.append((entry, self._end))
        self._end += entry.size

    def _write(self, data: bytes, offset: int) -> None:
        try:
            while data:
                written = os.pwrite(self._content.fileno(), data, offset)
                data, offset = data[written:], offset + written
        except OSError as error:
            raise _no_room(error) from error
