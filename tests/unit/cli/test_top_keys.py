"""What the keys of `covey top` do."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from tests.unit.cli.overviews import TAKEN, an_overview

from covey.cli.top.screen import KeyDecoder
from covey.cli.top.state import Intent, ViewState, press

if TYPE_CHECKING:
    from covey.watch.overview import Overview

STATE = ViewState(now=TAKEN)


def typed(
    keys: list[str], state: ViewState = STATE, overview: Overview | None = None
) -> tuple[ViewState, list[Intent]]:
    intents = []
    for key in keys:
        state, intent = press(state, key, overview or an_overview(8))
        intents += [intent] if intent is not None else []
    return state, intents


def test_a_run_is_stopped_only_by_its_whole_name() -> None:
    assert typed(["s", *"trai", "enter"])[1] == []
    assert "not stopped" in typed(["s", *"trai", "enter"])[0].message
    assert typed(["s", *"train", "escape"])[1] == []
    assert typed(["s", *"train", "enter"])[1] == [Intent("stop", "r1", "train")]
    assert typed(["s", *"traim", "backspace", "n", "enter"])[1] == [Intent("stop", "r1", "train")]


def test_a_second_stop_kills_but_only_after_half_a_minute() -> None:
    state, _ = typed(["s", *"train", "enter"])
    soon = dataclasses.replace(state, now=TAKEN + 10)
    assert typed(["s", *"train", "enter"], soon)[1] == [Intent("stop", "r1", "train")]
    later = dataclasses.replace(state, now=TAKEN + 31)
    assert typed(["s", *"train", "enter"], later)[1] == [Intent("kill", "r1", "train")]


def test_what_is_not_allowed_is_explained() -> None:
    overview = an_overview(8)
    run = dataclasses.replace(overview.runs[0], can_stop=False, can_checkpoint=False)
    bound = dataclasses.replace(overview, runs=(run,), can_approve=False, approver="north")
    for key, words in (("s", "cannot be stopped from here"), ("c", "cannot be asked"), ("a", "approved on north")):
        state, intents = typed([key], overview=bound)
        assert words in state.message, key
        assert intents == [], key
        assert state.prompt is None, key
    assert "no run" in typed(["s"], overview=an_overview(0))[0].message


def test_machines_are_approved_by_y_denied_by_n_and_left_by_other_keys() -> None:
    id = an_overview(8).applicants[0].id
    assert typed(["a", "y"])[1] == [Intent("approve", id, "cabin")]
    assert typed(["a", "n"])[1] == [Intent("deny", id, "cabin")]
    assert typed(["a", "enter", "x", "escape", "y"])[1] == []


def test_the_cursor_moves_over_what_is_shown_and_opens_it() -> None:
    state, _ = typed(["j", "j", "down", "k"])
    assert state.rank == 1
    state, _ = typed(["end"], state)
    assert state.rank == 7
    state, _ = typed(["page-up", "enter"], state)
    assert (state.rank, state.is_open) == (0, True)
    assert not typed(["escape"], state)[0].is_open
    assert typed(["w", "j"])[0].rank == 5, "sorted by waits, the late one is the first"
    assert typed(["/", *"cellar", "enter", "j", "j", "j", "j"])[0].rank == 3


def test_a_filter_is_typed_with_any_letter() -> None:
    state, intents = typed(["/", *"q1s", "enter"])
    assert (state.filter, intents) == ("q1s", [])
    assert typed(["escape"], state)[0].filter == ""


def test_q_and_ctrl_c_leave_from_everywhere() -> None:
    for before in ([], ["?"], ["2"], ["enter"], [" "]):
        assert typed([*before, "q"])[1] == [Intent("quit")], before
    for before in ([], ["s"], ["a"], ["/"], ["?"]):
        assert typed([*before, "ctrl-c"])[1] == [Intent("quit")], before


def test_n_shows_the_next_run() -> None:
    overview = an_overview(8)
    other = dataclasses.replace(overview.runs[0], id="r2", name="zebra")
    both = dataclasses.replace(overview, runs=(*overview.runs, other))
    assert typed(["n"], overview=both)[0].run == "r2"
    assert typed(["n", "n"], overview=both)[0].run == "r1"
    assert typed(["p"], overview=both)[0].run == "r2"


def test_bytes_of_a_terminal_become_keys() -> None:
    keys = KeyDecoder()
    assert keys.feed(b"q\r\t\x7f /") == ["q", "enter", "tab", "backspace", " ", "/"]
    assert keys.feed(b"\x1b[A\x1b[B\x1bOA\x1b[5~\x1b[6~\x1b[H") == ["up", "down", "up", "page-up", "page-down", "home"]
    assert keys.feed(b"\x1b") == []
    assert keys.is_waiting
    assert keys.flush() == ["escape"]
    assert keys.feed(b"\x1b[") == []
    assert keys.feed(b"B") == ["down"]
    assert keys.feed("ü".encode()[:1]) == []
    assert keys.feed("ü".encode()[1:]) == ["ü"]
    assert keys.feed(b"\x1bj") == ["escape", "j"]
    assert keys.feed(b"\xff\x00\x01\x1b[999;999;999Rq") == ["q"]
