"""The files of a working folder, as they are sent: their paths, sizes and digests."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from covey.agent.ignore import FILE_NAME, IgnoreRules
from covey.agent.paths import PathSet
from covey.agent.requests import FileEntry
from covey.base.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from io import BufferedReader

FILES_LIMIT: Final = 20_000
FOLDER_BYTES: Final = 2 << 30
_ADVICE: Final = f"leave it out with a line in {FILE_NAME}"


class Snapshot(NamedTuple):
    """A folder and its files, sorted by path."""

    folder: Path
    entries: tuple[FileEntry, ...]


def take_snapshot(folder: Path, left_out: Path | None = None) -> Snapshot:
    """Read all files below `folder` that are not left out by its `.coveyignore`, nor below the folder `left_out`.

    Raises:
        ConfigError: there are too many files or bytes, a special file, a link that leaves the folder, or a path that
            cannot be sent.
    """
    folder = folder.resolve()
    rules, paths, entries, total = _rules(folder), PathSet(), list[FileEntry](), 0
    apart = None if left_out is None else left_out.resolve()
    for path, status in _walk(folder, "", rules, apart):
        paths.add(path)
        total += status.st_size
        if len(entries) >= FILES_LIMIT:
            raise ConfigError(f"{folder} has more than {FILES_LIMIT} files; leave some out with {FILE_NAME}")
        if total > FOLDER_BYTES:
            raise ConfigError(
                f"{folder} has more than {FOLDER_BYTES >> 30} GiB ({path} has {status.st_size >> 20} MiB); leave files "
                f"out with {FILE_NAME}, and read large data from a path that exists on all machines"
            )
        with _open(folder / path) as file:
            digest = hashlib.file_digest(file, "sha256").digest()
            size = file.tell()
        entries.append(FileEntry(path, size, digest, bool(status.st_mode & stat.S_IXUSR)))
    return Snapshot(folder, tuple(sorted(entries, key=lambda entry: entry.path)))


def _rules(folder: Path) -> IgnoreRules:
    try:
        with _open(folder / FILE_NAME) as file:
            return IgnoreRules(file.read(1 << 20).decode().splitlines())
    except FileNotFoundError:
        return IgnoreRules()
    except UnicodeDecodeError:
        raise ConfigError(f"{folder / FILE_NAME} is no UTF-8 text; write one pattern a line") from None


def _open(path: Path) -> BufferedReader:
    return open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK | os.O_CLOEXEC))


def _walk(folder: Path, below: str, rules: IgnoreRules, apart: Path | None) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the files below a part of the folder, with their status; a link to a file inside counts as that file."""
    try:
        found = sorted(os.scandir(folder / below), key=lambda entry: entry.name)
    except OSError as error:
        raise ConfigError(f"{folder / below} cannot be read: {error.strerror}; {_ADVICE}") from error
    for entry in found:
        path = f"{below}/{entry.name}" if below else entry.name
        if rules.ignores(path, is_folder=entry.is_dir(follow_symlinks=False)):
            continue
        if entry.is_dir(follow_symlinks=False):
            if folder / path != apart:
                yield from _walk(folder, path, rules, apart)
            continue
        if entry.is_symlink() and not Path(os.path.realpath(entry.path)).is_relative_to(folder):
            raise ConfigError(f"{path} is a link that leaves {folder}; {_ADVICE}")
        try:
            status = entry.stat()
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}; {_ADVICE}") from error
        if entry.is_symlink() and stat.S_ISDIR(status.st_mode):
            raise ConfigError(f"{path} is a link to a folder, which is not sent; {_ADVICE}")
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{path} is neither a file nor a folder; {_ADVICE}")
        yield path, status
