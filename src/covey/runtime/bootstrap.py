"""Finding one's place: which rank of which run this process is, from the environment it was started in."""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import socket
import stat
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from covey.base.config import GroupConfig, check_timeout, group_config
from covey.base.errors import ConfigError
from covey.net import shm
from covey.net.meeting import (
    TOKEN_BYTES,
    Meeting,
    check_folder,
    host_token,
    local_address_towards,
    meeting_folder,
    socket_path,
)
from covey.runtime.engine import Engine
from covey.runtime.group import Group

if TYPE_CHECKING:
    from collections.abc import Mapping

JOIN_SECONDS: Final = 300.0
"""How long `join` waits for the other ranks of a launcher by default: they may be loading large libraries."""
PORT_OFFSET: Final = 1
"""Rank 0 listens this far above MASTER_PORT, which belongs to torch's store: to torchrun's, or to the script's own."""


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
    master: tuple[str, int] | None = None
    name: str = "run"

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ConfigError(f"rank {self.rank} is not one of the {self.size} ranks 0 to {self.size - 1}")


_tokens: dict[int, bytes] = {}
"""By descriptor, what `covey run` left in the pipe there: it can be read once, but a program may join again."""
_joined: Group | None = None
_joining = threading.Lock()


def join(
    *,
    lanes: str | None = None,
    timeout: float | None = None,
    join_timeout: float | None = None,
    insecure: bool | None = None,
) -> Group:
    """Return the group that the environment describes, once all its ranks are here.

    Looked for in this order: `covey run`; RANK and WORLD_SIZE (torchrun, or set by hand); mpirun; a Slurm step of
    several tasks. Without any of them, a group of one. Called again while that group is open, returns it again.

    Args:
        lanes: `auto`, or force `shm`, `unix` or `tcp` (COVEY_LANES).
        timeout: seconds an operation may take, unless it says otherwise (COVEY_TIMEOUT; default 30 minutes).
        join_timeout: seconds to wait for the other ranks (default 5 minutes).
        insecure: allow clear-text connections to other machines (COVEY_INSECURE).

    Raises:
        ConfigError: the environment or the settings contradict themselves.
        DeadlineError: some ranks did not come; says which.
    """
    global _joined
    config = group_config(os.environ, lanes=lanes, timeout=timeout, insecure=insecure)
    with _joining:
        if _joined is None or _joined._engine.is_over:
            _joined = join_at(find_place(os.environ), config, timeout=join_timeout)
        elif _joined._engine.config != config:
            raise ConfigError("the group is open with other settings; close it before you join with new ones")
        return _joined


def join_as(place: Place) -> Group:
    """Return the group of the run in which this process has `place`; `join` returns it from now on, too."""
    global _joined
    with _joining:
        _joined = join_at(place)
        return _joined


def join_at(place: Place, config: GroupConfig | None = None, *, timeout: float | None = None) -> Group:
    """Return the group of the run in which this process has `place`."""
    config = config if config is not None else group_config(os.environ)
    wait = check_timeout(timeout if timeout is not None else JOIN_SECONDS)
    if config.lanes == "shm" and not shm.usable():
        raise ConfigError("lanes='shm' needs Linux on x86-64; use unix or auto")
    if place.size == 1:
        return Group(Engine(None, 0, (0,), place.name, config), local_rank=place.local_rank)
    seat = _take_folder_seat(place, config) if place.folder else _take_address_seat(place, config)
    from covey.runtime.node import Node

    try:
        node = Node(rank=place.rank, size=place.size, run=place.name, config=config, **seat)
    except BaseException:
        seat["on_close"]()
        raise
    node.form(wait)
    engine = Engine(node, 0, tuple(range(place.size)), place.name, config)

    def on_close() -> None:
        for member in node.groups():
            member.close()  # groups that were split off cannot outlive the run
        node.close()
        atexit.unregister(group.close)

    group = Group(engine, local_rank=place.local_rank, on_close=on_close)
    atexit.register(group.close)
    return group


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
    if not 0 < port <= 65535 - PORT_OFFSET:
        raise ConfigError(f"MASTER_PORT={env['MASTER_PORT']!r} must be from 1 to {65535 - PORT_OFFSET}")
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


# Seats


def _take_folder_seat(place: Place, config: GroupConfig) -> dict[str, Any]:
    from covey.wire.messages import Contact

    folder = Path(place.folder)
    if place.token is not None:
        check_folder(folder)
    meeting = Meeting(folder, place.rank, place.token)
    listeners, address = [meeting.sock], None
    if config.lanes == "tcp":
        tcp = socket.create_server(("127.0.0.1", 0), backlog=128)
        tcp.setblocking(False)
        listeners.append(tcp)
        address = tcp.getsockname()[:2]
    host = host_token(folder)
    return {
        "token": meeting.token,
        "host": host,
        "listeners": listeners,
        "socket_path": str(meeting.path),
        "address": address,
        "contacts": {
            rank: Contact(host, None, str(socket_path(folder, rank)))
            for rank in range(place.size)
            if rank != place.rank
        },
        "on_close": meeting.leave,
    }


def _take_address_seat(place: Place, config: GroupConfig) -> dict[str, Any]:
    """Listen where ranks on other hosts can come, and name rank 0 as the one who knows them all."""
    from covey.wire.messages import Contact

    assert place.master is not None
    host, port = place.master
    if not config.insecure:
        raise ConfigError(
            f"the ranks of {place.name} are on several hosts ({host}), and covey does not talk beyond this machine in "
            "clear text. On a network you trust, allow it with insecure=True, --insecure or COVEY_INSECURE=1."
        )
    with contextlib.ExitStack() as undo:
        own = host if place.rank == 0 else local_address_towards(host)
        listener = undo.enter_context(_listen(own, port, place.rank))
        folder = check_folder(Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="covey-"))))
        local = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        local.bind(str(socket_path(folder, place.rank)))
        local.listen(128)
        for sock in (listener, local):
            sock.setblocking(False)
        release = undo.pop_all().close
    return {
        # Nothing secret is shared yet between hosts: this only keeps different runs apart.
        "token": f"insecure/{place.name}".encode(),
        "host": host_token(Path(tempfile.gettempdir())),
        "listeners": [listener, local],
        "socket_path": str(socket_path(folder, place.rank)),
        "address": (own, listener.getsockname()[1]),
        "contacts": {0: Contact("", (host, port + PORT_OFFSET), "")} if place.rank else {},
        "on_close": release,
    }


def _listen(host: str, port: int, rank: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port + PORT_OFFSET if rank == 0 else 0), family=family, backlog=128)
    except OSError as error:
        raise ConfigError(f"cannot listen at {host}, port {port + PORT_OFFSET}: {error.strerror}") from error


def is_loopback(host: str) -> bool:
    """Tell whether an address cannot be reached from another machine."""
    import ipaddress

    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
