"""`covey run`: starts a script as ranks on this machine, or as nodes of a run of the cluster.

What was typed becomes a `RunRequest`, and one of three functions runs it: on this machine only (`_here`), as this
machine's share of a run of the cluster (`_in_cluster`), or on several machines from this terminal (`_on_several`).
"""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import shutil
import sys
import time
from collections.abc import Mapping  # noqa: TC003 - typer reads the types of the fields
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
import typer.core

from covey.base.errors import ConfigError
from covey.base.settings import RUN, SETTINGS
from covey.base.text import printable
from covey.cli.options import RelayLimit, command_of, variables_of
from covey.cli.terminal import say
from covey.net.host.machine import short_host_name
from covey.runtime.environment import ClusterOptions, find_run
from covey.runtime.keeper.keeper import ClusterRun, LocalRun
from covey.runtime.keeper.supervisor import keep

if TYPE_CHECKING:
    from collections.abc import Sequence

    from covey.base.config import GroupConfig
    from covey.net.host.saved_runs import SavedRun

MIN_HOSTS: Final = 2
"""Machines with which a run of a cluster begins, unless --min or --size says how many nodes it needs."""
SIZE_SETTINGS: Final = ("run_size", "run_min_size", "run_max_size")
_MACHINES: Final = "Several machines"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """What was typed after `covey run`."""

    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="A Python script, or any program.")]
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="Arguments of the script.")] = None
    processes: Annotated[
        int | None,
        typer.Option("-n", metavar="K", help="Start K processes here. Alone: as the ranks of a run on this machine."),
    ] = None
    module: Annotated[bool, typer.Option("-m", help="SCRIPT is a Python module, as in `python -m`.")] = False
    python: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="The Python that runs the script.", show_default="the one that runs covey"),
    ] = None
    restarts: Annotated[
        int,
        typer.Option(min=0, metavar="N", help="Restart a failed process up to N times, with --on-loss continue."),
    ] = 0
    solo: Annotated[
        bool, typer.Option("--solo", help="With -n: the processes are independent, and need not join the run.")
    ] = False
    torch_env: Annotated[
        bool,
        typer.Option(
            "--torch-env", help="Also export RANK, MASTER_ADDR and so on, for torch's own store (in clear text)."
        ),
    ] = False
    log_dir: Annotated[
        str | None, typer.Option(metavar="DIR", help="Also write the output of each rank to a file in DIR.")
    ] = None
    http: Annotated[
        str | None,
        typer.Option(
            metavar="PORT", help="Serve /healthz, /readyz and /metrics of the processes here: PORT, or ADDRESS:PORT."
        ),
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print output and events as lines of JSON, for programs.")] = (
        False
    )
    new: Annotated[
        bool, typer.Option("--new", help="Give up an earlier run of this name that is not known to be over.")
    ] = False
    relay_limit: RelayLimit = None
    on: Annotated[
        str | None,
        typer.Option(
            metavar="all|A,B",
            help="Start on these machines, where `covey up` runs, or on all that are trusted; -n on each.",
            rich_help_panel=_MACHINES,
        ),
    ] = None
    hosts: Annotated[
        str | None,
        typer.Option(
            metavar="A,B:2",
            help="Start on these machines with ssh; B:2 starts two processes on B.",
            rich_help_panel=_MACHINES,
        ),
    ] = None
    copy: Annotated[
        bool,
        typer.Option("--copy", help="With --hosts: send this folder there, as --on does.", rich_help_panel=_MACHINES),
    ] = False
    requirements: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="With --on: make an environment with these packages on each machine.",
            rich_help_panel=_MACHINES,
        ),
    ] = None
    include: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="With --on or --copy: also send these files, which may hold secrets; may be given repeatedly.",
            rich_help_panel=_MACHINES,
        ),
    ] = None
    yes: Annotated[
        bool,
        typer.Option(
            "--yes",
            help="With --on or --copy: do not ask before files are sent to a machine for the first time.",
            rich_help_panel=_MACHINES,
        ),
    ] = False
    detach: Annotated[
        bool,
        typer.Option(
            "--detach",
            help="With --on: return when all have started, and leave them running.",
            rich_help_panel=_MACHINES,
        ),
    ] = False
    settings: Mapping[str, str] = field(default_factory=dict)
    """The settings that were given as options, by name."""

    @property
    def run_name(self) -> str:
        """The name of the run: as given, or COVEY_RUN, or the name of the script without .py."""
        return self.settings.get("run") or os.environ.get("COVEY_RUN") or self.short_name

    @property
    def short_name(self) -> str:
        """The name of the script without .py, or of the module."""
        return self.script if self.module else Path(self.script).stem

    @property
    def is_of_cluster(self) -> bool:
        """Whether an option asks for a run of the cluster."""
        rows = (SETTINGS[name] for name in self.settings)
        asked = any(row.option is not None and row.option.of_cluster for row in rows)
        return asked or self.new or self.relay_limit is not None

    def command(self) -> list[str]:
        """Return the command that each process executes; ConfigError if there is no such program."""
        return command_line(
            self.script,
            self.arguments or [],
            module=self.module,
            run_name=self.settings.get("run"),
            python=self.python,
        )


class RunCommand(typer.core.TyperCommand):
    """Accepts the name of a run before the script, with options around it, as if it were given with --run."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given, _, _ = self.make_parser(ctx).parse_args(list(args))
        words = [word for word in (given.get("script"), *(given.get("arguments") or ())) if isinstance(word, str)]
        if len(words) > 1 and not given.get("module") and is_run_name(words[0], words[1]):
            args = [*args[: len(args) - len(words)], *words[1:]]
            given, _, _ = self.make_parser(ctx).parse_args(list(args))
            if isinstance(other := given.get("run"), str):
                raise ConfigError(f"the run has two names, {words[0]!r} and {other!r}; give one")
            args = ["--run", words[0], *args]
        elif len(words) > 1 and not given.get("module"):
            self._refuse_ambiguous(ctx, words)
        return super().parse_args(ctx, args)

    def _refuse_ambiguous(self, ctx: Any, words: list[str]) -> None:
        """Raise ConfigError if options of this command and a script follow a program: that may be the run's name."""
        program = shutil.which(words[0])
        if program is None or os.sep in words[0] or not words[1].startswith("-"):
            return
        if words[0].startswith(("python", "pypy")) or words[0] == "covey":
            return
        usage_error: type[Exception] = typer.BadParameter.__mro__[1]  # typer has no name of its own for it
        try:
            given, _, _ = self.make_parser(ctx).parse_args(words[1:])
        except usage_error:  # options of the program
            return
        script = given.get("script")
        if isinstance(script, str) and script.endswith(".py") and os.path.isfile(script):
            rest = shlex.join(words[1:])
            raise ConfigError(
                f"`{shlex.join(words)}` has two meanings. If {words[0]} is the name of the run: covey run --run "
                f"{words[0]} {rest}. If it is the program: covey run {program} {rest}"
            )


def run(request: RunRequest) -> None:
    """Start a script as a node of a run in the cluster; or, with -n alone, as ranks on this machine only.

    In a cluster, type the same command on each machine: covey run train.py

    Or start it on several machines from here: with --on where `covey up` runs, else with --hosts and ssh. --on sends
    this folder, --hosts does so with --copy; the first time that a machine gets files, it shows which machine and how
    many files, and asks.

    The nodes find each other when the script calls covey.join() or, with torch, init_process_group("covey").

    Each line of output begins with the rank of its process; in a cluster, with the machine and the rank.

    With -n alone, the processes also find RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as under torchrun.

    When a process fails, the other processes on this machine are stopped, and its exit code is returned. With --on-loss
    continue, the run continues without it. If two or more succeed and none of them has joined, the exit code is 3.

    Ctrl-C is passed on to all processes; a second Ctrl-C kills them. Ctrl-Z stops them, and fg continues them.

    SIGTERM is passed on as well. If all processes then exit with 0, so does covey run.
    """
    if request.on is not None or request.hosts is not None:
        code = _on_several(request)
    elif request.requirements is not None or request.detach or request.include or request.yes or request.copy:
        raise ConfigError(
            "--requirements, --include, --yes and --detach go with --on, and --copy with --hosts: they are about "
            "programs on other machines"
        )
    elif request.processes is not None and not request.is_of_cluster:
        code = _here(request, request.processes)
    else:
        code = _in_cluster(request)
    raise typer.Exit(code)


# What follows the script belongs to the script, options too.
app.command(cls=RunCommand, context_settings={"allow_interspersed_args": False}, options_metavar="[RUN] [OPTIONS]")(
    command_of(RunRequest, RUN, run)
)


def _here(request: RunRequest, processes: int) -> int:
    """Run the script as the ranks of a run on this machine; return its exit code."""
    command, page = request.command(), _page(request)
    say_that_it_stays_here(processes, request.script)
    return keep(
        functools.partial(LocalRun, processes, name=request.short_name, torch_env=request.torch_env),
        command,
        env=variables_of(request.settings),
        restarts=request.restarts,
        http=page,
        log_dir=request.log_dir,
        is_solo=request.solo or request.torch_env,
        kept=_saved(request, request.short_name, processes),
        as_json=request.as_json,
    )


def _in_cluster(request: RunRequest) -> int:
    """Run this machine's share of a run of the cluster; return its exit code."""
    from covey.cli.relay import parse_relay_limit
    from covey.net.host.settings_files import effective_environment
    from covey.runtime.keeper.presence import MachinePresence, PresenceTerms

    command, page = request.command(), _page(request)
    given = request.settings
    if "insecure" in given:
        raise ConfigError("runs of a cluster are always encrypted; --insecure goes with -n alone")
    if "run_size" in given and given.keys() & {"run_min_size", "run_max_size"}:
        raise ConfigError("--size says exactly how many nodes; leave --min and --max out")
    if given.keys() & {*SIZE_SETTINGS}:
        for name in SIZE_SETTINGS:
            os.environ.pop(SETTINGS[name].variable, None)  # the command line overrides all three
    variables = {
        **variables_of(given),
        "COVEY_RUN": request.run_name,
        "COVEY_RUN_PROGRAM": request.script if request.module else Path(request.script).name,
    }
    if request.torch_env:
        variables["COVEY_TORCH_ENV"] = "1"
    if not given.keys() & {"run_size", "run_min_size"}:
        variables["COVEY_RUN_MIN_HOSTS"] = str(MIN_HOSTS)
    processes = 1 if request.processes is None else request.processes
    rate = parse_relay_limit(request.relay_limit)
    cluster = _cluster_name(variables)
    share = share_of_run(processes, variables, is_new=request.new, relay_rate=rate)
    presence = MachinePresence(
        short_host_name() or "this machine", PresenceTerms.read({**effective_environment(), **variables})
    )
    with contextlib.closing(presence):
        kept = _saved(request, request.run_name, processes, cluster)
        return keep(
            share, command, restarts=request.restarts, http=page, log_dir=request.log_dir, kept=kept, presence=presence,
            as_json=request.as_json,
        )  # fmt: skip


def _cluster_name(variables: Mapping[str, str]) -> str:
    """Return the name of the cluster; "" if there is none, which `share_of_run` explains."""
    from covey.net.host.settings_files import effective_environment

    with contextlib.suppress(ConfigError):
        return ClusterOptions().find({**effective_environment(), **variables}).name
    return ""


def _saved(
    request: RunRequest, name: str, processes: int, cluster: str = "", machines: tuple[str, ...] = ()
) -> SavedRun | None:
    """Return what keeps the output and the end of the run on this machine; None if covey's folder cannot be used."""
    from covey.net.host.saved_runs import KEPT_COMMAND_LIMIT, OutputTerms, RunSummary, SavedRun
    from covey.net.host.settings_files import effective_environment

    terms = OutputTerms.read({**effective_environment(), **variables_of(request.settings)})
    machine = short_host_name()
    record = RunSummary(
        name=name, cluster=cluster, machine=machine, machines=machines or (machine,),
        program=printable(shlex.join([request.script, *(request.arguments or ())]), KEPT_COMMAND_LIMIT),
        processes=processes, pid=os.getpid(), began=time.time(), by_agent="COVEY_BY_AGENT" in os.environ,
    )  # fmt: skip
    try:
        output_bytes = terms.output_bytes if terms.is_kept else 0
        return SavedRun(record, output_bytes=output_bytes, total_bytes=terms.total_bytes)
    except ConfigError as error:  # the run goes on all the same
        say(f"covey: nothing is kept of this run: {error}", err=True)
        return None


def _on_several(request: RunRequest) -> int:
    """Run the script on several machines; return its exit code."""
    from covey.cli import several_machines

    of_machine = {SETTINGS[name].flag: True for name in request.settings if _is_of_machine(name)}
    for option, value in {
        "--http": request.http,
        "--relay-limit": request.relay_limit,
        "--solo": request.solo,
        **of_machine,
    }.items():
        if value:
            raise ConfigError(f"{option} does not go with --on and --hosts; leave it out")
    flags = {"-m": request.module, "--new": request.new, "--torch-env": request.torch_env}
    words = [flag for flag, is_given in flags.items() if is_given]
    words += ["--restarts", str(request.restarts)] if request.restarts else []
    program = several_machines.Program(
        request.script,
        tuple(request.arguments or ()),
        request.run_name,
        request.module,
        request.python,
        request.requirements,
    )
    terms = several_machines.FanOut(
        request.processes,
        request.settings,
        tuple(words),
        request.log_dir,
        request.detach,
        tuple(request.include or ()),
        request.yes,
        request.copy,
        request.as_json,
    )

    def keep_record(machines: Sequence[str], ranks: int) -> SavedRun | None:
        return _saved(request, request.run_name, ranks, _cluster_name({}), tuple(machines))

    return several_machines.start(program, terms, keep_record, on=request.on, hosts=request.hosts)


def _is_of_machine(name: str) -> bool:
    option = SETTINGS[name].option
    return option is not None and option.of_machine


def _page(request: RunRequest) -> tuple[str, int] | None:
    """Return where to serve pages about the processes, if anywhere."""
    if request.http is None:
        return None
    from covey.runtime.keeper.pages import parse_address

    return parse_address(request.http)


def say_that_it_stays_here(processes: int, script: str) -> None:
    """On a machine of a cluster, print to a terminal that -n alone uses this machine only."""
    if not os.isatty(2):
        return
    from covey.net.keys import clusters

    with contextlib.suppress(ConfigError):
        if (name := clusters.default_name()) is not None:
            stem = Path(script).stem
            say(f"covey: {processes} ranks on this machine only; `covey run {stem} -n {processes} {script}` spans the "
                f"machines of cluster {name!r}", err=True)  # fmt: skip


def share_of_run(
    processes: int, variables: dict[str, str], *, is_new: bool = False, relay_rate: float = 0.0
) -> functools.partial[ClusterRun]:
    """Check the settings, and return a function that makes this machine's share of a run of a cluster.

    With `is_new`, this machine gives up the runs of that name that it knows of. With a `relay_rate`, it is a relay for
    other nodes, too. The secret in COVEY_SECRET is removed from the environment, and passed to the processes through a
    pipe.

    Raises:
        ConfigError: this machine is in no cluster, or the settings contradict themselves.
    """
    from covey.base.config import split_relays, split_seeds
    from covey.net.discovery.interfaces import parse_pattern
    from covey.net.host.settings_files import effective_environment
    from covey.runtime.keeper.service import ClusterKeeperService

    env = {**effective_environment(), **variables}
    wanted = find_run(env, {})
    assert wanted is not None
    most = wanted.size if wanted.size is not None else wanted.max_size
    if most is not None and processes > most:
        raise ConfigError(f"-n {processes} are more than the {most} nodes that the run may have")
    parse_pattern(env.get("COVEY_INTERFACES", ""))
    split_seeds(env.get("COVEY_SEEDS", ""))
    split_relays(env.get("COVEY_RELAYS", ""))
    is_passed_on = "COVEY_SECRET_FD" in env or ("COVEY_SECRET" in env and "COVEY_SECRET_FILE" not in env)
    try:
        cluster = ClusterOptions().find(env)
    except ConfigError as error:
        raise ConfigError(f"{error}. `covey run -n K` starts ranks on this machine only") from None
    os.environ.pop("COVEY_SECRET", None)
    if is_new:
        from covey.runtime.joining.cluster_join import forget_lineages

        variables["COVEY_RUN_NEW"] = ",".join(sorted(each.hex() for each in forget_lineages(cluster.tag, wanted.name)))
    service = ClusterKeeperService(cluster, _keeper_config(env))
    if not is_passed_on:
        return functools.partial(ClusterRun, processes, variables, service, relay_rate=relay_rate)
    variables |= {"COVEY_CLUSTER": cluster.name, "COVEY_SEEDS": ",".join(cluster.seeds)}
    variables |= {"COVEY_RELAYS": ",".join(cluster.relays)} if cluster.relays else {}
    return functools.partial(ClusterRun, processes, variables, service, key=cluster.secret.key, relay_rate=relay_rate)


def _keeper_config(env: Mapping[str, str]) -> GroupConfig:
    """Return what the keeper needs of the settings of its processes."""
    from covey.base.config import GroupConfig

    names = ("interfaces", "tls_ca", "tls_cert", "tls_key")
    given: dict[str, Any] = {name: env.get(f"COVEY_{name.upper()}", "") for name in names}
    return GroupConfig(**given)


def is_run_name(word: str, following: str) -> bool:
    """Tell whether the first word names a run: it is no script, no program, and does not look like one.

    Before a Python script, any word but a Python interpreter is a name, even if a program or a folder is called so.
    """
    if word.endswith(".py") or os.sep in word or word.startswith("-") or os.path.isfile(word):
        return False
    if following.endswith(".py") and os.path.isfile(following) and not word.startswith(("python", "pypy")):
        return True
    return not (word == "covey" or os.path.exists(word) or shutil.which(word))


def command_line(
    script: str, arguments: list[str], *, module: bool, run_name: str | None = None, python: str | None = None
) -> list[str]:
    """Return the command to execute for the script or program that was given to `covey run`.

    `python` runs scripts and modules; by default, the interpreter of this process.

    Raises:
        ConfigError: there is no such script or program, or no such interpreter.
    """
    interpreter = sys.executable if python is None else shutil.which(python)
    if interpreter is None:
        raise ConfigError(f"--python {python}: there is no such program; give the path of an interpreter")
    if module or (script == "covey" and not os.path.isfile(script)):  # this covey, whatever is on the PATH
        return [interpreter, "-m", script, *arguments]
    if os.path.isfile(script):
        if script.endswith(".py") or not os.access(script, os.X_OK):
            return [interpreter, script, *arguments]
        return [os.path.abspath(script), *arguments]
    program = shutil.which(script)
    if program is None:
        of_run = f" to start in the run {run_name!r}" if run_name is not None else ""
        raise ConfigError(f"there is no script or program {script!r}{of_run} in {os.getcwd()} or on the PATH")
    return [program, *arguments]
