"""Finding one's place: which rank of which run this process is, from the environment it was started in."""

from __future__ import annotations

import atexit
import os
import select
import stat
import sys
import threading
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from covey.base.config import YEAR_SECONDS, GroupConfig, check_timeout, group_config, split_list
from covey.base.errors import ConfigError, DeadlineError
from covey.net import shm
from covey.net.meeting import TOKEN_BYTES, meeting_folder
from covey.runtime.engine import Engine
from covey.runtime.group import Group
from covey.wire.messages import MAX_MEMBERS

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping, Sequence

    from covey.net.clusters import Cluster
    from covey.runtime.node import Node
    from covey.runtime.seat import Seat

JOIN_SECONDS: Final = 300.0
"""How long `join` waits for the other ranks of a launcher by default: they may be loading large libraries."""
CLUSTER_JOIN_SECONDS: Final = 60.0
DEFAULT_MIN_SIZE: Final = 2
FOUND_SECONDS: Final = 30.0
"""How long the control loop may take to begin a generation."""
LEAVE_SECONDS: Final = 2.0
"""How long the others may take to agree that this node leaves, when its group is closed."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a process stands in a run, and where its ranks meet."""

    rank: int
    size: int
    local_rank: int = 0
    local_size: int = 1
    folder: str = ""
    """All ranks are on this host and meet in this folder; or empty, and they meet at `master`."""
    token: bytes | None = field(default=None, repr=False)
    """Proves membership. None: the first one to come to the folder makes it."""
    keeper: str = ""
    """Where the keeper of all ranks listens, if there is one."""
    is_restarted: bool = False
    """An earlier process had this place: the run goes on, and this one is a newcomer to it."""
    master: tuple[str, int] | None = None
    name: str = "run"

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ConfigError(f"rank {self.rank} is not one of the {self.size} ranks 0 to {self.size - 1}")


_tokens: dict[int, bytes] = {}
"""By descriptor, what `covey run` left in the pipe there: it can be read once, but a program may join again."""
_joined: tuple[object, Group] | None = None
"""What was asked for, and the group that came of it."""
_joining = threading.Lock()


def join(
    run: str | None = None,
    *,
    cluster: str | None = None,
    min_size: int | None = None,
    max_size: int | None = None,
    size: int | None = None,
    timeout: float | None = None,
    secret: bytes | str | None = None,
    seeds: Sequence[str] | None = None,
    interfaces: str | None = None,
    lanes: str | None = None,
    streams: int | str | None = None,
    op_timeout: float | None = None,
    insecure: bool | None = None,
    on_loss: str | None = None,
    patience: float | None = None,
    quorum: str | None = None,
) -> Group:
    """Return the group of a run in a cluster, or the one that a launcher's environment describes.

    With a `run` (or under `covey run RUN`) the nodes of the cluster that join it find each other and agree on who is
    in it, and on their ranks. Without, looked for in this order: `covey run -n`; RANK and WORLD_SIZE (torchrun, or
    set by hand); mpirun; a Slurm step of several tasks; else it is a group of one. Called again for the same run while
    its group is open, returns it again.

    Args:
        run: the name of the run: nodes with the same name meet.
        cluster: the name of the cluster (COVEY_CLUSTER); default: the one this machine is in.
        min_size: how many nodes must be there (default 2).
        max_size: how many there may be.
        size: how many there must be, exactly; instead of `min_size` and `max_size`.
        timeout: seconds to wait for the others (default 60; 300 under a launcher).
        secret: the cluster's: 32 bytes, a join code or a passphrase (COVEY_SECRET_FILE, COVEY_SECRET); default: what
            `covey init` or `covey enroll` stored here.
        seeds: addresses `host:port` of nodes, for networks without multicast (COVEY_SEEDS, separated by commas).
        interfaces: which to use, like `eth*,!docker*,10.0.0.0/8` (COVEY_INTERFACES); default: all.
        lanes: `auto`, or force `shm`, `unix`, `tcp` or `secure` (COVEY_LANES).
        streams: connections per secure lane, or `auto` (COVEY_STREAMS).
        op_timeout: seconds an operation may take, unless it says otherwise (COVEY_TIMEOUT; default 30 minutes).
        insecure: let a launcher's ranks talk to other machines in clear text (COVEY_INSECURE).
        on_loss: what an operation does that loses a member: `raise`, or `continue`: it is all or nothing, and finishes
            among those who are left (COVEY_ON_LOSS).
        patience: seconds that members wait for a quorum of the others, or for them to come back, before they give up
            with QuorumLostError (COVEY_PATIENCE; default 30).
        quorum: `majority` of the last view goes on; with `any`, two halves may go on apart (COVEY_QUORUM).

    Raises:
        ConfigError: the arguments, the environment or the settings contradict themselves.
        AuthError: the secret or this node's identity is not accepted.
        DeadlineError: the others did not come; says who is here, and who was refused and why.
    """
    return join_as_asked(
        {
            "run": run,
            "cluster": cluster,
            "min_size": min_size,
            "max_size": max_size,
            "size": size,
            "timeout": timeout,
            "secret": secret,
            "seeds": seeds,
            "interfaces": interfaces,
            "lanes": lanes,
            "streams": streams,
            "op_timeout": op_timeout,
            "insecure": insecure,
            "on_loss": on_loss,
            "patience": patience,
            "quorum": quorum,
        }
    )


_OF_RUN: Final = ("run", "size", "min_size", "max_size", "timeout")
_OF_GROUP: Final = ("lanes", "insecure", "interfaces", "streams", "on_loss", "patience", "quorum")
_OF_CLUSTER: Final = ("cluster", "secret", "seeds")


def join_as_asked(asked: Mapping[str, Any], *, is_elastic: bool = False, is_newcomer: bool = False) -> Group:
    """Join with these arguments of `join`; who `is_elastic` waits outside of a run that goes on as long as it does.

    Who is a newcomer knows that it does.
    """
    if unknown := asked.keys() - {*_OF_RUN, *_OF_GROUP, *_OF_CLUSTER, "op_timeout"}:
        raise TypeError(f"join has no argument {min(unknown)!r}")
    settings = {name: asked.get(name) for name in _OF_GROUP}
    config = group_config(os.environ, timeout=asked.get("op_timeout"), **settings)
    wanted = find_run(os.environ, {name: asked.get(name) for name in _OF_RUN})
    timeout = asked.get("timeout")
    place = None if wanted is not None else find_place(os.environ)
    if place is not None and is_newcomer:
        place = replace(place, is_restarted=True)
    cluster, secret, seeds = (asked.get(name) for name in _OF_CLUSTER)
    credentials = ClusterOptions(cluster, secret, tuple(seeds) if seeds is not None else None)
    request = (config, wanted, place, credentials)
    global _joined
    wait = wanted.timeout if wanted is not None else _launcher_wait(timeout)
    if not _joining.acquire(timeout=wait):
        raise DeadlineError(f"another thread has been joining a group for {wait:g} s")
    try:
        if _joined is None or _joined[1]._engine.is_over:
            if place is not None:
                group = join_at(place, config, timeout=timeout, options=credentials, is_elastic=is_elastic)
            else:
                assert wanted is not None
                from covey.runtime.joining import join_run  # brings in all that clusters need

                group = join_run(wanted, config, credentials, is_elastic=is_elastic)
            _joined = request, group
        elif _joined[0] != request:
            raise ConfigError("a group is open with other settings; close it before you join with new ones")
        return _joined[1]
    finally:
        _joining.release()


def join_as(place: Place, *, on_loss: str | None = None) -> Group:
    """Return the group of the run in which this process has `place`; `join` returns it from now on, too."""
    global _joined
    with _joining:
        config = group_config(os.environ, on_loss=on_loss)
        group = join_at(place, config)
        _joined = (config, None, find_place(os.environ), ClusterOptions()), group
        return group


def replace_joined(old: Group, new: Group) -> None:
    """Have `join` return the group of the next generation from now on, if it returned that of the last."""
    global _joined
    with _joining:
        if _joined is not None and _joined[1] is old:
            _joined = _joined[0], new


def join_at(
    place: Place,
    config: GroupConfig | None = None,
    *,
    timeout: float | None = None,
    options: ClusterOptions | None = None,
    is_elastic: bool = False,
) -> Group:
    """Return the group of the run in which this process has `place`."""
    config = config if config is not None else group_config(os.environ)
    wait = _launcher_wait(timeout)
    if config.lanes == "shm" and not shm.usable():
        raise ConfigError("lanes='shm' needs Linux on x86-64; use unix or auto")
    if config.on_loss == "continue" and place.size > MAX_MEMBERS:
        raise ConfigError(f"on_loss='continue' is for runs of up to {MAX_MEMBERS} ranks, and this one has {place.size}")
    if place.size == 1:
        return Group(Engine(None, 0, (0,), place.name, config), local_rank=place.local_rank)
    from covey.runtime.node import Node

    seat = _take_seat(place, config, options or ClusterOptions())
    if place.is_restarted:
        return _join_late(place, config, seat, YEAR_SECONDS if is_elastic else wait)
    node = Node(
        rank=place.rank,
        size=place.size,
        run=place.name,
        config=config,
        gate=seat.gate,
        card=seat.card,
        entrance=seat.entrance,
        contacts=seat.contacts,
        denied=seat.denied,
        keeper=place.keeper,
        on_close=seat.on_close,
    )
    node.form(wait)
    return group_of(node, place.local_rank)


def _join_late(place: Place, config: GroupConfig, seat: Seat, wait: float) -> Group:
    """Return the group of the next generation of a run that goes on."""
    from covey.runtime import loop as control
    from covey.runtime.newcomer import Newcomer

    async def wait_for_a_seat() -> Node:
        newcomer = Newcomer(place, config, seat)
        try:
            return await newcomer.become_a_node(wait)
        except BaseException:
            await newcomer.close()
            raise

    future = control.start(wait_for_a_seat())
    try:
        node = future.result()
    except BaseException:  # Ctrl-C, too
        if not future.cancel() and future.done() and future.exception() is None:
            future.result().close()
        else:
            seat.on_close()
        raise
    return group_of(node, place.local_rank)


def _take_seat(place: Place, config: GroupConfig, options: ClusterOptions) -> Seat:
    from covey.runtime import seat

    if place.folder:
        return seat.folder_seat(place, config)
    if config.insecure:
        return seat.insecure_seat(place)
    assert place.master is not None
    try:
        cluster = options.find(os.environ)
    except ConfigError as error:
        raise ConfigError(
            f"the ranks of {place.name} are on several hosts ({place.master[0]}), and covey does not talk beyond this "
            f"machine in clear text: {error}. On a network you trust, insecure=True, --insecure or COVEY_INSECURE=1 "
            "allows it."
        ) from error
    return seat.launched_seat(place, config, cluster)


def _launcher_wait(timeout: float | None) -> float:
    return check_timeout(timeout if timeout is not None else _seconds(os.environ, "COVEY_JOIN_TIMEOUT", JOIN_SECONDS))


def group_of(node: Node, local_rank: int, *, is_fresh: bool = True) -> Group:
    """Return the group of all ranks of a node's generation; closing it closes the node."""
    generation = node.generation
    members = generation.seats if generation is not None else tuple(range(node.size))
    number = generation.number if generation is not None else 0
    engine = Engine(node, number, members, node.run, node.config, generation=generation)

    def leave() -> None:
        # Those who go on must take this neither for a crash nor for the wish that nobody goes on.
        if node.config.on_loss == "continue" and node.generation is generation and generation is not None:
            generation.leave(LEAVE_SECONDS)

    def on_close() -> None:
        for member in node.groups():
            member.close()  # groups that were split off cannot outlive the run
        node.close()
        atexit.unregister(group.close)

    group = Group(engine, local_rank=local_rank, before_close=leave, on_close=on_close, is_fresh=is_fresh)
    atexit.register(group.close)
    return group


@dataclass(frozen=True)
class ClusterOptions:
    """Which cluster to join: what the program said about it."""

    name: str | None = None
    secret: bytes | str | None = field(default=None, repr=False)
    seeds: tuple[str, ...] | None = None

    def find(self, env: MutableMapping[str, str]) -> Cluster:
        """Return the cluster, with the seeds of the program or else of the environment in front of its own."""
        from covey.net import clusters

        secret = self.secret
        if secret is None and "COVEY_SECRET_FD" in env:
            secret = _read_token(_number(env, "COVEY_SECRET_FD"))
        found = clusters.find(self.name or env.get("COVEY_CLUSTER") or None, env, secret)
        seeds = self.seeds
        if seeds is None:
            seeds = split_list(env.get("COVEY_SEEDS", ""))
        return replace(found, seeds=tuple(dict.fromkeys((*seeds, *found.seeds))))


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
    """The fewest members with which the run goes on: what the program asked for."""

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
    """Return the run of the cluster that the arguments of `join`, or `covey run`, ask for; None if neither does."""
    given = {name: value for name, value in asked.items() if value is not None}
    if "run" not in given and "COVEY_RUN" not in env:
        if sizes := given.keys() & {"size", "min_size", "max_size"}:
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
    return WantedRun(
        name=limits["run"] if "run" in limits else env["COVEY_RUN"],
        program=env.get("COVEY_RUN_PROGRAM") or os.path.basename(sys.argv[0] or "python"),
        size=size,
        min_size=limits.get("min_size", default_min_size),
        max_size=limits.get("max_size", size),
        timeout=timeout,
        floor=limits.get("min_size", 1),
    )


def find_place(env: Mapping[str, str]) -> Place:
    """Return the place that a launcher's variables describe."""
    for launcher in (_covey_run, _torchrun, _mpirun, _slurm):
        place = launcher(env)
        if place is not None:
            return place
    return Place(rank=0, size=1, name="alone")


# Launchers


def _covey_run(env: Mapping[str, str]) -> Place | None:
    if "COVEY_RANK" not in env:
        return None
    size = _number(env, "COVEY_SIZE")
    return Place(
        rank=_number(env, "COVEY_RANK"),
        size=size,
        local_rank=_number(env, "COVEY_LOCAL_RANK", 0),
        local_size=_number(env, "COVEY_LOCAL_SIZE", size),
        folder=_required(env, "COVEY_MEET"),
        token=_read_token(_number(env, "COVEY_TOKEN_FD")),
        keeper=env.get("COVEY_KEEPER", ""),
        is_restarted=_number(env, "COVEY_RESTART", 0) > 0,
    )


def _torchrun(env: Mapping[str, str]) -> Place | None:
    if "RANK" not in env or "WORLD_SIZE" not in env:
        return None
    rank, size = _number(env, "RANK"), _number(env, "WORLD_SIZE")
    host, port = env.get("MASTER_ADDR", "127.0.0.1"), _master_port(env)
    local_size = _number(env, "LOCAL_WORLD_SIZE", 0)
    words = (env.get("TORCHELASTIC_RUN_ID", ""), env.get("TORCHELASTIC_RESTART_COUNT", ""), host, str(port))
    return _meet(
        "torchrun-" + "-".join(word for word in words if word),
        rank=rank,
        size=size,
        local_rank=_number(env, "LOCAL_RANK", rank if is_loopback(host) else 0),
        local_size=local_size or (size if is_loopback(host) else 1),
        master=(host, port),
    )


def _mpirun(env: Mapping[str, str]) -> Place | None:
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
    return _meet(
        f"mpirun-{job}", rank=rank, size=size, local_rank=local_rank, local_size=local_size, master=_master(env)
    )


def _slurm(env: Mapping[str, str]) -> Place | None:
    # sbatch and salloc set these too, for the one shell they start; only a step of several tasks is a run.
    if "SLURM_STEP_ID" not in env or "SLURM_PROCID" not in env or _number(env, "SLURM_STEP_NUM_TASKS", 1) < 2:
        return None
    rank, size = _number(env, "SLURM_PROCID"), _number(env, "SLURM_STEP_NUM_TASKS")
    one_host = _number(env, "SLURM_STEP_NUM_NODES", 1) == 1
    return _meet(
        f"slurm-{_required(env, 'SLURM_JOB_ID')}.{env['SLURM_STEP_ID']}",
        rank=rank,
        size=size,
        local_rank=_number(env, "SLURM_LOCALID", rank),
        local_size=size if one_host else 1,
        master=_master(env),
    )


def _meet(name: str, *, size: int, local_size: int, master: tuple[str, int] | None, **place: Any) -> Place:
    """Meet in a folder if all ranks are on this host, else at the master's address."""
    if local_size == size or (master is not None and is_loopback(master[0])):
        folder = str(meeting_folder(name)) if size > 1 else ""
        return Place(name=name, size=size, local_size=local_size, folder=folder, **place)
    if master is None:
        raise ConfigError(
            f"the {size} ranks of {name} are on several hosts; set MASTER_ADDR and MASTER_PORT to where rank 0 listens"
        )
    return Place(name=name, size=size, local_size=local_size, master=master, **place)


def _master(env: Mapping[str, str]) -> tuple[str, int] | None:
    return (env["MASTER_ADDR"], _master_port(env)) if "MASTER_ADDR" in env else None


def _master_port(env: Mapping[str, str]) -> int:
    port = _number(env, "MASTER_PORT", 29500)
    if not 0 < port < 65535:  # rank 0 listens at the next one
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
    """Return the token that the keeper left for us in a pipe."""
    if descriptor not in _tokens:
        # In a program that the rank started in turn, the number may belong to anything: look before touching it.
        try:
            is_ours = stat.S_ISFIFO(os.fstat(descriptor).st_mode) and select.select([descriptor], [], [], 0)[0]
            token = os.read(descriptor, TOKEN_BYTES) if is_ours else b""
        except (OSError, ValueError):  # not open; or above what select can watch
            token = b""
        if len(token) != TOKEN_BYTES:
            raise ConfigError(
                f"the token of this run is not in descriptor {descriptor}. Only the process that `covey run` started "
                "can join, not a program that it starts in turn."
            )
        os.close(descriptor)
        _tokens[descriptor] = token
    return _tokens[descriptor]


def is_loopback(host: str) -> bool:
    """Tell whether an address cannot be reached from another machine."""
    import ipaddress

    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _renew_lock_in_child() -> None:
    global _joining
    _joining = threading.Lock()  # another thread of the parent may have held it


os.register_at_fork(after_in_child=_renew_lock_in_child)
