"""Asks a person before files go to a machine for the first time, and shows what would go there."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final, Protocol

import typer

from covey.agent.folder import lines_about
from covey.base.text import printable, size_text
from covey.cli.terminal import confirm, plural, say
from covey.net.audit import audit_log
from covey.net.keys import trust
from covey.net.keys.identity import id_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from covey.agent.callers import AgentCaller, FoundAgents
    from covey.agent.data_folder import DataFolder
    from covey.agent.requests import FileEntry
    from covey.agent.snapshot import Snapshot
    from covey.net.keys.clusters import Cluster
    from covey.net.keys.trust import TrustedMachine


class Sendable(Protocol):
    """A folder, or a data set, as a person sees it before it is sent."""

    @property
    def folder(self) -> object: ...
    @property
    def size(self) -> int: ...
    @property
    def entries(self) -> Sequence[FileEntry]: ...


LARGEST_SHOWN: Final = 5
"""The largest entries of a folder that are shown."""


def tell_left_out(snapshot: Snapshot | DataFolder, machines: Sequence[AgentCaller]) -> None:
    """Print which files of a folder are not sent, and to which machines nothing goes."""
    for line in lines_about(snapshot.left_out):
        say(f"covey: {line}", err=True)
    for agent in machines:
        say(
            f"covey: left out: {agent.name} is not a machine that this one trusts; name it with --on, and you are "
            f"asked (its id is {id_text(agent.machine)})",
            err=True,
        )


def ask_to_send(
    cluster: Cluster,
    found: FoundAgents,
    book: Mapping[bytes, TrustedMachine],
    snapshot: Sendable,
    *,
    yes: bool,
) -> list[AgentCaller]:
    """Return the agents to which the files go: all that were asked for, once a person has agreed.

    Machines that have had files before need no question. The answer is remembered.

    Raises:
        ConfigError: there is no terminal to ask on, and not `yes`.
    """
    first = [*(each for each in found.trusted if not book[each.machine].has_had_files), *found.new]
    if first:
        _show([_described(each, book) for each in first], snapshot)
        ids = ", ".join(f"{each.name} ({id_text(each.machine)})" for each in first)
        confirm(
            f"Send them there{', and trust these machines' if found.new else ', now and'} from now on?",
            yes=yes,
            refusal=f"this machine has never sent files to {ids}; compare the id with what `covey up` printed there",
        )
        trust.remember(cluster, {each.machine: each.name for each in first}, has_had_files=True)
        for each in found.new:
            audit_log.note(cluster.name, "trusted", node=each.machine, name=each.name, reason="for files and programs")
    return [*found.trusted, *found.new]


def ask_to_send_by_ssh(hosts: Sequence[str], snapshot: Sendable, *, yes: bool) -> None:
    """Ask once for each machine, as it was typed, before files go there by ssh. The answer is remembered.

    Raises:
        ConfigError: there is no terminal to ask on, and not `yes`.
    """
    first = sorted({*hosts} - trust.ssh_hosts())
    if first:
        _show([f"{each}  (by ssh)" for each in first], snapshot)
        listed = ", ".join(first)
        confirm(
            "Send them there, now and from now on?",
            yes=yes,
            refusal=f"this machine has never sent files to {listed} by ssh",
        )
        trust.remember_ssh_hosts(first)


def _described(agent: AgentCaller, book: Mapping[bytes, TrustedMachine]) -> str:
    known = book.get(agent.machine)
    how = "approved by the owner" if known is not None and known.by_owner else "trusted" if known else "new here"
    return f"{agent.name}  {id_text(agent.machine)}  ({how})"


def _show(machines: Sequence[str], snapshot: Sendable) -> None:
    """Print the machines that get files for the first time, and what they get."""
    say("These machines have not had files of this machine yet:", err=True)
    for each in machines:
        typer.echo(f"  {each}", err=True)
    count = plural(len(snapshot.entries), "file")
    if not snapshot.entries:
        return say(f"They get {snapshot.folder} ({size_text(snapshot.size)}).", err=True)
    say(f"They get {count} ({size_text(snapshot.size)}) of {snapshot.folder}. The largest:", err=True)
    for path, size in largest(snapshot):
        typer.echo(f"  {printable(path, 200)}  {size_text(size)}", err=True)


def largest(snapshot: Sendable) -> list[tuple[str, int]]:
    """Return the largest entries of the folder itself with their sizes: files, and folders with all that they hold."""
    sizes: dict[str, int] = defaultdict(int)
    for entry in snapshot.entries:
        head, slash, _ = entry.path.partition("/")
        sizes[head + slash] += entry.size
    return sorted(sizes.items(), key=lambda each: (-each[1], each[0]))[:LARGEST_SHOWN]
