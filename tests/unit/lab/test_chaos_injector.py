"""Faults are injected in order, each into a member that no other fault disturbs, and only while enough are left."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass, field

from covey.lab.chaos import injector as module
from covey.lab.chaos.faults import PlannedFault
from covey.lab.chaos.injector import Injector, Victim


@dataclass
class Process:
    """A process that notes the signals that it gets."""

    rank: int
    got: list[int] = field(default_factory=list)

    @property
    def pid(self) -> int:
        return 100 + self.rank

    @property
    def title(self) -> str:
        return f"rank {self.rank}"

    def signal(self, signum: int) -> None:
        self.got.append(signum)


class Members:
    """A job whose members are given."""

    def __init__(self, count: int) -> None:
        self.processes = [Process(rank) for rank in range(count)]
        self.noted: list[str] = []

    def members(self) -> list[Process]:
        return [each for each in self.processes if signal.SIGKILL not in each.got]

    def on_fault(self, fault: PlannedFault, target: Victim) -> None:
        self.noted.append(f"{fault.kind} {target.rank}")

    def on_release(self, fault: PlannedFault, target: Victim) -> None:
        self.noted.append(f"release {target.rank}")


def begun(job: Members, *faults: PlannedFault, min_alive: int = 0) -> tuple[Injector, list[str]]:
    said: list[str] = []
    injector = Injector(job, faults, said.append, min_alive=min_alive)
    injector.begin(time.time())
    return injector, said


def test_a_stopped_process_continues_and_is_no_target_meanwhile() -> None:
    job = Members(3)
    injector, said = begun(job, PlannedFault(0, 0.2, "stop", 0.4, 0.0), PlannedFault(1, 0.4, "kill", 0.5, 0.0))
    now = time.monotonic()
    injector.turn(now)
    assert job.noted == []  # nothing is due
    injector.turn(now + 0.3)
    assert job.processes[1].got == [signal.SIGSTOP]
    injector.turn(now + 0.6)
    assert job.processes[2].got == [signal.SIGKILL]  # the second of those that run
    assert injector.next_at < now + 10
    injector.turn(now + 10)
    assert job.processes[1].got == [signal.SIGSTOP, signal.SIGCONT]
    assert job.noted == ["stop 1", "kill 2", "release 1"]
    assert injector.is_over
    assert [line.partition(" s  ")[2] for line in said] == ["stop: stopped rank 1 for 0.90 s", "kill: killed rank 2"]
    assert [[target.rank for target in each.targets] for each in injector.injected] == [[1], [2]]


def test_a_fault_waits_for_members_and_those_after_it_wait_too() -> None:
    job = Members(2)
    injector, _ = begun(job, PlannedFault(0, 1.0, "two", 0.0, 0.0), PlannedFault(1, 2.0, "kill", 0.0, 0.0))
    now = time.monotonic()
    for seconds in (1.5, 3.0, 6.0):
        injector.turn(now + seconds)
        assert injector.injected == []
    job.processes.append(Process(2))
    injector.turn(now + 8.0)
    assert job.noted == ["two 0", "two 1"]
    job.processes += [Process(3), Process(4)]
    injector.turn(now + 8.5)
    assert len(injector.injected) == 1  # the pause between two faults is kept
    injector.turn(now + 9.1)
    assert job.noted[2:] == ["kill 2"]


def test_a_fault_that_would_leave_too_few_members_is_given_up_after_a_while() -> None:
    job = Members(3)
    injector, said = begun(
        job, PlannedFault(0, 1.0, "leave", 0.0, 0.0), PlannedFault(1, 2.0, "kill", 0.9, 0.0), min_alive=2
    )
    now = time.monotonic()
    injector.turn(now + 1.1)
    assert job.processes[0].got == [signal.SIGTERM]
    injector.turn(now + 3.0)
    assert len(injector.injected) == 1  # rank 0 is about to leave, so that two others are left
    injector.turn(now + 2.0 + module.ENOUGH_MEMBERS_SECONDS + 1.0)
    assert [each.was_done for each in injector.injected] == [True, False]
    assert said[-1].endswith("no kill: too few others are at work")
    assert [each.got for each in job.processes[1:]] == [[], []]


def test_a_slow_process_is_stopped_and_continued_until_it_is_over() -> None:
    job = Members(2)
    injector, _ = begun(job, PlannedFault(0, 0.0, "slow", 0.0, 0.0))
    injector.turn(time.monotonic())
    (process, _) = job.processes
    assert process.got == [signal.SIGSTOP]
    deadline = time.monotonic() + 30
    while not injector.is_over and time.monotonic() < deadline:
        time.sleep(max(0.0, injector.next_at - time.monotonic()))
        injector.turn(time.monotonic())
    assert injector.is_over
    assert len(process.got) >= 4
    assert process.got == [signal.SIGSTOP, signal.SIGCONT] * (len(process.got) // 2)


def test_after_the_faults_are_dropped_only_what_is_under_way_ends() -> None:
    job = Members(3)
    injector, _ = begun(job, PlannedFault(0, 1.0, "pause", 0.0, 0.0), PlannedFault(1, 1.5, "kill", 0.5, 0.0))
    now = time.monotonic()
    injector.turn(now + 1.1)
    injector.drop_faults()
    injector.turn(now + 20)
    assert [each.got for each in job.processes] == [[signal.SIGSTOP, signal.SIGCONT], [], []]
    assert injector.is_over
