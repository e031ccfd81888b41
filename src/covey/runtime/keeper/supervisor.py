"""What `covey run` does with a run: relays output, passes signals on, and reacts when a process ends.

Runs on the main thread of a process of its own. `runtime/processes.py` starts, hears and ends the processes; here is
what their output and their ends mean to the person who started them.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
import subprocess
import threading
import time
from typing import TYPE_CHECKING, Final, NamedTuple

from covey.base.text import duration
from covey.net.host.machine import short_host_name, waking_clock
from covey.net.host.run_notes import KEPT_FOLDER, last_reported
from covey.net.host.saved_runs import STOPPED_BY, Absence
from covey.runtime.keeper.keeper import RANK_FAILURE_GRACE, RESTARTS, TERM_GRACE
from covey.runtime.keeper.output import (
    Cursor,
    JsonStream,
    OutputDescriptor,
    OutputStream,
    RankLogs,
    event_line,
    fill_standard_descriptors,
    is_same_file,
    note_line,
)
from covey.runtime.keeper.presence import ABOUT_TO_SLEEP, CONDITIONS, STOOD_STILL
from covey.runtime.processes import describe_end, exit_status, signal_name
from covey.runtime.signals import signals_noted

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping, Sequence

    from covey.net.host.saved_runs import SavedRun
    from covey.runtime.keeper.keeper import HostRun
    from covey.runtime.keeper.presence import MachinePresence
    from covey.runtime.processes import Child, ChildOutput

SIGNAL_GRACE: Final = 30.0
"""Seconds that ranks have to save their work after Ctrl-C or SIGTERM; a second Ctrl-C kills them at once."""
INCOMPLETE_LOGS_CODE: Final = 1
"""The exit code of a run that succeeded, and whose log files could not be written."""
NEVER_JOINED_CODE: Final = 3
NEVER_JOINED: Final = (
    "none of the {count} processes joined the run: each worked alone, and may have overwritten what the others wrote. "
    "A script joins with covey.join() or init_process_group; --solo says that the processes are independent"
)
SETTLE_EVERY: Final = 0.02
"""Seconds between checks whether the members of a run have said if it survives a failure."""


def stopping_text(signum: int) -> str:
    """Return what is said when a signal asks a run to end."""
    is_typed = signum == signal.SIGINT
    return "Stopping… press Ctrl-C again to kill" if is_typed else f"{signal_name(signum)}: stopping…"


def keep(
    make_run: Callable[[], HostRun],
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    restarts: int = 0,
    http: tuple[str, int] | None = None,
    log_dir: str | None = None,
    is_solo: bool = False,
    kept: SavedRun | None = None,
    presence: MachinePresence | None = None,
    as_json: bool = False,
) -> int:
    """Run `argv` as every process of a run and relay their output; return the exit code of the first failure, or 0.

    In a run that survives losses, a failed process is restarted up to `restarts` times, and the code is 0 if any
    process succeeded. The code of a signal is 128 plus its number. SIGINT, SIGTERM and SIGHUP are passed on to all
    ranks once; a second SIGINT kills them. If all succeed after SIGTERM, the code is 0. SIGTSTP stops all ranks, then
    this process; SIGCONT continues them. The pages of all ranks are served at the host and port of `http`.
    With `log_dir`, the output of each rank is also written to a file there. If two or more processes succeed and none
    ever joined the run, the code is `NEVER_JOINED_CODE`, unless the run `is_solo`. If files in `log_dir` lack output,
    it is not 0. What the processes print, and how the run ends, is `kept`, too. The processes leave a run of a cluster
    while `presence` says that this machine should take no part, and return afterwards. With `as_json`, what they print
    and what happens to them are lines of JSON on standard output.

    Call it on the main thread: it takes over signal handling, before it makes the run, until it returns.
    """
    fill_standard_descriptors()
    arrived: list[int] = []
    env = {**(env or {}), **({} if kept is None else {KEPT_FOLDER: str(kept.folder)})}
    logs = None if log_dir is None else RankLogs(log_dir)
    with signals_noted(arrived) as wake, make_run() as run:
        supervisor = _Supervisor(
            run, _Command(argv, env, restarts, is_solo), wake, arrived, logs, kept, presence, as_json=as_json
        )
        if http is None:
            return supervisor.run_to_end()
        from covey.runtime.keeper.pages import serve_ranks  # takes a while to load

        with serve_ranks(run.service.inspect, *http) as server:
            supervisor.note(f"{server.url} serves /healthz, /readyz and /metrics")
            return supervisor.run_to_end()


class _Pipe(NamedTuple):
    """One output stream of one rank: its process, the descriptor that its output goes to, the prefix of its lines."""

    child: Child
    target: int
    stream: OutputStream | JsonStream
    label: Callable[[], str]


class _Command(NamedTuple):
    """What every process of a run executes, and how often it is restarted."""

    argv: Sequence[str]
    env: Mapping[str, str]
    restarts: int
    is_solo: bool
    """Whether its processes have nothing to do with each other."""


class _Away:
    """The time in which this machine takes no part in its run."""

    def __init__(self, why: str, ranks: set[int]) -> None:
        """`ranks` are to return, after `why` does not hold any more."""
        self.why, self.ranks = why, ranks
        self.began, self.since = time.time(), waking_clock()
        self.has_left = False
        """Whether the last process has ended."""


class _Supervisor:
    """Supervises the ranks of one run until all have ended."""

    def __init__(
        self,
        run: HostRun,
        command: _Command,
        wake: socket.socket,
        arrived: list[int],
        logs: RankLogs | None,
        kept: SavedRun | None,
        presence: MachinePresence | None,
        *,
        as_json: bool,
    ) -> None:
        self._run, self._command, self._logs, self._kept = run, command, logs, kept
        self._presence, self._as_json = presence, as_json
        self._away: _Away | None = None
        self._wake, self._arrived = wake, arrived
        self._children = run.children
        self._children.watch(wake, tells_ends=True)
        self._pipes: dict[tuple[Child, int], _Pipe] = {}
        """What has not come to its end, by process and descriptor."""
        self._out = Cursor()
        self._err = self._out if as_json or is_same_file(1, 2) else Cursor()
        self._started: dict[int, Child] = {}
        """By rank: the latest process."""
        self._alive: dict[int, Child] = {}
        self._waiting: dict[int, float] = {}
        """Ranks that are restarted, and when."""
        self._restarts: dict[int, int] = {}
        """How often each rank was restarted."""
        self._code: int | None = None
        """The exit code of the first failure that ends the run."""
        self._failed: list[tuple[int, int, float]] = []
        """Failed ranks, their codes, and until when to wait for the members to say whether the run survives."""
        self._stopping_for: tuple[int, int] | None = None
        """The rank and exit code because of which the others are about to be stopped."""
        self._succeeded = 0
        """How many ranks succeeded."""
        self._has_finished = False
        """Whether the run has finished its work, here or elsewhere."""
        self._lost_code = 0
        """The exit code of the last lost rank that the run survived."""
        self._steps: list[tuple[float, signal.Signals]] = []
        """Signals to send to ranks that do not end by themselves, and when."""
        self._reason = ""
        """Why the run ended, if not by itself."""
        self._told: signal.Signals | None = None
        """The signal that asked this process to end."""
        self._killed = False
        """Whether the ranks were killed because of it."""
        self._descriptors = {target: OutputDescriptor(target) for target in (1, 2)}

    def run_to_end(self) -> int:
        """Start all ranks, supervise them until the last has ended, and return the exit code of the run."""
        code = self._run_to_end()
        self._tell("ended", code=code, reason=self._reason if code else "")
        if self._kept is not None:
            self._kept.end(code, self._reason if code else "")
        return code

    def _run_to_end(self) -> int:
        if self._presence is not None:
            self._presence.watched_by(self._children)
            self._stay_away(self._presence)
        self._run.warm_up(self._command.argv, self._command.env)
        for rank in range(self._run.size if self._away is None else 0):
            self._start(rank)
        while self._alive or self._waiting or self._failed or self._is_away():
            now = time.monotonic()  # a pause in the output counts only after all output up to now was read
            show_times = [each.stream.show_at for each in self._pipes.values() if each.stream.show_at is not None]
            patience = self._patience(*self._waiting.values(), *show_times)
            printed_now = self._children.outputs(patience)
            late = time.monotonic() - now - (patience or 0.0)
            for printed in printed_now:
                self._relay(printed)
            self._react()
            if self._presence is not None:
                self._attend(self._presence, late if patience is not None else 0.0)
            for pipe in list(self._pipes.values()):
                if pipe.stream.show_at is not None and pipe.stream.show_at <= now:
                    self._write(pipe.target, pipe.stream.flush())
            for rank in [rank for rank, at in self._waiting.items() if at <= now]:
                self._start_again(rank)
        self._children.stop(TERM_GRACE)
        for child in self._children:
            self._drain(child)
        if self._logs is not None and not self._logs.is_complete:
            self.note("the files in --log-dir lack some of the output")
            return self._outcome() or INCOMPLETE_LOGS_CODE
        return self._outcome()

    def _outcome(self) -> int:
        is_whole = self._code is None and self._told is None and self._succeeded > 1
        if is_whole and not self._command.is_solo and not self._run.has_joined():
            self._reason = "no process joined the run"
            self.note(NEVER_JOINED.format(count=self._succeeded))
            return NEVER_JOINED_CODE
        if self._code is not None or self._has_finished:
            return self._code or 0
        return 128 + self._told if self._told is not None else self._lost_code

    def _start(self, rank: int) -> None:
        command, restarts = self._command, self._restarts.get(rank, 0)
        env = dict(command.env)
        if restarts:
            env |= {"COVEY_RESTART": str(restarts), **self._run.variables_again(self._started[rank])}
        process = self._run.fork(rank, env) if not restarts else None  # a restarted process gets a fresh interpreter
        if process is None:
            process = self._run.start(rank, command.argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self._started[rank] = self._alive[rank] = process
        label = functools.partial(self._run.label, rank, process)
        for target, cursor in ((1, self._out), (2, self._err)):
            stream = self._stream(rank, process, target, cursor, label)
            self._pipes[process, target] = _Pipe(process, target, stream, label)
        self._tell("started", process=rank, pid=process.pid, restarts=restarts)

    def _stream(
        self, number: int, process: Child, target: int, cursor: Cursor, label: Callable[[], str]
    ) -> OutputStream | JsonStream:
        """Return what makes the output of a process ready to be written."""

        def rank() -> int | None:
            label()  # it takes what the process has told by now
            return self._run.rank_of(number, process)

        if self._as_json:
            return JsonStream(target, short_host_name(), rank)
        coloured = os.isatty(target) and not os.environ.get("NO_COLOR")
        return OutputStream(number, cursor, coloured=coloured, label=label)

    def _tell(self, event: str, **about: object) -> None:
        """Write an event of the run, if they are asked for."""
        if self._as_json:
            self._write(1, event_line(event, machine=short_host_name(), **about))

    def _start_again(self, rank: int) -> None:
        is_over = self._is_over(rank)
        if self._waiting.pop(rank, None) is None or is_over:
            return  # this process was asked to end meanwhile, or the run is over
        self._drain(self._started[rank])
        self._children.forget(self._started[rank])
        if self._told is None and self._code is None:
            self._start(rank)

    def _patience(self, *times: float) -> float | None:
        """Return the seconds until the next step or the next of `times`; None if there is none."""
        due = [*times, *(at for at, _ in self._steps)]
        if self._presence is not None:
            due.append(self._presence.next_look)
        if self._failed or self._stopping_for is not None:
            due.append(time.monotonic() + SETTLE_EVERY)
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _relay(self, printed: ChildOutput) -> None:
        """Write what a rank has printed."""
        child, target, data = printed
        if not data:
            self._write(target, self._pipes.pop((child, target)).stream.end())
            return
        pipe = self._pipes[child, target]
        self._write(target, pipe.stream.feed(data, now=time.monotonic()))
        if self._logs is not None and (problem := self._logs.write(pipe.label(), data)):
            self.note(problem)
        self._keep(child.name, self._run.rank_of(child.name, child), target, data)

    def _drain(self, child: Child) -> None:
        """Write what an ended rank left in its pipes, even if another process holds their other ends open."""
        for printed in self._children.rest_of(child):
            self._relay(printed)
        for target in (1, 2):
            if (pipe := self._pipes.pop((child, target), None)) is not None:
                self._write(target, pipe.stream.end())

    def _react(self) -> None:
        """React to signals, to ranks that ended, and to the clock."""
        with contextlib.suppress(BlockingIOError):
            self._wake.recv(4096)
        while self._arrived:
            self._on_signal(signal.Signals(self._arrived.pop(0)))
        for child in self._children.ended():
            del self._alive[child.name]
            self._on_end(child.name, child.code or 0)
        self._settle()
        self._cancel_stop()
        while self._steps and self._steps[0][0] <= time.monotonic():
            _, signum = self._steps.pop(0)
            self._children.signal(signum)
            self._killed = self._told is not None and signum is signal.SIGKILL

    def _on_signal(self, signum: signal.Signals) -> None:
        if signum is signal.SIGTSTP:
            self._pause()
        elif signum is signal.SIGUSR1:
            self._write_operations()
        elif signum is signal.SIGUSR2:
            self._run.service.request_checkpoint()
            self.note("SIGUSR2: the ranks are asked for a checkpoint")
        elif self._told is None:
            self._told = signum
            self._reason = self._reason or f"{STOPPED_BY}{signum.name}"
            if signum is not signal.SIGTERM:  # after SIGTERM, ranks may still succeed
                self._code = self._code or 128 + signum
            self._children.signal(signum)
            self._stop_at(time.monotonic() + SIGNAL_GRACE)
            self.note(stopping_text(signum))
        elif signum is signal.SIGINT:
            self._steps = [(time.monotonic(), signal.SIGKILL)]

    # Absence

    def _stay_away(self, presence: MachinePresence) -> None:
        """Start no process as long as this machine should take no part."""
        if why := presence.absence:
            self._away = _Away(why, set(range(self._run.size)))
            self._away.has_left = True
            self.note(f"{presence.name} {why}: its processes start when it {CONDITIONS[why]}")

    def _attend(self, presence: MachinePresence, late: float) -> None:
        """Have the processes leave, or return, when this machine should; say if it slept or stood still."""
        presence.look()
        if late > STOOD_STILL:
            self.note(
                f"{presence.name} stood still for {duration(late)}: `covey run` was stopped, or the machine paused"
            )
        away = self._away
        if presence.slept and (away is None or away.why != ABOUT_TO_SLEEP):
            self.note(f"{presence.name} slept for {duration(presence.slept)}")
            now = time.time()
            self._keep_absence(Absence(why="slept", left=now - presence.slept, returned=now))
        if self._told is not None or self._code is not None:
            presence.left()
        elif away is None and presence.absence:
            self._leave(presence)
        elif away is not None and not self._alive:
            if not away.has_left:
                self._has_left(presence, away)
            if not presence.absence:
                self._return(presence, away)

    def _leave(self, presence: MachinePresence) -> None:
        """Ask all processes to leave the run; before a sleep, only one that goes on without them."""
        why = presence.absence
        if why == ABOUT_TO_SLEEP and not self._run.survives():
            presence.left()
            return
        self._away = _Away(why, {*self._alive, *self._waiting})
        self._keep_absence(Absence(why=why, left=self._away.began, step=self._step()))
        self.note(f"{presence.name} {why}: its processes leave the run")
        self._children.signal(signal.SIGTERM)
        self._stop_at(time.monotonic() + SIGNAL_GRACE)

    def _has_left(self, presence: MachinePresence, away: _Away) -> None:
        away.has_left, self._steps, step = True, [], self._step()
        self._keep_absence(Absence(why=away.why, left=away.began, step=step))
        at = "" if step is None else f" at step {step}"
        self.note(f"{presence.name} has left the run{at}; it returns when it {CONDITIONS[away.why]}")
        presence.left()

    def _return(self, presence: MachinePresence, away: _Away) -> None:
        self._away, now = None, time.time()
        self._keep_absence(Absence(why=away.why, left=away.began, returned=now, step=self._step()))
        lasted = duration(waking_clock() - away.since)
        self.note(f"{presence.name} {CONDITIONS[away.why]} again after {lasted}: its processes start")
        for rank in sorted(away.ranks):
            if rank in self._started:
                self._drain(self._started[rank])
                self._children.forget(self._started[rank])
            self._start(rank)

    def _is_away(self) -> bool:
        """Tell whether this machine will return to a run that goes on elsewhere."""
        return self._away is not None and self._told is None and self._code is None and not self._has_found_end()

    def _has_found_end(self) -> bool:
        """Tell whether the members of the run, here or elsewhere, have finished its work."""
        self._run.service.catch_up()
        self._has_finished = self._has_finished or self._run.service.is_over
        return self._run.service.is_over

    def _step(self) -> int | None:
        """Return the last step that the program has reported; None if there is none."""
        found = None if self._kept is None else last_reported(self._kept.folder)
        return None if found is None else found.step

    def _keep_absence(self, absence: Absence) -> None:
        if self._kept is not None:
            self._kept.note_absence(absence)

    def _write_operations(self) -> None:
        from covey.runtime.keeper.pages import write_flights

        threading.Thread(target=write_flights, args=(self._run.service.inspect,), daemon=True).start()
        self.note("SIGUSR1: the last operations of the ranks are written to files; `covey trace` shows them")

    def _pause(self) -> None:
        """Stop all ranks and this process, as a shell expects after Ctrl-Z; continue them after SIGCONT."""
        began = time.monotonic()
        with self._run.paused():
            handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
            # Sent to this thread, because it must not continue before the kernel has stopped the process. In a process
            # group that no shell controls, the signal does nothing, and all processes continue.
            signal.pthread_kill(threading.get_ident(), signal.SIGTSTP)
            signal.signal(signal.SIGTSTP, handler)
        gap = time.monotonic() - began  # time while stopped does not count
        self._steps = [(at + gap, signum) for at, signum in self._steps]
        self._failed = [(rank, code, by + gap) for rank, code, by in self._failed]

    def _on_end(self, rank: int, code: int) -> None:
        self._tell("exited", process=rank, pid=self._started[rank].pid, code=exit_status(code))
        if self._away is not None and rank in self._away.ranks and self._told is None and not self._has_found_end():
            return  # it was asked to leave, and will be back
        if code == 0:
            self._succeeded += 1
            self._has_finished = True
        elif self._told is not None:
            self._code = self._code or 128 + self._told
        elif self._code is None:
            self._failed.append((rank, code, time.monotonic() + RANK_FAILURE_GRACE))

    def _settle(self) -> None:
        """Restart failed ranks or stop the others, once it is known whether the run survives the failures."""
        while self._failed and self._code is None:
            rank, code, by = self._failed[0]
            survives = self._run.survives()
            if survives is None and self._alive and self._told is None and time.monotonic() < by:
                return
            cause = self._cause() if not survives and self._told is None else None
            if cause in self._alive and time.monotonic() < by:
                return  # it is about to end; this rank failed because of it
            rank, code, by = next((each for each in self._failed if each[0] == cause), self._failed[0])
            self._failed.remove((rank, code, by))
            status = exit_status(code)
            if survives:
                self._lost_code = status
                what = self._after_loss(rank)
            else:
                self._code = status
                if self._told is None:
                    self._stop_at(by)
                    self._stopping_for = (rank, status)
                what = "; stopping the others" if self._alive else ""
            self._reason = self._reason or (f"{self._name(rank)} {describe_end(code)}" if not survives else "")
            because = f"{self._name(cause)} failed or hangs; " if cause is not None and cause in self._alive else ""
            self.note(f"{because}{self._name(rank)} {describe_end(code)}{what}")
        self._failed.clear()

    def _cause(self) -> int | None:
        """Return the rank whose failure caused the others, as the processes report; None if that is not known."""
        self._run.service.catch_up()
        ranks = {process.pid: rank for rank, process in self._started.items()}
        failed = {rank for rank, _, _ in self._failed}
        blamed = (ranks[pid] for pid in self._run.service.culprits() if pid in ranks)
        return next((rank for rank in blamed if rank in failed or rank in self._alive), None)

    def _cancel_stop(self) -> None:
        """Do not stop the other ranks after all, if they have formed a group without the failed one."""
        if self._stopping_for is None or self._told is not None or not self._alive or not self._run.survives():
            return
        (rank, self._lost_code), self._stopping_for = self._stopping_for, None
        self._code, self._steps = None, []
        self.note(f"the others continue without {self._name(rank)}")

    def _name(self, rank: int) -> str:
        """Return what messages call a process: its rank, or the prefix of its output if that differs."""
        label = self._run.label(rank, self._started[rank])
        return f"rank {rank}" if label == str(rank) else f"[{label}]"

    def _after_loss(self, rank: int) -> str:
        """Restart a rank if restarts are left; return what happens next, in words."""
        before, most = self._restarts.get(rank, 0), self._command.restarts
        if before < most and not self._is_over(rank) and self._told is None:
            self._restarts[rank] = before + 1
            self._waiting[rank] = time.monotonic() + RESTARTS.after(before + 1)
            return f"; starting it again ({before + 1} of {most})"
        self._run.will_not_return()
        return "; the others continue" if self._alive or self._waiting else ""

    def _is_over(self, rank: int) -> bool:
        """Tell whether the run has ended, apart from the process of this rank.

        In a run of a cluster, a process that succeeds may only have left: the members on other hosts know.
        """
        service = self._run.service
        self._has_finished = self._has_finished or service.is_over
        is_done = service.is_over if service.is_elsewhere else self._has_finished
        return is_done and not self._alive and self._waiting.keys() <= {rank}

    def _stop_at(self, at: float) -> None:
        self._waiting.clear()
        self._steps = [(at, signal.SIGTERM), (at + TERM_GRACE, signal.SIGKILL)]

    def note(self, text: str) -> None:
        """Write a line about the run."""
        self._keep(None, None, 2, f"covey: {text}\n".encode())
        if self._as_json:
            return self._tell("note", text=text)
        self._write(2, self._err.make_room() + note_line(text, 2))

    def _keep(self, number: int | None, rank: int | None, stream: int, data: bytes) -> None:
        """Keep output of a process, or of this one if `number` is None."""
        if self._kept is not None and (problem := self._kept.append(number, rank, stream, data)):
            self.note(problem)

    def _write(self, target: int, data: bytes) -> None:
        target = 1 if self._as_json else target
        # If a pager does not read, this process must still pass signals on, and must be able to end. Output that cannot
        # be written at all does not end a run.
        rest, descriptor = memoryview(data), self._descriptors[target]
        while rest and descriptor.is_open():
            had_failed = bool(descriptor.failure)
            patience = 0.0 if self._killed else self._patience()  # written in order: no other output is due
            try:
                has_room = bool(select.select([self._wake], [target], [], patience)[1])
            except OSError as error:  # closed
                descriptor.fail(error)
                has_room = False
            if has_room:
                rest = rest[descriptor.write(rest) :]
            if descriptor.failure and not had_failed:
                self._tell_of_failure(target, descriptor.failure)
            elif not has_room and self._killed:
                return
            elif not has_room:
                self._react()
        descriptor.drop(rest)

    def _tell_of_failure(self, target: int, reason: str) -> None:
        """Report once, on the other output stream, that one has failed."""
        other = 3 - target
        if not self._descriptors[other].failure and not is_same_file(1, 2):
            name = "output" if target == 1 else "standard error"
            room = (self._err if other == 2 else self._out).make_room()
            text = f"covey: {name} cannot be written ({reason}); the run continues without it\n"
            self._write(other, room + text.encode())
