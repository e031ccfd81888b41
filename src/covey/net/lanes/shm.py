"""Memory shared with another process of this host: anonymous, sealed, and there before it is used."""

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
    """Tell whether this machine can run ring lanes over shared memory: Linux, and stores seen in order."""
    return sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64") and hasattr(os, "memfd_create")


def create(nbytes: int) -> tuple[int, mmap.mmap]:
    """Make a segment and map it; returns its descriptor, to be passed on and closed, and the mapping.

    Every page is allocated here, so that a full memory is an OSError now and not a SIGBUS in mid-operation.
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
        RemoteProtocolError: it has another size, or its maker could still shrink it under our feet.
    """
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)  # type: ignore[attr-defined,unused-ignore]
        if os.fstat(descriptor).st_size != nbytes or seals & _SEALS != _SEALS:
            raise RemoteProtocolError(f"a shared segment of {nbytes} bytes was announced, another one came")
        return mmap.mmap(descriptor, nbytes)
    finally:
        os.close(descriptor)
