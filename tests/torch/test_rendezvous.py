"""How torch's processes meet on covey: runs by name, launchers, torchrun; and what is left when they are killed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import tomllib
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from tests.support import forked
from tests.support.jobs import LAUNCHERS
from tests.support.torch_ranks import Lost, all_here, run_torch_ranks
from tests.support.waiting import DEADLINE
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousParameters
from torch.distributed.run import config_from_args, parse_args

import covey
from covey.base.errors import ConfigError, DeadlineError, Remedy
from covey.net.discovery.host_rendezvous import rendezvous_folder
from covey.torch import entry
from covey.torch.backend.rendezvous import parse
from covey.torch.backend.torchrun import get_handler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).parents[2]

# Addresses


@pytest.mark.parametrize(
    ("url", "asked"),
    [
        ("covey://", {}),
        ("covey://my-run", {"run": "my-run"}),
        ("covey://My%20Run/2?size=4&timeout=2.5", {"run": "My Run/2", "size": 4, "timeout": 2.5}),
        ("covey://r?cluster=home&min_size=2&max_size=8", {"run": "r", "cluster": "home", "min_size": 2, "max_size": 8}),
        ("covey://r?seeds=a:1,b:2&interfaces=eth*", {"run": "r", "seeds": ("a:1", "b:2"), "interfaces": "eth*"}),
        ("covey://r?world_size=3", {"run": "r", "size": 3}),
        ("covey://r?min_size=2&world_size=3", {"run": "r", "min_size": 2}),
        ("covey://r?world_size=-1", {"run": "r"}),
        ("env://?rank=1&world_size=3", {}),
    ],
)
def test_an_address_says_what_join_is_asked_for(url: str, asked: dict[str, Any]) -> None:
    found = parse(url)[0]
    assert found | {"seeds": tuple(found.get("seeds", ()))} == asked | {"seeds": asked.get("seeds", ())}


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("covey://r?sise=4", "no parameter 'sise'; there are cluster, size"),
        ("covey://r?size=four", "size='four' must be a number from 1 to 1024"),
        ("covey://r?timeout=", "timeout='' is not a number of seconds"),
        ("covey://r?size=4&size=5", "size is given twice"),
        ("covey://r?rank=0&world_size=2", "leave rank= out"),
        ("covey://r?size=4&world_size=2", "contradict each other"),
    ],
)
def test_an_address_that_nobody_understands_says_what_is_wrong_with_it(url: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        parse(url)


def test_registering_again_changes_nothing() -> None:
    handlers = __import__("torch.distributed.rendezvous", fromlist=["_"])._rendezvous_handlers
    before = dict(handlers)
    entry.register()
    assert handlers == before


# In this process, alone


@pytest.fixture
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [name for name in os.environ if name.startswith(("COVEY_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("LOCAL_RANK", "set, so that it is put back")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "set, so that it is put back")
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.usefixtures("_alone")
def test_a_process_that_nobody_launched_is_alone_and_torchs_env_is_left_as_it_is() -> None:
    dist.init_process_group("covey", init_method="covey://")
    assert (dist.get_rank(), dist.get_world_size(), os.environ["LOCAL_RANK"]) == (0, 1, "0")
    assert "RANK" not in os.environ
    dist.destroy_process_group()
    with pytest.raises(ValueError, match="environment variable RANK expected"):
        dist.init_process_group("covey")


@pytest.mark.usefixtures("_alone")
def test_a_group_that_the_process_has_joined_is_used_and_stays_open() -> None:
    with covey.join() as group:
        for options in ({}, {"init_method": "covey://"}):
            dist.init_process_group("covey", **options)
            assert dist.get_world_size() == 1
            dist.destroy_process_group()
        assert group.all_reduce(5) == 5


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"init_method": "covey://", "world_size": 2, "rank": 1}, "gave this process rank 0 of 1"),
        ({"init_method": "covey://?size=2"}, "name one"),
        ({"init_method": "covey://r?cluster=nowhere"}, "nowhere"),
    ],
)
def test_what_cannot_work_says_so(
    options: dict[str, Any], what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("COVEY_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match=what) as raised:
        dist.init_process_group("covey", **options)
    assert isinstance(raised.value, dist.DistBackendError)
    assert not dist.is_initialized()


# Runs of a cluster


def enter_cluster(folder: str, secret: str) -> None:
    """Be on a machine that is in a cluster; nothing leaves loopback."""
    os.environ |= {
        "COVEY_HOME": f"{folder}/home",
        "COVEY_SECRET": secret,
        "COVEY_INTERFACES": "lo",
        "TMPDIR": folder,
        "XDG_RUNTIME_DIR": folder,
    }
    tempfile.tempdir = None


def sum_of_ranks() -> int:
    x = torch.tensor([10.0 ** dist.get_rank()])
    dist.all_reduce(x)
    return int(x.item())


def meet_by_name(process: int, size: int, _path: str, folder: str, secret: str) -> tuple[Any, ...]:
    enter_cluster(folder, secret)
    address = f"covey://by-name?size={size}&timeout=500"
    found = []
    for _ in range(2):
        dist.init_process_group("covey", init_method=address)
        pair = dist.new_group([0, 2])
        found.append((dist.get_world_size(), sum_of_ranks(), os.environ["LOCAL_WORLD_SIZE"]))
        if dist.get_rank() in (0, 2):
            dist.barrier(pair)
        dist.destroy_process_group()
    dist.init_process_group("covey", init_method=address, timeout=timedelta(seconds=500))
    rank = dist.get_rank()
    assert int(os.environ["LOCAL_RANK"]) == rank
    assert "RANK" not in os.environ
    assert "COVEY_SECRET" not in os.environ
    return rank, found


def test_processes_meet_in_a_run_by_its_name_and_again_after_they_parted() -> None:
    with short_folder() as folder:
        found = run_torch_ranks(3, meet_by_name, folder, secrets.token_hex(32))
    assert sorted(rank for rank, _ in found) == [0, 1, 2]
    assert all(rounds == [(3, 111, "3")] * 2 for _, rounds in found)


def go_on_by_name(_process: int, size: int, _path: str, folder: str, secret: str) -> tuple[int, list[int], bool]:
    enter_cluster(folder, secret)
    dist.init_process_group("covey", init_method=f"covey://go-on?size={size}&on_loss=continue&timeout=500")
    assert sum_of_ranks() == 111
    if (rank := dist.get_rank()) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    x = torch.tensor([10.0**rank])
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    return int(x.item()), work.contributors, "COVEY_ON_LOSS" in os.environ


def test_an_address_may_say_that_a_run_goes_on_without_lost_ranks() -> None:
    with short_folder() as folder:
        found = run_torch_ranks(3, go_on_by_name, folder, secrets.token_hex(32))
    assert found.count(Lost) == 1
    assert [each for each in found if each is not Lost] == [(11, [0, 1], False)] * 2


def wait_in_vain(_process: int, _size: int, _path: str, folder: str, secret: str) -> str:
    enter_cluster(folder, secret)
    with pytest.raises(DeadlineError) as raised:
        dist.init_process_group("covey", init_method="covey://nobody?min_size=2", timeout=timedelta(seconds=1))
    assert isinstance(raised.value, dist.DistBackendError)
    return str(raised.value)


def test_torchs_timeout_bounds_the_wait_for_the_others() -> None:
    with short_folder() as folder:
        (text,) = run_torch_ranks(1, wait_in_vain, folder, secrets.token_hex(32))
    assert "nobody" in text


@pytest.fixture
def _put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget what an agent tells its workers by the environment."""
    for name in ("COVEY_CLUSTER", "COVEY_SEEDS", "COVEY_INTERFACES", "COVEY_RUN_PROGRAM"):
        monkeypatch.setenv(name, "set, so that it is put back")
        monkeypatch.delenv(name)


def agent_of(*words: str) -> Any:
    """Make an agent as torchrun makes one of its command line."""
    argv = ["--rdzv-backend", "covey", "--rdzv-id", "r", "--nnodes", "2", *words, "train.py"]
    config = config_from_args(parse_args(argv))[0]
    return get_handler()(
        RendezvousParameters(
            config.rdzv_backend,
            config.rdzv_endpoint,
            config.run_id,
            config.min_nodes,
            config.max_nodes,
            config.local_addr,
            **config.rdzv_configs,
        )
    )


@pytest.mark.usefixtures("_put_back")
@pytest.mark.parametrize(
    ("conf", "what"),
    [
        ("timeout=abc", "timeout=abc: give a number of seconds above 0"),
        ("timeout=-1", "timeout=-1: give a number of seconds above 0"),
        ("timeout=0", "timeout=0: give a number of seconds above 0"),
        ("timeout=nan,interfaces=lo", "timeout=nan: give a number of seconds above 0"),
        ("tiemout=3,cluster=home", "there is no 'tiemout'; there are cluster, seeds, interfaces, timeout"),
    ],
)
def test_what_torchrun_is_told_wrong_is_refused_with_what_to_write_and_no_worker_hears_of_it(
    conf: str, what: str
) -> None:
    before = dict(os.environ)
    with pytest.raises(ConfigError, match=re.escape(f"--rdzv-conf: {what}")) as raised:
        agent_of("--rdzv-conf", conf)
    assert raised.value.remedy is Remedy.FIX
    assert dict(os.environ) == before


@pytest.mark.usefixtures("_put_back")
def test_what_torchrun_is_told_reaches_the_workers_and_an_endpoint_is_a_seed() -> None:
    agent_of("--rdzv-conf", "cluster=home,interfaces=eth*,seeds=a:1,timeout=2.5", "--rdzv-endpoint", "b:2")
    names = ("COVEY_CLUSTER", "COVEY_INTERFACES", "COVEY_SEEDS")
    assert [os.environ[name] for name in names] == ["home", "eth*", "a:1,b:2"]
    # torch itself cuts at every comma.
    with pytest.raises(ValueError, match="option 'b:2' must have a value"):
        agent_of("--rdzv-conf", "seeds=a:1,b:2")


def be_an_agent(process: int, size: int, _path: str, folder: str, secret: str) -> tuple[int, int, float, str, str]:
    """Two rounds; then the second agent waits for a third, and the first closes it all instead."""
    enter_cluster(folder, secret)
    address = f"127.0.0.{process + 7}"
    parameters = RendezvousParameters("covey", "", "agents", size, size, local_addr=address, timeout="500")
    handler = get_handler()(parameters)
    assert (handler.get_backend(), handler.get_run_id(), handler.use_agent_store) == ("covey", "agents", False)
    first = handler.next_rendezvous()
    assert "COVEY_SECRET" not in os.environ
    assert not handler.is_closed()
    first.store.set("of the first round", "")
    until = time.monotonic() + 500
    if first.rank == 1:
        while not handler.num_nodes_waiting():
            assert time.monotonic() < until
            time.sleep(0.01)
    else:
        assert handler.num_nodes_waiting() == 0
    second = handler.next_rendezvous()
    assert handler.num_nodes_waiting() == 0
    assert not second.store.check(["of the first round"])
    second.store.barrier("looked", size)
    began = time.monotonic()
    if second.rank == 1:
        with pytest.raises(RendezvousClosedError, match="closed"):
            handler.next_rendezvous()
    else:
        while not handler.num_nodes_waiting():
            assert time.monotonic() < until
            time.sleep(0.01)
    assert handler.shutdown()
    assert handler.is_closed()
    with pytest.raises(RendezvousClosedError):
        handler.next_rendezvous()
    return second.rank, second.world_size, time.monotonic() - began, address, second.bootstrap_store_info.master_addr


def test_an_agent_that_closes_the_run_closes_it_for_one_that_waits_for_the_next_round(
    promised: Callable[[float], float],
) -> None:
    with short_folder() as folder:
        found = run_torch_ranks(2, be_an_agent, folder, secrets.token_hex(32))
    first, second = sorted(found)
    assert [first[:2], second[:2]] == [(0, 2), (1, 2)]
    assert max(first[2], second[2]) < promised(20)
    assert first[4] == second[4] == first[3]  # --local-addr of the first: its workers' first rank listens there


# One host


def die_together(rank: int, size: int, path: str, folder: str) -> None:
    os.environ |= {"TMPDIR": folder, "XDG_RUNTIME_DIR": folder}
    tempfile.tempdir = None
    dist.init_process_group("covey", init_method=f"file://{path}", rank=rank, world_size=size)
    assert sum_of_ranks() == 11
    assert len(list(rendezvous_folder("any").parent.glob("torch-*"))) == 1
    all_here(rank, size, path)
    os.kill(os.getpid(), signal.SIGKILL)


def meet_where_others_died(rank: int, size: int, path: str, folder: str) -> int:
    os.environ |= {"TMPDIR": folder, "XDG_RUNTIME_DIR": folder}
    tempfile.tempdir = None
    dist.init_process_group("covey", init_method=f"file://{path}", rank=rank, world_size=size)
    try:
        dist.barrier()
        return len(list(rendezvous_folder("any").parent.glob("torch-*")))
    finally:
        dist.destroy_process_group()


def test_what_processes_left_that_were_all_killed_is_gone_when_others_meet() -> None:
    with short_folder() as folder:
        assert run_torch_ranks(2, die_together, folder) == [Lost, Lost]
        assert len(list(Path(folder).glob("covey-*/torch-*"))) == 1
        assert run_torch_ranks(2, meet_where_others_died, folder) == [1, 1]
        assert list(Path(folder).glob("covey-*/torch-*")) == []


# Launchers

LAUNCHED = """
    import json, os
    import torch
    import torch.distributed as dist

    for backend in ("covey", "covey", "gloo"):
        dist.init_process_group(backend)
        x = torch.tensor([10.0 ** dist.get_rank()])
        dist.all_reduce(x)
        told = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")}
        told["LOCAL_WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"]
        print(json.dumps([backend, x.item(), dist.get_rank(), told]) + "\\n", end="", flush=True)
        dist.barrier()
        dist.destroy_process_group()
"""
WORKER = """
    import json, os, signal, sys, time
    from datetime import timedelta
    import torch
    import torch.distributed as dist

    dist.init_process_group("covey")
    rank, size = dist.get_rank(), dist.get_world_size()
    # The second agent's worker fails, then kills its agent; the first one's only notices that others begin anew. The
    # first to come may begin alone.
    killed = os.path.exists(sys.argv[1])
    stage = torch.tensor([int(os.environ["TORCHELASTIC_RESTART_COUNT"]) if size == 2 else 2 * killed])
    dist.broadcast(stage, size - 1)
    store = dist.distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    if size == 2 or killed:
        print(json.dumps([stage.item(), rank, size, type(store).__name__]) + "\\n", end="", flush=True)
    if size == 2:  # nobody ends before the other has what it needs of it
        store.set(f"said by {rank}", "")
        store.wait([f"said by {1 - rank}"], timedelta(seconds=500))
    if stage == 0 and rank == 1:
        os._exit(3)
    if stage == 1 and rank == 1:
        open(sys.argv[1], "w").close()
        os.kill(os.getppid(), signal.SIGKILL)
        os._exit(3)
    if stage < 2:
        time.sleep(500)
        os._exit(4)
"""


@contextlib.contextmanager
def short_folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as folder:
        yield folder


def environment(folder: str, **more: str) -> dict[str, str]:
    """Return that of a machine with an installed covey, whose entry points torch finds."""
    installed = Path(folder) / "path" / "imagined-1.dist-info"
    installed.mkdir(parents=True)
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    lines = [
        f"[{group}]\n" + "".join(f"{name} = {at}\n" for name, at in each.items()) for group, each in points.items()
    ]
    (installed / "entry_points.txt").write_text("".join(lines))
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: imagined\nVersion: 1\n")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    return (
        kept
        | {
            "PYTHONPATH": f"{ROOT / 'src'}:{installed.parent}",
            "HOME": folder,
            "TMPDIR": folder,
            "XDG_RUNTIME_DIR": folder,
        }
        | more
    )


def test_under_covey_run_a_script_only_names_the_backend() -> None:
    with short_folder() as folder:
        script = Path(folder) / "script.py"
        script.write_text(textwrap.dedent(LAUNCHED))
        run = forked.run(
            [sys.executable, "-m", "covey", "run", "-n", "2", str(script)],
            popen=forked.TorchPopen,
            env=environment(folder),
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            check=False,
        )
    assert run.returncode == 0, run.stdout + run.stderr
    for rank in range(2):
        lines = [line.partition("] ")[2] for line in run.stdout.splitlines() if line.startswith(f"[{rank}] ")]
        own = {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        told = own | {"MASTER_ADDR": "127.0.0.1"}
        assert [json.loads(line) for line in lines] == [
            [backend, 11.0, rank, told] for backend in ("covey", "covey", "gloo")
        ]


def test_agents_of_torchrun_find_each_other_begin_anew_when_a_worker_fails_and_go_on_when_one_is_killed() -> None:
    with short_folder() as folder, contextlib.ExitStack() as stack:
        script, secret = Path(folder) / "script.py", Path(folder) / "secret"
        script.write_text(textwrap.dedent(WORKER))
        secret.touch(mode=0o600)
        secret.write_text(secrets.token_hex(32))
        words = "--rdzv-backend covey --rdzv-id my-run --nnodes 1:2 --nproc-per-node 1 --max-restarts 2"
        argv = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            *words.split(),
            "--rdzv-conf",
            "interfaces=lo,timeout=500",
        ]
        env = environment(folder, COVEY_SECRET_FILE=str(secret))
        agents = [stack.enter_context(agent([*argv, str(script), f"{folder}/killed"], env)) for _ in range(2)]
        until = time.monotonic() + DEADLINE
        ends = [process.communicate(timeout=until - time.monotonic()) for process in agents]
        story = "\n".join(f"{out}\n{err[-3000:]}" for out, err in ends)
        assert sorted(process.returncode for process in agents) == [-signal.SIGKILL, 0], story
        said = sorted(json.loads(line) for out, _ in ends for line in out.splitlines() if line.startswith("["))
    rounds = [(0, 0, 2), (0, 1, 2), (1, 0, 2), (1, 1, 2), (2, 0, 1)]
    assert said == [[*each, "CoveyStore"] for each in rounds], story


@contextlib.contextmanager
def agent(argv: list[str], env: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    process = forked.TorchPopen(
        argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        with process:
            yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # workers too
