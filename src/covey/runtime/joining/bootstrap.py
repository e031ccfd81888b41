"""Joining: from a process and what it was asked for to the group of its run."""

from __future__ import annotations

import atexit
import os
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from covey.base.config import YEAR_SECONDS, GroupConfig, group_config
from covey.base.errors import ConfigError, DeadlineError
from covey.net.descriptors import explained
from covey.net.lanes import shm
from covey.runtime import tracebacks
from covey.runtime.collectives.engine import Engine
from covey.runtime.environment import ClusterOptions, Place, find_place, find_run, launcher_wait, restarts
from covey.runtime.group.group import Group
from covey.runtime.group.internals import engine_of
from covey.wire.messages import MAX_MEMBERS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from covey.runtime.members.node import Node
    from covey.runtime.mesh.endpoint import Endpoint

FOUND_SECONDS: Final = 30.0
"""How long the control loop may take to begin a generation."""
LEAVE_SECONDS: Final = 2.0
"""How long the others may take to agree that this node leaves, when its group is closed."""


_joined: tuple[object, Group] | None = None
"""What was asked for, and the group that came of it."""
_joining = threading.Lock()


def join(
    run: str | None = None,
    *,
    cluster: str | None = None,
    min_size: int | None = None,
    max_size: int | None = None,
    size: int | None = None,
    timeout: float | None = None,
    secret: bytes | str | None = None,
    seeds: Sequence[str] | None = None,
    interfaces: str | None = None,
    lanes: str | None = None,
    streams: int | str | None = None,
    op_timeout: float | None = None,
    insecure: bool | None = None,
    on_loss: str | None = None,
    patience: float | None = None,
    quorum: str | None = None,
    tie_breaker: str | None = None,
    new: bool | None = None,
) -> Group:
    """Return the group of a run in a cluster, or the one that a launcher's environment describes.

    With a `run` (or under `covey run RUN`) the nodes of the cluster that join it find each other and agree on who is
    in it, and on their ranks. Without, looked for in this order: `covey run -n`; RANK and WORLD_SIZE (torchrun, or
    set by hand); mpirun; a Slurm step of several tasks; else it is a group of one. Called again for the same run while
    its group is open, returns it again.

    Args:
        run: the name of the run: nodes with the same name meet.
        cluster: the name of the cluster (COVEY_CLUSTER); default: the one this machine is in.
        min_size: how many nodes must be there (default 2).
        max_size: how many there may be.
        size: how many there must be, exactly; instead of `min_size` and `max_size`.
        timeout: seconds to wait for the others (default 60; 300 under a launcher).
        secret: the cluster's: 32 bytes, a join code or a passphrase (COVEY_SECRET_FILE, COVEY_SECRET); default: what
            `covey init` or `covey enroll` stored here.
        seeds: addresses `host:port` of nodes, for networks without multicast (COVEY_SEEDS, separated by commas).
        interfaces: which to use, like `eth*,!docker*,10.0.0.0/8` (COVEY_INTERFACES); default: all.
        lanes: `auto`, or force `shm`, `unix`, `tcp` or `secure` (COVEY_LANES).
        streams: connections per secure lane, or `auto` (COVEY_STREAMS).
        op_timeout: seconds an operation may take, unless it says otherwise (COVEY_TIMEOUT; default 30 minutes).
        insecure: let a launcher's ranks talk to other machines in clear text (COVEY_INSECURE).
        on_loss: what an operation does that loses a member: `raise`, or `continue`: it is all or nothing, and finishes
            among those who are left (COVEY_ON_LOSS).
        patience: seconds that members wait for a quorum of the others, or for them to come back, before they give up
            with QuorumLostError (COVEY_PATIENCE; default 30).
        quorum: `majority` of the last view goes on; with `any`, two halves may go on apart (COVEY_QUORUM).
        tie_breaker: which node breaks ties when half of the members are left: `here`, or the name of a node or host
            (COVEY_TIE_BREAKER); default: rank 0.
        new: give up a run of this name that this machine was in, or heard of, and that is not known to be over;
            without, this process waits for it.

    Raises:
        ConfigError: the arguments, the environment or the settings contradict themselves.
        AuthError: the secret or this node's identity is not accepted.
        ConnectError: this process can open no more files.
        DeadlineError: the others did not come; says who is here, and who was refused and why.
    """
    return join_as_asked(
        {
            "run": run,
            "cluster": cluster,
            "min_size": min_size,
            "max_size": max_size,
            "size": size,
            "timeout": timeout,
            "secret": secret,
            "seeds": seeds,
            "interfaces": interfaces,
            "lanes": lanes,
            "streams": streams,
            "op_timeout": op_timeout,
            "insecure": insecure,
            "on_loss": on_loss,
            "patience": patience,
            "quorum": quorum,
            "tie_breaker": tie_breaker,
            "new": new,
        }
    )


_OF_RUN: Final = ("run", "size", "min_size", "max_size", "timeout", "tie_breaker", "new")
_OF_GROUP: Final = ("lanes", "insecure", "interfaces", "streams", "on_loss", "patience", "quorum")
_OF_CLUSTER: Final = ("cluster", "secret", "seeds")


@explained("this process cannot join")
def join_as_asked(asked: Mapping[str, Any], *, is_elastic: bool = False, is_newcomer: bool = False) -> Group:
    """Join with these arguments of `join`; who `is_elastic` waits outside of a run that goes on as long as it does.

    Who is a newcomer knows that it does.
    """
    if unknown := asked.keys() - {*_OF_RUN, *_OF_GROUP, *_OF_CLUSTER, "op_timeout"}:
        raise TypeError(f"join has no argument {min(unknown)!r}")
    tracebacks.install()
    _take_secret()
    settings = {name: asked.get(name) for name in _OF_GROUP}
    config = group_config(os.environ, timeout=asked.get("op_timeout"), **settings)
    wanted = find_run(os.environ, {name: asked.get(name) for name in _OF_RUN})
    timeout = asked.get("timeout")
    place = None if wanted is not None else find_place(os.environ)
    if place is not None and is_newcomer:
        place = replace(place, is_restarted=True)
    cluster, secret, seeds = (asked.get(name) for name in _OF_CLUSTER)
    credentials = ClusterOptions(cluster, secret, tuple(seeds) if seeds is not None else None)
    request = (config, wanted, place, credentials)
    global _joined
    wait = wanted.timeout if wanted is not None else launcher_wait(os.environ, timeout)
    if not _joining.acquire(timeout=wait):
        raise DeadlineError(f"the timeout of {wait:g} s ended while another thread was joining a group")
    try:
        if _joined is None or engine_of(_joined[1]).is_over:
            if place is not None:
                group = join_at(place, config, timeout=timeout, options=credentials, is_elastic=is_elastic)
            else:
                assert wanted is not None
                from covey.runtime.joining.cluster_join import join_run  # brings in all that clusters need

                is_returning = is_newcomer or restarts(os.environ) > 0
                group = join_run(wanted, config, credentials, is_elastic=is_elastic, is_returning=is_returning)
            _joined = request, group
        elif _joined[0] != request:
            raise ConfigError("a group is open with other settings; close it before you join with new ones")
        return _joined[1]
    except KeyboardInterrupt as interrupt:
        tracebacks.name_wait(interrupt, f"run {wanted.name!r}" if wanted is not None else "the other ranks")
        raise
    finally:
        _joining.release()


def _take_secret() -> None:
    """Keep the cluster's secret from what this process starts, whatever kind of group it joins."""
    if "COVEY_SECRET" in os.environ:
        from covey.net.keys import clusters

        clusters.take_secret(os.environ)


def joined() -> Group | None:
    """Return the group that `join` returned last, while it is open."""
    joined = _joined
    return joined[1] if joined is not None and not engine_of(joined[1]).is_over else None


def join_as(place: Place, *, on_loss: str | None = None) -> Group:
    """Return the group of the run in which this process has `place`; `join` returns it from now on, too."""
    global _joined
    _take_secret()
    with _joining:
        config = group_config(os.environ, on_loss=on_loss)
        group = join_at(place, config)
        _joined = (config, None, find_place(os.environ), ClusterOptions()), group
        return group


def replace_joined(old: Group, new: Group) -> None:
    """Have `join` return the group of the next generation from now on, if it returned that of the last."""
    global _joined
    with _joining:
        if _joined is not None and _joined[1] is old:
            _joined = _joined[0], new


def join_at(
    place: Place,
    config: GroupConfig | None = None,
    *,
    timeout: float | None = None,
    options: ClusterOptions | None = None,
    is_elastic: bool = False,
) -> Group:
    """Return the group of the run in which this process has `place`."""
    tracebacks.install()
    config = config if config is not None else group_config(os.environ)
    wait = launcher_wait(os.environ, timeout)
    if config.lanes == "shm" and not shm.usable():
        raise ConfigError("lanes='shm' needs Linux on x86-64; use unix or auto")
    if config.on_loss == "continue" and place.size > MAX_MEMBERS:
        raise ConfigError(f"on_loss='continue' is for runs of up to {MAX_MEMBERS} ranks, and this one has {place.size}")
    if place.size == 1:
        return Group(Engine(None, 0, (0,), place.name, config), local_rank=place.local_rank)
    from covey.runtime.members.node import Node

    endpoint = _open_endpoint(place, config, options or ClusterOptions())
    if place.is_restarted:
        return _join_late(place, config, endpoint, YEAR_SECONDS if is_elastic else wait)
    try:
        node = Node(
            rank=place.rank,
            size=place.size,
            run=place.name,
            config=config,
            credentials=endpoint.credentials,
            card=endpoint.card,
            acceptor=endpoint.acceptor,
            audit=endpoint.audit,
            contacts=endpoint.contacts,
            objection=endpoint.objection,
            keeper=place.keeper,
            on_close=endpoint.on_close,
        )
    except BaseException:
        endpoint.leave()
        raise
    node.form(wait)
    return group_of(node, place.local_rank)


def _join_late(place: Place, config: GroupConfig, endpoint: Endpoint, wait: float) -> Group:
    """Return the group of the next generation of a run that goes on."""
    from covey.runtime import loop as control
    from covey.runtime.joining.newcomer import Newcomer
    from covey.runtime.members.node import Node

    async def wait_for_a_seat() -> Node:
        newcomer = Newcomer(place, config, endpoint)
        try:
            return await newcomer.become_a_node(wait)
        except BaseException:
            await newcomer.close()
            raise

    node = control.make(wait_for_a_seat(), discard=Node.close, otherwise=endpoint.leave)
    try:
        control.start(node.generation_table.await_keeper()).result()
    except BaseException:
        node.close()
        raise
    return group_of(node, place.local_rank)


def _open_endpoint(place: Place, config: GroupConfig, options: ClusterOptions) -> Endpoint:
    from covey.runtime.mesh import endpoint as endpoint

    if place.folder:
        return endpoint.folder_seat(place, config)
    if config.insecure:
        return endpoint.insecure_seat(place)
    assert place.master is not None
    try:
        cluster = options.find(os.environ)
    except ConfigError as error:
        raise ConfigError(
            f"the ranks of {place.name} are on several hosts ({place.master[0]}), and covey does not talk beyond this "
            f"machine in clear text: {error}. On a network you trust, insecure=True, --insecure or COVEY_INSECURE=1 "
            "allows it."
        ) from error
    return endpoint.launched_seat(place, config, cluster)


def group_of(node: Node, local_rank: int, *, is_fresh: bool = True) -> Group:
    """Return the group of all ranks of a node's generation; closing it closes the node."""
    generation = node.generation
    members = generation.seats if generation is not None else tuple(range(node.size))
    number = generation.number if generation is not None else 0
    engine = Engine(node, number, members, node.run, node.config, generation=generation)

    def leave(is_finished: bool) -> None:
        # The other members must take this neither for a crash nor for the wish that the group ends; and if all of them
        # leave, the machines of a cluster have to know that the run is over.
        is_agreed = node.config.on_loss == "continue" or node.generation_table.is_durable
        if is_agreed and node.generation is generation and generation is not None:
            generation.leave(LEAVE_SECONDS, is_finished=is_finished and not node.rival)

    def on_close() -> None:
        for member in node.groups:
            member.close()  # groups that were split off cannot outlive the run
        node.close()
        atexit.unregister(group.close)

    group = Group(engine, local_rank=local_rank, before_close=leave, on_close=on_close, is_fresh=is_fresh)
    atexit.register(group.close)
    return group


def _renew_lock_in_child() -> None:
    global _joining
    _joining = threading.Lock()  # another thread of the parent may have held it


os.register_at_fork(after_in_child=_renew_lock_in_child)
