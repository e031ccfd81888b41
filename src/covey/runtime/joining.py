"""Joining a run of a cluster: from a secret and a name to a group."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING

from covey.base.config import ports_from
from covey.base.errors import ConfigError
from covey.net import shm
from covey.runtime import loop as control
from covey.runtime.bootstrap import group_of
from covey.runtime.candidate import Candidate
from covey.runtime.engine import Engine
from covey.runtime.group import Group
from covey.runtime.node import Node
from covey.runtime.seat import cluster_seat
from covey.runtime.torch_env import export_torch_env
from covey.wire import messages
from covey.wire.formation import Terms

if TYPE_CHECKING:
    from covey.base.config import GroupConfig
    from covey.net.clusters import Cluster
    from covey.runtime.places import ClusterOptions, WantedRun
    from covey.runtime.seat import Seat


def join_run(wanted: WantedRun, config: GroupConfig, options: ClusterOptions, *, is_elastic: bool = False) -> Group:
    """Return the group of a run once its nodes have agreed on it.

    Raises:
        ConfigError: there is no cluster, or a setting cannot work.
        AuthError: the secret or this node's identity is not accepted.
        DeadlineError: the others did not come in time.
    """
    if config.lanes == "shm" and not shm.usable():
        raise ConfigError("lanes='shm' needs Linux on x86-64; use unix or auto")
    if wanted.size == 1:
        return _ready(Group(Engine(None, 0, (0,), wanted.name, config), local_rank=0), None)
    cluster = options.find(os.environ)
    seat = cluster_seat(cluster, config, run=wanted.name, ports=ports_from(os.environ.get("COVEY_PORT", "")))
    terms = Terms(
        run=wanted.name,
        program=wanted.program,
        size=wanted.size,
        min_size=wanted.min_size,
        max_size=wanted.max_size,
        version=f"{messages.VERSION}",
        lanes=config.lanes,
        on_loss=config.on_loss,
    )
    # A generation may lose members below the size that the next one waits for.
    floor = 1 if is_elastic else wanted.floor
    node = control.make(
        _gather(cluster, terms, config, seat, wanted.timeout, is_elastic, floor),
        discard=Node.close,
        otherwise=seat.leave,
    )
    return _ready(group_of(node, local_rank=_local_rank(node)), node)


def _ready(group: Group, node: Node | None) -> Group:
    """Do what `covey run` asked for before the program has its group."""
    if os.environ.get("COVEY_TORCH_ENV") == "1":
        try:
            export_torch_env(group, node)
        except BaseException:
            group.close()
            raise
    return group


async def _gather(
    cluster: Cluster,
    terms: Terms,
    config: GroupConfig,
    seat: Seat,
    asked: float,
    is_elastic: bool,
    floor: int,
) -> Node:
    """Return the node of an agreed run."""
    candidate: Candidate | None = None
    try:
        candidate = Candidate(cluster, config, seat, terms, is_elastic=is_elastic)
        await candidate.open()
        formed = await candidate.form(asked)
        founded = formed if isinstance(formed, messages.Founded) else None
        if isinstance(formed, messages.Founded):
            seats = {member.card.life: member.seat for member in formed.members}
        else:
            seats = {member.life: rank for rank, member in enumerate(formed.view)}
        node = Node(
            rank=seats[candidate.card.life],
            size=len(seats),
            run=terms.run,
            gate=seat.gate,
            card=candidate.card,
            config=config,
            entrance=seat.entrance,
            contacts={},
            floor=floor,
            store=candidate.records.write,
            companions=(candidate,),
            on_close=functools.partial(_leave, candidate, seat),
            seats=tuple(seats.values()),
            links_come=True,
        )
        candidate.carry_on(node, candidate.seated(seats), founded)
        return node
    except BaseException:
        if candidate is not None:
            await candidate.close()
        raise


def _local_rank(node: Node) -> int:
    """Return this node's number among those of the run on its host: ranks of one host are next to each other."""
    return sum(
        1
        for peer in node.peers.values()
        if peer.rank < node.rank and peer.contact is not None and peer.contact.host == node.host
    )


def _leave(candidate: Candidate, seat: Seat) -> None:
    """Free the seat; who leaves in good order votes no more, so there is nothing to remember."""
    candidate.records.forget()
    seat.on_close()
