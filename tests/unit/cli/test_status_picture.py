"""What nodes tell, put together and shown."""

from __future__ import annotations

import io
import json

import msgspec
import pytest
from msgspec.structs import replace
from rich.console import Console
from tests.support.in_turn import in_turn

from covey.base.errors import ConnectError, CoveyError, DeadlineError
from covey.base.text import duration
from covey.cli.status.picture import Picture, as_json, picture, tellers, with_events
from covey.cli.status.view import MOST_EVENTS, local_view, milliseconds, view
from covey.net.host.runs import LocalRunFound
from covey.runtime.events import Event
from covey.wire.messages import Address, AddressTrouble, Answer, Card, Contact, PeerReport, Tell, Wait
from covey.wire.versions import only


def card(number: int, host: str = "wren") -> Card:
    contact = Contact(host, (Address(f"10.0.0.{number}", 47700 + number, "eth0"),), "")
    return Card(bytes([number]) * 32, bytes(16), f"{host}-{number:04}", host, 100 + number, contact, "1.2")


def state(number: int, rank: int = -1, *, lane: str = "", round_trip: float = -1.0, offset: float = 0.0) -> PeerReport:
    here = card(number)
    return PeerReport(here, rank, lane, "10.0.0.99", f"10.0.0.{number}:47700", "eth0", round_trip, offset)


def tells(size: int, run: str = "mine") -> list[Tell]:
    """What each of `size` nodes would tell of the others; node i + 1 has rank i, and its ways take i ms and more."""
    return [
        Tell(
            run,
            "running",
            leader=card(1).id,
            tie_breaker=card(2).id,
            since=60.0 + rank,
            peers=tuple(
                state(other + 1, other, lane="secure" if other % 2 else "shm", round_trip=1e-3 * (rank + other / 100))
                for other in range(size)
                if other != rank
            ),
            rank=rank,
        )
        for rank in range(size)
    ]


def draw(answers: list[Answer | CoveyError], *, offset: float = 0.0, refused: dict[str, str] | None = None) -> Picture:
    seen = [state(number, offset=offset) for number in range(1, len(answers) + 1)]
    return picture("lab", seen, answers, refused or {})


def shown(drawn: Picture, width: int | None = 120) -> list[str]:
    """Return the lines as they come out of a pipe."""
    written = io.StringIO()
    console = Console(file=written, highlight=False)
    console.print(view(drawn, width), soft_wrap=True, end="")
    return written.getvalue().splitlines()


def test_ranks_come_from_what_the_others_tell() -> None:
    (run,) = draw([*tells(3)]).runs
    assert [(node.name, node.rank) for node in run.nodes] == [("wren-0001", 0), ("wren-0002", 1), ("wren-0003", 2)]
    assert [node.is_leader for node in run.nodes] == [True, False, False]
    assert [node.is_tie_breaker for node in run.nodes] == [False, True, False]
    assert (run.state, run.since) == ("running", 62.0)
    assert [(way.rank, way.lane, way.round_trip) for way in run.nodes[1].peers] == [
        (0, "shm", 1e-3),
        (2, "shm", pytest.approx(1.02e-3)),
    ]


@pytest.mark.parametrize("teller", [0, 1, 2])
def test_the_only_node_that_answers_tells_all_ranks(teller) -> None:
    answers: list[Answer | CoveyError] = [DeadlineError(f"{number} did not answer") for number in range(3)]
    answers[teller] = tells(3)[teller]
    drawn = draw(answers)
    (run,) = drawn.runs
    assert [node.rank for node in run.nodes] == [0, 1, 2]
    assert [node.state for node in run.nodes] == ["running" if rank == teller else "silent" for rank in range(3)]
    assert drawn.silent == tuple(f"{number} did not answer" for number in range(3) if number != teller)


def test_a_node_that_has_gone_meanwhile_is_not_mentioned() -> None:
    drawn = draw([ConnectError("wren-0001 has gone")])
    assert drawn.is_empty
    assert shown(drawn) == []


def test_runs_are_told_apart_and_a_latecomer_is_marked_and_not_counted() -> None:
    late = Tell("mine", "joining", b"", b"", 3.0, (state(1), state(2)))
    drawn = draw([*tells(2), late, Tell("zoo", "joining", b"", b"", 7.0, ())])
    mine, zoo = drawn.runs
    assert [(node.rank, node.state) for node in mine.nodes] == [(0, "running"), (1, "running"), (None, "joining")]
    assert (mine.state, zoo.state, zoo.since) == ("running", "joining", 7.0)
    lines = shown(drawn)
    assert lines[0] == "run mine in lab: running for 61 s, 2 nodes, 1 more waiting to join"
    assert [line.endswith("joining") for line in lines[2:5]] == [False, False, True]
    assert "run zoo in lab: joining for 7 s, 1 node" in lines


def test_what_a_run_waits_for_is_shown_under_it_once_or_by_node() -> None:
    refused = (AddressTrouble("10.0.0.9", "Connection refused"),)
    wait = Wait("nodes", "1 of 2 nodes", seeds=refused)
    waiting = Tell("mine", "joining", b"", b"", 3.0, (), wait=wait)
    drawn = draw([waiting, waiting])
    assert drawn.runs[0].waits == ("1 of 2 nodes", "10.0.0.9: Connection refused")
    assert shown(drawn)[1:3] == ["  waits: 1 of 2 nodes", "  10.0.0.9: Connection refused"]
    drawn = draw([waiting, replace(waiting, wait=Wait("nodes", "1 of 3 nodes"))])
    names = [card(number).name for number in (1, 2)]
    first, *_, last = drawn.runs[0].waits
    assert (first, last) == (f"{names[0]}: 1 of 2 nodes", f"{names[1]}: 1 of 3 nodes")


def test_the_ways_of_a_few_are_shown_one_by_one() -> None:
    lines = shown(draw([*tells(3)]))
    at = lines.index(next(line for line in lines if line.startswith("from")))
    assert lines[at].split() == ["from", "to", "0", "to", "1", "to", "2"]
    assert [line.split() for line in lines[at + 1 :]] == [
        ["0", "secure", "0.01", "ms", "shm", "0.02", "ms"],
        ["1", "shm", "1.00", "ms", "shm", "1.02", "ms"],
        ["2", "shm", "2.00", "ms", "secure", "2.01", "ms"],
    ]


def test_the_ways_of_many_are_summed_up() -> None:
    lines = shown(draw([*tells(8)]))
    assert lines[-2:] == [
        "secure: 28 links, round trip 3.54 ms (median), at most 7.05 ms (7 to 5)",
        "shm: 28 links, round trip 3.53 ms (median), at most 7.06 ms (7 to 6)",
    ]


def test_a_clock_that_is_far_off_and_refused_nodes_are_mentioned() -> None:
    assert not any("clock" in line for line in shown(draw([*tells(2)], offset=0.9)))
    lines = shown(draw([*tells(2)], offset=-75.25, refused={"otter-aaaa": "is denied"}))
    assert sum("clock -75.2 s" in line for line in lines) == 2
    assert lines[-1] == "otter-aaaa was refused: is denied"


@pytest.mark.parametrize("width", [80, 120, 200])
def test_addresses_and_ids_are_whole_on_a_usual_terminal(width) -> None:
    lines = shown(draw([*tells(2)]), width)
    text = "\n".join(lines)
    assert all(word in text for word in ("10.0.0.1:47701", "aeaqcaib", "10.0.0.2:47702", "aibaeaqc"))
    assert max(map(len, lines)) <= width


def test_text_of_others_is_not_taken_for_markup() -> None:
    (told,) = draw([Tell("[red]x[/]", "joining", b"", b"", 1.0, ())]).runs
    assert told.name == "[red]x[/]"
    assert shown(draw([Tell("[red]x[/]", "joining", b"", b"", 1.0, ())]))[0].startswith("run [red]x[/] in lab")


def test_the_picture_is_json() -> None:
    loaded = json.loads(json.dumps(as_json(draw([*tells(2)]))))
    assert loaded["cluster"] == "lab"
    assert [node["id"] for node in loaded["runs"][0]["nodes"]] == ["01" * 32, "02" * 32]


def test_times_are_short() -> None:
    assert [milliseconds(seconds) for seconds in (0.0000584, 0.01234, 0.2)] == ["0.06 ms", "12.3 ms", "200 ms"]
    assert [duration(seconds) for seconds in (7.4, 119, 300, 9000)] == ["7 s", "119 s", "5 min", "2 h 30 min"]


@pytest.mark.parametrize("name", ["[/bold]", "[red]", "[link=http://x]x", "[[", "\\["])
def test_names_of_nodes_and_runs_are_shown_as_they_are(name: str) -> None:
    """A bracket in what others call themselves is no instruction to the terminal."""
    named = replace(card(1), name=name)
    peers = (replace(state(2), card=card(2)), replace(state(1, lane="shm", round_trip=1e-3), card=named))
    story = Tell(name, "joining", b"", b"", 1.0, peers)
    drawn = picture("lab", [replace(state(1), card=named)], [story], {name: name})
    text = "\n".join(shown(drawn))
    assert text.count(name) >= 4


@in_turn(width=[60, 80, 120, None])
@in_turn(size=[1, 2, 5, 8])
def test_at_every_width_each_node_is_shown_whole_and_no_line_is_too_long(size: int, width: int | None) -> None:
    answers: list[Answer | CoveyError] = [*tells(size)]
    answers[-1] = (
        DeadlineError(f"wren-{size:04} (0123abcd) did not answer within the timeout of 1 s")
        if size > 1
        else answers[-1]
    )
    lines = shown(
        draw(answers, offset=-75.25, refused={"otter-aaaa": "its clock is 75 s behind the one here; set it"}), width
    )
    text = "\n".join(lines)
    for line in lines:
        assert width is None or len(line) <= width
        assert line == line.rstrip()
        assert "\x1b" not in line
    for number in range(1, size + 1):
        assert f" {number - 1}  wren-{number:04} " in text
    assert "rank  node " in text
    assert "otter-aaaa was refused: its clock" in text
    assert ("silent" in text) == (size > 1)
    assert ("0123abcd" in text) == (size > 1)


def test_where_the_table_of_links_has_no_room_they_are_summed_up() -> None:
    for width, is_table in ((120, True), (60, False)):
        lines = shown(draw([*tells(6)]), width)
        assert any(line.startswith("from ") for line in lines) == is_table
        assert any(line.startswith("secure: 15 links, round trip") for line in lines) != is_table


def test_one_node_alone_has_no_table_of_links() -> None:
    met = Tell("mine", "joining", b"", b"", 3.0, (state(1),))
    assert len(shown(draw([met]))) == 3
    assert not any("from" in line for line in shown(draw([*tells(1)])))


def test_a_silent_member_is_counted_and_named() -> None:
    lines = shown(draw([tells(2)[0], DeadlineError("wren-0002 did not answer")]))
    assert lines[0].endswith("2 nodes, 1 of them silent")
    assert lines[3].endswith("tie-breaker, silent")
    assert lines[-1] == "wren-0002 did not answer"


@pytest.mark.parametrize("width", [60, 80, 120])
def test_joiners_that_do_not_fit_are_shown_with_the_reason_and_not_counted(width: int) -> None:
    names = [card(number).name for number in (1, 2, 3)]
    waits = [
        Wait(
            "nodes",
            "1 more node",
            here=(names[0], names[1]),
            refused=(AddressTrouble(names[2], "it was started with --size 9"),),
        ),
        Wait(
            "nodes",
            "1 more node",
            here=(names[0], names[1]),
            refused=(AddressTrouble(names[2], "it was started with --size 9"),),
        ),
        Wait(
            "nodes",
            "8 more nodes",
            here=(names[2],),
            refused=(AddressTrouble(names[0], "it was started with --size 3"),),
        ),
    ]
    drawn = draw([Tell("mine", "joining", b"", b"", 3.0, (), wait=wait) for wait in waits])
    assert [node.state for node in drawn.runs[0].nodes] == ["joining", "joining", "refused"]
    lines = shown(drawn, width)
    assert lines[:2] == ["run mine in lab: joining for 3 s, 2 nodes, 1 more refused", "  waits: wren-0001: 1 more node"]
    assert any(names[2] in line and line.endswith("refused") for line in lines)
    assert all(len(line) <= width for line in lines)


def test_the_last_events_of_a_run_are_shown_below_it_as_its_first_member_tells_them() -> None:
    answers: list[Answer | CoveyError] = [*tells(2)]
    seen = [state(number) for number in (1, 2)]
    assert tellers(seen, answers) == {"mine": seen[0].card}
    assert tellers(seen, [DeadlineError("silent"), answers[1]]) == {"mine": seen[1].card}
    assert shown(with_events(draw(answers), {})) == shown(draw(answers))
    lost = Event("lost", 86400.0, 0, 1, (1,), ("rank 1 (otter)",), {"detect": 0.0, "agree": 31.6})
    events = [Event("leader", 0.0, 0, 0, (0,))] * 20 + [Event("refused", 0.0, 0, 0, (), ("lynx",), text="denied"), lost]
    drawn = with_events(draw(answers), {"mine": events, "other": [lost]})
    *_, before, refused, last = (line.split(maxsplit=2)[1:] for line in shown(drawn))
    assert before == ["leader", "rank 0"]
    assert refused == ["refused", "lynx: denied"]
    assert last == ["lost", "rank 1 (otter): recovered in 32 ms"]
    assert len(shown(drawn)) == len(shown(draw(answers))) + 2 + MOST_EVENTS
    assert json.loads(json.dumps(as_json(drawn)))["runs"][0]["events"][-1]["ranks"] == [1]


@pytest.mark.parametrize("width", [None, 80, 40])
def test_runs_of_this_machine_alone_are_a_table_and_a_hint(width: int | None) -> None:
    runs = [LocalRunFound("train", 4711, 3, "/tmp/one"), LocalRunFound("a [bold]name", 12, 128, "/tmp/two")]
    lines = local_view(runs, width).plain.splitlines()
    assert [line.split() for line in lines[:3]] == [
        ["run", "here", "ranks", "process"],
        ["train", "3", "4711"],
        ["a", "[bold]name", "128", "12"],
    ]
    assert " ".join(lines[3:]) == "covey trace train shows what its ranks do"
    assert width is None or max(map(len, lines)) <= width


def test_a_run_of_several_releases_shows_which_machine_has_which_and_what_they_speak() -> None:
    answers = [msgspec.structs.replace(tell, versions=only(3)) for tell in tells(3)]
    assert not any("releases:" in line for line in shown(draw([*answers])))
    seen = [state(number) for number in range(1, 4)]
    other = msgspec.structs.replace(card(2, "finch"), version="1.3")
    seen[1] = msgspec.structs.replace(seen[1], card=other)
    drawn = picture("lab", seen, answers, {})
    assert "  releases: covey 1.2 on wren; covey 1.3 on finch; the run speaks protocol 3" in shown(drawn)
    assert as_json(drawn)["runs"][0]["protocol"] == "3"
