"""The programs that an agent has started, each a `covey run` of its own: their processes, output and ends.

An `OutputLog` is the output of one of them, for any number of readers. Any thread may call any method.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, Final

from covey.agent.delivery import remove_temporary
from covey.agent.requests import OUTPUT_CHUNK_BYTES, JobReport, OutputBatch
from covey.base.config import LAUNCHER_VARIABLES, RUN_VARIABLES
from covey.base.errors import ConfigError
from covey.base.pace import Bucket
from covey.net.host.folders import private_folder
from covey.net.host.saved_output import SavedOutput, read_log, tail_of
from covey.runtime.keeper.keeper import TERM_GRACE
from covey.runtime.keeper.supervisor import SIGNAL_GRACE
from covey.runtime.processes import Children, exit_status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from covey.agent.requests import StartRequest
    from covey.runtime.processes import Child, ChildOutput

LOG_BYTES: Final = 32 << 20
"""What is kept of the output of a program."""
VIEW_TAIL_BYTES: Final = 256 << 10
"""What a view shows of the output before it was opened."""
RUNNING_LIMIT: Final = 16
"""Programs that run at a time."""
ENDED_LIMIT: Final = 16
"""Programs that have ended and whose output can still be read."""
STARTS_RATE, STARTS_BURST = 0.5, 16.0
"""Starts a second, and at first."""
ALLOWED_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGKILL)
"""What members may send."""
SIGNAL_TOKENS_LIMIT: Final = 64
"""Signals of a program that are recognised if a terminal sends them twice."""
LEASE_CHECK_EVERY: Final = 0.5
"""How often the terminal of a program is looked for, and whether a program that should end has ended."""
WORDS_SHOWN: Final = 200
"""Characters of the arguments in a list of programs."""
JOB_START_SECONDS: Final = 30.0
JOB_STOP_SECONDS: Final = SIGNAL_GRACE + 2 * TERM_GRACE
"""How long `covey run` may take to end its processes after SIGTERM."""


class OutputLog:
    """What one program has written, and how it has ended."""

    def __init__(self, folder: Path) -> None:
        """Write into `folder`, which has no log yet."""
        self._folder = folder
        self._lock = threading.Lock()
        self._log = SavedOutput(folder, LOG_BYTES)
        self.code: int | None = None
        """The exit code of the program, once it has ended."""
        self._listeners: list[Callable[[], None]] = []

    def append(self, stream: int, data: bytes) -> None:
        """Add output; what cannot be written (a full disk) is lost, and readers are told."""
        with self._lock:
            self._log.append(stream, data)
        self._tell()

    def end(self, code: int) -> None:
        """Note that the program has ended."""
        with self._lock:
            self.code = code
        self._tell()

    def read(self, offset: int) -> OutputBatch:
        """Return the records from `offset` on, as many as fit into a call; none if there are none yet.

        Raises:
            ConfigError: no record begins there.
        """
        with self._lock:
            end, code = self._log.end, self.code
        batch = read_log(self._folder, offset, OUTPUT_CHUNK_BYTES)
        records = tuple((record.stream, record.data) for record in batch.records)
        times = tuple(record.at for record in batch.records)
        return OutputBatch(batch.next, batch.missing, records, code if batch.next >= end else None, times)

    def tail(self) -> int:
        """Return an offset shortly before the end, at which a record begins."""
        return tail_of(self._folder, VIEW_TAIL_BYTES)

    def listen(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener` after every change, on the thread of the change; return what ends this."""
        self._listeners.append(listener)

        def stop() -> None:
            with contextlib.suppress(ValueError):
                self._listeners.remove(listener)

        return stop

    def remove(self) -> None:
        """Remove the files; the log is of no use afterwards."""
        with self._lock:
            self._log.remove()

    def _tell(self) -> None:
        for listener in tuple(self._listeners):
            listener()


class StartedJob:
    """One program. Its thread starts the process, reads its output, and notes its end.

    On Linux the process dies with the thread that started it, so the thread outlives it.
    """

    def __init__(self, number: int, request: StartRequest, started_by: str, folder: Path, log: OutputLog) -> None:
        self.number, self.request, self.started_by, self.folder, self.log = number, request, started_by, folder, log
        self.has_ended = threading.Event()
        self._began_at = time.monotonic()
        self._ran_seconds = 0.0
        self._lock = threading.Lock()
        self._child: Child | None = None
        self._followers = 0
        self._alone_since: float | None = self._began_at
        """Since when no terminal has followed a program that needs one."""
        self._kill_at: float | None = None
        self._tokens: deque[int] = deque(maxlen=SIGNAL_TOKENS_LIMIT)

    def start(self, argv: Sequence[str], env: dict[str, str], ended: Callable[[StartedJob], None]) -> None:
        """Start the process; `ended` is called when it has ended, on the job's thread.

        Raises:
            ConfigError: it cannot be started.
        """
        started: Future[None] = Future()
        thread = threading.Thread(
            target=self._work, args=(argv, env, started, ended), name=f"covey-job-{self.number}", daemon=True
        )
        thread.start()
        started.result(JOB_START_SECONDS)

    def report(self) -> JobReport:
        """Describe the program."""
        words, left = [], WORDS_SHOWN
        for word in self.request.words:
            words.append(word[:left])
            left -= len(word)
            if left <= 0:
                break
        code = self.log.code
        seconds = time.monotonic() - self._began_at if code is None else self._ran_seconds
        return JobReport(
            self.number, self.request.run, tuple(words), self.request.processes, self.started_by, seconds, code,
            str(self.folder), self.log.tail(),
        )  # fmt: skip

    def is_new(self, token: int) -> bool:
        """Tell whether a signal has a token that none of the last ones had, and remember it."""
        with self._lock:
            if token in self._tokens:
                return False
            self._tokens.append(token)
            return True

    def send_signal(self, signum: int) -> None:
        """Send a signal to `covey run`, which passes it on; does nothing if the program has ended."""
        with self._lock:
            if self._child is not None:
                self._child.signal_leader(signum)

    def stop(self) -> None:
        """Ask the program to end, and kill it if it does not. Returns at once."""
        self.send_signal(signal.SIGTERM)
        self._kill_at = self._kill_at or time.monotonic() + JOB_STOP_SECONDS

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Keep a program that needs a terminal from ending, during the `with` block."""
        with self._lock:
            self._followers += 1
            self._alone_since = None
        try:
            yield
        finally:
            with self._lock:
                self._followers -= 1
                if not self._followers:
                    self._alone_since = time.monotonic()

    def _work(
        self, argv: Sequence[str], env: dict[str, str], started: Future[None], ended: Callable[[StartedJob], None]
    ) -> None:
        with Children() as children:
            try:
                pipe = subprocess.PIPE
                child = children.start(argv, env=env, cwd=self.folder, stdout=pipe, stderr=pipe)
            except ConfigError as error:
                self._finish(127)
                started.set_exception(error)
                return
            with self._lock:
                self._child = child
            started.set_result(None)
            try:
                while not children.ended():
                    self._note(children.outputs(LEASE_CHECK_EVERY))
                    self._look(time.monotonic())
                self._note(children.rest_of(child))
            finally:
                children.close()
                self._finish(exit_status(child.process.wait()))
                ended(self)

    def _finish(self, code: int) -> None:
        self._ran_seconds = time.monotonic() - self._began_at
        self.log.end(code)
        self.has_ended.set()

    def _note(self, printed: list[ChildOutput]) -> None:
        for each in printed:
            if each.data:
                self.log.append(each.target, each.data)

    def _look(self, now: float) -> None:
        """End a program whose terminal is gone, and kill one that does not end."""
        lease, alone = self.request.lease, self._alone_since
        if lease and alone is not None and now - alone > lease and self._kill_at is None:
            self.log.append(2, f"covey: the terminal has been gone for {lease:g} s; stopping\n".encode())
            self.stop()
        if self._kill_at is not None and now > self._kill_at:
            self.send_signal(signal.SIGKILL)


class JobTable:
    """The programs of one agent. Any thread may call any method."""

    def __init__(self, folder: Path, ended: Callable[[StartedJob], None]) -> None:
        """Keep output below `folder`; what an earlier agent has left there is removed. `ended` hears of each end."""
        shutil.rmtree(folder, ignore_errors=True)
        self._folder, self._ended = private_folder(folder), ended
        self._lock = threading.Lock()
        self._jobs: dict[int, StartedJob] = {}
        self._last = 0
        self._pace = Bucket(STARTS_RATE, STARTS_BURST)
        self._is_closed = False

    def start(self, request: StartRequest, argv: Sequence[str], work: Path, started_by: str) -> StartedJob:
        """Start a program in the folder `work`.

        Raises:
            ConfigError: a program of this run runs here, too many run or were started, or it cannot be started.
        """
        with self._lock:
            running = [job for job in self._jobs.values() if not job.has_ended.is_set()]
            if self._is_closed:
                raise ConfigError("the agent is being stopped")
            if any(job.request.run == request.run for job in running):
                raise ConfigError(
                    f"run {request.run!r} runs here already; `covey stop {request.run}` ends it, or choose another name"
                )
            if len(running) >= RUNNING_LIMIT:
                raise ConfigError(f"{RUNNING_LIMIT} programs run here already; `covey ps` lists them")
            if not self._pace.take(time.monotonic()):
                raise ConfigError("too many programs were started here in a short time; wait some seconds")
            self._forget_old()
            self._last += 1
            log = OutputLog(private_folder(self._folder / str(self._last)))
            job = self._jobs[self._last] = StartedJob(self._last, request, started_by, work, log)
        job.start(argv, environment(), self._ended)
        return job

    def is_running(self, run: str) -> bool:
        """Tell whether a program of this run runs."""
        with self._lock:
            return any(job.request.run == run and not job.has_ended.is_set() for job in self._jobs.values())

    def get(self, number: int) -> StartedJob:
        """Return a program by its number; ConfigError if there is none."""
        with self._lock:
            if (job := self._jobs.get(number)) is None:
                raise ConfigError(f"there is no program {number} here; `covey ps --all` lists those that are known")
            return job

    def forget(self, number: int) -> None:
        """Remove a program that has ended, with its output; ConfigError if it runs."""
        job = self.get(number)
        if not job.has_ended.is_set():
            raise ConfigError(f"run {job.request.run!r} runs; `covey stop {job.request.run}` ends it")
        with self._lock:
            if self._jobs.pop(number, None) is not None:
                self._remove(job)

    def all(self) -> list[StartedJob]:
        """Return all programs, the oldest first."""
        with self._lock:
            return list(self._jobs.values())

    def close(self) -> None:
        """End all programs, and wait for that."""
        with self._lock:
            self._is_closed = True
            running = [job for job in self._jobs.values() if not job.has_ended.is_set()]
        for job in running:
            job.stop()
        for job in running:
            job.has_ended.wait(JOB_STOP_SECONDS + TERM_GRACE)
        for job in running:
            job.send_signal(signal.SIGKILL)

    def _forget_old(self) -> None:
        ended = [job for job in self._jobs.values() if job.has_ended.is_set()]
        for job in ended[: max(0, len(ended) - ENDED_LIMIT + 1)]:
            del self._jobs[job.number]
            self._remove(job)

    def _remove(self, job: StartedJob) -> None:
        job.log.remove()
        shutil.rmtree(self._folder / str(job.number), ignore_errors=True)
        remove_temporary(job.folder.parent)


def environment() -> dict[str, str]:
    """Return the environment of programs: that of this process, without the variables of a run."""
    own = {*LAUNCHER_VARIABLES, *RUN_VARIABLES, "COVEY_SECRET"}
    return {name: value for name, value in os.environ.items() if name not in own} | {"COVEY_BY_AGENT": "1"}


def command(request: StartRequest, cluster: str, python: str) -> list[str]:
    """Return the command of a program: a `covey run` of this interpreter, whose processes are run by `python`."""
    own = ["--run", request.run, "--cluster", cluster, "-n", str(request.processes)]
    chosen = ["--python", python] if python else []
    return [sys.executable, "-m", "covey", "run", *own, *chosen, *request.options, *request.words]
