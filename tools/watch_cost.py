"""Measure what a watcher costs the ranks that it watches, with `covey status --watch` and without, in turns.

    python -m tools.watch_cost [ROUNDS] [SECONDS]

Two ranks of one machine add a number again and again: how long all_reduce of 4 bytes takes, of which the fastest tenth
of the blocks of 500 operations counts. Then they sleep: how much processor time a rank takes for its answers, one a
second. The second figure says the same on a busy machine; the first needs a core for each rank and the watcher.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PROGRAM = """
import json, os, sys, time
import numpy as np
import covey

with covey.join() as group, open(sys.argv[1], "w") as file:
    x, times = np.zeros(1, np.float32), np.empty(500)
    group.report(step=1, loss=2.0, samples=3)
    print(os.getpid(), flush=True)
    while os.path.exists(sys.argv[2]):
        time.sleep(3600)
    while True:
        for each in range(len(times)):
            began = time.perf_counter()
            group.all_reduce(x)
            times[each] = time.perf_counter() - began
        if group.rank == 0:
            print(json.dumps([time.monotonic(), float(np.median(times))]), file=file, flush=True)
"""


@contextlib.contextmanager
def running(words: list[str], home: Path) -> Iterator[subprocess.Popen[str]]:
    env = {**os.environ, "COVEY_HOME": str(home), "XDG_RUNTIME_DIR": str(home)}
    process = subprocess.Popen([sys.executable, "-m", "covey", *words], env=env, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def fastest(path: Path, begin: float, end: float) -> float:
    """Return below what the fastest tenth of the medians is that were written between two times."""
    rows: list[tuple[float, float]] = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("]")]
    return statistics.quantiles([median for at, median in rows if begin < at < end], n=10, method="inclusive")[0]


def processor_seconds(pid: int) -> float:
    """Return what a process has used of its cores so far."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def compare(home: Path, rounds: int, measure: Callable[[], float], unit: str) -> list[tuple[float, float]]:
    """Return what `measure` returns alone and watched, for each round."""
    found: list[tuple[float, float]] = []
    for number in range(rounds):
        each: dict[bool, float] = {}
        for is_watched in (False, True) if number % 2 else (True, False):
            with contextlib.ExitStack() as stack:
                if is_watched:
                    watcher = stack.enter_context(running(["status", "--watch", "--json"], home))
                    assert watcher.stdout is not None
                    watcher.stdout.readline()  # from then on it asks
                each[is_watched] = measure()
        found.append((each[False], each[True]))
        print(f"{number + 1}: {each[False]:.2f} {unit} alone, {each[True]:.2f} {unit} watched", flush=True)
    return found


def main() -> None:
    rounds, seconds = (int(word) for word in [*sys.argv[1:], *("9", "5")[len(sys.argv) - 1 :]])
    with tempfile.TemporaryDirectory() as made:
        home, script, path, rest = (Path(made) / name for name in ("", "sums.py", "times", "rest"))
        home.chmod(0o700)
        script.write_text(PROGRAM)
        words = ["run", "-n", "2", str(script), str(path), str(rest)]
        with running(words, home) as run:
            ready(run)

            def microseconds() -> float:
                begin = time.monotonic()
                time.sleep(seconds)
                return fastest(path, begin, time.monotonic()) * 1e6

            sums = compare(home, rounds, microseconds, "us")
        rest.touch()
        with running(words, home) as run:
            pids = ready(run)

            def used() -> float:
                begin = sum(map(processor_seconds, pids))
                time.sleep(seconds)
                return (sum(map(processor_seconds, pids)) - begin) / len(pids) / seconds * 1e6

            idle = compare(home, rounds, used, "us of a core a second")
    ratios = sorted(watched / alone for alone, watched in sums)
    costs = sorted(watched - alone for alone, watched in idle)
    print(
        f"all_reduce of 4 B: watched by alone {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})\n"
        f"an answer a second: {statistics.median(costs):.0f} us of a core ({costs[0]:.0f} to {costs[-1]:.0f}), "
        f"{statistics.median(costs) / 1e4:.3f} %\n"
        f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    )


def ready(run: subprocess.Popen[str]) -> list[int]:
    """Return the processes of the two ranks once both are in their group."""
    assert run.stdout is not None
    return [int(run.stdout.readline().split()[-1]) for _ in range(2)]


if __name__ == "__main__":
    main()
