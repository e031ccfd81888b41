"""The one sentence about a run or a cluster: a test for each row of the table of states."""

from __future__ import annotations

import math
from typing import Any

from covey.watch.overview import GpuSeen, Happening, MachineSeen, RankSeen, RunSeen, Sentence
from covey.watch.verdict import AllFacts, RunFacts, lines, of_all, of_run

NAMES = {"n": "north", "a": "attic"}


def rank(number: int, machine: str = "n", **more: Any) -> RankSeen:
    return RankSeen(number, machine, 1000 + number, **more)


def said(**facts: Any) -> Sentence:
    return of_run(RunFacts("train", facts.pop("state", "running"), machines=NAMES, **facts))


def test_a_rank_that_others_wait_for_is_named_with_its_machine_and_what_it_does() -> None:
    waiting = [rank(r, state="waiting", waits_for=(5,), sequence=9, operation="all_reduce") for r in range(3)]
    late = rank(5, "a", state="late", sequence=7, operation_age=12.4)
    sentence = said(ranks=[*waiting, late], waited={0: 11.0, 1: 12.0, 2: 9.0})
    assert sentence.text == "rank 5 (attic) is 2 operations behind; 3 ranks wait for it since 12 s."
    assert sentence.level == "warning"
    assert sentence.why[0] == "rank 5 is between operations since 12 s"
    assert "rank 0 is in all_reduce, operation 9" in sentence.why
    assert sentence.commands == ("covey trace train",)


def test_of_several_late_ranks_the_one_that_most_wait_for_is_named() -> None:
    ranks = [
        rank(0, state="late", sequence=1),
        rank(1, state="late", sequence=1),
        rank(2, state="waiting", waits_for=(1,), sequence=2),
    ]
    assert said(ranks=ranks).text.startswith("rank 1 (north) is 1 operation behind; 1 rank waits for it")


def test_a_stopped_rank_is_told_from_a_late_one_and_can_be_continued() -> None:
    sentence = said(ranks=[rank(0, state="waiting", waits_for=(1,)), rank(1, state="stopped")], waited={0: 3.0})
    assert sentence.text == "rank 1 (north) is stopped (SIGSTOP); 1 rank waits for it since 3 s."
    assert sentence.commands == ("kill -CONT 1001",)


def test_a_silent_rank_is_named_with_what_others_say_of_it() -> None:
    sentence = said(ranks=[rank(0), rank(1, "a", state="silent", age=7.0, reason="its machine is not heard")])
    assert sentence.text == "rank 1 (attic) does not answer since 7 s."
    assert sentence.why == ("its machine is not heard",)
    both = said(ranks=[rank(0, state="silent", age=4.0), rank(1, state="silent", age=7.0)])
    assert both.text == "ranks 0 and 1 do not answer since 7 s."


def test_a_loss_is_told_for_a_minute_with_the_reason_and_what_is_left() -> None:
    event = Happening(100.0, "lost", "rank 5 (attic): no answer: recovered in 410 ms", (5,), "warning")
    ranks = [*(rank(r) for r in range(5)), rank(5, "a", state="lost")]
    sentence = said(ranks=ranks, lost=[event], now=120.0, has_reports=True)
    assert sentence.text == (
        "rank 5 was lost 20 s ago (rank 5 (attic): no answer: recovered in 410 ms); the run continues with 5 ranks."
    )
    assert said(ranks=ranks, lost=[event], now=161.0, has_reports=True).text == "5 ranks at work."


def test_a_failed_run_says_the_whole_error() -> None:
    sentence = said(state="failed", fault="PeerLostError: rank 2 is gone", fault_rank=1, ranks=[rank(1)])
    assert (sentence.text, sentence.level) == ("The run train failed: PeerLostError: rank 2 is gone", "error")
    assert sentence.why == ("rank 1 (north): PeerLostError: rank 2 is gone",)
    assert "covey trace" in sentence.commands


def test_a_run_that_ended_is_nothing_to_worry_about() -> None:
    assert said(state="ended").text == "The run train has ended."


def test_a_run_that_waits_says_what_its_nodes_say_and_which_troubles_they_met() -> None:
    sentence = said(state="waiting", waits=["1 of 2 nodes so far", "south: speaks protocol 4"])
    assert sentence == Sentence("1 of 2 nodes so far", "warning", ("south: speaks protocol 4",), ("covey doctor",))
    assert said(state="waiting").text == "the run waits for its members"


def test_a_loss_that_became_nan_is_said() -> None:
    assert said(reports={"loss": math.nan}, step=7).text == "loss is nan at step 7."
    assert said(reports={"loss": math.inf}, step=None).text == "loss is inf."


def test_a_slow_rank_is_named_without_alarm() -> None:
    sentence = said(ranks=[rank(0), rank(1, "a")], slow=(1, 0.42))
    assert sentence.text == "rank 1 (attic) is slower than the others, which wait for it 42% of their time."
    assert sentence.level == "note"


def test_an_older_node_tells_less_and_the_sentence_says_what_is_missing() -> None:
    sentence = said(tells_less=[("attic", "0.4")], own_version="0.6")
    assert sentence.text == "attic runs covey 0.4: it tells less."
    assert sentence.why[0].startswith("missing: ")


def test_a_program_that_reports_nothing_is_told_the_line_to_add_after_a_minute() -> None:
    assert said(ranks=[rank(0)], runs_for=61.0).commands == ("group.report(step=step, loss=loss)",)
    assert said(ranks=[rank(0)], runs_for=59.0).text == "1 rank at work."
    assert said(ranks=[rank(0)], runs_for=61.0, has_reports=True).text == "1 rank at work."


def test_a_run_that_is_well_says_how_many_work_where() -> None:
    assert said(ranks=[rank(0), rank(1, "a")], has_reports=True).text == "2 ranks on 2 machines at work."


def machine(name: str, **more: Any) -> MachineSeen:
    return MachineSeen(name, name, **more)


def run_of(level: Any, text: str, state: Any = "running") -> RunSeen:
    return RunSeen(text, text, state, sentence=Sentence(text, level))


def test_a_machine_in_no_cluster_gets_the_commands_to_begin_with() -> None:
    sentence = of_all(AllFacts("", [machine("here", is_here=True)]))
    assert sentence.text == "This machine is in no cluster."
    assert sentence.commands == ("covey demo", "covey init", "covey enroll")


def test_a_cluster_in_which_nobody_answers_says_how_others_join() -> None:
    here = machine("here", is_here=True)
    assert of_all(AllFacts("home", [here])).text == "No other machine has answered yet."
    assert of_all(AllFacts("home", [here], has_searched=False)).text == "Looking for other machines ..."
    refused = machine("south", state="refused", problem="another secret")
    assert of_all(AllFacts("home", [here, refused])).why == ("south: another secret",)


def test_machines_without_a_run_are_ready_with_what_they_have() -> None:
    machines = [
        machine("here", is_here=True, cores=8),
        machine("attic", cores=16, gpus=(GpuSeen("one"), GpuSeen("two"))),
    ]
    sentence = of_all(AllFacts("home", machines, agents=2))
    assert sentence.text == "2 machines are ready: 24 cores, 2 GPUs."
    assert sentence.commands == ("covey run --on all train.py",)


def test_agents_that_do_not_allow_this_machine_are_told_with_its_id() -> None:
    sentence = of_all(AllFacts("home", [machine("attic")], agents=1, agents_refuse=True, own_id="abcd"))
    assert sentence.text == "These machines run programs, but not for this one."
    assert sentence.commands == ("covey up --allow abcd",)


def test_a_machine_that_asks_to_join_is_named_and_who_may_approve_it() -> None:
    asks = AllFacts("home", [machine("attic")], applicants=["shed"], can_approve=True)
    assert of_all(asks).text == "shed asks to join."
    elsewhere = AllFacts("home", [machine("attic")], applicants=["shed", "barn"], approver="north")
    assert of_all(elsewhere).text == "shed, barn ask to join. Machines are approved on north."


def test_the_worst_run_speaks_for_all_and_ended_runs_do_not() -> None:
    runs = [run_of("fine", "well"), run_of("warning", "late"), run_of("error", "old", "ended")]
    assert of_all(AllFacts("home", [], runs)).text == "late"
    assert of_all(AllFacts("home", [], runs, applicants=["shed"])).text == "late"
    assert of_all(AllFacts("home", [], runs[:1], applicants=["shed"])).text.startswith("shed asks")
    assert of_all(AllFacts("home", [], runs[:1])).text == "well"


def test_a_sentence_has_its_reasons_and_commands_a_line_each() -> None:
    assert list(lines(Sentence("It is late.", "warning", ("rank 1 sleeps",), ("covey trace",)))) == [
        "It is late.",
        "  because rank 1 sleeps",
        "  $ covey trace",
    ]
