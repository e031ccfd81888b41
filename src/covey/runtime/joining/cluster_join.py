"""Joins a run of a cluster: from a secret and a name to a group. Runs on the thread that calls."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from covey.base.config import ports_from
from covey.base.numbers import Seat
from covey.base.version import __version__
from covey.net.host.settings_files import effective_environment
from covey.runtime import loop as control
from covey.runtime.collectives.engine import Engine
from covey.runtime.group.group import Group
from covey.runtime.joining.bootstrap import group_of, local_rank_of
from covey.runtime.joining.joiner import Joiner
from covey.runtime.joining.node import NodeParts
from covey.runtime.joining.torch_env import export_torch_env
from covey.runtime.lanes.opener import check_demanded
from covey.runtime.peers.endpoint import cluster_endpoint
from covey.wire.formation import Terms
from covey.wire.versions import OURS

if TYPE_CHECKING:
    from covey.runtime.joining.request import JoinTarget


logger = logging.getLogger("covey")


def join_run(target: JoinTarget) -> Group:
    """Return the group of the target's run once the nodes have agreed on it.

    Raises:
        ConfigError: there is no cluster, or a setting cannot work.
        AuthError: the secret or this node's identity is not accepted.
        ClosedError: the run that this process waited for is over.
        DeadlineError: too few nodes came in time.
    """
    wanted, config = target.run, target.config
    assert wanted is not None
    check_demanded(config)
    if wanted.size == 1:
        engine = Engine(None, 0, (Seat(0),), wanted.name, config)
        return _ready(Group(engine, None, local_rank=0, cluster_run=wanted.name))
    env = effective_environment()
    cluster = target.options.find(env)
    ports = ports_from(env.get("COVEY_PORT", ""))
    endpoint = cluster_endpoint(
        cluster,
        config,
        run=wanted.name,
        ports=ports,
        tie_breaker=wanted.tie_breaker,
        maps_port=config.map_port,
    )
    abandoned = frozenset(wanted.abandoned)
    if wanted.is_new and not target.is_returning:
        abandoned |= forget_lineages(cluster.tag, wanted.name)
    terms = Terms(
        run=wanted.name,
        program=wanted.program,
        size=wanted.size,
        min_size=wanted.min_size,
        max_size=wanted.max_size,
        version=f"{OURS.oldest}",
        lanes=config.lanes,
        on_loss=config.on_loss,
        settings=config.agreed(),
        versions=OURS,
        release=__version__,
    )

    async def become_a_node() -> NodeParts:
        joiner = Joiner(
            cluster,
            config,
            endpoint,
            terms,
            is_elastic=target.is_elastic,
            is_returning=target.is_returning,
            min_hosts=wanted.min_hosts,
            abandoned=abandoned,
        )
        try:
            await joiner.mesh.open()
            formed = await joiner.form(wanted.timeout)
            # A generation may lose members below the size that the next one waits for.
            return joiner.take_seat(formed, config, floor=1 if target.is_elastic else wanted.floor)
        except BaseException:
            await joiner.mesh.close()
            raise

    node = control.make(become_a_node(), discard=NodeParts.close, otherwise=endpoint.leave)
    return _ready(group_of(node, local_rank=local_rank_of(node), functions=target.functions))


def _ready(group: Group) -> Group:
    """Export torch's variables, if `covey run` asked for it, before the program gets its group."""
    if os.environ.get("COVEY_TORCH_ENV") == "1":
        try:
            export_torch_env(group)
        except BaseException:
            group.close()
            raise
    return group


def forget_lineages(cluster: str, run: str) -> frozenset[bytes]:
    """Give up the runs of this name that this machine knows of and that may go on; return their lineages.

    Processes of this machine may then found a new run. If they find a given-up run going on, they fail.
    """
    from covey.runtime.joining.records import Records

    given_up = Records(cluster, run, b"").forget_lineages()
    for lineage, names in given_up.items():
        logger.warning("run %r: the earlier run with %s (%s) is given up on this machine", run,
                       ", ".join(names) or "unknown nodes", lineage.hex())  # fmt: skip
    return frozenset(given_up)
