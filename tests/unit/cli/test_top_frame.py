"""What `covey top` draws: right at any size and for any number of ranks."""

from __future__ import annotations

import dataclasses

import pytest
from rich.cells import cell_len
from tests.support.in_turn import in_turn
from tests.unit.cli.overviews import TAKEN, a_history, an_overview

from covey.cli.top.frame import ScreenSize, frame, line_of
from covey.cli.top.panels import texts
from covey.cli.top.state import PANELS, Prompt, ViewState
from covey.watch.output import OutputLine
from covey.watch.overview import Overview, RankSeen

SIZES = [
    ScreenSize(80, 24),
    ScreenSize(120, 40),
    ScreenSize(75, 20),
    ScreenSize(60, 20),
    ScreenSize(40, 10),
    ScreenSize(39, 8),
    ScreenSize(20, 4),
    ScreenSize(3, 2),
]
STATE = ViewState(now=TAKEN + 0.5)
OUTPUT = tuple(
    OutputLine(TAKEN, "north", rank, False, f"step {rank} \x1b]0;t\x07\t{'long ' * 40}") for rank in range(30)
)


def drawn(overview: Overview, size: ScreenSize = SIZES[0], state: ViewState = STATE) -> list[str]:
    return texts(frame(overview, a_history(), size, state))


@in_turn(ranks=[0, 1, 8, 64, 256], size=SIZES)
def test_a_picture_fits_its_terminal_and_has_no_escapes(ranks: int, size: ScreenSize) -> None:
    states = [dataclasses.replace(STATE, panel=panel, output=OUTPUT, rank=ranks // 2) for panel in PANELS]
    states += [
        dataclasses.replace(STATE, is_open=True, rank=0, output=OUTPUT),
        dataclasses.replace(STATE, has_help=True),
    ]
    states += [dataclasses.replace(STATE, prompt=Prompt(kind, "r1", "x" * 100)) for kind in ("filter", "stop", "kill")]
    states += [
        dataclasses.replace(STATE, prompt=Prompt("approve", "k3f9x2" * 9)),
        dataclasses.replace(STATE, message="m" * 200, filter="north", by_waits=True, is_paused=True),
        dataclasses.replace(STATE, now=TAKEN + 1e9, scroll=1000, panel="events"),
    ]
    for suffix in ("", "\x1b[31m\u202e\n家🐦"):
        overview = an_overview(ranks, suffix=suffix)
        for state in states:
            lines = drawn(overview, size, state)
            assert len(lines) == size.rows, state
            for line in lines:
                assert cell_len(line) <= size.columns, (state, line)
                assert line.isprintable(), (state, line)


def test_the_whole_of_a_small_run_is_on_80_by_24() -> None:
    lines = drawn(an_overview(8))
    assert lines[0].startswith("home / train  step 12400  loss 1.93  8 ranks on 4 machines  2 h 13 min")
    assert lines[0].endswith("live")
    assert lines[1] == "! rank 5 is 2 operations behind; 7 ranks wait for it"
    text = "\n".join(lines)
    for word in (
        "─ 1 ranks",
        "─ loss",
        "─ step 220 ms",
        "─ machines",
        "─ links",
        "─ 3 events",
        "5 north",
        "attic>cellar  960 Mbit/s",
        "B behind",
    ):
        assert word in text, text
    assert all(f" {rank} " in text for rank in range(8))


def test_the_narrowest_terminals_have_the_header_and_the_sentence() -> None:
    lines = drawn(an_overview(8), ScreenSize(40, 10))
    assert lines[0].startswith("home / train")
    assert "rank 5 is 2 operations behind" in " ".join(line.strip() for line in lines[1:3])
    tiny = drawn(an_overview(8), ScreenSize(30, 6))
    assert tiny[0].startswith("home / train")
    assert " ".join(line.strip() for line in tiny[1:4]).startswith("! rank 5 is 2 operations behind; 7 ranks wait")
    assert tiny[-1].endswith("q quit")


def order(lines: list[str]) -> list[int]:
    rows = [line.split("│")[0].split() for line in lines]
    return [int(row[0]) for row in rows if len(row) > 2 and row[0].isdecimal()]


def test_ranks_keep_their_places_until_one_sorts_them() -> None:
    assert order(drawn(an_overview(8, late=5))) == order(drawn(an_overview(8, late=2))) == list(range(8))
    sorted_by_waits = dataclasses.replace(STATE, by_waits=True)
    assert order(drawn(an_overview(8, late=5), state=sorted_by_waits)) == [5, 0, 1, 2, 3, 4, 6, 7]


@in_turn(ranks=[64, 256])
def test_every_rank_of_a_large_run_has_a_letter(ranks: int) -> None:
    lines = drawn(an_overview(ranks), ScreenSize(80, 24))
    letters = "".join(line.split("│")[0].strip() for line in lines if set(line.split("│")[0].strip()) <= {"W", "B"})
    assert letters == "W" * 5 + "B" + "W" * (ranks - 6)


def test_the_rank_under_the_cursor_is_always_in_view() -> None:
    for rank in (0, 31, 63):
        assert rank in order(drawn(an_overview(64), state=dataclasses.replace(STATE, rank=rank)))


def test_a_filter_keeps_what_matches_and_says_so() -> None:
    state = dataclasses.replace(STATE, filter="attic")
    assert order(drawn(an_overview(8), state=state)) == [0, 1]
    assert "with 'attic'" in "\n".join(drawn(an_overview(8), state=state))
    nothing = dataclasses.replace(STATE, filter="nowhere")
    assert "no rank has 'nowhere'; Esc shows all" in "\n".join(drawn(an_overview(8), state=nothing))


def test_one_rank_alone_has_all_that_is_known_and_its_own_output() -> None:
    state = dataclasses.replace(STATE, is_open=True, rank=3, output=OUTPUT)
    text = "\n".join(drawn(an_overview(8), state=state))
    assert "rank 3 of train" in text
    assert "waits for  rank 5" in text
    assert "all_reduce  since 12 s  number 99" in text
    assert "step 3 ?]0;t?" in text
    assert "step 4 " not in text
    late = "\n".join(drawn(an_overview(8), state=dataclasses.replace(STATE, is_open=True, rank=5)))
    assert "waited for by 7 ranks" in late


def test_figures_that_are_not_known_are_not_zero() -> None:
    overview = an_overview(2, late=1)
    bare = dataclasses.replace(
        overview,
        runs=(dataclasses.replace(overview.runs[0], ranks=(RankSeen(0, "north-id", 7),), reports={}, step=None),),
    )
    row = next(line for line in drawn(bare, ScreenSize(120, 40)) if line.startswith("   0 "))
    assert row.split("│")[0].split()[4:7] == ["-", "-", "-"]
    assert "group.report" in "\n".join(texts(frame(bare, (), ScreenSize(120, 40), STATE)))


def test_old_figures_and_pauses_are_marked() -> None:
    assert drawn(an_overview(8), state=dataclasses.replace(STATE, now=TAKEN + 12))[0].endswith("12 s old")
    assert drawn(an_overview(8), state=dataclasses.replace(STATE, is_paused=True))[0].endswith("paused")


def test_without_a_run_the_screen_says_what_to_type() -> None:
    text = "\n".join(drawn(an_overview(0)))
    for word in ("no run", "This machine is in no cluster.", "covey demo", "covey init", "north"):
        assert word in text


def test_a_value_that_is_no_number_is_shown_as_such() -> None:
    overview = an_overview(8)
    run = dataclasses.replace(overview.runs[0], reports={"loss": float("nan")})
    lines = drawn(dataclasses.replace(overview, runs=(run,)))
    assert "loss nan" in lines[0]


@pytest.mark.parametrize("suffix", ["", "\x1b[2J\n"])
def test_without_a_terminal_it_is_one_line(suffix: str) -> None:
    line = line_of(an_overview(8, suffix=suffix), STATE)
    assert line.isprintable()
    assert "train" in line
    assert "rank 5 is 2 operations behind" in line
