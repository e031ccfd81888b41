"""Joins the run of a benchmark between machines, shows it on rank 0, and writes its files."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import Console

from covey.base.errors import ConfigError
from covey.base.version import __version__
from covey.cli.layout import room
from covey.cli.terminal import is_lively, plural, working
from covey.lab.bench.measure import counting
from covey.lab.bench.network.report import case_line, collectives_view, headline, links_view, network_json
from covey.lab.bench.network.session import Agreed, CaseBegun, LinksDone, NetworkCaseDone, PairsDone, measure
from covey.lab.bench.network.terms import parse, writer
from covey.lab.bench.plot import draw
from covey.runtime.environment import find_launched_rank

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from covey.lab.bench.network.pairs import LinkFigures
    from covey.lab.bench.network.terms import NetworkTerms, RankOffer
    from covey.lab.bench.report import Measurement
    from covey.runtime.group.group import Group


@dataclass(frozen=True, kw_only=True)
class NetworkRequest:
    """What `covey bench` was told on this machine; checked when built."""

    options: dict[str, str]
    """What to measure, by the names of the options; the other ranks follow it."""
    join: dict[str, Any]
    """Arguments of `covey.join` that say which run this is, and how to reach the others."""
    files: dict[str, Path]
    """Where to write results, by `json` and `plot`."""

    def __post_init__(self) -> None:
        parse(self.options)


@dataclass
class NetworkResults:
    """What rank 0 has collected."""

    terms: NetworkTerms
    offers: list[RankOffer]
    links: list[LinkFigures] = field(default_factory=list)
    rows: list[Measurement] = field(default_factory=list)

    def text(self, kind: str) -> str:
        """Return the contents of a file of results."""
        if kind == "plot":
            return draw(self.rows, headline(self.terms, str(self.offers[0].facts.get("date"))))
        document = network_json(self.terms, self.offers, self.links, self.rows, __version__)
        return json.dumps(document, separators=(",", ":"))


def is_in_a_run(env: Mapping[str, str]) -> bool:
    """Tell whether a launcher has started this process as one rank of several, or `covey run` has started it."""
    return "COVEY_RUN" in env or "COVEY_RANK" in env or find_launched_rank(env).size > 1


def run_network(request: NetworkRequest) -> None:
    """Join the run and measure it. Rank 0 prints the results; the other ranks print one line.

    Raises:
        ConfigError: the run has one rank, or ranks were given different options.
        PeerLostError: a rank was lost.
    """
    import covey

    console = Console()
    name = request.join.get("run") or os.environ.get("COVEY_RUN")
    with working(f"waiting for the other ranks{f' of run {name!r}' if name else ''} ..."):
        # Results are compared with exact sums, and a lost rank makes the figures of the others worthless.
        group = covey.join(**request.join, on_loss="raise", compress="none")
    with group:
        results = _measure(group, request, console)
        for kind in ("json", "plot"):
            _write(group, request, results, kind, console)


def _measure(group: Group, request: NetworkRequest, console: Console) -> NetworkResults:
    """Take part in the measurement of a run; on rank 0, show it."""
    with closing(measure(group, request.options, tuple(request.files))) as events, ExitStack() as stack:
        agreed = next(events)
        assert isinstance(agreed, Agreed)
        results = NetworkResults(agreed.terms, agreed.offers)
        terms = agreed.terms
        if group.rank != 0:
            text = f"rank {group.rank} of {group.size} takes part; rank 0 ({terms.names[0]}) prints the results"
            console.print(text, highlight=False, markup=False, soft_wrap=True)
            for event in events:
                if isinstance(event, LinksDone):
                    results.links = event.links
            return results
        console.print(headline(terms, str(agreed.offers[0].facts.get("date"))), style="dim", highlight=False)
        pairs, cases = group.size * (group.size - 1) // 2, list(terms.grid.cases(group.size))
        say = stack.enter_context(counting(pairs + len(cases), console))
        unprinted: list[Measurement] = []

        def print_table() -> None:
            if unprinted:
                _print(console, collectives_view(unprinted, results.links, room()))
                unprinted.clear()

        for event in events:
            match event:
                case PairsDone():
                    say(f"{plural(pairs, 'pair')} of ranks", event.pairs)
                case LinksDone():
                    results.links = event.links
                    _print(console, links_view(terms, event.links, room()))
                case CaseBegun():
                    if unprinted and unprinted[-1].case.operation != event.case.operation:
                        print_table()
                    say(str(event.case), 0)
                case NetworkCaseDone():
                    assert event.measurement is not None
                    say(str(event.case), 1)
                    results.rows.append(event.measurement)
                    unprinted.append(event.measurement)
                    if not is_lively(console):
                        _print(console, case_line(event.measurement, results.links))
        print_table()
        return results


def _write(group: Group, request: NetworkRequest, results: NetworkResults, kind: str, console: Console) -> None:
    """Write a file on the lowest rank that was told to, with what rank 0 has collected."""
    where = writer(results.offers, kind)
    if where is None or group.rank not in (0, where):
        return
    text = results.text(kind) if group.rank == 0 else ""
    if where != 0 and group.rank == 0:
        group.send_object(text, where)
    if group.rank == where:
        path = request.files[kind]
        path.write_text(text if where == 0 else group.recv_object(0, type=str))
        console.print(f"wrote {path}", highlight=False, markup=False, soft_wrap=True)


def _print(console: Console, text: Any) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def require_run(given: Mapping[str, Any]) -> None:
    """Raise ConfigError for options about a run's nodes that were given without the name of a run."""
    for option, value in given.items():
        if value:
            raise ConfigError(f"{option} is about the nodes of a run; name the run with --run")


def require_one_machine(given: Mapping[str, Any]) -> None:
    """Raise ConfigError for options about processes that `covey bench` starts itself."""
    for option, value in given.items():
        if value:
            raise ConfigError(
                f"{option} is about processes that `covey bench` starts on one machine; leave it out in a run"
            )
