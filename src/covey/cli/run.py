"""`covey run`: starts a script as ranks on this machine, or as nodes of a run of the cluster."""

from __future__ import annotations

import contextlib
import enum
import functools
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
import typer.core

from covey.base.config import check_timeout
from covey.base.errors import ConfigError
from covey.base.settings import SETTINGS
from covey.runtime.environment import ClusterOptions, find_run
from covey.runtime.keeper.keeper import ClusterRun, LocalRun
from covey.runtime.keeper.supervisor import keep

if TYPE_CHECKING:
    from collections.abc import Mapping

    from covey.base.config import GroupConfig

MIN_HOSTS: Final = 2
"""Machines with which a run of a cluster begins, unless --min or --size says how many nodes it needs."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class Lanes(enum.StrEnum):
    SHM = "shm"
    UNIX = "unix"
    TCP = "tcp"
    SECURE = "secure"
    QUIC = "quic"


class Stripe(enum.StrEnum):
    AUTO = "auto"
    OFF = "off"


class OnLoss(enum.StrEnum):
    RAISE = "raise"
    CONTINUE = "continue"


class Quorum(enum.StrEnum):
    MAJORITY = "majority"
    ANY = "any"


class RunCommand(typer.core.TyperCommand):
    """Accepts the name of a run before the script, with options around it, as if it were given with --run."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given, _, _ = self.make_parser(ctx).parse_args(list(args))
        words = [word for word in (given.get("script"), *(given.get("arguments") or ())) if isinstance(word, str)]
        if len(words) > 1 and not given.get("module") and is_run_name(words[0], words[1]):
            args = [*args[: len(args) - len(words)], *words[1:]]
            given, _, _ = self.make_parser(ctx).parse_args(list(args))
            if isinstance(other := given.get("run_name"), str):
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


# What follows the script belongs to the script, options too.
@app.command(cls=RunCommand, context_settings={"allow_interspersed_args": False}, options_metavar="[RUN] [OPTIONS]")
def run(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="A Python script, or any program.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="Arguments of the script.")] = None,
    processes: Annotated[
        int | None,
        typer.Option("-n", metavar="K", help="Start K processes here. Alone: as the ranks of a run on this machine."),
    ] = None,
    run_name: Annotated[
        str | None,
        typer.Option("--run", metavar="RUN", help="The run's name.", show_default="the script's, without .py"),
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(metavar="NAME", help="The cluster, if this machine is in several.")
    ] = None,
    min_size: Annotated[
        int | None,
        typer.Option(
            "--min",
            min=1,
            metavar="N",
            help="Begin when N nodes are there.",
            show_default=SETTINGS["run_min_size"].shown_default,
        ),
    ] = None,
    max_size: Annotated[
        int | None, typer.Option("--max", min=1, metavar="N", help="Take no more nodes than this.")
    ] = None,
    size: Annotated[int | None, typer.Option("--size", min=1, metavar="N", help="Exactly N nodes.")] = None,
    wait: Annotated[
        float | None,
        typer.Option(
            "--wait",
            metavar="S",
            help="Seconds to wait for the other nodes.",
            show_default=SETTINGS["join_timeout"].shown_default,
        ),
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="host:port of nodes, for networks without multicast."),
    ] = None,
    relay: Annotated[
        str | None,
        typer.Option("--relay", metavar="A,B", help="host:port of relays, for machines that cannot connect."),
    ] = None,
    map_port: Annotated[
        bool,
        typer.Option("--map-port", help="Ask the router to let connections in: opens a port to the internet."),
    ] = False,
    relay_limit: Annotated[
        str | None,
        typer.Option(
            "--relay-limit",
            metavar="RATE",
            help="Be a relay for nodes of the cluster that cannot connect: pass on at most this, like 20M or 2.5MB.",
            show_default="off",
        ),
    ] = None,
    interfaces: Annotated[
        str | None, typer.Option(metavar="P", help="Network interfaces to use: eth*,!docker* or 10.0.0.0/8.")
    ] = None,
    lanes: Annotated[
        Lanes | None, typer.Option(help="Use this kind of lane for all ranks, instead of the best for each pair.")
    ] = None,
    stripe: Annotated[
        Stripe | None, typer.Option(help="Use several networks between two machines at once, if that is faster.")
    ] = None,
    limit: Annotated[
        str | None,
        typer.Option(metavar="RATE", help="Send and receive at most this here: 20M (bits a second) or 2.5MB (bytes)."),
    ] = None,
    on_loss: Annotated[
        OnLoss | None,
        typer.Option(
            help="When a member is lost, end with an error or continue without it.", show_default="what the script says"
        ),
    ] = None,
    patience: Annotated[
        float | None,
        typer.Option(
            metavar="S",
            help="Seconds to wait for a quorum before ending with an error.",
            show_default=SETTINGS["patience"].shown_default,
        ),
    ] = None,
    quorum: Annotated[
        Quorum | None,
        typer.Option(help="Which members may continue: a majority of the last view, or any part, as separate runs."),
    ] = None,
    compress: Annotated[
        str | None,
        typer.Option(
            metavar="CODEC", help="Send gradients in fewer bytes, for instance as int8; see the guide to compression."
        ),
    ] = None,
    tie_breaker: Annotated[
        str | None,
        typer.Option(
            "--tie-breaker",
            metavar="here|NAME",
            help="The machine with which half of the members may continue.",
            show_default="that of rank 0",
        ),
    ] = None,
    new: Annotated[
        bool,
        typer.Option("--new", help="Give up an earlier run of this name that is not known to be over."),
    ] = False,
    restarts: Annotated[
        int,
        typer.Option(min=0, metavar="N", help="Restart a failed process up to N times, with --on-loss continue."),
    ] = 0,
    http: Annotated[
        str | None,
        typer.Option(
            metavar="PORT",
            help="Serve /healthz, /readyz and /metrics of the processes here: PORT, or ADDRESS:PORT.",
        ),
    ] = None,
    on: Annotated[
        str | None,
        typer.Option(
            metavar="all|A,B",
            help="Start on these machines, where `covey up` runs, or on all that are trusted; -n on each.",
        ),
    ] = None,
    hosts: Annotated[
        str | None,
        typer.Option(metavar="A,B:2", help="Start on these machines with ssh, and so many processes on each."),
    ] = None,
    requirements: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="With --on: make an environment with these packages on each machine."),
    ] = None,
    include: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN", help="With --on: also send these files, which may hold secrets; may be given repeatedly."
        ),
    ] = None,
    yes: Annotated[
        bool,
        typer.Option("--yes", help="With --on: do not ask before files are sent to a machine for the first time."),
    ] = False,
    python: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="The Python that runs the script.", show_default="the one that runs covey"),
    ] = None,
    log_dir: Annotated[
        str | None,
        typer.Option("--log-dir", metavar="DIR", help="Also write the output of each rank to a file in DIR."),
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="With --on: return when all have started, and leave them running.")
    ] = False,
    module: Annotated[bool, typer.Option("-m", help="SCRIPT is a Python module, as in `python -m`.")] = False,
    torch_env: Annotated[
        bool,
        typer.Option(
            "--torch-env", help="Also export RANK, MASTER_ADDR and so on, for torch's own store (in clear text)."
        ),
    ] = False,
    solo: Annotated[
        bool,
        typer.Option("--solo", help="With -n: the processes are independent, and need not join the run."),
    ] = False,
    tls_ca: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="PEM file: nodes also need a certificate of this authority."),
    ] = None,
    tls_cert: Annotated[
        str | None, typer.Option(metavar="FILE", help="PEM file with the certificate of this machine.")
    ] = None,
    tls_key: Annotated[
        str | None, typer.Option(metavar="FILE", help="PEM file with the key of that certificate.")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="With -n alone: allow connections beyond this machine in clear text.")
    ] = False,
) -> None:
    """Start a script as a node of a run in the cluster; or, with -n alone, as ranks on this machine only.

    In a cluster, type the same command on each machine: covey run train.py

    Or start it on several machines from here: with --on where `covey up` runs, else with --hosts and ssh. --on sends
    this folder; the first time that a machine gets files, it shows which machine and how many files, and asks.

    The nodes find each other when the script calls covey.join() or, with torch, init_process_group("covey").

    Each line of output begins with the rank of its process; in a cluster, with the machine and the rank.

    With -n alone, the processes also find RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as under torchrun.

    When a process fails, the other processes on this machine are stopped, and its exit code is returned. With --on-loss
    continue, the run goes on without it. If two or more succeed and none has joined, the exit code is 3.

    Ctrl-C is passed on to all processes; a second Ctrl-C kills them. Ctrl-Z stops them, and fg continues them.

    SIGTERM is passed on as well. If all processes then exit with 0, so does covey run.
    """
    if on is not None or hosts is not None:
        from covey.cli import several_machines

        limits = {"--size": size, "--min": min_size, "--max": max_size}
        of_all = {"--cluster": cluster, "--wait": wait, "--interfaces": interfaces, "--lanes": lanes, "-m": module}
        of_all |= {"--on-loss": on_loss, "--patience": patience, "--quorum": quorum, "--compress": compress}
        of_all |= {"--stripe": stripe}
        of_all |= {"--limit": None if limit is None else check_limit(limit)}
        of_all |= {"--tie-breaker": tie_breaker, "--new": new, "--restarts": restarts, "--torch-env": torch_env}
        of_all |= {"--seeds": seeds, "--tls-ca": _whole_path(tls_ca), "--tls-cert": _whole_path(tls_cert)}
        of_all |= {"--tls-key": _whole_path(tls_key), "--relay": relay}
        several_machines.refuse(
            {
                "--http": http,
                "--insecure": insecure,
                "--relay-limit": relay_limit,
                "--map-port": map_port,
                "--solo": solo,
            }
        )
        name = run_name or default_run_name(script, module=module)
        wanted = several_machines.Program(script, tuple(arguments or ()), name, module, python, requirements)
        terms = several_machines.FanOut(processes, limits, of_all, log_dir, detach, tuple(include or ()), yes)
        raise typer.Exit(several_machines.start(wanted, terms, on=on, hosts=hosts))
    if requirements is not None or detach or include or yes:
        raise ConfigError(
            "--requirements, --include, --yes and --detach go with --on: they are about programs that agents start"
        )
    command = command_line(script, arguments or [], module=module, run_name=run_name, python=python)
    page = None
    if http is not None:
        from covey.runtime.keeper.pages import parse_address

        page = parse_address(http)
    settings: dict[str, str] = {}
    if lanes is not None:
        settings["COVEY_LANES"] = lanes.value
    if on_loss is not None:
        settings["COVEY_ON_LOSS"] = on_loss.value
    if patience is not None:
        settings["COVEY_PATIENCE"] = str(check_timeout(patience, "--patience"))
    if quorum is not None:
        settings["COVEY_QUORUM"] = quorum.value
    if stripe is not None:
        settings["COVEY_STRIPE"] = stripe.value
    if limit is not None:
        settings["COVEY_LIMIT"] = check_limit(limit)
    if compress is not None:
        settings["COVEY_COMPRESS"] = check_compress(compress)
    program = script if module else Path(script).name
    short_name = program if module else Path(script).stem
    sizes = (min_size, max_size, size)
    others = (
        run_name,
        cluster,
        wait,
        seeds,
        relay,
        relay_limit,
        interfaces,
        tie_breaker,
        new or None,
        map_port or None,
    )
    certificates = (tls_ca, tls_cert, tls_key)
    if processes is not None and all(option is None for option in (*sizes, *others, *certificates)):
        if insecure:
            settings["COVEY_INSECURE"] = "1"
        say_that_it_stays_here(processes, script)
        make_run = functools.partial(LocalRun, processes, name=short_name, torch_env=torch_env)
        is_solo = solo or torch_env
        code = keep(make_run, command, env=settings, restarts=restarts, http=page, log_dir=log_dir, is_solo=is_solo)
        raise typer.Exit(code)
    if insecure:
        raise ConfigError("runs of a cluster are always encrypted; --insecure goes with -n alone")
    if size is not None and (min_size is not None or max_size is not None):
        raise ConfigError("--size says exactly how many nodes; leave --min and --max out")
    if not all(limit is None for limit in (size, min_size, max_size)):
        for name in ("COVEY_RUN_SIZE", "COVEY_RUN_MIN_SIZE", "COVEY_RUN_MAX_SIZE"):
            os.environ.pop(name, None)  # the command line overrides all three
    asked = {
        "COVEY_RUN": run_name or default_run_name(script, module=module),
        "COVEY_RUN_PROGRAM": program,
        "COVEY_RUN_SIZE": size,
        "COVEY_RUN_MIN_SIZE": min_size,
        "COVEY_RUN_MAX_SIZE": max_size,
        "COVEY_JOIN_TIMEOUT": wait,
        "COVEY_TORCH_ENV": 1 if torch_env else None,
        "COVEY_CLUSTER": cluster,
        "COVEY_SEEDS": seeds,
        "COVEY_RELAYS": relay,
        "COVEY_MAP_PORT": 1 if map_port else None,
        "COVEY_INTERFACES": interfaces,
        "COVEY_TIE_BREAKER": tie_breaker,
        "COVEY_TLS_CA": _whole_path(tls_ca),
        "COVEY_TLS_CERT": _whole_path(tls_cert),
        "COVEY_TLS_KEY": _whole_path(tls_key),
        "COVEY_RUN_MIN_HOSTS": None if size is not None or min_size is not None else MIN_HOSTS,
    }
    variables = {name: str(value) for name, value in asked.items() if value is not None}
    from covey.cli.relay import parse_relay_limit

    rate = parse_relay_limit(relay_limit)
    share = share_of_run(1 if processes is None else processes, variables, is_new=new, relay_rate=rate)
    raise typer.Exit(keep(share, command, env=settings, restarts=restarts, http=page, log_dir=log_dir))


def check_limit(limit: str) -> str:
    """Return the value of --limit; ConfigError if it is not a rate."""
    SETTINGS["limit"].kind.read("--limit", limit)
    return limit


def check_compress(compress: str) -> str:
    """Return the value of --compress; ConfigError for a codec or parameter that does not exist."""
    from covey.compress.policy import make_policy  # slow to load

    try:
        make_policy(compress)
    except ConfigError as error:
        is_unknown = "there is no codec" in str(error)
        own = ". One that the script registers is named by COVEY_COMPRESS, or in covey.join" if is_unknown else ""
        raise ConfigError(f"--compress {compress}: {error}{own}") from None
    return compress


def default_run_name(script: str, *, module: bool) -> str:
    """Return the name of a run that was given none: COVEY_RUN, or the name of the script without .py."""
    return os.environ.get("COVEY_RUN") or (script if module else Path(script).stem)


def say_that_it_stays_here(processes: int, script: str) -> None:
    """On a machine of a cluster, print to a terminal that -n alone uses this machine only."""
    if not os.isatty(2):
        return
    from covey.net.keys import clusters

    with contextlib.suppress(ConfigError):
        if (name := clusters.default_name()) is not None:
            stem = Path(script).stem
            typer.echo(f"covey: {processes} ranks on this machine only; `covey run {stem} -n {processes} {script}` "
                       f"spans the machines of cluster {name!r}", err=True)  # fmt: skip


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
    from covey.base.seeds import split_relays, split_seeds
    from covey.net.discovery.interfaces import parse_pattern
    from covey.net.settings_files import effective_environment
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


def _whole_path(path: str | None) -> str | None:
    return None if path is None else os.path.abspath(path)


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
