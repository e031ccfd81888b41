"""Files that a member sends into the working folder of a run, on the machine of the agent.

The folder stays from one start of the run to the next, with what the program wrote into it. Only files that differ are
sent. Nothing outside of the folder is read or written, whatever links a program has left in it: every step of a path is
opened from the folder before it, and links are not followed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
from typing import TYPE_CHECKING, Final

import msgspec

from covey.agent.folder import FOLDER_FLAGS, folder_below
from covey.agent.requests import OUTPUT_CHUNK_BYTES, PAGE_ENTRIES, FileChunk, PathSet, check_path
from covey.agent.snapshot import FOLDER_BYTES, SNAPSHOT_FILES_LIMIT
from covey.base.errors import ConfigError
from covey.net.host.folders import private_folder, read_private, write_private

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from covey.agent.requests import FileEntry


FOLDER_FILES_LIMIT: Final = 4096
"""Files of one folder that a terminal may read."""
_TEMPORARY_FOLDER: Final = "temporary"


def run_folder(folder: Path, run: str) -> Path:
    """Return the folder of a run below `folder`; its name is safe whatever the run is called, and differs for each."""
    readable = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in run)[:40].strip("-")
    return folder / f"{readable or 'run'}-{hashlib.sha256(run.encode('utf-8', 'replace')).hexdigest()[:12]}"


def work_folder(folder: Path) -> Path:
    """Return the working folder of programs, in the folder of their run; made if missing."""
    return private_folder(private_folder(folder) / "work")


def mark_temporary(folder: Path) -> None:
    """Note that the folder of a run is of no use once its program is forgotten."""
    (private_folder(folder) / _TEMPORARY_FOLDER).touch(mode=0o600)


def remove_temporary(folder: Path) -> None:
    """Remove the folder of a run if it was marked."""
    if (folder / _TEMPORARY_FOLDER).exists():
        shutil.rmtree(folder, ignore_errors=True)


def read_folder(folder: Path, path: str) -> Iterator[FileChunk]:
    """Yield the files of a folder below the working folder of a program, chunk by chunk; nothing if there is none.

    Raises:
        ConfigError: the path cannot be used, or there are too many files.
    """
    with contextlib.ExitStack() as stack:
        root = os.open(folder, FOLDER_FLAGS)
        stack.callback(os.close, root)
        try:
            below = stack.enter_context(folder_below(root, check_path(path)))
        except OSError:
            return
        names = sorted(os.listdir(below))
        if len(names) > FOLDER_FILES_LIMIT:
            raise ConfigError(f"{path} has {len(names)} files; {FOLDER_FILES_LIMIT} can be read")
        for name in names:
            with contextlib.suppress(OSError), open(_open_file(below, name), "rb") as file:
                status = os.fstat(file.fileno())
                while stat.S_ISREG(status.st_mode) and (data := file.read(OUTPUT_CHUNK_BYTES)):
                    yield FileChunk(name, status.st_size, data)


class Delivery:
    """One transfer of files into the folder of a run: a list, then the content of those that are missing.

    One thread at a time may call its methods.
    """

    def __init__(self, folder: Path) -> None:
        """Prepare a transfer; ConfigError if the folder cannot be made."""
        self.work = work_folder(folder)
        self._list, self._incoming = folder / "sent.json", private_folder(folder / "incoming")
        self._paths, self._total = PathSet(), 0
        self._entries: list[tuple[FileEntry, tuple[str, ...]]] = []
        self._wanted: dict[int, set[int]] = {}
        """By index of a missing file: where the chunks begin that have come."""
        self._has_begun = self.is_complete = False

    def offer(self, page: tuple[FileEntry, ...]) -> None:
        """Take a page of the list; ConfigError if a path cannot be used, or the list gets too long."""
        self._require(not self._has_begun, "the list of files is complete already")
        for entry in page:
            self._entries.append((entry, self._paths.add(entry.path)))
            self._total += entry.size
        if len(self._entries) > SNAPSHOT_FILES_LIMIT or self._total > FOLDER_BYTES:
            raise ConfigError(f"a folder may have {SNAPSHOT_FILES_LIMIT} files of {FOLDER_BYTES >> 30} GiB in all")

    def missing(self) -> Iterator[list[int]]:
        """Yield the indexes of the files that differ from those here, page by page; remove files of an earlier list."""
        self._require(not self._has_begun, "the list of files is complete already")
        self._has_begun = True
        for leftover in self._incoming.iterdir():
            leftover.unlink()
        with self._root() as root:
            for path in self._earlier() - {entry.path for entry, _ in self._entries}:
                _remove(root, path)
            wanted: list[int] = []
            for index, (entry, parts) in enumerate(self._entries):
                if not _is_same(root, parts, entry):
                    wanted.append(index)
                if len(wanted) >= PAGE_ENTRIES:
                    self._wanted |= {each: set() for each in wanted}
                    yield wanted
                    wanted = []
        self._wanted |= {each: set() for each in wanted}
        yield wanted

    def put(self, index: int, offset: int, data: bytes) -> None:
        """Take some bytes of a missing file: a chunk, which begins at a multiple of OUTPUT_CHUNK_BYTES, in any order.

        Raises:
            ConfigError: they are not what was announced, or cannot be written.
        """
        chunks = self._wanted.get(index)
        self._require(
            chunks is not None and offset % OUTPUT_CHUNK_BYTES == 0, f"file {index} at {offset} was not asked for"
        )
        assert chunks is not None
        entry, parts = self._entries[index]
        expected = min(OUTPUT_CHUNK_BYTES, entry.size - offset)
        self._require(len(data) == expected and offset not in chunks, f"{entry.path} has changed while it was sent")
        part = self._incoming / str(index)
        try:
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with open(descriptor, "wb") as file:
                file.seek(offset)
                file.write(data)
            chunks.add(offset)
            if len(chunks) * OUTPUT_CHUNK_BYTES >= entry.size:
                self._install(part, entry, parts)
                del self._wanted[index]
        except OSError as error:
            raise ConfigError(f"{entry.path} cannot be written into {self.work}: {error.strerror}") from error

    def _install(self, part: Path, entry: FileEntry, parts: tuple[str, ...]) -> None:
        """Check a file that is complete, and move it into the folder."""
        with open(part, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").digest()
        self._require(digest == entry.digest, f"{entry.path} has changed while it was sent")
        os.chmod(part, 0o700 if entry.is_executable else 0o600)
        with self._root() as root, folder_below(root, parts[:-1], make_folder) as folder:
            os.rename(part, parts[-1], dst_dir_fd=folder)

    def finish(self) -> None:
        """Note that all files are there; ConfigError if some are not."""
        self._require(self._has_begun and not self._wanted, "some files were not sent")
        write_private(self._list, msgspec.json.encode([entry.path for entry, _ in self._entries]))
        self.is_complete = True

    def _earlier(self) -> set[str]:
        with contextlib.suppress(FileNotFoundError, ConfigError, msgspec.DecodeError):  # then older files just stay
            return set(msgspec.json.decode(read_private(self._list), type=list[str]))
        return set()

    @contextlib.contextmanager
    def _root(self) -> Iterator[int]:
        descriptor = os.open(self.work, FOLDER_FLAGS)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    @staticmethod
    def _require(is_so: bool, problem: str) -> None:
        if not is_so:
            raise ConfigError(f"{problem}; start again")


def make_folder(descriptor: int, name: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISDIR(os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_mode):
            os.unlink(name, dir_fd=descriptor)
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=descriptor)


def _open_file(folder: int, name: str) -> int:
    """Open a file of an open folder, no link; a pipe without a writer does not block."""
    return os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)


def _is_same(root: int, parts: tuple[str, ...], entry: FileEntry) -> bool:
    """Tell whether the file here is the one of an entry."""
    try:
        with folder_below(root, parts[:-1]) as folder, open(_open_file(folder, parts[-1]), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_size != entry.size:
                return False
            is_executable = bool(status.st_mode & stat.S_IXUSR)
            return is_executable == entry.is_executable and hashlib.file_digest(file, "sha256").digest() == entry.digest
    except OSError:
        return False


def _remove(root: int, path: str) -> None:
    """Remove a file that was sent before and is not any more."""
    parts = tuple(path.split("/"))
    with contextlib.suppress(OSError), folder_below(root, parts[:-1]) as folder:
        os.unlink(parts[-1], dir_fd=folder)
