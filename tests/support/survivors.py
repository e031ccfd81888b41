"""Jobs that lose and gain members: real processes whose ranks a test kills, stops, cuts off and starts again.

As in `tests.support.ranks`, only the source of a rank's function travels: it may use what is imported at the top of
this file and what is defined under "In a rank".
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import inspect
import itertools
import json
import logging
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tests.support import forked, pipes
from tests.support.ranks import LANES, SOURCE, Ranks, attempt, await_go, say
from tests.support.waiting import DEADLINE

import covey

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence
    from typing import Self

ROOT = Path(__file__).parents[2]
STOPS = int(os.environ.get("SURVIVAL_STOPS", "20"))
"""How many times ranks are stopped, given up and continued; 100 when there is time."""

__all__ = [
    "DEADLINE",
    "LANES",
    "CoveyRun",
    "Members",
    "attempt",
    "await_go",
    "contextlib",
    "covey",
    "ctypes",
    "np",
    "say",
]
__all__ += ["os", "signal", "threading"]


# In the test


class Members(Ranks):
    """The ranks of a run whose keeper is this process; with `is_kept=False`, of one that was started by hand."""

    def __init__(
        self,
        size: int,
        function: Callable[..., Any],
        *args: Any,
        lanes: str = "auto",
        is_kept: bool = True,
        env: dict[str, str] | None = None,
        start: Collection[int] | None = None,
    ) -> None:
        super().__init__(size, function, *args, lanes=lanes, env=env, start=())
        self._env["PYTHONPATH"] += os.pathsep + str(ROOT)
        self._argv = command(function, *args)
        if not is_kept:
            variables = {"WORLD_SIZE": size, "XDG_RUNTIME_DIR": self.folder}
            self._run.variables = lambda rank: {"RANK": rank, **variables}  # type: ignore[method-assign]
            self._run.secret_variable = lambda: ("", b"")  # type: ignore[method-assign]
        self._begin_all(range(size) if start is None else start)

    def begin_again(self, rank: int, number: int) -> None:
        """Start a rank that has died for the `number`-th time again, as its keeper would."""
        self._processes[rank].wait(DEADLINE)
        self._env["COVEY_RESTART"] = str(number)
        self.begin(rank)

    def all_said(self, rank: int, event: str) -> list[Any]:
        """Return everything that a rank has said with `say(event, ...)` by now."""
        while self._listen(0):
            pass
        return [line for line in self._said[rank] if line["event"] == event]

    def is_running(self, rank: int) -> bool:
        return self._processes[rank].poll() is None

    def await_said(self, rank: int, event: str, count: int = 1, timeout: float = DEADLINE) -> Any:
        """Return what a rank said at the `count`-th `say(event, ...)`."""
        deadline = time.monotonic() + timeout
        while len(said := self.all_said(rank, event)) < count:
            assert time.monotonic() < deadline, self._story(event, [rank])
            assert self.is_running(rank) or self._listen(0), self._story(event, [rank])
            self._listen(0.02)
        return said[count - 1]


def command(function: Callable[..., Any], *args: Any) -> list[str]:
    """Return the command line of a process that runs `function(*args)` as a rank."""
    code = textwrap.dedent(inspect.getsource(function))
    return [sys.executable, __file__, code, function.__name__, json.dumps(args)]


class CoveyRun:
    """`covey run` of a function as every rank, as a person would start it."""

    def __init__(self, *words: str, function: Callable[..., Any], args: Sequence[Any] = ()) -> None:
        self._runtime = tempfile.mkdtemp(prefix="t-", dir="/tmp")
        path = os.pathsep.join((str(SOURCE), str(ROOT)))
        env = {
            **os.environ,
            "PYTHONPATH": path,
            "XDG_RUNTIME_DIR": self._runtime,
            "COVEY_HOME": f"{self._runtime}/home",
        }
        argv = [sys.executable, "-m", "covey", "run", *words, *command(function, *args)[1:]]
        pipe = subprocess.PIPE
        self._keeper = forked.Popen(argv, stdout=pipe, stderr=pipe, stdin=subprocess.DEVNULL, env=env)
        self._tails = {1: b"", 2: b""}
        self._said: list[dict[str, Any]] = []
        self.notes: list[str] = []
        """Every line of the standard error."""
        self._poll = select.poll()
        for source in (pipes.stdout(self._keeper), pipes.stderr(self._keeper)):
            os.set_blocking(source.fileno(), False)
            self._poll.register(source, select.POLLIN)

    def said(self, event: str, rank: int | None = None) -> list[Any]:
        """Return what was said with `say(event, ...)` by now, by any rank or by the one that started as `rank`."""
        while self._listen(0):
            pass
        return [line for line in self._said if line["event"] == event and rank in (None, line["slot"])]

    def await_said(self, event: str, rank: int | None = None, count: int = 1, timeout: float = DEADLINE) -> Any:
        """Return what was said at the `count`-th `say(event, ...)`."""
        deadline = time.monotonic() + timeout
        while len(said := self.said(event, rank)) < count:
            assert self._keeper.poll() is None, self.story(f"no {event!r} from {rank}: the run is over")
            assert time.monotonic() < deadline, self.story(f"no {event!r} from {rank} in time")
            self._listen(0.02)
        return said[count - 1]

    def await_end(self, timeout: float = DEADLINE) -> int:
        """Return the exit code."""
        deadline = time.monotonic() + timeout
        while self._keeper.poll() is None:
            assert time.monotonic() < deadline, self.story("did not end")
            self._listen(0.02)
        while self._listen(0):
            pass
        return self._keeper.returncode

    def signal(self, signum: int) -> float:
        at = time.monotonic()
        self._keeper.send_signal(signum)
        return at

    def story(self, what: str) -> str:
        lines = [f"{line['slot']}: {line}" for line in self._said[-60:]]
        return "\n".join([what, *lines, *self.notes[-60:]])

    def _listen(self, seconds: float) -> bool:
        came = False
        for descriptor, _ in self._poll.poll(max(0.0, seconds) * 1000):
            number = 1 if descriptor == pipes.stdout(self._keeper).fileno() else 2
            piece = os.read(descriptor, 1 << 16)
            if not piece:
                self._poll.unregister(descriptor)
            *lines, self._tails[number] = (self._tails[number] + piece).split(b"\n")
            for line in lines:
                if number == 2:
                    self.notes.append(line.decode())
                else:
                    slot, _, words = line.decode().partition("] ")
                    self._said.append({"slot": int(slot[1:]), **json.loads(words)})
            came = True
        return came

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._keeper.poll() is None:
            self._keeper.kill()  # its ranks die with it
        self._keeper.wait(DEADLINE)
        pipes.stdout(self._keeper).close()
        pipes.stderr(self._keeper).close()
        shutil.rmtree(self._runtime, ignore_errors=True)


def state_of(pid: int) -> str:
    """Return the letter for what a process does; X if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def stop(pid: int) -> None:
    """Stop a process, and return when it has stopped."""
    os.kill(pid, signal.SIGSTOP)
    await_stop(pid)


def await_stop(pid: int) -> None:
    """Return when a process has stopped."""
    deadline = time.monotonic() + DEADLINE
    while state_of(pid) != "T":
        assert time.monotonic() < deadline
        time.sleep(0.0005)


def catch_in_the_middle(pid: int, descriptor: int, timeout: float = DEADLINE) -> None:
    """Stop a process that has an operation half done in its `Visible` memory."""
    deadline = time.monotonic() + timeout
    with open(f"/proc/{pid}/fd/{descriptor}", "rb", buffering=0) as memory:
        count = (os.fstat(memory.fileno()).st_size - HEADER_BYTES) // 4
        indices = np.linspace(0, count - 1, 97).astype(int)

        def is_half_done() -> bool:
            scale, rank = np.frombuffer(os.pread(memory.fileno(), 8, 0), np.int32)
            if scale <= 0:
                return False
            now = [os.pread(memory.fileno(), 4, HEADER_BYTES + 4 * int(index)) for index in indices]
            done = np.frombuffer(b"".join(now), np.float32) != scale * values(int(rank), count, indices)
            return 0 < int(done.sum()) < len(indices)

        while True:
            assert time.monotonic() < deadline, "was never seen in the middle of an operation"
            if not is_half_done():
                continue
            stop(pid)  # it cannot get to the end while we look whether it has
            if is_half_done():
                return
            os.kill(pid, signal.SIGCONT)


def kill_in_the_middle(pid: int, descriptor: int) -> float:
    """Kill a process that has an operation half done; return when, by time.monotonic()."""
    catch_in_the_middle(pid, descriptor)
    at = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    return at


def break_connections(pid: int, most: int = 1) -> int:
    """Shut `most` established connections of a process down, as a network would; return how many there were."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "01":  # established
                inodes.add(words[9])
    libc = ctypes.CDLL(None, use_errno=True)
    process = os.pidfd_open(pid)
    broken = 0
    try:
        for path in sorted(Path(f"/proc/{pid}/fd").iterdir(), key=lambda path: int(path.name)):
            with contextlib.suppress(OSError):
                found = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(path))
                if not found or found[1] not in inodes or broken == most:
                    continue
                fd = libc.syscall(438, process, int(path.name), 0)  # pidfd_getfd
                if fd < 0 and ctypes.get_errno() == errno.EBADF:
                    continue  # the process has closed it meanwhile
                assert fd >= 0, os.strerror(ctypes.get_errno())
                with socket.socket(fileno=fd) as sock:
                    sock.shutdown(socket.SHUT_RDWR)
                broken += 1
    finally:
        os.close(process)
    return broken


def break_all_connections(pid: int, spare: str) -> int:
    """Shut down all connections of a process but those with `spare`, the socket of its keeper; return how many."""
    libc, broken = ctypes.CDLL(None, use_errno=True), 0
    process = os.pidfd_open(pid)
    try:
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if not os.readlink(path).startswith("socket:"):
                    continue
                fd = libc.syscall(438, process, int(path.name), 0)  # pidfd_getfd
                if fd < 0:
                    continue
                with socket.socket(fileno=fd) as sock:
                    ends = sock.getsockname(), sock.getpeername()
                    if any(ends) and spare not in ends:  # a pair without names is the process's own
                        sock.shutdown(socket.SHUT_RDWR)
                        broken += 1
    finally:
        os.close(process)
    return broken


# In a rank

HEADER_BYTES = 4096


def values(rank: int, count: int, indices: Any = None, *, dtype: Any = np.float32) -> Any:
    """What a rank contributes: differs at every rank and index, and sums tell exactly which ranks are in them."""
    indices = np.arange(count, dtype=np.int32) if indices is None else indices
    return (1 + indices % 251).astype(dtype) * dtype(4**rank)


def total(ranks: Sequence[int], count: int, *, dtype: Any = np.float32) -> Any:
    """The sum of what some ranks contribute."""
    return values(0, count, dtype=dtype) * dtype(sum(4**rank for rank in ranks))


class Visible:
    """An array that another process can look at while this one works on it."""

    def __init__(self, rank: int, count: int) -> None:
        import mmap

        self.descriptor = os.memfd_create("visible")
        os.ftruncate(self.descriptor, HEADER_BYTES + 4 * count)
        self._memory = mmap.mmap(self.descriptor, 0)
        self._header = np.frombuffer(self._memory, np.int32, 2)
        self._header[1] = rank
        self.array = np.frombuffer(self._memory, np.float32, offset=HEADER_BYTES)

    @contextlib.contextmanager
    def in_operation(self, scale: int) -> Iterator[None]:
        """The array holds `scale` times this rank's values, and an operation works on it now."""
        self._header[0] = scale
        yield
        self._header[0] = 0


def stop_in_restore(chunks: int, first: Callable[[], None]) -> None:
    """Stop this process, after `first()`, once so many chunks of a state have arrived here."""
    from covey.runtime.group.state_transfer import StateTransfer

    landed, tag = itertools.count(1), StateTransfer._tag_landed

    def tag_or_stop(transfer: StateTransfer, *args: Any) -> bytes:
        if next(landed) == chunks:
            first()
            os.kill(os.getpid(), signal.SIGSTOP)
        return tag(transfer, *args)

    StateTransfer._tag_landed = tag_or_stop  # type: ignore[assignment, method-assign]


def tell_changes(group: Any) -> None:
    """Say every event of the run."""
    group.on_change(lambda event: say("change", kind=event.kind, ranks=event.ranks, generation=event.generation))


def hold_the_interpreter(seconds: int) -> None:
    """Sleep in C without letting other threads run."""
    ctypes.PyDLL(None).sleep(seconds)


def _main() -> None:
    code, name, args = sys.argv[1:]
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    names = {**globals()}
    exec(compile(code, f"<{name}>", "exec"), names)
    say("begun", pid=os.getpid())
    say("returned", result=names[name](*json.loads(args)))


if __name__ == "__main__":
    _main()
