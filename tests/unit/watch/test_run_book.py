"""What a collector concludes from round to round: rates, states, reports, and 256 ranks."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import msgspec

from covey.watch.asking import HeardProcess, LookRound, MachineHeard, RunEnd
from covey.watch.books import BOOK_RUNS_LIMIT, RunBooks
from covey.wire.messages import Tell
from covey.wire.progress import Doubt, GroupProgress, PeerProgress, RankProgress, Readings, ReportRow
from covey.wire.reports import PastEvent

if TYPE_CHECKING:
    from covey.watch.overview import Overview, RunSeen

SECOND = 10**9


def progress(rank: int, now: float = 0.0, *, sequence: int = 1, busy: float = 0.0, **more: Any) -> RankProgress:
    """Return what a rank tells `now` seconds after the start, of which it spent `busy` in operations."""
    group = more.pop("group", None) or GroupProgress("run", rank, 4, sequence, 0, False, 1000, int(busy * SECOND))
    plain: dict[str, Any] = {"sent": 0, "received": 0, "coded": 0, "plain": 0} | {
        key: more.pop(key) for key in ("sent", "received", "coded", "plain") if key in more
    }
    told = RankProgress(
        run="train", run_id=b"12345678", rank=rank, generation=more.pop("generation", 0), view=0, live=4, size=4,
        began=50.0, taken_ns=SECOND + int(now * SECOND), spent_ns=int(busy * SECOND), pid=1000 + rank, host="north",
        version="0.6", groups=(group,), **plain,
    )  # fmt: skip
    return msgspec.structs.replace(told, **more) if more else told


def heard(told: RankProgress | None, rank: int, now: float, machine: str = "n", **more: Any) -> HeardProcess:
    at = 100.0 + now
    return HeardProcess(f"p{rank}", "train", "train:1", machine, 1000 + rank, "0.6", at, at, told, **more)


class Watch:
    """An imagined collector, with its clock."""

    def __init__(self) -> None:
        self.books = RunBooks("home", own_id="n")

    def look(self, now: float, *each: HeardProcess, **more: Any) -> Overview:
        machines = (MachineHeard("n", "north", is_here=True), MachineHeard("a", "attic"))
        return self.books.overview([LookRound(1000.0 + now, 100.0 + now, "home", each, machines, **more)])


def test_rates_are_differences_of_two_answers_of_one_process() -> None:
    watch = Watch()
    first = watch.look(0.0, heard(progress(0, 0.0, sent=1000), 0, 0.0))
    assert first.runs[0].ranks[0].sent_per_second is None, "not known, and not 0"
    peers = (PeerProgress(1, 2000, 0, "tcp", "wired", 0.001, 1e8),)
    second = watch.look(
        2.0, heard(progress(0, 2.0, sent=5000, received=400, busy=0.5, plain=1000, coded=250, peers=peers), 0, 2.0)
    )
    (rank,) = second.runs[0].ranks
    assert (rank.sent_per_second, rank.received_per_second) == (2000.0, 200.0)
    assert (rank.compute, rank.sync) == (0.75, 0.25), "of the last second"
    assert rank.saved == 0.75
    assert second.runs[0].step_seconds is None, "the program reports no steps"
    assert second.serial == first.serial + 1


def test_steps_that_the_program_reports_have_their_own_parts() -> None:
    watch = Watch()
    rows = [ReportRow(1000.0, 7, {"loss": 2.0 + rank, "samples": 32.0}, 0.3, 0.1) for rank in range(2)]
    watch.look(0.0, *(heard(progress(rank, report=rows[rank], reported=7), rank, 0.0) for rank in range(2)))
    run = watch.look(1.0, *(heard(progress(r, 1.0, report=rows[r], reported=8), r, 1.0) for r in range(2))).runs[0]
    assert (run.step, run.compute_seconds, run.sync_seconds, run.step_seconds) == (7, 0.3, 0.1, 0.4)
    assert (run.reports["loss"], run.reported_by) == (2.5, "mean of 2 ranks")
    assert run.samples_per_second == 64 / 0.4
    only = watch.look(2.0, heard(progress(0, 2.0), 0, 2.0), heard(progress(1, 2.0, report=rows[1]), 1, 2.0)).runs[0]
    assert (only.reports["loss"], only.reported_by) == (3.0, "rank 1")
    assert [moment.reports.get("loss") for moment in watch.books.history(run.id, 0.0)] == [2.5, 2.5, 3.0]


def test_a_nan_of_one_rank_is_not_hidden_in_a_mean() -> None:
    rows = [ReportRow(1000.0, 7, {"loss": value}) for value in (1.0, math.nan, 3.0)]
    run = Watch().look(0.0, *(heard(progress(r, report=rows[r]), r, 0.0) for r in range(3))).runs[0]
    assert math.isnan(run.reports["loss"])
    assert run.sentence.text == "loss is nan at step 7."


def test_a_lost_rank_keeps_its_row_and_its_reason_also_when_it_says_goodbye_later() -> None:
    watch = Watch()
    watch.look(0.0, *(heard(progress(rank), rank, 0.0) for rank in range(3)))
    event = PastEvent("lost", 1001.0, 0, 1, (1,), ("rank 1",), {"detect": 0.0, "redo": 41.0}, "its process has exited")
    doubt = Doubt(1, "excluded", 0.5, "its process has exited")
    run = watch.look(
        1.0, heard(progress(0, 1.0, doubts=(doubt,), events=(event,)), 0, 1.0), heard(progress(2, 1.0), 2, 1.0)
    ).runs[0]
    assert [(rank.rank, rank.state) for rank in run.ranks] == [(0, "active"), (1, "lost"), (2, "active")]
    assert run.ranks[1].reason == "its process has exited"
    assert run.sentence.text.startswith(
        "Rank 1 was lost 0 ms ago: its process has exited; the run continued after 41 ms"
    )
    later = Doubt(1, "left", 0.1, "it has left")
    run = watch.look(2.0, heard(progress(0, 2.0, doubts=(later,), events=(event,)), 0, 2.0)).runs[0]
    assert run.ranks[1].state == "lost"
    assert len(run.happenings) == 1, "another rank, or the same, told it again"


def test_an_event_that_is_told_again_with_its_recovery_replaces_the_first() -> None:
    watch = Watch()
    begun = PastEvent("lost", 1000.0, 0, 1, (1,), (), {"detect": 0.0}, "gone")
    done = PastEvent("lost", 1000.0, 0, 1, (1,), (), {"detect": 0.0, "redo": 77.0}, "gone")
    watch.look(0.0, heard(progress(0, events=(begun,)), 0, 0.0))
    run = watch.look(1.0, heard(progress(0, 1.0, events=(done,)), 0, 1.0)).runs[0]
    assert [event.text for event in run.happenings] == ["rank 1 was lost: gone; the run continued after 77 ms"]


def test_why_a_rank_was_lost_comes_from_those_that_know() -> None:
    """The rank that tells of a loss may know it from the others only."""
    watch = Watch()
    watch.look(0.0, *(heard(progress(rank), rank, 0.0) for rank in range(3)))
    event = PastEvent("lost", 1000.0, 0, 1, (1,), ("rank 1 (north)",), {}, "other members have given it up")
    doubts = (Doubt(1, "excluded", 0.5, "its process is stopped"),)
    run = watch.look(
        1.0, heard(progress(0, 1.0, events=(event,)), 0, 1.0), heard(progress(2, 1.0, doubts=doubts), 2, 1.0)
    ).runs[0]
    assert run.happenings[0].text == "rank 1 (north) was lost: its process is stopped"


def test_times_of_events_are_those_of_this_machine() -> None:
    watch = Watch()
    ahead = PastEvent("lost", 4600.0, 0, 1, (1,), ("rank 1",), {}, "gone")
    run = watch.look(0.0, heard(progress(0, events=(ahead,)), 0, 0.0, clock_offset=3600.0)).runs[0]
    assert run.happenings[0].at == 1000.0
    assert run.sentence.text.startswith("Rank 1 was lost 0 ms ago")


def test_a_newcomer_waits_is_let_in_and_gets_the_state() -> None:
    watch = Watch()
    asks = Tell("train", "joining", b"", b"", 0.0, ())
    first = watch.look(0.0, heard(progress(0), 0, 0.0), heard(None, 1, 0.0, machine="a", tell=asks)).runs[0]
    assert [(rank.rank, rank.state, rank.machine) for rank in first.ranks] == [(0, "active", "n"), (-1, "joining", "a")]
    events = (
        PastEvent("joined", 1001.0, 1, 0, (1,), ("attic-abcd",), {}, ""),
        PastEvent("restored", 1001.5, 1, 0, (1,), (), {}, ""),
    )
    run = watch.look(
        2.0,
        heard(progress(0, 2.0, generation=1, events=events), 0, 2.0),
        heard(progress(1, 2.0, generation=1), 1, 2.0, machine="a"),
    ).runs[0]
    assert run.sentence.text == "Rank 1 (attic) joined 1 s ago; the run continues with 4 ranks."
    assert "it has got the state of the run" in run.sentence.why
    assert [each.text for each in run.happenings] == [
        "rank 1 (attic) joined the run",
        "rank 1 got the state of the run",
    ]


def test_lanes_and_leaders_are_no_news() -> None:
    events = tuple(
        PastEvent(kind, 1000.0, 0, 0, (0,), ("n-abcd",), {}, "x") for kind in ("lane", "leader", "generation")
    )
    assert Watch().look(0.0, heard(progress(0, events=events), 0, 0.0)).runs[0].happenings == ()


def test_a_rank_that_does_not_answer_is_silent_or_stopped_as_the_kernel_says() -> None:
    watch = Watch()
    group = GroupProgress("run", 0, 4, 2, 0, True, 4 * SECOND, 0)
    watch.look(0.0, *(heard(progress(rank), rank, 0.0) for rank in range(2)))
    quiet = watch.look(4.0, heard(progress(0, 4.0, group=group), 0, 4.0), heard(None, 1, 4.0)).runs[0]
    assert [(rank.state, rank.waits_for) for rank in quiet.ranks] == [("waiting", (1,)), ("silent", ())]
    assert "has not answered for 4 s; 1 rank has waited 4 s for it" in quiet.sentence.text
    stopped = watch.look(5.0, heard(progress(0, 5.0, group=group), 0, 5.0), heard(None, 1, 5.0, process="stopped"))
    assert stopped.runs[0].ranks[1].state == "stopped"
    well = watch.look(6.0, *(heard(progress(rank, 6.0), rank, 6.0) for rank in range(2))).runs[0]
    assert [rank.state for rank in well.ranks] == ["active", "active"]


def test_a_run_is_over_when_its_source_says_so_and_failed_if_it_knows_an_error() -> None:
    watch = Watch()
    watch.look(0.0, heard(progress(0), 0, 0.0))
    over = watch.look(1.0, ended={"train:1": RunEnd(outcome="succeeded")}).runs[0]
    assert (over.state, over.sentence.text, over.can_stop) == ("ended", "The run train has ended: succeeded.", False)
    for end in (RunEnd("PeerLostError: rank 2 is gone"), RunEnd(outcome="exit code 1", has_failed=True)):
        watch = Watch()
        watch.look(0.0, heard(progress(0), 0, 0.0))
        assert watch.look(1.0, ended={"train:1": end}).runs[0].state == "failed"
    watch = Watch()
    watch.look(0.0, heard(progress(0), 0, 0.0))
    assert watch.look(3.0).runs[0].state == "running", "a round without answers is no end"
    assert watch.look(5.0).runs[0].state == "ended"


def test_a_new_generation_numbers_the_ranks_anew_and_the_series_goes_on() -> None:
    watch = Watch()
    row = ReportRow(1000.0, 7, {"loss": 2.0})
    watch.look(0.0, *(heard(progress(rank, report=row), rank, 0.0) for rank in range(3)))
    row = ReportRow(1001.0, 8, {"loss": 1.0})
    run = watch.look(
        1.0, *(heard(progress(rank, 1.0, generation=1, report=row), number, 1.0) for rank, number in ((0, 2), (1, 0)))
    ).runs[0]
    assert [(rank.rank, rank.pid) for rank in run.ranks] == [(0, 1000), (1, 1001)]
    assert [moment.step for moment in watch.books.history(run.id, 0.0)] == [7, 8]


MEGABYTE = 1_000_000


def over_links(watch: Watch, now: float, moved: int, busy: float, sharing: float, **more: Any) -> RunSeen:
    """Look at two ranks on two machines that have moved so many bytes to each other, in so many seconds of sending."""
    peers = [
        (PeerProgress(1, 0, 0, "tcp", "wireless", 0.004, -1.0, False, moved, int(busy * 1e6)),),
        (PeerProgress(0, 0, 0, "tcp", "wired", -1.0, -1.0, True, 2 * moved, int(busy * 1e6)),),
    ]
    told = [progress(rank, now, sequence=int(now), busy=sharing, peers=peers[rank]) for rank in range(2)]
    return watch.look(now, heard(told[0], 0, now), heard(told[1], 1, now, machine="a"), **more).runs[0]


def test_links_between_machines_have_both_directions_and_say_what_is_not_known() -> None:
    watch = Watch()
    run = over_links(watch, 0.0, 0, 0.0, 0.0)
    assert [link.bytes_per_second for link in run.links] == [None, None]
    assert [link.sent_per_second for link in run.links] == [None, None]
    over_links(watch, 1.0, MEGABYTE, 0.1, 0.2)
    run = over_links(watch, 2.0, 2 * MEGABYTE, 0.2, 0.4)
    one, other = run.links
    assert (one.source, one.target, one.medium, one.bytes_per_second) == ("a", "n", "cable", 2e7)
    assert (one.sent_per_second, one.round_trip, one.relay) == (2e6, None, "a relay")
    assert (other.source, other.target, other.medium, other.bytes_per_second) == ("n", "a", "Wi-Fi", 1e7)
    assert (other.sent_per_second, other.round_trip) == (1e6, 0.004)


def test_what_ranks_have_measured_is_shown_of_a_link_that_carries_nothing() -> None:
    run = over_links(Watch(), 0.0, 0, 0.0, 0.0, speeds={("n", "a"): 5e6, ("n", "x"): 1.0})
    assert {(link.source, link.target): link.bytes_per_second for link in run.links} == {
        ("a", "n"): None,
        ("n", "a"): 5e6,
    }


def test_a_link_that_falls_to_a_hundredth_is_named_within_three_rounds_and_not_once_it_is_well() -> None:
    watch = Watch()
    moved, busy, sharing, said = 0, 0.0, 0.0, []
    for second in range(40):
        is_slow = 20 <= second < 30
        moved += MEGABYTE // 10 if is_slow else 10 * MEGABYTE
        busy += 1.0 if is_slow else 0.2
        sharing += 0.95 if is_slow else 0.3
        said.append(over_links(watch, float(second + 1), moved, busy, sharing).sentence.text)
    named = [second for second, text in enumerate(said) if "has become slow" in text]
    assert named[0] in (20, 21, 22)
    assert 29 <= named[-1] <= 31
    assert "The link from north to attic has become slow: it carries 0.8 Mbit/s, before 400 Mbit/s" in said[25]
    assert said[10] == said[39] == "2 ranks on 2 machines at work."


def test_a_view_that_has_just_begun_knows_what_a_link_carried_before() -> None:
    watch = Watch()
    for second in range(3):
        peers = (PeerProgress(1, 0, 0, "tcp", "wired", -1.0, 4e7, False, 10**9 + second * 10**5, 10**7 * (second + 1)),)
        told = progress(0, second + 1.0, sequence=second, busy=second + 0.9, peers=peers)
        other = heard(progress(1, second + 1.0, sequence=second, busy=second + 0.9), 1, second + 1.0, machine="a")
        run = watch.look(second + 1.0, heard(told, 0, second + 1.0), other).runs[0]
    assert run.sentence.text.startswith(
        "The link from north to attic has become slow: it carries 0.8 Mbit/s, before 320"
    )


def test_a_rank_that_becomes_slow_is_named_within_three_rounds_and_not_once_it_is_well() -> None:
    watch, said, sharing = Watch(), list[str](), [0.0] * 4
    for second in range(40):
        is_slow = 20 <= second < 30
        sharing = [spent + (0.02 if rank == 2 else 0.6) * (1 if is_slow else 0.1) for rank, spent in enumerate(sharing)]
        told = [progress(rank, float(second + 1), sequence=8 * second, busy=sharing[rank]) for rank in range(4)]
        run = watch.look(float(second + 1), *(heard(each, rank, second + 1.0) for rank, each in enumerate(told))).runs[
            0
        ]
        said.append(run.sentence.text)
    named = [second for second, text in enumerate(said) if "is slower than the others" in text]
    assert named[0] in (20, 21, 22)
    assert 29 <= named[-1] <= 32
    assert named == list(range(named[0], named[-1] + 1)), "it does not come and go"
    assert said[25].startswith("Rank 2 is slower than the others, which wait for it 58% of their time")


def test_where_steps_are_told_a_slow_rank_is_named_in_the_second_round_and_one_long_step_is_no_word() -> None:
    for slow_rounds in (1, 5):
        watch, said, busy = Watch(), list[str](), [0.0] * 3
        for second in range(20):
            is_slow = 10 <= second < 10 + slow_rounds
            computes = [0.15 if is_slow and rank == 1 else 0.05 for rank in range(3)]
            step = max(computes) + 0.015
            busy = [spent + (step - compute) / step for spent, compute in zip(busy, computes, strict=True)]
            rows = [ReportRow(1000.0, second, {}, compute, step - compute) for compute in computes]
            told = [
                progress(rank, second + 1.0, sequence=8 * second, busy=busy[rank], report=rows[rank])
                for rank in range(3)
            ]
            look = watch.look(second + 1.0, *(heard(each, rank, second + 1.0) for rank, each in enumerate(told)))
            said.append(look.runs[0].sentence.text)
        named = [second for second, text in enumerate(said) if "is slower than the others" in text]
        assert named == ([] if slow_rounds == 1 else [11, 12, 13, 14, 15])


def test_steps_of_many_seconds_are_judged_by_several_of_them() -> None:
    watch = Watch()
    for second in range(12):
        in_step = second % 4  # three seconds of computing, one in an operation; at first rank 1 is a moment behind
        told = [
            progress(
                rank, second + 1.0, sequence=1 + second // 4, busy=second // 4 + max(0.0, in_step - 2.0 - rank * 0.5)
            )
            for rank in range(2)
        ]
        run = watch.look(second + 1.0, *(heard(each, rank, second + 1.0) for rank, each in enumerate(told))).runs[0]
        assert "slower" not in run.sentence.text, second


def test_two_hundred_and_fifty_six_ranks_are_told_in_a_fraction_of_a_second() -> None:
    watch = Watch()
    began = time.process_time()
    for second in range(5):
        now = float(second)
        told = []
        for rank in range(256):
            is_late = rank == 200
            group = GroupProgress("run", rank, 256, 50 - is_late, 0, not is_late, int((now + 1) * SECOND), 0)
            peers = tuple(
                PeerProgress(r, second, second, "tcp", "wired", 0.001, 1e8, False, second, second) for r in range(16)
            )
            told.append(heard(progress(rank, now, group=group, peers=peers), rank, now, machine=f"m{rank // 8}"))
        run = watch.look(now, *told).runs[0]
    assert time.process_time() - began < 5.0, "five rounds"
    assert run.sentence.text.startswith("Rank 200 is 1 operation behind; 255 ranks have waited")
    assert [rank.rank for rank in run.ranks] == list(range(256))
    assert run.ranks[0].waits_for == (200,)


def test_many_runs_are_forgotten_in_order_and_names_that_repeat_have_ids_of_their_own() -> None:
    watch = Watch()
    for number in range(BOOK_RUNS_LIMIT + 20):
        at = 100.0 + 10 * number
        each = HeardProcess(f"p{number}", "train", f"train:{number:08d}", "n", 1, "", at, at, progress(0))
        overview = watch.look(10.0 * number, each)
    assert len(overview.runs) <= BOOK_RUNS_LIMIT
    assert len({run.id for run in overview.runs}) == len(overview.runs)
    assert sum(run.state == "running" for run in overview.runs) == 1


def test_machines_have_what_was_read_and_none_for_the_rest() -> None:
    readings = Readings(8, 0.5, 2**30, 2**33, None)
    machines = (MachineHeard("n", "north", is_here=True, readings=readings), MachineHeard("a", "attic", memory=2**34))
    books = RunBooks("home", own_id="n")
    overview = books.overview([LookRound(1000.0, 100.0, "home", (), machines)])
    attic, north = overview.machines
    assert (north.cores, north.processor, north.memory_used, north.temperature) == (8, 0.5, 2**30, None)
    assert (attic.cores, attic.processor, attic.memory_used, attic.memory_total) == (None, None, None, 2**34)
    gone = books.overview([LookRound(1010.0, 110.0, "home", (), machines[:1])])
    assert [(machine.name, machine.state) for machine in gone.machines] == [("attic", "silent"), ("north", "ready")]
    assert gone.machines[0].age == 10.0


def test_machines_are_called_by_their_host_names_unless_two_have_the_same() -> None:
    names = {"1": "north-abcd", "2": "attic-efgh", "3": "attic-ijkl", "4": "here"}
    machines = tuple(MachineHeard(id, name) for id, name in names.items())
    overview = RunBooks("home", own_id="1").overview([LookRound(1000.0, 100.0, "home", (), machines)])
    assert {machine.id: machine.name for machine in overview.machines} == {
        "1": "north",
        "2": "attic-efgh",
        "3": "attic-ijkl",
        "4": "here",
    }
