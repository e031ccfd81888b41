"""The links and collectives of a run as tables that fit the terminal, and as JSON. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from covey.base.text import listed
from covey.cli.layout import COLUMN_GAP, Column, lay_out, wrap
from covey.cli.terminal import plural
from covey.lab.bench.network.pairs import LinkFigures, slowest, used_by
from covey.lab.bench.report import format_seconds, result_json, size_text, three_digits

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from covey.cli.layout import Piece
    from covey.lab.bench.network.terms import NetworkTerms, RankOffer
    from covey.lab.bench.report import Measurement

LABEL_WIDTH: Final = 18
"""The most characters of a rank with the name of its machine."""
FAST_SHARE, SLOW_LINK_SHARE = 0.5, 0.1
"""A link of at least this share of the best one is green, or yellow; a slower one is red."""
NETWORK_FORMAT: Final = 1
"""Version of the JSON layout."""


def matrix(
    title: str,
    labels: Sequence[str],
    values: Mapping[tuple[int, int], float],
    write: Callable[[float], str],
    width: int | None,
    *,
    is_less_better: bool = False,
) -> list[Text]:
    """Return a title and lines of at most `width` characters: rows are senders, columns are receivers.

    `values` are by sender and receiver. If not all columns fit, they follow in several blocks, each with all rows.
    """
    best = min(values.values()) if is_less_better else max(values.values())
    ranks = range(len(labels))

    def cell(sender: int, receiver: int) -> Piece:
        if (value := values.get((sender, receiver))) is None:
            return "-", "dim"
        return write(value), _style(best / value if is_less_better else value / best)

    senders = Column("from", [_shortened(label) for label in labels])
    columns = [
        Column(f"to {receiver}", [cell(sender, receiver) for sender in ranks], is_right=True) for receiver in ranks
    ]
    lines = [Text(title, "bold")]
    for block in _blocks(senders, columns, width):
        lines += [Text.assemble(*line) for line in lay_out([senders, *block], width, "bold")]
    return lines


def _blocks(senders: Column, columns: Sequence[Column], width: int | None) -> list[list[Column]]:
    blocks: list[list[Column]] = [[]]
    used = senders.width()
    for column in columns:
        if width is not None and blocks[-1] and used + COLUMN_GAP + column.width() > width:
            blocks.append([])
            used = senders.width()
        blocks[-1].append(column)
        used += COLUMN_GAP + column.width()
    return blocks


def _shortened(label: str) -> str:
    return label if cell_len(label) <= LABEL_WIDTH else set_cell_size(label, LABEL_WIDTH - 2).rstrip() + ".."


def _style(share: float) -> str:
    return "green" if share >= FAST_SHARE else "yellow" if share >= SLOW_LINK_SHARE else "red"


def bits(bytes_per_second: float) -> str:
    """Write a speed in bits per second with three digits and the letter of its unit, as in `941M`."""
    value = bytes_per_second * 8
    for letter, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= 0.9995 * scale:
            return f"{three_digits(value / scale)}{letter}"
    return three_digits(value)


def bits_per_second(bytes_per_second: float) -> str:
    """Write a speed as in `941 Mbit/s`."""
    text = bits(bytes_per_second)
    return f"{text[:-1]} {text[-1]}bit/s" if text[-1].isalpha() else f"{text} bit/s"


def short_seconds(seconds: float) -> str:
    """Write a duration with three digits and its unit, without a blank."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= 0.9995 * scale:
            return f"{three_digits(seconds / scale)}{unit}"
    return f"{three_digits(seconds / 1e-6)}us"


def headline(terms: NetworkTerms, when: str) -> str:
    """Return one line that says what is measured."""
    machines = plural(len(set(terms.hosts)), "machine")
    return f"{plural(terms.size, 'rank')} on {machines}, {when[:16].replace('T', ' ')}"


def links_view(terms: NetworkTerms, links: Sequence[LinkFigures], width: int | None) -> Text:
    """Return the matrices of all pairs, and which link is the slowest."""
    labels = [terms.label(rank) for rank in range(terms.size)]
    by_pair = {(link.sender, link.receiver): link for link in links}
    alone = {pair: link.bytes_per_second for pair, link in by_pair.items()}
    both = {pair: link.both_bytes_per_second for pair, link in by_pair.items()}
    trips = {pair: link.round_trip for pair, link in by_pair.items()}
    least = slowest(links)
    last = (
        f"slowest link: {terms.label(least.sender)} to {terms.label(least.receiver)}, "
        f"{bits_per_second(least.bytes_per_second)}"
    )
    lines = [
        *matrix("one stream, bit/s", labels, alone, bits, width),
        Text(),
        *matrix("both directions at once, bit/s", labels, both, bits, width),
        Text(),
        *matrix("round trip", labels, trips, short_seconds, width, is_less_better=True),
        Text(),
        *(Text(line) for text in (*_lanes(links), last) for line in _wrapped(text, width)),
        Text(),
    ]
    return Text("\n").join(lines)


def _lanes(links: Sequence[LinkFigures]) -> list[str]:
    """Return a line for each kind of lane, with its pairs unless all are of that kind."""
    pairs: dict[str, list[str]] = {}
    for link in links:
        if link.sender < link.receiver:
            pairs.setdefault(link.lane, []).append(f"{link.sender}-{link.receiver}")
    if len(pairs) == 1:
        return [f"lanes: {kind}" for kind in pairs]
    return [f"{kind} lanes: {listed(of_kind)}" for kind, of_kind in pairs.items()]


def share(row: Measurement, links: Sequence[LinkFigures]) -> float | None:
    """Return the bus bandwidth by the speed of the slowest link; None for an operation that moves nothing."""
    if not row.case.bytes:
        return None
    return row.bus_bandwidth / slowest(used_by(row.case.operation.name, links, row.case.ranks)).bytes_per_second


def collectives_view(rows: Sequence[Measurement], links: Sequence[LinkFigures], width: int | None) -> Text:
    """Return the measurements of one operation as a table, sizes in order."""
    case = rows[0].case
    columns = [
        Column("size", [(size_text(row.case), "bold") for row in rows], is_right=True),
        Column("p50", [format_seconds(row.p50) for row in rows], is_right=True),
        Column("p99", [format_seconds(row.p99) for row in rows], leave_out=1, is_right=True),
        Column("bus", [bits_per_second(row.bus_bandwidth) if row.case.bytes else "-" for row in rows], is_right=True),
        Column("of the slowest link", [_share_cell(share(row, links)) for row in rows], is_right=True),
        Column("CPU s/GiB", [_cpu_cell(row) for row in rows], leave_out=2, is_right=True),
    ]
    title = Text(f"{case.operation.name}, {case.ranks} ranks, {case.dtype}", "bold")
    return Text("\n").join([title, *(Text.assemble(*line) for line in lay_out(columns, width, "bold")), Text()])


def case_line(row: Measurement, links: Sequence[LinkFigures]) -> str:
    """Return one case in one line of plain text."""
    moved = share(row, links)
    speed = "" if moved is None else f", {bits_per_second(row.bus_bandwidth)}, {_percent(moved)} of the slowest link"
    return f"{row.case}: {format_seconds(row.p50)}{speed}"


def network_json(
    terms: NetworkTerms,
    offers: Sequence[RankOffer],
    links: Sequence[LinkFigures],
    rows: Sequence[Measurement],
    version: str,
) -> dict[str, Any]:
    """Return everything that was measured, down to each iteration of each rank, as plain values."""
    return {
        "format": NETWORK_FORMAT,
        "version": version,
        "ranks": [
            {"rank": rank, "host": name, "machine": offer.facts}
            for rank, (name, offer) in enumerate(zip(terms.names, offers, strict=True))
        ],
        "settings": {
            "operations": list(terms.grid.operations),
            "sizes": list(terms.grid.sizes),
            "dtype": terms.grid.dtype,
            "repetitions": terms.grid.repetitions,
            "round_seconds": terms.grid.round_seconds,
            "pair_seconds": terms.pair_seconds,
        },
        "links": [
            {
                "from": link.sender,
                "to": link.receiver,
                "lane": link.lane,
                "round_trip_seconds": link.round_trip,
                "bytes_per_second": link.bytes_per_second,
                "both_bytes_per_second": link.both_bytes_per_second,
            }
            for link in links
        ],
        "results": [result_json(row) | {"share_of_slowest_link": share(row, links)} for row in rows],
    }


def _cpu_cell(row: Measurement) -> str:
    return "-" if row.cpu_per_gib is None else three_digits(row.cpu_per_gib)


def _share_cell(value: float | None) -> Piece:
    if value is None:
        return "-", ""
    return _percent(value), "green" if value >= 0.8 else "yellow" if value >= 0.5 else ""


def _percent(value: float) -> str:
    if value < 0.0005:
        return "<0.1 %"
    return f"{100 * value:.0f} %" if value >= 0.0995 else f"{100 * value:.1f} %"


def _wrapped(text: str, width: int | None) -> list[str]:
    return wrap(text, width) if width is not None else [text]
