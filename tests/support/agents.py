"""Agents and terminals in the process of a test."""

from __future__ import annotations

import contextlib
import secrets
from typing import TYPE_CHECKING

from tests.support.waiting import wait_until

from covey.agent.agent import Permission, serving
from covey.agent.callers import calling
from covey.base.config import GroupConfig
from covey.net.keys import clusters
from covey.net.keys.clusters import Cluster
from covey.net.keys.identity import ensure_identity, own_machine
from covey.wire.secret import ClusterSecret

if TYPE_CHECKING:
    from collections.abc import Iterator

    from covey.agent.agent import ResidentAgent
    from covey.agent.callers import AgentCaller, Terminal

CONFIG = GroupConfig(interfaces="lo")


@contextlib.contextmanager
def an_agent(*, is_allowed: bool = True, is_denied: bool = False) -> Iterator[tuple[Cluster, ResidentAgent]]:
    """An agent in this process, and its cluster; this machine may use it, or only another one may."""
    ensure_identity()
    denied = frozenset({own_machine()}) if is_denied else frozenset[bytes]()
    cluster = Cluster(ClusterSecret("lab", secrets.token_bytes(32)), denied=denied)
    clusters.save(cluster)
    permission = Permission(own_machine() if is_allowed else bytes(32), here="north")
    with serving(cluster, CONFIG, permission) as agent:
        yield cluster, agent


@contextlib.contextmanager
def a_caller(cluster: Cluster) -> Iterator[tuple[Terminal, AgentCaller]]:
    with calling(cluster, CONFIG) as terminal:
        wait_until(lambda: bool(terminal.agents({})))
        yield terminal, terminal.agents({})[0]
