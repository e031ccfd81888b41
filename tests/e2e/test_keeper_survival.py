"""`covey run` of a run that survives losses: which ranks are lost, which are started again, and the exit code.

The ranks here talk to their keeper as those of a real run do, but have no group: it is the keeper that is looked at.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.support import forked
from tests.support.waiting import DEADLINE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SOURCE = Path(__file__).parents[2] / "src"
PRELUDE = """
import os, signal, subprocess, sys, time
from pathlib import Path

rank, size = int(os.environ["COVEY_RANK"]), int(os.environ["COVEY_SIZE"])
start = int(os.environ.get("COVEY_RESTART", "0"))

def found(on_loss="continue"):
    '''Tell the keeper of a generation of this process, and return when it has heard.'''
    import asyncio, secrets
    from covey.runtime.links.handshake import LinkCredentials, dial
    from covey.wire import messages as m

    async def tell():
        card = m.Card(b"", secrets.token_bytes(16), "", "", os.getpid(), m.Contact("", (), ""))
        token = os.read(int(os.environ["COVEY_TOKEN_FD"]), 100)
        hello = m.Hello(m.VERSION, secrets.token_bytes(32), "kept", "", rank, size, "auto", card)
        link, _, _ = await dial(os.environ["COVEY_KEEPER"], LinkCredentials.of_token(token), hello)
        link.send(m.encode(m.Founded(1, b"l" * 16, False, (m.SeatedMember(rank, card),), on_loss)))
        link.send(m.encode(m.Ping(1)))
        while not isinstance(m.decode_control(await link.receive()), m.Pong):
            pass
        link.abort()
        await link.ended.wait()

    asyncio.run(tell())
    Path("founded").touch()

def wait_for(name):
    deadline = time.monotonic() + 500
    while not Path(name).exists():
        assert time.monotonic() < deadline, name
        time.sleep(0.005)

def wait_for_end_of(other):
    '''Return when the keeper has seen the end of another rank.'''
    wait_for(f"pid{other}")
    deadline = time.monotonic() + 500
    try:
        while time.monotonic() < deadline:
            os.kill(int(Path(f"pid{other}").read_text()), 0)
            time.sleep(0.005)
    except ProcessLookupError:
        return

def die():
    os.kill(os.getpid(), signal.SIGKILL)

Path(f"draft{rank}").write_text(str(os.getpid()))
Path(f"draft{rank}").rename(f"pid{rank}")
"""


@pytest.fixture
def covey_run(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start `covey run` of a body of code that every rank executes; nothing may be left of it."""
    runtime = tempfile.mkdtemp(prefix="t-", dir="/tmp")
    keepers: list[subprocess.Popen[str]] = []

    def start(body: str, *words: str, keeper: tuple[str, ...] = ("-m", "covey", "run")) -> subprocess.Popen[str]:
        (tmp_path / "job.py").write_text(PRELUDE + textwrap.dedent(body))
        pipe = subprocess.PIPE
        env = {**os.environ, "PYTHONPATH": str(SOURCE), "XDG_RUNTIME_DIR": runtime}
        command = [sys.executable, *keeper, *words, "job.py"]
        keepers.append(forked.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=tmp_path, env=env))
        return keepers[-1]

    try:
        yield start
        assert os.listdir(runtime) == []
    finally:
        for process in keepers:
            process.kill()
            process.communicate(timeout=DEADLINE)
        shutil.rmtree(runtime)


def finish(keeper: subprocess.Popen[str]) -> tuple[int, list[str], list[str]]:
    out, err = keeper.communicate(timeout=DEADLINE)
    return keeper.returncode, sorted(out.splitlines()), err.splitlines()


def test_the_others_go_on_without_a_rank_that_is_lost(covey_run) -> None:
    body = """
        if rank == 2:
            found()
            die()
        wait_for("founded")
        time.sleep(1.5)  # longer than others have before a keeper stops them
        print("done", rank)
    """
    code, out, err = finish(covey_run(body, "-n", "3"))
    assert (code, out) == (0, ["[0] done 0", "[1] done 1"])
    assert err == ["covey: rank 2 was killed by SIGKILL; the others continue"]


def test_the_code_of_the_last_is_that_of_a_run_that_lost_all(covey_run) -> None:
    body = """
        if rank == 0:
            found()
            sys.exit(3)
        wait_for_end_of(0)
        sys.exit(5)
    """
    code, _, err = finish(covey_run(body, "-n", "2"))
    assert code == 5
    assert err == [
        "covey: rank 0 failed with exit code 3; the others continue",
        "covey: rank 1 failed with exit code 5",
    ]


@pytest.mark.parametrize("policy", ["raise", None])
def test_without_survival_a_failure_stops_all_whatever_restarts_there_are(covey_run, policy) -> None:
    body = f"""
        if rank == 1:
            if {policy!r}:
                found({policy!r})
            sys.exit(7)
        signal.pause()
    """
    code, _, err = finish(covey_run(body, "-n", "2", "--restarts", "3"))
    assert code == 7
    assert err == ["covey: rank 1 failed with exit code 7; stopping the others"]


def test_a_rank_that_fails_is_started_again_in_its_place(covey_run) -> None:
    body = """
        if rank == 0:
            found()
            wait_for("back")
        else:
            wait_for("founded")
            print("start", start, "as", rank, "of", size, len(os.read(int(os.environ["COVEY_TOKEN_FD"]), 100)))
            if start == 0:
                child = subprocess.Popen(["sleep", "1000"])
                Path("child").write_text(str(child.pid))
                sys.stdout.write("unfinished words")
                sys.exit(4)
            if start == 1:
                state = Path("/proc", Path("child").read_text(), "stat")
                print("child left:", state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z")
                die()
            Path("back").touch()
        print("done", rank)
    """
    code, out, err = finish(covey_run(body, "-n", "2", "--restarts", "2"))
    assert code == 0
    assert out == sorted([
        "[1] start 0 as 1 of 2 32", "[1] unfinished words",
        "[1] start 1 as 1 of 2 32", "[1] child left: False",
        "[1] start 2 as 1 of 2 32", "[0] done 0", "[1] done 1",
    ])  # fmt: skip
    assert err == [
        "covey: rank 1 failed with exit code 4; starting it again (1 of 2)",
        "covey: rank 1 was killed by SIGKILL; starting it again (2 of 2)",
    ]


def test_a_rank_that_fails_too_often_is_lost(covey_run) -> None:
    body = """
        if rank == 0:
            found()
            wait_for("last")
            sys.exit(0)
        wait_for("founded")
        if start == 1:
            Path("last").touch()
        sys.exit(6)
    """
    code, _, err = finish(covey_run(body, "-n", "2", "--restarts", "1"))
    assert code == 0
    assert err[0] == "covey: rank 1 failed with exit code 6; starting it again (1 of 1)"
    assert err[1].startswith("covey: rank 1 failed with exit code 6")  # whether the other has ended by then or not


def test_no_rank_is_started_again_for_a_run_that_is_over(covey_run) -> None:
    body = """
        if rank == 1:
            wait_for("founded")
            sys.exit(0)
        print("start", start)
        found()
        wait_for_end_of(1)
        die()
    """
    code, out, err = finish(covey_run(body, "-n", "2", "--restarts", "5"))
    assert (code, out, err) == (0, ["[0] start 0"], ["covey: rank 0 was killed by SIGKILL"])


def test_sigterm_drains_a_run_and_ends_what_waits_to_be_started_again(covey_run) -> None:
    body = """
        if rank == 0:
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
            found()
            Path("ready").touch()
            while True:
                time.sleep(0.05)
        wait_for("ready")
        die()
    """
    keeper = covey_run(body, "-n", "2", "--restarts", "9")
    for _ in range(4):  # from here on the pause is 1.6 s
        line = keeper.stderr.readline()
    assert line == "covey: rank 1 was killed by SIGKILL; starting it again (4 of 9)\n"
    keeper.send_signal(signal.SIGTERM)
    code, _, err = finish(keeper)
    assert (code, err) == (0, ["covey: SIGTERM: stopping…"])


def test_the_rank_that_failed_is_named_though_one_that_lost_it_ends_before(covey_run) -> None:
    """Rank 0 only loses its peer, and the keeper sees the end of rank 0 before that of rank 2."""
    body = """
        import atexit
        import numpy as np
        import covey

        group = covey.join()
        group.barrier()
        if rank == 1:
            wait_for_end_of(0)
            sys.exit(1)
        if rank == 2:
            atexit.register(wait_for_end_of, 0)
            signal.signal(signal.SIGALRM, lambda *_: 1 / 0)
            signal.setitimer(signal.ITIMER_REAL, 0.2)  # while rank 1 is waited for
        group.all_reduce(np.ones(10))
    """
    code, _, err = finish(covey_run(body, "-n", "3"))
    assert code == 1
    told = [line for line in err if line.startswith("covey: ") and "failed" in line]
    assert told[0].startswith("covey: rank 2 failed"), err


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_restarts_cost_the_keeper_nothing_that_it_keeps(covey_run) -> None:
    keeper = """
        import sys
        from covey.base.pace import Growing
        from covey.runtime.keeper import supervisor
        from covey.runtime.keeper.keeper import LocalRun
        supervisor.RESTARTS = Growing(0.01, 0.01)
        class Counted(LocalRun):
            def __exit__(self, *exception):
                print("processes", len(list(self.children)))
                super().__exit__(*exception)
        sys.exit(supervisor.keep(lambda: Counted(2), [sys.executable, "job.py"], restarts=12))
    """
    body = """
        if rank == 0:
            found()
            wait_for("last")
            sys.exit(0)
        wait_for("founded")
        def count_open():
            return len(os.listdir(f"/proc/{os.getppid()}/fd"))
        if start == 2:
            Path("open").write_text(str(count_open()))
        if start > 1:
            before, deadline = int(Path("open").read_text()), time.monotonic() + 500
            while (now := count_open()) > before and time.monotonic() < deadline:
                time.sleep(0.005)  # it may be about to close one
            print("no more open:", now <= before)
        if start == 12:
            Path("last").touch()
        sys.exit(1)
    """
    code, out, _ = finish(covey_run(body, keeper=("-c", textwrap.dedent(keeper))))
    assert code == 0
    assert out == [*11 * ["[1] no more open: True"], "processes 2"]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells of stopped processes")
def test_a_group_goes_on_under_its_keeper_when_ranks_are_killed_and_stopped(covey_run, tmp_path, monkeypatch) -> None:
    """The keeper tells the others: by the silence of a rank they would notice nothing."""
    monkeypatch.setenv("COVEY_HOST_SILENCE", str(DEADLINE))
    monkeypatch.setenv("COVEY_PROCESS_SILENCE", str(DEADLINE))
    body = """
        import covey, numpy as np
        with covey.join() as group:
            def total():
                return float(group.all_reduce(np.full(5, 10.0**rank))[3])
            assert total() == 1111
            if rank == 0:
                die()
            assert total() == 1110
            if rank == 2:
                os.kill(os.getpid(), signal.SIGSTOP)
            print(rank, group.rank, total())
    """
    keeper = covey_run(body, "-n", "4", "--on-loss", "continue")
    said = sorted(keeper.stdout.readline() for _ in range(2))
    assert said == ["[1] 1 1 1010.0\n", "[3] 3 3 1010.0\n"]
    os.kill(int((tmp_path / "pid2").read_text()), signal.SIGCONT)
    code, _, err = finish(keeper)
    assert code == 0
    assert "covey: rank 0 was killed by SIGKILL; the others continue" in err
    assert any("GroupChangedError" in line for line in err)


def test_a_rank_that_is_lost_shortly_before_the_end_does_not_begin_the_run_again(covey_run) -> None:
    body = """
        import covey, numpy as np
        print("told", os.environ["RANK"][:9], os.environ.get("WORLD_SIZE"))
        for group in covey.generations(min_size=1):
            print("begins", group.generation, group.size)
            group.all_reduce(np.ones(3))
            if rank == 2 and start == 0:
                die()
            assert group.all_reduce(np.ones(3))[0] == 2, "the run began again"
            break
    """
    code, out, err = finish(covey_run(body, "-n", "3", "--restarts", "2"))
    assert code == 0, err
    begun = [line for line in out if "begins" in line]
    assert begun == [f"[{rank}] begins 0 3" for rank in range(3)], err
    # Whether it is restarted depends on whether the others have ended by then.
    told = [line for line in out if "told" in line]
    assert told[:2] + told[-1:] == ["[0] told 0 3", "[1] told 1 3", told[-1]]
    assert set(told[2:]) <= {"[2] told 2 3", "[2] told not known None"}
