"""`launch`: functions as ranks in real processes; results by rank, the root cause of failures, nothing left behind."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from multiprocessing import util
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.support import forked
from tests.support.launched import (
    PickyError,
    array_of,
    fail_in_rank_1,
    finish_all_but_rank_1,
    leave_a_child,
    place_and_sum,
    sum_among_survivors,
)
from tests.support.waiting import DEADLINE, wait_until

from covey.base.errors import ConfigError, DeadlineError, PeerLostError, RankFailedError
from covey.runtime.keeper import launch as launching
from covey.runtime.keeper.launch import launch

if TYPE_CHECKING:
    from collections.abc import Iterator

SOURCE = Path(__file__).parents[2] / "src"


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A private folder with a short path, which must be empty again after each test."""
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder)
        assert list(Path(folder).iterdir()) == []


@pytest.fixture
def ranks_are_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork ranks from a process that has imported covey, where a test asks for what they return or raise."""

    def spawn(_path: object, args: list[Any], descriptors: list[int]) -> int:
        words = [os.fsdecode(word) for word in args]
        process = forked.Popen([word for word in words if word != "-B"], pass_fds=descriptors)
        process.returncode = 0  # launch waits for it by its number
        return process.pid

    monkeypatch.setattr(util, "spawnv_passfds", spawn)
    main = sys.modules["__main__"]  # pytest's, which ranks would import
    monkeypatch.setattr(main, "__spec__", None)
    monkeypatch.delattr(main, "__file__")


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.usefixtures("ranks_are_forked")
def test_results_come_back_by_rank() -> None:
    results = launch(place_and_sum, 2, 10, "egg", timeout=DEADLINE)
    expected = np.arange(5.0) * 20 + 1
    for rank, (own, size, word, total) in enumerate(results):
        assert (own, size, word) == (rank, 2, "egg")
        np.testing.assert_array_equal(total, expected)


@pytest.mark.usefixtures("ranks_are_forked")
def test_large_results_come_back_whole() -> None:
    results = launch(array_of, 2, 3_000_001, timeout=DEADLINE)
    for rank, result in enumerate(results):
        np.testing.assert_array_equal(result, np.arange(3_000_001) * (rank + 1))


@pytest.mark.usefixtures("ranks_are_forked")
def test_the_root_cause_is_raised_and_not_what_others_lost_by_it() -> None:
    with pytest.raises(ValueError, match="one is not enough") as caught:
        launch(fail_in_rank_1, 2, "value", timeout=DEADLINE)
    (note,) = caught.value.__notes__
    assert note.startswith("raised in rank 1 of 2\n")
    assert 'raise ValueError("one is not enough")' in note
    assert "fail_in_rank_1" in note


@pytest.mark.usefixtures("ranks_are_forked")
def test_an_exception_keeps_its_fields() -> None:
    with pytest.raises(PickyError, match="fields kept") as caught:
        launch(fail_in_rank_1, 2, "picky", timeout=DEADLINE)
    assert caught.value.code == 17


@pytest.mark.usefixtures("ranks_are_forked")
@pytest.mark.parametrize(
    ("kind", "text"),
    [pytest.param("secretive", "cannot travel", marks=pytest.mark.thorough), ("exit", "SystemExit: 3")],
)
def test_what_cannot_be_raised_here_becomes_a_rank_failure_with_its_traceback(kind: str, text: str) -> None:
    with pytest.raises(RankFailedError, match="rank 1 of 2 failed") as caught:
        launch(fail_in_rank_1, 2, kind, timeout=DEADLINE)
    assert caught.value.rank == 1
    assert text in str(caught.value)
    assert "fail_in_rank_1" in str(caught.value)


def test_a_killed_rank_is_named_with_its_signal() -> None:
    with pytest.raises(RankFailedError, match="rank 1 of 2 was killed by SIGKILL") as caught:
        launch(fail_in_rank_1, 2, "kill", timeout=DEADLINE)
    assert (caught.value.rank, caught.value.exit_code) == (1, -signal.SIGKILL)


@pytest.mark.usefixtures("ranks_are_forked")
def test_a_rank_that_dies_has_no_result_where_the_others_go_on() -> None:
    results = launch(sum_among_survivors, 3, (1,), timeout=DEADLINE, on_loss="continue")
    assert results == [((0, 2), 101.0), None, ((0, 2), 101.0)]


@pytest.mark.usefixtures("ranks_are_forked")
@pytest.mark.thorough
def test_a_run_that_loses_all_its_ranks_has_failed() -> None:
    with pytest.raises(RankFailedError, match=r"rank \d of 2 was killed by SIGKILL"):
        launch(sum_among_survivors, 2, (0, 1), timeout=DEADLINE, on_loss="continue")


@pytest.mark.usefixtures("ranks_are_forked")
@pytest.mark.thorough
def test_what_a_function_raises_ends_ranks_that_would_go_on_too() -> None:
    with pytest.raises(ValueError, match="one is not enough"):
        launch(fail_in_rank_1, 3, "value", timeout=DEADLINE, on_loss="continue")


@pytest.mark.usefixtures("ranks_are_forked")
@pytest.mark.thorough
def test_a_result_that_cannot_be_pickled_is_an_error_of_its_rank() -> None:
    with pytest.raises(Exception, match="pickle") as caught:
        launch(fail_in_rank_1, 2, "unpicklable result", timeout=DEADLINE)
    assert not isinstance(caught.value, PeerLostError)
    assert "raised in rank 1 of 2" in caught.value.__notes__[0]


@pytest.mark.usefixtures("ranks_are_forked")
def test_a_function_inside_of_another_one_travels_with_the_variables_that_it_uses() -> None:
    scale = 10
    assert launch(lambda group, more: group.rank * scale + more, 2, 5, timeout=DEADLINE) == [5, 15]


def test_what_cannot_be_sent_is_refused_before_anything_starts() -> None:
    lock = threading.Lock()
    with pytest.raises(ConfigError, match=r"<lambda> cannot be sent .*cannot pickle '_thread.lock'"):
        launch(lambda group: lock.locked(), 2)
    with pytest.raises(ConfigError, match="at least one rank, got 0"):
        launch(array_of, 0, 3)
    with pytest.raises(ConfigError, match="on_loss='shrug' must be"):
        launch(array_of, 2, 3, on_loss="shrug")  # type: ignore[call-overload]


TYPED = """
from dataclasses import dataclass
import numpy as np
import covey

@dataclass
class Result:
    rank: int
    total: float

class TooSmallError(Exception):
    def __init__(self, size, *, wanted):
        super().__init__(f"{size} of {wanted}")
        self.wanted = wanted

def helper(group):
    return np.full(3, group.rank + 1.0)

def job(group, wanted):
    if group.size < wanted:
        raise TooSmallError(group.size, wanted=wanted)
    x = helper(group)
    group.all_reduce(x)
    print("rank", group.rank, "is here", flush=True)
    return Result(group.rank, float(x.sum()))

found = covey.launch(job, 2, 2)
assert found == [Result(0, 9.0), Result(1, 9.0)], found
try:
    covey.launch(job, 2, 3)
except TooSmallError as error:
    assert error.wanted == 3
    print("refused:", error)
"""


def test_what_was_typed_at_a_prompt_travels_by_value() -> None:
    """Functions, classes of results and of exceptions: those that come back are those that were typed."""
    done = subprocess.run(
        [sys.executable, "-c", TYPED],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 is here", "rank 1 is here", "refused: 2 of 3"]


@pytest.mark.usefixtures("ranks_are_forked")
def test_ranks_that_are_late_are_named_and_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time passes when all but rank 1 have returned."""
    returned: set[int] = set()
    listen = launching._Child.listen

    def note(child: Any) -> bool:
        is_over = listen(child)
        returned.update([child.rank] if is_over else [])
        return is_over

    def now() -> float:
        return time.monotonic() + 2 * DEADLINE * (returned == {0})

    monkeypatch.setattr(launching._Child, "listen", note)
    monkeypatch.setattr(launching, "time", SimpleNamespace(monotonic=now, sleep=time.sleep))
    with pytest.raises(DeadlineError, match="no result from rank 1 of 2 within the timeout of 500 s") as caught:
        launch(finish_all_but_rank_1, 2, str(tmp_path), timeout=DEADLINE)
    assert caught.value.late == (1,)
    assert is_gone(int((tmp_path / "rank1").read_text()))


def test_what_a_rank_leaves_running_does_not_survive(tmp_path: Path) -> None:
    for pid in launch(leave_a_child, 2, str(tmp_path), timeout=DEADLINE):
        wait_until(functools.partial(is_gone, pid))


PRINTING_SCRIPT = """
    import sys
    import covey

    def job(group):
        group.barrier()
        for _ in range(200):
            print("rank", group.rank, "writes", "this")
            print("rank", group.rank, "writes", "this", file=sys.stderr)

    if __name__ == "__main__":
        covey.launch(job, 3)
"""


@pytest.mark.thorough
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_every_line_that_ranks_print_is_of_one_rank(tmp_path: Path, unbuffered: str) -> None:
    (tmp_path / "script.py").write_text(textwrap.dedent(PRINTING_SCRIPT))
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(SOURCE), "PYTHONUNBUFFERED": unbuffered},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert done.returncode == 0, done.stderr
    for lines in (done.stdout.splitlines(), done.stderr.splitlines()):
        assert sorted(lines) == sorted(f"rank {rank} writes this" for rank in range(3) for _ in range(200))


SCRIPT = """
    import sys
    from pathlib import Path
    from threading import Event

    import covey.runtime.keeper.launch

    def job(group, folder):
        import os
        Path(folder, f"draft{group.rank}").write_text(str(os.getpid()))
        Path(folder, f"draft{group.rank}").rename(Path(folder, f"rank{group.rank}"))
        Event().wait()

    if __name__ == "__main__":
        covey.runtime.keeper.launch.launch(job, 2, sys.argv[1])
"""


@pytest.mark.parametrize(
    ("signum", "code"),
    [
        pytest.param(signal.SIGINT, -signal.SIGINT, id="ctrl-c"),
        pytest.param(
            signal.SIGKILL,
            -signal.SIGKILL,
            id="killed",
            marks=pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent"),
        ),
    ],
)
def test_ranks_end_with_a_script_that_is_interrupted(
    tmp_path: Path, runtime: Path, signum: signal.Signals, code: int
) -> None:
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    parent = subprocess.Popen(
        [sys.executable, "script.py", str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        stderr=subprocess.PIPE,
        text=True,
        # a test run in the background may have been told to ignore Ctrl-C, which children inherit
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        wait_until(lambda: parent.poll() is not None or all((tmp_path / f"rank{rank}").exists() for rank in range(2)))
        parent.send_signal(signum)
        _, errors = parent.communicate(timeout=DEADLINE)
        assert parent.returncode == code
        if signum == signal.SIGINT:
            assert errors.count("KeyboardInterrupt") == 1
            assert list(runtime.iterdir()) == []
        for rank in range(2):
            pid = int((tmp_path / f"rank{rank}").read_text())
            wait_until(functools.partial(is_gone, pid))
    finally:
        parent.kill()
        parent.wait(DEADLINE)
        assert parent.stderr is not None
        parent.stderr.close()
        with contextlib.suppress(FileNotFoundError):  # a killed parent cannot clean up
            for left in runtime.iterdir():
                for socket in left.iterdir():
                    socket.unlink()
                left.rmdir()
