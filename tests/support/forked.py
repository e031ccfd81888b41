"""`Popen` and `run`, as in `subprocess`, for Python programs that use covey: forked where that makes no difference.

A program is forked from a process that has imported numpy and covey already (`tests.support.fork_server`), which saves
most of what a rank's process costs; with `TorchPopen`, torch as well, and from the process of the tests itself where
that has imported torch. It is executed instead where a fork could be told apart: interpreter options, PYTHON* variables
that differ from those of this process, another user or a function to call first that does not pickle. What `covey run`
and torchrun start is forked in the same way; a test whose subject is the start or the end of processes uses
`subprocess` instead, because the memory of a forked program is left to the kernel.

Programs are forked from two servers in turn, because each has its own hash seed: if the result of a run depended on
the order of a set, ranks would differ.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import warnings
from importlib import import_module
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT, CalledProcessError, CompletedProcess, SubprocessError, TimeoutExpired
from typing import TYPE_CHECKING, Any

from tests.support import fork_server

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

__all__ = ["DEVNULL", "PIPE", "STDOUT", "CalledProcessError", "CompletedProcess", "Popen", "SubprocessError"]
__all__ += ["TimeoutExpired", "interruptible", "run"]

SERVERS = 2
TORCH = (
    "pytest",
    "torch.distributed",
    "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.pipelining",
    "torch.distributed.tensor",
    "torch.nn.parallel",
    "covey.torch.backend.backend",
)
SPACE = 100_000
"""Bytes for the arguments, and as many for the environment, that a forked program shows in /proc."""
STARTERS = {"bench", "chaos", "demo", "run", "up"}
"""Commands of covey that start Python programs, and so have a companion to fork them from."""
ROOT = Path(__file__).parents[2]
_PER_PROGRAM = {"PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE"}
_AT_IMPORT = (
    *("PYTHON", "OMP_", "OPENBLAS_", "MKL_", "LC_", "LANG", "FORCE_COLOR", "PY_COLORS", "GITHUB_", "TERMINAL_"),
    *("TORCH_DEVICE_BACKEND", "TORCH_LOGS", "TORCH_SHOW"),
)
"""Variables that begin so have an effect when the interpreter starts or numpy, torch or typer is imported."""
_CLONE_NEWNET, _CLONE_NEWNS, _CLONE_NEWUTS = 0x40000000, 0x00020000, 0x04000000
_MS_BIND, _MS_REC, _MS_SLAVE, _MNT_DETACH = 0x1000, 0x4000, 0x80000, 2


_execute = subprocess.Popen._execute_child  # type: ignore[attr-defined]


def _fork_or_execute(
    self: subprocess.Popen[Any],
    args: Any, executable: Any, preexec_fn: Any, close_fds: bool, pass_fds: Any, cwd: Any, env: Any,
    startupinfo: Any, creationflags: Any, shell: bool,
    p2cread: int, p2cwrite: int, c2pread: int, c2pwrite: int, errread: int, errwrite: int,
    *others: Any,
) -> None:  # fmt: skip
    """Fork the program if that is as good; otherwise leave it to `subprocess`."""
    restore_signals, *user, start_new_session, process_group = others
    variables = dict(os.environ if env is None else env)
    plain = restore_signals and user == [None, None, None, -1] and process_group == -1 and executable is None
    before = None if preexec_fn is interruptible else preexec_fn  # the fork server takes Ctrl-C
    words = [os.fspath(word) for word in args] if isinstance(args, (list, tuple)) else []
    if words[:3] == ["ip", "netns", "exec"] and before is None:
        namespace, words = words[3], words[4:]
        host_name, words = (words[5], words[6:]) if words[:2] == ["unshare", "--uts"] else ("", words)
        before = functools.partial(enter_namespace, namespace, host_name)
    if (
        not plain or shell or not close_fds or not _pickles(before) or len(pass_fds) > 32
        or not can_fork(words, variables) or not (cwd is None or os.path.isdir(cwd))
    ):  # fmt: skip
        _execute(
            self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
            p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *others,
        )  # fmt: skip
        return
    streams = [given if given != -1 else number for number, given in enumerate((p2cread, c2pwrite, errwrite))]
    request = {
        "argv": words,
        "before": before,
        "cwd": os.fspath(cwd) if cwd is not None else os.getcwd(),
        "env": variables,
        "finalizes": isinstance(self, Popen) and self.finalizes,
        "new_session": start_new_session,
        "parent": os.getpid(),
        "starts_programs": starts_programs(words),
        "targets": [0, 1, 2, *pass_fds],
    }
    try:
        kind = (self.preloaded, self.has_own_server) if isinstance(self, Popen) else ((), False)
        self.pid = _fork(kind, request, [*streams, *pass_fds])
        self._child_created = True  # type: ignore[attr-defined]
    finally:
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]


class Popen(subprocess.Popen[Any]):
    """A process, as `subprocess.Popen` starts it."""

    preloaded: tuple[str, ...] = ()
    """What its server imports, beside numpy and covey."""
    finalizes = False
    """Whether the interpreter takes its modules apart when the program ends; only a test of that needs it."""
    has_own_server = False
    """Whether its server is an interpreter that runs nothing else, even where this process could be forked itself."""
    _execute_child = _fork_or_execute


class TorchPopen(Popen):
    """A process that is forked from one that has imported torch as well, which takes seconds."""

    preloaded = TORCH


class FinalizedTorchPopen(TorchPopen):
    """As `TorchPopen`; the interpreter takes its modules apart at the end, as that of an executed program does."""

    finalizes = has_own_server = True


class ShownTorchPopen(TorchPopen):
    """As `TorchPopen`; /proc shows all its arguments and environment, for which the process of tests has no space."""

    has_own_server = True


def run(
    args: Any, *, input: Any = None, capture_output: bool = False, timeout: float | None = None, check: bool = False,
    popen: type[Popen] = Popen, **options: Any,
) -> CompletedProcess[Any]:  # fmt: skip
    """Run a program to its end, as `subprocess.run` does."""
    if input is not None:
        options["stdin"] = PIPE
    if capture_output:
        options["stdout"] = options["stderr"] = PIPE
    with popen(args, **options) as process:
        try:
            out, err = process.communicate(input, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = CompletedProcess(process.args, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


def can_fork(args: list[str], env: dict[str, str]) -> bool:
    """Tell whether a program that is forked behaves as one that is executed."""
    if sys.platform != "linux" or len(args) < 2 or args[0] != sys.executable:
        return False
    first = args[1]
    if first == "-u":
        return len(args) > 2 and not args[2].startswith("-") and can_fork([args[0], *args[2:]], env)
    if first.startswith("-") and (first not in ("-c", "-m") or len(args) < 3):
        return False
    folders = env.get("PYTHONPATH", "").split(os.pathsep)
    if any(os.path.exists(os.path.join(folder, "sitecustomize.py")) for folder in folders if folder):
        return False
    return _at_import(env) == _at_import(dict(os.environ))


def starts_programs(args: list[str]) -> bool:
    """Tell whether a program starts others, which its companion can fork."""
    return args[1:3] == ["-m", "torch.distributed.run"] or (
        args[1:3] == ["-m", "covey"] and not STARTERS.isdisjoint(args[3:4])
    )


def _at_import(env: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(_AT_IMPORT) and name not in _PER_PROGRAM}


def _pickles(function: Any) -> bool:
    try:
        pickle.dumps(function)
    except (pickle.PicklingError, AttributeError, TypeError):
        return False
    return True


def interruptible() -> None:
    """Take Ctrl-C, before a program is executed: a test run in the background may ignore it, and children inherit."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def enter_namespace(name: str, host_name: str = "") -> None:
    """Do what `ip netns exec` does before it executes a program; with `host_name`, also what `Host.command` does."""
    libc = _libc()

    def check(result: int) -> None:
        if result < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), name)

    descriptor = os.open(f"/run/netns/{name}", os.O_RDONLY | os.O_CLOEXEC)
    check(libc.setns(descriptor, _CLONE_NEWNET))
    os.close(descriptor)
    check(libc.unshare(_CLONE_NEWNS | (_CLONE_NEWUTS if host_name else 0)))
    if host_name:
        socket.sethostname(host_name)
    check(libc.mount(b"", b"/", b"none", _MS_SLAVE | _MS_REC, None))
    libc.umount2(b"/sys", _MNT_DETACH)
    check(libc.mount(name.encode(), b"/sys", b"sysfs", 0, None))
    for file in Path("/etc/netns", name).glob("*"):
        check(libc.mount(bytes(file), bytes(Path("/etc", file.name)), b"none", _MS_BIND, None))


class _Server:
    """A process to fork programs from, at the other end of a socket."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel

    def fork(self, request: bytes, descriptors: list[int]) -> int:
        """Fork a program, which becomes a child of this process; return its number."""
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            socket.send_fds(self._channel, [request], descriptors)
            pid = self._channel.recv(64)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        assert pid, "the fork server has ended"
        return int(pid)


def _new_server(preloaded: tuple[str, ...]) -> _Server:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    program = Path(__file__).with_name("fork_server.py")
    with theirs:
        process = subprocess.Popen(
            [sys.executable, program, "x" * SPACE, ROOT, str(theirs.fileno()), *preloaded],
            pass_fds=[theirs.fileno()],
            env=_at_import(dict(os.environ))
            | {name: value for name, value in os.environ.items() if name.startswith("COVERAGE_")}
            | {"PATH": os.environ.get("PATH", ""), "SPACE": "x" * SPACE},
            stdin=DEVNULL,
            start_new_session=True,
        )

    def close() -> None:
        ours.close()
        process.wait()

    atexit.register(close)
    return _Server(ours)


def preload_torch() -> None:
    """Import all that programs with torch need, if the tests need torch at all; starts no thread."""
    if sys.platform == "linux" and "torch" in sys.modules:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name in TORCH:
                import_module(name)


def keep_torch_server(*own: Connection) -> None:
    """Fork a server for programs with torch from this process, which runs tests and has started no thread yet.

    It costs nothing, where a new one imports torch for three seconds. It closes `own`, the connections of this process.
    """
    global _owner
    if sys.platform != "linux" or not all(name in sys.modules for name in TORCH):
        return
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        try:
            ours.close()
            for connection in own:
                connection.close()
            added = {"", os.getcwd(), str(ROOT), os.path.dirname(sys.executable)}  # by `python -m`, pytest, its script
            fork_server.serve_from_here(theirs, [path for path in sys.path if path not in added])
        finally:
            os._exit(1)
    theirs.close()

    def close() -> None:
        ours.close()
        os.waitpid(pid, 0)

    atexit.register(close)
    _owner = os.getpid()
    _servers[TORCH, False] = [_Server(ours)]


def has_torch_server() -> bool:
    """Tell whether programs with torch are forked from this process itself."""
    return (TORCH, False) in _servers and _owner == os.getpid()


_lock = threading.Lock()
_servers: dict[tuple[tuple[str, ...], bool], list[_Server]] = {}
"""By what they have imported, and whether they are interpreters that run nothing else."""
_companion: _Server | None = None
_started = 0
_owner = os.getpid()


def _fork(kind: tuple[tuple[str, ...], bool], request: dict[str, Any], descriptors: list[int]) -> int:
    global _started, _owner, _companion
    with _lock:
        if _owner != os.getpid():  # a fork of the test has children of its own
            _owner, _companion = os.getpid(), None
            _servers.clear()
        if _companion is not None:
            return _companion.fork(pickle.dumps(request), descriptors)
        if kind not in _servers:
            _servers[kind] = [_new_server(kind[0]) for _ in range(1 if kind[0] else SERVERS)]
        _started += 1
        servers = _servers[kind]
        return servers[_started % len(servers)].fork(pickle.dumps(request), descriptors)


def start_programs_with(channel: socket.socket) -> None:
    """In a forked program: let `subprocess` fork from the companion of this program."""
    global _owner, _companion
    _owner, _companion = os.getpid(), _Server(channel)
    subprocess.Popen._execute_child = _fork_or_execute  # type: ignore[attr-defined]


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
