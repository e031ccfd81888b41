"""Install a lock and torch into the environment of the Python that runs this, with several pips at once.

    .venv/bin/python tools/install.py requirements-dev.lock

One pip fetches and unpacks packages one after the other, and waits for the index or the disk most of the time. The
packages of the lock need no order, because `--no-deps` takes each as it is. torch comes without what it needs first:
most of that is in the lock, and the last pip, which runs alone, adds the libraries that only some of its builds need.
Uses nothing but the standard library: the environment is still empty.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
TORCH: Final = ("-r", str(ROOT / "requirements-torch.txt"))
PARTS: Final = 3
# Without --no-compile pip compiles 10,000 modules, one after the other; Python compiles those that it imports.
PIP: Final = (
    *(sys.executable, "-m", "pip", "install"),
    *("--quiet", "--disable-pip-version-check", "--no-compile"),
)


def parts_of(lock: str, count: int) -> list[str]:
    """Deal the requirements of a lock out to `count` files, each with its hashes."""
    requirements = re.findall(r"^[^\s#](?:.*\\\n)*.*\n", lock, re.MULTILINE)
    return ["".join(requirements[part::count]) for part in range(count)]


def at_once(lock: Path, folder: Path) -> list[list[str]]:
    """Write the parts of a lock into a folder; return the arguments of the pips that run at the same time."""
    arguments = [["--no-deps", *TORCH]]
    for part, text in enumerate(parts_of(lock.read_text(), PARTS)):
        path = folder / f"part{part}.lock"
        path.write_text(text)
        arguments.append(["--require-hashes", "--no-deps", "-r", str(path)])
    return arguments


def main() -> None:
    """Run the pips; exit with 1 if one of them fails, after all have ended."""
    with tempfile.TemporaryDirectory() as folder:
        pips = [subprocess.Popen([*PIP, *arguments]) for arguments in at_once(Path(sys.argv[1]), Path(folder))]
        codes = [pip.wait() for pip in pips]
    if any(codes):
        sys.exit(1)
    sys.exit(subprocess.run([*PIP, *TORCH]).returncode)


if __name__ == "__main__":
    main()
