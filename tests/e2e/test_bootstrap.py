"""How ranks find each other, under every launcher and by hand; and which processes are refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.support import forked, pipes
from tests.support.jobs import Ended, Job, finish, finish_all, new_job
from tests.support.waiting import DEADLINE, wait_until

import covey

if TYPE_CHECKING:
    from collections.abc import Iterator

NOBODY = 65534

WORK = """
import json, os, sys
import numpy as np
import covey

group = covey.join()
x = np.arange(1000.0) * (group.rank + 1)
group.all_reduce(x)
sums = [float(x[1]), float(x[-1])]
position = [group.rank, group.size, group.local_rank]
report = dict(position=position, sums=sums, name=group.name, lanes=list(group.lanes().values()), env=dict(os.environ))
"""
TELL = 'print(json.dumps(report) + "\\n", end="", flush=True)\n'
JOB = WORK + TELL  # closed by the interpreter's end
WAITING_JOB = WORK + TELL + "sys.stdin.read()\n"


@pytest.fixture
def job() -> Iterator[Job]:
    with new_job() as job:
        yield job


def check(reports: list[Any], size: int) -> None:
    """Every process had its own rank in one group of `size`, and their sum is right."""
    assert sorted(report["position"] for report in reports) == [[rank, size, rank] for rank in range(size)]
    total = size * (size + 1) / 2
    for report in reports:
        assert report["sums"] == [total, 999 * total]
        assert report["name"] == reports[0]["name"]


def reports_of(ended: list[Ended]) -> list[Any]:
    return [one.report for one in ended]


# Launchers


def test_torchrun_starts_a_group_although_its_agent_holds_the_master_port() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    with new_job(forked.TorchPopen) as job:
        ended = finish(job.start(JOB, torchrun, OMP_NUM_THREADS=1))
        assert ended.code == 0, ended.err
        reports = [json.loads(line) for line in ended.out.splitlines()]
        check(reports, 3)
        for report in reports:
            assert report["env"]["TORCHELASTIC_USE_AGENT_STORE"] == "True"
            assert report["lanes"] == ["shm", "shm"]
        assert [name for name in job.left_behind() if "covey" in name] == []


@pytest.mark.thorough
def test_mpirun_starts_a_group(job: Job) -> None:
    mpirun = shutil.which("mpirun", path=str(Path(sys.executable).parent))
    assert mpirun, "requirements-all.txt brings it"
    words = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", "3", sys.executable]
    ended = finish(job.start(JOB, [mpirun, *words]))
    assert ended.code == 0, ended.err
    check([json.loads(line) for line in ended.out.splitlines()], 3)
    assert [name for name in job.left_behind() if "covey" in name] == []


def test_a_slurm_step_on_one_host_is_a_group(job: Job) -> None:
    step = {"SLURM_JOB_ID": 17, "SLURM_STEP_ID": 0, "SLURM_STEP_NUM_TASKS": 3, "SLURM_STEP_NUM_NODES": 1}
    ranks = [job.start(JOB, SLURM_PROCID=rank, SLURM_LOCALID=rank, **step) for rank in (1, 2, 0)]
    check(reports_of(finish_all(ranks)), 3)
    assert job.left_behind() == []


def test_two_jobs_by_hand_on_different_ports_do_not_meet(job: Job) -> None:
    one, other = (job.ranks(JOB, 2, MASTER_PORT=port) for port in (29500, 29507))
    names = set()
    for ranks in (one, other):
        reports = reports_of(finish_all(ranks))
        check(reports, 2)
        names.add(reports[0]["name"])
    assert len(names) == 2
    assert job.left_behind() == []


def test_ranks_come_in_any_order_with_pauses_between_them(job: Job) -> None:
    ranks = {}
    for rank in (2, 0, 1):
        ranks[rank] = job.start(JOB, RANK=rank, WORLD_SIZE=3)
        if rank != 1:
            job.rendezvous_folder(rank)
            time.sleep(0.7)  # the pause is what is tested; the ranks before it are waiting by now, or soon
    check(reports_of(finish_all([ranks[rank] for rank in range(3)])), 3)
    assert job.left_behind() == []


@pytest.mark.parametrize("lanes", ["shm", "unix", "tcp", "secure", "quic"])
def test_lanes_can_be_forced_by_the_environment(job: Job, lanes: str) -> None:
    ended = finish_all(job.ranks(JOB, 3, COVEY_LANES=lanes, MASTER_ADDR="127.0.0.1", LOCAL_WORLD_SIZE=1))
    for report in reports_of(ended):
        assert report["lanes"] == [lanes, lanes]
        assert report["sums"] == [6.0, 999 * 6.0]
    assert job.left_behind() == []


def test_a_program_may_join_close_and_join_again(job: Job) -> None:
    code = """
import covey, json
sums = []
for turn in range(3):
    with covey.join() as group:
        assert covey.join() is group
        sums.append(group.all_reduce(10 ** turn * (group.rank + 1)))
    assert group.all_reduce is not None
print(json.dumps(sums))
"""
    by_hand = job.ranks(code, 2)
    kept = job.start(code, [sys.executable, "-m", "covey", "run", "-n", "2"])
    for ended in finish_all(by_hand):
        assert ended.report == [3, 30, 300]
    ended = finish(kept)
    assert ended.code == 0, ended.err
    assert sorted(ended.out.splitlines()) == ["[0] [3, 30, 300]", "[1] [3, 30, 300]"]
    assert job.left_behind() == []


# Ranks that contradict each other


def test_a_rank_started_twice_is_told_which_process_is_that_rank_and_the_first_goes_on(job: Job) -> None:
    first = job.start(JOB, RANK=0, WORLD_SIZE=2)
    job.rendezvous_folder(0)
    second = finish(job.start(JOB, RANK=0, WORLD_SIZE=2))
    assert second.error.startswith("covey.ConfigError")
    assert f"rank 0 of this job is already running as process {first.pid}" in second.error
    check(reports_of(finish_all([first, job.start(JOB, RANK=1, WORLD_SIZE=2)])), 2)
    assert job.left_behind() == []


def test_a_job_takes_over_what_a_killed_one_of_the_same_name_left(job: Job) -> None:
    killed = job.ranks(WAITING_JOB, 3)
    for process in killed:
        assert pipes.stdout(process).readline()
    for process in killed:
        process.send_signal(signal.SIGKILL)
        process.wait(DEADLINE)
    assert len(job.left_behind()) == 8, "a folder, a token, three sockets and three locks"
    check(reports_of(finish_all(job.ranks(JOB, 2))), 2)
    assert job.left_behind() == []


def test_a_rank_that_died_while_the_others_gathered_may_come_again(job: Job) -> None:
    early = [job.start(JOB, RANK=rank, WORLD_SIZE=3) for rank in (0, 1)]
    for rank in (0, 1):
        job.rendezvous_folder(rank)
    early[1].send_signal(signal.SIGKILL)
    early[1].wait(DEADLINE)
    late = [job.start(JOB, RANK=rank, WORLD_SIZE=3) for rank in (1, 2)]
    check(reports_of(finish_all([early[0], *late])), 3)
    assert job.left_behind() == []


@pytest.mark.parametrize(
    "where", ["size=3, address='127.0.0.1:4700'", f"peers={[f'localhost:{4700 + r}' for r in range(3)]}"]
)
def test_a_program_may_place_its_ranks_itself(job: Job, where: str) -> None:
    codes = [JOB.replace("covey.join(", f"covey.join(rank={rank}, {where}, ") for rank in range(3)]
    assert codes[0] != JOB
    check(reports_of(finish_all([job.start(code) for code in codes])), 3)
    assert job.left_behind() == []


@pytest.mark.parametrize(
    ("one", "other", "text"),
    [
        ({"RANK": 0, "WORLD_SIZE": 2}, {"RANK": 1, "WORLD_SIZE": 3}, "size is 3 on rank 1 and 2 on rank 0"),
        ({"RANK": 0, "WORLD_SIZE": 3}, {"RANK": 1, "WORLD_SIZE": 2}, "size is 2 on rank 1 and 3 on rank 0"),
        ({"RANK": 0, "WORLD_SIZE": 2}, {"RANK": 2, "WORLD_SIZE": 3}, "size is 3 on rank 2 and 2 on rank 0"),
        (
            {"RANK": 0, "WORLD_SIZE": 2, "COVEY_LANES": "tcp"},
            {"RANK": 1, "WORLD_SIZE": 2, "COVEY_LANES": "shm"},
            "lanes is 'shm' on rank 1 and 'tcp' on rank 0",
        ),
    ],
    ids=["larger", "smaller", "outside", "lanes"],
)
def test_settings_that_differ_between_ranks_are_an_error_on_both(
    job: Job, one: dict[str, Any], other: dict[str, Any], text: str
) -> None:
    patience = {"COVEY_TIMEOUT": 1000}  # they know it before, or the test fails
    for ended in finish_all([job.start(JOB, **one, **patience), job.start(JOB, **other, **patience)]):
        assert ended.error.startswith("covey.ConfigError")
        assert text in ended.error
    assert job.left_behind() == []


@pytest.mark.parametrize(
    ("env", "text"),
    [
        ({"COVEY_LANES": "bogus"}, "COVEY_LANES='bogus' is unknown; use one of auto, shm, unix, tcp"),
        ({"COVEY_LANES": "memory"}, "lanes='memory' is for covey.testing.run_threads"),
        ({"COVEY_LANSE": "shm"}, "COVEY_LANSE is set, but covey has no such setting; did you mean COVEY_LANES?"),
        ({"COVEY_TIMEOUT": "soon"}, "COVEY_TIMEOUT='soon' is not a number of seconds"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT='99999'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_setting_that_cannot_work_is_refused_before_anyone_waits(job: Job, env: dict[str, str], text: str) -> None:
    ended = finish(job.start(JOB, RANK=0, WORLD_SIZE=2, **env))
    assert ended.error.startswith("covey.ConfigError")
    assert text in ended.error
    assert job.left_behind() == []


def test_the_deadline_of_join_names_the_ranks_that_did_not_come(job: Job) -> None:
    code = """
import covey, json
try:
    covey.join(timeout=0.6)
except covey.DeadlineError as error:
    print(json.dumps([error.late, str(error)]))
"""
    ranks = [job.start(code, RANK=rank, WORLD_SIZE=4) for rank in (0, 3)]
    for rank, ended in zip((0, 3), finish_all(ranks), strict=True):
        late, text = ended.report
        assert set(late) >= {1, 2}
        assert text.startswith(f"rank {rank} of 4 waited in torchrun-127.0.0.1-29500 for rank ")
        assert "until the timeout of 0.6 s ended" in text
        assert "1, 2" in text
        assert f"The ranks of this host meet in {job.temp}/covey-{os.getuid()}/torchrun" in text
        assert "XDG_RUNTIME_DIR?" in text
    assert job.left_behind() == []


def test_ranks_with_different_folders_for_temporary_files_meet_under_an_address(job: Job) -> None:
    port = 10000 + os.getpid() % 50000  # the folder is that of this user: other tests must not meet there
    ranks = []
    for rank in (0, 1):
        (job.folder / f"tmp{rank}").mkdir()
        own = {"TMPDIR": str(job.folder / f"tmp{rank}"), "XDG_RUNTIME_DIR": ""}
        words = f"covey.join(rank={rank}, size=2, address='127.0.0.1:{port}', timeout=500)"
        ranks.append(job.start(JOB.replace("covey.join()", words), **own))
    reports = reports_of(finish_all(ranks))
    check(reports, 2)
    assert [report["lanes"] for report in reports] == [["shm"], ["shm"]]


def test_a_program_that_a_rank_starts_is_told_that_it_cannot_join_in_its_place(job: Job) -> None:
    inner = "import covey; covey.join()"
    code = f"""
import covey, subprocess, sys
group = covey.join()
if group.rank == 1:
    inner = subprocess.run([sys.executable, "-c", {inner!r}], capture_output=True, text=True)
    print(inner.stderr.strip().splitlines()[-1])
group.barrier()
"""
    ended = finish(job.start(code, [sys.executable, "-m", "covey", "run", "-n", "2"]))
    assert ended.code == 0, ended.err
    assert "ConfigError: the token of this run is not in descriptor" in ended.out


# A group of one


def test_a_group_of_one_does_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("COVEY_RANK", "RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_STEP_ID"):
        monkeypatch.delenv(key, raising=False)
    x = np.arange(6.0)
    with covey.join() as group:
        assert covey.join() is group
        assert (group.rank, group.size, group.local_rank, group.live, group.lanes()) == (0, 1, 0, (0,), {})
        for op in ("sum", "mean", "min", "max", "prod"):
            np.testing.assert_array_equal(group.all_reduce(x.copy(), op=op), x)
        np.testing.assert_array_equal(group.all_reduce(x.copy(), op="mean", weight=7), x)
        assert group.all_reduce(x, async_op=True).wait() is x
        assert group.all_reduce(3) == 3
        for result in (group.reduce(x.copy()), group.broadcast(x.copy()), group.reduce_scatter(x), group.scan(x)):
            np.testing.assert_array_equal(result, x)
        np.testing.assert_array_equal(group.exscan(x), np.zeros(6))
        for (only,) in (group.all_gather(x), group.gather(x) or [], group.all_to_all([x])):
            np.testing.assert_array_equal(only, x)
        np.testing.assert_array_equal(group.all_gather(x, out=np.empty((1, 6))), [x])
        np.testing.assert_array_equal(group.scatter([x]), x)
        group.barrier()
        group.sync_gradients({"w": x})
        sent = group.send(x, dst=0, tag=4, async_op=True)
        np.testing.assert_array_equal(group.recv(src=covey.ANY, tag=4), x)
        sent.wait()
        assert group.broadcast_object({"a": 1}) == {"a": 1}
        assert group.all_gather_object([2]) == [[2]]
        assert group.gather_object("x") == ["x"]
        assert group.scatter_object([5]) == 5
        group.send_object({"b": 2}, dst=0)
        assert group.recv_object() == {"b": 2}
        with group.split(color=1) as part:
            assert (part.rank, part.size) == (0, 1)
            assert part.all_reduce(2.5) == 2.5
        assert group.split(color=None) is None
    with pytest.raises(covey.ClosedError):
        group.barrier()


# Strangers


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
@pytest.mark.parametrize("lanes", ["unix", "tcp", "secure"])
def test_another_user_can_neither_join_a_group_nor_keep_it_from_working(job: Job, lanes: str) -> None:
    """A stranger finds every listening socket of a group that has formed but not opened its lanes yet."""
    code = """
import sys, json, covey, numpy as np
from covey.runtime.group.internals import engine_of
from covey.runtime.joining.node import node_of
with covey.join() as group:
    node = node_of(group)
    addresses = [(address.ip, address.port) for address in node.card.contact.addresses]
    print(json.dumps([addresses, node.card.contact.socket]) + "\\n", end="", flush=True)
    sys.stdin.readline()
    x = np.arange(1000.0) * (group.rank + 1)
    group.all_reduce(x)
    print(json.dumps([list(group.lanes().values()), float(x[-1]), node.acceptor.turned_away]))
"""
    stranger = f"""
import encodings.idna, json, os, socket, sys  # all of it now: another user may not be able to read our Python
os.setgroups([])
os.setgid({NOBODY})
os.setuid({NOBODY})
said = []
held = []
for addresses, path in json.loads(sys.stdin.readline()):
    try:
        socket.socket(socket.AF_UNIX).connect(path)
        said.append("connected")
    except OSError as error:
        said.append(type(error).__name__)
    for address in addresses:
        with socket.create_connection(address, timeout=500) as guess:
            assert len(guess.recv(40)) == 16
            guess.sendall(b"\\1" + bytes(47) + b"\\0\\0\\0\\4junk")
            try:
                said.append(guess.recv(100).decode())
            except ConnectionResetError:
                said.append("")
        held += [socket.create_connection(address, timeout=500) for _ in range(100)]
print(json.dumps(said) + "\\n", end="", flush=True)
sys.stdin.read()
"""
    job.folder.chmod(0o755)  # as a shared /tmp would be
    ranks = job.ranks(code, 3, COVEY_LANES=lanes)
    positions = [json.loads(pipes.stdout(process).readline()) for process in ranks]
    folder = Path(positions[0][1]).parent
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, folder.parent)] == [0o700, 0o700]
    outsider = job.start(stranger)
    pipes.stdin(outsider).write(json.dumps(positions) + "\n")
    pipes.stdin(outsider).flush()
    said = json.loads(pipes.stdout(outsider).readline())
    refused = ["PermissionError"] if lanes == "unix" else ["PermissionError", ""]
    assert said == refused * 3, "no socket file can be reached, and a wrong answer at the door ends the connection"
    for process in ranks:
        pipes.stdin(process).write("go\n")
        pipes.stdin(process).flush()
    for ended in finish_all(ranks):
        kinds, total, turned_away = ended.report
        assert kinds == [lanes, lanes]
        assert total == 999 * 6.0
        assert (turned_away > 0) is (lanes != "unix")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to another user")
def test_a_rendezvous_folder_that_another_user_made_first_is_refused(job: Job) -> None:
    trap = job.temp / f"covey-{os.getuid()}"
    trap.mkdir(mode=0o777)
    os.chown(trap, NOBODY, NOBODY)
    ended = finish(job.start(JOB, RANK=0, WORLD_SIZE=2))
    assert f"ConfigError: {trap} must be a folder of yours with mode 0700" in ended.error
    assert list(trap.iterdir()) == []


def test_a_rank_of_another_run_that_knows_no_token_is_refused(job: Job) -> None:
    """A process that says something else than the token at a rank's door is no reason to stop forming the run."""
    first = job.start(JOB, RANK=0, WORLD_SIZE=2, COVEY_LANES="tcp")
    folder = job.rendezvous_folder(0)
    guess = """
import contextlib, socket, sys
for junk in (b"", b"GET / HTTP/1.0\\r\\n\\r\\n", bytes(32) + b"\\xff" * 4, bytes(200)):
    with socket.socket(socket.AF_UNIX) as sock, contextlib.suppress(ConnectionResetError):
        sock.settimeout(500)
        sock.connect(sys.argv[1])
        sock.sendall(junk)
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(100): pass
"""
    code = f"import sys; sys.argv[1:] = [{str(folder / '0.sock')!r}]\n{guess}"
    assert finish(job.start(code)).code == 0
    check(reports_of(finish_all([first, job.start(JOB, RANK=1, WORLD_SIZE=2, COVEY_LANES="tcp")])), 2)
    wait_until(lambda: job.left_behind() == [])
