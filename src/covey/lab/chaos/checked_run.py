"""Checked runs: each starts the workload, injects the faults of a scene, lets it finish, and checks every operation."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from covey.base.config import CLUSTER_VARIABLES, LAUNCHER_VARIABLES, RUN_VARIABLES
from covey.base.errors import ConfigError
from covey.lab.chaos import orders
from covey.lab.chaos.checker import Circumstances, check
from covey.lab.chaos.faults import ChaosTerms, plan
from covey.lab.chaos.hosts import HostInjector, Hosts
from covey.lab.chaos.injector import ENOUGH_MEMBERS_SECONDS
from covey.lab.chaos.operations import EXACT_RANKS
from covey.lab.chaos.processes import EVENTS_CHECK_EVERY, EventFile, Processes, kill_all, started_for
from covey.lab.chaos.report import ChaosStory, ProcessEnding
from covey.lab.chaos.workload import STOP_FILE, VARIABLE, Settings
from covey.runtime.processes import Children

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.lab.chaos.faults import PlannedFault
    from covey.lab.chaos.injector import Victim
    from covey.lab.chaos.processes import Watched
    from covey.runtime.processes import Child

WORKLOAD: Final = "covey.lab.chaos.workload"
WORKLOAD_RESTARTS: Final = 20
"""Restarts of each process; more than the faults of any plan need."""
FORM_SECONDS: Final = 90.0
"""How long the processes may take to form the first generation."""
REUNION_SECONDS: Final = 90.0
"""How long all live processes may take, after the last fault, to be in one generation."""
FINISH_SECONDS: Final = 60.0
STEPS_TOGETHER: Final = 3
ORDER_SECONDS: Final = 3.0
"""How long an injected fault waits for a process to reach its trigger point."""
CIRCUMSTANCES: Final = "circumstances.json"
EVENTS_FILE: Final = "events"
TOUCHES: Final = {"stop": "stop", "pause": "stop", "slow": "stop", "host-stop": "stop", "leave": "leave", "cut": "cut"}
"""Kind of fault → what the checker has to know of a process that suffered it."""
ENDS_BY_RECORD: Final = {"over": "finished", "left": "left", "quorum": "failed", "failed": "failed"}
"""What a process records at its end → how it ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """A whole run, as its seed draws it."""

    terms: ChaosTerms
    processes: tuple[int, ...]
    """The number of processes on each host; a single number means this machine."""
    lanes: str
    patience: float
    pause: float
    """Seconds between the steps of a process, at most."""
    bulk: int
    """Elements of the state."""
    large: float
    """The share of steps with an operation of 8 MiB."""

    @property
    def is_one_host(self) -> bool:
        return len(self.processes) == 1


def draw(
    seed: int,
    *,
    processes: int | None = None,
    hosts: int | None = None,
    kinds: tuple[str, ...] = (),
    every: float = 2.0,
    count: int = 7,
    duration: float | None = None,
    min_alive: int = 0,
    lanes: str = "",
) -> Scene:
    """Return the scene of a seed; the same for the same arguments. `processes` is the number on each host."""
    chance = random.Random(f"covey chaos --check {seed}")
    if hosts is None:
        crowd: tuple[int, ...] = (processes or chance.choice([3, 4, 4, 5, 6]),)
    else:
        crowd = (processes,) * hosts if processes is not None else tuple(chance.choice([1, 1, 2]) for _ in range(hosts))
    if sum(crowd) > EXACT_RANKS:
        raise ConfigError(f"--check is for 2 to {EXACT_RANKS} processes in all; got {sum(crowd)}")
    return Scene(
        terms=ChaosTerms(
            seed=seed,
            size=sum(crowd),
            where="machine" if hosts is None else "hosts",
            kinds=kinds,
            every=every,
            count=count,
            duration=duration,
            restarts=WORKLOAD_RESTARTS,
            min_alive=min_alive,
        ),
        processes=crowd,
        lanes=lanes or (chance.choice(["", "", "shm", "unix", "tcp"]) if hosts is None else ""),
        patience=20.0 if hosts is None else chance.choice([6.0, 10.0, 30.0]),
        pause=chance.choice([0.004, 0.02, 0.04]),
        bulk=chance.choice([1000, 1000, 4 << 20]),
        large=chance.choice([0.0, 0.02, 0.08]),
    )


class StuckError(Exception):
    """The run makes no progress."""


class CheckedRun:
    """A run of the workload, from its first process to the verdict."""

    def __init__(self, scene: Scene, say: Callable[[str], None]) -> None:
        self.scene = scene
        self.folder = tempfile.mkdtemp(prefix=f"covey-chaos-{scene.terms.seed}-")
        os.mkdir(os.path.join(self.folder, orders.ORDERS_FOLDER), 0o700)
        self.story = ChaosStory(scene.terms, survives=True, folder=self.folder)
        self.hosts: Hosts | None = None
        self._children = Children()
        self.keepers: dict[int, Child] = {}
        self._processes = Processes(self.folder)
        self._events = EventFile(os.path.join(self.folder, EVENTS_FILE))
        self._injector = HostInjector(self, plan(scene.terms), say, min_alive=scene.terms.min_alive)
        self.story.injected, self.story.log = self._injector.injected, self._injector.log
        self._touched: dict[str, set[str]] = defaultdict(set)
        self._is_finishing = False

    def perform(self) -> ChaosStory:
        """Run to the end; problems are in the story."""
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
            self.story.problems.append(str(stuck))
        except BaseException:  # Ctrl-C, or this machine cannot do it
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        finally:
            self.story.told = self._events.read()
            self._events.close()
        self._judge()
        self._processes.close()
        if not self.story.problems:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.story.folder = ""
        return self.story

    # What the injector asks and tells

    def members(self) -> list[Watched]:
        return self._processes.members()

    def on_host(self, host: int) -> list[Watched]:
        return [each for each in self._processes.alive() if each.host == host]

    def on_fault(self, fault: PlannedFault, target: Victim) -> None:
        if fault.kind in TOUCHES:
            self._touched[self._processes.named(target.pid)].add(TOUCHES[fault.kind])

    def on_release(self, fault: PlannedFault, target: Victim) -> None:
        """Take no note: the records of the process tell whether it was excluded."""

    # Starting

    def start(self, host: int) -> None:
        """Start `covey run` on a host, unless the run is about to end."""
        if self._is_finishing:
            return
        scene, words = self.scene, [sys.executable, "-m", "covey", "run"]
        if self.hosts is not None:
            words = [*self.hosts.inside(host), *words, "--run", "chaos", "--min", "2", "--wait", "60"]
        words += ["-n", str(scene.processes[host]), "--restarts", str(WORKLOAD_RESTARTS)]
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
        settings = Settings(self.folder, scene.terms.seed, host, scene.pause, scene.bulk, scene.large)
        home, temp = (self._own(f"{what}{host}") for what in ("home", "t"))
        env |= {VARIABLE: msgspec.json.encode(settings).decode(), "COVEY_PATIENCE": f"{scene.patience:g}"}
        env |= {"COVEY_HOME": home, "TMPDIR": temp, "XDG_RUNTIME_DIR": temp}
        env["COVEY_EVENTS"] = os.path.join(self.folder, EVENTS_FILE)
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
        size, injector = self.scene.terms.size, self._injector
        self._until(lambda: self._are_together(size), FORM_SECONDS, "the processes are not at work together")
        self.story.began = time.time()
        injector.begin(self.story.began)
        injector.say(f"{size} processes are at work")
        faults = plan(self.scene.terms)
        longest = (faults[-1].at if faults else 0.0) + len(faults) * ENOUGH_MEMBERS_SECONDS + 120.0
        self._until(lambda: injector.is_over, longest, "faults are not over")
        obeyed_by = time.monotonic() + ORDER_SECONDS
        self._until(
            lambda: injector.is_over and (not orders.are_waiting(self.folder) or time.monotonic() > obeyed_by),
            ORDER_SECONDS + 60.0,
            "faults are not over",
        )
        if count := orders.withdraw(self.folder):
            injector.say(f"{count} orders fitted no process")
        injector.say("all faults are over")
        healed = time.monotonic()
        self._until(lambda: self._is_whole_again(healed), REUNION_SECONDS, "the processes do not come together again")
        injector.say(f"together again after {time.monotonic() - healed:.1f} s")
        self._is_finishing = True
        open(os.path.join(self.folder, STOP_FILE), "w").close()
        self._until(self._have_keepers_ended, FINISH_SECONDS, "the run does not finish")
        self._look_for_leftovers()

    def _are_together(self, size: int) -> bool:
        members = self._processes.members()
        return (
            len(members) >= size and len({each.generation for each in members}) == 1 and all(m.steps for m in members)
        )

    def _is_whole_again(self, since: float) -> bool:
        """Tell whether all live processes are in one generation and have made steps there since the last fault."""
        self._children.ended()
        for host, keeper in list(self.keepers.items()):
            if self.hosts is not None and keeper.code not in (None, 0):
                self.story.notes.append(f"`covey run` of host {host} ended with {keeper.code}; started again")
                self.start(host)
        alive = self._processes.alive()
        have_left = sum(each.ended == "left" for each in self._processes)
        if not alive or len(alive) < self.scene.terms.size - have_left:
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
                self.story.problems.append(f"`covey run` of host {host} ended with {keeper.code} after all was done")
        if not any(each.ended == "over" for each in self._processes):
            self.story.problems.append("no process finished the work")
        deadline = time.monotonic() + 5.0
        while (left := started_for(self.folder)) and time.monotonic() < deadline:
            time.sleep(EVENTS_CHECK_EVERY)
        if left:
            self.story.problems.append(f"processes are left: {left}")

    def _until(self, condition: Callable[[], bool], within: float, complaint: str) -> None:
        """Handle events until `condition` holds; StuckError after `within` seconds."""
        deadline = time.monotonic() + within
        while True:
            self._injector.turn(time.monotonic())
            for watched, obeyed in self._processes.look():
                name = signal.Signals(obeyed.signal).name
                moment = f"{obeyed.delay:.3f} s after it began: {obeyed.moment}"
                self._injector.say(f"{watched.name} (rank {obeyed.rank}) gets {name} {moment}")
                if obeyed.signal == signal.SIGSTOP:
                    self._touched[watched.name].add("stop")
                    self._injector.later(
                        obeyed.delay + obeyed.seconds, functools.partial(watched.signal, signal.SIGCONT)
                    )
            if condition():
                return
            if time.monotonic() > deadline:
                raise StuckError(self._stacks(f"{complaint} after {within:.0f} s"))
            time.sleep(EVENTS_CHECK_EVERY)

    def _stacks(self, complaint: str) -> str:
        """Have all live processes dump their stacks; return `complaint` with the state of each."""
        alive = self._processes.alive()
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

    # The end

    def _end_processes(self) -> None:
        self._children.signal(signal.SIGCONT)
        self._children.signal(signal.SIGKILL)
        kill_all(started_for(self.folder))
        self._children.close()

    def _judge(self) -> None:
        self._processes.look()
        self.story.ended, now = time.time(), time.monotonic()
        for each in self._processes:
            if each.ended:
                at = self.story.ended - now + each.records[-1].at
                is_well = ENDS_BY_RECORD[each.ended] != "failed"
                end = "ended" if is_well else "failed"
                self.story.endings.append(
                    ProcessEnding(each.rank, each.pid, ENDS_BY_RECORD[each.ended], at, int(not is_well), end)
                )
        touched = {name: frozenset(faults) for name, faults in self._touched.items()}
        circumstances = Circumstances(self.scene.is_one_host, touched, self._injector.is_network_cut)
        with open(os.path.join(self.folder, CIRCUMSTANCES), "wb") as file:
            file.write(msgspec.json.encode(circumstances))
        judge(self.story, self._processes, circumstances)


def check_again(folder: str) -> ChaosStory:
    """Check the records that an earlier run left in `folder`."""
    if not os.path.isdir(folder):
        raise ConfigError(f"there is no folder {folder} with the records of a run")
    try:
        with open(os.path.join(folder, CIRCUMSTANCES), "rb") as file:
            circumstances = msgspec.json.decode(file.read(), type=Circumstances)
    except FileNotFoundError as error:
        raise ConfigError(f"{folder} is not the folder of a checked run: {error.filename} is missing") from error
    story, processes = ChaosStory(None, folder=folder), Processes(folder)
    processes.look()
    judge(story, processes, circumstances)
    processes.close()
    return story


def judge(story: ChaosStory, processes: Processes, circumstances: Circumstances) -> None:
    """Check the records of all processes, and add what was found to the story."""
    found = check(processes.records(), circumstances)
    story.problems += found.problems
    story.notes += found.notes
    story.figures = found.figures
