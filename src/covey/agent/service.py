"""What an agent does for members: the functions that terminals call. They run on threads of the calls' own.

The transport has checked that the caller may call at all (`permission`): a node that may, may call every function.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator  # noqa: TC003 - calls read the annotations
from typing import TYPE_CHECKING, Final

from covey.agent import jobs
from covey.agent.delivery import Delivery, mark_temporary, read_folder, remove_temporary, run_folder, work_folder
from covey.agent.environments import Environments
from covey.agent.requests import (
    WHEEL_RUN,
    Chunk,
    FileChunk,
    Interpreter,
    JobReport,
    Number,
    OutputBatch,
    Page,
    RunName,
    StartRequest,
    Word,
    check_run_name,
)
from covey.base.errors import ConfigError
from covey.base.numbers import Seat
from covey.net.host.folders import home, private_folder
from covey.net.host.locks import LockHolder
from covey.net.keys.identity import node_name
from covey.runtime.calls.handlers import current_caller
from covey.wire.signed import machine_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from covey.runtime.calls.functions import FunctionRegistry
    from covey.wire.messages import Card

DELIVERIES_LIMIT: Final = 8
"""Transfers of files at a time; a new one ends the one that has been idle longest."""
BEAT_SECONDS: Final = 2.0
"""A program that prints nothing yields an empty batch this often, so that its reader knows that the agent lives, and
other streams get their turn."""


class AgentService:
    """The functions of one agent."""

    def __init__(
        self, cluster: str, card_of: Callable[[Seat], Card], note: Callable[[str, Card | None, str, str], None]
    ) -> None:
        """`card_of` returns the card of a caller. `note` writes to the audit log: event, node, run and reason.

        Raises:
            ConfigError: another agent uses the folder.
        """
        self._cluster, self._card_of, self._note = cluster, card_of, note
        self._folder = private_folder(home() / "agent")
        self._only_agent = LockHolder.take(
            self._folder / "lock",
            f"another `covey up` uses {self._folder}; end it first, or set COVEY_HOME to another folder for this one",
        )
        self.jobs = jobs.JobTable(self._folder / "jobs", self._ended)
        for left in private_folder(self._folder / "runs").iterdir():
            remove_temporary(left)
        self._environments = Environments(self._folder / "environments")
        self._lock = threading.Lock()
        self._deliveries: dict[int, tuple[Seat, str, Delivery, threading.Lock]] = {}
        """By number, the latest used last: whose it is, the run, the files."""
        self._last = 0

    def register(self, functions: FunctionRegistry) -> None:
        """Let other nodes call the functions."""
        for function in (
            *(self.open_delivery, self.offer_files, self.missing_files, self.put_bytes, self.finish_delivery),
            *(self.make_environment, self.start_program, self.send_signal, self.programs, self.follow),
            *(self.read_files, self.forget_program),
        ):
            functions.register(function.__name__, function)

    def lost(self, seat: Seat) -> None:
        """Forget the transfers of a terminal that has gone."""
        with self._lock:
            for number in [number for number, (owner, *_) in self._deliveries.items() if owner == seat]:
                del self._deliveries[number]

    def close(self) -> None:
        """End all programs."""
        self._environments.close()
        self.jobs.close()
        self._only_agent.let_go()

    # Files

    def open_delivery(self, run: RunName, is_temporary: bool = False) -> int:
        """Begin to send files into the folder of a run; return the number of the transfer.

        A temporary folder is removed when its program is forgotten, and when the agent is started again.
        """
        check_run_name(run)
        if self.jobs.is_running(run):
            raise ConfigError(f"run {run!r} runs here already; `covey stop {run}` ends it, or choose another name")
        seat = _caller()
        folder = run_folder(private_folder(self._folder / "runs"), run)
        with self._lock:
            for number in [number for number, (_, other, *_) in self._deliveries.items() if other == run]:
                del self._deliveries[number]
            while len(self._deliveries) >= DELIVERIES_LIMIT:
                del self._deliveries[next(iter(self._deliveries))]
            self._last += 1
            if is_temporary:
                mark_temporary(folder)
            self._deliveries[self._last] = (seat, run, Delivery(folder), threading.Lock())
            return self._last

    def offer_files(self, delivery: Number, page: Page) -> None:
        """Take a page of the list of files."""
        with self._delivery(delivery) as files:
            files.offer(page)

    def missing_files(self, delivery: Number) -> Iterator[list[int]]:
        """Yield the indexes of the files that are to be sent."""
        with self._delivery(delivery) as files:
            yield from files.missing()

    def put_bytes(self, delivery: Number, index: Number, offset: Number, data: Chunk) -> None:
        """Take the next bytes of a file."""
        with self._delivery(delivery) as files:
            files.put(index, offset, data)

    def finish_delivery(self, delivery: Number) -> None:
        """End a transfer; ConfigError if a file is missing."""
        with self._delivery(delivery) as files:
            files.finish()
        with self._lock:
            self._deliveries.pop(delivery, None)

    @contextlib.contextmanager
    def _delivery(self, number: int) -> Iterator[Delivery]:
        """Yield a transfer of the caller, which no other call uses meanwhile."""
        with self._lock:
            found = self._deliveries.get(number)
            if found is None or found[0] != _caller():
                raise ConfigError("this transfer of files has ended; start again")
            self._deliveries[number] = self._deliveries.pop(number)
        _, _, files, lock = found
        with lock:
            yield files

    # Programs

    def make_environment(self, requirements: Interpreter) -> Iterator[bytes]:
        """Make the environment of a requirements file; yield what the installer prints.

        With a release, the caller has sent the wheel of its covey as the only file of the run WHEEL_RUN.
        """
        in_use = [job.request.interpreter for job in self.jobs.all() if not job.has_ended.is_set()]
        wheel = self._sent_wheel(requirements.release) if requirements.release else None
        yield from self._environments.make(requirements, in_use, wheel)

    def _sent_wheel(self, digest: str) -> Path:
        """Return the wheel that was sent; ConfigError if it is another one, which another caller has sent since."""
        work = work_folder(run_folder(private_folder(self._folder / "runs"), WHEEL_RUN))
        for path in work.glob("*.whl"):
            if hashlib.sha256(path.read_bytes()).hexdigest() == digest:
                return path
        raise ConfigError("the wheel of covey that was sent is gone; start again")

    def start_program(self, request: StartRequest) -> int:
        """Start a program in the folder of its run; return its number."""
        seat = _caller()
        card = self._card_of(seat)
        python = request.interpreter.path
        if request.interpreter.requirements:
            python = self._environments.python(request.interpreter)
        elif python and not (os.path.isabs(python) and os.access(python, os.X_OK)):
            raise ConfigError(f"there is no interpreter {python} here; give the whole path of one")
        work = work_folder(run_folder(private_folder(self._folder / "runs"), request.run))
        said = " ".join(request.words)
        self._note("program-started", card, request.run, f"{request.processes} processes: {said}")
        job = self.jobs.start(request, jobs.command(request, self._cluster, python), work, _machine_name(card))
        return job.number

    def send_signal(self, number: Number, signum: Number, token: Number) -> None:
        """Send a signal to a program, unless it had one with the same token, which is not 0: a caller that lost its
        connection repeats its last call.
        """
        if signum not in jobs.ALLOWED_SIGNALS:
            raise ConfigError(
                f"signal {signum} cannot be sent; use one of {', '.join(each.name for each in jobs.ALLOWED_SIGNALS)}"
            )
        job = self.jobs.get(number)
        if token and not job.is_new(token):
            return
        self._note("program-signalled", self._card_of(_caller()), job.request.run, signal.Signals(signum).name)
        job.send_signal(signum)

    def programs(self) -> Iterator[list[JobReport]]:
        """Yield the programs of this agent, the oldest first, page by page."""
        reports = [job.report() for job in self.jobs.all()]
        for start in range(0, len(reports), 16):
            yield reports[start : start + 16]

    def read_files(self, number: Number, folder: Word) -> Iterator[FileChunk]:
        """Yield the files that a program has written into a folder below its own, chunk by chunk."""
        yield from read_folder(self.jobs.get(number).folder, folder)

    def forget_program(self, number: Number) -> None:
        """Remove the output of a program that has ended, and its folder if that is temporary."""
        self.jobs.forget(number)

    async def follow(
        self, number: Number, offset: Number, is_terminal: bool, to_end: bool
    ) -> AsyncIterator[OutputBatch]:
        """Yield the output of a program from an offset on: up to its end, or unless `to_end`, what there is now.

        A program that needs its terminal goes on while one follows it with `is_terminal`.
        """
        job = self.jobs.get(number)
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def tell() -> None:
            with contextlib.suppress(RuntimeError):  # the agent is being stopped, and its loop is closed
                loop.call_soon_threadsafe(changed.set)

        stop = job.log.listen(tell)
        try:
            with job.followed() if is_terminal else contextlib.nullcontext():
                while True:
                    changed.clear()
                    batch = job.log.read(offset)
                    if batch.records or batch.missing or batch.code is not None:
                        yield batch
                        offset = batch.next
                    elif not to_end:
                        return
                    else:
                        with contextlib.suppress(TimeoutError):
                            async with asyncio.timeout(BEAT_SECONDS):
                                await changed.wait()
                        if not changed.is_set():
                            yield batch
                    if batch.code is not None:
                        return
        finally:
            stop()

    def _ended(self, job: jobs.StartedJob) -> None:
        code, seconds = job.log.code, job.report().seconds
        self._note("program-ended", None, job.request.run, f"exit code {code} after {seconds:.0f} s")


def _machine_name(card: Card) -> str:
    """Return the name of the machine of a terminal, whose own key is new each time."""
    return node_name(card.host_name, machine_of(card))


def _caller() -> Seat:
    caller = current_caller.get()
    assert caller is not None
    return Seat(caller.seat)
