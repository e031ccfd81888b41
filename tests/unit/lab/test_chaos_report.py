"""What the job tells is put down to the right fault."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

from rich.console import Console

from covey.lab.chaos.faults import Chaos, PlannedFault
from covey.lab.chaos.processes import Told, Worker
from covey.lab.chaos.report import as_json, outcomes, recoveries, view
from covey.lab.chaos.trial import OUT_OF_TIME, Ending, Injected, Story

BEGAN = 1000.0


def worker(rank: int, pid: int, code: int | None = None) -> Worker:
    process: Any = SimpleNamespace(pid=pid)
    return Worker(rank, process, BEGAN, code=code)


def lost(pid: int, at: float, view: int, *ranks: int, generation: int = 0, kind: str = "lost") -> Told:
    phases = {"detect": 0.0, "freeze": 4.0, "agree": 10.0, "reconnect": 15.0, "redo": 40.0}
    return Told(pid, kind, BEGAN + at, generation, view, ranks, phases)


def injected(kind: str, at: float, worker: Worker | None, **fault: Any) -> Injected:
    rank = worker.rank if worker is not None else 9
    return Injected(
        PlannedFault(0, at, kind, rank, **fault), BEGAN + at, worker, note="" if worker is not None else "it is gone"
    )


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
    killed, stopped, left, cut_off = worker(0, 10, -9), worker(1, 11), worker(2, 12, 0), worker(3, 13)
    come, slow = worker(4, 14), worker(5, 15, 1)
    story = Story(
        began=BEGAN,
        injected=[
            injected("kill", 1.0, killed),
            injected("leave", 2.0, left),
            injected("cut", 3.0, cut_off, other=5),
            injected("stop", 4.0, stopped, seconds=1.0),
            injected("stop", 6.0, cut_off, seconds=0.1),
            injected("join", 7.0, come),
            injected("slow", 8.0, slow, seconds=1.0, pulse=0.02),
            injected("kill", 9.0, None),
        ],
        endings=[
            Ending(killed, BEGAN + 1.0, "lost"),
            Ending(left, BEGAN + 2.25, "left"),
            Ending(slow, BEGAN + 8.5, "failed"),
        ],
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
        "not done: it is gone",
    ]
    assert [outcome.is_bad for outcome in found] == [False] * 6 + [True, False]
    assert [recovery.generation for recovery in unexplained] == [1]
    data = as_json(Chaos(size=6, seed=3), story)
    assert (data["code"], data["unexplained_losses"]) == (1, 1)
    assert [fault["recovered_ms"] for fault in data["faults"]] == [80, 230, 50, 630, None, 500, None, None]
    for width in (60, 80, 120):
        written = io.StringIO()
        console = Console(file=written, width=width, highlight=False)
        console.print(view(Chaos(size=6, seed=3), story))
        lines = written.getvalue().splitlines()
        assert all(len(line) <= width and line == line.rstrip() and "\x1b" not in line for line in lines)
        for start, kind, end in (("1.00 s", "kill rank 0", "80 ms"), ("6.00 s", "stop rank 3", "no rank was lost")):
            assert any(line.split("  ")[0] == start and kind in line for line in lines)
            assert end in " ".join(" ".join(lines).split())


def test_a_job_that_does_not_survive_losses_is_not_said_to_go_on() -> None:
    killed, second, third = worker(0, 10, -9), worker(1, 11, 1), worker(2, 12, 1)
    story = Story(
        began=BEGAN,
        injected=[injected("kill", 1.0, killed)],
        endings=[
            Ending(killed, BEGAN + 1.0, "lost"),
            Ending(second, BEGAN + 1.2, "failed"),
            Ending(third, BEGAN + 1.2, "failed"),
        ],
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
    def code(*endings: tuple[str, int], forgiven: set[int] | None = None, late: bool = False) -> int:
        ends = [Ending(worker(rank, 10 + rank, how[1]), 0.0, how[0]) for rank, how in enumerate(endings)]
        return Story(endings=ends, forgiven=forgiven or set(), is_out_of_time=late).code

    assert code(("finished", 0), ("lost", -9), ("stray", -15)) == 0
    assert code(("finished", 0), ("failed", 3)) == 3
    assert code(("finished", 0), ("failed", 3), forgiven={11}) == 0
    assert code(("failed", 1), ("failed", -11)) == 128 + 11
    assert code(("lost", -9), ("lost", -9)) == 128 + 9
    assert code() == 1
    assert code(("finished", 0), late=True) == OUT_OF_TIME
