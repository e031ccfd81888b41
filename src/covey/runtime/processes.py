"""The one supervisor of child processes: starts them, hears their output and their ends, signals them, and ends them.

`Children` serves everything that starts processes: `covey run`, `launch`, `bench`, `demo` and `chaos` (through
`keeper.HostRun`), agents, and ssh. It has no thread, and no loop of its own: its owner calls `outputs`, which waits,
and then `ended`.

Invariant: a child stays in the table, and its process group can be signalled, until its owner forgets it; forgetting
kills what the child has left running.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import select
import selectors
import signal
import subprocess
import sys
import time
from typing import IO, TYPE_CHECKING, Any, Final, NamedTuple, Protocol, Self

from covey.base.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

PIPE_READ_BYTES: Final = 64 << 10
DRAIN_READS: Final = 64
"""Reads that empty a pipe. A descendant that escaped may hold it open, and write to it for ever."""
CHILD_TAIL_BYTES: Final = 4000
"""How much of the end of a process's output an `OutputTail` keeps."""
ASKING: Final = frozenset({signal.SIGHUP, signal.SIGINT, signal.SIGTERM})
"""Signals that ask a process to end."""
END_CHECK_EVERY: Final = 0.02
"""How often children are polled that cannot wake their supervisor, and what children have left running."""


class Process(Protocol):
    """A process that can be supervised: `subprocess.Popen`, a fork of the template process, or one of `launch`."""

    @property
    def pid(self) -> int: ...

    @property
    def stdin(self) -> IO[bytes] | None: ...

    @property
    def stdout(self) -> IO[bytes] | None: ...

    @property
    def stderr(self) -> IO[bytes] | None: ...

    @property
    def poll(self) -> Callable[[], int | None]: ...

    @property
    def wait(self) -> Callable[[], int]: ...


class Child:
    """A supervised process."""

    def __init__(self, process: Process, name: Any) -> None:
        self.process, self.name = process, name
        """`name` is what its owner calls it."""
        self.code: int | None = None
        """The exit code, or the negative number of the signal that killed it; None until `Children.ended` tells it."""
        self.pipes = {target: pipe for target, pipe in ((1, process.stdout), (2, process.stderr)) if pipe is not None}
        """Its output that is not at its end, by descriptor, 1 or 2."""

    @property
    def pid(self) -> int:
        return self.process.pid

    def signal(self, signum: int) -> bool:
        """Send a signal to the process and its group, as far as they have not ended; False if nothing is left.

        One that asks them to end also continues those that are stopped, which would not hear of it.
        """
        code = self.process.poll()
        if signal_group(self.pid, signum, reaped=code is not None):
            if signum in ASKING:
                signal_group(self.pid, signal.SIGCONT, reaped=code is not None)
            return True
        if code is None:  # it has not made its group yet
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signum)
        return code is None

    def signal_leader(self, signum: int) -> None:
        """Send a signal to the process alone, which passes it on as it likes; does nothing if it has ended."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    def is_left(self) -> bool:
        """Tell whether the process, or one of its group, still runs."""
        return self.process.poll() is None or signal_group(self.pid, 0, reaped=True)


class ChildOutput(NamedTuple):
    """What a child wrote; no data at the end of its pipe."""

    child: Child
    target: int
    """1 or 2."""
    data: bytes


class Children:
    """Child processes of one owner. Use it in `with`: leaving kills those that are left, and frees everything.

    Start children from a thread that outlives them: on Linux they die with the thread that started them. All methods
    are for that thread, but any thread may call those of a `Child`.
    """

    def __init__(self) -> None:
        self._children: list[Child] = []
        self._selector = selectors.DefaultSelector()
        self._handles: dict[Child, int] = {}
        """Pidfds, which are readable once the process has ended."""
        self._hears_ends = False
        """Whether a watched descriptor tells of ended children."""

    def __iter__(self) -> Iterator[Child]:
        return iter(list(self._children))

    # Starting

    def start(
        self, argv: Sequence[str], *, env: Mapping[str, str], name: Any = None, is_bound: bool = True, **streams: Any
    ) -> Child:
        """Start a program in its own session; `streams` and the rest are those of `subprocess.Popen`.

        If it `is_bound`, it dies with the thread that calls.

        Raises:
            ConfigError: it cannot be executed.
        """
        libc()  # loaded here, because little is safe between fork and exec
        bound = {"preexec_fn": functools.partial(die_with, os.getpid())} if is_bound else {}
        try:
            options: dict[str, Any] = {"stdin": subprocess.DEVNULL, **streams, **bound}
            process: Process = subprocess.Popen(argv, env=dict(env), start_new_session=True, **options)
        except OSError as error:
            raise ConfigError(f"cannot start {argv[0]}: {error.strerror}") from error
        return self.adopt(process, name)

    def adopt(self, process: Process, name: Any = None) -> Child:
        """Supervise a process that was started otherwise."""
        child = Child(process, name)
        self._children.append(child)
        for target, pipe in child.pipes.items():
            os.set_blocking(pipe.fileno(), False)
            self._selector.register(pipe, selectors.EVENT_READ, (child, target))
        if not self._hears_ends:
            with contextlib.suppress(OSError, AttributeError):  # no free descriptor; or a system without pidfds
                handle = self._handles[child] = os.pidfd_open(process.pid)
                self._selector.register(handle, selectors.EVENT_READ)
        return child

    def watch(self, source: Any, *, tells_ends: bool = False) -> None:
        """Let a descriptor that becomes readable end a wait; say whether it does so when a child ends (SIGCHLD)."""
        self._selector.register(source, selectors.EVENT_READ)
        self._hears_ends = self._hears_ends or tells_ends

    def unwatch(self, source: Any) -> None:
        """Forget a descriptor."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(source)

    # Hearing

    def outputs(self, within: float | None) -> list[ChildOutput]:
        """Wait until a child prints or ends, or a watched descriptor is readable; return what was printed.

        Waits up to `within` seconds; without limit if None.
        """
        if not self._hears_ends and any(child.code is None and child not in self._handles for child in self._children):
            within = END_CHECK_EVERY if within is None else min(within, END_CHECK_EVERY)
        printed = []
        for key, _ in self._selector.select(within):
            if key.data is not None:
                child, target = key.data
                with contextlib.suppress(BlockingIOError):
                    printed.append(self._read(child, target))
        return printed

    def ended(self) -> list[Child]:
        """Return the children that have ended since the last call; killed ones first: others fail because of them.

        They may have left output: see `rest_of`.
        """
        found = []
        for child in self._children:
            if child.code is None and (code := child.process.poll()) is not None:
                child.code = code
                self._drop_handle(child)
                found.append(child)
        return sorted(found, key=lambda child: (child.code or 0) > 0)

    def rest_of(self, child: Child) -> list[ChildOutput]:
        """Return what an ended child has left in its pipes, though another process may hold them open."""
        printed = []
        for target in list(child.pipes):
            with contextlib.suppress(BlockingIOError):
                for _ in range(DRAIN_READS):
                    printed.append(self._read(child, target))
                    if target not in child.pipes:
                        break
        return printed

    def _read(self, child: Child, target: int) -> ChildOutput:
        data = os.read(child.pipes[target].fileno(), PIPE_READ_BYTES)
        if not data:
            self._selector.unregister(child.pipes.pop(target))
        return ChildOutput(child, target, data)

    # Ending

    def signal(self, signum: int) -> None:
        """Send a signal to all children that are left, with their groups."""
        for child in self._children:
            child.signal(signum)

    def await_end(self, child: Child, within: float) -> int | None:
        """Return how a child ended, waiting for that for `within` seconds at most; None if it still runs."""
        if (handle := self._handles.get(child)) is not None:
            ending = select.poll()
            ending.register(handle, select.POLLIN)
            ending.poll(1e3 * within)
        deadline = time.monotonic() + (within if handle is None else 0.0)
        while (code := child.process.poll()) is None and time.monotonic() < deadline:
            time.sleep(END_CHECK_EVERY / 2)
        return code

    def await_ends(self, within: float) -> bool:
        """Wait until all children have ended, with their groups, for `within` seconds at most; tell whether they have.

        Reads no output: a child whose pipe is full does not end.
        """
        deadline = time.monotonic() + within
        while any(child.is_left() for child in self._children):
            if time.monotonic() >= deadline:
                return False
            time.sleep(END_CHECK_EVERY / 2)
        return True

    def stop(self, grace: float) -> None:
        """End and reap all: SIGTERM to each process group, SIGKILL to what is left after `grace` seconds."""
        try:
            self.signal(signal.SIGTERM)
            self.await_ends(grace)
        finally:  # also when Ctrl-C cuts the grace short
            self.signal(signal.SIGKILL)
            for child in self._children:
                child.process.wait()

    def forget(self, child: Child) -> None:
        """Give up a child that has ended: kill what it left running, and close its pipes."""
        signal_group(child.pid, signal.SIGKILL, reaped=True)
        self._children.remove(child)
        self._free(child)

    def close(self) -> None:
        """Kill what is left, and free everything. Closing twice is fine."""
        try:
            self.signal(signal.SIGKILL)
            for child in self._children:
                child.process.wait()
        finally:
            for child in self._children:
                self._free(child)
            self._children.clear()
            self._selector.close()

    def _free(self, child: Child) -> None:
        self._drop_handle(child)
        for pipe in child.pipes.values():
            self._selector.unregister(pipe)
        child.pipes.clear()
        for stream in filter(None, (child.process.stdin, child.process.stdout, child.process.stderr)):
            with contextlib.suppress(OSError):  # input that the process never read
                stream.close()

    def _drop_handle(self, child: Child) -> None:
        if (handle := self._handles.pop(child, None)) is not None:
            self.unwatch(handle)
            os.close(handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def die_with(parent: int) -> None:
    """Ask the kernel to kill this process when `parent`, which started it, dies; only Linux can."""
    if (lib := libc()) is not None:
        lib.prctl(1, int(signal.SIGKILL), 0, 0, 0)  # 1: PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it died before the request
        os._exit(1)


@functools.cache
def libc() -> ctypes.CDLL | None:
    """Return the C library, loaded once: little is safe between fork and exec."""
    return ctypes.CDLL(None) if sys.platform == "linux" else None


def signal_group(pid: int, signum: int, *, reaped: bool) -> bool:
    """Send `signum` (0 only checks) to the process group that child `pid` leads; False if the group is empty."""
    # While a group has members, the kernel reuses its number for no process. So if the child was reaped and there is a
    # process with its number, that process is not a child, and the group is empty.
    if reaped and _exists(pid):
        return False
    try:
        os.killpg(pid, signum)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def signal_name(number: int) -> str:
    """Return the name of a signal, such as SIGTERM."""
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def describe_end(code: int) -> str:
    """Say how a process failed; `code` is its exit code, or the negative number of a signal."""
    return f"failed with exit code {code}" if code >= 0 else f"was killed by {signal_name(-code)}"


def exit_status(code: int) -> int:
    """Return the status that a shell reports for a process that ended with `code`."""
    return code if code >= 0 else 128 - code


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


# Output


class OutputTail:
    """The end of what a process wrote, for the error message if it fails."""

    def __init__(self) -> None:
        self._data = b""

    def add(self, data: bytes) -> None:
        """Append output."""
        self._data = (self._data + data)[-CHILD_TAIL_BYTES:]

    def lines(self) -> list[str]:
        """Return the lines that are known; the first one may lack its beginning."""
        return self._data.decode(errors="replace").splitlines()

    def quote(self) -> str:
        """Return the text to put behind an error message; "" if nothing was written."""
        text = self._data.decode(errors="replace").strip()
        return f"; its last output:\n{text}" if text else ""
