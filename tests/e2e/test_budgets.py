"""What covey may cost: time to import and to start, and memory. Minimums, because machines are noisy."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.support.jobs import Job, finish, finish_all, new_job

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def job() -> Iterator[Job]:
    with new_job(subprocess.Popen) as job:
        yield job


@pytest.mark.alone
def test_importing_covey_takes_at_most_1_6_times_as_long_as_importing_numpy(job: Job) -> None:
    """Names are loaded on first use, so what every script needs of it is measured too, and may take twice as long."""
    statements = ["import numpy", "import covey", "from covey import join"]
    bytecode = {"PYTHONPYCACHEPREFIX": job.folder / "bytecode", "PYTHONDONTWRITEBYTECODE": ""}

    def seconds(statement: str) -> float:
        """Return the processor time, which other programs do not lengthen."""
        code = f"import time\nstart = time.thread_time()\n{statement}\nprint(time.thread_time() - start)\n"
        return finish(job.start(code, **bytecode)).report

    seconds(statements[-1])  # compiles everything, as an installer would
    rounds = [[seconds(statement) for statement in statements] for _ in range(7)]
    numpy, covey, join = (min(column) for column in zip(*rounds, strict=True))
    print(f"numpy {numpy * 1e3:.0f} ms, covey {covey / numpy:.2f}x, with join {join / numpy:.2f}x")
    assert covey <= 1.6 * numpy
    assert join <= 2 * numpy


@pytest.mark.alone
def test_covey_run_of_four_empty_scripts_takes_less_than_1_5_seconds(job: Job) -> None:
    taken = []
    for _ in range(3):
        start = time.perf_counter()
        process = job.start("", [sys.executable, "-m", "covey", "run", "-n", "4"])
        assert finish(process).code == 0
        taken.append(time.perf_counter() - start)
        if taken[-1] < 1.5:
            break
    print(f"covey run -n 4 of an empty script: {min(taken):.2f} s")
    assert min(taken) < 1.5
    assert job.left_behind() == []


@pytest.mark.alone
@pytest.mark.parametrize(("size", "seconds"), [(16, 2.0), (64, 6.0)])
def test_many_ranks_join_and_sum_quickly(job: Job, size: int, seconds: float) -> None:
    """On two cores."""
    code = """
import numpy as np, covey
with covey.join() as group:
    x = np.full(1, group.rank, np.float32)
    group.all_reduce(x)
    assert x[0] == sum(range(group.size))
"""
    taken = []
    for _ in range(3):
        start = time.perf_counter()
        process = job.start(code, [sys.executable, "-m", "covey", "run", "-n", str(size)])
        assert finish(process).code == 0
        taken.append(time.perf_counter() - start)
        if taken[-1] < seconds:
            break
    print(f"covey run -n {size} of a script that joins: {min(taken):.2f} s")
    assert min(taken) < seconds
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


@pytest.mark.alone
def test_an_array_of_more_than_4_gibibytes_arrives_to_its_last_byte(job: Job) -> None:
    lines = Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else []
    available = sum(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) >> 20
    if available < 7:
        pytest.skip(f"needs 7 GiB of memory; {available} are available")
    # The sender's array is mostly pages that were never written, which take no memory; the other's is all ones.
    code = """
import json
import numpy as np
import covey

count = (4 << 30) + 3
marks = np.append(np.arange(0, count - 3, (32 << 20) + 1), [count - 2, count - 1])
values = (np.arange(marks.size) % 255 + 1).astype(np.uint8)
with covey.join() as group:
    if group.rank == 1:
        x = np.zeros(count, np.uint8)
        x[marks] = values
    else:
        x = np.full(count, 255, np.uint8)
    group.broadcast(x, root=1)
    right = bool(np.array_equal(x[marks], values))
    others = int(np.count_nonzero(x)) - marks.size
    lanes = group.lanes()
print(json.dumps([right, others, list(lanes.values())]))
"""
    for ended in finish_all(job.ranks(code, 2, COVEY_LANES="shm"), 100.0):
        assert ended.report == [True, 0, ["shm"]]


@pytest.mark.alone
@pytest.mark.parametrize("lanes", ["shm", "tcp"])
def test_a_large_all_reduce_makes_at_most_12_python_calls_for_a_mebibyte_moved(job: Job, lanes: str) -> None:
    """Each call must win the interpreter's lock back from the program's other threads."""
    code = """
import json, sys
import numpy as np
import covey

mebibytes = 64
with covey.join() as group:
    x = np.arange(mebibytes << 18, dtype=np.float32) + group.rank
    events = 0
    def count(frame, event, argument):
        global events
        events += event in ("call", "c_call")
    counts = []
    for turn in range(25):
        group.barrier()
        events = 0
        sys.setprofile(count)
        group.all_reduce(x, op="mean")
        sys.setprofile(None)
        counts.append(events)
    lanes = group.lanes()
moved = 2 * mebibytes  # two ranks: each sends and receives as much as the array holds
print(json.dumps([min(counts[1:]) / moved, list(lanes.values()), float(x[1])]))
"""
    for ended in finish_all(job.ranks(code, 2, COVEY_LANES=lanes)):
        calls, kinds, value = ended.report
        assert kinds == [lanes]
        assert value == 1.5
        assert calls <= 12
