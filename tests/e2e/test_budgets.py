"""What covey may cost: time to import and to start, and memory. Minimums, because machines are noisy."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.e2e.jobs import Job, finish, finish_all, new_job

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow


@pytest.fixture
def job() -> Iterator[Job]:
    with new_job() as job:
        yield job


def test_importing_covey_takes_at_most_1_6_times_as_long_as_importing_numpy(job: Job) -> None:
    def seconds(module: str) -> float:
        code = f"import time\nstart = time.perf_counter()\nimport {module}\nprint(time.perf_counter() - start)\n"
        return finish(job.start(code)).report

    seconds("covey")  # writes the bytecode, fills the page cache
    taken = [(seconds("numpy"), seconds("covey")) for _ in range(7)]
    numpy, covey = (min(column) for column in zip(*taken, strict=True))
    print(f"import numpy {numpy * 1e3:.0f} ms, import covey {covey * 1e3:.0f} ms: {covey / numpy:.2f}x")
    assert covey <= 1.6 * numpy


def test_covey_run_of_four_empty_scripts_takes_less_than_1_5_seconds(job: Job) -> None:
    taken = []
    for _ in range(3):
        start = time.perf_counter()
        process = job.start("", before=[sys.executable, "-m", "covey", "run", "-n", "4"])
        assert finish(process).code == 0
        taken.append(time.perf_counter() - start)
    print(f"covey run -n 4 of an empty script: {min(taken):.2f} s")
    assert min(taken) < 1.5
    assert job.left_behind() == []


@pytest.mark.parametrize("lanes", ["shm", "tcp"])
def test_a_large_all_reduce_needs_at_most_32_mebibytes_beside_its_array(job: Job, lanes: str) -> None:
    """The lanes, opened by this very call, are part of what it costs."""
    code = """
import json
from pathlib import Path
import numpy as np
import covey

def memory(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024

with covey.join() as group:
    x = np.tile(np.arange(1000, dtype=np.float32), 67_109)  # 256 MiB and a bit; every page is there before the call
    x += group.rank
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark falls to what is in use now
    before = memory("VmRSS")
    group.all_reduce(x)
    extra = memory("VmHWM") - before
    lanes = group.lanes()
print(json.dumps([extra, list(lanes.values()), float(x[7]), float(x[-1])]))
"""
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("needs the memory accounting of Linux")
    for ended in finish_all(job.ranks(code, 2, COVEY_LANES=lanes)):
        extra, kinds, *values = ended.report
        print(f"{lanes}: {extra:.1f} MiB more in an all_reduce of 256 MiB")
        assert kinds == [lanes]
        assert values == [15.0, 1999.0]
        assert extra <= 32


def test_an_array_of_more_than_4_gibibytes_is_reduced_to_its_last_byte(job: Job) -> None:
    lines = Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else []
    available = sum(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) >> 20
    if available < 11:
        pytest.skip(f"needs 11 GiB of memory; {available} are available")
    code = """
import json
import numpy as np
import covey

count = (4 << 30) + 3
marks = [np.append(np.arange(rank, count - 3, 65_537), count - 1 - rank) for rank in range(2)]
values = [(mark // 65_537 * (rank + 3) % 254 + 1).astype(np.uint8) for rank, mark in enumerate(marks)]
with covey.join() as group:
    x = np.zeros(count, np.uint8)
    x[marks[group.rank]] = values[group.rank]
    group.all_reduce(x, op="max")
    right = [bool(np.array_equal(x[mark], value)) for mark, value in zip(marks, values)]
    others = int(np.count_nonzero(x)) - sum(map(len, marks))
    lanes = group.lanes()
print(json.dumps([right, others, list(lanes.values())]))
"""
    for ended in finish_all(job.ranks(code, 2, COVEY_LANES="shm"), 100.0):
        assert ended.report == [[True, True], 0, ["shm"]]
