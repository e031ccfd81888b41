"""One picture of `covey top`, for a terminal of any size. Pure.

Two columns from 75 columns and 20 rows on; one panel below; header and sentence alone below 40 columns. No line is
longer than the terminal is wide, and ranks keep their places unless the person sorts them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

from rich.cells import cell_len

from covey.cli.top.canvas import beside, clip, fit, joined, number, paragraph, rule, seconds, width_of
from covey.cli.top.panels import (
    NEWS_STYLES,
    curve_rows,
    event_rows,
    help_rows,
    hints,
    link_lines,
    link_rows,
    log_rows,
    machine_lines,
    rank_alone,
    rank_rows,
    spell_age,
    step_rows,
)
from covey.cli.top.state import PANELS, applicant_of, chosen_run, machine_names, shown_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from covey.cli.layout import Line
    from covey.cli.top.state import Panel, ViewState
    from covey.watch.overview import Moment, Overview, RunSeen, Sentence

WIDE: Final = 75
HIGH: Final = 20
NARROW: Final = 40
LEAST_ROWS: Final = 4
"""A panel with fewer rows is not worth its title."""
OLD_SECONDS: Final = 3.0
"""Figures that are older are marked as such."""
_KEYS: Final = (
    "1 ranks 2 links 3 events 4 logs  / filter  w waits  c checkpoint  s stop  a approve  ? help  q",
    "1-4 panels  / filter  w waits  c checkpoint  s stop  ? help  q",
    "1-4 panels  / filter  s stop  ? help  q",
    "1-4 panels  ? help  q quit",
    "? help  q quit",
    "q",
)


class ScreenSize(NamedTuple):
    """The size of a terminal."""

    columns: int
    rows: int


def frame(overview: Overview, history: Sequence[Moment], size: ScreenSize, state: ViewState) -> list[Line]:
    """Return the lines of the picture: at most as many as there are rows, each at most as wide as there are columns."""
    width, rows = max(size.columns, 1), max(size.rows, 1)
    run = chosen_run(overview, state)
    top = [_header(overview, run, state, width)]
    bottom = [_footer(overview, state, width)] if rows > 2 else []
    room = rows - len(top) - len(bottom)
    most = min(room, 2 if width >= WIDE else 3 if width >= NARROW else room)
    top += _sentence(overview, run, width, most, has_reason=run is not None and width >= NARROW and rows >= HIGH)
    if overview.applicants and len(top) < rows - len(bottom):
        top.append(_applicants(overview, width))
    left = rows - len(top) - len(bottom)
    body = _body(overview, history, run, state, ScreenSize(width, left)) if width >= NARROW and left >= 2 else []
    lines = [*top, *body[:left]]
    lines += [[]] * (rows - len(bottom) - len(lines))
    return [clip(line, width) for line in [*lines[: rows - len(bottom)], *bottom]]


def line_of(overview: Overview, state: ViewState) -> str:
    """Return the state in one line, for output that is not a terminal."""
    run = chosen_run(overview, state)
    sentence = _spoken(overview, run).text
    line = clip([(joined((*_figures(overview, run), sentence)), "")], 1000)
    return "".join(text for text, _ in line)


def _body(
    overview: Overview, history: Sequence[Moment], run: RunSeen | None, state: ViewState, size: ScreenSize
) -> list[Line]:
    width, rows = size
    if state.has_help:
        return [rule("help", width, chosen=True), *help_rows(width, rows - 1)]
    if run is not None and state.is_open:
        title = f"rank {state.rank} of {run.name}; Esc goes back"
        return [rule(title, width, chosen=True), *rank_alone(run, overview, state, width, rows - 1)]
    if run is None and state.panel == "ranks":
        lines = hints(None, overview, width, rows - 2)
        return [*lines, rule("machines", width), *machine_lines(overview, state.filter.casefold(), width)][:rows]
    if width < WIDE or rows < HIGH - 5:
        return _one_column(overview, run, state, size)
    return _two_columns(overview, history, run, state, size)


def _one_column(overview: Overview, run: RunSeen | None, state: ViewState, size: ScreenSize) -> list[Line]:
    """Return the chosen panel; below a few ranks, the last events as well."""
    width, rows = size
    wanted = len(run.ranks) + 2 if run is not None else rows
    if state.panel != "ranks" or rows - wanted < LEAST_ROWS:
        return _panel(state.panel, overview, run, state, size)
    ours = _panel("ranks", overview, run, state, ScreenSize(width, wanted))
    ours += [[]] * (wanted - len(ours))
    return [*ours, *_panel("events", overview, run, state, ScreenSize(width, rows - wanted), is_second=True)]


def _two_columns(
    overview: Overview, history: Sequence[Moment], run: RunSeen | None, state: ViewState, size: ScreenSize
) -> list[Line]:
    """Return the chosen panel and another one below it, with curves, steps and machines beside them."""
    width, rows = size
    right = max(24, min(width * 3 // 10, 48))
    left = width - right - 1
    second: Panel = "events" if state.panel != "events" else "ranks"
    below = max(min(rows // 3, 12), 4)
    if state.panel == "ranks" and run is not None:
        wanted = len(run.ranks) + 2  # a few ranks leave more room for events
        below = max(below, min(rows - wanted, rows * 2 // 3))
    ours = _panel(state.panel, overview, run, state, ScreenSize(left, rows - below))
    ours += [[]] * (rows - below - len(ours))
    ours += _panel(second, overview, run, state, ScreenSize(left, below), is_second=True)
    return beside(ours, _side(overview, history, run, ScreenSize(right, rows)), (left, right), rows)


def _side(overview: Overview, history: Sequence[Moment], run: RunSeen | None, size: ScreenSize) -> list[Line]:
    width, rows = size
    lines: list[Line] = []
    if run is not None:
        title, drawn = curve_rows(run, history, width, 4 if rows < 30 else 7)
        lines += [rule(title, width), *drawn]
        if spent := step_rows(run, width):
            took = f"step {seconds(run.step_seconds)}" if run.step_seconds is not None else "the last second"
            lines += [rule(took, width), *spent]
    lines += [rule("machines", width), *machine_lines(overview, "", width)]
    if run is not None and run.links and len(lines) + 2 < rows:
        lines += [rule("links", width), *link_lines(run, machine_names(overview), "", width)]
    return lines[:rows]


def _panel(
    panel: Panel,
    overview: Overview,
    run: RunSeen | None,
    state: ViewState,
    size: ScreenSize,
    *,
    is_second: bool = False,
) -> list[Line]:
    """Return a panel with its title."""
    width, rows = size
    if is_second:
        state = replace(state, scroll=0, filter="")
    title = f"{PANELS.index(panel) + 1} {panel}"
    if state.filter:
        title += f" with {state.filter!r}"
    if panel == "ranks" and run is not None:
        shown = len(shown_ranks(run, {}, state)) if not state.filter else None
        if shown and shown > rows - 2:
            title += f" ({shown})"
        if state.by_waits:
            title += ", most waited for first"
        lines = rank_rows(run, overview, state, width, rows - 1)
    elif panel == "ranks":
        lines = machine_lines(overview, "", width)[: rows - 1]
    elif panel == "links":
        title = title.replace("links", "links and machines")
        lines = link_rows(run, overview, state, width, rows - 1)
    elif panel == "events":
        lines = event_rows(run, state, width, rows - 1, most=2 if is_second else 3)
    else:
        if state.left_out:
            title += f" ({state.left_out} lines left out)"
        lines = log_rows(state, width, rows - 1)
    return [rule(title, width, chosen=not is_second), *lines]


def _header(overview: Overview, run: RunSeen | None, state: ViewState, width: int) -> Line:
    age = state.now - overview.taken
    fresh = "paused" if state.is_paused else f"{seconds(age)} old" if age > OLD_SECONDS else "live"
    style = "bold yellow" if fresh != "live" else "green"
    figures = _figures(overview, run)
    if len(overview.runs) > 1 and run is not None:
        at = next(at for at, each in enumerate(overview.runs, 1) if each is run)
        figures.append(f"run {at} of {len(overview.runs)} (n)")
    if run is not None and run.began is not None and run.state == "running":
        figures.append(spell_age(run.began, overview.taken))
    while len(figures) > 1 and cell_len(joined(figures)) + len(fresh) + 2 > width:
        figures.pop()
    text = fit(joined(figures), width - len(fresh) - 1) if width > len(fresh) + 8 else fit(joined(figures), width)
    name_width = min(cell_len(figures[0]), cell_len(text))
    return [(text[:name_width], "bold"), (text[name_width:], ""), (" ", ""), (fresh, style)]


def _figures(overview: Overview, run: RunSeen | None) -> list[str]:
    where = overview.cluster or "this machine"
    if run is None:
        count = len(overview.machines)
        return [where, "no run", f"{count} machine{'s' * (count != 1)}"]
    state = "" if run.state == "running" else run.state
    machines = len({rank.machine for rank in run.ranks})
    count = len(run.ranks)
    ranks = f"{count} rank{'s' * (count != 1)} on {machines} machine{'s' * (machines != 1)}" if count else ""
    step = f"step {run.step}" if run.step is not None else ""
    named = [f"{name} {number(value)}" for name, value in run.reports.items() if name not in ("step", "samples")]
    return [each for each in (f"{where} / {run.name}", state, step, *named[:2], ranks) if each]


def _spoken(overview: Overview, run: RunSeen | None) -> Sentence:
    return run.sentence if run is not None and run.sentence.text else overview.sentence


def _sentence(overview: Overview, run: RunSeen | None, width: int, most: int, *, has_reason: bool) -> list[Line]:
    """Return the sentence in at most so many lines and, with `has_reason`, what it is concluded from first of all."""
    sentence = _spoken(overview, run)
    mark = {"warning": "! ", "error": "! "}.get(sentence.level, "")
    if not sentence.text:
        return []
    lines: list[Line] = [[(part, NEWS_STYLES[sentence.level])] for part in paragraph(mark + sentence.text, width, most)]
    if has_reason and sentence.level != "fine" and sentence.why:
        lines.append([(fit(f"  {sentence.why[0]}", width).rstrip(), "dim")])
    return lines


def _applicants(overview: Overview, width: int) -> Line:
    first, *others = overview.applicants
    more = f" and {len(others)} more" if others else ""
    return [
        (fit(f"{first.name} ({first.short_id}) from {first.address}{more} asks to join: press a", width), "bold cyan")
    ]


def _footer(overview: Overview, state: ViewState, width: int) -> Line:
    if state.prompt is not None:
        return _prompt(overview, state, width)
    if state.message:
        return [(fit(state.message, width), "bold")]
    return [(next((each for each in _KEYS if cell_len(each) <= width), ""), "dim")]


def _prompt(overview: Overview, state: ViewState, width: int) -> Line:
    prompt = state.prompt
    assert prompt is not None
    if prompt.kind == "approve":
        found = applicant_of(overview, prompt)
        about = f"{found.name} {found.id} at {found.address}" if found is not None else "gone"
        question = "  y approve  n deny  Esc later"
        return [(fit(about, max(width - len(question), 1)), "bold"), (question, "")]
    run = next((run for run in overview.runs if run.id == prompt.subject), None)
    name = run.name if run is not None else ""
    asked = {
        "filter": "show only: ",
        "stop": f"type the name of the run, {name}, to stop it: ",
        "kill": f"type the name of the run, {name}, to KILL it: ",
    }[prompt.kind]
    typed = prompt.typed[-max(width - 12, 1) :]
    asked = fit(asked, min(cell_len(asked), max(width - cell_len(typed) - 1, 1)))
    line: Line = [(asked, "bold"), (typed, ""), (" ", "reverse")]
    return line if width_of(line) <= width else [(typed, "")]
