"""Shell completion for the names of clusters, nodes, runs and commands.

Completion runs while the user types: it reads only files of this machine, and ignores problems with them.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from covey.base.errors import CoveyError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


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


_CLUSTER_COMMANDS = frozenset({"cluster", "default", "forget"})
