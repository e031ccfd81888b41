"""`Popen` and `run`, as in `subprocess`, for Python programs that use covey: forked where that makes no difference.

A program is forked from a process that has imported numpy and covey already (`tests.support.fork_server`), which saves
most of what a rank's process costs. It is executed instead where a fork could be told apart: interpreter options,
PYTHON* variables that differ from those of this process, another user or a function to call first that does not pickle.

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
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT, CalledProcessError, CompletedProcess, SubprocessError, TimeoutExpired
from typing import Any

__all__ = ["DEVNULL", "PIPE", "STDOUT", "CalledProcessError", "CompletedProcess", "Popen", "SubprocessError"]
__all__ += ["TimeoutExpired", "interruptible", "run"]

SERVERS = 2
ROOT = Path(__file__).parents[2]
_PER_PROGRAM = {"PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE"}
_AT_IMPORT = ("PYTHON", "OMP_", "OPENBLAS_", "MKL_", "LC_", "LANG", "FORCE_COLOR", "PY_COLORS", "GITHUB_", "TERMINAL_")
"""Variables that begin so have an effect when the interpreter starts or numpy or typer is imported."""
_PR_SET_CHILD_SUBREAPER = 36
_CLONE_NEWNET, _CLONE_NEWNS = 0x40000000, 0x00020000
_MS_BIND, _MS_REC, _MS_SLAVE, _MNT_DETACH = 0x1000, 0x4000, 0x80000, 2


class Popen(subprocess.Popen[Any]):
    """A process, as `subprocess.Popen` starts it."""

    def _execute_child(
        self, args: Any, executable: Any, preexec_fn: Any, close_fds: bool, pass_fds: Any, cwd: Any, env: Any,
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
            before, words = functools.partial(enter_namespace, words[3]), words[4:]
        if (
            not plain or shell or not close_fds or not _pickles(before) or len(pass_fds) > 32
            or not can_fork(words, variables) or not (cwd is None or os.path.isdir(cwd))
        ):  # fmt: skip
            super()._execute_child(  # type: ignore[misc]
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
                p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *others,
            )  # fmt: skip
            return
        streams = [given if given != -1 else number for number, given in enumerate((p2cread, c2pwrite, errwrite))]
        request = {
            "argv": words,
            "before": before,
            "cwd": os.fspath(cwd) if cwd is not None else os.getcwd(),
            "env": variables,
            "new_session": start_new_session,
            "parent": os.getpid(),
            "targets": [0, 1, 2, *pass_fds],
        }
        try:
            self.pid = _next_server().fork(pickle.dumps(request), [*streams, *pass_fds])
            self._child_created = True
        finally:
            self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]


def run(
    args: Any, *, input: Any = None, capture_output: bool = False, timeout: float | None = None, check: bool = False,
    **options: Any,
) -> CompletedProcess[Any]:  # fmt: skip
    """Run a program to its end, as `subprocess.run` does."""
    if input is not None:
        options["stdin"] = PIPE
    if capture_output:
        options["stdout"] = options["stderr"] = PIPE
    with Popen(args, **options) as process:
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
    if first.startswith("-") and (first not in ("-c", "-m") or len(args) < 3):
        return False
    return _at_import(env) == _at_import(dict(os.environ))


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


def enter_namespace(name: str) -> None:
    """Do what `ip netns exec` does before it executes a program."""
    libc = _libc()

    def check(result: int) -> None:
        if result < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), name)

    descriptor = os.open(f"/run/netns/{name}", os.O_RDONLY | os.O_CLOEXEC)
    check(libc.setns(descriptor, _CLONE_NEWNET))
    os.close(descriptor)
    check(libc.unshare(_CLONE_NEWNS))
    check(libc.mount(b"", b"/", b"none", _MS_SLAVE | _MS_REC, None))
    libc.umount2(b"/sys", _MNT_DETACH)
    check(libc.mount(name.encode(), b"/sys", b"sysfs", 0, None))
    for file in Path("/etc/netns", name).glob("*"):
        check(libc.mount(bytes(file), bytes(Path("/etc", file.name)), b"none", _MS_BIND, None))


class _Server:
    """A process to fork programs from."""

    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        program = Path(__file__).with_name("fork_server.py")
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, program, ROOT, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=_at_import(dict(os.environ)) | {name: os.environ[name] for name in ("PATH",) if name in os.environ},
                stdin=DEVNULL,
                start_new_session=True,
            )
        atexit.register(self._close)

    def fork(self, request: bytes, descriptors: list[int]) -> int:
        """Fork a program, which becomes a child of this process; return its number."""
        _set_subreaper(True)
        try:
            socket.send_fds(self._channel, [request], descriptors)
            answers = {self._channel.recv(64) for _ in range(2)}
        finally:
            _set_subreaper(False)
        (pid,) = answers - {b"adopted"}
        assert pid, "the fork server has ended"
        return int(pid)

    def _close(self) -> None:
        self._channel.close()
        self._process.wait()


_lock = threading.Lock()
_servers: list[_Server] = []
_started = 0
_owner = 0


class _Locked:
    def fork(self, request: bytes, descriptors: list[int]) -> int:
        global _started, _owner
        with _lock:
            if _owner != os.getpid():  # a fork of the test has children of its own
                _owner = os.getpid()
                _servers[:] = [_Server() for _ in range(SERVERS)]
            _started += 1
            return _servers[_started % SERVERS].fork(request, descriptors)


def _next_server() -> _Locked:
    return _Locked()


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _set_subreaper(wanted: bool) -> None:
    _libc().prctl(_PR_SET_CHILD_SUBREAPER, int(wanted), 0, 0, 0)
