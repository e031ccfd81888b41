"""What killed keepers leave behind goes with the next one, and nothing else does."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.support import forked
from tests.support.waiting import DEADLINE, wait_until

from covey.net.host.runs import KEEPER_LOCK, RUN_FOLDER_PREFIX, TOKEN, YOUNG_FOLDER_SECONDS, RunFolder, sweep
from covey.runtime.keeper.keeper import LocalRun

if TYPE_CHECKING:
    from collections.abc import Iterator

HOLD = """
import sys, time
from covey.net.host.runs import RunFolder
folder = RunFolder()
print(folder.path, flush=True)
time.sleep(600)
"""


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder)


@contextlib.contextmanager
def keeper(base: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process that has the folder of a run."""
    env = {**os.environ, "XDG_RUNTIME_DIR": str(base)}
    process = forked.Popen([sys.executable, "-c", HOLD], env=env, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process, Path(process.stdout.readline().strip())
    finally:
        process.kill()
        process.wait(DEADLINE)
        process.stdout.close()


def make_old(folder: Path, seconds: float = YOUNG_FOLDER_SECONDS + 5) -> None:
    os.utime(folder, (time.time() - seconds,) * 2)


def left_by_a_killed_keeper(base: Path) -> Path:
    with keeper(base) as (process, folder):
        process.kill()
        process.wait(DEADLINE)
    (folder / "keeper.sock").touch()
    (folder / "0.sock").touch()
    make_old(folder)
    return folder


def test_a_folder_is_private_and_goes_with_its_owner(base: Path) -> None:
    folder = RunFolder()
    path = Path(folder.path)
    assert path.parent == base
    assert path.stat().st_mode & 0o777 == 0o700
    (path / "x").mkdir()
    folder.remove()
    folder.remove()
    assert list(base.iterdir()) == []


def test_a_place_with_a_long_path_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("long" * 30)
    long.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    folder = RunFolder()
    assert Path(folder.path).parent == Path("/tmp")
    folder.remove()
    assert list(long.iterdir()) == []


def test_what_a_killed_keeper_left_goes_with_the_next_run(base: Path) -> None:
    left = left_by_a_killed_keeper(base)
    with LocalRun(1) as run:
        assert [path.name for path in base.iterdir()] == [Path(run.folder).name]
    assert not left.exists()
    assert list(base.iterdir()) == []


def test_the_folder_of_a_living_keeper_stays_however_old_it_is(base: Path) -> None:
    with keeper(base) as (process, folder):
        make_old(folder, 1e7)
        sweep(str(base))
        assert folder.exists()
        (folder / TOKEN).touch()
        process.send_signal(signal.SIGSTOP)  # a stopped one lives
        sweep(str(base))
        assert (folder / TOKEN).exists()


def test_a_folder_that_is_seconds_old_stays(base: Path) -> None:
    left = left_by_a_killed_keeper(base)
    for age in (-100.0, 0.0, YOUNG_FOLDER_SECONDS - 10):  # a clock may have been put back meanwhile
        (left / TOKEN).touch()
        make_old(left, age)
        sweep(str(base))
        assert left.exists()
        assert not (left / TOKEN).exists(), "what proves membership goes at once"


def is_locked(path: Path) -> bool:
    if not path.exists():
        return False
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def test_a_folder_in_which_a_rank_lives_stays(base: Path) -> None:
    """Elsewhere than on Linux ranks may outlive their keeper."""
    left = left_by_a_killed_keeper(base)
    holder = forked.Popen(["flock", str(left / "3.lock"), "sleep", "60"])
    try:
        wait_until(lambda: is_locked(left / "3.lock"))
        make_old(left)
        sweep(str(base))
        assert left.exists()
    finally:
        holder.kill()
        holder.wait(DEADLINE)


@pytest.mark.parametrize(
    "what", ["mode", "no lock", "another machine", "a link", "a file", "another name", "a link as lock"]
)
def test_what_is_not_certainly_an_abandoned_run_stays(base: Path, what: str) -> None:
    left = left_by_a_killed_keeper(base)
    kept = left
    if what == "mode":
        left.chmod(0o755)
    elif what == "no lock":
        (left / KEEPER_LOCK).unlink()
    elif what == "another machine":
        (left / KEEPER_LOCK).write_bytes(b"another boot id")
    elif what == "a link as lock":
        (left / KEEPER_LOCK).rename(base / "lock")
        (left / KEEPER_LOCK).symlink_to(base / "lock")
    elif what == "a link":
        kept = left.rename(base / "elsewhere")
        left.symlink_to(kept)
    elif what == "a file":
        kept = base / f"{RUN_FOLDER_PREFIX}file"
        kept.write_text("another user's")
    else:
        kept = left.rename(base / "covey-mine")
    make_old(kept)
    before = {path.name for path in kept.iterdir()} if kept.is_dir() else None
    sweep(str(base))
    assert kept.exists()
    assert before is None or before == {path.name for path in kept.iterdir()}


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user")
def test_a_folder_of_another_user_stays(base: Path) -> None:
    left = left_by_a_killed_keeper(base)
    os.chown(left, 12345, -1)
    make_old(left)
    sweep(str(base))
    assert left.exists()


def test_an_empty_folder_of_a_keeper_that_was_killed_at_once_goes(base: Path) -> None:
    empty = Path(tempfile.mkdtemp(prefix=RUN_FOLDER_PREFIX, dir=base))
    make_old(empty)
    sweep(str(base))
    assert not empty.exists()


def test_a_child_of_a_killed_keeper_does_not_keep_its_folder(base: Path) -> None:
    """A lock stays for as long as any process has it open."""
    code = HOLD.replace(
        "time.sleep(600)", "import os\nif os.fork() == 0:\n    print(os.getpid(), flush=True)\ntime.sleep(600)"
    )
    env = {**os.environ, "XDG_RUNTIME_DIR": str(base)}
    process = forked.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    left, child = Path(process.stdout.readline().strip()), int(process.stdout.readline())
    try:
        process.kill()
        process.wait(DEADLINE)
        make_old(left)
        sweep(str(base))
        assert not left.exists()
    finally:
        os.kill(child, signal.SIGKILL)
        process.stdout.close()


def test_a_fork_does_not_remove_its_parents_folder(base: Path) -> None:
    folder = RunFolder()
    path = Path(folder.path)
    pid = os.fork()
    if pid == 0:
        folder.remove()
        os._exit(0)
    os.waitpid(pid, 0)
    assert path.exists()
    folder.remove()
