"""Performs one checked run: starts the workload, injects the faults of a scene, lets it finish, and checks it."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import msgspec

from covey.base.config import CLUSTER_VARIABLES, LAUNCHER_VARIABLES, RUN_VARIABLES
from covey.cli.chaos.checked import orders
from covey.cli.chaos.checked.checker import Circumstances, check
from covey.cli.chaos.checked.hosts import Hosts
from covey.cli.chaos.checked.injector import Injector
from covey.cli.chaos.checked.processes import Processes, kill_all, started_for
from covey.cli.chaos.checked.workload import STOP, VARIABLE, Settings
from covey.runtime.processes import Children

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.cli.chaos.checked.plan import Scene
    from covey.runtime.processes import Child

WORKLOAD: Final = "covey.cli.chaos.checked.workload"
RESTARTS: Final = 20
POLL_SECONDS: Final = 0.02
FORM_SECONDS: Final = 90.0
"""How long the processes may take to form the first generation."""
TOGETHER_SECONDS: Final = 90.0
"""How long all live processes may take, after the last fault, to be in one generation."""
FINISH_SECONDS: Final = 60.0
STEPS_TOGETHER: Final = 3
ORDER_SECONDS: Final = 3.0
"""How long an injected fault waits for a process to reach its trigger point."""
CIRCUMSTANCES: Final = "circumstances.json"


@dataclass
class Result:
    """The result of a run."""

    seed: int
    folder: str
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    """The faults, each with its seconds since all processes were at work."""
    figures: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    @property
    def is_right(self) -> bool:
        return not self.problems


class StuckError(Exception):
    """The run makes no progress."""


class CheckedRun:
    """A run of the workload, from its first process to the verdict."""

    def __init__(self, scene: Scene, say: Callable[[str], None]) -> None:
        self.scene, self._say = scene, say
        self.folder = tempfile.mkdtemp(prefix=f"covey-chaos-{scene.seed}-")
        os.mkdir(os.path.join(self.folder, orders.FOLDER), 0o700)
        self.result = Result(scene.seed, self.folder)
        self.processes = Processes(self.folder)
        self.hosts: Hosts | None = None
        self._children = Children()
        self.keepers: dict[int, Child] = {}
        """By host: `covey run`."""
        self.touched: dict[str, set[str]] = defaultdict(set)
        self.is_network_cut = self.is_finishing = False
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._began = self._at_work = time.monotonic()

    def perform(self) -> Result:
        """Run to the end; problems are in the result."""
        try:
            with contextlib.ExitStack() as stack:
                if not self.scene.is_one_host:
                    self._write_secret()
                    self.hosts = stack.enter_context(Hosts(len(self.scene.processes)))
                stack.callback(self._end_processes)
                for host in range(len(self.scene.processes)):
                    self.start(host)
                self._drive()
        except StuckError as stuck:
            self.result.problems.append(str(stuck))
        except BaseException:  # Ctrl-C, or this machine cannot do it
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        self._judge()
        self.result.seconds = time.monotonic() - self._began
        self.processes.close()
        if self.result.is_right:
            shutil.rmtree(self.folder, ignore_errors=True)
        return self.result

    # Starting

    def start(self, host: int) -> None:
        """Start `covey run` on a host."""
        scene, words = self.scene, [sys.executable, "-m", "covey", "run"]
        if self.hosts is not None:
            words = [*self.hosts.inside(host), *words, "--run", "chaos", "--min", "2", "--wait", "60"]
        words += ["-n", str(scene.processes[host]), "--restarts", str(RESTARTS)]
        words += ["--lanes", scene.lanes] if scene.lanes else []
        with open(os.path.join(self.folder, f"output-{host}"), "ab") as output:
            self.keepers[host] = self._children.start(
                [*words, "-m", WORKLOAD],
                env=self._environment(host),
                name=host,
                is_bound=False,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
            )

    def _environment(self, host: int) -> dict[str, str]:
        foreign = {*LAUNCHER_VARIABLES, *RUN_VARIABLES, *CLUSTER_VARIABLES, "RANK", "WORLD_SIZE"}
        env = {name: value for name, value in os.environ.items() if name not in foreign}
        scene = self.scene
        settings = Settings(self.folder, scene.seed, host, scene.pause, scene.bulk, scene.large)
        home, temp = (self._own(f"{what}{host}") for what in ("home", "t"))
        env |= {VARIABLE: msgspec.json.encode(settings).decode(), "COVEY_PATIENCE": f"{scene.patience:g}"}
        env |= {"COVEY_HOME": home, "TMPDIR": temp, "XDG_RUNTIME_DIR": temp}
        return env | ({} if self.hosts is None else {"COVEY_SECRET_FILE": os.path.join(self.folder, "secret")})

    def _own(self, name: str) -> str:
        path = os.path.join(self.folder, name)
        os.makedirs(path, 0o700, exist_ok=True)
        return path

    def _write_secret(self) -> None:
        path = os.path.join(self.folder, "secret")
        with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
            file.write(secrets.token_hex(32))

    # The course of a run

    def _drive(self) -> None:
        size = self.scene.size
        self._until(lambda: self._are_together(size), FORM_SECONDS, "the processes are not at work together")
        self._at_work = time.monotonic()
        self.log(f"{size} processes are at work")
        injector = Injector(self)
        for trouble in self.scene.troubles:
            self.later(trouble.at, lambda trouble=trouble: injector.do(trouble))  # type: ignore[misc]
        last = self.scene.troubles[-1].at if self.scene.troubles else 0.0
        self._until(lambda: not self._agenda, last + 120.0, "faults are not over")
        obeyed_by = time.monotonic() + ORDER_SECONDS
        self._until(
            lambda: not self._agenda and (not orders.are_waiting(self.folder) or time.monotonic() > obeyed_by),
            ORDER_SECONDS + 60.0,
            "faults are not over",
        )
        if count := orders.withdraw(self.folder):
            self.log(f"{count} orders fitted no process")
        self.log("all faults are over")
        healed = time.monotonic()
        self._until(lambda: self._is_whole_again(healed), TOGETHER_SECONDS, "the processes do not come together again")
        self.log(f"together again after {time.monotonic() - healed:.1f} s")
        self.is_finishing = True
        open(os.path.join(self.folder, STOP), "w").close()
        self._until(self._have_keepers_ended, FINISH_SECONDS, "the run does not finish")
        self._look_for_leftovers()

    def _are_together(self, size: int) -> bool:
        members = self.processes.members()
        return (
            len(members) >= size and len({each.generation for each in members}) == 1 and all(m.steps for m in members)
        )

    def _is_whole_again(self, since: float) -> bool:
        """Tell whether all live processes are in one generation and have made steps there since the last fault."""
        self._children.ended()
        for host, keeper in list(self.keepers.items()):
            if self.hosts is not None and keeper.code not in (None, 0):
                self.result.notes.append(f"`covey run` of host {host} ended with {keeper.code}; started again")
                self.start(host)
        alive = self.processes.alive()
        have_left = sum(each.ended == "left" for each in self.processes)
        if not alive or len(alive) < self.scene.size - have_left:
            return False
        names = {each.name for each in alive}
        return all(
            each.is_member and set(each.members) == names and each.story == alive[0].story
            and len(each.steps) >= STEPS_TOGETHER and each.steps[-STEPS_TOGETHER] > since
            for each in alive
        )  # fmt: skip

    def _have_keepers_ended(self) -> bool:
        self._children.ended()
        return all(keeper.code is not None for keeper in self.keepers.values())

    def _look_for_leftovers(self) -> None:
        for host, keeper in self.keepers.items():
            if keeper.code:
                self.result.problems.append(f"`covey run` of host {host} ended with {keeper.code} after all was done")
        if not any(each.ended == "over" for each in self.processes):
            self.result.problems.append("no process finished the work")
        deadline = time.monotonic() + 5.0
        while (left := started_for(self.folder)) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        if left:
            self.result.problems.append(f"processes are left: {left}")

    def _until(self, condition: Callable[[], bool], within: float, complaint: str) -> None:
        """Handle events until `condition` holds; StuckError after `within` seconds."""
        deadline = time.monotonic() + within
        while True:
            while self._agenda and self._agenda[0][0] <= time.monotonic():
                heapq.heappop(self._agenda)[2]()
            for watched, obeyed in self.processes.look():
                name = signal.Signals(obeyed.signal).name
                moment = f"{obeyed.delay:.3f} s after it began: {obeyed.moment}"
                self.log(f"{watched.name} (rank {obeyed.rank}) gets {name} {moment}")
                if obeyed.signal == signal.SIGSTOP:
                    self.touched[watched.name].add("stop")
                    self.later(obeyed.delay + obeyed.seconds, lambda each=watched: each.signal(signal.SIGCONT))  # type: ignore[misc]
            if condition():
                return
            if time.monotonic() > deadline:
                raise StuckError(self._stacks(f"{complaint} after {within:.0f} s"))
            time.sleep(POLL_SECONDS)

    def _stacks(self, complaint: str) -> str:
        """Have all live processes dump their stacks; return `complaint` with the state of each."""
        alive = self.processes.alive()
        for each in alive:
            each.signal(signal.SIGCONT)
            each.signal(signal.SIGUSR1)
        time.sleep(0.5)
        now = time.monotonic()
        said = [
            f"{each.name} in generation {each.generation}, {'at work' if each.is_member else 'waiting'}, last heard "
            f"{now - each.records[-1].at:.0f} s ago"
            for each in alive
        ]
        codes = {host: keeper.process.poll() for host, keeper in self.keepers.items()}
        return f"{complaint}; {'; '.join(said) or 'no process is alive'}; keepers {codes}; stacks are in {self.folder}"

    def later(self, seconds: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (time.monotonic() + seconds, next(self._order), what))

    def log(self, text: str) -> None:
        line = f"{time.monotonic() - self._at_work:7.2f} s  {text}"
        self.result.faults.append(line)
        self._say(line)

    # The end

    def _end_processes(self) -> None:
        self._children.signal(signal.SIGCONT)
        self._children.signal(signal.SIGKILL)
        kill_all(started_for(self.folder))
        self._children.close()

    def _judge(self) -> None:
        self.processes.look()
        touched = {name: frozenset(faults) for name, faults in self.touched.items()}
        circumstances = Circumstances(self.scene.is_one_host, touched, self.is_network_cut)
        with open(os.path.join(self.folder, CIRCUMSTANCES), "wb") as file:
            file.write(msgspec.json.encode(circumstances))
        verdict = check(self.processes.records(), circumstances)
        self.result.problems += verdict.problems
        self.result.notes += verdict.notes
        self.result.figures = verdict.figures


def check_again(folder: str) -> Result:
    """Check the records that an earlier run left in `folder`."""
    with open(os.path.join(folder, CIRCUMSTANCES), "rb") as file:
        circumstances = msgspec.json.decode(file.read(), type=Circumstances)
    processes = Processes(folder)
    processes.look()
    verdict = check(processes.records(), circumstances)
    processes.close()
    return Result(-1, folder, verdict.problems, verdict.notes, figures=verdict.figures)
