"""The panels of `covey top`: ranks, links and machines, events, logs, one rank, curves, help. Pure.

Each returns the lines below its title, at most as many as there is room for. Columns have fixed widths, so that nothing
jumps while figures change; those for which there is no room are left out.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

from rich.cells import cell_len

from covey.base.text import listed_ranks, spell_rate
from covey.cli.layout import NO_VALUE
from covey.cli.top.canvas import bar, byte_count, curve, fit, joined, lasted, number, paragraph, seconds, share
from covey.cli.top.state import LETTERS, machine_names, machine_of, shown_ranks, waiting_for

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from covey.cli.layout import Line
    from covey.cli.top.state import ViewState
    from covey.watch.output import OutputLine
    from covey.watch.overview import MachineSeen, Moment, Overview, RankSeen, RunSeen

RANK_STYLES: Final = {
    "active": "",
    "waiting": "cyan",
    "late": "bold yellow",
    "stopped": "bold magenta",
    "silent": "bold yellow",
    "lost": "bold red",
    "left": "dim",
    "joining": "green",
}
NEWS_STYLES: Final = {"fine": "", "note": "", "warning": "bold yellow", "error": "bold red"}
SLIM: Final = 40
"""Panels that are narrower show the two ends of a link and its speed only."""
RANK_COLOURS: Final = ("cyan", "yellow", "green", "magenta", "blue", "red")
HELP: Final = (
    ("1 2 3 4, Tab", "ranks, links and machines, events, logs"),
    ("j k, arrows", "move; Page Up, Page Down, Home and End too"),
    ("Enter", "show one rank alone; Esc goes back"),
    ("w", "sort ranks by how many others wait for them"),
    ("/", "show only what has this text; Esc shows all"),
    ("space", "pause the picture; the run continues"),
    ("n p", "the next or previous run"),
    ("c", "ask the run for a checkpoint"),
    ("s", "stop the run; asks for its name"),
    ("a", "approve or deny a machine that asks to join"),
    ("u", "how to open the page"),
    ("? q Ctrl-C", "this help; leave, without effect on the run"),
)
STATE_LETTERS: Final = ("A active, W waiting, B behind: others wait", "S stopped, ? silent, L lost, X left, J joining")


class _Cell(NamedTuple):
    title: str
    width: int
    leave_out: int
    """Those with higher numbers are left out first."""
    is_right: bool = True


def rank_rows(run: RunSeen, overview: Overview, state: ViewState, width: int, rows: int) -> list[Line]:
    """Return a table of the ranks; if there are more than rows, also a letter for each rank of the run."""
    names = machine_names(overview)
    ranks = shown_ranks(run, names, state)
    lines: list[Line] = []
    if len(run.ranks) > rows - 1 and rows > 4:
        lines += _state_letters(run, state, width, max((rows - 1) // 2, 1))
    if not ranks:
        what = f"no rank has {state.filter!r}; Esc shows all" if state.filter else "no rank has answered yet"
        return [*lines, [(what, "dim")]]
    longest = max((cell_len(names.get(rank.machine, rank.machine)) for rank in run.ranks), default=0)
    columns = _columns(min(max(longest, 7), 20), width)
    head: Line = []
    for at, column in enumerate(columns):
        head.append((" " * bool(at) + fit(column.title, column.width, right=column.is_right), "dim"))
    lines.append(head)
    left = max(rows - len(lines), 1)
    at = next((at for at, rank in enumerate(ranks) if rank.rank == state.rank), 0)
    begin = max(min(at - left // 2, len(ranks) - left), 0)
    readings = {machine.id: machine for machine in overview.machines}
    for rank in ranks[begin : begin + left]:
        lines.append(_rank_row(rank, names, readings.get(rank.machine), columns, is_marked=rank.rank == state.rank))
    return lines


def _columns(name_width: int, width: int) -> list[_Cell]:
    columns = [
        _Cell("rank", 4, 0),
        _Cell("machine", name_width, 0, is_right=False),
        _Cell("state", 9, 0, is_right=False),
        _Cell("waits", 6, 1, is_right=False),
        _Cell("step", 7, 2),
        _Cell("compute", 7, 4),
        _Cell("sync", 6, 3),
        _Cell("cpu", 4, 6),
        _Cell("gpu", 4, 5),
        _Cell("sent/s", 6, 7),
        _Cell("operation", 22, 8, is_right=False),
    ]
    while sum(each.width + 1 for each in columns) - 1 > width and any(each.leave_out for each in columns):
        columns.remove(max(columns, key=lambda each: each.leave_out))
    return columns


def _rank_row(
    rank: RankSeen, names: dict[str, str], machine: MachineSeen | None, columns: Sequence[_Cell], *, is_marked: bool
) -> Line:
    style = RANK_STYLES[rank.state]
    since = f" {seconds(rank.operation_age)}" if rank.operation and rank.operation_age is not None else ""
    values = {
        "rank": str(rank.rank),
        "machine": names.get(rank.machine, rank.machine),
        "state": f"{LETTERS[rank.state]} {'behind' if rank.state == 'late' else rank.state}",
        "waits": ",".join(map(str, rank.waits_for)),
        "step": number(rank.step),
        "compute": seconds(rank.compute),
        "sync": seconds(rank.sync),
        "cpu": share(machine.processor if machine is not None else None),
        "gpu": share(busiest(machine)),
        "sent/s": byte_count(rank.sent_per_second),
        "operation": rank.operation + since,
    }
    line: Line = []
    for at, column in enumerate(columns):
        text = " " * bool(at) + fit(values[column.title], column.width, right=column.is_right)
        line.append((text, "reverse" if is_marked else style if column.title in ("rank", "state", "machine") else ""))
    return line


def busiest(machine: MachineSeen | None) -> float | None:
    """Return how busy the busiest GPU of a machine is; None if that is not known."""
    known = [gpu.busy for gpu in machine.gpus if gpu.busy is not None] if machine is not None else []
    return max(known, default=None)


def _state_letters(run: RunSeen, state: ViewState, width: int, most: int) -> list[Line]:
    """Return a letter for each rank, in the order of their numbers; a dot for an active one."""
    per_row = max(width, 1)
    lines: list[Line] = []
    for begin in range(0, len(run.ranks), per_row):
        if len(lines) == most - 1 and begin + per_row < len(run.ranks):
            lines.append([(f"... and {len(run.ranks) - begin} more ranks", "dim")])
            break
        line: Line = []
        for rank in run.ranks[begin : begin + per_row]:
            letter = "·" if rank.state == "active" else LETTERS[rank.state]
            line.append((letter, "reverse" if rank.rank == state.rank else RANK_STYLES[rank.state]))
        lines.append(line)
    return lines


def link_rows(run: RunSeen | None, overview: Overview, state: ViewState, width: int, rows: int) -> list[Line]:
    """Return the machines with their readings, and the links between them by direction."""
    wanted = state.filter.casefold()
    lines = [*machine_lines(overview, wanted, width), *link_lines(run, machine_names(overview), wanted, width)]
    if not lines:
        lines.append([(f"nothing has {state.filter!r}; Esc shows all" if wanted else "no machine is known", "dim")])
    begin = min(state.scroll, max(len(lines) - rows, 0))
    return lines[begin : begin + rows]


def link_lines(run: RunSeen | None, names: dict[str, str], wanted: str, width: int) -> list[Line]:
    """Return a line for each link: its ends, what it can carry and carries, and how it goes."""
    lines: list[Line] = []
    for link in run.links if run is not None else ():
        source, target = names.get(link.source, link.source), names.get(link.target, link.target)
        ends = f"{source} > {target}" if width >= SLIM else fit(f"{source}>{target}", max(width - 12, 1))
        carries = f"{byte_count(link.sent_per_second)}/s now" if link.sent_per_second is not None else ""
        can = spell_rate(link.bytes_per_second) if link.bytes_per_second is not None else NO_VALUE
        trip = seconds(link.round_trip) if link.round_trip is not None else ""
        way = joined((link.lane, link.medium, link.interface, f"by relay {link.relay}" * bool(link.relay)), " ")
        parts = (ends, can, carries, trip, way)
        if not wanted or wanted in joined(parts).casefold():
            lines.append([(_fitting(parts, width), "")])
    return lines


def machine_lines(overview: Overview, wanted: str, width: int) -> list[Line]:
    """Return a line for each machine: its state, and how busy it is."""
    names = [cell_len(machine.name) for machine in overview.machines]
    name_width = min(max([7, *names]), max(width // 3, 7))
    lines: list[Line] = []
    for machine in overview.machines:
        memory = ""
        if machine.memory_used is not None and machine.memory_total:
            memory = f"memory {share(machine.memory_used / machine.memory_total)}"
        parts = (
            machine.state if machine.state != "running" else "",
            machine.problem,
            f"cpu {share(machine.processor)}" if machine.processor is not None else "",
            f"gpu {share(busiest(machine))}" if machine.gpus else "",
            memory,
            f"{machine.temperature:.0f} °C" if machine.temperature is not None else "",
            f"{machine.cores} cores" if machine.cores is not None else "",
        )
        if not wanted or wanted in f"{machine.name} {joined(parts)}".casefold():
            style = "bold yellow" if machine.state in ("silent", "refused") else ""
            name = (fit(machine.name, name_width), style or "bold")
            lines.append([name, (" ", ""), (_fitting(parts, width - name_width - 1), style)])
    return lines


def _fitting(parts: Iterable[str], width: int) -> str:
    """Return as many of the parts as there is room for, the first ones; the first one is cut if it is too long."""
    kept = [part for part in parts if part]
    while len(kept) > 1 and cell_len(joined(kept)) > width:
        kept.pop()
    return fit(joined(kept), max(width, 1)).rstrip()


def event_rows(run: RunSeen | None, state: ViewState, width: int, rows: int, *, most: int = 1) -> list[Line]:
    """Return the last events, the newest at the bottom, each in at most `most` lines."""
    wanted = state.filter.casefold()
    lines: list[Line] = []
    for each in run.happenings if run is not None else ():
        if not wanted or wanted in f"{each.kind} {each.text}".casefold():
            for at, part in enumerate(paragraph(each.text, max(width - 9, 1), most)):
                clock = _clock(each.at) if at == 0 else " " * 8
                lines.append([(clock, "dim"), (" ", ""), (part, NEWS_STYLES[each.level])])
    return _scrolled(lines, state.scroll, rows) or [[("no event yet", "dim")]]


def log_rows(state: ViewState, width: int, rows: int) -> list[Line]:
    """Return the last lines of output, the newest at the bottom."""
    wanted = state.filter.casefold()
    label = max((cell_len(_label(line)) for line in state.output), default=0)
    lines = [
        _log_line(line, min(label, max(width // 3, 4)), width)
        for line in state.output
        if not wanted or wanted in f"{_label(line)} {line.text}".casefold()
    ]
    if not lines:
        return [[("no output is kept of this run" if not wanted else f"no line has {state.filter!r}", "dim")]]
    return _scrolled(lines, state.scroll, rows)


def _log_line(line: OutputLine, label_width: int, width: int) -> Line:
    style = RANK_COLOURS[line.rank % len(RANK_COLOURS)] if line.rank is not None else "bold"
    room = max(width - label_width - 10, 1)
    return [
        (_clock(line.at), "dim"), (" ", ""), (fit(_label(line), label_width), style), (" ", ""),
        (fit(line.text.expandtabs(), room).rstrip(), ""),
    ]  # fmt: skip


def _label(line: OutputLine) -> str:
    return joined((line.machine, "" if line.rank is None else str(line.rank)), " ")


def rank_alone(run: RunSeen, overview: Overview, state: ViewState, width: int, rows: int) -> list[Line]:
    """Return all that is known of the chosen rank, and its last output."""
    rank = next((each for each in run.ranks if each.rank == state.rank), None)
    if rank is None:
        return [[("this rank is no longer in the run; Esc goes back", "dim")]]
    machine = machine_of(overview, rank)
    name = machine.name if machine is not None else rank.machine
    waited = waiting_for(run).get(rank.rank, 0)
    host = machine.host if machine is not None and machine.host != name else ""
    age = f"since {seconds(rank.operation_age)}" if rank.operation_age is not None else ""
    count = f"number {rank.sequence}" if rank.sequence is not None else ""
    received = f"received {byte_count(rank.received_per_second)}/s"
    saved = f"saved {share(rank.saved)}" if rank.saved is not None else ""
    pairs = [
        ("machine", joined((name, host, f"process {rank.pid}"))),
        ("state", joined((f"{LETTERS[rank.state]} {rank.state}", rank.reason))),
        ("operation", joined((rank.operation or "none", age, count))),
        ("waits for", f"rank {listed_ranks(rank.waits_for)}" if rank.waits_for else "no rank"),
        ("waited for", f"by {waited} rank{'s' * (waited != 1)}" if waited else "by no rank"),
        ("step", joined((number(rank.step), f"compute {seconds(rank.compute)}", f"sync {seconds(rank.sync)}"))),
        ("transfers", joined((f"sent {byte_count(rank.sent_per_second)}/s", received))),
        ("codec", joined((rank.codec or "none", rank.codec_reason, saved))),
        ("plan", rank.plan or "not known"),
        ("age", f"these figures are {seconds(rank.age)} old" if rank.age > 3 else ""),
    ]
    lines: list[Line] = []
    for title, text in pairs:
        for at, part in enumerate(paragraph(text, max(width - 11, 1), 3) if text else ()):
            lines.append(
                [
                    (fit(title if at == 0 else "", 11), "dim"),
                    (part, RANK_STYLES[rank.state] if title == "state" else ""),
                ]
            )
    if machine is not None:
        lines += machine_lines(_only(overview, machine), "", width)
    left = rows - len(lines) - 1
    own = [line for line in state.output if line.rank == rank.rank]
    if left > 0 and own:
        lines.append([("last output", "dim")])
        lines += [[(fit(line.text.expandtabs(), width).rstrip(), "")] for line in own[-left:]]
    return lines[:rows]


def _only(overview: Overview, machine: MachineSeen) -> Overview:
    return replace(overview, machines=(machine,))


def curve_rows(run: RunSeen, history: Sequence[Moment], width: int, height: int) -> tuple[str, list[Line]]:
    """Return the title and the lines of the most useful curve: the loss, another report, or the time of a step."""
    name = (
        "loss" if "loss" in run.reports else next((each for each in run.reports if each not in ("step", "samples")), "")
    )
    if name:
        values, show = [each.reports[name] for each in history if name in each.reports], number
    else:
        values, show = [each.step_seconds for each in history if each.step_seconds is not None], seconds
    if not values:
        hint = (
            "no figures yet" if name else "the program reports no loss: group.report(step=..., loss=...) shows it here"
        )
        return name or "loss", [[(part, "dim")] for part in paragraph(hint, width, height)]
    now = run.reports.get(name) if name else values[-1]
    lines: list[Line] = [[(row, "cyan")] for row in curve(values, width, max(height - 1, 1))]
    lines.append([(show(now), "bold"), (f"  {show(values[0])} at first", "dim")])
    return name or "time of a step", lines[:height]


def step_rows(run: RunSeen, width: int) -> list[Line]:
    """Return how a step is spent, and what compression saves."""
    compute, sync = run.compute_seconds, run.sync_seconds
    lines: list[Line] = []
    if compute is not None and sync is not None and compute + sync > 0:
        room = max(width - 16, 1)
        for title, value in (("compute", compute), ("sync", sync)):
            drawn = fit(bar(value / (compute + sync), room), room)
            style = "green" if title == "compute" else "yellow"
            lines.append([(fit(title, 8), "dim"), (drawn, style), (fit(seconds(value), 8, right=True), "")])
    rate = f"{number(run.samples_per_second)} samples/s" if run.samples_per_second is not None else ""
    saved = f"{share(run.saved)} saved" if run.saved is not None else ""
    whole = joined((rate, saved))
    parts = [whole] if cell_len(whole) <= width else [rate, saved]
    return [*lines, *([(part, "")] for part in parts if part)]


def help_rows(width: int, rows: int) -> list[Line]:
    """Return what the keys and letters mean."""
    lines: list[Line] = []
    for keys, what in HELP:
        lines += [
            [(fit(keys if at == 0 else "", 14), "bold"), (part, "")]
            for at, part in enumerate(paragraph(what, max(width - 14, 1), 2))
        ]
    letters = [part for words in STATE_LETTERS for part in paragraph(words, width, 2)]
    return [*lines, *([(part, "dim")] for part in letters)][:rows]


def _scrolled(lines: Sequence[Line], scroll: int, rows: int) -> list[Line]:
    """Return the last lines, or those `scroll` lines before them."""
    end = max(len(lines) - scroll, min(rows, len(lines)))
    return list(lines[max(end - rows, 0) : end])


def _clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))


def hints(run: RunSeen | None, overview: Overview, width: int, rows: int) -> list[Line]:
    """Return what the sentence was concluded from, and what to type next."""
    sentence = run.sentence if run is not None and run.sentence.text else overview.sentence
    lines: list[Line] = [[(part, "dim")] for why in sentence.why for part in paragraph(why, width, 2)]
    lines += [
        [("  " + part, "bold")] for command in sentence.commands for part in paragraph(command, max(width - 2, 1), 2)
    ]
    return lines[:rows]


def spell_age(at: float, now: float) -> str:
    """Return how long ago something began."""
    return lasted(max(now - at, 0.0))


def texts(lines: Iterable[Line]) -> list[str]:
    """Return lines without their styles."""
    return ["".join(text for text, _ in line) for line in lines]
