"""What a machine keeps of runs: output by rank, bounded, private; how each run ended."""

from __future__ import annotations

import multiprocessing
import os
import queue
import stat
from pathlib import Path
from typing import Any

import pytest
from tests.support.waiting import DEADLINE

from covey.base.errors import ConfigError
from covey.base.settings import SETTINGS
from covey.net.host import folders, saved_output, saved_runs
from covey.net.host.run_notes import note_checkpoint, note_members
from covey.net.host.saved_output import LOG_HEADER_BYTES, SavedOutput, read_log, tail_of
from covey.net.host.saved_runs import OutputTerms, RunSummary, SavedRun, find_past_run, past_runs, whole_runs
from covey.runtime.metrics import inspection
from covey.watch.far_output import MachineOutput
from covey.watch.output import OutputReader, RunFollower
from covey.watch.past import newest_rows, row_of
from covey.wire import messages
from covey.wire import reports as wire


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COVEY_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def a_run(name: str = "train", began: float = 1000.0, processes: int = 4, **bounds: int) -> SavedRun:
    record = RunSummary(name=name, processes=processes, pid=os.getpid(), began=began, machine="north")
    return SavedRun(record, **{"output_bytes": 1 << 20, "total_bytes": 16 << 20, **bounds})


def lines_of(name: str = "train") -> list[tuple[int | None, str]]:
    run = find_past_run(name)
    assert run is not None
    follower = RunFollower(run)
    return [(line.rank, line.text) for line in [*follower.whole(), *follower.rest()]]


def kept(name: str) -> list[RunFollower]:
    """Return what this machine has kept of a run, as views read it."""
    run = find_past_run(name)
    return [] if run is None else [RunFollower(run, only_tail=True)]


def test_output_of_all_ranks_comes_back_by_time_with_rank_and_stream() -> None:
    run = a_run()
    for step in range(50):
        for rank in range(4):
            run.append(rank, rank, 1 + rank % 2, b"step %d of rank %d\n" % (step, rank))
    run.append(2, 2, 1, b"no end")
    assert lines_of() == [(rank, f"step {step} of rank {rank}") for step in range(50) for rank in range(4)] + [
        (2, "no end")
    ]
    found = find_past_run("train")
    assert found is not None
    assert {line.rank for line in RunFollower(found).whole() if line.is_error} == {1, 3}


def test_everything_is_private(own_home: Path) -> None:
    run = a_run()
    run.append(0, 0, 1, b"secret\n")
    for path in [own_home, *own_home.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def test_a_rank_keeps_only_the_latest_and_readers_hear_how_many_lines_are_gone() -> None:
    run = a_run(output_bytes=64 << 10)
    for number in range(20_000):
        run.append(0, 0, 1, b"line %05d of many\n" % number)
        if number % 1000 == 0:
            run.append(1, 1, 1, b"rank 1 says %d\n" % number)
    found = find_past_run("train")
    assert found is not None
    follower = RunFollower(found)
    lines = list(follower.whole())
    kept = [line.text for line in lines if line.rank == 0]
    assert kept == [f"line {number:05d} of many" for number in range(20_000 - len(kept), 20_000)]
    assert follower.gone == 20_000 - len(kept)
    assert len([line for line in lines if line.rank == 1]) == 20, "a chatty rank takes nothing from another one"
    assert saved_output.log_bytes(found.folder / "0") <= 64 << 10


def test_the_oldest_output_goes_first_and_what_goes_on_stays() -> None:
    ended = [a_run(f"run-{number}", 1000.0 + number, total_bytes=1 << 20) for number in range(3)]
    for run in ended:
        for rank in range(3):
            run.append(rank, rank, 1, b"x" * 100_000 + b"\n")
    ended[1].end(0, "")
    ended[2].end(3, "rank 1 exited with code 3")
    saved_runs.tidy(700_000)
    sizes = {run.record.name: sum(saved_output.log_bytes(log) for _, log in run.logs()) for run in past_runs()}
    assert sizes["run-1"] == 0, "the oldest that has ended"
    assert sizes["run-0"] > 300_000, "goes on"
    assert sizes["run-2"] > 300_000, "fits"
    assert [run.outcome() for run in past_runs()] == [
        "running",
        "succeeded",
        "exit code 3: rank 1 exited with code 3",
    ]


def test_only_so_many_runs_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_runs, "SAVED_RUNS_LIMIT", 5)
    for number in range(9):
        a_run(f"run-{number}", 1000.0 + number).end(0, "")
    saved_runs.tidy(1 << 30)
    assert [run.record.name for run in past_runs()] == [f"run-{number}" for number in range(4, 9)]


def test_a_run_on_several_machines_and_the_share_of_this_one_are_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def begun(name: str, began: float, *machines: str, by_agent: bool = False) -> SavedRun:
        record = RunSummary(
            name=name, cluster="home", machine="north", machines=machines or ("north",), pid=os.getpid(), began=began,
            processes=2 * len(machines) or 2, by_agent=by_agent,
        )  # fmt: skip
        return SavedRun(record, output_bytes=0, total_bytes=0)

    detached = begun("train", 800.0, by_agent=True)
    detached.end(0, "")
    by_hand, beside = begun("train", 900.0), begun("train", 901.0, by_agent=True)
    share, whole = begun("train", 1000.0, by_agent=True), begun("train", 1000.2, "north-6zo7", "south-jjej")
    begun("other", 1001.0, by_agent=True)
    begun("other", 2000.0, "north-6zo7", "south-jjej").end(0, "")
    monkeypatch.setenv("COVEY_KEPT_FOLDER", str(share.folder))
    note_members(3, ["north", "south"])
    note_checkpoint("/models/7")
    found = whole_runs()
    assert [(run.record.name, run.record.began) for run in found] == [
        ("train", 800.0), ("train", 900.0), ("train", 901.0), ("train", 1000.2), ("other", 1001.0), ("other", 2000.0)
    ]  # fmt: skip
    assert found[3].share is not None
    assert found[3].share.id == share.folder.name
    assert found[3].members() == (4, ("north", "south"))
    assert found[3].checkpoints() == ["/models/7"]
    assert found[1].members() == (2, ("north",))
    row = row_of(found[3])
    assert (row["ranks"], row["machines"], row["state"], row["logs"]) == (
        4,
        ["north", "south"],
        "running",
        "covey logs train",
    )
    assert newest_rows()[0]["run"] == "other"
    for run in (by_hand, beside, share, whole):
        run.end(1, "rank 1 failed")
    assert newest_rows()[2]["has_failed"] is True


def _die(home_folder: str) -> None:
    os.environ["COVEY_HOME"] = home_folder
    a_run("lost").append(0, 0, 1, b"last words\n")
    os._exit(9)


def test_a_run_whose_keeper_was_killed_ended_unexpectedly_and_its_output_is_there(own_home: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=_die, args=(str(own_home),))
    process.start()
    process.join()
    found = find_past_run("lost")
    assert found is not None
    assert (found.outcome(), found.is_running, found.lasted) == ("ended unexpectedly", False, None)
    assert lines_of("lost") == [(0, "last words")]


def test_a_full_disk_loses_output_says_so_once_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    run = a_run()
    assert run.append(0, 0, 1, b"before\n") == ""
    real = os.pwrite

    def full(descriptor: int, data: Any, offset: int) -> int:
        if len(data) > 10:
            return real(descriptor, data[:10], offset)  # a part of the record fits
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    said = [run.append(0, 0, 1, b"lost %d\n" % number) for number in range(3)]
    assert "No space left on device" in said[0]
    assert "the run continues" in said[0]
    assert said[1:] == ["", ""]
    monkeypatch.setattr(os, "pwrite", real)
    assert run.append(0, 0, 1, b"after\n") == ""
    texts = [text for _, text in lines_of()]
    assert texts[0] == "before"
    assert texts[-1] == "after"
    assert "covey: 21 bytes of output could not be kept here (No space left on device)" in texts


def test_a_follower_gets_only_news_bounded_and_hears_what_was_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("covey.watch.output.PAGE_LINES", 10)
    monkeypatch.setattr("covey.watch.output.RING_LINES", 20)
    run = a_run()
    reader = OutputReader(kept)
    assert reader.lines("nothing").lines == ()
    run.append(0, 0, 1, b"one\ntwo\n")
    first = reader.lines("train")
    assert ([line.text for line in first.lines], first.left_out) == (["one", "two"], 0)
    run.append(1, 1, 2, b"thr")
    second = reader.lines("train", first.next)
    assert second.lines == ()
    run.append(1, 1, 2, b"ee\n")
    third = reader.lines("train", second.next)
    assert [(line.rank, line.is_error, line.text) for line in third.lines] == [(1, True, "three")]
    assert reader.lines("train", third.next).lines == ()
    for number in range(50):
        run.append(0, 0, 1, b"%d\n" % number)
    flood = reader.lines("train", third.next)
    assert [line.text for line in flood.lines] == [str(number) for number in range(40, 50)]
    assert flood.left_out == 40
    assert reader.lines("train", "not a number").lines == flood.lines


def test_a_late_follower_begins_near_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("covey.watch.output.FOLLOWED_TAIL_BYTES", 16 << 10)
    run = a_run(output_bytes=256 << 10)
    for number in range(8000):
        run.append(0, 0, 1, b"line %05d\n" % number)
    page = OutputReader(kept).lines("train")
    assert page.lines[-1].text == "line 07999"
    assert page.left_out == 8000 - len(page.lines)


def test_lines_have_no_escapes_and_redrawn_bars_show_their_last_state() -> None:
    run = a_run()
    run.append(0, 0, 1, b"\x1b[31mred\x1b[0m\x1b]0;title\x07\tx\r\n 10%\r 50%\r100%\n\xff\x00\x1b\n")
    assert [text for _, text in lines_of()] == ["red     x", "100%", "\ufffd\\x00\\x1b"]


def test_a_log_can_be_read_from_any_record_on_while_it_is_written(tmp_path: Path) -> None:
    log = SavedOutput(tmp_path, 40_000)
    offset, seen, missing = 0, list[int](), 0
    for number in range(3000):
        log.append(1, b"%d\n" % number, rank=number % 3, at=float(number))
        if number % 7 == 0:
            batch = read_log(tmp_path, offset, 1000)
            offset, missing = batch.next, missing + batch.missing
            seen += [int(record.data) for record in batch.records]
    assert seen == list(range(len(seen)))
    assert missing == 0
    with pytest.raises(ConfigError, match="no output begins at"):
        read_log(tmp_path, offset + LOG_HEADER_BYTES // 2, 1000)
    assert read_log(tmp_path, tail_of(tmp_path, 1000), 1 << 20).records[-1].data == b"2999\n"


def test_a_damaged_description_is_left_out_and_one_of_a_later_release_is_an_error() -> None:
    a_run("good", 1.0).end(0, "")
    broken, later = a_run("broken", 2.0), a_run("later", 3.0)
    folders.write_private(broken.folder / "about", b"{")
    assert [run.record.name for run in past_runs()] == ["good", "later"]
    folders.write_private(later.folder / "about", b'{"format": 2, "name": "later"}')
    with pytest.raises(ConfigError, match="a later release"):
        past_runs()


def test_the_bounds_are_those_of_the_page() -> None:
    page = " ".join((Path(__file__).parents[2] / "docs" / "security.md").read_text().split())
    each, total = SETTINGS["keep_output_bytes"].default, SETTINGS["keep_output_total"].default
    assert f"{each >> 20} MiB of each rank and {total >> 20} MiB in all" in page
    assert OutputTerms.read({}) == (True, each, total)
    assert OutputTerms.read({"COVEY_KEEP_OUTPUT": "0", "COVEY_KEEP_OUTPUT_BYTES": "1MiB"}) == (False, 1 << 20, total)


def asked(question: messages.Inspect) -> messages.Inspected:
    """Return what a node of the cluster gets for its question."""
    answers: queue.Queue[messages.Inspected] = queue.Queue()
    inspection.PacedAnswers().answer(question, b"key", answers.put)
    return answers.get(timeout=DEADLINE)


def test_no_question_of_another_node_is_answered_with_output_unless_it_is_shared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = a_run()
    run.append(0, 0, 1, b"a secret\n")
    monkeypatch.setenv("COVEY_KEPT_FOLDER", str(run.folder))
    for share in (None, "0", "nonsense"):
        if share is not None:
            monkeypatch.setenv("COVEY_SHARE_OUTPUT", share)
        for what in ("output", "logs", "metrics", "operations", "events", "network"):
            answer = asked(messages.Inspect(what))
            assert b"a secret" not in answer.body, what
        assert asked(messages.Inspect("output")).pages == 0
    monkeypatch.setenv("COVEY_SHARE_OUTPUT", "1")
    assert b"a secret" in asked(messages.Inspect("output")).body
    monkeypatch.delenv("COVEY_KEPT_FOLDER")
    assert asked(messages.Inspect("output")).pages == 0


def test_shared_output_is_told_in_pieces_and_hostile_questions_get_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    run = a_run()
    for number in range(20_000):
        run.append(number % 2, number % 2, 1, b"line %05d of many\n" % number)
    monkeypatch.setenv("COVEY_KEPT_FOLDER", str(run.folder))
    monkeypatch.setenv("COVEY_SHARE_OUTPUT", "1")
    machine, lines = MachineOutput(wants_all=True), list[str]()
    question = machine.question(0.0)
    while question is not None:
        answer = asked(question)
        assert len(answer.body) < 80_000
        told = machine.take(answer, "south")
        lines += [line.text for line in told]
        question = machine.question(0.0) if told else None
    assert sorted(lines) == [f"line {number:05d} of many" for number in range(20_000)]
    assert machine.gone == 0
    tail = MachineOutput()
    first = tail.take(asked(tail.question(0.0)), "south")  # type: ignore[arg-type]
    assert first[0].text != "line 00000 of many", "a view begins near the end"
    for about in (b"\xc1", b"\x91\x91\x92\xa6../etc\x00"):
        assert asked(messages.Inspect("output", 0, about)).pages == 0, about
    wrong = wire.encode(wire.OutputKnown((("0", 7), ("keeper", 1 << 60))))
    assert [log.name for log in wire.decode_output(asked(messages.Inspect("output", 0, wrong)).body).logs] == ["1"]


def test_what_a_hostile_rank_tells_of_output_is_bounded_and_printable() -> None:
    record = wire.ToldRecord(1, -1, 5.0, 1 << 61, b"\x1b[2J\xe2\x80\xaeevil\xe2\x80\x8b\n" + b"x" * 16_000)
    told = wire.ToldOutput("south", (wire.ToldLog("0", 1, (record,) * 4),), True)
    machine = MachineOutput()
    lines = machine.take(messages.Inspected("output", 0, 1, wire.encode(told)), "south")
    assert all(line.text.isprintable() and len(line.text) <= 2000 for line in lines)
    for body in (b"", b"\xc1", wire.encode(wire.ToldOutput("south", (wire.ToldLog("../x", 1, ()),)))):
        assert machine.take(messages.Inspected("output", 0, 1, body), "south") == []
