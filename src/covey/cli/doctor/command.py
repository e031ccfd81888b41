"""The `covey doctor` command: collects facts, derives findings, prints both. Always ends within ten seconds."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
import time
from collections import ChainMap
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console

from covey.base.config import group_config, split_seeds
from covey.base.errors import ConfigError, DeadlineError
from covey.cli.doctor.facts import Facts
from covey.cli.doctor.findings import findings
from covey.cli.doctor.machine import examine_machine, known_part
from covey.cli.doctor.report import as_json, as_text
from covey.cli.terminal import working
from covey.net.discovery.interfaces import parse_pattern, usable_interfaces
from covey.net.host.settings_files import effective_environment, settings_of_files
from covey.runtime.environment import ClusterOptions

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import RenderableType

    from covey.base.config import GroupConfig
    from covey.net.keys.clusters import Cluster

DEADLINE_SECONDS: Final = 9.8
REPORT_WIDTH: Final = 100

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def doctor(
    cluster: Annotated[
        str | None, typer.Argument(metavar="CLUSTER", help="The cluster to look at, if not the default one.")
    ] = None,
    as_json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    interfaces: Annotated[
        str | None, typer.Option(metavar="PATTERN", help="Use these interfaces: eth*,!docker*,10.0.0.0/8")
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(metavar="A,B", help="Also look for nodes at these addresses: host:port")
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Also print the facts: machine, settings, interfaces, nodes.")
    ] = False,
) -> None:
    """Explain why a run waits, why its wait has failed, or why machines do not find each other.

    It prints what it found, and what to do about it. Run it on two machines at the same time: they look for each other.

    Exits with 0 if it finds no problem, with 1 if it finds one, and with 2 if a setting is invalid.
    """
    began = time.monotonic()
    with _Guard(began + DEADLINE_SECONDS):
        facts = _gather_facts(cluster, interfaces, seeds)
        facts = replace(facts, seconds=time.monotonic() - began)
        found = findings(facts)
        if as_json_:
            typer.echo(json.dumps(as_json(facts, found)))
        else:
            _print(as_text(facts, found, has_facts=verbose))
    raise typer.Exit(int(any(finding.weight == "problem" for finding in found)))


def _print(text: RenderableType) -> None:
    out = Console(highlight=False, emoji=False, markup=False)
    if out.is_terminal:
        return out.print(text)
    if "COLUMNS" not in os.environ:
        out.width = REPORT_WIDTH
    with out.capture() as captured:
        out.print(text)
    for line in captured.get().splitlines():  # without trailing blanks
        typer.echo(line.rstrip())


def _gather_facts(cluster: str | None, interfaces: str | None, seeds: str | None) -> Facts:
    logging.getLogger("covey").addHandler(logging.NullHandler())  # covey's warnings become findings
    env = dict(os.environ)
    config = group_config(ChainMap(known_part(env), *settings_of_files().values()), interfaces=interfaces)
    parse_pattern(config.interfaces)
    given = split_seeds(seeds) if seeds is not None else None
    arguments = {"COVEY_CLUSTER": cluster, "COVEY_INTERFACES": interfaces, "COVEY_SEEDS": seeds}
    facts = Facts(machine=examine_machine(env, arguments))
    with working("looking at this machine") as show:
        return _examine(facts, ClusterOptions(cluster, seeds=given), config, show or (lambda _text: None))


def _examine(facts: Facts, options: ClusterOptions, config: GroupConfig, tell: Callable[[str], None]) -> Facts:
    from covey.cli.doctor.network import (
        look_at_interfaces,
        with_memory,
    )  # here, because it imports all that clusters need

    facts = replace(facts, interfaces=look_at_interfaces(config.interfaces))
    try:
        usable_interfaces(config.interfaces)
    except ConfigError as error:
        facts = replace(facts, interfaces_problem=str(error).rstrip("."))
    try:
        cluster = options.find(effective_environment())
    except (ConfigError, OSError) as error:
        return replace(facts, cluster_problem=str(error).rstrip("."))
    facts = with_memory(replace(facts, cluster=cluster.name), cluster)
    return facts if facts.interfaces_problem else _look_around(facts, cluster, config, tell)


def _look_around(facts: Facts, cluster: Cluster, config: GroupConfig, tell: Callable[[str], None]) -> Facts:
    from covey.cli.doctor.network import NodeSearch
    from covey.cli.doctor.probes import RouterFacts, RouterQuestion

    try:
        with RouterQuestion() if config.map_port else contextlib.nullcontext() as question:
            search = NodeSearch(cluster, config, tell)
            search.run()
            router = question.answer() if question else RouterFacts()
    except TimeoutError as error:
        raise DeadlineError(
            "the examination did not end before its timeout ended, because this machine is too busy; try again later"
        ) from error
    except (ConfigError, OSError) as error:  # such as no folder for files, or no free port
        return replace(facts, search_problem=str(error).rstrip("."))
    return replace(
        facts,
        looked=True,
        router=router.protocol,
        router_ip=router.private_ip,
        router_problem=router.problem,
        interfaces=search.interfaces or facts.interfaces,
        multicast_problem=search.multicast_problem,
        host_problem=search.host_problem,
        nodes=search.nodes,
        other_processes=search.other_processes,
        unreachable=search.unreachable,
        seeds=search.seeds,
        relays=search.relays,
        refusals=search.refusals,
        limits=search.limits,
    )


class _Guard:
    """Ends the process if the examination takes too long."""

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._is_over = threading.Event()

    def __enter__(self) -> None:
        threading.Thread(target=self._watch, name="covey-doctor-guard", daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self._is_over.set()

    def _watch(self) -> None:
        if not self._is_over.wait(self._deadline - time.monotonic()):
            print("error: the examination did not end in time", file=sys.stderr, flush=True)
            os._exit(1)
