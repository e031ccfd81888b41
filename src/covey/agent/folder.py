"""What of a folder may leave this machine: one rule for programs (`snapshot`) and for data sets (`data_folder`).

Never: covey's own folder, a home folder, and what a link outside of the folder leads to. Only if a person names it:
what may hold secrets (`agent.ignore`).
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import stat
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final, NamedTuple

from covey.agent.ignore import HEAD_BYTES, IGNORE_FILE, PROFILE_MARKS, IgnoreRules, SensitiveRules, is_private_key
from covey.agent.requests import FileEntry, PathSet
from covey.base.errors import ConfigError
from covey.base.text import printable
from covey.net.host.folders import home_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

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
IGNORE_ADVICE: Final = f"leave it out with a line in {IGNORE_FILE}"
FILE_READ_BYTES: Final = 1 << 20
_NODE_KEY: Final = re.compile(r"\d+\.key")
FOLDER_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class LeftOut(NamedTuple):
    """A file or folder that is not sent, although no `.coveyignore` names it."""

    path: str
    why: str
    """SECRET, LEADS_OUT or OWN_FILE."""


def lines_about(left_out: Sequence[LeftOut]) -> Iterator[str]:
    """Yield what to tell a person about files that are not sent."""
    for why, sentence in _SENTENCES.items():
        paths = [printable(each.path, 200) for each in left_out if each.why == why]
        for path in paths[:NAMED]:
            yield f"left out: {path} {sentence}"
        if len(paths) > NAMED:
            yield f"left out: {len(paths) - NAMED} more, for the same reason"


class ReadFile(NamedTuple):
    """What was read of one file."""

    size: int
    digest: bytes
    """The SHA-256 of its content."""
    head: bytes
    """How it begins: whether it is a private key."""


PROGRAM_ADVICE: Final = "put the program into a folder of its own, change to that folder (cd), and start again"
DATA_ADVICE: Final = "put the data into a folder of its own, and push that"


def check_folder(folder: Path, advice: str = PROGRAM_ADVICE) -> None:
    """Raise ConfigError if a folder is never sent: a home folder, one that contains it, or covey's own folder."""
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


def check_named(path: Path) -> None:
    """Raise ConfigError if a file or folder, of which a person gave the path, may hold secrets or is covey's own."""
    own = _OwnFolders()
    if any(own.has(each) for each in (path, *path.parents)):
        raise ConfigError(f"{path} is in covey's own folder, which holds keys and is never sent; {DATA_ADVICE}")
    if at := SensitiveRules().at(str(path)):
        part = str(path).split("/")[at[0]]
        raise ConfigError(
            f"{path} may hold secrets ({part!r} is the name of what usually does), and is not sent; put a copy without "
            "secrets under another name, and push that"
        )


class FolderReader:
    """Reads one folder. A subclass says what becomes of the content of its files."""

    advice = PROGRAM_ADVICE
    """What to do about a folder that is never sent."""

    def __init__(
        self, folder: Path, apart: Path | None = None, includes: Sequence[str] = (), *, files_limit: int
    ) -> None:
        """Files below the folder `apart` are left out. `includes` are patterns of possible secrets that are taken.

        Raises:
            ConfigError: the folder is one that is never sent (`check_folder`), or a pattern cannot be read.
        """
        self._folder, self._apart = folder.resolve(), None if apart is None else apart.resolve()
        check_folder(self._folder, self.advice)
        self._sensitive, self._files_limit = SensitiveRules(includes), files_limit
        self._ignored, self._own = _ignore_rules(self._folder), _OwnFolders()
        self._paths, self._count = PathSet(), 0
        self.left_out: list[LeftOut] = []

    def _read_file(self, file: IO[bytes], path: str) -> ReadFile:
        """Read a file."""
        raise NotImplementedError

    def _keep(self, entry: FileEntry) -> None:
        """Note that the file that was read last is taken."""
        raise NotImplementedError

    def walk(self) -> None:
        """Take all files that may be sent.

        Raises:
            ConfigError: there are too many, a special file, a path that cannot be sent, or an unused pattern.
        """
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
            raise ConfigError(f"{self._folder / below} cannot be read: {error.strerror}; {IGNORE_ADVICE}") from error
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
            self.left_out.append(LeftOut(f"{path}/", OWN_FILE))
            return
        is_sensitive = bool(self._named(path)) or _is_profile(folder)
        at = (*sensitive, path.count("/")) if is_sensitive else sensitive
        if not at or self._sensitive.covers(path, at):
            self._walk(root, path, at)
        else:
            others = len(self.left_out)
            if self._sensitive.may_name_below(path):
                self._walk(root, path, at)
            self.left_out[others:] = [LeftOut(f"{path}/", SECRET)]  # the folder stands for what is in it

    def _take_link(self, root: int, path: str, sensitive: tuple[int, ...]) -> None:
        """Take a link to a file inside as that file; a link to a possible secret counts as one."""
        target = Path(os.path.realpath(self._folder / path))
        if not target.is_relative_to(self._folder):
            self.left_out.append(LeftOut(path, LEADS_OUT))
            return
        if any(self._own.has(each) for each in (target, *target.parents) if each.is_relative_to(self._folder)):
            self.left_out.append(LeftOut(path, OWN_FILE))
            return
        if target.is_dir():
            raise ConfigError(f"{path} is a link to a folder, which is not sent; {IGNORE_ADVICE}")
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
            self.left_out.append(LeftOut(path, SECRET))
            return
        try:
            descriptor = open_below(root, inner)
        except FileNotFoundError:
            if path == inner:
                return  # it has just been removed
            raise ConfigError(f"{path} is a link to a file that is not there; {IGNORE_ADVICE}") from None
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}; {IGNORE_ADVICE}") from error
        with open(descriptor, "rb", buffering=0) as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(f"{path} is neither a file nor a folder; {IGNORE_ADVICE}")
            self._paths.add(path)
            if self._count >= self._files_limit:
                raise ConfigError(
                    f"{self._folder} has more than {self._files_limit} files; leave some out with {IGNORE_FILE}"
                )
            read = self._read_file(file, path)
        if is_private_key(read.head[:HEAD_BYTES]) and not self._sensitive.covers(path, (*at, path.count("/"))):
            self.left_out.append(LeftOut(path, SECRET))
            return
        self._count += 1
        self._keep(FileEntry(path, read.size, read.digest, bool(status.st_mode & stat.S_IXUSR)))


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


def open_below(root: int, path: str) -> int:
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


def stamp(file: IO[bytes]) -> tuple[int, int]:
    """Return what changes when a file is written: its time and its size."""
    status = os.fstat(file.fileno())
    return status.st_mtime_ns, status.st_size


def read_some(file: IO[bytes], path: str) -> bytes:
    """Return the next bytes of a file, b"" at its end; ConfigError if it cannot be read."""
    try:
        return file.read(FILE_READ_BYTES)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; {IGNORE_ADVICE}") from error
