"""Memory that two ranks of one host share: anonymous, and of fixed size once it is passed on.

Between processes it is, on Linux, a sealed memfd, allocated before it is used. macOS has objects of `shm_open`: their
names are removed at once, and the kernel lets their size be set only once. Ranks that are threads of one process hand
memory over by name instead of by descriptor (`offer`, `take`).
"""

from __future__ import annotations

import fcntl
import mmap
import os
import platform
import sys
import threading
from typing import Any, Final

from covey.base.errors import RemoteProtocolError

_offered: dict[str, bytearray] = {}
_lock = threading.Lock()
_LINUX: Final[Any] = fcntl if hasattr(fcntl, "F_ADD_SEALS") else None
"""The module of seals, where there are any: mypy knows their names on Linux only."""
_SEALS: Final = _LINUX.F_SEAL_SHRINK | _LINUX.F_SEAL_GROW | _LINUX.F_SEAL_SEAL if _LINUX else 0
IN_ORDER: Final = ("x86_64", "AMD64")
"""Processors that make stores visible in order, which the rings in Python rely on."""


def offer(nbytes: int) -> tuple[str, bytearray]:
    """Allocate memory that another rank of this process can `take`; return its name and the memory."""
    import secrets  # slow to load: it loads OpenSSL

    name, memory = secrets.token_hex(16), bytearray(nbytes)
    with _lock:
        _offered[name] = memory
    return name, memory


def take(name: str) -> bytearray | None:
    """Return the memory that was offered under `name`, and forget the name; None if there is none."""
    with _lock:
        return _offered.pop(name, None)


def has_memory(system: str = sys.platform) -> bool:
    """Tell whether processes of such a system can share memory by descriptors."""
    return system in ("linux", "darwin")


def obstacle(system: str, machine: str, *, is_native: bool) -> str:
    """Return why a process cannot use rings in shared memory; empty if it can.

    `system` and `machine` are as `sys.platform` and `platform.machine()` name them; `is_native` tells whether it has
    the compiled executor, whose rings have the barriers that other processors need.
    """
    if not has_memory(system):
        return f"it is for Linux and macOS, and this is {system}"
    if machine not in IN_ORDER and not is_native:
        return f"on {machine} it needs the compiled executor"
    return ""


def obstacle_here(*, is_native: bool) -> str:
    """Return why this process cannot use rings in shared memory; empty if it can."""
    return obstacle(sys.platform, platform.machine(), is_native=is_native)


def keeps_order() -> bool:
    """Tell whether this processor makes stores visible in order, so that Python can move bytes through rings."""
    return platform.machine() in IN_ORDER


def create(nbytes: int) -> tuple[int, mmap.mmap]:
    """Make a segment and map it; return its descriptor, which the caller passes on and closes, and the mapping.

    Linux allocates every page here, so that a lack of memory is an OSError now and not a SIGBUS during an operation.
    """
    descriptor = _sealable(nbytes) if _LINUX else unlinked(nbytes)
    try:
        if _LINUX:
            fcntl.fcntl(descriptor, _LINUX.F_ADD_SEALS, _SEALS)
            # Both mappings keep descriptors of the segment open. A write to one of them, by code that takes its number
            # for that of a file it had, begins at the end, where the seals forbid it: no word of a ring changes.
            os.lseek(descriptor, 0, os.SEEK_END)
        return descriptor, mmap.mmap(descriptor, nbytes)
    except BaseException:
        os.close(descriptor)
        raise


def _sealable(nbytes: int) -> int:
    descriptor = os.memfd_create("covey", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def unlinked(nbytes: int) -> int:
    """Make a segment by `shm_open`, whose name no other process can have opened; return its descriptor."""
    # Of the standard library, for multiprocessing.shared_memory.
    import _posixshmem  # type: ignore[import-not-found]
    import secrets  # slow to load: it loads OpenSSL

    name = f"/covey-{secrets.token_hex(8)}"  # macOS takes 31 characters
    descriptor: int = _posixshmem.shm_open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR, mode=0o600)
    try:
        _posixshmem.shm_unlink(name)
        os.ftruncate(descriptor, nbytes)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def attach(descriptor: int, nbytes: int) -> mmap.mmap:
    """Map a segment that another process made, and close the descriptor.

    Raises:
        RemoteProtocolError: it has another size, or the process that made it could still shrink it.
    """
    try:
        most = nbytes if _LINUX else nbytes + mmap.PAGESIZE - 1  # macOS rounds up
        seals = fcntl.fcntl(descriptor, _LINUX.F_GET_SEALS) if _LINUX else 0
        if not nbytes <= os.fstat(descriptor).st_size <= most or seals & _SEALS != _SEALS:
            raise RemoteProtocolError(f"a shared segment of {nbytes} bytes was announced, but another one arrived")
        return mmap.mmap(descriptor, nbytes)
    finally:
        os.close(descriptor)
