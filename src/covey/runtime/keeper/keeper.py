"""The processes of a run on this host: what they are told, and which service speaks for them.

`HostRun.children` (`runtime/processes.py`) starts and supervises them.

A `LocalRun` has all its ranks on this host; a `ClusterRun` is this host's share of a run of a cluster.
`keeper/supervisor.py` is what `covey run` does with one.

A `MemberRelay` is the relay that `covey run --relay-limit` and `covey up --relay-limit` offer to their cluster.
"""

from __future__ import annotations

import abc
import contextlib
import os
import secrets
import signal
import subprocess
import time
from typing import IO, TYPE_CHECKING, Final, Self

from covey.base.config import LAUNCHER_VARIABLES, RUN_VARIABLES
from covey.base.errors import ConfigError
from covey.base.pace import Growing
from covey.base.settings import RELAY_PORT
from covey.net.host import runs
from covey.net.host.machine import short_host_name
from covey.net.host.runs import RunFolder
from covey.runtime.joining.torch_env import (
    TORCH_VARIABLES,
    given,
    is_given,
    reserve_port,
    torch_variables,
    without_rank,
)
from covey.runtime.keeper.service import KeeperService
from covey.runtime.processes import Children

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from covey.net.keys.clusters import Cluster
    from covey.runtime.keeper.service import ClusterKeeperService
    from covey.runtime.keeper.warm_start import Template
    from covey.runtime.processes import Child
    from covey.runtime.relaying.server import RelayThread
    from covey.wire.secret import ClusterSecret

LAUNCH_TOKEN_BYTES: Final = 32

RANK_FAILURE_GRACE: Final = 1.0
"""Seconds before SIGTERM in which the other ranks may notice a failure by themselves and report it."""
TERM_GRACE: Final = 3.0
"""Seconds between SIGTERM and SIGKILL."""
RESTARTS: Final = Growing(0.2, 5.0)
"""Pauses before a process is restarted."""

Stdio = int | IO[bytes] | None
PORTS_TRIED: Final = range(RELAY_PORT, RELAY_PORT + 8)
"""The first free one is used, or else any: the nodes of this machine tell others which."""


class HostRun(abc.ABC):
    """Processes of a run on this host. Leaving the `with` block ends each of them, with its process group.

    Start them from a thread that outlives them: on Linux they die with the thread that started them.
    """

    noun = "rank"
    """What messages call one of the processes."""
    inherits: tuple[str, ...] = ()
    """Variables about a run that children inherit from this process's environment."""
    service: KeeperService | ClusterKeeperService
    """Reports on the processes to the members of the run."""

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ConfigError(f"a run needs at least one {self.noun}, got {size}")
        self.size = size
        self.children = Children()
        self._template: Template | None = None

    @abc.abstractmethod
    def variables(self, rank: int) -> dict[str, object]:
        """Return the variables that tell a process its run and rank."""

    def label(self, rank: int, process: Child) -> str:
        """Return the prefix of a process's lines of output."""
        return str(rank)

    def rank_of(self, rank: int, process: Child) -> int | None:
        """Return the rank of a process in the run; None while it is not known."""
        return rank

    def variables_again(self, process: Child) -> dict[str, str]:
        """Return the variables by which a process that replaces `process` continues what that one was."""
        return {}

    @abc.abstractmethod
    def will_not_return(self) -> None:
        """Note that a process has failed and will not be restarted."""

    @abc.abstractmethod
    def secret_variable(self) -> tuple[str, bytes]:
        """Return a variable and a secret: the variable gets the descriptor of a pipe with the secret; "": none."""

    def start(
        self,
        rank: int,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdout: Stdio = None,
        stderr: Stdio = None,
        stdin: Stdio = subprocess.DEVNULL,
    ) -> Child:
        """Start `argv` as `rank`, in its own session; `env` is added to this process's environment.

        Raises:
            ConfigError: `rank` is not in the run, or `argv` cannot be executed.
        """
        if not 0 <= rank < self.size:
            raise ConfigError(f"{self.noun} {rank} is not in a run of {self.size}")
        with self._secret() as (variable, secret_end):
            return self.children.start(
                argv,
                env=self._environment(rank, env or {}) | ({variable: str(secret_end)} if variable else {}),
                name=rank,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                pass_fds=(secret_end,) if variable else (),
            )

    def warm_up(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        """Prepare a template process that `fork` copies, if that saves time; see `keeper/warm_start.py`.

        Raises:
            ConfigError: COVEY_WARM_START is malformed.
        """
        from covey.runtime.keeper import warm_start

        if warm_start.is_of_use(argv, self.size, {**os.environ, **env}):
            first, last = (self._environment(rank, env) for rank in (0, self.size - 1))
            common = {name: value for name, value in first.items() if last.get(name) == value}
            with contextlib.suppress(warm_start.TemplateLostError):
                self._template = warm_start.Template(argv, common)

    def fork(self, rank: int, env: Mapping[str, str]) -> Child | None:
        """Start a process faster than `start`, with pipes for its output; None if there is no template: use `start`."""
        from covey.runtime.keeper.warm_start import TemplateLostError

        if self._template is None:
            return None
        with self._secret() as secret, contextlib.suppress(TemplateLostError):
            return self.children.adopt(self._template.fork(self._environment(rank, env), secret), rank)
        return None

    @contextlib.contextmanager
    def _secret(self) -> Iterator[tuple[str, int]]:
        """Yield the secret variable, and the descriptor of a pipe that holds the secret."""
        variable, secret = self.secret_variable()
        secret_end, write_end = os.pipe()
        try:
            os.write(write_end, secret)
            yield variable, secret_end
        finally:
            os.close(secret_end)
            os.close(write_end)

    def _environment(self, rank: int, env: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of a rank, without the secret variable."""
        own = {name: str(value) for name, value in (self.variables(rank) | {"PYTHONUNBUFFERED": 1}).items()}
        if "COVEY_RESTART" in env:  # the run goes on with other ranks
            own = without_rank(own)
        return {**self._inherited(), **env, **own}

    def _inherited(self) -> dict[str, str]:
        """Return this process's environment without the variables of a run: this process may be a rank itself.

        The secret of a cluster is passed on by `secret_variable` only.
        """
        own = {*LAUNCHER_VARIABLES, *RUN_VARIABLES, "COVEY_SECRET"} - {*self.inherits}
        own |= {*TORCH_VARIABLES} if is_given(os.environ) else set()
        return {name: value for name, value in os.environ.items() if name not in own}

    def has_joined(self) -> bool:
        """Tell whether a process here, or a program that it started, ever joined the run; True if that is not known."""
        return True

    def survives(self) -> bool | None:
        """Tell whether the run goes on when a member is lost; None if the members have not said so yet."""
        self.service.catch_up()
        return self.service.survives

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stop every process of the run during the `with` block; the service does not report that."""
        self.service.hold()
        self.children.signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.children.signal(signal.SIGCONT)
            self.service.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.children.stop(TERM_GRACE)
        finally:
            if self._template is not None:
                self._template.close()
            self.service.close()
            self.children.close()


class LocalRun(HostRun):
    """A run whose ranks are all on this host. It has a folder where they listen, and a token that proves membership.

    Leaving the `with` block removes the folder, too.
    """

    service: KeeperService

    def __init__(self, size: int, *, name: str = "run", torch_env: bool = False) -> None:
        """Prepare a run of `size` ranks, which commands find by its name.

        The ranks get the variables of torch, too. With `torch_env` they are not marked as covey's own, so that
        `env://` means torch's own store.
        """
        super().__init__(size)
        self.token = secrets.token_bytes(LAUNCH_TOKEN_BYTES)
        self._torch_env = torch_env
        self._torch_port = reserve_port()
        self._own_folder = RunFolder()
        self.folder = self._own_folder.path
        self.service = KeeperService(self.folder, self.token, size)
        try:
            self.service.start()
            with contextlib.suppress(OSError):  # a full disk: the run goes on, and no command finds it
                runs.describe(self.folder, name, size, self.token)
        except BaseException:
            self.children.close()
            self._torch_port.close()
            self._own_folder.remove()
            raise

    def variables(self, rank: int) -> dict[str, object]:
        own = {
            "COVEY_RANK": rank,
            "COVEY_SIZE": self.size,
            "COVEY_LOCAL_RANK": rank,
            "COVEY_LOCAL_SIZE": self.size,
            "COVEY_MEET": self.folder,
            "COVEY_KEEPER": self.service.path,
        }
        port, size = self._torch_port.getsockname()[1], self.size
        torchs = torch_variables(rank=rank, size=size, local_rank=rank, local_size=size, master="127.0.0.1", port=port)
        return own | (torchs if self._torch_env else given(torchs))

    def has_joined(self) -> bool:
        return self.service.was_found

    def will_not_return(self) -> None:
        self.service.will_not_return()

    def secret_variable(self) -> tuple[str, bytes]:
        return "COVEY_TOKEN_FD", self.token

    def __exit__(self, *exception: object) -> None:
        try:
            super().__exit__(*exception)
        finally:
            self._torch_port.close()
            self._own_folder.remove()


class ClusterRun(HostRun):
    """The processes of this host in a run of a cluster. Each is a node, and finds the others by itself."""

    noun = "process"
    service: ClusterKeeperService
    inherits = tuple(
        name
        for name in RUN_VARIABLES
        if name not in ("COVEY_SECRET_FD", "COVEY_KEEPER_ID", "COVEY_NODE_ID", "COVEY_RELAY_PORT", "COVEY_BY_AGENT")
    )

    def __init__(
        self,
        size: int,
        variables: Mapping[str, str],
        service: ClusterKeeperService,
        *,
        key: bytes = b"",
        relay_rate: float = 0.0,
    ) -> None:
        """`variables` describe the run; `key` is the cluster's secret, if processes cannot read it from a file.

        With a `relay_rate`, in bytes a second, this machine offers a relay to the nodes of the cluster.
        """
        super().__init__(size)
        self._variables, self._key = variables, key
        self._relay = MemberRelay(service.cluster, relay_rate) if relay_rate else None
        self._machine = short_host_name() or "here"
        self.service = service

    def __enter__(self) -> Self:
        self.service.start()
        if self._relay is not None:
            self._relay.start()
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            super().__exit__(*exception)
        finally:
            if self._relay is not None:
                self._relay.close()

    def label(self, rank: int, process: Child) -> str:
        """Return the machine's name and the process's rank in the run; until the rank is known, its number here."""
        rank_there = self.service.rank_of(process.pid)
        if rank_there is not None:
            return f"{self._machine} {rank_there}"
        return self._machine if self.size == 1 else f"{self._machine}/{rank}"

    def rank_of(self, rank: int, process: Child) -> int | None:
        return self.service.known_rank_of(process.pid)

    def variables(self, rank: int) -> dict[str, object]:
        offered = {} if self._relay is None else {"COVEY_RELAY_PORT": self._relay.port}
        # Joining tells the rank. With --torch-env it also names torch's own store.
        rank_later = {} if "COVEY_TORCH_ENV" in self._variables else without_rank({})
        return {**self._variables, "COVEY_KEEPER_ID": self.service.id.hex(), **offered, **rank_later}

    def will_not_return(self) -> None:
        """Do nothing: a run of a cluster may continue on other machines, and its members know which are left."""

    def variables_again(self, process: Child) -> dict[str, str]:
        """Return the id of the node: the members count its vote as that of the process that failed."""
        id = self.service.id_of(process.pid)
        return {"COVEY_NODE_ID": id.hex()} if id else {}

    def secret_variable(self) -> tuple[str, bytes]:
        return ("COVEY_SECRET_FD" if self._key else ""), self._key


class MemberRelay:
    """A relay for one cluster. Listens from `start` to `close`."""

    def __init__(self, cluster: Callable[[], Cluster], rate: float) -> None:
        """`cluster` returns what is known of the cluster now; `rate` is what all pipes get, in bytes a second."""
        self._cluster, self._rate = cluster, rate
        self._thread: RelayThread | None = None
        self._keys: dict[ClusterSecret, bytes] = {}

    @property
    def port(self) -> int:
        """The port at which it listens; 0 if it does not."""
        return 0 if self._thread is None else self._thread.port

    def start(self) -> None:
        """Listen on all interfaces; ConfigError if that is not possible."""
        from covey.runtime.peers.endpoint import listen_everywhere
        from covey.runtime.relaying.server import RelayLimits, RelayThread

        limits = RelayLimits(bytes_per_second=self._rate)
        self._thread = RelayThread(listen_everywhere(PORTS_TRIED), limits, self._clusters)

    def close(self) -> None:
        """Close every connection. Closing twice is fine."""
        if self._thread is not None:
            self._thread.close()

    def _clusters(self) -> set[bytes]:
        """Return the public keys of the cluster: of its secret, and of the one before while that is good."""
        from covey.wire.relay import RelayKey

        cluster = self._cluster()
        good = [each for each in (cluster.secret, cluster.earlier(time.time())) if each is not None]
        self._keys = {each: self._keys.get(each) or RelayKey(each).cluster for each in good}
        return set(self._keys.values())
