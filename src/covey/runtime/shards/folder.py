"""The folder in which a machine keeps its part of checkpoints. Whatever ends a process, earlier checkpoints stay whole.

    FOLDER/place                          sixteen random bytes, which name the folder
    FOLDER/lock                           held while a group saves into the folder
    FOLDER/step-0000000200.ID/            ID: sixteen hexadecimal digits
        manifest                          one line of JSON with format and digest, then `wire.shards.SavedCheckpoint`
        shard-00002-of-00004.safetensors  of this machine and of its neighbours

The manifest comes last, under another name first, when the shards of all machines are on disk. What is deleted gets a
name that starts with a dot before that.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from covey.base.errors import CheckpointError, ConfigError, RemoteProtocolError
from covey.base.version import NewerFormatError, check_format, newer_file
from covey.net.host import folders
from covey.net.host.descriptors import explain
from covey.wire.shards import (
    CHUNK_DIGEST_BYTES,
    SHARD_CHUNK_BYTES,
    SHARD_MANIFEST_LIMIT,
    TOLD_CHECKPOINTS_LIMIT,
    CheckpointPart,
    SavedCheckpoint,
    decode_saved_checkpoint,
    encode_saved_checkpoint,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    Buffer = bytes | bytearray | memoryview

SHARDS_FORMAT: Final = 1
"""The format of manifests, and of all that belongs to them."""
MANIFEST_FILE, IDENTITY = "manifest", "place"
CHECKPOINTS_FOLDER: Final = "checkpoints"
"""The folder below that of covey itself with those of runs."""
_CHECKPOINT_NAME: Final = re.compile(r"step-(\d{10,19})\.([0-9a-f]{16})")
_SHARD: Final = re.compile(r"shard-(\d{5})-of-(\d{5})\.safetensors")
_FOLDER_LINE_LIMIT: Final = 1000
IDENTITY_BYTES: Final = 16


def digest_of(data: Any) -> bytes:
    """Return the digest of a chunk or a manifest."""
    return hashlib.blake2b(data, digest_size=CHUNK_DIGEST_BYTES).digest()


def folders_of_runs() -> list[Path]:
    """Return the folders of all runs of this machine that have checkpoints, by name."""
    base = folders.existing() / CHECKPOINTS_FOLDER
    return sorted(path for path in base.iterdir() if (path / IDENTITY).is_file()) if base.is_dir() else []


def default_folder(name: str, identity: str) -> Path:
    """Return the folder of a run below covey's own; `identity` tells runs of one name apart."""
    plain = re.sub(r"[^A-Za-z0-9_-]+", "_", name).strip("_")[:60] or "run"
    key = hashlib.blake2b(identity.encode(), digest_size=4).hexdigest()
    return folders.home_path() / CHECKPOINTS_FOLDER / f"{plain}-{key}"


def encode_manifest(saved: SavedCheckpoint) -> bytes:
    """Return the content of a manifest file."""
    body = encode_saved_checkpoint(saved)
    line = json.dumps({"format": SHARDS_FORMAT, "blake2b": digest_of(body).hex()})
    return line.encode() + b"\n" + body


def decode_manifest(data: bytes, where: object) -> SavedCheckpoint:
    """Return the checkpoint of a manifest file.

    Raises:
        ConfigError: a later release has written it.
        CheckpointError: it is damaged.
    """
    try:
        line, _, body = data.partition(b"\n")
        if len(line) > _FOLDER_LINE_LIMIT:
            raise ValueError("no first line")
        head = json.loads(line)
        check_format(int(head["format"]), SHARDS_FORMAT)
        if head["blake2b"] != digest_of(body).hex():
            raise ValueError("its digest differs")
        return decode_saved_checkpoint(body)
    except NewerFormatError as error:
        raise newer_file(where, error) from None
    except (ValueError, KeyError, TypeError, RecursionError, RemoteProtocolError) as error:
        raise CheckpointError(f"{where} is damaged: {error}", files=(str(where),)) from error


class SavedPart(NamedTuple):
    """What this machine has of a checkpoint, as it is listed."""

    name: str
    part: CheckpointPart
    saved: SavedCheckpoint | None
    """None without a manifest."""


def shard_name(index: int, count: int) -> str:
    """Return the name of the file of a shard."""
    return f"shard-{index:05}-of-{count:05}.safetensors"


def checkpoint_name(step: int, save_id: str) -> str:
    """Return the name of the folder of a checkpoint."""
    return f"step-{step:010}.{save_id}"


def sync_folder(path: Path) -> None:
    """Sync the names in a folder to disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _create(path: Path, *, exclusive: bool = True) -> int:
    flags = os.O_EXCL if exclusive else os.O_TRUNC
    return os.open(path, os.O_WRONLY | os.O_CREAT | flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _write_all(descriptor: int, data: Buffer) -> None:
    view = memoryview(data).cast("B")
    while view:
        view = view[os.write(descriptor, view) :]


def _write_file(path: Path, data: bytes) -> None:
    """Write a file and sync it, under another name first: it is there whole or not at all."""
    hidden = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = _create(hidden)
    try:
        try:
            _write_all(descriptor, data)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.rename(hidden, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(hidden)
        raise
    sync_folder(path.parent)


def _read_file(path: Path, most: int) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{path} is no file")
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(f"{path} is longer than {most} bytes")
    return data


class ShardWriter:
    """Writes the file of one shard, chunk after chunk. After an error it takes chunks and writes nothing."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.problem = ""
        """Why the file could not be written; empty as long as it could."""
        self._descriptor = -1
        with self._noting():
            self._descriptor = _create(path, exclusive=False)

    @contextlib.contextmanager
    def _noting(self) -> Any:
        try:
            yield
        except OSError as error:
            self.problem = self.problem or f"{self._path}: {explain(error)}"

    def write(self, data: Buffer) -> None:
        """Write the next chunk."""
        if not self.problem:
            with self._noting():
                _write_all(self._descriptor, data)

    def finish(self) -> None:
        """Sync the file to disk, and close it."""
        if not self.problem:
            with self._noting():
                os.fsync(self._descriptor)
        self.close()

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            with self._noting():
                os.close(descriptor)


class ShardFolder:
    """A folder with parts of checkpoints. One rank of those that share it deletes and writes manifests."""

    def __init__(self, path: Path) -> None:
        """Take a folder that exists; `open_folder` makes one."""
        self.path = path

    @property
    def identity(self) -> bytes:
        """What names the folder; made by the first that asks."""
        path = self.path / IDENTITY
        with contextlib.suppress(FileNotFoundError):
            return self._read_identity(path)
        hidden = self.path / f".{IDENTITY}.{secrets.token_hex(4)}"
        descriptor = _create(hidden)
        try:
            _write_all(descriptor, secrets.token_bytes(IDENTITY_BYTES))
            os.fsync(descriptor)
            with contextlib.suppress(FileExistsError):  # another rank was first
                os.link(hidden, path)
        finally:
            os.close(descriptor)
            os.unlink(hidden)
        sync_folder(self.path)
        return self._read_identity(path)

    def _read_identity(self, path: Path) -> bytes:
        """Return the name. A copy of the folder has another one, because the file has another number there."""
        data = _read_file(path, IDENTITY_BYTES)
        if len(data) != IDENTITY_BYTES:
            raise ConfigError(f"{path} is damaged; move the folder {self.path} away, or choose another with folder=")
        return hashlib.blake2b(data + b"%d" % os.stat(path).st_ino, digest_size=IDENTITY_BYTES).digest()

    def begin(self, step: int, save_id: str) -> None:
        """Make the folder of a checkpoint; another rank may have made it."""
        with contextlib.suppress(FileExistsError):
            os.mkdir(self.path / checkpoint_name(step, save_id), 0o700)
        sync_folder(self.path)

    def writer(self, step: int, save_id: str, index: int, count: int) -> ShardWriter:
        """Return what writes a shard of a checkpoint."""
        return ShardWriter(self.shard_path(step, save_id, shard_name(index, count)))

    def shard_path(self, step: int, save_id: str, name: str) -> Path:
        """Return where the file of a shard is."""
        return self.path / checkpoint_name(step, save_id) / name

    def sync(self, step: int, save_id: str) -> None:
        """Sync the names of shards to disk."""
        sync_folder(self.path / checkpoint_name(step, save_id))

    def commit(self, saved: SavedCheckpoint) -> None:
        """Write the manifest: from now on the checkpoint is complete, if all machines have their shards."""
        _write_file(self.path / checkpoint_name(saved.step, saved.id) / MANIFEST_FILE, encode_manifest(saved))

    def manifest(self, step: int, save_id: str) -> bytes:
        """Return the content of a manifest file."""
        return _read_file(self.path / checkpoint_name(step, save_id) / MANIFEST_FILE, SHARD_MANIFEST_LIMIT)

    def read_chunk(self, step: int, save_id: str, shard: tuple[int, int], chunk: int, size: int) -> bytes:
        """Return a chunk of a shard (its number, of how many); fewer bytes than `size` if the file is too short."""
        path = self.shard_path(step, save_id, shard_name(*shard))
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            parts, at, left = [], chunk * SHARD_CHUNK_BYTES, size
            while left and (part := os.pread(descriptor, left, at)):
                parts.append(part)
                at, left = at + len(part), left - len(part)
            return b"".join(parts) if len(parts) != 1 else parts[0]
        finally:
            os.close(descriptor)

    def parts(self) -> list[SavedPart]:
        """Return what is here of each checkpoint, the newest last. A damaged manifest counts as none.

        Raises:
            ConfigError: a later release has written one of the manifests.
        """
        found = []
        for name in sorted(os.listdir(self.path)):
            if (match := _CHECKPOINT_NAME.fullmatch(name)) and (self.path / name).is_dir():
                found.append(self._part(name, int(match[1]), match[2]))
        found.sort(key=lambda each: (each.part.serial, each.part.step, each.part.id))
        return found[-TOLD_CHECKPOINTS_LIMIT:]

    def _part(self, name: str, step: int, save_id: str) -> SavedPart:
        folder = self.path / name
        saved, digest = None, b""
        with contextlib.suppress(OSError, CheckpointError):
            data = _read_file(folder / MANIFEST_FILE, SHARD_MANIFEST_LIMIT)
            read = decode_manifest(data, folder / MANIFEST_FILE)
            if (read.id, read.step) == (save_id, step):
                saved, digest = read, digest_of(data)
        files = []
        with contextlib.suppress(OSError):
            for each in sorted(os.listdir(folder)):
                if match := _SHARD.fullmatch(each):
                    status = os.stat(folder / each, follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode):
                        files.append((int(match[1]), status.st_size))
        sizes = () if saved is None else tuple(shard.nbytes for shard in saved.shards)
        serial = 0 if saved is None else saved.serial
        return SavedPart(name, CheckpointPart(save_id, step, serial, digest, sizes, tuple(files)), saved)

    def delete(self, save_ids: Sequence[str]) -> None:
        """Delete what is here of checkpoints, and the rest of earlier deletions."""
        for name in os.listdir(self.path):
            match = _CHECKPOINT_NAME.fullmatch(name)
            if match and match[2] in save_ids:
                os.rename(self.path / name, self.path / f".{name}.gone")
        for name in os.listdir(self.path):
            if name.startswith(".step-"):
                shutil.rmtree(self.path / name)


def open_folder(path: Path) -> ShardFolder:
    """Return the folder for checkpoints at `path`, made if missing, for this user only.

    Raises:
        ConfigError: it cannot be made.
    """
    if path.parent == folders.home_path() / CHECKPOINTS_FOLDER:
        folders.private_folder(folders.home() / CHECKPOINTS_FOLDER)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
            sync_folder(path.parent)
        if not path.is_dir():
            raise NotADirectoryError(20, "it is a file")
    except OSError as error:
        raise ConfigError(
            f"cannot make the folder {path} for checkpoints: {explain(error)}; choose another with folder="
        ) from error
    return ShardFolder(path)
