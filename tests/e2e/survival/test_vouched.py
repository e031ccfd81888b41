"""Ranks that are slow are not lost: their keeper sees in the kernel that they live."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.support import forked
from tests.support.waiting import DEADLINE

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a keeper sees only that a process exists"),
]

SOURCE = Path(__file__).parents[3] / "src"


def run(folder: Path, size: int, body: str, *options: str) -> tuple[int, dict[int, str], str]:
    """Return the exit code of a run, the last line of every rank and all errors."""
    (folder / "job.py").write_text(textwrap.dedent(body))
    words = [sys.executable, "-m", "covey", "run", "-n", str(size), *options, "job.py"]
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    ended = forked.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=DEADLINE)
    said = (re.fullmatch(r"\[(\d+)\] (.*)", line) for line in ended.stdout.splitlines())
    return ended.returncode, {int(line[1]): line[2] for line in said if line is not None}, ended.stderr


@contextlib.contextmanager
def load(count: int) -> Iterator[None]:
    """Keep the cores busy with something else."""
    busy = [forked.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def test_a_rank_whose_connections_all_break_while_it_is_busy_keeps_its_place(tmp_path: Path) -> None:
    """For three seconds it neither hears nor answers any process, its keeper included."""
    body = """
        import ctypes, os, socket, stat
        import covey, numpy as np

        def break_all_connections():
            for name in os.listdir("/proc/self/fd"):
                try:
                    if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                        with socket.socket(fileno=os.dup(int(name))) as connection:
                            if connection.getpeername() or connection.getsockname():  # else a pair of its own
                                connection.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass  # it listens, or has ended

        with covey.join(on_loss="continue") as group:
            group.all_reduce(np.ones(3))
            if group.rank == 1:
                break_all_connections()
                ctypes.PyDLL(None).usleep(3_000_000)  # keeps the interpreter's lock
            x = np.full(1000, group.rank + 1.0)
            group.all_reduce(x)
            print(group.contributors, x[0])
    """
    code, said, err = run(tmp_path, 4, body)
    assert said == dict.fromkeys(range(4), "(0, 1, 2, 3) 10.0"), err
    assert code == 0


def test_a_process_that_loses_its_place_between_two_generations_comes_back_by_itself(tmp_path: Path) -> None:
    """There the loop of a program cannot catch GroupChangedError: it would come out of `covey.generations()`."""
    body = """
        import os, signal, threading, time
        import covey, numpy as np

        for group in covey.generations():
            try:
                pids = group.all_gather_object(os.getpid())
                is_first = group.generation == 0
                if is_first and group.rank == 2:
                    os.kill(os.getpid(), signal.SIGKILL)  # and comes back, which is the change
                is_over = False
                while not is_over and not group.change_pending:
                    x = np.array([float(group.size == 3 and group.generation >= 2)])
                    group.all_reduce(x)
                    is_over = x[0] >= 3
                    time.sleep(0.01)
            except covey.GroupChangedError:
                continue
            if is_over:
                break
            if is_first and group.rank == 0:
                threading.Timer(2.0, os.kill, (pids[1], signal.SIGCONT)).start()
            if is_first and group.rank == 1:
                agree = group.all_gather_object

                def stop_first(value):
                    os.kill(os.getpid(), signal.SIGSTOP)
                    return agree(value)

                group.all_gather_object = stop_first
        print("over", group.generation >= 2, group.size)
    """
    code, said, err = run(tmp_path, 3, body, "--restarts", "1")
    assert said == dict.fromkeys(range(3), "over True 3"), err
    assert code == 0
    assert "rank 1 failed" not in err


@pytest.mark.parametrize(("size", "busy"), [(10, 0), pytest.param(24, 4, marks=pytest.mark.thorough)])
def test_two_kills_in_the_first_operation_of_many_ranks_cost_no_other_its_place(
    tmp_path: Path, size: int, busy: int
) -> None:
    body = """
        import os, signal, time
        import covey, numpy as np

        with covey.join(on_loss="continue") as group:
            if group.rank in (2, 5):
                time.sleep(0.1)  # the others are in the operation
                os.kill(os.getpid(), signal.SIGKILL)
            x = np.full(1000, group.rank + 1.0)
            group.all_reduce(x)
            assert x[0] == sum(rank + 1 for rank in group.contributors)
            group.all_reduce(x)
            print(len(group.contributors))
    """
    with load(busy):
        code, said, err = run(tmp_path, size, body)
    assert said == {rank: str(size - 2) for rank in range(size) if rank not in (2, 5)}, err
    assert code == 0
