"""The keeper: starts the ranks of a run on this host, watches over them, and leaves nothing behind.

A `LocalRun` has all its ranks here; a `ClusterRun` is the share of this host in a run of a cluster. Both start
processes and end them with all that they started. `runtime.watch` is what `covey run` does with one.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import os
import secrets
import signal
import socket
import subprocess
import time
from typing import IO, TYPE_CHECKING, Final, Self

from covey.base.config import LAUNCHER_VARIABLES, RUN_VARIABLES
from covey.base.errors import ConfigError
from covey.base.text import printable
from covey.net.run_folder import RunFolder
from covey.runtime.joining.torch_env import free_port, torch_variables
from covey.runtime.keeper.service import KeeperService
from covey.runtime.processes import close_pipes, die_with, libc, signal_group

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from covey.runtime.keeper.service import ClusterKeeperService
    from covey.runtime.keeper.warm_start import Template
    from covey.runtime.processes import Process

TOKEN_BYTES: Final = 32

FAILURE_GRACE: Final = 1.0
"""Seconds in which the other ranks may notice a failure by themselves and say what they lost, before SIGTERM."""
TERM_GRACE: Final = 3.0
"""Seconds between SIGTERM and SIGKILL."""
RESTART_PAUSE: Final = 0.2
"""Seconds before a process is started again; twice as many each time."""
RESTART_PAUSE_MOST: Final = 5.0

Stdio = int | IO[bytes] | None


class HostRun(abc.ABC):
    """Processes of a run on this host. Leaving the `with` block ends each with what it left in its process group.

    Start them from a thread that outlives them: on Linux they die with the thread that started them.
    """

    noun = "rank"
    """What people call one of the processes."""
    inherits: tuple[str, ...] = ()
    """Variables about a run that pass from this process's environment on to its children."""
    service: KeeperService | ClusterKeeperService
    """Who looks after the processes, and speaks for them."""

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ConfigError(f"a run needs at least one {self.noun}, got {size}")
        self.size = size
        self._processes: list[Process] = []
        self._template: Template | None = None

    @abc.abstractmethod
    def place(self, rank: int) -> dict[str, object]:
        """Return the variables that tell a process where it belongs."""

    def label(self, rank: int, process: Process) -> str:
        """Return what stands in front of a process's lines of output."""
        return str(rank)

    @abc.abstractmethod
    def handed_over(self) -> tuple[str, bytes]:
        """Return a variable and a secret: the variable names the end of a pipe that holds it. Empty: nothing."""

    def start(
        self,
        rank: int,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdout: Stdio = None,
        stderr: Stdio = None,
        stdin: Stdio = subprocess.DEVNULL,
    ) -> subprocess.Popen[bytes]:
        """Start `argv` as `rank`, in a session of its own; `env` adds to this process's environment.

        Raises:
            ConfigError: `rank` is not in the run, or `argv` cannot be executed.
        """
        if not 0 <= rank < self.size:
            raise ConfigError(f"{self.noun} {rank} is not in a run of {self.size}")
        libc()  # loaded here, because little is safe between fork and exec
        with self._secret() as (variable, secret_end):
            try:
                process = subprocess.Popen(
                    argv,
                    env=self._environment(rank, env or {}) | ({variable: str(secret_end)} if variable else {}),
                    stdin=stdin,
                    stdout=stdout,
                    stderr=stderr,
                    pass_fds=(secret_end,) if variable else (),
                    start_new_session=True,
                    preexec_fn=functools.partial(die_with, os.getpid()),
                )
            except OSError as error:
                raise ConfigError(f"cannot start {argv[0]}: {error.strerror}") from error
        self._processes.append(process)
        return process

    def warm_up(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        """Get ready to `fork` processes that execute `argv`, where that is of use; see `runtime.warm_start`.

        Raises:
            ConfigError: the setting for it is malformed.
        """
        from covey.runtime.keeper import warm_start

        if warm_start.is_of_use(argv, self.size, {**os.environ, **env}):
            first, last = (self._environment(rank, env) for rank in (0, self.size - 1))
            common = {name: value for name, value in first.items() if last.get(name) == value}
            with contextlib.suppress(warm_start.TemplateLostError):
                self._template = warm_start.Template(argv, common)

    def fork(self, rank: int, env: Mapping[str, str]) -> Process | None:
        """Return a process as `start` makes it, with pipes for its output, but sooner; None: use `start` instead."""
        from covey.runtime.keeper.warm_start import TemplateLostError

        if self._template is None:
            return None
        with self._secret() as secret, contextlib.suppress(TemplateLostError):
            process = self._template.fork(self._environment(rank, env), secret)
            self._processes.append(process)
            return process
        return None

    @contextlib.contextmanager
    def _secret(self) -> Iterator[tuple[str, int]]:
        """Yield a variable, and the descriptor that it names in a process: the end of a pipe that holds the secret."""
        variable, secret = self.handed_over()
        secret_end, write_end = os.pipe()
        try:
            os.write(write_end, secret)
            yield variable, secret_end
        finally:
            os.close(secret_end)
            os.close(write_end)

    def _environment(self, rank: int, env: Mapping[str, str]) -> dict[str, str]:
        """Return the variables of a rank, but for the one that names a descriptor."""
        place = {**self.place(rank), "PYTHONUNBUFFERED": 1}
        return {**self._inherited(), **env, **{name: str(value) for name, value in place.items()}}

    def _inherited(self) -> dict[str, str]:
        """Return this process's environment without its own place in a run, for it may be a rank itself.

        A cluster's secret goes to those that need it by `handed_over`, and to no others.
        """
        own = {*LAUNCHER_VARIABLES, *RUN_VARIABLES, "COVEY_SECRET"} - {*self.inherits}
        return {name: value for name, value in os.environ.items() if name not in own}

    def survives(self) -> bool | None:
        """Tell whether the run goes on without those that it loses; None: its members have not said yet."""
        self.service.catch_up()
        return self.service.survives

    def clear_away(self, process: Process) -> None:
        """Forget a process that has ended: kill what it left running, and close the pipes to it."""
        signal_group(process.pid, signal.SIGKILL, reaped=True)
        self._processes.remove(process)
        close_pipes(process)

    def signal(self, signum: int) -> None:
        """Send `signum` to every process of the run that is still there."""
        for process in self._processes:
            signal_group(process.pid, signum, reaped=process.poll() is not None)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stop every process of the run for as long as the block takes; the warden does not take that for a failure."""
        self.service.hold()
        self.signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.signal(signal.SIGCONT)
            self.service.release()

    def stop(self, grace: float = TERM_GRACE) -> None:
        """End and reap all: SIGTERM to each rank's process group, SIGKILL to what is left after `grace` seconds."""
        try:
            self.signal(signal.SIGTERM)
            deadline = time.monotonic() + grace
            while self._any_left() and time.monotonic() < deadline:
                time.sleep(0.01)
        finally:  # also when Ctrl-C cuts the grace short
            self.signal(signal.SIGKILL)
            for process in self._processes:
                process.wait()

    def _any_left(self) -> bool:
        return any(p.poll() is None or signal_group(p.pid, 0, reaped=True) for p in self._processes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.stop()
        finally:
            if self._template is not None:
                self._template.close()
            self.service.close()
            for process in self._processes:
                close_pipes(process)


class LocalRun(HostRun):
    """A run whose ranks all live on this host: a folder to meet in, a token that proves membership, and a warden.

    Leaving the `with` block removes the folder, too.
    """

    service: KeeperService

    def __init__(self, size: int, *, torch_env: bool = False) -> None:
        """With `torch_env`, ranks also get the variables of torch."""
        super().__init__(size)
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self._torch_port = free_port() if torch_env else 0
        self._own_folder = RunFolder()
        self.folder = self._own_folder.path
        self.service = KeeperService(self.folder, self.token)
        try:
            self.service.start()
        except BaseException:
            self._own_folder.remove()
            raise

    def place(self, rank: int) -> dict[str, object]:
        own = {
            "COVEY_RANK": rank,
            "COVEY_SIZE": self.size,
            "COVEY_LOCAL_RANK": rank,
            "COVEY_LOCAL_SIZE": self.size,
            "COVEY_MEET": self.folder,
            "COVEY_KEEPER": self.service.path,
        }
        if not self._torch_port:
            return own
        port, size = self._torch_port, self.size
        return own | torch_variables(
            rank=rank, size=size, local_rank=rank, local_size=size, master="127.0.0.1", port=port
        )

    def handed_over(self) -> tuple[str, bytes]:
        return "COVEY_TOKEN_FD", self.token

    def __exit__(self, *exception: object) -> None:
        try:
            super().__exit__(*exception)
        finally:
            self._own_folder.remove()


class ClusterRun(HostRun):
    """The processes of this host in a run of a cluster: each is a node, which finds and meets the others by itself."""

    noun = "process"
    service: ClusterKeeperService
    inherits = tuple(name for name in RUN_VARIABLES if name not in ("COVEY_SECRET_FD", "COVEY_KEEPER_ID"))

    def __init__(
        self, size: int, variables: Mapping[str, str], service: ClusterKeeperService, *, key: bytes = b""
    ) -> None:
        """`variables` describe the run; `key` is the cluster's, if processes cannot find it by themselves."""
        super().__init__(size)
        self._variables, self._key = variables, key
        self._machine = printable(socket.gethostname().partition(".")[0], 40) or "here"
        self.service = service

    def __enter__(self) -> Self:
        self.service.start()
        return self

    def label(self, rank: int, process: Process) -> str:
        """Return the machine's name and the process's rank in the run; its number here until that is known."""
        rank_there = self.service.rank_of(process.pid)
        if rank_there is not None:
            return f"{self._machine} {rank_there}"
        return self._machine if self.size == 1 else f"{self._machine}/{rank}"

    def place(self, rank: int) -> dict[str, object]:
        return {**self._variables, "COVEY_KEEPER_ID": self.service.id.hex()}

    def handed_over(self) -> tuple[str, bytes]:
        return ("COVEY_SECRET_FD" if self._key else ""), self._key
