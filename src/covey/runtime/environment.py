"""Which run this process belongs to, and as which rank: read from the variables that its launcher set."""

from __future__ import annotations

import os
import re
import select
import stat
import sys
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from covey.base.config import check_timeout, split_list, split_relays, split_seeds
from covey.base.errors import ConfigError
from covey.base.settings import SETTINGS
from covey.net.discovery.host_rendezvous import RUN_TOKEN_BYTES, rendezvous_folder

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

    from covey.net.keys.clusters import Cluster

LAUNCH_JOIN_SECONDS: Final = 300.0
"""How long `join` waits for the other ranks of a launcher by default: they may be loading large libraries."""
CLUSTER_JOIN_SECONDS: Final[float] = SETTINGS["join_timeout"].default
DEFAULT_MIN_SIZE: Final = int(SETTINGS["run_min_size"].default)
MASTER_PORT: Final = 29500
"""What torch uses, too, if the variable is not set."""
PORT_OFFSET: Final = 1
"""Rank 0 listens this far above MASTER_PORT, which belongs to torch's store: to torchrun's, or to the script's own."""
SLURM_PORTS: Final = range(20_000, 30_000)
"""Rank 0 of a step of Slurm listens above one of these, chosen by job and step, if MASTER_ADDR is not set."""
_tokens: dict[int, bytes] = {}
"""By descriptor, what `covey run` wrote into the pipe there: it can be read once, but a program may join again."""


@dataclass(frozen=True, kw_only=True)
class LaunchedRank:
    """The rank of a process in a launcher's run, and where the ranks find each other."""

    rank: int
    size: int
    local_rank: int | None = 0
    """None: the ranks find out when they are linked."""
    local_size: int = 1
    folder: str = ""
    """The folder of this host where all ranks listen; empty if they are on several hosts, and rank 0 is at `master`."""
    token: bytes | None = field(default=None, repr=False)
    """Proves membership. None: the first rank in the folder makes it."""
    keeper: str = ""
    """The path at which the keeper of all ranks listens, if there is one."""
    is_restarted: bool = False
    """An earlier process had this rank: the run goes on, and this process is a newcomer to it."""
    master: tuple[str, int] | None = None
    """The address of torch's store."""
    listens_at: tuple[tuple[str, int], ...] = ()
    """Where rank 0, rank 1 and so on listen, as far as a program has said it."""
    name: str = "run"
    fewest: int = field(default=0, compare=False)
    """The number of processes with which a run that has lost all its members may begin again; 0 for all of them."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ConfigError(f"rank {self.rank} is not one of the {self.size} ranks 0 to {self.size - 1}")

    @property
    def addresses(self) -> tuple[tuple[str, int], ...]:
        """Where rank 0 listens, and perhaps the next ones; empty if all ranks listen in a folder."""
        if self.listens_at or self.master is None:
            return self.listens_at
        return ((self.master[0], self.master[1] + PORT_OFFSET),)


@dataclass(frozen=True)
class ClusterOptions:
    """The arguments of `join` that say which cluster to join."""

    name: str | None = None
    secret: bytes | str | None = field(default=None, repr=False)
    seeds: tuple[str, ...] | None = None

    def find(self, env: MutableMapping[str, str]) -> Cluster:
        """Return the cluster; its seeds come after those of the program, or else of the environment.

        Its relays come after those of the environment.
        """
        from covey.net.keys import secret_sources

        secret = self.secret
        if secret is None and "COVEY_SECRET_FD" in env:
            secret = _read_token(_number(env, "COVEY_SECRET_FD"))
        found = secret_sources.find(self.name or env.get("COVEY_CLUSTER") or None, env, secret)
        seeds = split_seeds(env.get("COVEY_SEEDS", "") if self.seeds is None else ",".join(self.seeds))
        relays = split_relays(env.get("COVEY_RELAYS", ""))
        return replace(
            found,
            seeds=tuple(dict.fromkeys((*seeds, *found.seeds))),
            relays=tuple(dict.fromkeys((*relays, *found.relays))),
        )


@dataclass(frozen=True)
class WantedRun:
    """A run of a cluster, as a program or `covey run` asks for it."""

    name: str
    program: str
    size: int | None
    min_size: int
    max_size: int | None
    timeout: float
    floor: int = 1
    """The fewest members with which the run goes on, as the program asked."""
    min_hosts: int = 1
    """The fewest machines with which the run begins."""
    tie_breaker: str = ""
    """The node or host that should break ties; `here` is this one."""
    is_new: bool = False
    """Whether earlier runs of this name are given up."""
    abandoned: tuple[bytes, ...] = ()
    """Lineages that `covey run --new` has given up for its processes."""

    def __post_init__(self) -> None:
        if not 0 < len(self.name) <= 100 or not self.name.isprintable():
            raise ConfigError(f"run={self.name!r} must be a name of 1 to 100 printable characters")
        for what, number in (("size", self.size), ("min_size", self.min_size), ("max_size", self.max_size)):
            if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
                raise ConfigError(f"{what}={number!r} must be a whole number above 0")
        if self.max_size is not None and self.max_size < self.min_size:
            raise ConfigError(f"max_size={self.max_size} is less than min_size={self.min_size}")
        object.__setattr__(self, "timeout", check_timeout(self.timeout))


def find_run(env: Mapping[str, str], asked: Mapping[str, Any]) -> WantedRun | None:
    """Return the run of a cluster that arguments of `join` or `covey run` ask for; None if neither does."""
    given = {name: value for name, value in asked.items() if value is not None}
    if "run" not in given and "COVEY_RUN" not in env:
        if sizes := given.keys() & {"size", "min_size", "max_size", "tie_breaker", "new"}:
            raise ConfigError(f"{min(sizes)}= is for runs of a cluster: name one, as in covey.join('my-run')")
        return None
    if "size" in given and given.keys() & {"min_size", "max_size"}:
        raise ConfigError("size= says exactly how many; min_size= and max_size= say how many at least and at most")
    told = {
        name: _number(env, variable)
        for name, variable in (
            ("size", "COVEY_RUN_SIZE"),
            ("min_size", "COVEY_RUN_MIN_SIZE"),
            ("max_size", "COVEY_RUN_MAX_SIZE"),
        )
        if variable in env and not given.keys() & {"size", "min_size", "max_size"}
    }
    limits = told | given
    size = limits.get("size")
    default_min_size: int = DEFAULT_MIN_SIZE if size is None else size
    timeout = limits.get("timeout")
    if timeout is None:
        timeout = _seconds(env, "COVEY_JOIN_TIMEOUT", CLUSTER_JOIN_SECONDS)
    new = env.get("COVEY_RUN_NEW", "")
    return WantedRun(
        name=limits["run"] if "run" in limits else env["COVEY_RUN"],
        program=env.get("COVEY_RUN_PROGRAM") or os.path.basename(sys.argv[0] or "python"),
        size=size,
        min_size=limits.get("min_size", default_min_size),
        max_size=limits.get("max_size", size),
        timeout=timeout,
        floor=limits.get("min_size", 1),
        min_hosts=1 if given.keys() & {"size", "min_size"} else _number(env, "COVEY_RUN_MIN_HOSTS", 1),
        tie_breaker=given.get("tie_breaker", env.get("COVEY_TIE_BREAKER", "")),
        is_new=bool(given.get("new", False)),
        abandoned=tuple(_lineages(new)) if "run" not in given or given["run"] == env.get("COVEY_RUN") else (),
    )


def _lineages(text: str) -> list[bytes]:
    """Read the lineages that `covey run --new` has given up."""
    try:
        return [bytes.fromhex(word) for word in split_list(text)]
    except ValueError:
        raise ConfigError(f"COVEY_RUN_NEW={text!r} is set by covey run; remove it from the environment") from None


def find_launched_rank(env: Mapping[str, str]) -> LaunchedRank:
    """Return the rank that a launcher's variables describe; rank 0 of 1 if there is no launcher."""
    for launcher in (_covey_run, _torchrun, _mpirun, _slurm, _kubernetes):
        launched = launcher(env)
        if launched is not None:
            return launched
    return LaunchedRank(rank=0, size=1, name="alone")


def restarts(env: Mapping[str, str]) -> int:
    """Return how often `covey run` has started this process again."""
    return _number(env, "COVEY_RESTART", 0)


def launcher_wait(env: Mapping[str, str], timeout: float | None) -> float:
    """Return how long to wait for the other ranks of a launcher; `timeout` is what the program said, if anything."""
    return check_timeout(timeout if timeout is not None else _seconds(env, "COVEY_JOIN_TIMEOUT", LAUNCH_JOIN_SECONDS))


def is_loopback(host: str) -> bool:
    """Tell whether an address cannot be reached from another machine."""
    import ipaddress

    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


# Launchers


def _covey_run(env: Mapping[str, str]) -> LaunchedRank | None:
    if "COVEY_RANK" not in env:
        return None
    size = _number(env, "COVEY_SIZE")
    return LaunchedRank(
        rank=_number(env, "COVEY_RANK"),
        size=size,
        local_rank=_number(env, "COVEY_LOCAL_RANK", 0),
        local_size=_number(env, "COVEY_LOCAL_SIZE", size),
        folder=_required(env, "COVEY_MEET"),
        token=_read_token(_number(env, "COVEY_TOKEN_FD")),
        keeper=env.get("COVEY_KEEPER", ""),
        is_restarted=restarts(env) > 0,
    )


def _torchrun(env: Mapping[str, str]) -> LaunchedRank | None:
    if "RANK" not in env or "WORLD_SIZE" not in env:
        return None
    rank, size = _number(env, "RANK"), _number(env, "WORLD_SIZE")
    host, port = env.get("MASTER_ADDR", "127.0.0.1"), _master_port(env)
    local_size = _number(env, "LOCAL_WORLD_SIZE", 0)
    # Agents that met through covey name the run: they restart workers for different reasons, and count differently.
    words = ["torchrun", env.get("TORCHELASTIC_RUN_ID", ""), env.get("TORCHELASTIC_RESTART_COUNT", ""), host, str(port)]
    return _launched(
        env.get("COVEY_LAUNCHED") or "-".join(word for word in words if word),
        rank=rank,
        size=size,
        local_rank=_number(env, "LOCAL_RANK", rank if is_loopback(host) else 0),
        local_size=local_size or (size if is_loopback(host) else 1),
        master=(host, port),
    )


def _mpirun(env: Mapping[str, str]) -> LaunchedRank | None:
    if "OMPI_COMM_WORLD_RANK" in env:
        rank, size = _number(env, "OMPI_COMM_WORLD_RANK"), _number(env, "OMPI_COMM_WORLD_SIZE")
        local_rank = _number(env, "OMPI_COMM_WORLD_LOCAL_RANK", rank)
        local_size = _number(env, "OMPI_COMM_WORLD_LOCAL_SIZE", size)
        job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid") or "job"
    elif "PMI_RANK" in env and "PMI_SIZE" in env:
        rank, size = _number(env, "PMI_RANK"), _number(env, "PMI_SIZE")
        one_host = _number(env, "SLURM_STEP_NUM_NODES", 1) == 1  # srun --mpi=pmi2 sets these variables, too
        local_rank = _number(env, "MPI_LOCALRANKID", rank if one_host else 0)
        local_size = _number(env, "MPI_LOCALNRANKS", size if one_host else 1)
        job = env.get("PMI_ID_NAMESPACE") or env.get("HYDRA_JOBID") or env.get("PMI_PORT") or str(os.getppid())
    else:
        return None
    return _launched(
        f"mpirun-{job}", rank=rank, size=size, local_rank=local_rank, local_size=local_size, master=_master(env)
    )


def _slurm(env: Mapping[str, str]) -> LaunchedRank | None:
    if "SLURM_STEP_ID" not in env or "SLURM_PROCID" not in env:
        return None
    size, is_mixed = _number(env, "SLURM_STEP_NUM_TASKS", 1), _number(env, "SLURM_HET_SIZE", 1) > 1
    if is_mixed:  # SLURM_PROCID counts through all components of the step, and SLURM_STEP_NUM_TASKS only this one's
        size = _number(env, "WORLD_SIZE", max(size, _number(env, "SLURM_NTASKS", 1)))
    if size < 2:  # sbatch and salloc set the variables too, for the one shell they start: only a step is a run
        return None
    rank, job, step = _number(env, "SLURM_PROCID"), _number(env, "SLURM_JOB_ID"), _number(env, "SLURM_STEP_ID")
    one_host = _number(env, "SLURM_STEP_NUM_NODES", 1) == 1 and not is_mixed
    nodes = env.get("SLURM_JOB_NODELIST_HET_GROUP_0" if is_mixed else "SLURM_STEP_NODELIST", "")
    first = (_first_host(nodes), SLURM_PORTS.start + (job + step) % len(SLURM_PORTS)) if nodes else None
    return _launched(
        f"slurm-{job}.{step}",
        rank=rank,
        size=size,
        local_rank=_number(env, "SLURM_LOCALID", rank),
        local_size=size if one_host else 1,
        master=_master(env) or first,
    )


def _first_host(nodes: str) -> str:
    """Return the first name of a list in Slurm's notation, where n[01-03,7],m is n01, n02, n03, n7 and m."""
    name, bracket, rest = nodes.partition("[")
    if not bracket or "," in name:  # a comma before the bracket ends the first name
        return name.partition(",")[0]
    number, suffix = re.split(r"[-,\]]", rest, maxsplit=1)[0], rest.partition("]")[2]
    return name + number + suffix.partition(",")[0]


def _kubernetes(env: Mapping[str, str]) -> LaunchedRank | None:
    """Return the rank of a pod of an indexed Job, whose manifest says how many there are and where the first one is."""
    if "JOB_COMPLETION_INDEX" not in env:
        return None
    if "WORLD_SIZE" not in env:
        raise ConfigError(
            "this pod is one of an indexed Job of Kubernetes: set WORLD_SIZE to the Job's completions, and MASTER_ADDR "
            "to the name of its first pod, such as train-0.train; or WORLD_SIZE=1 for a group of one"
        )
    master = _master(env)
    name = "kubernetes" if master is None else f"kubernetes-{master[0]}-{master[1]}"
    return _launched(
        name,
        rank=_number(env, "JOB_COMPLETION_INDEX"),
        size=_number(env, "WORLD_SIZE"),
        local_rank=0,
        local_size=1,
        master=master,
    )


def _launched(name: str, *, size: int, local_size: int, master: tuple[str, int] | None, **rest: Any) -> LaunchedRank:
    """Return a rank that uses a folder if all ranks are on this host, else the master's address."""
    if local_size == size or (master is not None and is_loopback(master[0])):
        folder = str(rendezvous_folder(name)) if size > 1 else ""
        return LaunchedRank(name=name, size=size, local_size=local_size, folder=folder, **rest)
    if master is None:
        raise ConfigError(
            f"the {size} ranks of {name} are on several hosts; set MASTER_ADDR and MASTER_PORT to where rank 0 listens"
        )
    return LaunchedRank(name=name, size=size, local_size=local_size, master=master, **rest)


def _master(env: Mapping[str, str]) -> tuple[str, int] | None:
    return (env["MASTER_ADDR"], _master_port(env)) if "MASTER_ADDR" in env else None


def _master_port(env: Mapping[str, str]) -> int:
    port = _number(env, "MASTER_PORT", MASTER_PORT)
    if not 0 < port < 65535:  # rank 0 listens at the next port
        raise ConfigError(f"MASTER_PORT={env['MASTER_PORT']!r} must be from 1 to 65534")
    return port


def _required(env: Mapping[str, str], key: str) -> str:
    if key not in env:
        raise ConfigError(f"{key} is not set, though the variables of its launcher are; start the program anew")
    return env[key]


def _number(env: Mapping[str, str], key: str, default: int | None = None) -> int:
    text = env.get(key, "") if default is not None else _required(env, key)
    if default is not None and not text:
        return default
    try:
        value = int(text)
    except ValueError:
        value = -1
    if value < 0:
        raise ConfigError(f"{key}={text!r} is not a whole number from 0 up")
    return value


def _seconds(env: Mapping[str, str], key: str, default: float) -> float:
    try:
        return float(env.get(key, default))
    except ValueError:
        raise ConfigError(f"{key}={env[key]!r} is not a number of seconds") from None


def _read_token(descriptor: int) -> bytes:
    """Return the token that the keeper wrote into a pipe for this process."""
    if descriptor not in _tokens:
        # In a program that the rank started in turn, the number may be any file: check before reading.
        try:
            is_ours = stat.S_ISFIFO(os.fstat(descriptor).st_mode) and select.select([descriptor], [], [], 0)[0]
            token = os.read(descriptor, RUN_TOKEN_BYTES) if is_ours else b""
        except (OSError, ValueError):  # not open; or above what select can watch
            token = b""
        if len(token) != RUN_TOKEN_BYTES:
            raise ConfigError(
                f"the token of this run is not in descriptor {descriptor}. Only the process that `covey run` started "
                "can join, not a program that it starts in turn."
            )
        os.close(descriptor)
        _tokens[descriptor] = token
    return _tokens[descriptor]
