"""`covey up`: makes this machine available to its cluster, as long as it runs."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
import threading
from collections.abc import Mapping  # noqa: TC003 - typer reads the types of the fields
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer

from covey.base.config import group_config, split_list
from covey.base.errors import ConfigError
from covey.base.settings import UP
from covey.base.text import duration, listed
from covey.cli.charter import machine_of
from covey.cli.options import RelayLimit, command_of, variables_of, words_of
from covey.cli.relay import parse_relay_limit
from covey.cli.terminal import say, tell, tell_event
from covey.net.host.settings_files import effective_environment
from covey.net.keys import clusters, trust
from covey.net.keys.identity import (
    ensure_identity,
    id_text,
    is_whole_id,
    meant_ids,
    node_name,
    own_machine,
    resolve_id,
)
from covey.runtime.environment import ClusterOptions
from covey.runtime.keeper.presence import CONDITIONS, MachinePresence, PresenceTerms
from covey.runtime.loop import LOOK_UP_EVERY

if TYPE_CHECKING:
    from covey.agent.agent import Permission
    from covey.net.keys.clusters import Cluster

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True, kw_only=True)
class UpRequest:
    """What was typed after `covey up`."""

    allow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NODE|all",
            help="Let this machine start programs here: its id, or its name if it is trusted (see `covey trust`); "
            "all: every member of the cluster.",
            show_default="only this machine itself",
        ),
    ] = None
    relay_limit: RelayLimit = None
    as_json: Annotated[bool, typer.Option("--json", help="Print lines of JSON.")] = False
    unit: Annotated[bool, typer.Option("--unit", help="Print a systemd user unit that runs this command.")] = False
    settings: Mapping[str, str] = field(default_factory=dict)
    """The settings that were given as options, by name."""


def up(request: UpRequest) -> None:
    """Let members of the cluster start programs on this machine, until Ctrl-C.

    `covey run --on` starts programs here; `covey ps`, `covey logs` and `covey stop` show and end them.

    A machine that is allowed can run anything as your user. Without --allow, only this machine can start programs.

    When this command ends, it ends the programs that it has started. The audit log has every start.
    """
    env = effective_environment()
    seeds = request.settings.get("seeds")
    of_nodes = {name: text for name, text in request.settings.items() if name not in ("cluster", "seeds")}
    env.update(variables_of(of_nodes))  # also for the programs that it starts
    options = ClusterOptions(request.settings.get("cluster"), None, None if seeds is None else split_list(seeds))
    found = options.find(env)
    if not clusters.cluster_path(found.name).exists():
        raise ConfigError(
            "covey up needs a machine that is in the cluster: run `covey enroll` with the join code first"
        )
    ensure_identity()
    permission = permission_for(found, request.allow or [])
    rate = parse_relay_limit(request.relay_limit)
    if request.unit:
        return typer.echo(unit_text(found.name, _options(request, found, permission)), nl=False)
    from covey.agent.agent import serving

    presence = MachinePresence("This machine", PresenceTerms.read(env))
    ending = threading.Event()
    problem: list[Exception] = []
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, lambda *_: ending.set())
    with (
        contextlib.closing(presence),
        serving(found, group_config(env), permission, relay_rate=rate) as agent,
    ):

        def stop(error: Exception) -> None:
            problem.append(error)
            ending.set()

        agent.stop = stop
        if request.as_json:
            allowed = ["all"] if permission.is_for_all else sorted(map(id_text, permission.machines))
            about = {"machine": permission.here, "id": id_text(own_machine()), "cluster": found.name}
            conditions = list(presence.conditions)
            tell_event("up", **about, allowed=allowed, relay_port=agent.relay_port or None, conditions=conditions)
        else:
            _say_up(request, found, permission, agent.relay_port, presence)
        absence = ""
        while not ending.wait(LOOK_UP_EVERY):  # a signal that another thread gets does not end the wait
            absence = _look_at(presence, absence, as_json=request.as_json)
    if request.as_json:
        tell_event("ended")
    if problem:
        raise problem[0]


app.command()(command_of(UpRequest, UP, up))


def _say_up(
    request: UpRequest, found: Cluster, permission: Permission, relay_port: int, presence: MachinePresence
) -> None:
    """Say that programs may be started now, and by which machines."""
    say(f"{permission.here} is up in the cluster {found.name!r}; its id is {id_text(own_machine())}.")
    if permission.is_for_all:
        say("Every member of the cluster can run anything as your user.")
    elif permission.machines:
        say(f"{', '.join(_called(found, request.allow or []))} can run anything as your user, and this machine itself.")
    else:
        say("Only this machine itself may start programs here; --allow lets others.")
    if relay_port:
        say(f"It is a relay for nodes of the cluster, at port {relay_port}.")
    if presence.conditions:
        say(f"Its programs take part in runs only while it {listed(presence.conditions)}.")
    sys.stdout.flush()


def _look_at(presence: MachinePresence, before: str, *, as_json: bool) -> str:
    """Say whether programs leave their runs or return, and why; return why they are away now."""
    presence.look()
    presence.left()  # each `covey run` has the system wait for itself
    if presence.slept:
        slept = f"{presence.name} slept for {duration(presence.slept)}."
        tell(slept, "slept", as_json=as_json, seconds=round(presence.slept, 1))
    if presence.absence and presence.absence != before:
        text = f"{presence.name} {presence.absence}: its programs leave their runs."
        tell(text, "left", as_json=as_json, why=presence.absence)
    elif before and not presence.absence:
        text = f"{presence.name} {CONDITIONS[before]} again: its programs return."
        tell(text, "returned", as_json=as_json, why=CONDITIONS[before])
    return presence.absence


def _options(request: UpRequest, cluster: Cluster, permission: Permission) -> list[str]:
    """Return the options of a command that does the same as this one, whatever machine names mean later."""
    machines = ["all"] if permission.is_for_all else sorted(map(id_text, permission.machines))
    options = {**request.settings, "cluster": cluster.name}
    limit = [f"--relay-limit={request.relay_limit}"] if request.relay_limit else []
    return [*words_of(options), *(f"--allow={each}" for each in machines), *limit]


def permission_for(cluster: Cluster, allow: list[str]) -> Permission:
    """Return which machines may start programs here, by the ids of those that were named.

    A name means the trusted machine of that name (`net.keys.trust`): any member could claim it.

    Raises:
        ConfigError: no trusted machine has a name, or several have.
    """
    from covey.agent.agent import Permission

    here = node_name(os.uname().nodename, own_machine())
    if "all" in allow:
        return Permission(own_machine(), is_for_all=True, here=here)
    names = {each: known.name for each, known in trust.trusted(cluster).items()} if allow else {}
    machines = set()
    for word in allow:
        if is_whole_id(word):
            machines.add(machine_of(cluster, resolve_id(word, {})))
            continue
        meant = meant_ids(word, names)
        if len(meant) > 1:
            listed = ", ".join(f"{names[each]} ({id_text(each)})" for each in meant)
            raise ConfigError(f"--allow {word} means several machines: {listed}; write the id of one of them")
        if not meant:
            raise ConfigError(
                f"--allow {word}: this machine was not told which key {word} has, and any member could call itself so; "
                f"write the id that `covey up` prints there, or run `covey trust {word}` first"
            )
        machines.add(meant[0])
    return Permission(own_machine(), frozenset(machines), here=here)


def _called(cluster: Cluster, allow: list[str]) -> list[str]:
    """Return what messages call the machines that were named: trusted ones by name, also where an id was written."""
    names = {id_text(each): known.name for each, known in trust.trusted(cluster).items()}
    return [names.get(word, word) for word in allow]


def unit_text(cluster: str, options: list[str]) -> str:
    """Return a systemd user unit for an agent with these options."""
    command = shlex.join([sys.executable, "-m", "covey", "up", *options]).replace("%", "%%")
    home = os.environ.get("COVEY_HOME")
    variable = f'Environment="COVEY_HOME={os.path.abspath(home)}"\n' if home else ""
    return f"""\
# covey up --unit > ~/.config/systemd/user/covey.service
# systemctl --user daemon-reload; systemctl --user enable --now covey
# loginctl enable-linger      # so that it runs while you are not logged in
[Unit]
Description=covey agent of the cluster {cluster}

[Service]
ExecStart={command}
{variable}Restart=on-failure
RestartSec=5
KillMode=mixed
TimeoutStopSec=60

[Install]
WantedBy=default.target
"""
