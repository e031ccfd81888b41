"""The `covey` command: its subcommands, and how errors are shown.

The command X is the Typer app `app` in `covey.cli.X`, or in `covey.lab.X` for those of the laboratory. That module is
imported when the command is used, so that `covey run` starts quickly.

Exit codes of all commands: 0 success, 1 failure, 2 a wrong call or setting, 70 a fault in covey, 130 Ctrl-C. `covey
run` returns the exit code of the script.

Shell completion of names runs while the user types: it reads only files of this machine, and ignores problems with
them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import os
import sys
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn

import typer
import typer.core
import typer.main

from covey.base.errors import ConfigError, CoveyError, Remedy
from covey.cli.terminal import say
from covey.runtime.tracebacks import is_debugging

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_CLUSTER_COMMANDS = frozenset({"cluster", "default", "forget"})
COMMANDS: Final = {
    "init": "Make a cluster, and show a code for other machines.",
    "pair": "Show a code of six digits, with which other machines get into the cluster.",
    "enroll": "Put this machine into a cluster, with the code that another machine shows.",
    "run": "Start a script as ranks on this machine, or in a run of the cluster.",
    "estimate": "Predict how fast each way to train with several machines is.",
    "coordinator": "Give ranks to workers that register, and show the runs of such a coordinator.",
    "worker": "Start a script as a worker of a coordinator's run.",
    "gateway": "Let programs in other languages be ranks, through gRPC.",
    "relay": "Run a relay, at which machines meet that cannot connect with each other.",
    "up": "Let members of the cluster start programs on this machine.",
    "ps": "List the programs that run on machines of the cluster.",
    "logs": "Show the output of a run, of all its ranks.",
    "history": "List the runs that were started on this machine, and how each ended.",
    "push": "Send a data set or a model file once to machines where covey up runs.",
    "data": "List the data sets of the machines, and remove them.",
    "stop": "End a run that was started with `covey run --on`.",
    "status": "Show the nodes of the cluster and the links between them.",
    "top": "Watch runs in the terminal: which rank waits for which, losses, curves, links, output.",
    "ui": "Show machines and runs in a browser.",
    "trace": "Show the last operations of all ranks, and which rank waited for which.",
    "checkpoint": "Ask all ranks of a run to save a checkpoint, or look at those on this machine.",
    "doctor": "Explain why a run waits, or why machines do not find each other.",
    "config": "Print the settings in effect, and where each comes from.",
    "clusters": "List the clusters that this machine is in.",
    "secret": "Change a cluster's secret, or show whether this machine may.",
    "deny": "Keep a node out of a cluster.",
    "trust": "List and choose the machines to which files and programs may go.",
    "audit": "Show the audit log: joins, refusals, denials, changes of secrets.",
    "allow": "Approve machines that wait to be in a cluster.",
    "demo": "Watch four ranks train a small model together.",
    "bench": "Measure collectives on this machine, or links and collectives between machines.",
    "chaos": "Run a job, break its processes and connections, report what survived.",
    "help": "Show the help of covey or of one of its commands.",
}
HEADINGS: Final = {
    "Begin": ("demo", "init", "enroll", "pair", "run", "help"),
    "Look at runs": ("ui", "top", "logs", "history", "status", "trace"),
    "Several machines from one": ("up", "ps", "stop", "push", "data", "checkpoint"),
    "When something does not work": ("doctor", "audit", "config"),
    "Who may be in the cluster": ("clusters", "trust", "allow", "deny", "secret"),
    "Services": ("relay", "coordinator", "worker", "gateway"),
    "Measure and break": ("estimate", "bench", "chaos"),
}
"""The headings under which `covey help` lists the commands."""
IN_LAB: Final = frozenset(["demo", "bench", "chaos"])
"""Commands that are in `covey.lab`, which the library imports nowhere else, and here only by name."""
TRACEBACK_HELP: Final = "Show the whole traceback of an error, as COVEY_DEBUG=1 does."
FAULT_CODE: Final = 70
"""The exit code after an unexpected exception: EX_SOFTWARE of sysexits.h."""


def cluster_names(_words: dict[str, Any]) -> list[str]:
    """Return the clusters this machine is in."""
    from covey.net.keys import clusters

    return [cluster.name for cluster in clusters.list_clusters()]


def node_names(words: dict[str, Any]) -> list[str]:
    """Return the nodes that were met in the cluster named on the command line."""
    from covey.net.keys import clusters

    return sorted(set(clusters.known(clusters.find_saved(words.get("cluster")).name).values()))


def run_names(_words: dict[str, Any]) -> list[str]:
    """Return the runs that this machine remembers, the latest first."""
    from covey.net.host.saved_runs import past_runs

    return list(dict.fromkeys(run.record.name for run in reversed(past_runs())))


def completing(offer: Callable[[dict[str, Any]], Iterable[str]]) -> Callable[[Any, Any, str], list[str]]:
    """Return a callback for Typer: the names from `offer` that begin with what was typed."""

    def complete(context: Any, _parameter: Any, begun: str) -> list[str]:
        with contextlib.suppress(CoveyError, OSError):
            return [name for name in offer(context.params) if name.startswith(begun)]
        return []

    return complete


def prepare(parameter: Any) -> None:
    """Set the completion of a parameter, by its metavar and name."""
    if parameter.metavar == "CLUSTER" or (parameter.metavar == "NAME" and parameter.name in _CLUSTER_COMMANDS):
        parameter._custom_shell_complete = completing(cluster_names)
    elif parameter.metavar in ("NODE", "NODE|all"):
        parameter._custom_shell_complete = completing(node_names)
    elif parameter.metavar == "RUN":
        parameter._custom_shell_complete = completing(run_names)


def _show_tracebacks(asked: bool) -> None:
    if asked:
        os.environ["COVEY_DEBUG"] = "1"  # inherited by the processes that a command starts


def _traceback_option() -> typer.core.TyperOption:
    return typer.core.TyperOption(
        param_decls=["--traceback"],
        is_flag=True,
        default=False,
        expose_value=False,
        is_eager=True,
        callback=lambda _context, _option, asked: _show_tracebacks(asked),
        help=TRACEBACK_HELP,
    )


def load(name: str) -> Any:
    """Return the command of that name, with what all commands share: --traceback, completion, plain help."""
    module = f"covey.lab.{name}" if name in IN_LAB else f"covey.cli.{name}"
    command: Any = typer.main.get_command(importlib.import_module(module).app)
    command.name = name
    for each in (command, *getattr(command, "commands", {}).values()):
        for parameter in each.params:
            prepare(parameter)
        each.params.append(_traceback_option())
        each.help = "\n\n".join(" ".join(part.split()) for part in (each.help or "").split("\n\n"))  # fits any width
        each.format_help = functools.partial(_format_help, each.format_help)
    return command


def _format_help(format_help: Callable[[Any, Any], None], context: Any, formatter: Any) -> None:
    """Show help as Typer does; in a pipe or a file, without trailing blanks."""
    if sys.stdout.isatty():
        return format_help(context, formatter)
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        format_help(context, formatter)
    for line in shown.getvalue().strip("\n").splitlines():
        typer.echo(line.rstrip())


def commands() -> list[str]:
    """Return the names of all commands, for completion."""
    return list(COMMANDS)


class LazyGroup(typer.core.TyperGroup):
    """Lists every command from `COMMANDS`; imports only the one that is called."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        _format_help(super().format_help, ctx, formatter)

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for names in HEADINGS.values() for name in names]

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        return name, command if name is None else load(name), rest


app = typer.Typer(
    cls=LazyGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        from importlib import metadata

        try:
            version = metadata.version("covey")
        except metadata.PackageNotFoundError:  # run from its source folder
            from covey.base.version import __version__ as version
        from covey.net.host.machine import describe_executor

        typer.echo(f"covey {version}\nexecutor: {describe_executor()}")
        raise typer.Exit


@app.callback()
def covey(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Print the version, and which executor moves the data."
        ),
    ] = False,
    traceback: Annotated[
        bool,
        typer.Option("--traceback", callback=_show_tracebacks, is_eager=True, help=TRACEBACK_HELP),
    ] = False,
) -> None:
    """Machines you already own, training one model together."""


def _placeholder() -> None:
    """Represent a command in `covey --help`; `LazyGroup` imports the real one when it is called."""


for _heading, _names in HEADINGS.items():
    for _name in _names:
        app.command(_name, help=COMMANDS[_name], rich_help_panel=_heading)(_placeholder)


def main() -> NoReturn:
    """Run the command that `sys.argv` names, and exit."""
    try:
        with output_written():
            app(prog_name="covey")
    except Exception as error:
        if is_debugging():
            raise
        say(explain(error), err=True)
        sys.exit(2 if isinstance(error, ConfigError) else 1 if isinstance(error, CoveyError) else FAULT_CODE)
    sys.exit(0)


def explain(error: Exception) -> str:
    """Return an error as text for a terminal: what happened, and what to do unless the message says so."""
    if not isinstance(error, CoveyError):
        return (
            f"error: unexpected {type(error).__name__}: {error}\n"
            "what to do: this is a fault in covey; please report it with what the same command prints with --traceback"
        )
    if error.remedy is Remedy.FIX:  # the message says what to correct
        return f"error: {error}"
    return f"error: {error}\nwhat to do: {error.remedy.value}"


@contextlib.contextmanager
def output_written() -> Iterator[None]:
    """Exit with 1 and an error line if what the block printed cannot be written to standard output."""
    try:
        yield
    except OSError as error:
        # An unbuffered stream drops what it could not write. Writing again shows whether the error was the stream's.
        _flush("\n" if error.errno is not None and error.filename is None else "")
        raise
    finally:
        _flush()


def _flush(more: str = "") -> None:
    if sys.stdout is None:
        return
    try:
        if more:  # an unbuffered stream performs even empty writes, which may fail
            sys.stdout.write(more)
        sys.stdout.flush()
    except OSError as error:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())  # or else the interpreter fails again at exit
        os.close(nowhere)
        with contextlib.suppress(OSError):
            print(f"error: output cannot be written ({error.strerror})", file=sys.stderr)
        raise SystemExit(1) from None
