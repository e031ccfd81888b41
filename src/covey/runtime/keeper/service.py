"""The services of a keeper: they learn which ranks its processes are, read their state from the kernel, and report it.

A `KeeperService` serves a run on this host: the processes connect to a socket. A thread waits at the socket until the
first one connects, and only then loads what it needs, which takes longer than many scripts run.
A `ClusterKeeperService` is a node of the cluster, and reports to nodes of other hosts.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Final

from covey.base.errors import ConfigError, CoveyError
from covey.base.settings import NODE_PORTS
from covey.net.host.descriptors import explain, track
from covey.net.host.folders import FOLDER_ADVICE

if TYPE_CHECKING:
    from covey.base.config import GroupConfig
    from covey.net.keys.clusters import Cluster
    from covey.runtime.keeper.cluster_keeper import ClusterKeeper
    from covey.runtime.keeper.local_keeper import LocalKeeper
    from covey.runtime.peers.endpoint import Endpoint
    from covey.wire import messages

THREAD_SECONDS: Final = 10.0
"""How long the thread of a service may take to close what it opened."""
CATCH_UP_SECONDS: Final = 0.5
KEEPER_BACKLOG: Final = 256


def keeper_path(folder: str) -> str:
    """Return the path at which the keeper of the run in `folder` listens."""
    return os.path.join(folder, "keeper.sock")


class KeeperService:
    """Reports on the processes of a run whose ranks meet in a folder of this host."""

    def __init__(self, folder: str, token: bytes, size: int) -> None:
        """`token` proves membership, as it does between the ranks; the run is started with `size` of them."""
        self.path = keeper_path(folder)
        self._folder, self._token, self._size = folder, token, size
        self._gone = 0
        self._closing = threading.Lock()
        self._is_closed = False
        self.was_found = False
        """Whether a process has joined the run: it links with its keeper first."""
        self._bell: tuple[socket.socket, socket.socket] | None = None
        self._thread: threading.Thread | None = None
        self._local_keeper: LocalKeeper | None = None

    def start(self) -> None:
        """Return as soon as processes can connect.

        Raises:
            ConfigError: the folder does not belong to this user alone, or there is a keeper in it already.
        """
        from covey.net.discovery.host_rendezvous import check_folder

        check_folder(Path(self._folder))
        listener = track(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        try:
            listener.bind(self.path)
            listener.listen(KEEPER_BACKLOG)
            listener.setblocking(False)
            waking, ringing = socket.socketpair()
        except OSError as error:
            listener.close()
            raise ConfigError(f"cannot listen at {self.path}: {explain(error)}; {FOLDER_ADVICE}") from error
        self._bell = track(waking), track(ringing)
        self._thread = threading.Thread(target=self._serve, args=(listener, waking), name="covey-keeper", daemon=True)
        self._thread.start()

    is_over = False
    is_elsewhere = False
    """A run on this host ends with its last process."""

    @property
    def survives(self) -> bool | None:
        """Whether the run goes on when a member is lost; None if there are members, and none has said so yet."""
        return self._local_keeper.survives if self._local_keeper is not None else None if self.was_found else False

    def will_not_return(self) -> None:
        """Note that a process has failed and will not be restarted."""
        self._gone += 1
        self._tell_of_gone()

    def _tell_of_gone(self) -> None:
        if self._local_keeper is not None:
            self._local_keeper.expected = self._size - self._gone

    def inspect(self, question: messages.Inspect, within: float) -> dict[int, messages.Inspected | None]:
        """Ask the processes; return the answers by rank, None for those that did not come. On any thread."""
        return _inspect(self._local_keeper, question, within)

    def request_checkpoint(self) -> None:
        """Ask the run for a checkpoint, and do not wait. On any thread."""
        _request_checkpoint(self._local_keeper)

    def culprits(self) -> list[int]:
        """Return the ids of processes that failed by themselves or made others fail, the first first."""
        return self._local_keeper.culprits() if self._local_keeper is not None else []

    def catch_up(self) -> None:
        """Handle the messages that have arrived, also of processes that have ended."""
        if self._local_keeper is not None:
            _let_the_loop_catch_up()

    def hold(self) -> None:
        """Report nothing until `release`: the keeper is about to stop its processes and itself."""
        if self._local_keeper is not None:
            self._local_keeper.rounds.is_held = True
            _let_the_loop_catch_up()

    def release(self) -> None:
        """Report again: the processes continue."""
        if self._local_keeper is not None:
            self._local_keeper.rounds.is_held = False

    def close(self) -> None:
        """Stop reporting. From any thread; closing twice is fine."""
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
        if self._bell is None or self._thread is None:
            return
        waking, ringing = self._bell
        ringing.close()
        self._thread.join(THREAD_SECONDS)
        if not self._thread.is_alive():
            waking.close()
        with contextlib.suppress(OSError):
            os.unlink(self.path)

    def _serve(self, listener: socket.socket, waking: socket.socket) -> None:
        """Wait for the first process, serve all on the control loop, and wait for the end. Runs on its own thread."""
        arrivals = select.poll()
        arrivals.register(listener, select.POLLIN)
        arrivals.register(waking, select.POLLIN)
        arrivals.poll()
        if self._is_closed:
            listener.close()
            return
        self.was_found = True
        from covey.runtime import loop as control
        from covey.runtime.keeper.local_keeper import LocalKeeper

        local_keeper = LocalKeeper(listener, self._folder, self._token, self._size)
        self._local_keeper = local_keeper  # before a process can connect: `survives` reads it
        self._tell_of_gone()
        control.start(local_keeper.open()).result()
        waking.recv(1)
        with contextlib.suppress(TimeoutError):
            control.start(local_keeper.close()).result(control.LOOP_SECONDS)


class ClusterKeeperService:
    """Reports on the nodes that a keeper starts, to the other nodes of their run.

    The keeper works without it, so that a failure to enter the cluster is only logged.
    """

    def __init__(self, cluster: Cluster, config: GroupConfig) -> None:
        from covey.net.keys.identity import NodeIdentity

        self._cluster, self._config = cluster, config
        self._identity = NodeIdentity.passing()
        self.id = self._identity.id
        """What its nodes state on their cards as their keeper."""
        self._lock = threading.Lock()
        self._is_closed = False
        self._endpoint: Endpoint | None = None
        self._cluster_keeper: ClusterKeeper | None = None

    def start(self) -> None:
        """Enter the cluster on a thread of its own."""
        threading.Thread(target=self._open, name="covey-keeper", daemon=True).start()

    def cluster(self) -> Cluster:
        """Return what is known of the cluster now. On any thread."""
        return self._cluster if self._cluster_keeper is None else self._cluster_keeper.mesh.cluster

    @property
    def survives(self) -> bool | None:
        """Whether the run goes on when a member is lost; None if there are members here, and none has said so yet."""
        return self._cluster_keeper is not None and self._cluster_keeper.survives

    is_elsewhere = True
    """A run of a cluster may go on without processes of this keeper."""

    @property
    def is_over(self) -> bool:
        """Whether the members of the run, here or elsewhere, have finished its work."""
        return self._cluster_keeper is not None and self._cluster_keeper.is_over

    def rank_of(self, session: int) -> int | None:
        """Return the rank of the process that leads a session, or of one in it; None while it is unknown."""
        if self._cluster_keeper is None:
            return None
        if session not in self._cluster_keeper.ranks:
            self.catch_up()  # the message with its rank may have arrived before the output that is about to be shown
        return self._cluster_keeper.ranks.get(session)

    def known_rank_of(self, session: int) -> int | None:
        """Return the same, without waiting for messages that may have arrived."""
        return self._cluster_keeper.ranks.get(session) if self._cluster_keeper is not None else None

    def id_of(self, session: int) -> bytes:
        """Return the node id of the process that leads a session, or of one in it; empty if it is unknown."""
        return self._cluster_keeper.ids.get(session, b"") if self._cluster_keeper is not None else b""

    def inspect(self, question: messages.Inspect, within: float) -> dict[int, messages.Inspected | None]:
        """Ask the processes; return the answers by rank, None for those that did not come. On any thread."""
        return _inspect(self._cluster_keeper, question, within)

    def request_checkpoint(self) -> None:
        """Ask the run for a checkpoint, and do not wait. On any thread."""
        _request_checkpoint(self._cluster_keeper)

    def culprits(self) -> list[int]:
        """Return nothing: members of a cluster report failures to each other."""
        return []

    def catch_up(self) -> None:
        """Handle the messages that have arrived, also of processes that have ended."""
        if self._cluster_keeper is not None:
            _let_the_loop_catch_up()

    def hold(self) -> None:
        """Report nothing until `release`: the keeper is about to stop its processes and itself."""
        if self._cluster_keeper is not None:
            self._cluster_keeper.rounds.is_held = True
            _let_the_loop_catch_up()

    def release(self) -> None:
        """Report again: the processes continue."""
        if self._cluster_keeper is not None:
            self._cluster_keeper.rounds.is_held = False

    def close(self) -> None:
        """Stop reporting. From any thread; closing twice is fine."""
        with self._lock:
            self._is_closed = True
            endpoint, self._endpoint = self._endpoint, None
            if endpoint is not None and self._cluster_keeper is not None:
                from covey.runtime import loop as control

                with contextlib.suppress(TimeoutError):
                    control.start(self._cluster_keeper.close()).result(control.LOOP_SECONDS)
                endpoint.leave()

    def _open(self) -> None:
        import logging

        from covey.runtime import loop as control
        from covey.runtime.keeper.cluster_keeper import ClusterKeeper
        from covey.runtime.peers.endpoint import cluster_endpoint

        async def open_one(endpoint: Endpoint) -> ClusterKeeper:
            cluster_keeper = ClusterKeeper(self._cluster, self._config, endpoint)
            await cluster_keeper.open()
            return cluster_keeper

        with self._lock, contextlib.ExitStack() as undo:
            if self._is_closed:
                return
            try:
                endpoint = cluster_endpoint(
                    self._cluster,
                    self._config,
                    run="",
                    ports=NODE_PORTS[::-1],
                    identity=self._identity,
                    has_lanes=False,
                )
                undo.callback(endpoint.leave)
                self._cluster_keeper = control.run(open_one(endpoint), control.LOOP_SECONDS)
            except (CoveyError, OSError) as error:  # TimeoutError, too
                logging.getLogger("covey").info("no keeper in cluster %r: %s", self._cluster.name, error)
            else:
                self._endpoint = endpoint
                undo.pop_all()


def _inspect(
    keeper: LocalKeeper | ClusterKeeper | None, question: messages.Inspect, within: float
) -> dict[int, messages.Inspected | None]:
    from covey.runtime import loop as control

    with contextlib.suppress(TimeoutError):  # the loop is busy
        return {} if keeper is None else control.run(keeper.inspect(question, within), within + control.LOOP_SECONDS)
    return {}


def _request_checkpoint(keeper: LocalKeeper | ClusterKeeper | None) -> None:
    from covey.runtime import loop as control

    if keeper is not None:
        control.soon(keeper.request_checkpoint)


def _let_the_loop_catch_up() -> None:
    """Return when the control loop has handled the messages that had arrived."""
    import asyncio

    from covey.runtime import loop as control

    async def turn() -> None:
        for _ in range(3):  # one turn to poll the sockets, one to read them, one in reserve
            await asyncio.sleep(0)

    with contextlib.suppress(TimeoutError):
        control.start(turn()).result(CATCH_UP_SECONDS)
