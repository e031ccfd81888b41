"""`covey run` as people use it: real processes, real signals, and nothing left behind."""

from __future__ import annotations

import functools
import json
import os
import pty
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.support import forked
from tests.support.waiting import DEADLINE, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SOURCE = Path(__file__).parents[2] / "src"


class Keeper:
    """One `covey run` process and the folder that its run's folder is made in."""

    def __init__(
        self,
        cwd: Path,
        runtime: Path,
        *words: str,
        env: dict[str, str] | None = None,
        is_solo: bool = True,
        **streams: Any,
    ) -> None:
        """Most scripts here do not join: it is the launcher that is looked at."""
        words = ("--solo", *words) if is_solo else words
        whole = {**os.environ, "PYTHONPATH": f"{SOURCE}{os.pathsep}{cwd}", "XDG_RUNTIME_DIR": str(runtime)}
        for name in ("COVEY_DEBUG", "NO_COLOR"):
            whole.pop(name, None)
        self.process = forked.Popen(
            [sys.executable, "-m", "covey", "run", *words],
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams},
            text=True,
            cwd=cwd,
            env=whole | (env or {}),
            preexec_fn=forked.interruptible,
        )

    def finish(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=DEADLINE)
        return self.process.returncode, out, err

    def close(self) -> None:
        self.process.kill()
        for pipe in filter(None, (self.process.stdout, self.process.stderr)):
            pipe.close()
        self.process.wait(DEADLINE)


@pytest.fixture
def runtime() -> Iterator[Path]:
    """A private folder with a short path, in which nothing may be left."""
    folder = Path(tempfile.mkdtemp(prefix="t-", dir="/tmp"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@pytest.fixture(params=["0", pytest.param("1", marks=pytest.mark.thorough)], ids=["cold", "warm"])
def covey_run(request: pytest.FixtureRequest, tmp_path: Path, runtime: Path) -> Iterator[Callable[..., Keeper]]:
    """Start `covey run`: all of this holds for ranks with interpreters of their own, and for forks of one.

    `test_warm_start` compares the two.
    """
    keepers: list[Keeper] = []

    def start(*words: str, env: dict[str, str] | None = None, **streams: Any) -> Keeper:
        settings = {"COVEY_WARM_START": request.param, **(env or {})}
        keepers.append(Keeper(tmp_path, runtime, *words, env=settings, **streams))
        return keepers[-1]

    try:
        yield start
    finally:
        for keeper in keepers:
            keeper.close()


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    """Write a script that knows its rank and return its name."""
    prelude = """
import os, signal, subprocess, sys, time
if not sys.argv:
    import covey  # never: only scripts that name it are started warm
rank = int(os.environ['COVEY_RANK'])
def print(*words, file=sys.stdout, end="\\n"):
    file.write(" ".join(map(str, words)) + end)  # at once: a line that takes long to finish is shown in parts
def wait_for_signals():
    while True:
        time.sleep(0.05)  # not pause(), which would not see one that comes just before it
def stay_until(rank):
    # until it has told its pid
    while not os.path.exists(f"pid{rank}"):
        time.sleep(0.01)
    return int(open(f"pid{rank}").read())
def tell():
    open(f"draft{rank}", "w").write(str(os.getpid()))
    os.rename(f"draft{rank}", f"pid{rank}")
"""

    def write(body: str) -> str:
        (tmp_path / "job.py").write_text(prelude + textwrap.dedent(body))
        return "job.py"

    return write


def said_by(rank: int, output: str) -> list[str]:
    prefix = f"[{rank}] "
    return [line.removeprefix(prefix) for line in output.splitlines() if line.startswith(prefix)]


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_lines_carry_their_rank_and_keep_their_order(covey_run, script) -> None:
    job = script("""
        for i in range(3000):
            print("out", rank, i)
            print("err", i, rank, file=sys.stderr)
    """)
    code, out, err = covey_run("-n", "3", job).finish()
    assert code == 0
    for rank in range(3):
        assert said_by(rank, out) == [f"out {rank} {i}" for i in range(3000)]
        assert said_by(rank, err) == [f"err {i} {rank}" for i in range(3000)]
    assert len(out.splitlines()) == len(err.splitlines()) == 9000


def test_programs_read_the_output_and_the_events_of_a_run_as_lines_of_json(covey_run, script) -> None:
    body = "print('one of', rank); print('error', file=sys.stderr, end=''); sys.exit(3 * rank)"
    run = covey_run("-n", "2", "--json", "--solo", script(body))
    code, out, err = run.finish()
    assert (code, err) == (3, "")
    events = [json.loads(line) for line in out.splitlines()]
    assert {event["machine"] for event in events} == {os.uname().nodename.partition(".")[0]}
    printed = sorted((each["rank"], each["stream"], each["text"]) for each in events if each["event"] == "output")
    assert printed == [(rank, *each) for rank in (0, 1) for each in (("stderr", "error"), ("stdout", f"one of {rank}"))]
    exits = {event["process"]: event["code"] for event in events if event["event"] == "exited"}
    assert exits == {0: 0, 1: 3}
    assert [event["process"] for event in events if event["event"] == "started"] == [0, 1]
    assert any(event["event"] == "note" and "rank 1 failed with exit code 3" in event["text"] for event in events)
    assert (events[-1]["event"], events[-1]["code"], events[-1]["reason"]) == (
        "ended",
        3,
        "rank 1 failed with exit code 3",
    )


def test_a_rank_is_told_its_place_and_a_secret_token(covey_run, script, runtime) -> None:
    job = script("""
        import json
        token = os.read(int(os.environ["COVEY_TOKEN_FD"]), 100)
        more = os.read(int(os.environ["COVEY_TOKEN_FD"]), 100)
        info = os.stat(os.environ["COVEY_MEET"])
        facts = dict(token=token.hex(), more=more.hex(), mode=info.st_mode)
        print(json.dumps(dict(facts, env=dict(os.environ), argv=sys.argv)))
    """)
    code, out, _ = covey_run("-n", "3", "--lanes", "unix", "--insecure", job).finish()
    assert code == 0
    ranks = [json.loads(said_by(rank, out)[0]) for rank in range(3)]
    for rank, facts in enumerate(ranks):
        env = facts["env"]
        assert (env["COVEY_RANK"], env["COVEY_LOCAL_RANK"]) == (str(rank), str(rank))
        assert (env["COVEY_SIZE"], env["COVEY_LOCAL_SIZE"]) == ("3", "3")
        assert (env["COVEY_LANES"], env["COVEY_INSECURE"], env["PYTHONUNBUFFERED"]) == ("unix", "1", "1")
        assert Path(env["COVEY_MEET"]).parent == runtime
        assert Path(env["COVEY_KEEPER"]).parent == Path(env["COVEY_MEET"])
        assert "COVEY_RESTART" not in env
        assert stat.S_IMODE(facts["mode"]) == 0o700
        assert len(facts["token"]) == 64
        assert facts["more"] == ""
        assert facts["token"] not in json.dumps([facts["env"], facts["argv"]])
    assert len({(facts["token"], facts["env"]["COVEY_MEET"]) for facts in ranks}) == 1
    assert list(runtime.iterdir()) == []


def test_programs_that_read_the_variables_of_torchrun_find_their_ranks(covey_run, script) -> None:
    job = script("""
        import json, socket
        names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"
        *numbers, port = (os.environ[name] for name in names)
        print(json.dumps([numbers, socket.socket().connect_ex(("127.0.0.1", int(port))) == 0, port]))
    """)
    for words in ([], ["--torch-env"]):
        code, out, _ = covey_run("-n", "2", *words, job).finish()
        assert code == 0
        told = [json.loads(said_by(rank, out)[0]) for rank in range(2)]
        assert [facts[:2] for facts in told] == [
            [[f"{rank}", "2", f"{rank}", "2", "127.0.0.1"], False] for rank in (0, 1)
        ]
        assert told[0][2] == told[1][2]


def test_processes_that_succeed_and_never_joined_are_told_of_last(covey_run, script) -> None:
    alone = "print('saved', rank)"
    told = "covey: none of the 2 processes joined the run: each worked alone"
    code, out, err = covey_run("-n", "2", script(alone), is_solo=False).finish()
    assert (code, sorted(out.splitlines())) == (3, ["[0] saved 0", "[1] saved 1"])
    assert err.splitlines()[-1].startswith(told)
    assert "--solo" in err
    joins = "import subprocess\nsubprocess.run([sys.executable, '-c', 'import covey; covey.join().close()'], check=True"
    joins += ", pass_fds=[int(os.environ['COVEY_TOKEN_FD'])])"
    for job, words, expected in (
        (joins, ["-n", "2"], 0),
        (alone, ["-n", "1"], 0),
        (alone, ["-n", "2", "--torch-env"], 0),
        (alone + "\nsys.exit(rank * 5)", ["-n", "2"], 5),
    ):
        code, _, err = covey_run(*words, script(job), is_solo=False).finish()
        assert (code, told in err) == (expected, False), err


def test_the_first_failure_stops_the_others_and_gives_its_exit_code(covey_run, script, runtime) -> None:
    job = script("""
        print(os.getpid())
        tell()
        if rank == 2:
            for other in range(4):
                stay_until(other)
            sys.exit(7)
        signal.pause()
    """)
    code, out, err = covey_run("-n", "4", job).finish()
    assert code == 7
    assert err.splitlines() == ["covey: rank 2 failed with exit code 7; stopping the others"]
    assert all(is_gone(int(said_by(rank, out)[0])) for rank in range(4))
    assert list(runtime.iterdir()) == []


def test_other_ranks_have_a_moment_to_say_what_they_lost(covey_run, script) -> None:
    job = script("""
        tell()
        if rank == 1:
            for other in (0, 2):
                stay_until(other)
            sys.exit(3)
        first = stay_until(1)
        try:
            while open(f"/proc/{first}/stat").read().split()[2] != "Z":
                time.sleep(0.01)
        except (FileNotFoundError, ProcessLookupError):
            pass  # it was reaped
        time.sleep(0.2)
        print("lost rank 1")
        sys.exit(9)
    """)
    code, out, err = covey_run("-n", "3", job).finish()
    assert code == 3
    assert said_by(0, out) == said_by(2, out) == ["lost rank 1"]
    assert len(err.splitlines()) == 1


def test_a_killed_rank_is_named_with_its_signal(covey_run, script) -> None:
    job = script("""
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()
    """)
    code, _, err = covey_run("-n", "2", job).finish()
    assert code == 128 + signal.SIGKILL
    assert err == "covey: rank 1 was killed by SIGKILL; stopping the others\n"


def test_a_rank_that_ignores_sigterm_is_killed(covey_run, script) -> None:
    job = script("""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print(os.getpid())
        tell()
        if rank == 0:
            stay_until(1)
            sys.exit(5)
        wait_for_signals()
    """)
    code, out, _ = covey_run("-n", "2", job).finish()
    assert code == 5
    assert is_gone(int(said_by(1, out)[0]))


@pytest.mark.parametrize(("signum", "expected"), [(signal.SIGINT, 130), (signal.SIGHUP, 129), (signal.SIGTERM, 0)])
def test_a_signal_reaches_every_rank_once(covey_run, script, runtime, signum, expected) -> None:
    """SIGTERM asks for a good end: that all came to one is success."""
    job = script(f"""
        def on_signal(*_):
            print("saved by", rank)
            sys.exit(0)
        signal.signal({int(signum)}, on_signal)
        print("ready")
        wait_for_signals()
    """)
    keeper = covey_run("-n", "3", job)
    ready = [keeper.process.stdout.readline() for _ in range(3)]
    assert sorted(ready) == [f"[{rank}] ready\n" for rank in range(3)]
    keeper.process.send_signal(signum)
    code, out, _ = keeper.finish()
    assert code == expected
    assert sorted(out.splitlines()) == [f"[{rank}] saved by {rank}" for rank in range(3)]
    assert list(runtime.iterdir()) == []


def test_a_rank_that_sigterm_kills_is_not_a_good_end(covey_run, script) -> None:
    job = script("""
        if rank == 1:
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        print("ready")
        wait_for_signals()
    """)
    keeper = covey_run("-n", "2", job)
    assert sorted(keeper.process.stdout.readline() for _ in range(2)) == ["[0] ready\n", "[1] ready\n"]
    keeper.process.send_signal(signal.SIGTERM)
    code, _, err = keeper.finish()
    assert code == 128 + signal.SIGTERM
    assert err == "covey: SIGTERM: stopping…\n"


def test_a_second_ctrl_c_kills_ranks_that_ignore_the_first(covey_run, script) -> None:
    job = script("""
        signal.signal(signal.SIGINT, lambda *_: print("not now"))
        print(os.getpid())
        wait_for_signals()
    """)
    keeper = covey_run("-n", "2", job)
    pids = [int(keeper.process.stdout.readline()[4:]) for _ in range(2)]
    keeper.process.send_signal(signal.SIGINT)
    assert sorted(keeper.process.stdout.readline() for _ in range(2)) == ["[0] not now\n", "[1] not now\n"]
    keeper.process.send_signal(signal.SIGINT)
    assert keeper.finish()[0] == 130
    assert all(map(is_gone, pids))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_ranks_die_with_a_keeper_that_is_killed(covey_run, script) -> None:
    job = script("""
        print(os.getpid())
        wait_for_signals()
    """)
    keeper = covey_run("-n", "3", job)
    pids = [int(keeper.process.stdout.readline()[4:]) for _ in range(3)]
    keeper.process.kill()
    wait_until(lambda: all(map(is_gone, pids)))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_what_a_killed_keeper_leaves_behind_goes_with_the_next_run(covey_run, script, runtime) -> None:
    job = script("""
        print(os.getpid())
        wait_for_signals()
    """)
    keeper = covey_run("-n", "2", job)
    pids = [int(keeper.process.stdout.readline()[4:]) for _ in range(2)]
    keeper.process.kill()
    wait_until(lambda: all(map(is_gone, pids)))
    (left,) = runtime.glob("covey-run-*")
    os.utime(left, (time.time() - 100,) * 2)  # seconds after a keeper began, its folder would not be touched
    assert covey_run("-n", "1", script("")).finish()[0] == 0
    assert list(runtime.glob("covey-run-*")) == []


def test_what_a_rank_leaves_running_neither_survives_nor_holds_up_the_keeper(covey_run, script) -> None:
    job = script("""
        child = subprocess.Popen(["sleep", "1000"])
        print(child.pid)
    """)
    code, out, _ = covey_run("-n", "2", job).finish()
    assert code == 0
    for rank in range(2):
        (pid,) = map(int, said_by(rank, out))
        wait_until(functools.partial(is_gone, pid))


def test_a_descendant_that_left_the_group_cannot_hold_up_the_keeper(covey_run, script) -> None:
    job = script("""
        child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        print(child.pid)
    """)
    code, out, _ = covey_run("-n", "1", job).finish()
    (pid,) = map(int, said_by(0, out))
    try:
        assert code == 0
    finally:
        os.kill(pid, signal.SIGKILL)


def test_a_prompt_is_shown_before_its_line_ends(covey_run, script, tmp_path) -> None:
    os.mkfifo(tmp_path / "answer")
    job = script("""
        print("name? ", end="")
        print("hello", open("answer").read())
    """)
    keeper = covey_run("-n", "1", job)
    prompt = "[0] name? "
    assert keeper.process.stdout.read(len(prompt)) == prompt
    (tmp_path / "answer").write_text("wren")
    assert keeper.finish()[:2] == (0, "hello wren\n")


def test_an_unfinished_last_line_is_shown_and_finished(covey_run, script) -> None:
    job = script("sys.stdout.write(f'out {rank}'); sys.stderr.write(f'err {rank}')")
    code, out, err = covey_run("-n", "2", job).finish()
    assert code == 0
    assert sorted(out.splitlines()) == ["[0] out 0", "[1] out 1"]
    assert sorted(err.splitlines()) == ["[0] err 0", "[1] err 1"]
    assert out.endswith("\n")


def test_an_enormous_line_is_relayed_in_pieces_without_loss(covey_run, script) -> None:
    job = script("""
        line = b"".join(b"%d.%d," % (rank, i) for i in range(200_000))
        while line:
            line = line[os.write(1, line):]
    """)
    code, out, _ = covey_run("-n", "2", job).finish()
    assert code == 0
    for rank in range(2):
        assert "".join(said_by(rank, out)) == "".join(f"{rank}.{i}," for i in range(200_000))


def test_ranks_go_on_when_the_reader_of_their_output_goes_away(covey_run, script, tmp_path) -> None:
    job = script("""
        for i in range(20_000):
            print("again", rank, i)
        open(f"done{rank}", "w").close()
    """)
    keeper = covey_run("-n", "2", job)
    keeper.process.stdout.readline()
    keeper.process.stdout.close()
    assert keeper.process.wait(DEADLINE) == 0
    assert all((tmp_path / f"done{rank}").exists() for rank in range(2))
    assert keeper.process.stderr.read() == (
        "covey: output cannot be written (Broken pipe); the run continues without it\n"
    )


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no full device")
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_full_disk_for_the_output_stops_no_rank_and_is_told_once(covey_run, script, stream) -> None:
    job = script("""
        import logging
        logging.getLogger("covey").warning("from the log")
        for i in range(20_000):
            print("again", rank, i, file=sys.stdout if rank else sys.stderr)
        print("the end", file=sys.stderr)
    """)
    with open("/dev/full", "wb") as full:
        code, out, err = covey_run("-n", "2", job, **{stream: full}).finish()
    assert code == 0, (out, err)
    name, shown = ("output", err) if stream == "stdout" else ("standard error", out)
    note = f"covey: {name} cannot be written (No space left on device); the run continues without it"
    assert [line for line in shown.splitlines() if line.startswith("covey:")] == [note]
    rank = 0 if stream == "stdout" else 1
    assert [line for line in said_by(rank, shown) if line.startswith("again")] == [
        f"again {rank} {i}" for i in range(20_000)
    ]


def test_a_reader_that_does_not_read_cannot_keep_ctrl_c_from_ending_all(covey_run, script, tmp_path) -> None:
    job = script("""
        def stubborn(*_):
            open(f"told{rank}", "w").close()
        signal.signal(signal.SIGINT, stubborn)
        open(f"pid{rank}.new", "w").write(str(os.getpid()))
        os.rename(f"pid{rank}.new", f"pid{rank}")
        while True:
            os.write(1, b"x" * 70_000)
    """)
    keeper = covey_run("-n", "2", job)
    wait_until(lambda: all((tmp_path / f"pid{rank}").exists() for rank in range(2)))
    keeper.process.send_signal(signal.SIGINT)
    wait_until(lambda: all((tmp_path / f"told{rank}").exists() for rank in range(2)))
    keeper.process.send_signal(signal.SIGINT)
    assert keeper.process.wait(DEADLINE) == 130
    assert all(is_gone(int((tmp_path / f"pid{rank}").read_text())) for rank in range(2))


@pytest.mark.parametrize(("setting", "coloured"), [("", True), ("1", False)])
def test_prefixes_are_coloured_on_a_terminal_unless_it_asks_not_to(covey_run, script, setting, coloured) -> None:
    screen, terminal = pty.openpty()
    try:
        keeper = covey_run("-n", "2", script("print('hello', rank)"), stdout=terminal, env={"NO_COLOR": setting})
        assert keeper.finish()[0] == 0
        shown = os.read(screen, 10_000).decode()
    finally:
        os.close(terminal)
        os.close(screen)
    assert ("\x1b[" in shown) is coloured
    plain = re.sub(r"\x1b\[\d+m", "", shown)
    assert sorted(plain.splitlines()) == ["[0] hello 0", "[1] hello 1"]


@pytest.mark.parametrize(
    "lanes", ["shm", "secure", *(pytest.param(lanes, marks=pytest.mark.thorough) for lanes in ("unix", "tcp"))]
)
def test_ranks_join_the_group_of_all(covey_run, script, runtime, lanes) -> None:
    job = script("""
        import covey, numpy as np
        with covey.join() as group:
            x = np.arange(4) * 10 ** group.rank
            print(group.rank == rank, group.size, group.all_reduce(x).tolist())
    """)
    code, out, err = covey_run("-n", "3", "--lanes", lanes, job).finish()
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == [f"[{rank}] True 3 [0, 111, 222, 333]" for rank in range(3)]
    assert list(runtime.iterdir()) == []


def test_a_rank_that_is_done_before_the_others_is_no_loss(covey_run, script) -> None:
    job = script("""
        import covey, time
        with covey.join() as group:
            first, _ = group.all_gather_object(os.getpid())
            while rank == 1 and os.path.exists(f"/proc/{first}"):
                time.sleep(0.01)
            time.sleep(0.5 * rank)  # time to notice
    """)
    assert covey_run("-n", "2", job).finish() == (0, "", "")


@pytest.mark.parametrize("lanes", ["auto", pytest.param("quic", marks=pytest.mark.thorough)])
def test_survivors_of_a_killed_rank_speak_before_they_are_stopped(covey_run, script, runtime, lanes) -> None:
    job = script("""
        import covey, numpy as np
        with covey.join() as group:
            try:
                group.barrier()
                if rank == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                group.all_reduce(np.ones(1000))
            except covey.PeerLostError as error:
                print("lost", error.rank)
                raise
    """)
    code, out, err = covey_run("-n", "3", job, env={"COVEY_LANES": lanes}).finish()
    assert code == 128 + signal.SIGKILL
    assert sorted(out.splitlines()) == ["[0] lost 1", "[2] lost 1"]
    assert any(line.startswith("covey: rank 1 was killed by SIGKILL") for line in err.splitlines())
    assert list(runtime.iterdir()) == []


def test_what_follows_the_script_belongs_to_the_script(covey_run, script) -> None:
    job = script("import json; print(json.dumps(sys.argv))")
    words = [job, "--epochs", "3", "-n", "9", "--help", "--", "-x"]
    for before in ([], ["--"]):
        code, out, err = covey_run("-n", "2", *before, *words).finish()
        assert (code, err) == (0, "")
        assert json.loads(said_by(0, out)[0]) == json.loads(said_by(1, out)[0]) == words


def test_a_module_can_be_run_with_its_own_options(covey_run, tmp_path) -> None:
    (tmp_path / "nest").mkdir()
    (tmp_path / "nest" / "egg.py").write_text("import sys; print(__name__, __spec__.name, sys.argv[1:])")
    code, out, _ = covey_run("-n", "2", "-m", "nest.egg", "--lanes", "none").finish()
    assert code == 0
    assert sorted(out.splitlines()) == [f"[{rank}] __main__ nest.egg ['--lanes', 'none']" for rank in range(2)]


def test_any_program_can_be_a_rank(covey_run, tmp_path) -> None:
    tool = tmp_path / "tool"
    tool.write_text('#!/bin/sh\necho "rank $COVEY_RANK of $COVEY_SIZE: $1"\n')
    tool.chmod(0o755)
    code, out, _ = covey_run("-n", "2", "tool", "-v").finish()
    assert code == 0
    assert sorted(out.splitlines()) == ["[0] rank 0 of 2: -v", "[1] rank 1 of 2: -v"]
    assert covey_run("-n", "1", "sh", "-c", "exit 4").finish()[0] == 4


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["-n", "0", "job.py"], "at least one rank, got 0"),
        (["-n", "2", "absent.py"], "no script or program 'absent.py'"),
        (["-n", "1", "broken"], "cannot start"),
    ],
)
def test_what_cannot_be_run_is_refused_in_one_line(covey_run, script, tmp_path, runtime, words, complaint) -> None:
    script("print('never')")
    (tmp_path / "broken").write_bytes(b"\x00\x01 neither a program nor a script")
    (tmp_path / "broken").chmod(0o755)
    code, out, err = covey_run(*words).finish()
    assert (code, out) == (2, "")
    (error,) = err.splitlines()
    assert error.startswith("error: ")
    assert complaint in error
    assert "Traceback" in covey_run(*words, env={"COVEY_DEBUG": "1"}).finish()[2]
    assert list(runtime.iterdir()) == []


def test_help_lists_every_command_and_imports_none() -> None:
    probe = """
        import sys
        from covey.cli.main import COMMANDS, main
        sys.argv = ["covey", "--help"]
        try:
            main()
        except SystemExit:
            loaded = [name for name in COMMANDS if f"covey.cli.{name}" in sys.modules]
            print("loaded:", loaded)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(probe)],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=True,
    )
    assert "loaded: []" in done.stdout
    assert all(name in done.stdout for name in ("run", "bench", "demo"))


def test_a_log_file_that_cannot_be_written_is_said_at_once_and_in_the_exit_code(
    covey_run: Callable[..., Keeper], tmp_path: Path
) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-0.log").symlink_to("/dev/full")
    code, out, err = covey_run("-n", "1", "--log-dir", "logs", "echo", "one").finish()
    assert code == 1
    assert out == "[0] one\n"
    reason = "cannot be written (No space left on device); the run continues without its logs"
    assert err.splitlines() == [
        f"covey: logs/rank-0.log {reason}",
        "covey: the files in --log-dir lack some of the output",
    ]


def test_each_rank_has_a_log_file_if_one_is_asked_for(
    covey_run: Callable[..., Keeper], script: Callable[[str], str], tmp_path: Path
) -> None:
    name = script("print('out of', rank)\nprint('error of', rank, file=sys.stderr)")
    code, out, err = covey_run("-n", "2", "--log-dir", "logs", name).finish()
    assert code == 0, err
    assert sorted(out.splitlines()) == ["[0] out of 0", "[1] out of 1"]
    logs = {path.name: sorted(path.read_text().splitlines()) for path in (tmp_path / "logs").iterdir()}
    assert logs == {f"rank-{rank}.log": [f"error of {rank}", f"out of {rank}"] for rank in range(2)}
