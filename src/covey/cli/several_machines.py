"""`covey run --on` and `--hosts`: starts a run on several machines from one terminal."""

from __future__ import annotations

import os
import secrets
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import typer

from covey.base.config import group_config, split_list
from covey.base.errors import ConfigError
from covey.base.settings import SETTINGS
from covey.cli.options import words_of
from covey.cli.terminal import tell_event, working
from covey.net.host.settings_files import effective_environment
from covey.runtime.environment import ClusterOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, MutableMapping, Sequence

    from covey.agent.requests import Interpreter
    from covey.agent.screen import Screen
    from covey.agent.shares import SharedRun
    from covey.agent.ssh import SshHost
    from covey.net.host.saved_runs import SavedRun
    from covey.net.keys.clusters import Cluster
    from covey.runtime.keeper.output import RankLogs

    Keep = Callable[[Sequence[str], int], SavedRun | None]
    """Makes the record of a run that has been started, from the names of its machines and the number of its ranks."""

REQUIREMENTS_BYTES: Final = 32 << 10
OWN_CLUSTER: Final = "ssh"
"""The name of the cluster of a run that ssh starts from a machine that is in none."""


class Program(NamedTuple):
    """What to start."""

    script: str
    arguments: tuple[str, ...]
    run: str
    is_module: bool
    python: str | None
    requirements: str | None = None
    """A file."""


class FanOut(NamedTuple):
    """How to start it on all of the machines."""

    processes: int | None
    """On each machine."""
    settings: Mapping[str, str]
    """The settings that were given as options of `covey run`, by name."""
    words: tuple[str, ...]
    """Its other options."""
    log_dir: str | None
    detach: bool
    includes: tuple[str, ...] = ()
    """Patterns of files that are sent although they may hold secrets."""
    yes: bool = False
    """Whether the person agrees to send files to machines that never had any."""
    copy: bool = False
    """Whether the folder is sent by ssh, too."""
    as_json: bool = False
    """Whether output and events are shown as lines of JSON."""


def start(program: Program, terms: FanOut, keep: Keep, *, on: str | None, hosts: str | None) -> int:
    """Start a program on several machines, with agents (`on`) or ssh (`hosts`); return its exit code."""
    if on is not None and hosts is not None:
        raise ConfigError("--on is for machines with an agent, --hosts for machines without; give one of them")
    if terms.processes is not None and terms.processes < 1:
        raise ConfigError(f"-n {terms.processes}: each machine needs at least one process")
    if program.requirements is not None and program.python is not None:
        raise ConfigError("--requirements makes an interpreter, and --python names one; give one of them")
    if on is not None:
        if terms.copy:
            raise ConfigError("--copy goes with --hosts: --on sends the folder anyway")
        return _on_agents(program, terms, keep, split_list(on))
    assert hosts is not None
    if (terms.includes or terms.yes) and not terms.copy:
        raise ConfigError("--include and --yes are about files that are sent; with --hosts, --copy sends them")
    if terms.detach or program.requirements is not None:
        raise ConfigError("--detach and --requirements need an agent on each machine: use --on, and `covey up` there")
    return _with_ssh(program, terms, keep, hosts)


def environment_with(settings: Mapping[str, str]) -> MutableMapping[str, str]:
    """Set the settings that say how nodes reach each other for this process, too, and return its environment."""
    env = effective_environment()
    for name, text in settings.items():
        option = SETTINGS[name].option
        if option is not None and option.of_cluster and SETTINGS[name].section == SETTINGS["interfaces"].section:
            env[SETTINGS[name].variable] = text
    return env


def sized(settings: Mapping[str, str], total: int) -> dict[str, str]:
    """Return settings that say how many nodes the run has: as given, or exactly those that are started."""
    if settings.keys() & {"run_size", "run_min_size", "run_max_size"}:
        return dict(settings)
    return {**settings, "run_size": str(total)}


def _on_agents(program: Program, terms: FanOut, keep: Keep, names: tuple[str, ...]) -> int:
    from covey.agent.callers import calling
    from covey.agent.launching import LEASE_SECONDS, Launch, for_all, goes_on, launch, may_start
    from covey.agent.requests import check_run_name
    from covey.agent.shares import SharedRun
    from covey.agent.snapshot import take_snapshot
    from covey.cli import consent
    from covey.net.keys import trust
    from covey.runtime.keeper.output import RankLogs

    check_run_name(program.run)
    if not names:
        raise ConfigError("--on names no machine; write --on all, or --on north,south")
    words = (script_in(Path.cwd(), program), *program.arguments)
    interpreter = _interpreter(program.requirements, program.python)
    logs = None if terms.log_dir is None else RankLogs(terms.log_dir)
    env = environment_with(terms.settings)
    cluster = ClusterOptions(terms.settings.get("cluster")).find(env)
    of_all = {name: text for name, text in terms.settings.items() if name not in ("run", "cluster")}  # agents know
    folder = take_snapshot(Path.cwd(), None if terms.log_dir is None else Path(terms.log_dir), terms.includes)
    processes = terms.processes or 1
    screen = _screen(logs, terms)
    with folder as snapshot, calling(cluster, group_config(env)) as terminal:
        book = trust.trusted(cluster)
        with working(f"looking for agents of {cluster.name} ..."):
            found = terminal.find(None if names == ("all",) else names, book)
            for_all([*found.trusted, *found.new], may_start)  # before a person is asked, and files are sent
        consent.tell_left_out(snapshot, found.left_out)
        agents = consent.ask_to_send(cluster, found, book, snapshot, yes=terms.yes)
        total = processes * len(agents)
        wanted = Launch(
            program.run,
            processes,
            (*words_of(sized(of_all, total)), *terms.words),
            words,
            interpreter,
            0.0 if terms.detach else LEASE_SECONDS,
        )
        machines = {agent.machine for agent in agents}
        shares = launch(agents, wanted, snapshot, screen.note)
        if terms.detach:
            where = ", ".join(agent.name for agent in agents)
            if terms.as_json:
                tell_event("started", run=program.run, machines=[agent.name for agent in agents])
                return 0
            typer.echo(f"run {program.run!r} has been started on {where}")
            typer.echo(f"`covey logs {program.run} -f` shows its output, `covey stop {program.run}` ends it")
            return 0
        run = SharedRun(shares, screen, lambda: goes_on(terminal.visit, program.run, machines))
        return _attend(run, screen, keep([agent.name for agent in agents], total))


def _with_ssh(program: Program, terms: FanOut, keep: Keep, text: str) -> int:
    from covey.agent.launching import goes_on
    from covey.agent.shares import SharedRun
    from covey.agent.ssh import SshShare, parse_hosts, ssh_command
    from covey.runtime.keeper.output import RankLogs
    from covey.runtime.peers.visit import visiting

    hosts = parse_hosts(text, terms.processes or 1)
    logs = None if terms.log_dir is None else RankLogs(terms.log_dir)
    env = environment_with(terms.settings)
    cluster = _cluster_for_ssh(terms.settings.get("cluster"), env)
    seeds = terms.settings.get("seeds") or ",".join(host.name.rpartition("@")[2] for host in hosts)
    of_all = {**terms.settings, "cluster": cluster.name, "seeds": seeds, "run": program.run}
    python = program.python or sys.executable
    others = [*terms.words, *(["--python", program.python] if program.python else [])]
    total, ssh, script = sum(host.processes for host in hosts), ssh_command(os.environ), program.script
    screen = _screen(logs, terms)
    if terms.copy:
        script = script_in(Path.cwd(), program)
        _copy_with_ssh(hosts, ssh, python, program.run, terms, screen.note)
    shares = []
    for host in hosts:
        words = ["run", "-n", str(host.processes), *words_of(sized(of_all, total)), *others]
        words += [script, *program.arguments]
        copied = program.run if terms.copy else ""
        shares.append(SshShare(host, ssh, python, words, cluster.secret.key, copied))

    def run_goes_on() -> bool:
        with visiting(cluster, group_config(env), announce=False) as visit:
            visit.look(1.0, until=lambda visit: bool(visit.members()))
            return goes_on(visit, program.run)

    return _attend(SharedRun(shares, screen, run_goes_on), screen, keep([host.name for host in hosts], total))


def _screen(logs: RankLogs | None, terms: FanOut) -> Screen:
    from covey.agent.screen import JsonScreen, Screen

    return JsonScreen(logs) if terms.as_json else Screen(logs)


def _attend(run: SharedRun, screen: Screen, kept: SavedRun | None) -> int:
    """Show the output of a run until its end, note how it has ended, and return its exit code."""
    code = screen.code_of(run.attend())
    reason = run.reason if code else ""
    screen.end(code, reason)
    if kept is not None:
        kept.end(code, reason)
    return code


def _copy_with_ssh(
    hosts: Sequence[SshHost], ssh: Sequence[str], python: str, run: str, terms: FanOut, note: Callable[[str], None]
) -> None:
    """Send the working folder to all hosts, once the person has agreed."""
    from covey.agent.launching import for_all, sent_text
    from covey.agent.requests import check_run_name
    from covey.agent.snapshot import take_snapshot
    from covey.agent.ssh_files import deliver_by_ssh
    from covey.cli import consent
    from covey.runtime.progress_bar import ProgressBar

    check_run_name(run)
    said: list[str] = []
    with take_snapshot(Path.cwd(), None if terms.log_dir is None else Path(terms.log_dir), terms.includes) as snapshot:
        consent.tell_left_out(snapshot, ())
        consent.ask_to_send_by_ssh([host.name for host in hosts], snapshot, yes=terms.yes)
        with ProgressBar("files", 0) as bar:

            def send(host: SshHost) -> None:
                count, size = deliver_by_ssh(host, ssh, python, run, snapshot, bar)
                if count:
                    said.append(sent_text(host.name, count, len(snapshot.entries), size))

            for_all(hosts, send)
    for line in said:
        note(line)


def script_in(folder: Path, program: Program) -> str:
    """Return a script as a path in the folder that is sent; ConfigError if it lies elsewhere."""
    if program.is_module or not os.path.isfile(program.script):
        return program.script
    path = Path(os.path.abspath(program.script))
    if not path.is_relative_to(folder):
        raise ConfigError(f"{program.script} is not in {folder}, which is sent; change to the folder of the program")
    return str(path.relative_to(folder))


def _interpreter(requirements: str | None, python: str | None) -> Interpreter:
    from covey.agent.requests import Interpreter

    if requirements is None:
        return Interpreter(python or "")
    try:
        text = Path(requirements).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--requirements {requirements}: {getattr(error, 'strerror', None) or 'it is no text'}"
        ) from None
    if not text.strip():
        raise ConfigError(
            f"--requirements {requirements} names no package; leave it out, or add what the program needs"
        )
    if len(text.encode()) > REQUIREMENTS_BYTES:
        raise ConfigError(f"--requirements {requirements} is longer than {REQUIREMENTS_BYTES >> 10} KiB")
    return Interpreter("", text)


def _cluster_for_ssh(name: str | None, env: MutableMapping[str, str]) -> Cluster:
    """Return the cluster of this machine; if it is in none, one with a new secret for this run only."""
    from covey.net.keys import clusters
    from covey.wire.secret import KEY_BYTES, ClusterSecret

    has_secret = any(each in env for each in ("COVEY_SECRET", "COVEY_SECRET_FILE", "COVEY_SECRET_FD", "COVEY_CLUSTER"))
    if name is None and not has_secret and not clusters.list_clusters():
        return clusters.Cluster(ClusterSecret(OWN_CLUSTER, secrets.token_bytes(KEY_BYTES)))
    return replace(ClusterOptions(name).find(env), seeds=())
