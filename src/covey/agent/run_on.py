"""`covey.run_on`: calls a function on machines with agents, from a program or a notebook, and returns its results."""

from __future__ import annotations

import contextlib
import re
import secrets
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, overload

from covey.agent.callers import calling
from covey.agent.folder import lines_about
from covey.agent.function_rank import (
    ARGUMENTS_FILE,
    FUNCTION_FILE,
    RESULTS_FOLDER,
    arguments_file,
    function_file,
    outcome_of,
    result_of,
    signature_of,
)
from covey.agent.launching import LEASE_SECONDS, Launch, for_all, goes_on, launch
from covey.agent.requests import JOB_PROCESSES_LIMIT, Interpreter
from covey.agent.screen import CellScreen
from covey.agent.shares import SharedRun
from covey.agent.snapshot import take_snapshot, with_files
from covey.base.config import check_timeout, group_config, split_list
from covey.base.errors import CallRefusedError, ConfigError, CoveyError, DeadlineError, RankFailedError, RemoteCallError
from covey.base.settings import ON_LOSS, SETTINGS
from covey.net.host.settings_files import effective_environment
from covey.net.keys import trust
from covey.net.keys.identity import id_text
from covey.runtime.calls.work import failure_error
from covey.runtime.environment import ClusterOptions
from covey.runtime.progress_bar import ProgressBar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from covey.agent.callers import AgentCaller, FoundAgents
    from covey.agent.function_rank import ArrivedOutcome
    from covey.agent.launching import AgentShare
    from covey.wire.call_values import Signature

T = TypeVar("T")

_SYMPTOMS: Final = ("covey.PeerLostError", "covey.ClosedError", "covey.ConnectError")
"""Errors that ranks raise because another rank failed; any other error explains more."""


@overload
def run_on(
    machines: str | Sequence[str],
    fn: Callable[..., T],
    *args: Any,
    processes: int = 1,
    timeout: float | None = None,
    on_loss: Literal["raise"] | None = None,
    folder: str | None = None,
    python: str | None = None,
    requirements: str | None = None,
    cluster: str | None = None,
) -> list[T]: ...


@overload
def run_on(
    machines: str | Sequence[str],
    fn: Callable[..., T],
    *args: Any,
    processes: int = 1,
    timeout: float | None = None,
    on_loss: Literal["continue"],
    folder: str | None = None,
    python: str | None = None,
    requirements: str | None = None,
    cluster: str | None = None,
) -> list[T | None]: ...


def run_on(
    machines: str | Sequence[str],
    fn: Callable[..., Any],
    *args: Any,
    processes: int = 1,
    timeout: float | None = None,
    on_loss: Literal["raise", "continue"] | None = None,
    folder: str | None = None,
    python: str | None = None,
    requirements: str | None = None,
    cluster: str | None = None,
) -> list[Any]:
    """Call `fn(group, *args)` on other machines, and return the results by rank.

    Each machine runs `covey up`, and allows this one. What the function prints is shown here as it comes. Its code
    travels with the variables that it uses; modules that it imports are those of the other machines. Arguments and
    results are values as calls take them (`Node`): the annotations of `fn` say what they become, and nothing is
    unpickled here. Ctrl-C, or the button that interrupts a notebook, reaches all ranks.

    Args:
        machines: their names or ids, as in "north,south", or "all" that this machine trusts and that are up. A machine
            that it does not trust yet gets nothing: see `covey trust`.
        fn: a plain function of a module, a cell, or inside of another function.
        args: what it takes after its group.
        processes: ranks on each machine.
        timeout: seconds until all ranks are told to end, and DeadlineError is raised.
        on_loss: that of the group. With "continue", the result of a lost rank is None.
        folder: a folder that is sent, too, by the rules of `covey run --on`: modules that the function imports.
        python: the interpreter there; it needs the Python version of this one.
        requirements: a requirements file, of which each machine makes an environment.
        cluster: the cluster, if this machine is in several.

    Raises:
        RemoteCallError: `fn` raised; the error has its class, text and traceback.
        RankFailedError: a process ended without a result; what it has written was shown.
        CallRefusedError: an argument or a result is of a type that cannot be sent, or not the one that was promised.
        ConfigError, AuthError, ConnectError: a machine is not there, not trusted, or does not allow this one.
        DeadlineError: `timeout` passed.
    """
    signature = signature_of(fn)
    if not 0 < processes <= JOB_PROCESSES_LIMIT:
        raise ConfigError(f"processes={processes} must be 1 to {JOB_PROCESSES_LIMIT}")
    if on_loss not in (None, *ON_LOSS):
        raise ConfigError(f"on_loss={on_loss!r} must be 'raise' or 'continue'")
    if python is not None and requirements is not None:
        raise ConfigError("requirements= makes an interpreter, and python= names one; give one of them")
    names = split_list(machines) if isinstance(machines, str) else tuple(machines)
    if not names:
        raise ConfigError('machines names none; write "all", or "north,south"')
    seconds = None if timeout is None else check_timeout(timeout)
    try:
        files = {FUNCTION_FILE: function_file(fn), ARGUMENTS_FILE: arguments_file(args)}
    except TypeError as error:
        raise CallRefusedError(f"{signature.name}: {error}") from None
    interpreter = Interpreter(python or "", "" if requirements is None else _text_of(requirements))
    env = effective_environment()
    config = group_config(env)
    found_cluster = ClusterOptions(cluster).find(env)
    screen = CellScreen()
    with (
        with_files(files, None if folder is None else take_snapshot(Path(folder))) as snapshot,
        calling(found_cluster, config) as terminal,
    ):
        book = trust.trusted(found_cluster)
        agents = _trusted(terminal.find(None if names == ("all",) else names, book))
        for line in lines_about(snapshot.left_out):
            screen.note(line)
        total = processes * len(agents)
        options = [f"{SETTINGS['run_size'].flag}={total}"]
        if on_loss is not None:
            options.append(f"{SETTINGS['on_loss'].flag}={on_loss}")
        readable = re.sub(r"\W+", "-", signature.name).strip("-")[:40] or "function"
        wanted = Launch(
            f"{readable}-{secrets.token_hex(4)}",
            processes,
            (*options, "-m"),
            ("covey.agent.function_rank",),
            interpreter,
            LEASE_SECONDS,
            is_temporary=True,
        )
        shares = launch(agents, wanted, snapshot, lambda _text: None)
        known = {agent.machine for agent in agents}
        attended = SharedRun(shares, screen, lambda: goes_on(terminal.visit, wanted.run, known))
        try:
            with _deadline(shares, seconds) as is_late:
                code = attended.attend()
            if is_late.is_set():
                raise DeadlineError(f"{signature.name} was ended after the timeout of {timeout} s")
            if code == 128 + signal.SIGINT:
                raise KeyboardInterrupt
            outcomes = _outcomes(shares, config.call_bytes)
        finally:
            for share in shares:
                with contextlib.suppress(CoveyError):  # then the agent removes its folder later
                    share.agent.call("forget_program", share.number)
    return _results(signature, outcomes, total, code, survives=on_loss == "continue")


def _text_of(requirements: str) -> str:
    try:
        return Path(requirements).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"requirements={requirements!r}: {getattr(error, 'strerror', '') or 'no text'}") from None


def _trusted(found: FoundAgents) -> list[AgentCaller]:
    """Return the agents that were asked for; ConfigError if this machine does not trust one: no person can be asked."""
    if found.new:
        listed = ", ".join(f"{each.name} ({id_text(each.machine)})" for each in found.new)
        raise ConfigError(
            f"this machine does not trust {listed} yet: compare the id with what `covey up` printed there, and run "
            f"`covey trust {found.new[0].name}` here"
        )
    return found.trusted


@contextlib.contextmanager
def _deadline(shares: Sequence[AgentShare], seconds: float | None) -> Any:
    """Yield an event, which is set when the time is over; then all ranks are told to end."""
    is_late = threading.Event()

    def stop() -> None:
        is_late.set()
        for share in shares:
            threading.Thread(target=share.send_signal, args=(signal.SIGTERM,), name="covey-signal", daemon=True).start()

    timer = None if seconds is None else threading.Timer(seconds, stop)
    if timer is not None:
        timer.daemon = True
        timer.start()
    try:
        yield is_late
    finally:
        if timer is not None:
            timer.cancel()


def _outcomes(shares: Sequence[AgentShare], most_bytes: int) -> list[tuple[str, ArrivedOutcome]]:
    """Return what the ranks have written, each with the name of its machine."""
    outcomes: list[tuple[str, ArrivedOutcome]] = []

    def fetch(agent: AgentCaller) -> None:
        number = next(share.number for share in shares if share.agent is agent)
        files: dict[str, bytearray] = {}
        bar = ProgressBar(f"results of {agent.name}", 0)
        try:
            for chunk in agent.stream("read_files", number, RESULTS_FOLDER):
                file = files.setdefault(chunk.name, bytearray())
                if not file:
                    bar.expect(chunk.size)
                file += chunk.data
                bar.show(len(chunk.data))
                if sum(map(len, files.values())) > most_bytes:
                    raise CallRefusedError(
                        f"the results on {agent.name} have more than {most_bytes} bytes; return less, or set "
                        "COVEY_CALL_BYTES"
                    )
        finally:
            bar.close()
        outcomes.extend((agent.name, outcome_of(bytes(file))) for name, file in files.items() if name[0] != ".")

    for_all([share.agent for share in shares], fetch)
    return outcomes


def _results(
    signature: Signature, outcomes: list[tuple[str, ArrivedOutcome]], total: int, code: int, *, survives: bool
) -> list[Any]:
    """Return the results by rank; raise the failure that explains most."""
    failures = [(machine, each.outcome) for machine, each in outcomes if each.outcome.failure is not None]
    failures.sort(key=lambda each: (each[1].failure is not None and each[1].failure.error in _SYMPTOMS, each[1].rank))
    if failures:
        machine, outcome = failures[0]
        assert outcome.failure is not None
        where = f"rank {outcome.rank} of {total} on {machine}" if outcome.rank >= 0 else f"a process on {machine}"
        error = failure_error(outcome.failure, f"{signature.name} in {where}", outcome.rank)
        assert isinstance(error, RemoteCallError)
        raise error
    results: list[Any] = [None] * total
    for machine, (outcome, parts) in outcomes:
        if not 0 <= outcome.rank < total:
            raise RankFailedError(f"{machine} has sent the result of rank {outcome.rank} of {total}", rank=outcome.rank)
        try:
            results[outcome.rank] = result_of(signature, parts)
        except TypeError as error:
            raise CallRefusedError(f"the result of rank {outcome.rank} on {machine} cannot be used: {error}") from error
    missing = sorted({*range(total)} - {each.outcome.rank for _, each in outcomes})
    if missing and not (survives and len(missing) < total):
        listed = ", ".join(map(str, missing))
        raise RankFailedError(
            f"rank {listed} of {total} ended without a result (exit code {code}); its output is above",
            rank=missing[0],
            exit_code=code,
        )
    return results
