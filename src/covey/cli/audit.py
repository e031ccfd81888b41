"""`covey audit`: shows the audit log of this machine, and checks that it is complete and unchanged."""

from __future__ import annotations

import contextlib
import json
import re
import sys
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import typer

from covey.base.errors import ConfigError
from covey.base.text import printable
from covey.cli.layout import Column, room, table
from covey.cli.terminal import plural, say
from covey.net.audit import audit_reader
from covey.net.audit.audit_log import AUDIT_TEXT_LIMIT, AUDITED_EVENTS
from covey.net.keys.identity import short_id

if TYPE_CHECKING:
    from collections.abc import Iterable

    from covey.net.audit.audit_log import AuditEntry

ENTRIES_CHECK_EVERY: Final = 0.25
"""How often `--follow` looks for new entries."""
_TIME_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_COLUMNS: Final = ("TIME", "CLUSTER", "EVENT", "RUN", "NODE", "ID", "ADDRESS", "REASON")
_LEFT_OUT: Final = {"ID": 4, "RUN": 3, "CLUSTER": 2, "ADDRESS": 1}
"""Columns that are left out on a narrow terminal, the highest number first."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def audit(
    cluster: Annotated[str | None, typer.Option(metavar="NAME", help="Only entries about this cluster.")] = None,
    since: Annotated[
        str | None, typer.Option(metavar="TIME", help="Only later ones: 90s, 15m, 2h, 7d, or 2026-01-31T12:00.")
    ] = None,
    event: Annotated[
        list[str] | None, typer.Option(metavar="EVENT", help="Only such events; may be given several times.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Show new entries as they come, until Ctrl-C.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Check that no entry was changed or removed, and show none.")
    ] = False,
) -> None:
    """Show the audit log of this machine: nodes linked, joined, lost and refused, denials, changes of secrets.

    --verify exits with 0 if the log is whole, and with 1 if it is not.
    """
    if verify:
        if follow or since is not None or cluster is not None or event:
            raise ConfigError("--verify checks the whole log; only --json goes with it")
        return _verify(as_json=as_json)
    if unknown := set(event or ()) - AUDITED_EVENTS.keys():
        raise ConfigError(f"there is no event {min(unknown)!r}; there are: {', '.join(AUDITED_EVENTS)}")
    choice = _Choice(cluster, _moment(since), frozenset(event or ()))
    new = audit_reader.Follower() if follow else None  # opened before the old entries are read, so that none is missed
    try:
        shown = [entry for entry in audit_reader.entries() if choice.takes(entry)]
        if as_json or follow or not sys.stdout.isatty():
            _print_lines(shown, as_json=as_json)
        elif shown:
            _print_table(shown)
        if not shown and not follow and not as_json:
            say("The audit log of this machine has no entry that fits.", err=True)
        if new is not None:
            _follow(new, choice, max((entry.number for entry in shown), default=0), as_json=as_json)
    finally:
        if new is not None:
            new.close()


class _Choice:
    """Selects entries."""

    def __init__(self, cluster: str | None, since: datetime | None, events: frozenset[str]) -> None:
        self._cluster, self._since, self._events = cluster, since, events

    def takes(self, entry: AuditEntry) -> bool:
        if self._cluster not in (None, entry.cluster) or (self._events and entry.event not in self._events):
            return False
        if self._since is None:
            return True
        try:
            return entry.at >= self._since
        except (ValueError, TypeError):  # it was tampered with, so it is shown
            return True


def _moment(text: str | None) -> datetime | None:
    """Return the moment that `--since` means."""
    if text is None:
        return None
    if match := re.fullmatch(r"([0-9]{1,6})([smhdw])", text.strip()):
        return datetime.now(UTC) - timedelta(seconds=int(match[1]) * _TIME_UNITS[match[2]])
    try:
        return datetime.fromisoformat(text.strip()).astimezone(UTC)
    except (ValueError, OverflowError):
        raise ConfigError(f"--since {text!r} is no time; write 90s, 15m, 2h, 7d or 2026-01-31T12:00") from None


def _print_lines(shown: Iterable[AuditEntry], *, as_json: bool) -> None:
    for entry in shown:
        print(json.dumps(msgspec.to_builtins(entry)) if as_json else "\t".join(map(_or_dash, _cells(entry))))
    sys.stdout.flush()


def _print_table(shown: list[AuditEntry]) -> None:
    if not shown:
        return typer.echo("There is no such entry in the audit log of this machine.")
    typer.echo(table(_columns(shown), room()))


def _columns(shown: list[AuditEntry]) -> list[Column]:
    cells = zip(*map(_cells, shown), strict=True)
    return [
        Column(title, texts, leave_out=_LEFT_OUT.get(title, 0), wraps=title == "REASON")
        for title, texts in zip(_COLUMNS, cells, strict=True)
    ]


def _cells(entry: AuditEntry) -> tuple[str, ...]:
    """Return the cells of an entry, without control characters: the file may have been tampered with."""
    try:
        node = short_id(bytes.fromhex(entry.node))
    except ValueError:
        node = entry.node
    reason = f"{entry.reason} ({entry.count} times)" if entry.count > 1 else entry.reason
    moment = entry.time.partition(".")[0] + "Z"
    cells = (moment, entry.cluster, entry.event, entry.run, entry.name, node, entry.address, reason)
    return tuple(printable(cell, AUDIT_TEXT_LIMIT + 40) for cell in cells)


def _or_dash(cell: str) -> str:
    return cell or "-"


def _follow(new: audit_reader.Follower, choice: _Choice, last: int, *, as_json: bool) -> None:
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            found = [entry for entry in new.read() if entry.number > last and choice.takes(entry)]
            _print_lines(found, as_json=as_json)
            time.sleep(ENTRIES_CHECK_EVERY)


def _verify(*, as_json: bool) -> None:
    verdict = audit_reader.verify()
    problems = [printable(problem) for problem in verdict.problems]
    if as_json:
        report = {
            "whole": not problems,
            "entries": verdict.count,
            "last": verdict.last,
            "problems": problems,
            "remarks": verdict.remarks,
        }
        typer.echo(json.dumps(report))
    else:
        for remark in verdict.remarks:
            say(f"note: {remark}")
        for problem in problems:
            say(f"PROBLEM: {problem}", err=True)
        if not problems:
            last = f", the last one with the hash {verdict.last}" if verdict.last else ""
            say(f"The audit log is whole: {plural(verdict.count, 'entry', 'entries')}{last}.")
    raise typer.Exit(1 if problems else 0)
