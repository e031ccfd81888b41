"""The files of a working folder, as they are sent: their paths, sizes and digests, and a copy of their content.

Nothing is sent before the whole folder was read, and what is sent is what was read: a file that changes later changes
nothing. Never in a snapshot: covey's own folder, and what a link outside of the folder leads to. Only if a person names
it: what may hold secrets (`agent.ignore`).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pwd
import re
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final, NamedTuple, Self

from covey.agent.ignore import HEAD_BYTES, IGNORE_FILE, PROFILE_MARKS, IgnoreRules, SensitiveRules, is_private_key
from covey.agent.requests import FileEntry, PathSet
from covey.base.errors import ConfigError
from covey.base.text import printable
from covey.net.host.folders import home_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import TracebackType

SNAPSHOT_FILES_LIMIT: Final = 20_000
FOLDER_BYTES: Final = 2 << 30
CHANGED_FILE_READS: Final = 3
"""How often a file is read that changes while it is read."""
SECRET: Final = "may hold secrets"
LEADS_OUT: Final = "is a link that leads out of the folder"
OWN_FILE: Final = "is covey's own"
_SENTENCES: Final = {
    SECRET: "may hold secrets and is not sent; --include sends it",
    LEADS_OUT: "leads out of the folder and is not followed",
    OWN_FILE: "is covey's own and is never sent",
}
NAMED: Final = 12
"""Left out files that are named for one reason."""
_ADVICE: Final = f"leave it out with a line in {IGNORE_FILE}"
_COPY_BYTES: Final = 1 << 20
_NODE_KEY: Final = re.compile(r"\d+\.key")
FOLDER_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class LeftOut(NamedTuple):
    """A file or folder that is not sent, although no `.coveyignore` names it."""

    path: str
    why: str
    """SECRET, LEADS_OUT or OWN_FILE."""


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

    def lines_about_left_out(self) -> Iterator[str]:
        """Yield what to tell a person about files that are not sent."""
        for why, sentence in _SENTENCES.items():
            paths = [printable(each.path, 200) for each in self.left_out if each.why == why]
            for path in paths[:NAMED]:
                yield f"left out: {path} {sentence}"
            if len(paths) > NAMED:
                yield f"left out: {len(paths) - NAMED} more, for the same reason"

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
    folder = folder.resolve()
    check_folder(folder)
    try:
        content = tempfile.TemporaryFile()  # noqa: SIM115 - the snapshot closes it
    except OSError as error:
        raise _no_room(error) from error
    try:
        return _Reader(folder, None if apart is None else apart.resolve(), SensitiveRules(includes), content).read()
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


def check_folder(folder: Path) -> None:
    """Raise ConfigError if a folder is never sent: a home folder, one that contains it, or covey's own folder."""
    advice = "put the program into a folder of its own, change to that folder (cd), and start again"
    if folder == Path(folder.anchor):
        raise ConfigError(f"{folder} is the whole file system, and is not sent to other machines; {advice}")
    for home in _homes():
        if home == folder:
            raise ConfigError(f"{folder} is your home folder, and is not sent to other machines; {advice}")
        if home.is_relative_to(folder):
            raise ConfigError(f"{folder} contains your home folder, and is not sent to other machines; {advice}")
    own = _OwnFolders()
    if any(own.has(each) for each in (folder, *folder.parents)):
        raise ConfigError(f"{folder} is in covey's own folder, which holds keys and is never sent; {advice}")


def _homes() -> list[Path]:
    """Return the home folder of this user, by the environment and by the system."""
    found = list[Path]()
    with contextlib.suppress(RuntimeError, OSError):
        found.append(Path.home().resolve())
    with contextlib.suppress(KeyError, OSError):
        found.append(Path(pwd.getpwuid(os.geteuid()).pw_dir).resolve())
    return found


def _no_room(error: OSError) -> ConfigError:
    where = tempfile.gettempdir() if tempfile.tempdir is not None else "the temporary folder"
    return ConfigError(
        f"the files cannot be copied to {where} before they are sent: {error.strerror}; make room there, or set TMPDIR "
        "to a folder on a larger disk"
    )


class _OwnFolders:
    """Recognises covey's own folders, by whatever path they are reached: this user's, and any with keys of nodes."""

    def __init__(self) -> None:
        self._own = set[tuple[int, int]]()
        candidates = list[Path]()
        with contextlib.suppress(ConfigError):
            candidates.append(home_path())
        candidates += [home / ".config" / "covey" for home in _homes()]
        for path in candidates:
            with contextlib.suppress(OSError):
                status = path.stat()
                self._own.add((status.st_dev, status.st_ino))

    def has(self, folder: Path) -> bool:
        try:
            status = folder.stat()
            if (status.st_dev, status.st_ino) in self._own:
                return True
            return any(_NODE_KEY.fullmatch(name) for name in os.listdir(folder / "identities"))
        except OSError:
            return False


class _Reader:
    """Reads one folder."""

    def __init__(self, folder: Path, apart: Path | None, rules: SensitiveRules, content: IO[bytes]) -> None:
        self._folder, self._apart, self._sensitive, self._content = folder, apart, rules, content
        self._ignored, self._own = _ignore_rules(folder), _OwnFolders()
        self._paths = PathSet()
        self._taken: list[tuple[FileEntry, int]] = []
        self._left_out: list[LeftOut] = []
        self._end = 0

    def read(self) -> Snapshot:
        root = os.open(self._folder, FOLDER_FLAGS)
        try:
            self._walk(root, "", ())
        except UnicodeEncodeError:
            raise ConfigError(f"{self._folder} has a name that is no UTF-8; rename it") from None
        finally:
            os.close(root)
        if unused := self._sensitive.unused:
            raise ConfigError(
                f"--include {unused[0]}: {self._folder} has no file of this name that would be left out as a possible "
                "secret; write its path in the folder, or leave the option out"
            )
        taken = sorted(self._taken, key=lambda each: each[0].path)
        entries, offsets = tuple(entry for entry, _ in taken), tuple(offset for _, offset in taken)
        return Snapshot(self._folder, entries, tuple(self._left_out), self._content, offsets)

    def _walk(self, root: int, below: str, sensitive: tuple[int, ...]) -> None:
        """Take what is below a part of the folder; `sensitive` are the positions of sensitive parts of its path."""
        try:
            with folder_below(root, below.split("/") if below else ()) as folder, os.scandir(folder) as entries:
                found = sorted((each.name, each.is_dir(follow_symlinks=False), each.is_symlink()) for each in entries)
        except FileNotFoundError:
            if not below:
                raise ConfigError(f"there is no folder {self._folder}") from None
            return  # it has just been removed
        except OSError as error:
            raise ConfigError(f"{self._folder / below} cannot be read: {error.strerror}; {_ADVICE}") from error
        for name, is_folder, is_link in found:
            path = f"{below}/{name}" if below else name
            if self._ignored.ignores(path, is_folder=is_folder):
                continue
            if is_folder:
                self._take_folder(root, path, sensitive)
            elif is_link:
                self._take_link(root, path, sensitive)
            else:
                self._take_file(root, path, path, (*sensitive, *self._named(path)))

    def _take_folder(self, root: int, path: str, sensitive: tuple[int, ...]) -> None:
        folder = self._folder / path
        if folder == self._apart:
            return
        if self._own.has(folder):
            self._left_out.append(LeftOut(f"{path}/", OWN_FILE))
            return
        is_sensitive = bool(self._named(path)) or _is_profile(folder)
        at = (*sensitive, path.count("/")) if is_sensitive else sensitive
        if not at or self._sensitive.covers(path, at):
            self._walk(root, path, at)
        else:
            others = len(self._left_out)
            if self._sensitive.may_name_below(path):
                self._walk(root, path, at)
            self._left_out[others:] = [LeftOut(f"{path}/", SECRET)]  # the folder stands for what is in it

    def _take_link(self, root: int, path: str, sensitive: tuple[int, ...]) -> None:
        """Take a link to a file inside as that file; a link to a possible secret counts as one."""
        target = Path(os.path.realpath(self._folder / path))
        if not target.is_relative_to(self._folder):
            self._left_out.append(LeftOut(path, LEADS_OUT))
            return
        if any(self._own.has(each) for each in (target, *target.parents) if each.is_relative_to(self._folder)):
            self._left_out.append(LeftOut(path, OWN_FILE))
            return
        if target.is_dir():
            raise ConfigError(f"{path} is a link to a folder, which is not sent; {_ADVICE}")
        inner = str(target.relative_to(self._folder))
        profiles = [
            depth - 1
            for depth in range(1, len(Path(inner).parts))
            if _is_profile(self._folder.joinpath(*Path(inner).parts[:depth]))
        ]
        there = sorted({*self._sensitive.at(inner), *profiles})
        at = (*sensitive, *self._named(path))
        if there and not self._sensitive.covers(inner, there):
            at = tuple(sorted({*at, path.count("/")}))
        self._take_file(root, path, inner, at)

    def _named(self, path: str) -> tuple[int, ...]:
        """Return the position of the last part of a path if its name is sensitive."""
        last = path.count("/")
        return (last,) if last in self._sensitive.at(path) else ()

    def _take_file(self, root: int, path: str, inner: str, at: tuple[int, ...]) -> None:
        """Copy a file, which is at `inner` if `path` is a link, unless it may be a secret that was not named."""
        if at and not self._sensitive.covers(path, at):
            self._left_out.append(LeftOut(path, SECRET))
            return
        try:
            descriptor = _open_below(root, inner)
        except FileNotFoundError:
            if path == inner:
                return  # it has just been removed
            raise ConfigError(f"{path} is a link to a file that is not there; {_ADVICE}") from None
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}; {_ADVICE}") from error
        with open(descriptor, "rb", buffering=0) as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(f"{path} is neither a file nor a folder; {_ADVICE}")
            self._paths.add(path)
            if len(self._taken) >= SNAPSHOT_FILES_LIMIT:
                raise ConfigError(
                    f"{self._folder} has more than {SNAPSHOT_FILES_LIMIT} files; leave some out with {IGNORE_FILE}"
                )
            size, digest = self._copy(file, path)
        head = os.pread(self._content.fileno(), min(size, HEAD_BYTES), self._end)
        if is_private_key(head) and not self._sensitive.covers(path, (*at, path.count("/"))):
            self._left_out.append(LeftOut(path, SECRET))
            return
        self._taken.append((FileEntry(path, size, digest, bool(status.st_mode & stat.S_IXUSR)), self._end))
        self._end += size

    def _copy(self, file: IO[bytes], path: str) -> tuple[int, bytes]:
        """Copy a file behind the others; return its size and digest.

        Raises:
            ConfigError: it changes again and again, or there is no room for it.
        """
        for _ in range(CHANGED_FILE_READS):
            before, size, digest = _stamp(file), 0, hashlib.sha256()
            file.seek(0)
            while size <= before[1] and (data := _read(file, path)):  # one that grows may have no end
                if self._end + size + len(data) > FOLDER_BYTES:
                    raise ConfigError(
                        f"{self._folder} has more than {FOLDER_BYTES >> 30} GiB ({path} has {before[1] >> 20} MiB); "
                        f"leave files out with {IGNORE_FILE}, "
                        "and read large data from a path that exists on all machines"
                    )
                self._write(data, self._end + size)
                digest.update(data)
                size += len(data)
            if _stamp(file) == before and size == before[1]:
                return size, digest.digest()
        raise ConfigError(f"{path} changes while it is read; stop what writes it, or {_ADVICE}")

    def _write(self, data: bytes, offset: int) -> None:
        try:
            while data:
                written = os.pwrite(self._content.fileno(), data, offset)
                data, offset = data[written:], offset + written
        except OSError as error:
            raise _no_room(error) from error


def _stamp(file: IO[bytes]) -> tuple[int, int]:
    status = os.fstat(file.fileno())
    return status.st_mtime_ns, status.st_size


def _read(file: IO[bytes], path: str) -> bytes:
    try:
        return file.read(_COPY_BYTES)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; {_ADVICE}") from error


def _ignore_rules(folder: Path) -> IgnoreRules:
    try:
        with open(folder / IGNORE_FILE, "rb", opener=_open_plainly) as file:
            return IgnoreRules(file.read(1 << 20).decode().splitlines())
    except FileNotFoundError:
        return IgnoreRules()
    except UnicodeDecodeError:
        raise ConfigError(f"{folder / IGNORE_FILE} is no UTF-8 text; write one pattern a line") from None
    except OSError as error:
        raise ConfigError(f"{folder / IGNORE_FILE} cannot be read: {error.strerror}; make it a file") from error


def _open_plainly(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe without a writer would block


def _is_profile(folder: Path) -> bool:
    """Tell whether a folder is the profile of a browser."""
    return any(os.path.lexists(folder / name) for name in PROFILE_MARKS)


def _open_below(root: int, path: str) -> int:
    """Open a file below an open folder, without following a link anywhere on the way."""
    with folder_below(root, path.split("/")[:-1]) as folder:
        return os.open(path.rpartition("/")[2], _FILE, dir_fd=folder)


@contextlib.contextmanager
def folder_below(
    root: int, parts: Sequence[str], make: Callable[[int, str], None] = lambda _descriptor, _name: None
) -> Iterator[int]:
    """Yield a descriptor of a folder below an open one, without following a link on the way.

    `make` is called for each part first, with the folder above it.
    """
    descriptor = os.dup(root)
    try:
        for part in parts:
            make(descriptor, part)
            inner = os.open(part, FOLDER_FLAGS, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = inner
        yield descriptor
    finally:
        os.close(descriptor)
