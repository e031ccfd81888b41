"""The data sets that this machine has got from others, on disk, and `covey.data`.

Each data set has a folder of its own, with a folder for each version: by the digest of its list, `list` and `files`. A
version that is not complete is named `partial-...`; it is renamed, and `current.json` says which one programs find.
So a program finds a version that is complete and checked, or none.

A program that has asked for a data set holds a shared lock on the version that it got, as long as it lives: a version
that is used is not removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, TypeVar

import msgspec
import numpy as np

from covey.agent.data_folder import OpenFiles
from covey.agent.data_sets import (
    DATA_CHUNK_BYTES,
    DATA_MANIFEST_LIMIT,
    DATA_SETS_LIMIT,
    DataFile,
    DataManifest,
    DataReport,
    check_data_name,
)
from covey.agent.delivery import make_folder, run_folder
from covey.agent.folder import FOLDER_FLAGS, folder_below, open_below
from covey.agent.requests import Number  # noqa: TC001 - msgspec reads the annotations
from covey.base.errors import ConfigError
from covey.base.settings import SETTINGS
from covey.base.text import size_text
from covey.base.version import NewerFormatError, check_format, newer_file
from covey.net.host.descriptors import explain
from covey.net.host.folders import home, home_path, private_folder, read_private, write_private
from covey.net.host.locks import only_one
from covey.net.host.settings_files import effective_environment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from covey.agent.data_sets import ChunkSpot

DATA_FORMAT: Final = 1
SPARE_BYTES: Final = 1 << 30
"""Space on the disk that data sets leave free."""
_PARTIAL: Final = "partial-"
_LIST_FILE, _FILES_FOLDER, _CURRENT, _LOCK, _PUSHED = "list", "files", "current.json", "lock", "pushed.json"
_Record = TypeVar("_Record", bound=msgspec.Struct)
_IN_USE, _NAME_FILE = "in-use", "name"


class _Current(msgspec.Struct, frozen=True, kw_only=True):
    """Which version of a data set programs find."""

    format: int = DATA_FORMAT
    name: Annotated[str, msgspec.Meta(max_length=100)]
    digest: str
    files: Number
    size: Number
    manifest_size: Number
    came_from: Annotated[str, msgspec.Meta(max_length=200)]
    at: float


class PushedData(msgspec.Struct, frozen=True, kw_only=True):
    """A folder or file of this machine that was pushed."""

    format: int = DATA_FORMAT
    name: Annotated[str, msgspec.Meta(max_length=100)]
    path: str
    digest: str
    files: Number
    size: Number
    at: float


def data_folder(env: Mapping[str, str] | None = None) -> Path:
    """Return the folder of data sets on this machine, which need not exist."""
    env = effective_environment() if env is None else env
    chosen = env.get("COVEY_DATA_FOLDER")
    return Path(chosen).absolute() if chosen else home_path() / "data"


def data(name: str) -> Path:
    """Return the path of a data set on this machine: of the folder, or of the file, that was pushed under this name.

    On the machine that has pushed it, that is the folder or file itself. A version that a program has got from here
    stays as it is until the program ends, also if another one is pushed meanwhile.

    Raises:
        ConfigError: it is not here; the text says what to type, and where.
    """
    check_data_name(name)
    folder = run_folder(data_folder(), name)
    pushed, current = _pushed(name), _current(folder)
    if pushed is not None and (current is None or pushed.at >= current.at):
        path = Path(pushed.path)
        if path.exists():
            return path
        if current is None:
            raise ConfigError(f"the data set {name!r} was pushed from {path}, and is not there any more; push it again")
    while current is not None:
        version = folder / current.digest
        if _use(version):
            manifest = _read_list(version, current.digest)
            return version / _FILES_FOLDER / manifest.files[0].path if manifest.is_file else version / _FILES_FOLDER
        current = _current(folder)  # another version was published, or it was removed
    here = os.uname().nodename
    there = ", ".join(each.name for each in DataStore().reports() if each.is_complete)
    partly = " completely" if any(folder.glob(f"{_PARTIAL}*")) else ""
    raise ConfigError(
        f"the data set {name!r} is not{partly} on this machine ({here}{f'; there are {there}' if there else ''}); on a "
        f"machine that has it, type: covey push PATH --name {name} --to {here}"
    )


def remember_pushed(name: str, path: Path, manifest: DataManifest) -> None:
    """Note that a folder or file of this machine was pushed, so that programs here find it."""
    record = PushedData(
        name=name,
        path=str(path),
        digest=manifest.digest.hex(),
        files=len(manifest.files),
        size=manifest.size,
        at=time.time(),
    )
    write_private(_pushed_folder(name) / _PUSHED, msgspec.json.encode(record))


def digests_file(name: str) -> Path:
    """Return where the digests of files that are pushed under a name are remembered."""
    return _pushed_folder(name) / "digests"


def pushed_here() -> list[PushedData]:
    """Return what this machine has pushed, sorted by name."""
    found = (_read(path, PushedData) for path in sorted((home_path() / "pushed").glob(f"*/{_PUSHED}")))
    return sorted((each for each in found if each is not None), key=lambda each: each.name)


def forget_pushed(name: str) -> bool:
    """Forget that a data set was pushed from here; its files stay. Return whether it was known."""
    folder = run_folder(home_path() / "pushed", name)
    is_known = (folder / _PUSHED).exists()
    shutil.rmtree(folder, ignore_errors=True)
    return is_known


def _pushed_folder(name: str) -> Path:
    return private_folder(run_folder(private_folder(home() / "pushed"), name))


def _pushed(name: str) -> PushedData | None:
    return _read(run_folder(home_path() / "pushed", name) / _PUSHED, PushedData)


def _current(folder: Path) -> _Current | None:
    found = _read(folder / _CURRENT, _Current)
    return found if found is not None and _is_hex(found.digest) else None


def _is_hex(text: str) -> bool:
    return len(text) == 64 and all(letter in "0123456789abcdef" for letter in text)


def _read(path: Path, kind: type[_Record]) -> _Record | None:
    """Return a record; None if there is none, or it cannot be read; ConfigError if a later release has written it."""
    try:
        data = read_private(path)
        check_format(msgspec.json.decode(data, type=_Versioned).format, DATA_FORMAT)
        return msgspec.json.decode(data, type=kind)
    except NewerFormatError as error:
        raise newer_file(path, error) from None
    except (FileNotFoundError, NotADirectoryError, msgspec.DecodeError):
        return None


class _Versioned(msgspec.Struct):
    format: int = 0


_used: Final[dict[str, int]] = {}
"""Versions that this process uses, with the descriptors that hold their locks: until it ends."""


def _use(version: Path) -> bool:
    """Keep a version from being removed while this process lives; False if it has gone already."""
    if str(version) in _used:
        return True
    try:
        descriptor = os.open(version / _IN_USE, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise ConfigError(f"cannot use the data set in {version}: {explain(error)}") from error
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    if not (version / _IN_USE).exists():
        os.close(descriptor)
        return False
    _used[str(version)] = descriptor
    return True


def _is_used(version: Path) -> bool:
    """Tell whether a process holds the lock of a version."""
    try:
        descriptor = os.open(version / _IN_USE, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _read_list(version: Path, digest: str) -> DataManifest:
    try:
        return DataManifest.decode(read_private(version / _LIST_FILE, most=DATA_MANIFEST_LIMIT), bytes.fromhex(digest))
    except FileNotFoundError:
        raise ConfigError(f"the data set in {version} has no list of files; remove it with `covey data`") from None


class StoredData:
    """A version that is complete, or is being filled. Any thread may call any method."""

    def __init__(self, folder: Path, manifest: DataManifest) -> None:
        self.folder, self.manifest = folder, manifest
        self.there = np.ones(manifest.chunks, bool)
        """By chunk, whether it is here and was checked."""
        self._sizes = _chunk_sizes(manifest)
        self._lock = threading.Lock()
        self.root = os.open(folder / _FILES_FOLDER, FOLDER_FLAGS)
        """A descriptor of the folder with its files."""
        self._files = OpenFiles(lambda number: open_below(self.root, manifest.files[number].path))

    @property
    def bytes_there(self) -> int:
        """How many bytes are here, and were checked."""
        return int(self._sizes[self.there].sum())

    def has(self) -> list[bool] | None:
        """Return which chunks are here: None for all."""
        return None if self.there.all() else self.there.tolist()

    def read(self, chunk: int, offset: int, size: int) -> bytes:
        """Return bytes of a chunk that is here; ConfigError if it is not, or cannot be read."""
        if not self.there[chunk]:
            raise ConfigError("this chunk is not here yet")
        spot = self.manifest.spot(chunk)
        return self._files.read(spot.file, spot.offset + offset, min(size, spot.size - offset))

    def close(self) -> None:
        """Close all files."""
        self._files.close()
        os.close(self.root)


class PartialData(StoredData):
    """A version that is being filled."""

    def __init__(self, folder: Path, manifest: DataManifest) -> None:
        """Make the folder, or take what an earlier try has left there: `check` says what of it is right.

        Raises:
            ConfigError: the folder cannot be made.
        """
        private_folder(private_folder(folder) / _FILES_FOLDER)
        write_private(folder / _LIST_FILE, manifest.encoded)
        super().__init__(folder, manifest)
        self.there[:] = False

    def check(self, stop: Callable[[], bool], earlier: list[StoredData]) -> None:
        """Find out which chunks are here: from an earlier try, or in earlier versions.

        A file that an earlier version has is the same file on the disk; chunks of other files are copied.

        Raises:
            ConfigError: a file cannot be written.
        """
        files: dict[DataFile, tuple[StoredData, int]] = {}
        chunks: dict[bytes, tuple[StoredData, int]] = {}
        for stored in earlier:
            files.update((_content(file), (stored, at)) for at, file in enumerate(stored.manifest.files) if file.size)
            chunks.update((digest, (stored, chunk)) for chunk, digest in stored.manifest.digests())
        for number, file in enumerate(self.manifest.files):
            is_whole = self._is_whole(number) or self._link(number, files.get(_content(file)))
            for chunk in self.manifest.chunks_of(number):
                if stop():
                    return
                spot = self.manifest.spot(chunk)
                data = self._files.read(number, spot.offset, spot.size) if is_whole else b""
                if len(data) == spot.size and hashlib.sha256(data).digest() == spot.digest:
                    self.there[chunk] = True
                elif spot.digest in chunks:
                    stored, at = chunks[spot.digest]
                    with contextlib.suppress(ConfigError):  # it cannot be read there: then it is sent
                        data = stored.read(at, 0, spot.size)
                    self.put(chunk, data)
            if not is_whole and not file.size:
                self._write(number, 0, b"")

    def _is_whole(self, number: int) -> bool:
        """Tell whether a file is here with its whole length."""
        file = self.manifest.files[number]
        try:
            descriptor = open_below(self.root, file.path)
        except OSError:
            return False
        try:
            return os.fstat(descriptor).st_size == file.size
        finally:
            os.close(descriptor)

    def _link(self, number: int, found: tuple[StoredData, int] | None) -> bool:
        """Take a whole file of an earlier version, once it was read and is right; return whether it was."""
        if found is None:
            return False
        stored, at = found
        for chunk in stored.manifest.chunks_of(at):
            spot = stored.manifest.spot(chunk)
            with contextlib.suppress(ConfigError):
                if hashlib.sha256(stored.read(chunk, 0, spot.size)).digest() == spot.digest:
                    continue
            return False
        there, here = (each.split("/") for each in (stored.manifest.files[at].path, self.manifest.files[number].path))
        try:
            with (
                folder_below(stored.root, there[:-1]) as source,
                folder_below(self.root, here[:-1], make_folder) as target,
            ):
                os.link(there[-1], here[-1], src_dir_fd=source, dst_dir_fd=target, follow_symlinks=False)
        except OSError:
            return False  # a file system without links: its chunks are copied
        return True

    def put(self, chunk: int, data: bytes) -> bool:
        """Take a chunk; return False, and take nothing, if it is not what was announced.

        Raises:
            ConfigError: it cannot be written.
        """
        spot: ChunkSpot = self.manifest.spot(chunk)
        if len(data) != spot.size or hashlib.sha256(data).digest() != spot.digest:
            return False
        self._write(spot.file, spot.offset, data)
        self.there[chunk] = True
        return True

    def finish(self) -> None:
        """Make all files of this version durable, and read-only."""
        assert self.there.all()
        for file in self.manifest.files:
            parts = file.path.split("/")
            with folder_below(self.root, parts[:-1]) as folder:
                os.chmod(parts[-1], 0o500 if file.is_executable else 0o400, dir_fd=folder)
        os.sync()

    def _write(self, number: int, offset: int, data: bytes) -> None:
        file = self.manifest.files[number]
        parts = file.path.split("/")
        try:
            with self._lock, folder_below(self.root, parts[:-1], make_folder) as folder:
                flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                descriptor = os.open(parts[-1], flags, 0o600, dir_fd=folder)
            try:
                if os.fstat(descriptor).st_size != file.size:
                    os.ftruncate(descriptor, file.size)
                view = memoryview(data)
                while view:
                    written = os.pwrite(descriptor, view, offset)
                    view, offset = view[written:], offset + written
            finally:
                os.close(descriptor)
        except OSError as error:
            raise ConfigError(
                f"the data set cannot be written to {self.folder}: {explain(error)}. What has come stays for the next "
                "try; `covey data --remove NAME` frees space"
            ) from error


class DataStore:
    """All data sets that this machine has got. Any thread, and any process, may call any method."""

    def __init__(self) -> None:
        self._folder = data_folder()

    # What is here

    def reports(self) -> list[DataReport]:
        """Return what is here, sorted by name: complete versions first, then those that are not."""
        found = []
        for folder in self._data_sets():
            current = _current(folder)
            if current is not None:
                version = folder / current.digest
                found.append(
                    DataReport(
                        current.name, bytes.fromhex(current.digest), current.files, current.size, current.size,
                        current.manifest_size, current.came_from, current.at, str(version / _FILES_FOLDER),
                        is_used=_is_used(version),
                    )
                )  # fmt: skip
            found += [each for version in folder.glob(f"{_PARTIAL}*") if (each := self._partial(folder, version))]
        return sorted(found, key=lambda each: (each.name, not each.is_complete))

    def find(self, digest: bytes) -> StoredData | None:
        """Return a complete version, to be closed by the caller; None if it is not here."""
        for folder in self._data_sets():
            if (folder / digest.hex() / _LIST_FILE).exists():
                version = folder / digest.hex()
                return StoredData(version, _read_list(version, digest.hex()))
        return None

    def has(self, name: str, digest: bytes) -> bool:
        """Tell whether programs find this version under this name."""
        current = _current(run_folder(self._folder, name))
        return current is not None and current.digest == digest.hex() and (
            run_folder(self._folder, name) / current.digest / _LIST_FILE
        ).exists()  # fmt: skip

    def _data_sets(self) -> Iterator[Path]:
        with contextlib.suppress(FileNotFoundError):
            for each in sorted(self._folder.iterdir()):
                if each.is_dir() and not each.is_symlink():
                    yield each

    def _partial(self, folder: Path, version: Path) -> DataReport | None:
        try:
            name = (version / _NAME_FILE).read_text()
            manifest = _read_list(version, version.name.removeprefix(_PARTIAL))
        except (OSError, ConfigError, ValueError):
            return None
        there = min(manifest.size, _disk_bytes(version))
        return DataReport(
            name, manifest.digest, len(manifest.files), manifest.size, there, len(manifest.encoded), "", 0.0,
            str(version), is_complete=False,
        )  # fmt: skip

    # Changes

    def begin(self, name: str, manifest: DataManifest, limit: int) -> tuple[PartialData, list[StoredData]]:
        """Make room for a version; return it, and the earlier ones whose chunks may be the same. Close all of them.

        Raises:
            ConfigError: there is no room; says what is full, and how to free it.
        """
        folder = private_folder(run_folder(private_folder(self._folder), name))
        version = folder / f"{_PARTIAL}{manifest.digest.hex()}"
        earlier = self._earlier(folder, version)
        try:
            with self._only_one():
                known = {_content(file) for stored in earlier for file in stored.manifest.files}
                shared = sum(file.size for file in manifest.files if _content(file) in known)
                self._check_room(name, manifest, limit, _disk_bytes(version) + shared)
                partial = PartialData(version, manifest)
                (version / _NAME_FILE).write_text(name)
        except BaseException:
            for each in earlier:
                each.close()
            raise
        return partial, earlier

    def publish(self, name: str, partial: PartialData, came_from: str) -> None:
        """Let programs find a version that is complete, and remove earlier ones that no program uses."""
        partial.finish()
        manifest, folder = partial.manifest, partial.folder.parent
        digest = manifest.digest.hex()
        with self._only_one():
            _touch(partial.folder / _IN_USE)
            if (folder / digest / _IN_USE).exists():  # it was the current one before, and a program may use it
                self._drop(partial.folder)
            else:
                os.rename(partial.folder, folder / digest)
            self._point(folder, name, manifest, came_from)
            self._tidy(folder, digest)

    def remove(self, name: str) -> int:
        """Remove all versions of a data set; return how many bytes that frees.

        Raises:
            ConfigError: it is not here, or a program uses it.
        """
        folder = run_folder(self._folder, check_data_name(name))
        if not folder.exists():
            raise ConfigError(f"there is no data set {name!r} here; `covey data` lists them")
        with self._only_one():
            versions = [each for each in folder.iterdir() if each.is_dir()]
            if any(_is_used(each) for each in versions):
                raise ConfigError(
                    f"a program uses the data set {name!r} here; end it first (`covey ps` lists programs)"
                )
            freed = sum(map(_disk_bytes, versions))
            with contextlib.suppress(FileNotFoundError):
                (folder / _CURRENT).unlink()
            for each in versions:
                self._drop(each)
            shutil.rmtree(folder, ignore_errors=True)
        return freed

    def _only_one(self) -> contextlib.AbstractContextManager[None]:
        return only_one(private_folder(self._folder) / _LOCK, setting="COVEY_DATA_FOLDER")

    def _point(self, folder: Path, name: str, manifest: DataManifest, came_from: str) -> None:
        current = _Current(
            name=name, digest=manifest.digest.hex(), files=len(manifest.files), size=manifest.size,
            manifest_size=len(manifest.encoded), came_from=came_from, at=time.time(),
        )  # fmt: skip
        write_private(folder / _CURRENT, msgspec.json.encode(current))

    def _tidy(self, folder: Path, digest: str) -> None:
        """Remove versions other than the current one that no program uses."""
        for each in folder.iterdir():
            if each.is_dir() and each.name != digest and not _is_used(each):
                self._drop(each)

    def _drop(self, version: Path) -> None:
        """Remove a version. First the mark by which programs take hold of it: they find it whole, or not at all."""
        with contextlib.suppress(FileNotFoundError):
            (version / _IN_USE).unlink()
        shutil.rmtree(version, ignore_errors=True)

    def _earlier(self, folder: Path, version: Path) -> list[StoredData]:
        found = []
        for each in folder.iterdir():
            if each.is_dir() and each != version:
                with contextlib.suppress(ConfigError, OSError, ValueError):
                    digest = each.name.removeprefix(_PARTIAL)
                    found.append(StoredData(each, _read_list(each, digest)))
        return found

    def _check_room(self, name: str, manifest: DataManifest, limit: int, already: int) -> None:
        taken = {folder: _disk_bytes(folder) for folder in self._data_sets()}
        needed = max(0, manifest.size - already)
        if len(taken) > DATA_SETS_LIMIT:
            raise ConfigError(f"there are {len(taken)} data sets here already; `covey data --remove NAME` removes one")
        names = {run_folder(self._folder, each.name): each.name for each in self.reports()}
        others = sorted(((size, names.get(folder, "")) for folder, size in taken.items()), reverse=True)
        largest = ", ".join(f"{each} ({size_text(size)})" for size, each in others[:5] if each and each != name)
        free = f"; `covey data --remove NAME` frees space{f': there are {largest}' if largest else ''}"
        if sum(taken.values()) + needed > limit:
            raise ConfigError(
                f"no room for the data set {name!r} ({size_text(manifest.size)}): data sets take "
                f"{size_text(sum(taken.values()))} of the {size_text(limit)} that they may take here{free}, and "
                "COVEY_DATA_TOTAL (data_total in covey.toml) there sets the limit"
            )
        there = os.statvfs(self._folder)
        left = there.f_bavail * there.f_frsize
        if left < needed + min(SPARE_BYTES, there.f_blocks * there.f_frsize // 20):
            raise ConfigError(
                f"no room for the data set {name!r}: it needs {size_text(needed)}, and the disk of {self._folder} has "
                f"{size_text(left)} free{free}, and COVEY_DATA_FOLDER there names a folder on another disk"
            )


def data_limit() -> int:
    """Return how much data sets may take on this machine, by its settings; ConfigError if that is malformed."""
    env, row = effective_environment(), SETTINGS["data_total"]
    found: int = row.kind.read(row.variable, env[row.variable]) if row.variable in env else row.default
    return found


def _content(file: DataFile) -> DataFile:
    """Return what two files have in common that are one file on the disk: everything but their paths."""
    return DataFile("-", file.size, file.chunks, file.is_executable)


def _disk_bytes(folder: Path) -> int:
    """Return how many bytes the files below a folder take on the disk: holes take none, and a file counts once."""
    total, seen = 0, set[int]()
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                status = os.lstat(os.path.join(place, name))
                if status.st_nlink == 1 or status.st_ino not in seen:
                    total += status.st_blocks * 512
                    seen.add(status.st_ino)
    return total


def _chunk_sizes(manifest: DataManifest) -> np.ndarray:
    sizes = np.full(manifest.chunks, DATA_CHUNK_BYTES, np.int64)
    for number, file in enumerate(manifest.files):
        if file.size % DATA_CHUNK_BYTES:
            sizes[manifest.chunks_of(number)[-1]] = file.size % DATA_CHUNK_BYTES
    return sizes


def _touch(path: Path) -> None:
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
