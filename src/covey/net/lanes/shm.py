"""Memory shared with another process of this host: anonymous, of fixed size, and allocated before it is used."""

from __future__ import annotations

import fcntl
import mmap
import os
import platform
import sys
from typing import Final

from covey.base.errors import RemoteProtocolError

_SEALS: Final = (
    fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL  # type: ignore[attr-defined,unused-ignore]
    if hasattr(fcntl, "F_SEAL_SHRINK")
    else 0
)


def usable() -> bool:
    """Tell whether this machine can run ring lanes: it has Linux, and a processor that keeps stores in order."""
    return sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64") and hasattr(os, "memfd_create")


def create(nbytes: int) -> tuple[int, mmap.mmap]:
    """Make a segment and map it; return its descriptor, which the caller passes on and closes, and the mapping.

    Every page is allocated here, so that a lack of memory is an OSError now and not a SIGBUS during an operation.
    """
    descriptor = os.memfd_create("covey", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)  # type: ignore[attr-defined,unused-ignore]
        return descriptor, mmap.mmap(descriptor, nbytes)
    except BaseException:
        os.close(descriptor)
        raise


def attach(descriptor: int, nbytes: int) -> mmap.mmap:
    """Map a segment that another process made, and close the descriptor.

    Raises:
        RemoteProtocolError: it has another size, or the process that made it could still shrink it.
    """
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)  # type: ignore[attr-defined,unused-ignore]
        if os.fstat(descriptor).st_size != nbytes or seals & _SEALS != _SEALS:
            raise RemoteProtocolError(f"a shared segment of {nbytes} bytes was announced, but another one arrived")
        return mmap.mmap(descriptor, nbytes)
    finally:
        os.close(descriptor)
