"""Draws the links of a run for a terminal, as a tree of sites and machines. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from rich.text import Text

from covey.base.text import duration, spell_rate
from covey.cli.layout import Column, lay_out, wrap
from covey.cli.terminal import plural

if TYPE_CHECKING:
    from covey.cli.status.network import NetworkHost, RunNetwork
    from covey.plan.network import Matrix

MOST_PAIRS: Final = 8
"""Up to this many members, the speed of every pair is shown."""
BAR: Final = 10
"""Letters of the bar of the fastest machine."""
NOT_MEASURED: Final = (
    "run {}: its links are not measured; three or more ranks on several machines measure them at their third large "
    "all_reduce"
)


def graph(run: str, found: RunNetwork | None, width: int | None) -> Text:
    """Return the links of a run, in lines of at most `width` letters; without a terminal (None), in ASCII."""
    if found is None:
        text = NOT_MEASURED.format(run)
        return Text("\n".join(wrap(text, width) if width else [text]), "yellow")
    lines = [Text(line) for line in _headline(run, found, width)]
    lines += [Text.assemble(*line) for line in lay_out(_tree(found, is_ascii=width is None), width, "dim")]
    if len(found.network.trunks) > 2:
        lines += [Text.assemble(*line) for line in lay_out(_matrix("site", found.network.trunks), width, "dim")]
    else:
        for (one, other), rate in trunks(found).items():
            lines.append(Text(f"site {one} to site {other}: {spell_rate(rate)}"))
    if len(found.network.hosts) <= MOST_PAIRS:
        lines += [Text.assemble(*line) for line in lay_out(_matrix("rank", found.network.rates), width, "dim")]
    return Text("\n").join(lines)


def _headline(run: str, found: RunNetwork, width: int | None) -> list[str]:
    counts = f"{plural(len(found.hosts), 'machine')} at {plural(len(found.network.trunks), 'site')}"
    text = f"run {run}: {counts}, measured {duration(found.age)} ago"
    texts = [text, f"plan of large all_reduces: {found.plan}"] if found.plan else [text]
    return [line for each in texts for line in (wrap(each, width) if width else [each])]


def _tree(found: RunNetwork, *, is_ascii: bool) -> list[Column]:
    """Return sites and their machines, with a bar for the slower direction of each."""
    middle, last, block = ("|- ", "`- ", "#") if is_ascii else ("├─ ", "└─ ", "█")
    fastest = max((slower(host) for host in found.hosts), default=1.0)
    rows: list[tuple[str, str, str, str, str, str, str]] = []
    for site in range(len(found.network.trunks)):
        hosts = [host for host in found.hosts if host.site == site]
        rows.append((f"site {site}", "", "", "", "", "", ""))
        for host in hosts:
            length = max(1, round(BAR * slower(host) / fastest))
            rows.append(
                (
                    (last if host is hosts[-1] else middle) + host.name,
                    ", ".join(map(str, host.ranks)),
                    spell_rate(host.up),
                    spell_rate(host.down),
                    block * length,
                    "" if host.medium == "unknown" else host.medium,
                    duration(host.age),
                )
            )
    cells = list(zip(*rows, strict=True))
    has_ages = any(cell not in ("", duration(found.age)) for cell in cells[6])  # else the headline has said it
    columns = [
        Column("machine", cells[0]),
        Column("ranks", cells[1], leave_out=1, wraps=True),
        Column("sends", cells[2], is_right=True),
        Column("receives", cells[3], is_right=True),
        Column("", cells[4], leave_out=3),
        Column("medium", cells[5], leave_out=2),
    ]
    return [*columns, Column("age", cells[6], is_right=True, leave_out=1)] if has_ages else columns


def _matrix(what: str, rates: Matrix) -> list[Column]:
    """Return what each rank or site sends to each other one, in Mbit/s."""
    places = range(len(rates))
    cells = [[mbit(rates[one][other]) if one != other else "" for one in places] for other in places]
    return [
        Column("Mbit/s", [f"{what} {place} to" for place in places]),
        *(Column(str(other), cells[other], is_right=True, leave_out=9) for other in places),
    ]


def mbit(rate: float) -> str:
    """Return a speed in Mbit/s, in three digits."""
    return f"{rate * 8 / 1e6:.3g}" if math.isfinite(rate) else "?"


def slower(host: NetworkHost) -> float:
    """Return the speed of a machine in its slower direction."""
    speed = min(host.up, host.down)
    return speed if math.isfinite(speed) else 1.0


def trunks(found: RunNetwork) -> dict[tuple[int, int], float]:
    """Return what each site sends to each other one."""
    rows = found.network.trunks
    return {(a, b): rate for a, row in enumerate(rows) for b, rate in enumerate(row) if a != b}
