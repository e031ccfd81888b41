"""Descriptors: how many are left, and sockets that are closed in forked children.

A child that kept such a socket would hide the death of this process from its peers.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import threading
import weakref
from typing import TYPE_CHECKING, Final, TypeVar

from covey.base.errors import ConnectError, CoveyError

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator

T = TypeVar("T")

LEAST_PRUNED: Final = 256
MOST_SPARED: Final = 64
"""Descriptors that are reserved for the run, if the limit is high enough; else an eighth of the limit."""
FREE_DESCRIPTOR_SECONDS: Final = 5.0
"""How long an operation waits for a free descriptor before it fails: the program may close files in between."""
_EXHAUSTED: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})
_NO_THREAD: Final = "can't start new thread"

# References without callbacks, unlike a WeakSet's: Python ignores a KeyboardInterrupt that arrives in a callback, and
# sockets are freed while a program waits for an operation that Ctrl-C should interrupt.
_tracked: list[weakref.ref[socket.socket]] = []
_tracking = threading.Lock()
_prune_at = LEAST_PRUNED
_spare = -1


class ScarceError(ConnectError):
    """This process can open nothing now: it, or the system, has too many files open."""


def is_exhausted(error: BaseException) -> bool:
    """Tell whether an error says that this process, or this system, can open no more files or start no more threads."""
    if isinstance(error, RuntimeError):
        return str(error) == _NO_THREAD
    return isinstance(error, OSError) and error.errno in _EXHAUSTED


def explain(error: OSError | RuntimeError) -> str:
    """Return the text of a system error, with a remedy if no more files can be opened."""
    number = error.errno if isinstance(error, OSError) else None
    if number is None:
        return str(error)
    reason = os.strerror(number)
    if number == errno.EMFILE:
        return f"{reason} (this process may have {_limit()}); raise the limit with ulimit -n"
    return f"{reason}; end what is not needed on this machine" if is_exhausted(error) else reason


@contextlib.contextmanager
def explained(what: str) -> Iterator[None]:
    """Decorate a function to raise a ConnectError with a remedy when no more files can be opened; `what` names it."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        if isinstance(error, CoveyError) or not is_exhausted(error):
            raise
        raise ConnectError(f"{what}: {explain(error)}") from error


def keep_a_spare() -> None:
    """Reserve a descriptor from now on, for writes that must work when the process has used up all others."""
    global _spare
    with _tracking:
        if _spare < 0:
            with contextlib.suppress(OSError):
                _spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)


def with_the_spare(work: Callable[[], T]) -> T:
    """Call `work`, which needs one descriptor at a time; if none is free, release the reserved one for it."""
    try:
        return work()
    except OSError as error:
        if error.errno != errno.EMFILE or not _give_the_spare():
            raise
    try:
        return work()
    finally:
        keep_a_spare()


def _give_the_spare() -> bool:
    global _spare
    with _tracking:
        spare, _spare = _spare, -1
        if spare >= 0:
            os.close(spare)
    return spare >= 0


def is_scarce(descriptor: int) -> bool:
    """Tell whether few descriptors are left, from the number of a new one: the system gives the lowest free one."""
    limit = _limit()
    return descriptor >= limit - min(MOST_SPARED, limit // 8)


def left() -> int:
    """Return how many descriptors this process can still open, without those that are reserved for the run."""
    limit = _limit()
    try:
        used = len(os.listdir("/dev/fd"))
    except OSError:
        return 0
    return max(0, limit - min(MOST_SPARED, limit // 8) - used)


def raise_limit() -> int:
    """Return how many descriptors this process may have, after raising the limit as far as the system lets it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return min(_limit(), 1 << 20)


def _limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft != resource.RLIM_INFINITY else 1 << 30


def track(sock: socket.socket) -> socket.socket:
    """Close `sock` in every child that this process forks. Returns `sock`."""
    global _prune_at
    with _tracking:
        _tracked.append(weakref.ref(sock))
        if len(_tracked) >= _prune_at:
            _tracked[:] = [reference for reference in _tracked if reference() is not None]
            _prune_at = max(LEAST_PRUNED, 2 * len(_tracked))
    return sock


def _close_in_child() -> None:
    global _tracking
    _tracking = threading.Lock()  # another thread of the parent may have held it
    # Close without shutdown: that would end the parent's connection.
    for reference in _tracked:
        sock = reference()
        descriptor = sock.detach() if sock is not None else -1
        if descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(descriptor)
    _tracked.clear()


os.register_at_fork(after_in_child=_close_in_child)
