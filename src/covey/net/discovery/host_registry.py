"""Files by which nodes of one user on one host find each other, with or without a network.

A node's file is in a folder that only its user may enter, and is locked as long as the node lives. A lock cannot
outlive its process, so the file of a killed node is recognised, and removed by the next node that reads the folder. A
node also cleans up the folders of other clusters, which may never be read again.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import secrets
import socket
import stat
import time
from typing import TYPE_CHECKING, Final

import msgspec

from covey.base.errors import ConfigError
from covey.net.discovery.host_rendezvous import check_folder, host_token, make_folder, rendezvous_folder
from covey.net.host.descriptors import explain
from covey.net.host.folders import FOLDER_ADVICE, unwritable
from covey.net.host.locks import LockHolder

if TYPE_CHECKING:
    from pathlib import Path

NODES_LIMIT: Final = 256
FOLDERS_LIMIT: Final = 64
"""Folders of other clusters that are cleaned up."""
YOUNG_SOCKET_SECONDS: Final = 60.0
"""Younger sockets are left alone: their process may be about to listen."""
_HOST_LETTERS: Final = 3
"""Letters of a socket's name that stand for the host; the path must stay short."""
_MOST_BYTES: Final = 4096
_FOLDER_TRIES: Final = 100
PAIRING_TAG: Final = "pairing"
"""The registry of machines that show a code for pairing: no tag of a secret is like it."""
_SUFFIX: Final = ".node"
_REGISTRY_PREFIX: Final = "nodes-"


class RegisteredNode(msgspec.Struct, frozen=True):
    """A living node on this host, as its file describes it."""

    port: int
    socket: str
    """Path of the unix socket where it accepts connections."""
    pid: int


class HostRegistry(LockHolder):
    """The nodes of this user and one cluster on this host; this node can be announced among them."""

    def __init__(self, tag: str) -> None:
        """Open the registry of a cluster; `tag` is derived from its secret.

        Raises:
            ConfigError: its folder cannot be made, or is open to other users.
        """
        self._folder = rendezvous_folder(f"{_REGISTRY_PREFIX}{tag}")
        _make_folder(self._folder)
        # Containers and namespaces may share the folder, but neither ports nor memory.
        self._host = host_token(self._folder.parent)[:16]
        self._own: Path | None = None
        self._socket: Path | None = None
        super().__init__()
        siblings = itertools.islice(self._folder.parent.glob("nodes-*"), FOLDERS_LIMIT)
        for folder in {self._folder, *siblings}:
            self._clean_up(folder)

    def listen(self, backlog: int) -> tuple[socket.socket, str]:
        """Return a unix socket that listens in the folder, and its path; `close` removes it."""
        for _ in range(_FOLDER_TRIES):
            path = self._folder / f"s{self._host[:_HOST_LETTERS]}{secrets.token_hex(3)}"
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.bind(os.fspath(path))
                sock.listen(backlog)
                sock.setblocking(False)
            except OSError as error:
                sock.close()
                if not isinstance(error, FileNotFoundError):
                    raise ConfigError(f"cannot listen at {path}: {explain(error)}; {FOLDER_ADVICE}") from error
                _make_folder(self._folder)  # the last node to leave removed it
            else:
                self._socket = path
                return sock, str(path)
        raise ConfigError(f"{self._folder} is removed as soon as it is made; find out which program does that")

    def announce(self, port: int, path: str) -> None:
        """Announce where this node listens, until it is closed or dies; replaces an earlier announcement."""
        note = msgspec.json.encode(RegisteredNode(port=port, socket=path, pid=os.getpid()))
        if len(note) > _MOST_BYTES:
            raise ConfigError(
                f"the path of the socket has {len(path)} characters; set XDG_RUNTIME_DIR to a shorter folder"
            )
        own, lock = self._write(note)
        self._withdraw()
        self._own, self._lock = own, lock

    def others(self) -> list[RegisteredNode]:
        """Return the other living nodes, and remove files of dead ones; cheap enough to call often."""
        try:
            with os.scandir(self._folder) as entries:
                names = sorted(entry.name for entry in itertools.islice(entries, NODES_LIMIT))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise ConfigError(f"cannot look for other nodes in {self._folder}: {explain(error)}") from error
        read = [self._read(self._folder / name) for name in names if self._own is None or name != self._own.name]
        return [node for node in read if node is not None]

    def of_other_clusters(self) -> list[RegisteredNode]:
        """Return the living nodes of this user on this host that hold another secret."""
        found: list[RegisteredNode] = []
        folders = itertools.islice(self._folder.parent.glob(f"{_REGISTRY_PREFIX}*"), FOLDERS_LIMIT)
        none = (self._folder.name, rendezvous_folder(f"{_REGISTRY_PREFIX}{PAIRING_TAG}").name)
        for folder in sorted(folder for folder in folders if folder.name not in none):
            with contextlib.suppress(OSError):
                paths = sorted(itertools.islice(folder.glob(f"{self._host}-*{_SUFFIX}"), NODES_LIMIT))
                found += [node for path in paths if (node := self._read(path)) is not None]
        return found

    def close(self) -> None:
        """Withdraw the announcement and the socket. Closing twice is fine."""
        self._withdraw()
        if self._socket is not None:
            self._socket.unlink(missing_ok=True)
            self._socket = None
        with contextlib.suppress(OSError):
            self._folder.rmdir()  # works if this was the last node

    def _write(self, note: bytes) -> tuple[Path, int]:
        """Return a new locked file and the lock; other nodes see it only once it is written and locked."""
        for _ in range(_FOLDER_TRIES):
            name = f"{self._host}-{secrets.token_hex(8)}"
            draft, path = self._folder / name, self._folder / f"{name}{_SUFFIX}"
            try:
                lock = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            except FileNotFoundError:
                _make_folder(self._folder)  # the last node to leave removed it
                continue
            except OSError as error:
                raise ConfigError(unwritable(self._folder, error)) from error
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.write(lock, note)
                draft.rename(path)
            except (BlockingIOError, FileNotFoundError):
                os.close(lock)  # another node found it before it was locked, and removed it as a dead node's
            except OSError as error:
                os.close(lock)
                draft.unlink(missing_ok=True)
                raise ConfigError(unwritable(self._folder, error)) from error
            except BaseException:
                os.close(lock)
                raise
            else:
                return path, lock
        raise ConfigError(
            f"files in {self._folder} are removed as soon as they are made; find out which program does that"
        )

    def _read(self, path: Path) -> RegisteredNode | None:
        """Return the contents of a living node's file, or None; remove the file of a dead node."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return self._parse(path.name, os.read(descriptor, _MOST_BYTES + 1))
        except OSError:
            return None
        else:
            with contextlib.suppress(OSError):
                left_behind = self._parse(path.name, os.read(descriptor, _MOST_BYTES + 1))
                path.unlink()
                if left_behind is not None and os.path.dirname(left_behind.socket) == str(path.parent):
                    os.unlink(left_behind.socket)
            return None
        finally:
            os.close(descriptor)

    def _parse(self, name: str, text: bytes) -> RegisteredNode | None:
        if not name.startswith(f"{self._host}-") or not name.endswith(_SUFFIX):
            return None
        try:
            note = msgspec.json.decode(text, type=RegisteredNode)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        return note if 0 < note.port < 1 << 16 and note.pid > 0 and "\0" not in note.socket else None

    def _clean_up(self, folder: Path) -> None:
        """Remove files of this host's dead nodes from a folder, and the folder if it is empty then."""
        with contextlib.suppress(OSError):
            if not stat.S_ISDIR(folder.lstat().st_mode):
                return
            with os.scandir(folder) as entries:
                names = [entry.name for entry in itertools.islice(entries, NODES_LIMIT)]
            for name in names:
                if name.startswith(f"s{self._host[:_HOST_LETTERS]}"):
                    _remove_if_dead(folder / name)
                elif name.startswith(f"{self._host}-"):
                    self._read(folder / name)
            if folder != self._folder:
                folder.rmdir()

    def _withdraw(self) -> None:
        path, self._own = self._own, None
        if path is not None:
            path.unlink(missing_ok=True)
        self.let_go()

    def forked(self) -> None:
        super().forked()
        self._own = self._socket = None  # they belong to the parent


def _remove_if_dead(path: Path) -> None:
    """Remove a socket at which no process listens any more."""
    status = path.lstat()
    if not stat.S_ISSOCK(status.st_mode) or time.time() < status.st_mtime + YOUNG_SOCKET_SECONDS:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)


def is_nodes_socket(path: str, own_folder: str) -> bool:
    """Tell whether a path is in a folder where nodes of this user and host listen, such as `own_folder`.

    Nodes of one cluster have several folders when its secret has changed while they run.
    """
    folder = os.path.dirname(path)
    is_beside = os.path.dirname(folder) == os.path.dirname(own_folder) and os.path.normpath(path) == path
    return bool(own_folder) and is_beside and os.path.basename(folder).startswith(_REGISTRY_PREFIX)


def _make_folder(folder: Path) -> None:
    for _ in range(_FOLDER_TRIES):
        make_folder(folder)
        try:
            check_folder(folder)
            return
        except ConfigError as error:
            if not isinstance(error.__cause__, FileNotFoundError):  # else the last node to leave removed it
                raise
