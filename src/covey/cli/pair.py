"""`covey pair`: shows a code of six digits, with which other machines of this network get into the cluster."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from typing import TYPE_CHECKING, Annotated, Final

import typer

from covey.base.config import group_config
from covey.cli.layout import wrap
from covey.cli.terminal import is_lively, plural, say
from covey.net.host.settings_files import effective_environment
from covey.net.keys import clusters, owner
from covey.net.keys.identity import short_id
from covey.proto.pairing import ADMITTED_LIMIT, ALL_IN, ENDED

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console, ConsoleOptions
    from rich.text import Text

    from covey.net.keys.clusters import Cluster
    from covey.runtime.pairing.inviter import PairedMachine, Pairing, PairingView

PAIRING_REDRAW_SECONDS: Final = 1.0
"""How often the time that is left is drawn again."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

Machines = Annotated[
    int | None,
    typer.Option(
        "--machines",
        min=1,
        max=ADMITTED_LIMIT,
        metavar="N",
        help="Use one code for N machines, and end when all of them are in.",
        show_default="a code for each, until Ctrl-C",
    ),
]


@app.command()
def pair(
    cluster: Annotated[
        str | None, typer.Argument(metavar="CLUSTER", help="Which one, if this machine is in several.")
    ] = None,
    machines: Machines = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object at each change.")] = False,
) -> None:
    """Show a code of six digits, with which `covey enroll` puts another machine into the cluster.

    The two machines have to be on one network, or the other one is told the address of this one. A code is good for
    five minutes. After three wrong tries another one is shown; after nine, no more. The machine that gets in is
    approved and trusted under its key.

    Machines on other networks take the join code: `covey init --show`.
    """
    show_codes(clusters.find_saved(cluster), machines or 0, as_json=as_json)


def run_command(name: str) -> str:
    """Return what to type to run a script in a cluster: shorter for the default one."""
    return "covey run train.py" if name == clusters.default_name() else f"covey run --cluster {name} train.py"


def show_codes(cluster: Cluster, machines: int, *, as_json: bool = False) -> None:
    """Show codes until Ctrl-C, until so many machines are in (0: a code for each), or until no more are shown.

    Raises:
        typer.Exit: with 1, if no machine got in and it did not end with Ctrl-C.
    """
    from rich.console import Console

    from covey.runtime.pairing.inviter import pairing

    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGINT))  # SIGTERM, too, ends in good order
    console = Console(highlight=False)
    is_drawn = is_lively(console) and not as_json
    with (
        contextlib.suppress(KeyboardInterrupt),
        pairing(cluster, group_config(effective_environment()), machines=machines) as shown,
    ):
        screen = _Screen(cluster, console) if is_drawn else _Lines(cluster, as_json=as_json)
        with screen:
            _follow(shown, screen)
    last = shown.view()
    if last.paired and not as_json:
        say(f"On each machine: {run_command(cluster.name)}")
    if last.over not in (ALL_IN, ENDED):
        say(f"No code is shown any more: {last.over}. `covey pair` shows another one.", err=True)
        raise typer.Exit(0 if last.paired else 1)


def _follow(shown: Pairing, screen: _Lines) -> None:
    """Show each change until it is over."""
    view = shown.view()
    screen.show(view)
    while not view.over:
        view = shown.next_after(view.serial, PAIRING_REDRAW_SECONDS) or view
        screen.show(view)


class _Lines:
    """Prints each change as lines, or as JSON."""

    def __init__(self, cluster: Cluster, *, as_json: bool = False) -> None:
        self._cluster, self._as_json = cluster, as_json
        self._before: PairingView | None = None

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is to be freed."""

    def show(self, view: PairingView) -> None:
        """Print what has changed."""
        before, self._before = self._before, view
        if before is not None and before.serial == view.serial:
            return
        if self._as_json:
            typer.echo(json.dumps(as_object(view)))
            sys.stdout.flush()
            return
        for each in news(view, before):
            self._print(each)
        for machine in view.paired[len(before.paired) if before is not None else 0 :]:
            self._tell_running_nodes(machine)
        self._draw(view, before)
        sys.stdout.flush()

    def _print(self, text: str) -> None:
        say(text)

    def _draw(self, view: PairingView, before: PairingView | None) -> None:
        if view.code and (before is None or before.code != view.code):
            say(f"Code: {spaced(view.code)} ({terms(view)})")

    def _tell_running_nodes(self, machine: PairedMachine) -> None:
        """Send the owner's list, which has the machine now, to the nodes that run."""
        from covey.cli.charter import spread, tell_result

        now = clusters.load(self._cluster.name)
        if now.charter is not None and now.charter.allowed is not None and not machine.waits_at and owner.held(now):
            tell_result(*spread(now, quiet=True))


class _Screen(_Lines):
    """Draws the code on a terminal, with the time that is left, below the lines."""

    def __init__(self, cluster: Cluster, console: Console) -> None:
        from rich.live import Live

        super().__init__(cluster)
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> _Screen:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, view: PairingView) -> None:
        super().show(view)
        self._live.update(_Code(view), refresh=True)

    def _print(self, text: str) -> None:
        self._live.console.print(text, soft_wrap=False, markup=False)

    def _draw(self, view: PairingView, before: PairingView | None) -> None:
        """The code is drawn anew each second."""


class _Code:
    """What is drawn: the code, large enough to be read out, and how long it is good."""

    def __init__(self, view: PairingView) -> None:
        self._view = view

    def __rich_console__(self, _console: Console, options: ConsoleOptions) -> Iterator[Text]:
        from rich.text import Text

        view, width = self._view, options.max_width
        if not view.code:
            return
        yield Text()
        yield Text.assemble("    ", (" ".join(spaced(view.code)), "bold reverse"))
        yield Text()
        for line in wrap(f"    {terms(view)}; Ctrl-C ends this", width):
            yield Text(line, "yellow" if view.failed else "dim")


def news(view: PairingView, before: PairingView | None) -> list[str]:
    """Return what a person should be told that was not so before."""
    said = []
    if before is None:
        where = f" (if it does not find this machine: covey enroll {address_of(view)})" if view.addresses else ""
        said.append(f"On each other machine of this network, type `covey enroll`{where}. It asks for the code below.")
    if view.problem and (before is None or before.problem != view.problem):
        said.append(f"warning: {view.problem}. Type `covey enroll {address_of(view)}` on the other machine.")
    for other in view.others:
        if before is None or other not in before.others:
            said.append(
                f"warning: {other} shows a code as well. If `covey init` was typed on both machines, there are two "
                "clusters now: press Ctrl-C on one of the two and type `covey enroll` there."
            )
    if view.refused and (before is None or before.refused != view.refused):
        said.append(view.refused)
    for machine in view.paired[len(before.paired) if before is not None else 0 :]:
        said.append(_paired(machine, view))
    if before is not None and before.code and view.code not in ("", before.code) and view.replaced:
        said.append(f"The code {spaced(before.code)} {view.replaced}; this is another one.")
    return said


def _paired(machine: PairedMachine, view: PairingView) -> str:
    if not machine.has_stored:
        return (
            f"{machine.name} knew the code, but has not said that it has stored the secret: look there, and type "
            "`covey enroll` again if it failed."
        )
    if machine.waits_at:
        return (
            f"{machine.name} has the secret of {view.cluster!r}, and waits for approval: on {machine.waits_at} run "
            f"`covey allow {short_id(machine.id)}`."
        )
    return f"{machine.name} is in the cluster {view.cluster!r} now."


def terms(view: PairingView) -> str:
    """Return how long the code is valid and for what, and which machines have tried a wrong one."""
    left = int(view.seconds + 0.5)
    text = f"good for {left // 60}:{left % 60:02d} min, for {plural(view.machines, 'machine')}"
    if view.failed:
        text += f"; {plural(view.failed, 'wrong try', 'wrong tries')}, the last one from {view.failed_from}"
    return text


def spaced(code: str) -> str:
    """Return a code as it is read out."""
    return f"{code[:3]} {code[3:]}"


def address_of(view: PairingView) -> str:
    """Return the best address of this machine, to be typed on another."""
    from covey.runtime.pairing.inviter import pairing_ports

    ip = view.addresses[0]
    if view.port == pairing_ports()[0]:
        return ip
    return f"[{ip}]:{view.port}" if ":" in ip else f"{ip}:{view.port}"


def as_object(view: PairingView) -> dict[str, object]:
    """Return a view as plain values for JSON."""
    return {
        "cluster": view.cluster,
        "machine": view.machine,
        "addresses": list(view.addresses),
        "port": view.port,
        "code": view.code or None,
        "seconds": round(view.seconds, 1) if view.code else 0.0,
        "machines": view.machines,
        "failed": view.failed,
        "failed_from": view.failed_from,
        "paired": [
            {"id": each.id.hex(), "name": each.name, "release": each.release, "address": each.source,
             "stored": each.has_stored, "waits_at": each.waits_at}
            for each in view.paired
        ],
        "refused": view.refused,
        "others": list(view.others),
        "problem": view.problem,
        "over": view.over,
    }  # fmt: skip
