"""The keeper: starts the ranks of a run on this host, watches over them, and leaves nothing behind.

A `LocalRun` has all its ranks here; a `ClusterRun` is the share of this host in a run of a cluster. Both start
processes and end them with all that they started. `keep` is what `covey run` does with one: it relays what they print
and passes signals on. When one of them fails it stops everybody, or, if the run survives losses, starts it again.
"""

from __future__ import annotations

import abc
import contextlib
import ctypes
import functools
import os
import secrets
import select
import selectors
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from typing import IO, TYPE_CHECKING, Final, NamedTuple, Self

from covey.base.config import LAUNCHER_VARIABLES, RUN_VARIABLES
from covey.base.errors import ConfigError
from covey.runtime.torch_env import free_port, torch_variables
from covey.runtime.voices import LINE_LIMIT_BYTES, Cursor, Voice
from covey.runtime.warden import Warden

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from covey.runtime.warden import ClusterWarden

TOKEN_BYTES: Final = 32
FOLDER_LIMIT_BYTES: Final = 75
"""Longest path of a run's folder. A unix socket's path may have 103 bytes, so its name in the folder may have 27."""

FAILURE_GRACE: Final = 1.0
"""Seconds in which the other ranks may notice a failure by themselves and say what they lost, before SIGTERM."""
SIGNAL_GRACE: Final = 30.0
"""Seconds that ranks have to save their work after Ctrl-C or SIGTERM; a second Ctrl-C ends them at once."""
TERM_GRACE: Final = 3.0
"""Seconds between SIGTERM and SIGKILL."""
RESTART_PAUSE: Final = 0.2
"""Seconds before a process is started again; twice as many each time."""
RESTART_PAUSE_MOST: Final = 5.0
SETTLE_EVERY: Final = 0.02
"""Seconds between looks whether a run has said what a failure means to it."""

Stdio = int | IO[bytes] | None


class HostRun(abc.ABC):
    """Processes of a run on this host. Leaving the `with` block ends each with what it left in its process group.

    Start them from a thread that outlives them: on Linux they die with the thread that started them.
    """

    noun = "rank"
    """What people call one of the processes."""
    inherits: tuple[str, ...] = ()
    """Variables about a run that pass from this process's environment on to its children."""
    warden: Warden | ClusterWarden
    """Who looks after the processes, and speaks for them."""

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ConfigError(f"a run needs at least one {self.noun}, got {size}")
        self.size = size
        self._processes: list[subprocess.Popen[bytes]] = []

    @abc.abstractmethod
    def place(self, rank: int) -> dict[str, object]:
        """Return the variables that tell a process where it belongs."""

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
        _libc()  # loaded here, because little is safe between fork and exec
        variable, secret = self.handed_over()
        secret_end, write_end = os.pipe()
        try:
            os.write(write_end, secret)
            place = {**self.place(rank), **({variable: secret_end} if variable else {}), "PYTHONUNBUFFERED": 1}
            process = subprocess.Popen(
                argv,
                env={**self._inherited(), **(env or {}), **{name: str(value) for name, value in place.items()}},
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                pass_fds=(secret_end,) if variable else (),
                start_new_session=True,
                preexec_fn=functools.partial(die_with, os.getpid()),
            )
        except OSError as error:
            raise ConfigError(f"cannot start {argv[0]}: {error.strerror}") from error
        finally:
            os.close(secret_end)
            os.close(write_end)
        self._processes.append(process)
        return process

    def _inherited(self) -> dict[str, str]:
        """Return this process's environment without its own place in a run: it may be a rank itself."""
        own = {*LAUNCHER_VARIABLES, *RUN_VARIABLES} - {*self.inherits}
        return {name: value for name, value in os.environ.items() if name not in own}

    def survives(self) -> bool | None:
        """Tell whether the run goes on without those that it loses; None: its members have not said yet."""
        self.warden.catch_up()
        return self.warden.survives

    def clear_away(self, process: subprocess.Popen[bytes]) -> None:
        """Forget a process that has ended: kill what it left running, and close the pipes to it."""
        signal_group(process.pid, signal.SIGKILL, reaped=True)
        self._processes.remove(process)
        _close_pipes(process)

    def signal(self, signum: int) -> None:
        """Send `signum` to every process of the run that is still there."""
        for process in self._processes:
            signal_group(process.pid, signum, reaped=process.poll() is not None)

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
            self.warden.close()
            for process in self._processes:
                _close_pipes(process)


class LocalRun(HostRun):
    """A run whose ranks all live on this host: a folder to meet in, a token that proves membership, and a warden.

    Leaving the `with` block removes the folder, too.
    """

    warden: Warden

    def __init__(self, size: int, *, torch_env: bool = False) -> None:
        """With `torch_env`, ranks also get the variables of torch."""
        super().__init__(size)
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self._torch_port = free_port() if torch_env else 0
        self.folder = _fresh_folder()
        self.warden = Warden(self.folder, self.token)
        try:
            self.warden.start()
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise

    def place(self, rank: int) -> dict[str, object]:
        own = {
            "COVEY_RANK": rank,
            "COVEY_SIZE": self.size,
            "COVEY_LOCAL_RANK": rank,
            "COVEY_LOCAL_SIZE": self.size,
            "COVEY_MEET": self.folder,
            "COVEY_KEEPER": self.warden.path,
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
            shutil.rmtree(self.folder, ignore_errors=True)


class ClusterRun(HostRun):
    """The processes of this host in a run of a cluster: each is a node, which finds and meets the others by itself."""

    noun = "process"
    warden: ClusterWarden
    inherits = tuple(name for name in RUN_VARIABLES if name not in ("COVEY_SECRET_FD", "COVEY_KEEPER_ID"))

    def __init__(self, size: int, variables: Mapping[str, str], warden: ClusterWarden, *, key: bytes = b"") -> None:
        """`variables` describe the run; `key` is the cluster's, if processes cannot find it by themselves."""
        super().__init__(size)
        self._variables, self._key = variables, key
        self.warden = warden

    def __enter__(self) -> Self:
        self.warden.start()
        return self

    def place(self, rank: int) -> dict[str, object]:
        return {**self._variables, "COVEY_KEEPER_ID": self.warden.id.hex()}

    def handed_over(self) -> tuple[str, bytes]:
        return ("COVEY_SECRET_FD" if self._key else ""), self._key


def keep(
    make_run: Callable[[], HostRun], argv: Sequence[str], *, env: Mapping[str, str] | None = None, restarts: int = 0
) -> int:
    """Run `argv` as every process of a run, relay their output; return the exit code of the first to fail, or 0.

    In a run that survives losses, a process that fails is started again up to `restarts` times, and the code is 0 if
    any of them ended well. A signal's code is 128 plus its number. SIGINT, SIGTERM and SIGHUP are passed on to all
    ranks once; a second SIGINT kills them. If all end well after SIGTERM, the code is 0.

    Call it on the main thread: it takes over signal handling until it returns, and before the run is made.
    """
    arrived: list[int] = []
    with _signals_noted(arrived) as wake, make_run() as run, selectors.DefaultSelector() as selector:
        return _Watch(run, _Command(argv, env or {}, restarts), selector, wake, arrived).over()


def signal_group(pid: int, signum: int, *, reaped: bool) -> bool:
    """Send `signum` (0 only asks) to the process group that child `pid` leads; False when there is nobody in it."""
    # While a group has members the kernel gives its number to nobody else. So when our child was reaped and there is
    # a process with its number, that is a stranger, and the group is empty.
    if reaped and _exists(pid):
        return False
    try:
        os.killpg(pid, signum)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def die_with(parent: int) -> None:
    """Ask the kernel to kill this process when `parent`, which started it, dies; only Linux can."""
    if libc := _libc():
        libc.prctl(1, int(signal.SIGKILL), 0, 0, 0)  # 1: PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)


def _close_pipes(process: subprocess.Popen[bytes]) -> None:
    for pipe in filter(None, (process.stdin, process.stdout, process.stderr)):
        with contextlib.suppress(OSError):  # input that the rank never took
            pipe.close()


@functools.cache
def _libc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if sys.platform == "linux" else None


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _fresh_folder() -> str:
    for base in (os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir(), "/tmp"):
        with contextlib.suppress(OSError):
            if _is_guarded(base):
                folder = tempfile.mkdtemp(prefix="covey-", dir=base)
                if len(os.fsencode(folder)) <= FOLDER_LIMIT_BYTES:
                    return folder
                os.rmdir(folder)
    raise ConfigError("found no folder with a short path for the run's sockets; set TMPDIR to one that you can write")


def _is_guarded(base: str) -> bool:
    """Whether no other user could swap a folder that we make in `base` for one of theirs."""
    if not os.path.isabs(base):
        return False
    info = os.stat(base)
    others_may_write = info.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return info.st_uid in (0, os.geteuid()) and (not others_may_write or bool(info.st_mode & stat.S_ISVTX))


class _Pipe(NamedTuple):
    """One output stream of one rank: where it comes from, and which of the keeper's own it goes to."""

    source: IO[bytes]
    target: int
    voice: Voice


class _Command(NamedTuple):
    """What every process of a run executes, and how often again if it fails."""

    argv: Sequence[str]
    env: Mapping[str, str]
    restarts: int


class _Watch:
    """The keeper's watch over the ranks of one run, until all have ended."""

    def __init__(
        self,
        run: HostRun,
        command: _Command,
        selector: selectors.BaseSelector,
        wake: socket.socket,
        arrived: list[int],
    ) -> None:
        self._run, self._command = run, command
        self._selector, self._wake, self._arrived = selector, wake, arrived
        self._selector.register(wake, selectors.EVENT_READ)
        self._out = Cursor()
        self._err = self._out if _same_file(1, 2) else Cursor()
        self._started: dict[int, subprocess.Popen[bytes]] = {}
        """Every rank's latest process."""
        self._alive: dict[int, subprocess.Popen[bytes]] = {}
        self._waiting: dict[int, float] = {}
        """Ranks that are started again, and when."""
        self._restarts: dict[int, int] = {}
        """How often each was."""
        self._code: int | None = None
        """The exit code of a failure that ends the run: the first."""
        self._failed: list[tuple[int, int, float]] = []
        """Ranks that failed, their codes, and by when to know whether the run survives that."""
        self._has_finished = False
        """Some rank ended well."""
        self._lost_code = 0
        """The exit code of the last rank that the run went on without."""
        self._steps: list[tuple[float, signal.Signals]] = []
        """What is sent to ranks that do not end by themselves, and when."""
        self._told: signal.Signals | None = None
        """The signal that asked us to end."""
        self._killed = False
        """The ranks were killed because of it."""
        self._unheard = False
        """Who read our output has gone away."""

    def over(self) -> int:
        """Start all ranks, watch until the last has ended, and return the exit code of the whole."""
        for rank in range(self._run.size):
            self._start(rank)
        while self._alive or self._waiting or self._failed:
            for key, _ in self._selector.select(self._patience(*self._waiting.values(), *self._hush_times())):
                if key.data is not None:
                    self._relay(key.data)
            self._tend()
            now = time.monotonic()
            for pipe in self._pipes():
                if pipe.voice.show_at is not None and pipe.voice.show_at <= now:
                    self._write(pipe.target, pipe.voice.hush())
            for rank in [rank for rank, at in self._waiting.items() if at <= now]:
                self._start_again(rank)
        self._run.stop()
        for pipe in self._pipes():
            self._drain(pipe)
        return self._outcome()

    def _outcome(self) -> int:
        if self._code is not None or self._has_finished:
            return self._code or 0
        return 128 + self._told if self._told is not None else self._lost_code

    def _start(self, rank: int) -> None:
        command, restarts = self._command, self._restarts.get(rank, 0)
        env = {**command.env, "COVEY_RESTART": str(restarts)} if restarts else command.env
        process = self._run.start(rank, command.argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self._started[rank] = self._alive[rank] = process
        for source, target, cursor in ((process.stdout, 1, self._out), (process.stderr, 2, self._err)):
            assert source is not None
            os.set_blocking(source.fileno(), False)
            voice = Voice(rank, cursor, coloured=os.isatty(target) and not os.environ.get("NO_COLOR"))
            self._selector.register(source, selectors.EVENT_READ, _Pipe(source, target, voice))

    def _start_again(self, rank: int) -> None:
        del self._waiting[rank]
        if self._has_finished and not self._alive and not self._waiting:
            return  # the run is over: there is nobody to come back to
        process = self._started[rank]
        for pipe in self._pipes():
            if pipe.source in (process.stdout, process.stderr):
                self._drain(pipe)
                with contextlib.suppress(KeyError):  # it came to its end
                    self._selector.unregister(pipe.source)
        self._run.clear_away(process)
        self._start(rank)

    def _pipes(self) -> list[_Pipe]:
        return [key.data for key in self._selector.get_map().values() if key.data is not None]

    def _hush_times(self) -> list[float]:
        return [pipe.voice.show_at for pipe in self._pipes() if pipe.voice.show_at is not None]

    def _patience(self, *times: float) -> float | None:
        """Return how long nothing is to be done, before any of these times too; None: for ever."""
        due = [*times, *(at for at, _ in self._steps)]
        if self._failed:
            due.append(time.monotonic() + SETTLE_EVERY)
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _relay(self, pipe: _Pipe) -> bool:
        """Read once and pass it on; False at the end."""
        data = os.read(pipe.source.fileno(), LINE_LIMIT_BYTES)
        if data:
            self._write(pipe.target, pipe.voice.hear(data, now=time.monotonic()))
        else:
            self._selector.unregister(pipe.source)
            self._write(pipe.target, pipe.voice.end())
        return bool(data)

    def _drain(self, pipe: _Pipe) -> None:
        """Pass on what a rank that has ended left in the pipe, even if somebody else holds the other end open."""
        with contextlib.suppress(BlockingIOError):
            for _ in range(64):  # more than a pipe holds; a descendant that escaped may go on writing for ever
                if not self._relay(pipe):
                    return
        self._write(pipe.target, pipe.voice.end())

    def _tend(self) -> None:
        """React to signals, to ranks that ended, and to the clock."""
        with contextlib.suppress(BlockingIOError):
            self._wake.recv(4096)
        while self._arrived:
            self._on_signal(signal.Signals(self._arrived.pop(0)))
        ended = [(rank, code) for rank, process in self._alive.items() if (code := process.poll()) is not None]
        # Of several that ended since we looked, one that was killed comes first: who only lost it exits by itself.
        for rank, code in sorted(ended, key=lambda end: end[1] > 0):
            del self._alive[rank]
            self._on_end(rank, code)
        self._settle()
        while self._steps and self._steps[0][0] <= time.monotonic():
            _, signum = self._steps.pop(0)
            self._run.signal(signum)
            self._killed = self._told is not None and signum is signal.SIGKILL

    def _on_signal(self, signum: signal.Signals) -> None:
        if self._told is None:
            self._told = signum
            if signum is not signal.SIGTERM:  # that one asks to come to a good end, and they may
                self._code = self._code or 128 + signum
            self._run.signal(signum)
            self._stop_at(time.monotonic() + SIGNAL_GRACE)
            self._note(f"passed {signum.name} on to all of them; Ctrl-C kills them")
        elif signum is signal.SIGINT:
            self._steps = [(time.monotonic(), signal.SIGKILL)]

    def _on_end(self, rank: int, code: int) -> None:
        if code == 0:
            self._has_finished = True
        elif self._told is not None:
            self._code = self._code or 128 + self._told
        elif self._code is None:
            self._failed.append((rank, code, time.monotonic() + FAILURE_GRACE))

    def _settle(self) -> None:
        """Do what follows from failures, once it is known whether the run survives them."""
        while self._failed and self._code is None:
            rank, code, by = self._failed[0]
            survives = self._run.survives()
            if survives is None and self._alive and self._told is None and time.monotonic() < by:
                return
            del self._failed[0]
            status = code if code > 0 else 128 - code
            how = f"failed with exit code {code}" if code > 0 else f"was killed by {signal_name(-code)}"
            if survives:
                self._lost_code = status
                what = self._after_loss(rank)
            else:
                self._code = status
                if self._told is None:
                    self._stop_at(by)
                what = "; stopping the others" if self._alive else ""
            self._note(f"{self._run.noun} {rank} {how}{what}")
        self._failed.clear()

    def _after_loss(self, rank: int) -> str:
        """Start a rank again if it may be; return what happens next, in words."""
        before, most = self._restarts.get(rank, 0), self._command.restarts
        is_over = self._has_finished and not self._alive and not self._waiting
        if before < most and not is_over and self._told is None:
            self._restarts[rank] = before + 1
            self._waiting[rank] = time.monotonic() + min(RESTART_PAUSE * 2 ** min(before, 10), RESTART_PAUSE_MOST)
            return f"; starting it again ({before + 1} of {most})"
        return "; the others go on" if self._alive or self._waiting else ""

    def _stop_at(self, at: float) -> None:
        self._waiting.clear()
        self._steps = [(at, signal.SIGTERM), (at + TERM_GRACE, signal.SIGKILL)]

    def _note(self, text: str) -> None:
        self._write(2, self._err.make_room() + f"covey: {text}\n".encode())

    def _write(self, target: int, data: bytes) -> None:
        # A reader that does not read (a pager) must keep us neither from passing signals on nor, after that, from
        # ending. PIPE_BUF bytes never block where select saw room.
        rest = memoryview(data)
        while rest and not self._unheard:
            patience = 0.0 if self._killed else self._patience()  # nobody else can be shown anything either
            if select.select([self._wake], [target], [], patience)[1]:
                try:
                    rest = rest[os.write(target, rest[: select.PIPE_BUF]) :]
                except BrokenPipeError:
                    self._unheard = True
                    self._code = self._code or 128 + signal.SIGPIPE
                    self._stop_at(time.monotonic())
            elif self._killed:
                return
            else:
                self._tend()


@contextlib.contextmanager
def _signals_noted(arrived: list[int]) -> Iterator[socket.socket]:
    """Yield a socket that can be read once a signal came; those that ask us to end are added to `arrived`."""

    def note(signum: int, _: object) -> None:
        if signum != signal.SIGCHLD:
            arrived.append(signum)

    with contextlib.ExitStack() as stack:
        wake, ring = (stack.enter_context(end) for end in socket.socketpair())
        wake.setblocking(False)
        ring.setblocking(False)
        stack.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(ring.fileno(), warn_on_full_buffer=False))
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
            # What our parent told us to ignore (nohup, a shell's background job) stays ignored.
            if signum == signal.SIGCHLD or signal.getsignal(signum) != signal.SIG_IGN:
                stack.callback(signal.signal, signum, signal.signal(signum, note))
        yield wake


def _same_file(one: int, other: int) -> bool:
    with contextlib.suppress(OSError):
        return os.path.sameopenfile(one, other)
    return False


def signal_name(number: int) -> str:
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"
