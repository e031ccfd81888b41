"""Programs that an agent starts: their output, ends, limits, and what happens when their terminal is gone."""

from __future__ import annotations

import contextlib
import signal
import sys
import types
from typing import TYPE_CHECKING

import pytest
from tests.support.waiting import DEADLINE, wait_until

from covey.agent import jobs
from covey.agent.jobs import JobTable, StartedJob
from covey.agent.requests import StartRequest
from covey.base.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def table(tmp_path: Path) -> Iterator[JobTable]:
    made = JobTable(tmp_path / "jobs", lambda _job: None)
    yield made
    for job in made.all():
        job.send_signal(signal.SIGKILL)
    made.close()


def start(table: JobTable, folder: Path, program: str, *, run: str = "train", lease: float = 0.0) -> StartedJob:
    """Start a shell script, which takes less time than an interpreter."""
    request = StartRequest(run, 1, (), ("script",), lease=lease)
    return table.start(request, ["sh", "-c", program], folder, "north-ab12")


def output(job: StartedJob) -> bytes:
    batch, found = job.log.read(0), b""
    while batch.records:
        found += b"".join(data for _, data in batch.records)
        batch = job.log.read(batch.next)
    return found


def test_output_and_exit_code_are_there_when_the_program_has_ended(table: JobTable, tmp_path: Path) -> None:
    job = start(table, tmp_path, "echo out; echo err >&2; pwd; exit 3")
    assert job.has_ended.wait(DEADLINE)
    assert sorted(output(job).decode().splitlines()) == sorted(["out", "err", str(tmp_path)])
    assert (job.report().code, job.report().run, job.report().started_by) == (3, "train", "north-ab12")


def test_a_program_that_cannot_be_started_is_an_error_and_not_a_job_that_runs(table: JobTable, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot start /nowhere"):
        table.start(StartRequest("train", 1, (), ("x",)), ["/nowhere"], tmp_path, "")
    assert not table.is_running("train")


def test_a_run_that_runs_is_not_started_twice_and_the_limits_hold(
    table: JobTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "RUNNING_LIMIT", 2)
    first = start(table, tmp_path, "sleep 60")
    with pytest.raises(ConfigError, match="'train' runs here already; `covey stop train`"):
        start(table, tmp_path, "true")
    start(table, tmp_path, "sleep 60", run="other")
    with pytest.raises(ConfigError, match="2 programs run here already"):
        start(table, tmp_path, "true", run="third")
    first.send_signal(signal.SIGTERM)
    assert first.has_ended.wait(DEADLINE)
    assert first.report().code == 143
    start(table, tmp_path, "true")


def test_a_flood_of_starts_is_slowed_down_and_ended_programs_are_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    clock = types.SimpleNamespace(monotonic=lambda: now)
    table = JobTable(tmp_path / "jobs", lambda _job: None)
    monkeypatch.setattr(jobs, "time", clock)  # starts take no time
    burst, refusals = int(jobs.STARTS_BURST), list[str]()

    def started(count: int) -> int:
        """Start programs one after the other, until one is refused; return how many were not."""
        for number in range(count):
            try:
                job = start(table, tmp_path, "true", run=f"run {number}")
            except ConfigError as error:
                refusals.append(str(error))
                return number
            assert job.has_ended.wait(DEADLINE)
        return count

    assert started(2 * burst) == burst
    now += 4 / jobs.STARTS_RATE
    assert started(2 * burst) == 4
    assert all("too many programs were started" in text for text in refusals)
    assert len(table.all()) <= jobs.ENDED_LIMIT + 1
    assert len(list((tmp_path / "jobs").iterdir())) == len(table.all())


def test_a_program_whose_terminal_is_gone_is_ended_after_its_lease(
    table: JobTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, looks = 1000.0, list[float]()
    look = StartedJob._look
    monkeypatch.setattr(jobs, "time", types.SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(jobs, "LEASE_CHECK_EVERY", 0.01)

    def note(job: StartedJob, at: float) -> None:
        look(job, at)
        looks.append(at)

    monkeypatch.setattr(StartedJob, "_look", note)
    job = start(table, tmp_path, "exec sleep 600", lease=20.0)
    with job.followed():
        now += 100
        wait_until(lambda: now in looks)
        assert output(job) == b""
    now += 19
    wait_until(lambda: now in looks)
    assert output(job) == b""
    now += 2
    assert job.has_ended.wait(DEADLINE)
    assert b"the terminal has been gone for 20 s" in output(job)


def test_a_detached_program_needs_no_terminal(table: JobTable, tmp_path: Path) -> None:
    job = start(table, tmp_path, "sleep 1.5; echo done")
    assert job.has_ended.wait(DEADLINE)
    assert output(job) == b"done\n"


def test_closing_ends_all_programs(tmp_path: Path) -> None:
    table = JobTable(tmp_path / "jobs", lambda _job: None)
    running = [start(table, tmp_path, "exec sleep 60", run=str(number)) for number in range(3)]
    table.close()
    assert [job.report().code for job in running] == [143] * 3
    with pytest.raises(ConfigError, match="is being stopped"):
        start(table, tmp_path, "true")


def test_a_program_that_floods_is_not_slowed_down_by_a_reader_and_fills_no_disk(
    table: JobTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("covey.agent.jobs.LOG_BYTES", 4 << 20)
    job = start(table, tmp_path, "head -c 20000000 /dev/zero")
    assert job.has_ended.wait(DEADLINE)
    assert sum(path.stat().st_size for path in (tmp_path / "jobs").rglob("output-*")) <= 4 << 20
    assert job.log.read(0).missing > 15_000_000


def test_the_command_is_a_covey_run_with_the_options_of_all_machines() -> None:
    request = StartRequest("my run", 2, ("--size", "4"), ("train.py", "--lr", "0.1"))
    assert jobs.command(request, "home", "/venv/bin/python") == [
        sys.executable, "-m", "covey", "run", "--run", "my run", "--cluster", "home", "-n", "2",
        "--python", "/venv/bin/python", "--size", "4", "train.py", "--lr", "0.1",
    ]  # fmt: skip


@pytest.mark.parametrize("run", ["", "a\nb", "x" * 101, "a\x1b[0m"])
def test_a_request_with_an_impossible_name_is_refused(run: str) -> None:
    with pytest.raises(ConfigError, match="1 to 100 printable"):
        StartRequest(run, 1, (), ("x",))


def test_programs_do_not_inherit_what_tells_a_process_its_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COVEY_RUN", "COVEY_SECRET", "COVEY_RANK", "COVEY_SECRET_FD"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("MY_VARIABLE", "x")
    inherited = jobs.environment()
    assert inherited["MY_VARIABLE"] == "x"
    assert not {"COVEY_RUN", "COVEY_SECRET", "COVEY_RANK", "COVEY_SECRET_FD"} & inherited.keys()


def test_programs_die_with_their_agent(tmp_path: Path) -> None:
    import subprocess

    script = f"""
import sys, pathlib
sys.path[:0] = {sys.path!r}
from covey.agent.jobs import JobTable
from covey.agent.requests import StartRequest
table = JobTable(pathlib.Path({str(tmp_path / "jobs")!r}), lambda job: None)
job = table.start(StartRequest("train", 1, (), ("x",)), ["sleep", "60"], pathlib.Path("/"), "")
print(job._child.pid, flush=True)
sys.stdin.read()
"""
    agent = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert agent.stdout is not None
    assert agent.stdin is not None
    with agent.stdout, agent.stdin:
        pid = int(agent.stdout.readline())
        agent.kill()
        agent.wait(DEADLINE)

        def is_gone() -> bool:
            with contextlib.suppress(FileNotFoundError), open(f"/proc/{pid}/stat") as file:
                return file.read().split()[2] == "Z"
            return True

        wait_until(is_gone)
