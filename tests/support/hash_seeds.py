"""Programs whose sets and dicts are in another order: their hash seed is not the one of the test's process."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.support.waiting import DEADLINE


def printed_with_another_hash_seed(*argv: str) -> str:
    """Return what a Python program prints: a module (`-m`) or code (`-c`), and its arguments."""
    other = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    ended = subprocess.run(
        [sys.executable, *argv],
        env=os.environ | {"PYTHONHASHSEED": other, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=True,
    )
    return ended.stdout
