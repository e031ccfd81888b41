"""Run tests while their processes are stopped for random moments: `python -m tools.stress --rounds 3 -- tests/io`.

A test that depends on which of two processes is faster passes for years on a quiet machine. Here a freezer stops
processes of the tests, each time all of them, half of them or one, for 0.3 to 1 s, as a machine that stands still does.
Tests marked `alone` are left out: they promise times.

The freezer uses a cgroup (version 2, usually as root), which the stopped processes cannot notice in any other way than
by the time that has passed. Where that is not permitted it stops all processes with SIGSTOP.

Each round has a seed, which decides the moments. It is printed with the tests that failed; `--seed N --rounds 1`
repeats the round, though not to the microsecond.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from tests.support.guard import descendants

if TYPE_CHECKING:
    from collections.abc import Iterator

FROZEN_SECONDS: Final = (0.3, 1.0)
RUNNING_SECONDS: Final = (0.5, 3.0)
FAILED: Final = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


class Freezer(Protocol):
    """Stops processes and lets them go on."""

    is_exact: bool
    """Whether a part of the processes can be stopped without the others noticing more than their silence."""

    def freeze(self, pids: list[int]) -> None: ...

    def thaw(self) -> None: ...


class CgroupFreezer:
    """Moves processes into a frozen cgroup, and thaws it."""

    is_exact = True

    def __init__(self, mount: Path) -> None:
        self._folder = mount / f"covey-stress-{os.getpid()}"
        self._folder.mkdir()
        self._outside = mount / "cgroup.procs"

    def freeze(self, pids: list[int]) -> None:
        (self._folder / "cgroup.freeze").write_text("1")
        for pid in pids:
            _move(pid, self._folder / "cgroup.procs")

    def thaw(self) -> None:
        (self._folder / "cgroup.freeze").write_text("0")
        for _ in range(100):  # a process may fork while it is moved
            inside = (self._folder / "cgroup.procs").read_text().split()
            if not inside:
                return
            for pid in inside:
                _move(int(pid), self._outside)

    def close(self) -> None:
        self.thaw()
        with contextlib.suppress(OSError):
            self._folder.rmdir()


class SignalFreezer:
    """Stops processes with SIGSTOP, parents first, and continues them, children first; spares those stopped before."""

    is_exact = False

    def __init__(self) -> None:
        self._stopped: list[int] = []

    def freeze(self, pids: list[int]) -> None:
        for pid in pids:
            if _state(pid) not in ("T", "Z", ""):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
                    self._stopped.append(pid)

    def thaw(self) -> None:
        while self._stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._stopped.pop(), signal.SIGCONT)

    def close(self) -> None:
        self.thaw()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.stress", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=None, help="of the first round; default: chosen at random")
    parser.add_argument("--workers", type=int, default=4, help="tests at a time")
    parser.add_argument("pytest", nargs="*", default=["tests"], help="what to run; default: tests")
    options = parser.parse_args()
    first = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    failures: dict[str, list[int]] = defaultdict(list)
    with _freezer() as freezer:
        for seed in range(first, first + options.rounds):
            print(f"seed {seed}", flush=True)
            for test in run(freezer, seed, options.workers, options.pytest):
                failures[test].append(seed)
    for test, seeds in sorted(failures.items()):
        print(f"{test} failed with seed {', '.join(map(str, seeds))}")
    sys.exit(1 if failures else 0)


def run(freezer: Freezer, seed: int, workers: int, words: list[str]) -> list[str]:
    """Run tests under a freezer; return those that failed."""
    chance = random.Random(seed)
    command = [sys.executable, "-m", "pytest", "-q", "--workers", str(workers), "-m", "not alone and not thorough"]
    command += ["-p", "no:cacheprovider", *words]
    tests = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    said: list[str] = []
    assert tests.stdout is not None
    reader = threading.Thread(target=_pass_on, args=(tests.stdout, said))
    reader.start()
    try:
        while tests.poll() is None:
            time.sleep(chance.uniform(*RUNNING_SECONDS))
            pids = descendants(tests.pid)[1:]  # the one that prints goes on
            if freezer.is_exact and pids:
                pids = chance.choice([pids, [pid for pid in pids if chance.random() < 0.5], [chance.choice(pids)]])
            try:
                freezer.freeze(pids)
                time.sleep(chance.uniform(*FROZEN_SECONDS))
            finally:
                freezer.thaw()
    except BaseException:
        os.killpg(tests.pid, signal.SIGKILL)
        raise
    finally:
        tests.wait()
        reader.join()
    failed = FAILED.findall("".join(said))
    if tests.returncode and not failed:
        failed = [f"pytest ended with {tests.returncode}, which"]
    return failed


@contextlib.contextmanager
def _freezer() -> Iterator[Freezer]:
    freezer: CgroupFreezer | SignalFreezer = SignalFreezer()
    for line in Path("/proc/mounts").read_text().splitlines():
        _, mount, kind, *_ = line.split()
        if kind == "cgroup2":
            with contextlib.suppress(OSError):
                freezer = CgroupFreezer(Path(mount))
    try:
        yield freezer
    finally:
        freezer.close()


def _state(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def _move(pid: int, procs: Path) -> None:
    with contextlib.suppress(OSError):  # it has ended
        procs.write_text(str(pid))


def _pass_on(lines: Iterator[str], said: list[str]) -> None:
    for line in lines:
        said.append(line)
        print(line, end="", flush=True)


if __name__ == "__main__":
    main()
