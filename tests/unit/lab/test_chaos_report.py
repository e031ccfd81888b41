"""What the job tells is put down to the right fault."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

from rich.console import Console

from covey.lab.chaos.faults import ChaosTerms, PlannedFault
from covey.lab.chaos.injector import Injected
from covey.lab.chaos.processes import JobProcess, Told
from covey.lab.chaos.report import OUT_OF_TIME, ChaosStory, ProcessEnding, as_json, outcomes, recoveries, view

BEGAN = 1000.0
TERMS = ChaosTerms(size=6, seed=3)


def worker(rank: int, pid: int) -> JobProcess:
    process: Any = SimpleNamespace(pid=pid)
    return JobProcess(rank, process, BEGAN)


def lost(pid: int, at: float, view: int, *ranks: int, generation: int = 0, kind: str = "lost") -> Told:
    phases = {"detect": 0.0, "freeze": 4.0, "agree": 10.0, "reconnect": 15.0, "redo": 40.0}
    return Told(pid, kind, BEGAN + at, generation, view, ranks, phases)


def injected(kind: str, at: float, *targets: JobProcess) -> Injected:
    fault = PlannedFault(0, at, kind, 0.0, 0.0)
    if not targets:
        return Injected(fault, BEGAN + at, (), "too few others are at work", was_done=False)
    return Injected(fault, BEGAN + at, targets, f"touched {', '.join(each.title for each in targets)}")


def ending(worker: JobProcess, at: float, how: str, code: int = 0) -> ProcessEnding:
    return ProcessEnding(worker.rank, worker.pid, how, BEGAN + at, code, f"failed with exit code {code}")


def test_a_recovery_ends_when_the_last_of_the_survivors_goes_on() -> None:
    told = [lost(11, 2.0, 1, 0), lost(12, 2.1, 1, 0), lost(12, 5.0, 2, kind="view")]
    first, second = recoveries(told)
    assert (first.kind, first.lost, first.pids) == ("lost", 1, (11, 12))
    assert round(first.began - BEGAN, 6) == 1.99
    assert round(first.ended - BEGAN, 6) == 2.13
    assert (second.kind, second.lost, second.view) == ("view", 0, 2)


def test_a_generation_that_is_over_is_not_heard() -> None:
    told = [Told(11, "joined", BEGAN, 3, 0), lost(11, 1.0, 1, 0, generation=2), lost(11, 1.0, 1, 2, generation=3)]
    assert [recovery.generation for recovery in recoveries(told)] == [3]


def test_every_fault_gets_what_it_led_to() -> None:
    killed, stopped, left, cut_off, come, slow = (worker(rank, 10 + rank) for rank in range(6))
    story = ChaosStory(
        TERMS,
        began=BEGAN,
        injected=[
            injected("kill", 1.0, killed),
            injected("leave", 2.0, left),
            injected("cut", 3.0, cut_off),
            injected("stop", 4.0, stopped),
            injected("pause", 6.0, cut_off),
            injected("join", 7.0, come),
            injected("slow", 8.0, slow),
            injected("kill", 9.0),
        ],
        endings=[ending(killed, 1.0, "lost", -9), ending(left, 2.25, "left"), ending(slow, 8.5, "failed", 1)],
        told=[
            lost(13, 1.05, 1, 0),
            lost(13, 2.20, 2, 2, kind="left"),
            lost(13, 3.02, 3, kind="view"),
            lost(13, 4.60, 4, 1),
            Told(14, "joined", BEGAN + 7.5, 1, 0, (4,)),
            lost(13, 8.60, 1, 5, generation=1),
        ],
        survives=True,
        ended=BEGAN + 10,
    )
    found, unexplained = outcomes(story)
    assert [outcome.text for outcome in found] == [
        "the others continued after 80 ms",
        "left in good order after 250 ms",
        "all continued after 50 ms",
        "the others continued after 630 ms",
        "no rank was lost",
        "a member after 500 ms",
        "it failed with exit code 1",
        "not done: too few others are at work",
    ]
    assert [outcome.is_bad for outcome in found] == [False] * 6 + [True, False]
    assert [recovery.generation for recovery in unexplained] == [1]
    data = as_json([story])
    (run,) = data["runs"]
    assert (data["code"], run["code"], run["unexplained_losses"], run["terms"]["seed"]) == (1, 1, 1, 3)
    assert [fault["recovered_ms"] for fault in run["faults"]] == [80, 230, 50, 630, None, 500, None, None]
    assert [fault["ranks"] for fault in run["faults"]] == [[0], [2], [3], [1], [3], [4], [5], []]
    for width in (60, 80, 120):
        lines = shown(story, width)
        assert all(len(line) <= width and line == line.rstrip() and "\x1b" not in line for line in lines)
        for start, kind, end in (("1.00 s", "kill", "80 ms"), ("6.00 s", "pause", "no rank was lost")):
            assert any(line.split("  ")[:2] == [start, kind] for line in lines)
            assert end in " ".join(" ".join(lines).split())


def shown(story: ChaosStory, width: int) -> list[str]:
    written = io.StringIO()
    Console(file=written, width=width, highlight=False).print(view(story))
    return written.getvalue().splitlines()


def test_a_fault_with_several_targets_is_over_when_all_of_them_are_gone() -> None:
    targets = [worker(rank, 10 + rank) for rank in range(2)]
    story = ChaosStory(TERMS, began=BEGAN, injected=[injected("two", 1.0, *targets)], survives=True, ended=BEGAN + 3)
    story.told = [lost(12, 1.05, 1, 0)]
    [outcome], _ = outcomes(story)
    assert (outcome.missing, outcome.text) == (1, "the others continued after 80 ms")
    story.told.append(lost(12, 1.45, 2, 1))
    [outcome], unexplained = outcomes(story)
    assert (outcome.missing, outcome.text) == (0, "the others continued after 480 ms")
    story.told.append(lost(12, 2.0, 3, 3))
    assert [recovery.view for recovery in outcomes(story)[1]] == [3]
    assert unexplained == []


def test_a_checked_run_is_judged_by_its_checks() -> None:
    terms = ChaosTerms(size=3, seed=7, where="machine", min_alive=0)
    story = ChaosStory(terms, began=BEGAN, ended=BEGAN + 26, survives=True, folder="/tmp/kept", log=["1.00 s  kill: x"])
    story.injected = [injected("order", 1.0, worker(0, 10)), injected("pause", 2.0, worker(1, 11))]
    story.figures["operations"] = 17
    assert [outcome.text for outcome in outcomes(story)[0]] == ["", ""]  # nothing is claimed that no check has shown
    lines = shown(story, 100)
    assert (story.code, lines[-2]) == (
        0,
        "seed 7: passed in 26 s: 17 operations, 0 operations after a loss, 0 raised, 0 messages, 0",
    )
    story.problems.append("WRONG RESULT on h0")
    lines = shown(story, 200)
    assert story.code == as_json([story])["code"] == 1
    assert any(line.startswith("seed 7: FAILED in 26 s: 17 operations") for line in lines)
    assert [line.strip() for line in lines[-5:]] == [
        *("WRONG RESULT on h0", "what was done:", "1.00 s  kill: x"),
        *("records of the processes: /tmp/kept", "`covey chaos --records FOLDER` checks them again"),
    ]


def test_a_job_that_does_not_survive_losses_is_not_said_to_go_on() -> None:
    killed, second, third = (worker(rank, 10 + rank) for rank in range(3))
    story = ChaosStory(
        TERMS,
        began=BEGAN,
        injected=[injected("kill", 1.0, killed)],
        endings=[ending(killed, 1.0, "lost", -9), ending(second, 1.2, "failed", 1), ending(third, 1.2, "failed", 1)],
        told=[lost(11, 1.05, 1, 0), lost(12, 1.05, 1, 0)],
        survives=False,
        ended=BEGAN + 2,
    )
    [outcome], unexplained = outcomes(story)
    assert (outcome.text, outcome.recovered_ms) == ("the group ended with an error after 80 ms", None)
    assert unexplained == []
    story.told.clear()  # they failed before they could tell
    [outcome], _ = outcomes(story)
    assert outcome.text == "the other processes failed"


def test_the_job_ends_well_only_if_a_process_finished_and_none_failed_by_itself() -> None:
    def code(*endings: tuple[str, int], forgiven: int = -1, late: bool = False) -> int:
        ends = [ending(worker(rank, 10 + rank), 0.0, *how) for rank, how in enumerate(endings)]
        if forgiven >= 0:
            ends[forgiven].is_forgiven = True
        return ChaosStory(TERMS, endings=ends, is_out_of_time=late).code

    assert code(("finished", 0), ("lost", -9), ("stray", -15)) == 0
    assert code(("finished", 0), ("failed", 3)) == 3
    assert code(("finished", 0), ("failed", 3), forgiven=1) == 0
    assert code(("failed", 1), ("failed", -11)) == 128 + 11
    assert code(("lost", -9), ("lost", -9)) == 128 + 9
    assert code() == 1
    assert code(("finished", 0), late=True) == OUT_OF_TIME
