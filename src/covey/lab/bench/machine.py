"""Facts about this machine that the reader of a benchmark needs."""

from __future__ import annotations

import os
import platform
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np


def machine_facts() -> dict[str, Any]:
    """Return what the numbers depend on: processor, kernel, interpreter, load, and the clock's date."""
    return {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average": os.getloadavg(),
        "system": platform.system(),
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def cpu_model() -> str:
    """Return the processor's name from the kernel, or else from Python."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for text in info.read_text(errors="replace").splitlines():
            key, _, value = text.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
