"""`launch`: call a function as every rank of a local run, and get the results back.

Each rank is a fresh interpreter (multiprocessing's spawn). It reports over a pipe: a length, then a pickled `_Report`.
Pickle is safe here: both ends are one program, started by the same user.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import struct
import time
import traceback
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, overload

from covey.base.errors import ClosedError, ConfigError, ConnectError, DeadlineError, PeerLostError, RankFailedError
from covey.runtime import tracebacks
from covey.runtime.keeper.keeper import FAILURE_GRACE, TERM_GRACE, LocalRun
from covey.runtime.processes import die_with, signal_group, signal_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.context import SpawnProcess

EXIT_GRACE: Final = 10.0
"""Seconds that a rank has to end after it returned its result."""
SYMPTOMS: Final = (PeerLostError, ClosedError, ConnectError)
"""What ranks raise because another one failed; any other error explains more."""

LENGTH: Final = struct.Struct("<Q")
ResultT = TypeVar("ResultT")


@overload
def launch(
    fn: Callable[..., ResultT],
    nprocs: int,
    *args: Any,
    timeout: float | None = None,
    on_loss: Literal["raise"] | None = None,
) -> list[ResultT]: ...


@overload
def launch(
    fn: Callable[..., ResultT], nprocs: int, *args: Any, timeout: float | None = None, on_loss: Literal["continue"]
) -> list[ResultT | None]: ...


def launch(
    fn: Callable[..., Any],
    nprocs: int,
    *args: Any,
    timeout: float | None = None,
    on_loss: Literal["raise", "continue"] | None = None,
) -> list[Any]:
    """Call `fn(group, *args)` in `nprocs` new processes and return their results, by rank.

    `fn`, `args` and the results must be picklable, and `fn` importable: a function at the top level of a module. In a
    script, call `launch` under `if __name__ == "__main__":`, because every rank imports the script. When a rank fails
    the others are stopped, and the exception that it raised is raised here, with the rank and its traceback as a note.

    `on_loss` is the group's: with "continue", the others finish without a rank whose process dies, and its result is
    None. What `fn` raises ends them all the same.

    Raises:
        ConfigError: `nprocs` is less than one, `on_loss` is unknown, or `fn` or `args` cannot be pickled.
        DeadlineError: not all ranks returned within `timeout` seconds.
        RankFailedError: a rank died, or all did; or one raised what cannot be pickled.
    """
    if on_loss not in (None, "raise", "continue"):
        raise ConfigError(f"on_loss={on_loss!r} must be 'raise' or 'continue'")
    tracebacks.install()
    call = _pickle_call(fn, args)
    deadline = None if timeout is None else time.monotonic() + timeout
    children: list[_Child] = []
    with LocalRun(nprocs) as run:
        try:
            for rank in range(nprocs):
                children.append(_Child(rank, run, call, on_loss))  # first: whatever happens, it is stopped
                children[-1].start()
            failures, lost = _collect(children, deadline, spares_the_lost=on_loss == "continue")
            if failures:
                raise min(failures, key=lambda error: isinstance(error, SYMPTOMS))  # the earliest of the best kind
            if late := tuple(child.rank for child in children if child.report is None and child.rank not in lost):
                names = ", ".join(map(str, late))
                raise DeadlineError(
                    f"launch: no result from rank {names} of {nprocs} within the timeout of {timeout:g} s", late=late
                )
            reports = [child.report for child in children]
            results = [None if report is None else pickle.loads(report.body) for report in reports]
            _await_exit(children)
            return results
        finally:
            _stop(children)


@dataclass(frozen=True)
class _Report:
    """What a rank's call came to."""

    ok: bool
    body: bytes
    """The pickled result or exception; empty when the exception cannot be pickled."""
    text: str = ""
    """The traceback."""


class _Child:
    """One launched rank, as its parent sees it."""

    def __init__(self, rank: int, run: LocalRun, call: bytes, on_loss: str | None) -> None:
        self.rank, self.size = rank, run.size
        self.report: _Report | None = None
        self._heard = bytearray()
        spawn = multiprocessing.get_context("spawn")
        self.reader, self._writer = spawn.Pipe(duplex=False)
        place: dict[str, Any] = {"rank": rank, "size": run.size, "local_rank": rank, "local_size": run.size}
        place |= {"folder": run.folder, "token": run.token, "keeper": run.service.path}
        self.process: SpawnProcess = spawn.Process(
            target=_serve,
            name=f"covey rank {rank}",
            args=(os.getpid(), place, on_loss, call, self._writer),
        )

    def start(self) -> None:
        with self._writer:
            self.process.start()

    def listen(self) -> bool:
        """Read what has come; True when the report is complete or can no longer be."""
        over = not self.process.is_alive()  # asked first: what it wrote before it died is in the pipe
        while self.report is None and self.reader.poll(0):
            piece = os.read(self.reader.fileno(), 1 << 20)
            if not piece:
                return True
            self._heard += piece
            if len(self._heard) >= LENGTH.size:
                (length,) = LENGTH.unpack_from(self._heard)
                if len(self._heard) == LENGTH.size + length:
                    self.report = pickle.loads(memoryview(self._heard)[LENGTH.size :])
        return over or self.report is not None

    def failure(self) -> BaseException | None:
        """Return what to raise for a rank that has reported or died; None if it succeeded."""
        if self.report is None:
            return self._death()
        if self.report.ok:
            return None
        try:
            error = _unpack(self.report.body)
        except Exception:
            return RankFailedError(f"rank {self.rank} of {self.size} failed:\n{self.report.text}", rank=self.rank)
        error.add_note(f"raised in rank {self.rank} of {self.size}\n\n{self.report.text}")
        return error

    def _death(self) -> RankFailedError:
        self.process.join(FAILURE_GRACE)  # its pipe closes a little earlier than it ends
        code = self.process.exitcode
        if code is not None and code < 0:
            how = f"was killed by {signal_name(-code)}"
        else:
            how = f'ended without a result (exit code {code}); is launch() under `if __name__ == "__main__":`?'
        return RankFailedError(f"rank {self.rank} of {self.size} {how}", rank=self.rank, exit_code=code)

    def signal(self, signum: int) -> None:
        pid = self.process.pid
        if pid is not None:
            alive = self.process.is_alive()
            if not signal_group(pid, signum, reaped=not alive) and alive:  # so young that it has no group yet
                os.kill(pid, signum)

    def is_left(self) -> bool:
        pid = self.process.pid
        return pid is not None and (self.process.is_alive() or signal_group(pid, 0, reaped=True))


def _pickle_call(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    try:
        return bytes(ForkingPickler.dumps((fn, args)))
    except Exception as error:
        raise ConfigError(
            f"launch() starts new interpreters, so {getattr(fn, '__qualname__', fn)!s} must be a function at the top "
            f"level of a module, and its arguments picklable: {error}"
        ) from error


def _unpickle_call(call: bytes) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    try:
        fn, args = pickle.loads(call)
    except (ImportError, AttributeError) as error:  # defined at a prompt, or in a folder that is not on the path
        raise ConfigError(f"launch() needs a function in a module that new interpreters can import: {error}") from error
    return fn, args


def _collect(
    children: Sequence[_Child], deadline: float | None, *, spares_the_lost: bool
) -> tuple[list[BaseException], set[int]]:
    """Wait for all reports, or until `deadline`, or a moment after a failure.

    Return the failures as they came, and the ranks that died; if `spares_the_lost`, that is no failure until all have.
    """
    waiting = list(children)
    failures: list[BaseException] = []
    lost: set[int] = set()
    while waiting:
        patience = None if deadline is None else deadline - time.monotonic()
        if patience is not None and patience <= 0:
            break
        sources = [source for child in waiting for source in (child.reader, child.process.sentinel)]
        multiprocessing.connection.wait(sources, patience)
        for child in [child for child in waiting if child.listen()]:
            waiting.remove(child)
            if child.report is None:
                lost.add(child.rank)
                if spares_the_lost and len(lost) < len(children):
                    continue
            if error := child.failure():
                failures.append(error)
                grace = time.monotonic() + FAILURE_GRACE
                deadline = grace if deadline is None else min(deadline, grace)
    return failures, lost


def _await_exit(children: Sequence[_Child]) -> None:
    deadline = time.monotonic() + EXIT_GRACE
    for child in children:
        child.process.join(max(0.0, deadline - time.monotonic()))


def _stop(children: Sequence[_Child]) -> None:
    """End and reap all children, with what they left in their process groups."""
    try:
        deadline = time.monotonic() + TERM_GRACE
        for child in children:
            child.signal(signal.SIGTERM)
        while any(child.is_left() for child in children) and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        for child in children:
            child.signal(signal.SIGKILL)
            if child.process.pid is not None:
                child.process.join()
            child.process.close()
            child.reader.close()


def _serve(parent: int, place: dict[str, Any], on_loss: str | None, call: bytes, writer: Connection) -> None:
    """The life of a launched rank: join, call, report."""
    os.setsid()  # Ctrl-C reaches the parent alone, which decides; and our own children can be found
    die_with(parent)
    report = _call(place, on_loss, call)
    body = pickle.dumps(report)
    with contextlib.suppress(BrokenPipeError), open(writer.fileno(), "wb", closefd=False) as pipe:
        pipe.write(LENGTH.pack(len(body)) + body)


def _call(place: dict[str, Any], on_loss: str | None, call: bytes) -> _Report:
    try:
        from covey.runtime.environment import Place
        from covey.runtime.joining.bootstrap import join_as  # the parent has no use for what this brings in

        fn, args = _unpickle_call(call)
        with join_as(Place(**place), on_loss=on_loss) as group:
            # Pickled while the group is open: the result may be a view of memory that the group owns.
            return _Report(ok=True, body=pickle.dumps(fn(group, *args), protocol=pickle.HIGHEST_PROTOCOL))
    except BaseException as error:
        body = _pack(error)
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next  # without this function's own
        if not tracebacks.is_debugging():
            tracebacks.shorten(error)
        return _Report(ok=False, body=body, text="".join(traceback.format_exception(error)).rstrip())


def _pack(error: BaseException) -> bytes:
    """Pickle `error` in a way that can be undone, or return nothing."""
    if isinstance(error, Exception):  # SystemExit and KeyboardInterrupt would end the parent
        for form in (error, (type(error), error.args, error.__dict__)):
            with contextlib.suppress(Exception):
                body = pickle.dumps(form)
                _unpack(body)
                return body
    return b""


def _unpack(body: bytes) -> BaseException:
    form = pickle.loads(body)
    if isinstance(form, BaseException):
        return form
    kind, args, state = form  # of an exception whose __init__ wants more than its args, which pickle cannot repeat
    error: BaseException = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error
