"""Folders of this host in which the ranks of one run find each other.

Only its owner may enter a folder. Rank r listens at `r.sock` in it, and holds a lock on `r.lock` as long as it lives:
so a second process with the same rank is noticed, and the files of a killed one are replaced. A folder whose processes
were all killed is removed when the next run starts.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import socket
import stat
import struct
from pathlib import Path
from typing import Final

from covey.base.errors import AuthError, ConfigError, ConnectError
from covey.net.host.descriptors import explain
from covey.net.host.folders import host_folder, writing_to
from covey.net.host.locks import LockHolder, only_one

RUN_TOKEN_BYTES: Final = 32
_PATH_LIMIT: Final = 100  # unix socket addresses hold 104 (macOS) or 108 (Linux) bytes


def rendezvous_folder(name: str) -> Path:
    """Return the folder for the ranks of job `name`; ConfigError if its parent is not private to this user."""
    import hashlib  # slow to load: it loads OpenSSL

    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:20].strip("-.") or "job"
    folder = Path(host_folder()) / _users_folder() / f"{readable}-{hashlib.sha256(name.encode()).hexdigest()[:12]}"
    _own_folder(folder.parent)
    return folder


def check_folder(folder: Path) -> Path:
    """Return `folder` if only this user can enter it."""
    try:
        status = folder.lstat()
    except OSError as error:
        raise ConfigError(f"the folder {folder} of the run is not there: {explain(error)}") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(
            f"{folder} must be a folder of yours with mode 0700; remove it, or set XDG_RUNTIME_DIR to another place"
        )
    if len(os.fsencode(folder)) + len("/99999.sock") > _PATH_LIMIT:
        raise ConfigError(f"{folder} is too long for a unix socket; set XDG_RUNTIME_DIR to a shorter folder")
    return folder


def make_folder(folder: Path) -> None:
    """Make a folder that only this user may enter, unless there is one; `check_folder` tells whether it is private.

    Raises:
        ConfigError: it cannot be made.
    """
    with writing_to(folder.parent), contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)


def _own_folder(folder: Path) -> None:
    make_folder(folder)
    check_folder(folder)


class HostRendezvous(LockHolder):
    """What one rank has in the folder: a listening socket, a lock, and the token that all ranks share."""

    def __init__(self, folder: Path, rank: int, token: bytes | None = None) -> None:
        """Lock `rank` and listen. Without a `token`, the first rank makes one for all.

        Raises:
            ConfigError: a living process has this rank, or the folder is not private to this user.
        """
        super().__init__()
        self._parent = folder.parent if token is None else None
        self._lock_path = folder / f"{rank}.lock"
        self.path = socket_path(folder, rank)
        with _only_one_below(self._parent):
            if self._parent is not None:
                _remove_abandoned_beside(folder)
                _own_folder(folder)
            with writing_to(folder):
                self._lock = _lock_rank(self._lock_path, rank)
            try:
                with writing_to(folder):
                    self.token = _shared_token(folder) if token is None else token
                    self.sock = self._listen()
            except BaseException:
                self.let_go()
                raise

    def _listen(self) -> socket.socket:
        self.path.unlink(missing_ok=True)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.bind(os.fspath(self.path))
            sock.listen(128)
            sock.setblocking(False)
        except BaseException:
            sock.close()
            raise
        return sock

    def leave(self) -> None:
        """Stop listening and release the rank; the last rank removes a shared folder. Leaving twice is fine.

        A process without a free descriptor cannot look for other ranks: the folder stays for the next job to remove.
        """
        if self._lock < 0:
            return
        self.sock.close()
        try:
            with _only_one_below(self._parent):
                self._leave_folder()
        except (ConfigError, OSError):
            self._remove_own_files()

    def _leave_folder(self) -> None:
        import shutil  # slow to load, and rarely needed

        self._remove_own_files()
        folder = self.path.parent
        if self._parent is not None and not any(_is_taken(path) for path in folder.glob("*.lock")):
            shutil.rmtree(folder, ignore_errors=True)

    def _remove_own_files(self) -> None:
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)
            self._lock_path.unlink(missing_ok=True)
        self.let_go()


def _only_one_below(folder: Path | None) -> contextlib.AbstractContextManager[None]:
    """Let one process at a time enter or leave the folders below `folder`."""
    return only_one(folder / "door", setting="XDG_RUNTIME_DIR") if folder is not None else contextlib.nullcontext()


def _remove_abandoned_beside(folder: Path) -> None:
    """Remove other folders whose processes were all killed. Called under `_only_one_below`."""
    import shutil  # slow to load, and rarely needed

    for token in folder.parent.glob("*/token"):
        other = token.parent
        if other != folder and not any(_is_taken(path) for path in other.glob("*.lock")):
            shutil.rmtree(other, ignore_errors=True)


def _lock_rank(path: Path, rank: int) -> int:
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = os.pread(lock, 20, 0).decode("ascii", "replace").strip()
        os.close(lock)
        raise ConfigError(
            f"rank {rank} of this job is already running as process {holder or 'unknown'}. End it, or give this job "
            "another MASTER_PORT or job id."
        ) from None
    try:
        os.ftruncate(lock, 0)
        os.pwrite(lock, str(os.getpid()).encode(), 0)
    except BaseException:
        os.close(lock)
        raise
    return lock


def _is_taken(path: Path) -> bool:
    """Tell whether a living process holds this lock; it may, if that cannot be found out."""
    try:
        lock = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False


def _shared_token(folder: Path) -> bytes:
    path = folder / "token"
    if not path.exists():
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.write(descriptor, os.urandom(RUN_TOKEN_BYTES))
        finally:
            os.close(descriptor)
    token = path.read_bytes()
    if len(token) != RUN_TOKEN_BYTES:
        raise ConfigError(f"{path} is damaged; remove {folder} and start again")
    return token


def socket_path(folder: Path, rank: int) -> Path:
    """Return the path at which rank `rank` listens."""
    return folder / f"{rank}.sock"


def about_rendezvous(path: str) -> str:
    """Return a sentence about where ranks meet, from the path of a rank's socket; empty if a launcher gave the folder.

    For ranks that wait in vain: which folder it is depends on the environment of each rank.
    """
    folder = Path(path).parent
    if folder.parent.name != _users_folder():
        return ""
    return f"The ranks of this host meet in {folder}: do all have the same user, /tmp and XDG_RUNTIME_DIR?"


def _users_folder() -> str:
    return f"covey-{os.getuid()}"


def check_peer(sock: socket.socket) -> None:
    """Raise AuthError unless the other end of a unix socket belongs to this user."""
    if hasattr(socket, "SO_PEERCRED"):
        _pid, uid, _gid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    else:  # macOS: struct xucred from LOCAL_PEERCRED
        _version, uid = struct.unpack_from("2I", sock.getsockopt(0, 1, 76))
    if uid != os.getuid():
        raise AuthError(f"a process of user {uid} tried to join a run of user {os.getuid()}")


def host_token(folder: Path) -> str:
    """Return a name that is equal for processes that can share memory: same boot, network namespace, user and folder.

    `folder` is where their sockets are; containers may share everything but that.
    """
    import hashlib  # slow to load: it loads OpenSSL

    status = folder.stat()
    parts = [str(os.getuid()), f"{status.st_dev}:{status.st_ino}"]
    try:
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/net"))
    except OSError:
        parts.append(socket.gethostname())
    return hashlib.sha256("/".join(parts).encode()).hexdigest()[:32]


def local_address_towards(host: str) -> str:
    """Return the address from which this machine would connect to `host`, by its routing table; nothing is sent."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConnectError(f"no route to {host}: {error}; check MASTER_ADDR and the network") from error
