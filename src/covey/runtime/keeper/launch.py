"""`launch`: call a function as every rank of a local run, and get the results back.

Each rank is a fresh interpreter (multiprocessing's spawn) and reports by a pipe: a length, a pickled `CallReport`.
Pickle is safe here: both ends are one program, started by the same user. A function that a new interpreter cannot
import, such as one of a notebook's cell, is pickled by value, with what it refers to.
"""

from __future__ import annotations

import contextlib
import functools
import io
import multiprocessing
import multiprocessing.connection
import os
import pickle
import struct
import sys
import time
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, overload

from covey.base.errors import ConfigError, DeadlineError, RankFailedError
from covey.runtime import tracebacks
from covey.runtime.keeper.keeper import RANK_FAILURE_GRACE, LocalRun
from covey.runtime.keeper.reports import CallReport, dumps, most_telling, report_of
from covey.runtime.processes import describe_end, die_with

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.context import SpawnProcess

    from covey.runtime.processes import Children

EXIT_GRACE: Final = 10.0
"""Seconds that a rank has to end after its result."""
REPORT_LENGTH: Final = struct.Struct("<Q")
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
    """Call `fn(group, *args)` in `nprocs` new processes and return the results, by rank.

    `fn` may be a function of a module, of a notebook's cell or a prompt, or one inside of another function: then its
    code travels, with the variables that it uses. `args` and the results must be picklable. In a script, call `launch`
    under `if __name__ == "__main__":`, because every rank imports the script. When a rank fails, the others are
    stopped, and its exception is raised here, with the rank and its traceback as a note. The ranks share the standard
    output of this process, where each line is of one rank.

    `on_loss` is that of the group: with "continue", the others finish without a rank whose process dies, and its result
    is None. An exception in `fn` still ends all of them.

    Raises:
        ConfigError: `nprocs` is less than one, `on_loss` is unknown, or `fn` or `args` cannot be pickled.
        DeadlineError: not all ranks returned within `timeout` seconds.
        RankFailedError: a rank died (with "continue": all did), or raised an exception that cannot be pickled.
    """
    if on_loss not in (None, "raise", "continue"):
        raise ConfigError(f"on_loss={on_loss!r} must be 'raise' or 'continue'")
    tracebacks.install()
    call, is_by_value = _pickle_call(fn, args)
    deadline = None if timeout is None else time.monotonic() + timeout
    children: list[_Child] = []
    try:
        with LocalRun(nprocs, name=getattr(fn, "__name__", "launch")) as run:
            for rank in range(nprocs):
                children.append(_Child(rank, run, call, on_loss, is_by_value))  # before it starts: it is always ended
                children[-1].start()
                run.children.adopt(children[-1], rank)
                run.children.watch(children[-1].reader)
            failures, lost = _collect(run.children, children, deadline, tolerate_losses=on_loss == "continue")
            if failures:
                raise most_telling(failures)
            if late := tuple(child.rank for child in children if child.report is None and child.rank not in lost):
                names = ", ".join(map(str, late))
                raise DeadlineError(
                    f"launch: no result from rank {names} of {nprocs} within the timeout of {timeout:g} s", late=late
                )
            reports = [child.report for child in children]
            results = [None if report is None else pickle.loads(report.body) for report in reports]
            run.children.await_ends(EXIT_GRACE)
            return results
    finally:
        for child in children:
            child.close()


class _Child:
    """One launched rank, in the parent process: what `runtime.processes` asks of a process, and its report."""

    stdin = stdout = stderr = None

    def __init__(self, rank: int, run: LocalRun, call: bytes, on_loss: str | None, is_by_value: bool) -> None:
        self.rank, self.size = rank, run.size
        self.report: CallReport | None = None
        self._heard = bytearray()
        spawn = multiprocessing.get_context("spawn")
        self.reader, self._writer = spawn.Pipe(duplex=False)
        launched: dict[str, Any] = {"rank": rank, "size": run.size, "local_rank": rank, "local_size": run.size}
        launched |= {"folder": run.folder, "token": run.token, "keeper": run.service.path}
        self.process: SpawnProcess = spawn.Process(
            target=_serve,
            name=f"covey rank {rank}",
            args=(os.getpid(), launched, on_loss, call, is_by_value, self._writer),
        )

    def start(self) -> None:
        with self._writer:
            self.process.start()
        assert self.process.pid is not None
        self.pid = self.process.pid

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while it runs."""
        return None if self.process.is_alive() else self.process.exitcode

    def wait(self) -> int:
        """Wait for its end, and return the exit code."""
        self.process.join()
        assert self.process.exitcode is not None
        return self.process.exitcode

    def close(self) -> None:
        """Free what belongs to it; kill it if it was not supervised yet."""
        if self.process.pid is not None and self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.process.close()
        self.reader.close()

    def listen(self) -> bool:
        """Read what has arrived; True when the report is complete, or can no longer be completed."""
        over = not self.process.is_alive()  # checked first: what it wrote before it died is in the pipe
        while self.report is None and self.reader.poll(0):
            piece = os.read(self.reader.fileno(), 1 << 20)
            if not piece:
                return True
            self._heard += piece
            if len(self._heard) >= REPORT_LENGTH.size:
                (length,) = REPORT_LENGTH.unpack_from(self._heard)
                if len(self._heard) == REPORT_LENGTH.size + length:
                    self.report = pickle.loads(memoryview(self._heard)[REPORT_LENGTH.size :])
        return over or self.report is not None

    def failure(self) -> BaseException | None:
        """Return the error of a rank that has reported or died; None if it succeeded."""
        return self._death() if self.report is None else self.report.failure(self.rank, self.size)

    def _death(self) -> RankFailedError:
        self.process.join(RANK_FAILURE_GRACE)  # its pipe closes a little before it ends
        code = self.process.exitcode
        if code is not None and code < 0:
            how = describe_end(code)
        else:
            how = f'ended without a result (exit code {code}); is launch() under `if __name__ == "__main__":`?'
        return RankFailedError(f"rank {self.rank} of {self.size} {how}", rank=self.rank, exit_code=code)


def _pickle_call(fn: Callable[..., Any], args: tuple[Any, ...]) -> tuple[bytes, bool]:
    """Return a function and its arguments for new interpreters, and whether the function is in it by value."""
    try:
        if _can_be_imported(fn):
            return bytes(ForkingPickler.dumps((fn, args))), False
        return dumps((fn, args)), True
    except Exception as error:
        raise ConfigError(
            f"launch() starts new interpreters, and {getattr(fn, '__qualname__', fn)!s} cannot be sent to them with "
            f"its arguments: {type(error).__name__}: {error}"
        ) from error


def _can_be_imported(fn: Callable[..., Any]) -> bool:
    """Tell whether new interpreters, which import the main script, will find a function by its name."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    name = getattr(fn, "__qualname__", "")
    if "<" in name:  # a lambda, or a function inside of another one
        return False
    if getattr(fn, "__module__", None) != "__main__":
        return True  # callable objects, too
    code = getattr(fn, "__code__", None)
    main = getattr(sys.modules["__main__"], "__file__", None)
    return main is not None and (code is None or os.path.abspath(code.co_filename) == os.path.abspath(main))


def _unpickle_call(call: bytes) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    try:
        fn, args = pickle.loads(call)
    except (ImportError, AttributeError) as error:  # defined at a prompt, or in a folder that is not on the path
        raise ConfigError(f"launch() needs a function in a module that new interpreters can import: {error}") from error
    return fn, args


def _collect(
    supervised: Children, children: Sequence[_Child], deadline: float | None, *, tolerate_losses: bool
) -> tuple[list[BaseException], set[int]]:
    """Wait for all reports, or until `deadline`, or `FAILURE_GRACE` after a failure.

    Return the failures in order, and the ranks that died. With `tolerate_losses`, deaths are failures only if all died.
    """
    waiting = list(children)
    failures: list[BaseException] = []
    lost: set[int] = set()
    while waiting:
        patience = None if deadline is None else deadline - time.monotonic()
        if patience is not None and patience <= 0:
            break
        supervised.outputs(patience)
        supervised.ended()
        for child in [child for child in waiting if child.listen()]:
            waiting.remove(child)
            supervised.unwatch(child.reader)
            if child.report is None:
                lost.add(child.rank)
                if tolerate_losses and len(lost) < len(children):
                    continue
            if error := child.failure():
                failures.append(error)
                grace = time.monotonic() + RANK_FAILURE_GRACE
                deadline = grace if deadline is None else min(deadline, grace)
    return failures, lost


def _serve(
    parent: int, launched: dict[str, Any], on_loss: str | None, call: bytes, is_by_value: bool, writer: Connection
) -> None:
    """Join, call the function and report. Runs in the process of a launched rank."""
    os.setsid()  # so that only the parent gets Ctrl-C, and the children of this process can be signalled
    die_with(parent)
    _keep_lines_whole()
    report = _call(launched, on_loss, call, _dumps(is_by_value))
    body = pickle.dumps(report)
    with contextlib.suppress(BrokenPipeError), open(writer.fileno(), "wb", closefd=False) as pipe:
        pipe.write(REPORT_LENGTH.pack(len(body)) + body)


def _keep_lines_whole() -> None:
    """Write to the streams, which all ranks share, a line at a time, also if Python runs unbuffered."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


def _dumps(is_by_value: bool) -> Callable[[Any], bytes]:
    """Return what pickles results: those of a function by value may be of classes that only its notebook has."""
    if is_by_value:
        return dumps
    return functools.partial(pickle.dumps, protocol=pickle.HIGHEST_PROTOCOL)


def _call(launched: dict[str, Any], on_loss: str | None, call: bytes, dumps: Callable[[Any], bytes]) -> CallReport:
    def join_and_call() -> bytes:
        from covey.runtime.environment import LaunchedRank
        from covey.runtime.joining.bootstrap import join_as  # imported here: the parent does not need it

        fn, args = _unpickle_call(call)
        with join_as(LaunchedRank(**launched), on_loss=on_loss) as group:
            # Pickled while the group is open, because the result may be a view of the group's memory.
            return dumps(fn(group, *args))

    return report_of(join_and_call, dumps)
