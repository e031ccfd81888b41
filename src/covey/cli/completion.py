"""What the shell completes besides commands and options: names of clusters, nodes and commands.

Completion happens while a person types: it reads files of this machine only, and a problem with them is no error.
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
    """Return the nodes that were met in the cluster that the words before name."""
    from covey.net.keys import clusters

    return sorted(set(clusters.known(clusters.find_saved(words.get("cluster")).name).values()))


def completing(offer: Callable[[dict[str, Any]], Iterable[str]]) -> Callable[[Any, Any, str], list[str]]:
    """Return what Typer calls for completion: those that `offer` names and that begin with what was typed."""

    def complete(context: Any, _parameter: Any, begun: str) -> list[str]:
        with contextlib.suppress(CoveyError, OSError):
            return [name for name in offer(context.params) if name.startswith(begun)]
        return []

    return complete


def prepare(parameter: Any) -> None:
    """Have a parameter of a command completed by what it stands for, which its metavar and name say."""
    if parameter.metavar == "CLUSTER" or (parameter.metavar == "NAME" and parameter.name in _OF_CLUSTERS):
        parameter._custom_shell_complete = completing(cluster_names)
    elif parameter.metavar == "NODE":
        parameter._custom_shell_complete = completing(node_names)


_OF_CLUSTERS = frozenset({"cluster", "default", "forget"})
