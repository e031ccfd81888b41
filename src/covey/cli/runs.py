"""Finds a run that goes on, by its name: on this machine, or in a cluster. For commands that ask its ranks."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final, NamedTuple

from covey.base.config import group_config
from covey.base.errors import ConfigError
from covey.base.text import listed, printable
from covey.cli.terminal import working
from covey.net.host.runs import find_local_run, local_runs
from covey.net.host.settings_files import effective_environment
from covey.runtime.environment import ClusterOptions
from covey.wire import messages

if TYPE_CHECKING:
    from collections.abc import Iterator

    from covey.net.host.runs import LocalRunFound
    from covey.net.keys.clusters import Cluster
    from covey.runtime.peers.visit import Visit

RUN_NAME_SECONDS: Final = 5.0
"""How long nodes may take to tell which run they are in."""


def find_run(name: str, cluster: str | None) -> LocalRunFound | Cluster:
    """Return a run on this machine, or the cluster in which to look for a run of this name.

    Raises:
        ConfigError: there is neither.
    """
    run = find_local_run(name) if cluster is None else None
    if run is not None:
        return run
    try:
        return ClusterOptions(cluster).find(effective_environment())
    except ConfigError as error:
        if cluster is not None:
            raise
        raise ConfigError(f"no run {name!r} is running here{here()}, and no cluster can be asked: {error}") from None


def here() -> str:
    """Return the names of the runs on this machine, to be put behind what a message says of them."""
    names = listed(dict.fromkeys(run.name for run in local_runs()))
    return f" (here: {names})" if names else ""


class VisitedRun(NamedTuple):
    """A run of a cluster, as a visit has found it."""

    visit: Visit
    members: list[messages.PeerReport]
    """Those that have answered."""
    size: int
    """How many members these know of, themselves included."""


@contextlib.contextmanager
def visiting_members(run: str, cluster: Cluster, wait: float) -> Iterator[VisitedRun]:
    """Visit a cluster, and the members of the run of this name, until the end of `with`.

    Raises:
        ConfigError: no node is in such a run.
    """
    from covey.runtime.peers.visit import visiting

    with visiting(cluster, group_config(effective_environment()), announce=False) as visit:
        with working(f"looking for nodes of {cluster.name} ..."):
            visit.look(wait)
        seen = visit.members()
        told = visit.ask_all([state.card for state in seen], messages.Ask(), RUN_NAME_SECONDS)
        runs = {answer.run for answer in told if isinstance(answer, messages.Tell)}
        if run not in runs:
            names = listed(repr(printable(name)) for name in sorted(runs)) or "none"
            raise ConfigError(f"no node of cluster {cluster.name!r} is in a run {run!r}; runs: {names}")
        members = [
            state
            for state, answer in zip(seen, told, strict=True)
            if isinstance(answer, messages.Tell) and answer.run == run and answer.rank >= 0
        ]
        known = {peer.card.id for answer in told if isinstance(answer, messages.Tell) and answer.run == run
                 for peer in answer.peers if peer.rank >= 0}  # fmt: skip
        yield VisitedRun(visit, members, len(known | {state.card.id for state in members}))
