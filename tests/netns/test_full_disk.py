"""Temporary folders that are full, in a namespace of mounts: every way to start a run says which, and what to do."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

from tests.support.waiting import DEADLINE

ROOT = Path(__file__).parents[2]
FOLDERS = ("/tmp", "/var/tmp", "/run")
SCRIPT = """
    set -e
    python="$1"
    shift
    number=3
    for kept in "$@"; do
        eval "exec $number<'$kept'"
        number=$((number + 1))
    done
    for folder in FOLDERS; do
        mount -t tmpfs -o size=64k,mode=1777 tmpfs $folder
    done
    number=3
    for kept in "$@"; do  # its path leads to nothing now, and its descriptor still to the folder
        mkdir -p "$kept"
        mount --no-canonicalize --rbind /proc/self/fd/$number "$kept"
        eval "exec $number<&-"
        number=$((number + 1))
    done
    for folder in FOLDERS; do
        dd if=/dev/zero of=$folder/fill bs=1k 2>/dev/null || true
    done
    cd /tmp
    set +e
    unset TMPDIR XDG_RUNTIME_DIR
    run() { "$python" -m covey run -n 2 -m covey --version 2>&1; }
    join() { RANK=0 WORLD_SIZE=2 "$python" -c 'import covey; covey.join()' 2>&1 | tail -n 1; }
    run
    join
    rm /tmp/fill
    export XDG_RUNTIME_DIR=/run
    join
    run | sort -u | head -n 1
""".replace("FOLDERS", " ".join(FOLDERS))


def below_folders() -> list[Path]:
    """Return where covey and its interpreter are, as far as file systems over the folders hide it; outer ones first."""
    above = {*map(Path, FOLDERS), *(Path(name).resolve() for name in FOLDERS)}
    needed = {ROOT, Path(sys.prefix), Path(sys.base_prefix)}
    needed |= {path.resolve() for path in needed}
    return sorted(path for path in needed if above & set(path.parents))


def test_full_temporary_folders_are_named_with_what_to_do() -> None:
    ended = subprocess.run(
        ["unshare", "-m", "sh", "-c", textwrap.dedent(SCRIPT), "sh", sys.executable, *map(str, below_folders())],
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "PYTHONPATH": str(ROOT / "src"), "PYTHONDONTWRITEBYTECODE": "1"},
        cwd="/",
        stdout=subprocess.PIPE,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    lines = [line for line in ended.stdout.splitlines() if not line.startswith("what to do")]
    places = "/tmp (No space left on device), /var/tmp (No space left on device)"
    text = f"no folder for temporary files can be written: {places}. Free some space, or set TMPDIR to a folder that "
    assert lines[0] == f"error: {text}you can write"
    assert lines[1] == f"covey.ConfigError: {text}you can write"
    assert lines[2].startswith("covey.ConfigError: cannot write to /run/covey-0")
    assert lines[2].endswith(
        ": No space left on device; free some space there, or set XDG_RUNTIME_DIR to a folder that you can "
        "write, for all processes of the run"
    )
    assert lines[3].startswith("[0] covey "), "another folder is taken for the sockets of a run"
