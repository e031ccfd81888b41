"""Breaks the connections between two child processes, without their cooperation and without root.

The kernel gives a parent duplicates of its children's sockets (pidfd_getfd, Linux 5.6). Shutting a duplicate down shuts
the connection down for all processes that have it open: both ends see what they would see after a router forgot the
connection.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import socket
import struct
import sys
from typing import TYPE_CHECKING, Final

from covey.base.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

PIDFD_GETFD: Final = 438
"""The number of the call, the same on all processors."""
_CREDENTIALS: Final = struct.Struct("3i")


def require_cutting() -> None:
    """Raise ConfigError, with the reason, if connections of other processes cannot be broken here."""
    why = _obstacle()
    if why:
        raise ConfigError(f"connections cannot be cut here: {why}. Leave `cut` out of --faults")


def cut(one: int, other: int) -> int:
    """Break all connections between the process groups of two children; return how many there were."""
    ours, theirs = _process_group(one), _process_group(other)
    count = 0
    with contextlib.ExitStack() as held:
        far = {_ends(held.enter_context(sock))[::-1] for pid in theirs for sock in _sockets(pid)}
        for sock in [held.enter_context(sock) for pid in ours for sock in _sockets(pid)]:
            is_between = _peer(sock) in theirs if sock.family == socket.AF_UNIX else _ends(sock) in far
            if is_between:
                with contextlib.suppress(OSError):  # the connection has ended meanwhile
                    sock.shutdown(socket.SHUT_RDWR)
                    count += 1
    return count


@functools.cache
def _obstacle() -> str:
    if sys.platform != "linux" or not hasattr(os, "pidfd_open"):
        return "only Linux lends the sockets of one process to another"
    # Later calls are about children of the same user. Except for Yama, the kernel permits the same for this process.
    with contextlib.suppress(OSError), open("/proc/sys/kernel/yama/ptrace_scope") as file:
        if int(file.read()) > (2 if os.geteuid() == 0 else 1):
            return "kernel.yama.ptrace_scope forbids it"
    ends = socket.socketpair()
    try:
        handle = os.pidfd_open(os.getpid())
        try:
            os.close(_borrowed(handle, ends[0].fileno()))
        finally:
            os.close(handle)
    except OSError as error:
        return f"the kernel does not lend sockets ({error.strerror})"
    finally:
        for end in ends:
            end.close()
    return ""


def _borrowed(handle: int, descriptor: int) -> int:
    """Return a duplicate of another process's descriptor."""
    got = int(_libc().syscall(PIDFD_GETFD, handle, descriptor, 0))
    if got < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    os.set_inheritable(got, False)
    return got


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _process_group(leader: int) -> list[int]:
    """Return the processes in the group that a child leads."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as file:
                if int(file.read().rpartition(")")[2].split()[2]) == leader:
                    found.append(int(name))
    return found


def _sockets(pid: int) -> Iterator[socket.socket]:
    """Yield duplicates of the connected sockets of a process."""
    with contextlib.suppress(OSError):
        handle = os.pidfd_open(pid)
        try:
            for descriptor in _socket_descriptors(pid):
                with contextlib.suppress(OSError):
                    sock = socket.socket(fileno=_borrowed(handle, descriptor))
                    try:
                        sock.getpeername()
                    except OSError:
                        sock.close()  # it listens
                    else:
                        yield sock
        finally:
            os.close(handle)


def _socket_descriptors(pid: int) -> Iterable[int]:
    folder = f"/proc/{pid}/fd"
    for name in os.listdir(folder):
        with contextlib.suppress(OSError):
            if os.readlink(f"{folder}/{name}").startswith("socket:"):
                yield int(name)


def _peer(sock: socket.socket) -> int:
    """Return the process at the other end of a unix socket."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(raw)[0])


def _ends(sock: socket.socket) -> tuple[object, object]:
    """Return the two addresses of a connection, as this end sees them; empty ones if it has ended."""
    try:
        return sock.getsockname(), sock.getpeername()
    except OSError:
        return sock.fileno(), None
