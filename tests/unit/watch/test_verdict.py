"""The one sentence about a run or a cluster: a test for each row of the table of states."""

from __future__ import annotations

import math
from typing import Any

from covey.watch.happenings import RunEvent
from covey.watch.overview import GpuSeen, MachineSeen, RankSeen, RunSeen, Sentence
from covey.watch.verdict import AllFacts, RunFacts, of_all, of_run
from covey.watch.waits import LinkLoad, LongOperation, SlowLink

NAMES = {"n": "north", "a": "attic"}


def rank(number: int, machine: str = "n", **more: Any) -> RankSeen:
    return RankSeen(number, machine, 1000 + number, **more)


def said(**facts: Any) -> Sentence:
    return of_run(RunFacts("train", facts.pop("state", "running"), machines=NAMES, **facts))


def test_a_rank_that_others_wait_for_is_named_with_its_machine_and_what_it_does() -> None:
    waiting = [rank(r, state="waiting", waits_for=(5,), sequence=9, operation="all_reduce") for r in range(3)]
    late = rank(5, "a", state="late", sequence=7, operation_age=12.4)
    sentence = said(ranks=[*waiting, late], waited={0: 11.0, 1: 12.0, 2: 9.0})
    assert sentence.text == "Rank 5 (attic) is 2 operations behind; 3 ranks have waited 12 s for it."
    assert sentence.level == "warning"
    assert sentence.why[0] == "rank 5 has been between operations for 12 s"
    assert "rank 0 is in all_reduce, operation 9" in sentence.why
    assert sentence.commands == ("covey trace train",)


def test_of_several_late_ranks_the_one_that_most_wait_for_is_named() -> None:
    ranks = [
        rank(0, state="late", sequence=1),
        rank(1, state="late", sequence=1),
        rank(2, state="waiting", waits_for=(1,), sequence=2),
    ]
    assert said(ranks=ranks).text.startswith("Rank 1 is 1 operation behind; 1 rank has waited")


def test_a_stopped_rank_is_told_from_a_late_one_and_can_be_continued() -> None:
    sentence = said(ranks=[rank(0, state="waiting", waits_for=(1,)), rank(1, state="stopped")], waited={0: 3.0})
    assert sentence.text == "Rank 1 is stopped (SIGSTOP); 1 rank has waited 3 s for it."
    assert sentence.commands == ("kill -CONT 1001",)


def test_a_silent_rank_is_named_with_what_others_say_of_it() -> None:
    sentence = said(ranks=[rank(0), rank(1, "a", state="silent", age=7.0, reason="its machine is not heard")])
    assert sentence.text == "Rank 1 (attic) has not answered for 7 s."
    assert sentence.why == ("its machine is not heard",)
    both = [rank(1, state="silent", age=4.0), rank(2, "a", state="silent", age=7.0)]
    waiting = rank(0, state="waiting", waits_for=(1, 2))
    assert said(ranks=[waiting, *both], waited={0: 5.0}).text == (
        "Rank 1 (north) and rank 2 (attic) have not answered for 7 s; 1 rank has waited 5 s for them."
    )
    many = said(ranks=[rank(number, state="silent", age=7.0) for number in range(9)])
    assert many.text == "Ranks 0, 1, 2, 3, 4, 5, 6, 7 and 8 have not answered for 7 s."


def test_a_loss_is_told_for_a_minute_with_the_reason_and_what_is_left() -> None:
    event = RunEvent(100.0, "lost", 0, (5,), "rank 5 (attic)", "no answer", 410.0)
    ranks = [*(rank(r) for r in range(5)), rank(5, "a", state="lost")]
    sentence = said(ranks=ranks, change=event, generation=0, size=5, now=120.0, has_reports=True)
    assert (sentence.level, sentence.text) == (
        "warning",
        "Rank 5 (attic) was lost 20 s ago: no answer; the run continued after 410 ms with 5 ranks.",
    )
    assert said(ranks=ranks, change=event, now=161.0, has_reports=True).text == "5 ranks at work."
    recovering = said(ranks=ranks, change=event, generation=0, is_recovering=True, now=101.0)
    assert recovering.text == "Rank 5 (attic) was lost 1 s ago: no answer; the run recovers."
    two = RunEvent(100.0, "lost", 0, (4, 5), "ranks 4 and 5")
    later = said(ranks=ranks, change=two, generation=1, size=3, now=101.0)
    assert later.text == "Ranks 4 and 5 were lost 1 s ago; the run continues with 3 ranks."


def test_a_newcomer_is_told_with_its_rank_and_whether_it_has_the_state() -> None:
    event = RunEvent(100.0, "joined", 2, (3,), "rank 3 (attic)")
    sentence = said(change=event, generation=2, size=4, has_state=True, now=102.0)
    assert (sentence.level, sentence.text) == ("note", "Rank 3 (attic) joined 2 s ago; the run continues with 4 ranks.")
    assert sentence.why[1] == "it has got the state of the run"
    assert len(said(change=event, now=102.0).why) == 1
    left = RunEvent(100.0, "left", 0, (3,), "rank 3 (attic)")
    assert said(change=left, size=3, now=102.0).text.startswith("Rank 3 (attic) left 2 s ago; the run continued with 3")
    waiting = said(ranks=[rank(0), rank(-1, "a", state="joining")], has_reports=True)
    assert waiting.text == "attic waits to join the run."


def test_what_goes_on_is_told_before_what_has_happened_and_news_first() -> None:
    event = RunEvent(100.0, "lost", 0, (5,), "rank 5", "no answer")
    ranks = [rank(0), rank(1, "a")]
    assert said(ranks=ranks, change=event, slow=(1, 0.5), now=103.0).text.startswith("Rank 5 was lost 3 s ago")
    assert said(ranks=ranks, change=event, slow=(1, 0.5), now=113.0).text.startswith("Rank 1 (attic) is slower")
    late = [rank(0, state="waiting", waits_for=(1,), sequence=8), rank(1, "a", state="late", sequence=7)]
    assert said(ranks=late, change=event, now=103.0).text.startswith("Rank 1 (attic) is 1 operation behind")


def test_a_link_that_has_become_slow_is_a_warning_and_one_that_always_was_a_note() -> None:
    ranks = [rank(0), rank(1, "a")]
    load = LinkLoad("a", "n", 2.5e5, 0.97, 4e5)
    fell = said(ranks=ranks, slow_link=SlowLink(load, 4e7))
    assert (fell.level, fell.text) == (
        "warning",
        "The link from attic to north has become slow: it carries 2 Mbit/s, before 320 Mbit/s; the ranks wait for it.",
    )
    assert fell.why[0] == "attic has something to send to it 97% of the time"
    for usual in (3e5, None):
        sentence = said(ranks=ranks, slow_link=SlowLink(load, usual))
        assert (sentence.level, sentence.text) == (
            "note",
            "The ranks wait for the network most of the time: the link from attic to north carries 2 Mbit/s.",
        )
    gone = LinkLoad("x", "n", 2.5e5, 0.97, 4e5)
    assert "from another machine to north" in said(ranks=ranks, slow_link=SlowLink(gone, None)).text


def test_an_operation_that_all_are_in_says_whether_anything_moves() -> None:
    ranks = [rank(0), rank(1)]
    stuck = said(ranks=ranks, long=LongOperation(0, 6.0), moved=0.0)
    assert (stuck.level, stuck.text) == (
        "warning",
        "All 2 ranks have been in one all_reduce for 6 s, and nothing moves.",
    )
    moves = said(ranks=ranks, long=LongOperation(0, 6.0), moved=1e6)
    assert (moves.level, moves.text) == ("note", "All 2 ranks have been in one all_reduce for 6 s; 8 Mbit/s move.")
    assert said(ranks=ranks, long=LongOperation(0, 3.0), moved=None).text.endswith("for 3 s.")


def test_a_failed_run_says_the_whole_error() -> None:
    sentence = said(state="failed", fault="PeerLostError: rank 2 is gone", fault_rank=1, ranks=[rank(1)])
    assert (sentence.text, sentence.level) == ("The run train failed: PeerLostError: rank 2 is gone", "error")
    assert sentence.why == ("rank 1: PeerLostError: rank 2 is gone",)
    assert "covey trace" in sentence.commands


def test_a_run_that_ended_is_nothing_to_worry_about() -> None:
    assert said(state="ended").text == "The run train has ended."
    assert said(state="ended", outcome="succeeded").text == "The run train has ended: succeeded."
    failed = said(state="failed", outcome="exit code 1: rank 2 was killed by SIGKILL")
    assert failed.text == "The run train failed: exit code 1: rank 2 was killed by SIGKILL"


def test_a_run_that_waits_says_what_its_nodes_say_and_which_troubles_they_met() -> None:
    sentence = said(state="waiting", waits=["1 of 2 nodes so far", "south: speaks protocol 4"])
    assert sentence == Sentence("1 of 2 nodes so far", "warning", ("south: speaks protocol 4",), ("covey doctor",))
    assert said(state="waiting").text == "The run waits for its members"


def test_a_loss_that_became_nan_is_said() -> None:
    assert said(reports={"loss": math.nan}, step=7).text == "loss is nan at step 7."
    assert said(reports={"loss": math.inf}, step=None).text == "loss is inf."


def test_a_slow_rank_is_named_without_alarm() -> None:
    sentence = said(ranks=[rank(0), rank(1, "a")], slow=(1, 0.42))
    assert sentence.text == "Rank 1 (attic) is slower than the others, which wait for it 42% of their time."
    assert sentence.level == "note"
    timed = said(ranks=[rank(0, compute=0.05), rank(1, "a", compute=0.15)], slow=(1, 0.42), step=3)
    assert timed.why[0] == "it computes 150 ms in a step, the others 50 ms"


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
