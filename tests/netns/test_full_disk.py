"""Temporary folders that are full, in a namespace of mounts: every way to start a run says which, and what to do."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"
SCRIPT = """
    set -e
    for folder in /tmp /var/tmp /run; do
        mount -t tmpfs -o size=64k,mode=1777 tmpfs $folder
        dd if=/dev/zero of=$folder/fill bs=1k 2>/dev/null || true
    done
    cd /tmp
    set +e
    unset TMPDIR XDG_RUNTIME_DIR
    python="$1 -m covey run -n 2 -m covey --version"
    $python 2>&1
    RANK=0 WORLD_SIZE=2 $1 -c 'import covey; covey.join()' 2>&1 | tail -n 1
    rm /tmp/fill
    XDG_RUNTIME_DIR=/run RANK=0 WORLD_SIZE=2 $1 -c 'import covey; covey.join()' 2>&1 | tail -n 1
    XDG_RUNTIME_DIR=/run $python 2>&1 | sort -u | head -n 1
"""


def test_full_temporary_folders_are_named_with_what_to_do(tmp_path: Path) -> None:
    ended = subprocess.run(
        ["unshare", "-m", "sh", "-c", textwrap.dedent(SCRIPT), "sh", sys.executable],
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "PYTHONPATH": str(SOURCE), "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
    )
    lines = [line for line in ended.stdout.splitlines() if not line.startswith("what to do")]
    places = "/tmp (No space left on device), /var/tmp (No space left on device)"
    text = f"no folder for temporary files can be written: {places}. Free some space, or set TMPDIR to a folder that "
    assert lines[0] == f"error: {text}you can write"
    assert lines[1] == f"covey.ConfigError: {text}you can write"
    assert lines[2].startswith("covey.ConfigError: cannot write to /run/covey-0")
    assert lines[2].endswith(
        ": No space left on device; free some space there, or set TMPDIR or XDG_RUNTIME_DIR to a folder that you can "
        "write"
    )
    assert lines[3].startswith("[0] covey "), "another folder is taken for the sockets of a run"
