"""Ranks that are forks of one process that has imported covey: a program cannot tell that it is one."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.test_keeper_survival import PRELUDE
from tests.support.waiting import DEADLINE, wait_until

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux" or not hasattr(os, "pidfd_open"), reason="only on Linux"),
]

SOURCE = Path(__file__).parents[2] / "src"
COLD, WARM = "0", "1"


class Ended:
    """What came of a `covey run`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.pid = process.pid
        self.out, self.err = process.communicate(timeout=DEADLINE)
        self.code = process.returncode

    def said(self, rank: int, stream: str = "out") -> str:
        prefix, text = f"[{rank}] ", self.out if stream == "out" else self.err
        return "\n".join(line.removeprefix(prefix) for line in text.splitlines() if line.startswith(prefix))


def begin(folder: Path, body: str, start: str, *arguments: str, size: int = 2, **env: str) -> subprocess.Popen[str]:
    job = folder / "job.py"
    job.write_text(textwrap.dedent(body))
    env = {**os.environ, "PYTHONPATH": f"{SOURCE}", "COVEY_WARM_START": start, **env}
    env.pop("PYTHONHASHSEED", None)
    words = [sys.executable, "-m", "covey", "run", "--solo", "-n", str(size), "./job.py", *arguments]
    return subprocess.Popen(words, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(folder: Path, body: str, start: str, *arguments: str, size: int = 2, **env: str) -> Ended:
    return Ended(begin(folder, body, start, *arguments, size=size, **env))


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


FACTS = """
    '''A script that says all it can find out about itself.'''
    import faulthandler, gc, json, os, resource, signal, stat, sys, threading, warnings

    def kind(descriptor):
        return stat.S_IFMT(os.fstat(descriptor).st_mode), os.get_inheritable(descriptor)

    def stream(file):
        return [file.name, file.mode, file.encoding, file.errors, file.line_buffering, file.write_through,
                file.isatty(), file.seekable(), file.fileno(), type(file.buffer).__name__]

    main = sys.modules["__main__"]
    names = os.listdir("/proc/self/fd")  # and the one that lists them
    descriptors = sorted(int(name) for name in names if os.path.exists(f"/proc/self/fd/{name}"))
    facts = {
        "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "flags": str(sys.flags), "name": __name__,
        "file": __file__, "doc": __doc__, "spec": __spec__, "loader": type(__loader__).__name__,
        "is main": vars(main) is globals(), "loader path": __loader__.path, "names": sorted(vars(main)),
        "builtins": __builtins__ is sys.modules["builtins"], "annotations": globals().get("__annotations__"),
        "cached": globals().get("__cached__", "none"), "code": (lambda: 0).__code__.co_filename, "debug": __debug__,
        "executable": sys.executable, "prefix": sys.prefix, "cwd": os.getcwd(), "umask": os.umask(0o22),
        "environment": {name: value for name, value in os.environ.items() if name != "COVEY_TOKEN_FD"},
        "signals": {int(s): str(signal.getsignal(s)).split(" at ")[0] for s in signal.valid_signals()},
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])), "pending": sorted(signal.sigpending()),
        "masks": [line for line in open("/proc/self/status") if line.startswith(("SigBlk", "SigIgn", "SigCgt"))],
        "leads a session": os.getsid(0) == os.getpid(), "leads a group": os.getpgrp() == os.getpid(),
        "streams": [stream(sys.stdin), stream(sys.stdout), stream(sys.stderr)],
        "descriptors": [kind(descriptor) for descriptor in descriptors],
        "token": kind(int(os.environ["COVEY_TOKEN_FD"])),
        "threads": [thread.name for thread in threading.enumerate()],
        "is main thread": threading.current_thread() is threading.main_thread(),
        "limits": [resource.getrlimit(limit) for limit in range(16)], "nice": os.nice(0),
        "cores": sorted(os.sched_getaffinity(0)), "recursion": sys.getrecursionlimit(),
        "hooks": [sys.excepthook is sys.__excepthook__, sys.displayhook is sys.__displayhook__],
        "traced": [sys.gettrace(), sys.getprofile()], "faulthandler": faulthandler.is_enabled(),
        "collector": [gc.isenabled(), gc.get_threshold()],
    }
    import covey, numpy
    facts["imported"] = [covey.__file__, numpy.__file__, str(warnings.filters)]
    print(json.dumps(facts, default=str))
"""


def test_a_program_cannot_tell_how_it_was_started(tmp_path: Path) -> None:
    arguments = ("--size", "3", "-m", "x y", "")
    cold, warm = (run(tmp_path, FACTS, start, *arguments, COVEY_JOIN_TIMEOUT="77") for start in (COLD, WARM))
    assert (cold.code, cold.err, warm.code, warm.err) == (0, "", 0, "")
    for rank in range(2):
        one, other = json.loads(cold.said(rank)), json.loads(warm.said(rank))
        for facts in (one, other):  # the run's own folder and port are all that differs from run to run
            port = facts["environment"].pop("MASTER_PORT")
            assert facts["environment"].pop("COVEY_GAVE_RANK") == f"{rank}/2/{port}"
            folder = facts["environment"].pop("COVEY_MEET")
            assert facts["environment"].pop("COVEY_KEEPER").startswith(folder)
            assert "history" in facts["environment"].pop("COVEY_KEPT_FOLDER")
            assert facts["environment"].pop("COVEY_WARM_START") in (COLD, WARM)
            assert facts["environment"]["COVEY_RANK"] == str(rank)
        assert other.keys() == one.keys()
        assert {name: (one[name], other[name]) for name in one if one[name] != other[name]} == {}


ENDINGS = {
    "returns": "",
    "exit code": "sys.exit(3)",
    "exit without a code": "sys.exit()",
    "exit with words": "sys.exit('not today')",
    "exit at once": "os._exit(4)",
    "exception": "def deep():\n    1 / 0\ndeep()",
    "chained exception": "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise ValueError('no') from error",
    "group of exceptions": "raise ExceptionGroup('some', [ValueError(1), TypeError(2)])",
    "own hook": "sys.excepthook = lambda kind, error, _: print('hooked', kind.__name__, error)\nraise OSError(5)",
    "broken hook": "def hook(*_):\n    raise KeyError('hook')\nsys.excepthook = hook\nraise OSError(5)",
    "interrupt": "os.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)",
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "terminated": "os.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(9)",
    "aborted": "os.abort()",
    "thread": "threading.Thread(target=lambda: (time.sleep(0.2), print('thread is done'))).start()",
    "encoding": "print('\xe4', flush=True)",
    "exit in a handler": "atexit.register(os._exit, 7)",
    "object that is left": "class Left:\n    def __del__(self):\n        sys.stdout.write('deleted\\n')\nleft = Left()",
}


def test_a_program_ends_in_the_same_way(tmp_path: Path) -> None:
    """Each rank ends in another way, but for rank 0: it keeps the run going until the others are gone."""
    body = (
        PRELUDE + "import atexit, threading\n"
        "if not sys.argv:\n"
        "    import covey\n"
        "if rank == 0:\n"
        "    found()\n"
        "    for other in range(1, size):\n"
        "        wait_for_end_of(other)\n"
        "    sys.exit(0)\n"
        "wait_for('founded')\n"
        "atexit.register(print, 'atexit')\n"
        "sys.stdout.write('begins\\n')\n"
    )
    for rank, code in enumerate(ENDINGS.values(), start=1):
        body += f"if rank == {rank}:\n{textwrap.indent(code or 'pass', '    ')}\n"
    ended = []
    for start in (COLD, WARM):
        ended.append(run(tmp_path, body, start, size=1 + len(ENDINGS)))
        assert ended[-1].code == 0, ended[-1].err
        for left in [tmp_path / "founded", *tmp_path.glob("pid*")]:
            left.unlink()
    cold, warm = ended
    # Whether other ranks have ended by then, and whether this line or the last output is shown first, differs.
    how = re.compile(r"covey: rank (\d+) (.*?)(?:;|$)", re.MULTILINE)
    assert sorted(how.findall(warm.err)) == sorted(how.findall(cold.err))
    for rank, ending in enumerate(ENDINGS, start=1):
        assert cold.said(rank).startswith("begins"), (ending, cold.err)
        assert (warm.said(rank), warm.said(rank, "err")) == (cold.said(rank), cold.said(rank, "err")), ending


def test_a_script_that_is_no_python_is_shown_in_the_same_way(tmp_path: Path) -> None:
    cold, warm = (run(tmp_path, "import covey\nthis is no Python\n", start) for start in (COLD, WARM))
    shown = [{text for rank in range(2) if (text := ended.said(rank, "err"))} for ended in (cold, warm)]
    assert warm.code == cold.code == 1
    assert len(shown[0]) == 1
    assert shown[0] == shown[1]


def test_a_script_is_found_by_a_link_and_prefers_modules_beside_the_file(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "beside.py").write_text("word = 'real'")
    (tmp_path / "beside.py").write_text("word = 'link'")
    (tmp_path / "real" / "job.py").write_text(
        "import sys, covey, beside\nprint(beside.word, __file__, sys.path[0], sys.argv[0])"
    )
    (tmp_path / "job.py").symlink_to(tmp_path / "real" / "job.py")
    body = (tmp_path / "job.py").read_text()
    cold, warm = (run(tmp_path, body, start) for start in (COLD, WARM))
    assert warm.out
    assert (warm.code, sorted(warm.out.splitlines())) == (cold.code, sorted(cold.out.splitlines()))


def test_every_rank_draws_numbers_of_its_own(tmp_path: Path) -> None:
    body = """
        import random, secrets, tempfile, uuid, covey, numpy as np
        print(random.random(), np.random.random(), np.random.default_rng().random(), secrets.token_hex(8), uuid.uuid4())
    """
    warm = run(tmp_path, body, WARM)
    drawn = [word for rank in range(2) for word in warm.said(rank).split()]
    assert len(drawn) == 10
    assert len(set(drawn)) == 10


@pytest.mark.thorough
def test_ranks_work_with_matrices_threads_and_processes_of_their_own(tmp_path: Path) -> None:
    body = """
        import multiprocessing, os, covey, numpy as np

        def square(x):
            return x * x

        if __name__ == "__main__":
            with covey.join() as group:
                a = np.arange(90000.0).reshape(300, 300) % 7
                assert np.array_equal(a @ a, np.einsum("ij,jk->ik", a, a))  # by threads, if there are any
                for way in ("spawn", "fork", "forkserver"):
                    with multiprocessing.get_context(way).Pool(1) as pool:
                        assert pool.map(square, [group.rank + 2]) == [(group.rank + 2) ** 2]
                x = np.full(5, group.rank + 1.0)
                group.all_reduce(x)
                print(x[0], os.getppid())
    """
    warm = run(tmp_path, body, WARM)
    assert (warm.code, warm.err) == (0, "")
    said = [warm.said(rank).split() for rank in range(2)]
    assert [words[0] for words in said] == ["3.0"] * 2
    assert {words[1] for words in said} != {str(warm.pid)}, "they were not started warm"


def test_a_rank_that_joins_has_nothing_more_to_load(tmp_path: Path) -> None:
    """Or the start is not as quick as it could be: what it loads belongs to `template.PRELOADED`."""
    body = """
        import sys, covey, numpy as np
        before = set(sys.modules)
        with covey.join(on_loss="continue") as group:
            group.all_reduce(np.ones(3))
            group.all_gather_object(group.rank)
            group.send(np.ones(3), (group.rank + 1) % group.size, async_op=True)
            group.recv((group.rank - 1) % group.size)
            group.restore({"x": np.ones(3)})
        print(sorted(name for name in set(sys.modules) - before if name.startswith("covey")))
    """
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as own:  # else a `covey top` beside it asks its ranks
        warm = run(tmp_path, body, WARM, TMPDIR=own, XDG_RUNTIME_DIR=own)
    assert (warm.code, warm.err) == (0, "")
    assert [warm.said(rank) for rank in range(2)] == ["[]"] * 2


def replace_numpy(folder: Path, also: str) -> None:
    """Put a module in front of numpy that does something else besides."""
    folder.mkdir()
    real = f"import sys\nsys.path.remove({str(folder)!r})\ndel sys.modules['numpy']\nimport numpy\n"
    (folder / "numpy.py").write_text(real + also)


PARENTS = "import os, sys, time\nimport covey\nprint(os.getppid(), sys.argv[1:])\n"


@pytest.mark.parametrize(
    "custom",
    [
        "import threading, time\nthreading.Thread(target=time.sleep, args=(99,), daemon=True).start()",
        pytest.param("import builtins\nbuiltins.left_open = open('job.py')", marks=pytest.mark.thorough),
    ],
    ids=["a thread", "a file"],
)
def test_what_a_fork_would_lose_is_reason_to_start_ranks_one_by_one(tmp_path: Path, custom: str) -> None:
    hooked = tmp_path / "hooked"
    replace_numpy(hooked, custom)
    path = f"{hooked}{os.pathsep}{SOURCE}"
    ended = run(tmp_path, PARENTS, WARM, "x", PYTHONPATH=path)
    assert ended.code == 0, ended.err
    assert {ended.said(rank) for rank in range(2)} == {f"{ended.pid} ['x']"}


@pytest.mark.thorough
def test_what_importing_prints_is_printed_by_every_rank(tmp_path: Path) -> None:
    hooked = tmp_path / "hooked"
    replace_numpy(hooked, "print('imported', flush=True)")
    ended = run(tmp_path, "import covey\ncovey.join\n", WARM, PYTHONPATH=f"{hooked}{os.pathsep}{SOURCE}")
    assert ended.code == 0, ended.err
    assert [ended.said(rank) for rank in range(2)] == ["imported"] * 2


@pytest.mark.parametrize("setting", ["", pytest.param(COLD, marks=pytest.mark.thorough)])
def test_ranks_that_have_a_core_each_are_started_one_by_one(tmp_path: Path, setting: str) -> None:
    size = 2 if len(os.sched_getaffinity(0)) > 1 else 1
    ended = run(tmp_path, PARENTS, setting, size=size)
    assert {ended.said(rank).split()[0] for rank in range(size)} == {str(ended.pid)}


def test_more_ranks_than_cores_are_started_warm(tmp_path: Path) -> None:
    body = "import os\nprint(os.getppid())\nimport covey\n"
    size = len(os.sched_getaffinity(0)) + 1
    if size > 33:
        pytest.skip("too many cores to start a rank more")
    ended = run(tmp_path, body, "", size=size)
    assert len({ended.said(rank) for rank in range(size)}) == 1
    assert ended.said(0) != str(ended.pid)


def test_a_malformed_setting_is_refused(tmp_path: Path) -> None:
    ended = run(tmp_path, PARENTS, "perhaps")
    assert ended.code != 0
    assert "COVEY_WARM_START='perhaps' must be 1 or 0" in ended.err


WAITING = """
    import os, signal, sys, time
    import covey
    ended = []
    signal.signal(signal.SIGTERM, lambda *_: ended.append(1))
    print(os.getpid(), os.getppid(), flush=True)
    while not ended:
        time.sleep(0.01)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it may come a second time, from the keeper
    print("ended well")
"""


def pids_of(process: subprocess.Popen[str], size: int = 2) -> tuple[list[int], int]:
    """Return the ranks' process numbers and the template's."""
    assert process.stdout is not None
    words: list[Any] = [process.stdout.readline().split()[1:] for _ in range(size)]
    (template,) = {int(parent) for _, parent in words}
    assert template != process.pid
    assert parent_of(template) == process.pid
    return [int(pid) for pid, _ in words], template


def test_a_signal_to_every_process_at_once_lets_ranks_end_well(tmp_path: Path) -> None:
    """As a service manager sends it to all processes of a service."""
    process = begin(tmp_path, WAITING, WARM)
    ranks, template = pids_of(process)
    for pid in (template, *ranks, process.pid):
        os.kill(pid, signal.SIGTERM)
    ended = Ended(process)
    assert (ended.code, [ended.said(rank) for rank in range(2)]) == (0, ["ended well"] * 2), ended.err
    wait_until(lambda: is_gone(template))


def test_ranks_die_with_the_template_and_the_keeper_says_so(tmp_path: Path) -> None:
    process = begin(tmp_path, WAITING, WARM)
    ranks, template = pids_of(process)
    os.kill(template, signal.SIGKILL)
    ended = Ended(process)
    assert ended.code == 137
    assert re.search(r"rank \d was killed by SIGKILL", ended.err)
    assert all(map(is_gone, ranks))


def test_ranks_and_template_die_with_the_keeper(tmp_path: Path) -> None:
    process = begin(tmp_path, WAITING, WARM)
    ranks, template = pids_of(process)
    process.kill()
    Ended(process)
    wait_until(lambda: all(map(is_gone, (template, *ranks))))


def test_a_rank_that_failed_is_started_again_with_an_interpreter_of_its_own(tmp_path: Path) -> None:
    body = """
        import os, signal, time
        import covey, numpy as np
        print("parent", os.getppid(), os.environ.get("COVEY_RESTART"))
        for group in covey.generations():
            while group.size < 3 or group.generation < 1:
                if group.rank == 1 and group.generation == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                group.all_reduce(np.ones(1))
                if group.change_pending:
                    break
                time.sleep(0.01)
            else:
                break
    """
    (tmp_path / "job.py").write_text(textwrap.dedent(body))
    words = [sys.executable, "-m", "covey", "run", "-n", "3", "--restarts", "2", "job.py"]
    env = {**os.environ, "PYTHONPATH": str(SOURCE), "COVEY_WARM_START": WARM}
    ended = Ended(
        subprocess.Popen(words, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    )
    assert ended.code == 0, ended.err
    first, again = (line.split() for line in ended.said(1).splitlines())
    assert first[1] != str(ended.pid)
    assert first[2] == "None"
    assert again[1:] == [str(ended.pid), "1"]
