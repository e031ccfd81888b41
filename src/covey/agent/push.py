"""`covey push` and `covey data`, as a terminal does them: sends a data set to agents, and says what each has."""

from __future__ import annotations

import contextlib
import logging
import time
from typing import TYPE_CHECKING, Final, NamedTuple

from covey.agent.callers import RestartedError
from covey.agent.data_sets import DATA_SOURCES_LIMIT, DataReport, FetchRequest
from covey.agent.launching import AGENT_PAUSES, for_all
from covey.base.errors import ConfigError, ConnectError, CoveyError
from covey.runtime.backoff import Backoff

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from covey.agent.callers import AgentCaller, Terminal
    from covey.agent.data_folder import DataFolder
    from covey.agent.data_sets import FetchProgress
    from covey.runtime.progress_bar import ProgressBar

GRANT_SECONDS: Final = 10.0
PUSH_RETRY_SECONDS: Final = 60.0
"""How long a terminal tries to reach an agent again, in the middle of a data set."""


class Pushed(NamedTuple):
    """How a machine came to a data set, or why it did not."""

    machine: str
    id: bytes
    from_here: int
    from_others: int
    """Bytes that came over the network."""
    seconds: float
    was_there: bool
    problem: str = ""


class DataWanted(NamedTuple):
    """A data set that is pushed."""

    name: str
    digest: bytes
    size: int
    manifest_size: int
    folder: DataFolder | None
    """None if only other machines have it."""


def listed(agents: Sequence[AgentCaller]) -> dict[AgentCaller, list[DataReport] | CoveyError]:
    """Return what each agent has, or why it does not tell."""
    found: dict[AgentCaller, list[DataReport] | CoveyError] = {}

    def ask(agent: AgentCaller) -> None:
        try:
            found[agent] = [each for page in agent.stream("data_sets") for each in page]
        except CoveyError as error:
            found[agent] = error

    for_all(agents, ask)
    return found


def push(
    terminal: Terminal,
    wanted: DataWanted,
    targets: Sequence[AgentCaller],
    holders: Sequence[AgentCaller],
    bar: ProgressBar,
) -> list[Pushed]:
    """Bring a data set to agents, and return how each of them came to it, in their order.

    `holders` are agents that have it already; those and the targets give it to each other.
    """
    machines = tuple(dict.fromkeys(agent.machine for agent in targets))
    givers = list({agent.card.id: agent for agent in (*holders, *targets)}.values())[:DATA_SOURCES_LIMIT]
    outcomes: dict[bytes, Pushed] = {}
    bar.expect(wanted.size * len(targets))

    def grant(agent: AgentCaller) -> None:
        with contextlib.suppress(CoveyError):  # then it gives nothing, and others do
            agent.call("grant_data", wanted.digest, machines[:DATA_SOURCES_LIMIT], timeout=GRANT_SECONDS)

    def send(agent: AgentCaller) -> None:
        peers = tuple(each.card.id for each in givers if each is not agent)[:DATA_SOURCES_LIMIT]
        outcomes[agent.card.id] = _send(agent, wanted, peers, grant, bar)

    giving = contextlib.nullcontext() if wanted.folder is None else terminal.giving(wanted.folder, machines)
    with giving:
        for_all(givers, grant)
        for_all(targets, send)
    return [outcomes[agent.card.id] for agent in targets]


def _send(
    agent: AgentCaller,
    wanted: DataWanted,
    peers: tuple[bytes, ...],
    grant: Callable[[AgentCaller], None],
    bar: ProgressBar,
) -> Pushed:
    """Bring a data set to one agent; try again if its link is lost."""
    request = FetchRequest(wanted.name, wanted.digest, wanted.manifest_size, peers, wanted.folder is not None)
    began_at, shown, before = time.monotonic(), 0, (0, 0)
    tries = Backoff(f"the agent on {agent.name}", AGENT_PAUSES, within=PUSH_RETRY_SECONDS, level=logging.DEBUG)
    while True:
        last: FetchProgress | None = None
        try:
            for last in agent.stream("fetch_data", request):
                bar.show(max(0, last.there - shown))
                shown = max(shown, last.there)
                tries.worked()
                if last.is_published:
                    took = time.monotonic() - began_at
                    here, others = before[0] + last.from_terminal, before[1] + last.from_peers
                    return Pushed(agent.name, agent.machine, here, others, took, last.was_there)
            raise ConnectError(f"{agent.name}: the answer ended early")
        except (ConnectError, RestartedError) as error:
            if last is not None:
                before = before[0] + last.from_terminal, before[1] + last.from_peers
            if isinstance(error, RestartedError) or tries.is_over:
                text = f"{error}. What has come stays: push again for the rest"
                return Pushed(agent.name, agent.machine, *before, time.monotonic() - began_at, False, text)
            tries.failed(error)
            time.sleep(tries.pause)
            grant(agent)
        except CoveyError as error:
            return Pushed(agent.name, agent.machine, *before, time.monotonic() - began_at, False, str(error))


def found_elsewhere(name: str, reports: Mapping[AgentCaller, list[DataReport] | CoveyError]) -> DataWanted:
    """Return the latest data set of this name that an agent has.

    Raises:
        ConfigError: none has it.
    """
    known = [each for answer in reports.values() if not isinstance(answer, CoveyError) for each in answer]
    complete = [each for each in known if each.name == name and each.is_complete]
    if not complete:
        there = ", ".join(sorted({each.name for each in known if each.is_complete}))
        raise ConfigError(
            f"there is no folder or file {name!r} here, and no trusted machine with an agent has a data set of this "
            "name"
            f"{f' (they have: {there})' if there else ''}; give the path of a folder or a file"
        )
    latest = max(complete, key=lambda each: each.at)
    return DataWanted(name, latest.digest, latest.size, latest.manifest_size, None)
