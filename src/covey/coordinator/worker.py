"""`WorkerNode`: a process that gets its rank from a coordinator, joins its run, and reports on it."""

from __future__ import annotations

import atexit
import os
import socket
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Self

from covey.base.config import check_timeout, from_argument, group_config, parse_seed
from covey.base.errors import ClosedError, ConfigError
from covey.base.text import printable
from covey.net.discovery.host_rendezvous import local_address_towards, rendezvous_folder
from covey.net.host.settings_files import effective_environment
from covey.runtime.environment import ClusterOptions, LaunchedRank, is_loopback
from covey.runtime.group.internals import checkpoint_state, engine_of, functions_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from covey.base.config import GroupConfig
    from covey.base.errors import CoveyError
    from covey.coordinator import coordinator_pb2 as pb
    from covey.coordinator.session import Session
    from covey.runtime.calls.functions import FunctionRegistry
    from covey.runtime.group.group import Group
    from covey.runtime.group.strategy import Strategy

CHECKPOINT_REQUEST_SECONDS: Final = 5.0
"""How long the ranks may take to take a request for a checkpoint; the next heartbeat repeats it."""


@dataclass(frozen=True, kw_only=True)
class WorkerNodeConfig:
    """What a `WorkerNode` needs to know. Workers of one run differ in `worker_id` and `address` only."""

    coordinator: str
    """Where the coordinator listens, host:port."""
    run: str = "run"
    """The name of the run; a coordinator can have several."""
    worker_id: str = ""
    """By this name the coordinator knows the worker again, and gives it the same rank; default: the host's name."""
    address: str = ""
    """Where this worker listens if it gets rank 0, host:port; default: the address of this machine that leads to the
    coordinator, and a free port."""
    size: int | None = None
    """How many workers the run has; default: what the coordinator was started with."""
    min_size: int | None = None
    """With `max_size`, instead of `size`: the fewest workers."""
    max_size: int | None = None
    """The most workers."""
    settle: float = 5.0
    """Seconds to wait for more workers once there are `min_size`."""
    timeout: float = 300.0
    """Seconds to wait for a rank, and then for the other ranks."""
    interval: float = 2.0
    """Seconds between two heartbeats."""
    on_loss: str | None = None
    """As for `covey.join`."""
    cluster: str | None = None
    """The cluster whose secret protects the coordinator and the links between workers."""
    secret: bytes | str | None = field(default=None, repr=False)
    """The secret itself, as for `covey.join`."""
    insecure: bool | None = None
    """Let the ranks talk to other machines in clear text."""
    tls_ca: str | None = None
    """PEM file with the authority of the coordinator's certificate, and of those of workers on other machines."""
    tls_cert: str | None = None
    """PEM file with the certificate of this worker."""
    tls_key: str | None = None
    """PEM file with its key."""
    settings: Mapping[str, Any] | None = None
    """Other settings of the group, as for `covey.join`."""

    def __post_init__(self) -> None:
        for what, text in (("coordinator", self.coordinator), ("address", self.address)):
            if what == "address" and not text:
                continue
            if not isinstance(text, str) or not text.rpartition(":")[2].isdigit():
                raise ConfigError(f"{what}={text!r} is not an address; write host:port, like 192.168.1.5:29400")
            parse_seed(text)
        for what, number in (("size", self.size), ("min_size", self.min_size), ("max_size", self.max_size)):
            if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
                raise ConfigError(f"{what}={number!r} must be a whole number above 0")
        if self.size is not None and (self.min_size, self.max_size) != (None, None):
            raise ConfigError("size= says exactly how many; min_size= and max_size= say how many at least and at most")
        if (self.min_size is None) != (self.max_size is None):
            raise ConfigError("min_size= and max_size= belong together")
        if not 0.05 <= self.interval <= 10.0:
            raise ConfigError(f"interval={self.interval!r} must be from 0.05 to 10 seconds")
        check_timeout(self.timeout)


class WorkerNode:
    """A worker of a run that a coordinator keeps together. Use it in `with`, or `start` and `close` it.

    `start` registers with the coordinator, waits for a rank, and joins the run as that rank. From then on the worker
    sends heartbeats by itself. If the coordinator goes away, the group is not affected: the worker registers again when
    it is back. After a loss that ended the group, `close` and `start` bring the worker into the next round, with the
    same rank, and with the functions that it has registered for calls.
    """

    def __init__(self, config: WorkerNodeConfig) -> None:
        """Nothing is opened before `start`."""
        self.config = config
        self._changing = threading.Lock()
        self._session: Session | None = None
        self._group: Group | None = None
        self._functions: FunctionRegistry | None = None
        """What the program has registered for calls in earlier rounds."""
        self._interruption: CoveyError | None = None
        self._round = 0
        self._pid = 0
        """The process that started it."""

    def start(self) -> Self:
        """Register, wait for a rank, and join the run.

        Raises:
            ConfigError: the worker is started already, or its settings cannot work.
            AuthError: the coordinator refuses this worker.
            DeadlineError: no rank, or not all ranks, came within `timeout`.
        """
        with self._changing:
            if self._session is not None:
                raise ConfigError(f"worker {self.worker_id!r} is started already; close it first")
            self._pid = os.getpid()
            try:
                self._start()
            except BaseException:
                self._end()
                raise
            atexit.register(self.close)
        return self

    def close(self) -> None:
        """Leave the group, unregister, and end all threads. A second call does nothing; `start` may follow.

        In a process that was forked from the worker, it does nothing: the worker is its parent.
        """
        if self._pid in (0, os.getpid()):
            with self._changing:
                self._end()

    def interrupt(self, error: CoveyError) -> None:
        """Let a `start` that waits for its rank on another thread raise `error`, now or later. Does not block."""
        self._interruption = error
        if (session := self._session) is not None:
            session.interrupt(error)

    @property
    def worker_id(self) -> str:
        """The name by which the coordinator knows this worker."""
        return self.config.worker_id or socket.gethostname()

    @property
    def group(self) -> Group:
        """The group of the run; ClosedError if the worker is not started."""
        if self._group is None:
            raise ClosedError(f"worker {self.worker_id!r} is not started")
        return self._group

    @property
    def strategy(self) -> Strategy:
        """The group as a `covey.Strategy`; ClosedError if the worker is not started."""
        from covey.runtime.group.strategy import GroupStrategy

        return GroupStrategy(self.group)

    @property
    def rank(self) -> int:
        """The rank of this worker; -1 if it is not started."""
        return -1 if self._group is None else self._group.rank

    @property
    def size(self) -> int:
        """The number of ranks; 0 if the worker is not started."""
        return 0 if self._group is None else self._group.size

    @property
    def round(self) -> int:
        """The number of the round that the group belongs to: a run has one for each time its workers registered."""
        return self._round

    @property
    def ready(self) -> bool:
        """Whether the worker is in a group that can work; it does not matter whether the coordinator is there."""
        return self._group is not None and not engine_of(self._group).is_over

    @property
    def registered(self) -> bool:
        """Whether the coordinator knows this worker now."""
        return self._session is not None and self._session.is_registered

    @property
    def waiting(self) -> int:
        """How many other workers wait for the next round, by the last heartbeat."""
        return 0 if self._session is None else self._session.waiting

    @property
    def problem(self) -> str:
        """Why the worker is not ready or not registered, in words; empty if it is both."""
        if self._session is None:
            return "the worker is not started"
        if self._group is None:
            return self._session.progress or "the worker waits for its rank"
        if engine_of(self._group).is_over:
            return "the group has ended"
        return "" if self._session.is_registered else self._session.progress or "the worker is not registered"

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._group is not None:
            self._group.__exit__(kind, error, trace)  # tells the other ranks of the error
        self.close()

    def __repr__(self) -> str:
        state = f"rank {self.rank} of {self.size}" if self._group is not None else "not started"
        return f"<WorkerNode {self.worker_id!r}: {state}>"

    # Helpers

    def _start(self) -> None:
        from covey.coordinator.extra import require_grpc

        require_grpc()
        from covey.coordinator.security import choose_security
        from covey.coordinator.session import Session, WorkerTerms
        from covey.net.keys import secret_sources
        from covey.net.keys.organisation import PemFiles
        from covey.runtime.joining.bootstrap import join_at

        config = self.config
        secret_sources.take_secret(os.environ)
        options, group = self._group_options()
        host = parse_seed(config.coordinator).host
        security = choose_security(host, PemFiles.of(config.tls_ca, config.tls_cert, config.tls_key), options)
        address, reserved = (config.address, None) if config.address else _reserve(host)
        try:
            self._session = Session(
                config.coordinator,
                security,
                WorkerTerms(
                    run=config.run,
                    worker_id=self.worker_id,
                    name=socket.gethostname(),
                    address=address,
                    min_size=config.size or config.min_size or 0,
                    max_size=config.size or config.max_size or 0,
                    settle=config.settle,
                ),
                interval=config.interval,
                report=self._view,
                order=self._pass_on,
            )
            if self._interruption is not None:  # it came before there was a session to interrupt
                raise self._interruption
            self._session.start()
            assigned = self._session.wait(config.timeout)
        finally:
            if reserved is not None:
                reserved.close()
        launched = _launched(config.run, assigned)
        self._group = join_at(launched, group, timeout=config.timeout, options=options, functions=self._functions)
        self._round = assigned.round

    def _group_options(self) -> tuple[ClusterOptions, GroupConfig]:
        """Return the cluster to be in, and the settings of the group."""
        config = self.config
        settings = group_config(
            effective_environment(),
            insecure=config.insecure,
            on_loss=config.on_loss,
            tls_ca=config.tls_ca,
            tls_cert=config.tls_cert,
            tls_key=config.tls_key,
            **from_argument(config.settings or {}),
        )
        return ClusterOptions(config.cluster, config.secret), settings

    def _end(self) -> None:
        group, self._group = self._group, None
        session, self._session = self._session, None
        atexit.unregister(self.close)
        try:
            if group is not None:
                self._functions = functions_of(group) or self._functions
                group.close()
        finally:
            if session is not None:
                session.close(None if group is None else self._view_of(group))

    def _view(self) -> pb.View | None:
        """Return the view of the group, for a heartbeat."""
        group = self._group
        return None if group is None else self._view_of(group)

    def _view_of(self, group: Group) -> pb.View | None:
        from covey.coordinator import coordinator_pb2 as pb

        if not group.live:  # the last rank has left
            return None
        generation = engine_of(group).generation
        return pb.View(
            round=self._round,
            generation=group.generation,
            number=0 if generation is None else generation.view.number,
            members=sorted(group.live),
            sequence=group.sequence,
        )

    def _pass_on(self, checkpoint: pb.Checkpoint) -> str | None:
        """Request a checkpoint of the group; return None until all ranks have ended it, then "" or an error.

        All workers get the order, and the first request counts: the ranks know the checkpoint by its id.
        """
        group = self._group
        if group is None or engine_of(group).is_over:
            return None
        state, error = checkpoint_state(group, checkpoint.id)
        if not state:
            group.request_checkpoint(checkpoint.path, id=checkpoint.id, timeout=CHECKPOINT_REQUEST_SECONDS)
        return printable(error) if state == "over" else None


def _reserve(coordinator: str) -> tuple[str, socket.socket]:
    """Return the address of this machine towards the coordinator with a free port, and the socket that reserves it."""
    host = local_address_towards(coordinator)
    reserved = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind((host, 0))
    port = reserved.getsockname()[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}", reserved


def _launched(run: str, assigned: pb.Assignment) -> LaunchedRank:
    """Return the rank to join as; the ranks of different rounds do not take each other for their own."""
    name, first = f"{run}-{assigned.round}", parse_seed(assigned.address)
    if is_loopback(first.host):
        folder = str(rendezvous_folder(f"{name}-{assigned.address}")) if assigned.size > 1 else ""
        return LaunchedRank(
            rank=assigned.rank,
            size=assigned.size,
            local_rank=assigned.rank,
            local_size=assigned.size,
            folder=folder,
            name=name,
        )
    listens_at = ((first.host, first.port),)
    return LaunchedRank(rank=assigned.rank, size=assigned.size, local_rank=None, listens_at=listens_at, name=name)
