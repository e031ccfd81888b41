"""`covey bench` in a run: every rank measures with all others, and rank 0 prints what came of it."""

from __future__ import annotations

import json
import re
import secrets
import signal
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import pytest
from tests.support import pipes
from tests.support.machines import Lab, end, new_lab

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator

SHORT = ("--sizes", "4,100K", "--reps", "2", "--quick", "--pair-seconds", "0.1")
ENDLESS = ("--sizes", ",".join(str(4 * n) for n in range(1, 5000)), "--reps", "1", "--quick", "--pair-seconds", "0.1")
"""Many short cases, so that the first is over soon and the last is far away."""


@pytest.fixture
def lab() -> Iterator[Lab]:
    with new_lab() as made:
        yield made


def nodes(lab: Lab, *options: tuple[str, ...]) -> list[subprocess.Popen[str]]:
    """Start `covey bench --run net` on as many machines of a cluster as there are options, all over secure lanes."""
    key = secrets.token_bytes(32)
    machines = [lab.machine(f"m{number}", "lab", key) for number in range(len(options))]
    common = ("-m", "covey", "bench", "--run", "net", "--size", str(len(options)), "--lanes", "secure")
    return [machine.start(*common, *words) for machine, words in zip(machines, options, strict=True)]


def checked_document(text: str, size: int, lane: str) -> dict[str, Any]:
    """Return the JSON of a benchmark, whose links are complete and whose shares follow from its other numbers."""
    document: dict[str, Any] = json.loads(text)
    pairs = [(link["from"], link["to"]) for link in document["links"]]
    assert pairs == [(one, two) for one in range(size) for two in range(size) if one != two]
    for link in document["links"]:
        assert link["lane"] == lane
        assert 0 < link["round_trip_seconds"] < 10
        assert min(link["bytes_per_second"], link["both_bytes_per_second"]) > 1e5
    assert [each["rank"] for each in document["ranks"]] == list(range(size))
    slowest = min(link["bytes_per_second"] for link in document["links"])
    for result in document["results"]:
        assert [len(turn["nanoseconds_by_rank"]) for turn in result["rounds"]] == [size] * len(result["rounds"])
        if result["operation"] == "all_reduce":
            assert result["share_of_slowest_link"] == pytest.approx(result["bus_bytes_per_second"] / slowest)
        assert (result["share_of_slowest_link"] is None) == (result["operation"] == "barrier")
    return document


@pytest.mark.thorough
def test_machines_of_a_cluster_measure_what_one_of_them_was_told(lab: Lab) -> None:
    started = nodes(lab, ("--json", "out.json"), (*SHORT, "--op", "all_reduce,barrier"), ())
    ended = [end(process) for process in started]
    assert [code for code, _, _ in ended] == [0, 0, 0], ended
    printed = sorted((out for _, out, _ in ended), key=len)
    for line in printed[:2]:  # one line, unless this is the rank that writes the file
        assert re.match(r"rank [12] of 3 takes part; rank 0 \(\S+\) prints the results\n(wrote out\.json\n)?$", line)
    assert sum("wrote out.json" in out for out in printed) == 1
    assert "wrote out.json" in ended[0][1]
    for text in ("one stream, bit/s", "both directions at once", "round trip", "lanes: secure", "slowest link: "):
        assert text in printed[2]
    document = checked_document((lab.folder / "out.json").read_text(), 3, "secure")
    assert document["settings"]["pair_seconds"] == 0.1
    cases = [(result["operation"], result["size_bytes"]) for result in document["results"]]
    assert cases == [("all_reduce", 4), ("all_reduce", 100 << 10), ("barrier", 0)]
    assert lab.left_behind() == []


@pytest.mark.thorough
def test_ranks_of_covey_run_measure_several_operations_and_rank_0_writes_the_files(lab: Lab) -> None:
    machine = lab.machine()
    words = ["--sizes", "100K", "--reps", "1", "--quick", "--pair-seconds", "0.1", "--dtype", "int32"]
    words += ["--op", "all_to_all,send_recv,barrier", "--json", "out.json", "--plot", "out.svg"]
    ended = machine.covey("run", "-n", "3", "covey", "bench", *words, PATH="/usr/bin:/bin")
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    others = sorted(line for line in lines if not line.startswith("[0]"))
    for rank, line in enumerate(others, 1):
        assert re.fullmatch(rf"\[{rank}\] rank {rank} of 3 takes part; rank 0 \(\S+\) prints the results", line)
    assert len(others) == 2
    assert "[0] wrote out.json" in lines
    assert any(re.match(r"\[0\] all_to_all 100 KiB, 3 ranks: .* of the slowest link", line) for line in lines)
    document = checked_document((lab.folder / "out.json").read_text(), 3, "shm")
    assert len(document["results"]) == 3
    ElementTree.fromstring((lab.folder / "out.svg").read_text())


def test_ranks_that_were_told_different_things_all_say_so(lab: Lab) -> None:
    machine = lab.machine()
    started = [
        machine.start("-m", "covey", "bench", *words, RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
        for rank, words in enumerate([("--sizes", "4", "--quick"), ("--sizes", "8", "--reps", "1")])
    ]
    for process in started:
        code, out, err = end(process)
        assert (code, out) == (2, "")
        assert re.fullmatch(
            r"error: --sizes differs between ranks: 4 on rank 0 \(\S+\) and 8 on rank 1 \(\S+\); "
            r"give options on one machine only\n",
            err,
        )


def test_a_run_of_one_rank_has_no_links(lab: Lab) -> None:
    ended = lab.machine().covey("run", "-n", "1", "covey", "bench")
    assert ended.returncode == 2
    assert "links need at least two ranks, and this run has one" in ended.stderr


@pytest.mark.parametrize("signum", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.thorough)])
def test_a_rank_that_ends_in_the_middle_ends_the_others_with_its_name(lab: Lab, signum: signal.Signals) -> None:
    started = nodes(lab, ENDLESS, ENDLESS)
    first = [pipes.stdout(process).readline() for process in started]
    reporter = next(process for process, line in zip(started, first, strict=True) if "ranks on" in line)
    victim = next(process for process in started if process is not reporter)
    rank = re.match(r"rank (\d)", first[started.index(victim)])
    assert rank is not None
    while "all_reduce 4 B, 2 ranks:" not in (line := pipes.stdout(reporter).readline()):
        assert line, pipes.stderr(reporter).read()
    victim.send_signal(signum)
    for process in started:
        code, _, err = end(process)
        if process is victim:
            assert code == (130 if signum == signal.SIGINT else -signal.SIGKILL)
        else:
            assert code == 1
            assert re.search(rf"^error: .*rank {rank[1]}\b", err, re.MULTILINE), err
