"""What this machine has: cores, memory, accelerators, platform, and which executor a process uses on it.

All of it is read from the system, without loading a library that is not needed anyway.
"""

from __future__ import annotations

import os
import platform
import socket
import sys
import time
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from covey.base.native import native
from covey.base.text import printable

if TYPE_CHECKING:
    from covey.wire.messages import Hardware

MOST_ACCELERATORS: Final = 16
NAME_CHARACTERS: Final = 60
_NVIDIA: Final = Path("/proc/driver/nvidia/gpus")
_AMD: Final = Path("/sys/class/kfd/kfd/topology/nodes")

_CLOCK_WITH_SLEEP: Final = getattr(time, "CLOCK_BOOTTIME", getattr(time, "CLOCK_MONOTONIC", None))
"""On macOS it is CLOCK_MONOTONIC that runs on, and `time.monotonic` that does not."""


def waking_clock() -> float:
    """Return seconds by a clock that is never set, and that also runs while the machine sleeps."""
    return time.monotonic() if _CLOCK_WITH_SLEEP is None else time.clock_gettime(_CLOCK_WITH_SLEEP)


def short_host_name() -> str:
    """Return the name of this machine without its domain; "" if it has none."""
    return printable(socket.gethostname().partition(".")[0], 40)


def usable_cores() -> int:
    """Return how many cores the threads of this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def hardware() -> Hardware:
    """Return what this process may use."""
    from covey.wire import messages  # slow to load

    name = f"{platform.system()} {platform.release()} {platform.machine()}"
    return messages.Hardware(
        usable_cores(), _memory(), tuple(_accelerators()[:MOST_ACCELERATORS]), printable(name, NAME_CHARACTERS)
    )


def _memory() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0


def _accelerators() -> list[str]:
    """Return the names of graphics processors that drivers for computing know."""
    if sys.platform == "darwin":
        return ["Apple GPU"] if platform.machine() == "arm64" else []
    return [*_nvidia(), *_amd()]


def _nvidia() -> list[str]:
    found = []
    for information in sorted(_NVIDIA.glob("*/information")):
        for line in _text(information).splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "Model":
                found.append(printable(value.strip(), NAME_CHARACTERS))
    return found


def _amd() -> list[str]:
    found = []
    for node in sorted(_AMD.glob("*")):
        properties = dict(line.split(" ", 1) for line in _text(node / "properties").splitlines() if " " in line)
        if int(properties.get("simd_count", "0") or 0) > 0:
            found.append(printable(_text(node / "name").strip() or "AMD GPU", NAME_CHARACTERS))
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


@cache
def native_crypto() -> str:
    """Find libcrypto for sealed lanes, and return "", or return why they are sealed by Python."""
    module = native().module
    if module is None:
        return native().why_not
    try:
        import _ssl

        module.load_crypto(getattr(_ssl, "__file__", "") or "")
    except (ImportError, OSError) as error:
        return f"libcrypto was not found ({error})"
    return ""


def describe_executor() -> str:
    """Return which executor this process uses, as people read it."""
    why_not = native().why_not
    if why_not:
        return f"Python, because {why_not}"
    why_not = native_crypto()
    return "compiled" + (f"; Python between hosts, because {why_not}" if why_not else "")
