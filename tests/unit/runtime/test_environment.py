"""Which rank of which run a process is, as every launcher tells it."""

from __future__ import annotations

import os
import re
import secrets
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from covey.base.config import GroupConfig, split_seeds
from covey.base.errors import ConfigError
from covey.net.keys import clusters
from covey.runtime import environment as environment_module
from covey.runtime.environment import ClusterOptions, LaunchedRank, WantedRun, find_launched_rank, find_run, is_loopback
from covey.runtime.joining.bootstrap import join_at
from covey.runtime.peers.search import seed_addresses
from covey.wire.messages import Address
from covey.wire.secret import ClusterSecret

if TYPE_CHECKING:
    from collections.abc import Iterator

COVEY = {"COVEY_RANK": "1", "COVEY_SIZE": "3", "COVEY_LOCAL_RANK": "1", "COVEY_LOCAL_SIZE": "3"}
HAND = {"RANK": "2", "WORLD_SIZE": "4"}
TORCHRUN = {
    **HAND,
    "LOCAL_RANK": "2",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node-7",
    "MASTER_PORT": "31000",
    "TORCHELASTIC_RUN_ID": "abc",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
TWO_HOSTS = {**TORCHRUN, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "5",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "5",
    "PMIX_NAMESPACE": "prterun-box-17@1",
}
PMI = {"PMI_RANK": "1", "PMI_SIZE": "6", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "6", "HYDRA_JOBID": "j9"}
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "4",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_NUM_NODES": "1",
}
MASTER = {"MASTER_ADDR": "10.1.2.3", "MASTER_PORT": "4000"}


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Ranks of a host find each other in a private folder with a short path."""
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        monkeypatch.setenv("COVEY_HOME", f"{folder}/home")
        for name in ("COVEY_SECRET", "COVEY_SECRET_FILE", "COVEY_CLUSTER"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(environment_module, "_tokens", {})
        yield Path(folder)


@pytest.fixture
def token_pipe() -> Iterator[tuple[int, bytes]]:
    """A pipe with a token in it, as `covey run` leaves one for each rank."""
    token = secrets.token_bytes(32)
    reader, writer = os.pipe()
    os.write(writer, token)
    os.close(writer)
    try:
        yield reader, token
    finally:
        if is_open(reader):
            os.close(reader)


def is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def with_pipe(descriptor: int) -> dict[str, str]:
    return {**COVEY, "COVEY_MEET": "/run/meet", "COVEY_TOKEN_FD": str(descriptor)}


def where(launched: LaunchedRank) -> tuple[int, int, int | None, int]:
    return launched.rank, launched.size, launched.local_rank, launched.local_size


# What started this process


def test_without_a_launcher_a_process_is_a_group_of_one() -> None:
    launched = find_launched_rank({"PATH": "/bin", "HOME": "/"})
    assert where(launched) == (0, 1, 0, 1)
    assert (launched.folder, launched.master) == ("", None)


def test_covey_run_gives_place_folder_and_token(token_pipe: tuple[int, bytes]) -> None:
    descriptor, token = token_pipe
    launched = find_launched_rank(with_pipe(descriptor))
    assert where(launched) == (1, 3, 1, 3)
    assert (launched.folder, launched.token) == ("/run/meet", token)
    assert token.hex() not in repr(launched)
    assert repr(token) not in repr(launched)


def test_ranks_of_torchrun_on_one_host_meet_in_a_folder_whatever_the_master_is_called(runtime: Path) -> None:
    launched = find_launched_rank(TORCHRUN)
    assert where(launched) == (2, 4, 2, 4)
    assert Path(launched.folder).is_relative_to(runtime)
    assert launched.token is None


def test_ranks_of_torchrun_on_several_hosts_meet_at_the_master() -> None:
    launched = find_launched_rank(TWO_HOSTS)
    assert where(launched) == (2, 4, 0, 2)
    assert (launched.folder, launched.master) == ("", ("node-7", 31000))


def test_a_restart_of_torchrun_meets_elsewhere_than_the_run_before() -> None:
    again = {**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "1"}
    assert find_launched_rank(TORCHRUN).folder != find_launched_rank(again).folder


def test_rank_and_size_by_hand_are_enough_on_one_host(runtime: Path) -> None:
    launched = find_launched_rank(HAND)
    assert where(launched) == (2, 4, 2, 4)
    assert Path(launched.folder).is_relative_to(runtime)


def test_the_master_port_tells_two_jobs_by_hand_apart() -> None:
    folders = {find_launched_rank({**HAND, "MASTER_PORT": port}).folder for port in ("29500", "29501")}
    assert len(folders) == 2
    assert find_launched_rank(HAND).folder in folders, "29500 is the default"


def test_ranks_that_name_a_loopback_master_are_on_this_host_even_if_each_counts_itself_alone(runtime: Path) -> None:
    launched = find_launched_rank({**HAND, "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"})
    assert (launched.rank, launched.size, launched.local_rank) == (2, 4, 0)
    assert Path(launched.folder).is_relative_to(runtime)


def test_a_master_elsewhere_without_local_numbers_means_one_rank_a_host() -> None:
    launched = find_launched_rank({**HAND, **MASTER})
    assert where(launched) == (2, 4, 0, 1)
    assert launched.master == ("10.1.2.3", 4000)


def test_open_mpi_on_one_host(runtime: Path) -> None:
    launched = find_launched_rank(OPEN_MPI)
    assert where(launched) == (3, 5, 3, 5)
    assert Path(launched.folder).is_relative_to(runtime)


def test_jobs_of_open_mpi_meet_in_folders_of_their_own() -> None:
    other = {**OPEN_MPI, "PMIX_NAMESPACE": "prterun-box-18@1"}
    assert find_launched_rank(OPEN_MPI).folder != find_launched_rank(other).folder


def test_open_mpi_on_several_hosts_needs_a_master() -> None:
    spread = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    with pytest.raises(ConfigError, match="MASTER_ADDR"):
        find_launched_rank(spread)
    launched = find_launched_rank({**spread, **MASTER})
    assert where(launched) == (3, 5, 1, 2)
    assert launched.master == ("10.1.2.3", 4000)


def test_mpich_by_its_process_manager(runtime: Path) -> None:
    launched = find_launched_rank(PMI)
    assert where(launched) == (1, 6, 1, 6)
    assert Path(launched.folder).is_relative_to(runtime)


def test_a_slurm_step_of_several_tasks_on_one_host(runtime: Path) -> None:
    launched = find_launched_rank(SLURM)
    assert where(launched) == (4, 7, 4, 7)
    assert Path(launched.folder).is_relative_to(runtime)


def test_steps_and_jobs_of_slurm_meet_in_folders_of_their_own() -> None:
    variants: tuple[dict[str, str], ...] = ({}, {"SLURM_STEP_ID": "3"}, {"SLURM_JOB_ID": "78"})
    assert len({find_launched_rank({**SLURM, **change}).folder for change in variants}) == 3


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("north", "north"),
        ("north,south", "north"),
        ("n[007-012,20],m3", "n007"),
        ("n[3,5-8]", "n3"),
        ("rack2-n[1-2].lab,x", "rack2-n1.lab"),
        ("north,n[1-3]", "north"),
    ],
)
def test_ranks_of_slurm_on_several_hosts_meet_at_the_first_of_them(nodes: str, first: str) -> None:
    spread = {**SLURM, "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": nodes}
    launched = find_launched_rank(spread)
    assert launched.master == (first, 20_079)
    assert find_launched_rank({**spread, "SLURM_STEP_ID": "3"}).master == (first, 20_080)
    assert find_launched_rank({**spread, **MASTER}).master == ("10.1.2.3", 4000)


def test_components_of_a_heterogeneous_slurm_step_are_one_run() -> None:
    mixed = {**SLURM, "SLURM_HET_SIZE": "2", "SLURM_JOB_NODELIST_HET_GROUP_0": "big1", "SLURM_STEP_NODELIST": "small7"}
    launched = find_launched_rank({**mixed, "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "6"})
    assert (launched.rank, launched.size, launched.master) == (4, 6, ("big1", 20_079))
    assert find_launched_rank({**mixed, "WORLD_SIZE": "9"}).size == 9


def test_a_pod_of_an_indexed_job_has_the_rank_of_its_index() -> None:
    env = {"JOB_COMPLETION_INDEX": "2", "WORLD_SIZE": "3", "MASTER_ADDR": "train-0.train"}
    launched = find_launched_rank(env)
    assert (launched.rank, launched.size, launched.local_rank, launched.local_size) == (2, 3, 0, 1)
    assert launched.addresses == (("train-0.train", 29501),)
    assert find_launched_rank({**env, "JOB_COMPLETION_INDEX": "0", "WORLD_SIZE": "1"}).size == 1
    with pytest.raises(ConfigError, match="WORLD_SIZE to the Job's completions"):
        find_launched_rank({"JOB_COMPLETION_INDEX": "2"})


def test_a_slurm_step_on_several_hosts_needs_a_master() -> None:
    spread = {**SLURM, "SLURM_STEP_NUM_NODES": "2", "SLURM_LOCALID": "1"}
    with pytest.raises(ConfigError, match="several hosts"):
        find_launched_rank(spread)
    launched = find_launched_rank({**spread, **MASTER})
    assert (launched.rank, launched.size, launched.local_rank, launched.master) == (4, 7, 1, ("10.1.2.3", 4000))


@pytest.mark.parametrize(
    "env",
    [
        {key: value for key, value in SLURM.items() if key != "SLURM_STEP_ID"},  # the shell of sbatch
        {**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},  # srun of one task
        {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"},
    ],
)
def test_a_slurm_job_outside_a_step_of_several_tasks_is_a_group_of_one(env: dict[str, str]) -> None:
    assert where(find_launched_rank(env)) == (0, 1, 0, 1)


@pytest.mark.parametrize("env", [{"RANK": "3"}, {"WORLD_SIZE": "3"}, {"PMI_RANK": "1"}, {"PMI_SIZE": "2"}])
def test_half_a_launcher_is_no_launcher(env: dict[str, str]) -> None:
    assert find_launched_rank(env).size == 1


def test_the_nearest_launcher_wins(token_pipe: tuple[int, bytes]) -> None:
    sizes = []
    for env in (
        {**SLURM, **PMI, **OPEN_MPI, **HAND, **with_pipe(token_pipe[0])},
        {**SLURM, **PMI, **OPEN_MPI, **HAND},
        {**SLURM, **PMI, **OPEN_MPI},
        {**SLURM, **PMI},
        SLURM,
    ):
        sizes.append(find_launched_rank(env).size)
    assert sizes == [3, 4, 5, 6, 7]


# What launchers cannot have meant


@pytest.mark.parametrize(
    ("env", "key"),
    [
        ({**HAND, "RANK": "one"}, "RANK"),
        ({**HAND, "RANK": ""}, "RANK"),
        ({**HAND, "RANK": "-1"}, "RANK"),
        ({**HAND, "WORLD_SIZE": "4.0"}, "WORLD_SIZE"),
        ({**HAND, "MASTER_PORT": "http"}, "MASTER_PORT"),
        ({**HAND, "MASTER_PORT": "70000"}, "MASTER_PORT"),
        ({**HAND, **MASTER, "MASTER_PORT": "65535"}, "MASTER_PORT"),
        ({**HAND, "LOCAL_RANK": "x"}, "LOCAL_RANK"),
        ({**HAND, "LOCAL_WORLD_SIZE": "x"}, "LOCAL_WORLD_SIZE"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "?"}, "OMPI_COMM_WORLD_RANK"),
        ({**PMI, "PMI_SIZE": "many"}, "PMI_SIZE"),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "7(x2)"}, "SLURM_STEP_NUM_TASKS"),
        ({**COVEY, "COVEY_SIZE": "three"}, "COVEY_SIZE"),
        ({**COVEY, "COVEY_MEET": "/run/meet", "COVEY_TOKEN_FD": "-3"}, "COVEY_TOKEN_FD"),
    ],
)
def test_a_malformed_number_is_refused_by_name(env: dict[str, str], key: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{key}=") as caught:
        find_launched_rank(env)
    assert repr(env[key]) in str(caught.value)


@pytest.mark.parametrize(
    ("env", "key"),
    [
        ({"COVEY_RANK": "0"}, "COVEY_SIZE"),
        (COVEY, "COVEY_MEET"),
        ({**COVEY, "COVEY_MEET": "/run/meet"}, "COVEY_TOKEN_FD"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE"),
        ({key: value for key, value in SLURM.items() if key != "SLURM_JOB_ID"}, "SLURM_JOB_ID"),
    ],
)
def test_a_missing_variable_is_named(env: dict[str, str], key: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{key} is not set"):
        find_launched_rank(env)


@pytest.mark.parametrize(("rank", "size"), [("4", "4"), ("9", "4"), ("0", "0")])
def test_a_rank_outside_its_run_is_refused(rank: str, size: str) -> None:
    with pytest.raises(ConfigError, match=f"rank {rank} is not one of the {size} ranks"):
        find_launched_rank({"RANK": rank, "WORLD_SIZE": size})


# The token of `covey run`


def test_the_token_outlives_its_pipe_so_a_program_may_join_again(token_pipe: tuple[int, bytes]) -> None:
    descriptor, token = token_pipe
    assert find_launched_rank(with_pipe(descriptor)).token == token
    assert not is_open(descriptor)
    stranger, other = os.pipe()
    assert stranger == descriptor, "the number is in use again"
    try:
        assert find_launched_rank(with_pipe(descriptor)).token == token
        assert is_open(stranger), "a descriptor that is not ours was closed"
    finally:
        os.close(stranger)
        os.close(other)


@pytest.mark.parametrize("content", [b"", b"short"])
def test_a_pipe_without_a_whole_token_is_refused(content: bytes) -> None:
    reader, writer = os.pipe()
    os.write(writer, content)
    os.close(writer)
    try:
        with pytest.raises(ConfigError, match="Only the process that `covey run` started can join"):
            find_launched_rank(with_pipe(reader))
    finally:
        os.close(reader)


def test_a_descriptor_that_is_not_a_pipe_of_covey_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"x" * 100)
    quiet, writer = os.pipe()
    descriptors = [os.open(path, os.O_RDONLY), quiet]
    try:
        for descriptor in descriptors:
            with pytest.raises(ConfigError, match=f"descriptor {descriptor}"):
                find_launched_rank(with_pipe(descriptor))
            assert is_open(descriptor)
        assert os.lseek(descriptors[0], 0, os.SEEK_CUR) == 0
    finally:
        for descriptor in (*descriptors, writer):
            os.close(descriptor)


def test_a_descriptor_that_is_not_open_is_refused() -> None:
    free = next(number for number in range(200, 1000) if not is_open(number))
    with pytest.raises(ConfigError, match=f"descriptor {free}"):
        find_launched_rank(with_pipe(free))


# Seats


def test_a_run_on_several_hosts_is_refused_without_a_secret_unless_clear_text_is_allowed() -> None:
    with pytest.raises(ConfigError, match=r"insecure=True, --insecure or COVEY_INSECURE=1") as caught:
        join_at(find_launched_rank(TWO_HOSTS), GroupConfig())
    assert "node-7" in str(caught.value)
    assert "`covey init`" in str(caught.value)


def test_a_master_address_that_is_not_of_this_machine_is_refused_by_rank_0() -> None:
    launched = find_launched_rank({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "4000"})
    with pytest.raises(ConfigError, match=r"cannot listen at 192\.0\.2\.1, port 4001"):
        join_at(launched, GroupConfig(insecure=True))


def test_a_temporary_folder_with_a_long_path_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("long" * 30)
    long.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    with pytest.raises(ConfigError, match="too long for a unix socket; set XDG_RUNTIME_DIR"):
        join_at(find_launched_rank(HAND), GroupConfig())
    assert [path for path in long.iterdir() if path.name != f"covey-{os.getuid()}"] == []


@pytest.mark.parametrize("wait", [0, -1, float("nan")])
def test_a_join_timeout_that_is_no_duration_is_refused(wait: float) -> None:
    with pytest.raises(ConfigError, match="timeout"):
        join_at(find_launched_rank(HAND), GroupConfig(), timeout=wait)


def test_only_addresses_that_never_leave_the_machine_are_loopback() -> None:
    for host in ("127.0.0.1", "127.3.2.1", "::1", "localhost"):
        assert is_loopback(host), host
    for host in ("10.0.0.1", "0.0.0.0", "::", "example.org", ""):
        assert not is_loopback(host), host


# Runs of a cluster


def test_without_a_run_there_is_none_and_sizes_mean_nothing() -> None:
    assert find_run({"RANK": "0"}, {"timeout": 3.0}) is None
    for name in ("size", "min_size", "max_size"):
        with pytest.raises(ConfigError, match=f"{name}= is for runs of a cluster"):
            find_run({}, {name: 2})


def test_a_run_asked_for_by_name_has_defaults_and_the_programs_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/srv/jobs/train.py", "--fast"])
    expected = WantedRun("r", "train.py", size=None, min_size=2, max_size=None, timeout=60.0)
    assert find_run({}, {"run": "r", "size": None}) == expected
    assert find_run({"COVEY_RUN": "r"}, {}) == expected


def test_what_covey_run_tells_is_used_where_the_program_says_nothing() -> None:
    env = {
        "COVEY_RUN": "told",
        "COVEY_RUN_PROGRAM": "p.py",
        "COVEY_RUN_MIN_SIZE": "3",
        "COVEY_RUN_MAX_SIZE": "5",
        "COVEY_JOIN_TIMEOUT": "2.5",
    }
    assert find_run(env, {}) == WantedRun("told", "p.py", size=None, min_size=3, max_size=5, timeout=2.5, floor=3)
    asked = {"run": "asked", "size": 4, "timeout": 9}
    assert find_run(env, asked) == WantedRun("asked", "p.py", size=4, min_size=4, max_size=4, timeout=9.0)
    exact = {"COVEY_RUN": "told", "COVEY_RUN_PROGRAM": "p.py", "COVEY_RUN_SIZE": "4"}
    assert find_run(exact, {}) == WantedRun("told", "p.py", size=4, min_size=4, max_size=4, timeout=60.0)


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"run": ""}, "run=''"),
        ({"run": "x" * 101}, "1 to 100 printable characters"),
        ({"run": "a\nb"}, "printable"),
        ({"run": "r", "size": 0}, "size=0"),
        ({"run": "r", "min_size": 0}, "min_size=0"),
        ({"run": "r", "size": True}, "size=True"),
        ({"run": "r", "min_size": 2.5}, "min_size=2.5"),
        ({"run": "r", "max_size": -1}, "max_size=-1"),
        ({"run": "r", "min_size": 4, "max_size": 3}, "max_size=3 is less than min_size=4"),
        ({"run": "r", "size": 3, "min_size": 2}, "size= says exactly how many"),
        ({"run": "r", "timeout": 0}, "timeout=0"),
        ({"run": "r", "timeout": "5"}, "timeout='5'"),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(f"{key}={each!r:.9}" for key, each in value.items()),
)
def test_a_run_that_cannot_be_is_refused_by_name(asked: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        find_run({}, asked)


@pytest.mark.parametrize("key", ["COVEY_RUN_SIZE", "COVEY_RUN_MIN_SIZE", "COVEY_RUN_MAX_SIZE", "COVEY_JOIN_TIMEOUT"])
def test_a_number_that_covey_run_did_not_write_is_refused_by_name(key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}='many'"):
        find_run({"COVEY_RUN": "r", key: "many"}, {})


def test_the_programs_seeds_beat_those_of_the_environment_and_stand_before_the_clusters_own() -> None:
    clusters.save(clusters.Cluster(ClusterSecret("lab", b"k" * 32), seeds=("10.0.0.1:1", "10.0.0.2:2")))
    env = {"COVEY_SEEDS": " 10.0.0.3:3, 10.0.0.1:1 "}
    assert ClusterOptions().find(env).seeds == ("10.0.0.3:3", "10.0.0.1:1", "10.0.0.2:2")
    assert ClusterOptions(seeds=("a:4",)).find(env).seeds == ("a:4", "10.0.0.1:1", "10.0.0.2:2")
    assert ClusterOptions(seeds=()).find(env).seeds == ("10.0.0.1:1", "10.0.0.2:2")
    assert ClusterOptions().find(env).secret.key == b"k" * 32


def test_the_secret_leaves_the_environment_and_is_remembered() -> None:
    env = {"COVEY_SECRET": "ab" * 32, "COVEY_CLUSTER": "lab"}
    for _ in range(2):
        found = ClusterOptions().find(env)
        assert (found.name, found.secret.key) == ("lab", b"\xab" * 32)
        assert env == {"COVEY_CLUSTER": "lab"}
    assert "ab" * 16 not in repr(found) + repr(ClusterOptions(secret="ab" * 32))


@pytest.mark.parametrize(
    ("seed", "address"),
    [
        ("10.0.0.7:5000", ("10.0.0.7", 5000)),
        ("10.0.0.7", ("10.0.0.7", 47700)),
        ("[fd00::7]:5000", ("fd00::7", 5000)),
        ("[fd00::7]", ("fd00::7", 47700)),
        ("fd00::7", ("fd00::7", 47700)),
        ("localhost:5000", ("127.0.0.1", 5000)),
    ],
)
def test_a_seed_is_an_address_and_a_port_that_can_be_guessed(seed: str, address: tuple[str, int]) -> None:
    assert seed_addresses(seed) == (Address(*address),)


@pytest.mark.parametrize(
    ("seed", "problem"),
    [
        ("10.0.0.7:", "'' is not a port from 1 to 65535"),
        ("10.0.0.7:0", "'0' is not a port"),
        ("10.0.0.7:65536", "'65536' is not a port"),
        ("foo:bar", "'bar' is not a port"),
        ("[::1]:-1", "'-1' is not a port"),
        ("h:٣", "'٣' is not a port"),
        ("http://x", "'//x' is not a port"),
        ("10.0.0.7:5000:6", "'5000:6' is not a port"),
        ("", "there is nothing between two commas"),
        ("#", "'#' is neither a host name nor an address"),
        (":5000", "'' is neither"),
        ("one two", "'one two' is neither"),
        ("10.0.0:5000", "'10.0.0' is neither"),
        ("10.0.0.256", "'10.0.0.256' is neither"),
        ("-x", "'-x' is neither"),
        ("x/y:5", "'x/y' is neither"),
        ("[::1", "there is no IPv6 address in brackets"),
        ("[10.0.0.7]:5", "there is no IPv6 address in brackets"),
        ("[::1]5000", "there is no IPv6 address in brackets"),
    ],
)
def test_what_is_no_seed_is_refused_at_once_by_name_with_the_forms_that_are(seed: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        split_seeds(f"10.0.0.7, {seed} ,north:5")
    assert str(caught.value).startswith(f"seed {seed!r}: {problem}")
    assert str(caught.value).endswith(
        "Seeds are host, host:port or [IPv6]:port, like 192.168.1.5:47700, separated by commas"
    )
    with pytest.raises(ConfigError, match=re.escape(f"seed {seed!r}: ")):
        ClusterOptions(secret="ab" * 32, seeds=("10.0.0.7", seed, "north")).find({})


def test_a_host_that_cannot_be_looked_up_now_is_a_seed_all_the_same() -> None:
    seeds = " north.invalid, south_2:5000,[fe80::1%eth0]:5 "
    assert split_seeds(seeds) == ("north.invalid", "south_2:5000", "[fe80::1%eth0]:5")
    assert split_seeds(" ") == ()
