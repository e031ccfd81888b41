"""What covey's own packages need of a `Group` besides its public methods.

`Group` is public, and all of its public names are promised to users. The functions here are not: use them in
`runtime.joining`, `torch`, `cli` and tests instead of a group's private attributes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from covey.runtime.tracebacks import is_debugging

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    from covey.base.numbers import Rank, Seat
    from covey.compress.policy import Policy
    from covey.runtime.calls.functions import FunctionRegistry
    from covey.runtime.collectives.engine import Engine
    from covey.runtime.group.group import Group
    from covey.runtime.group.issuer import Issuer
    from covey.runtime.members.node import Node
    from covey.runtime.peers.remote_process import RemoteProcess


def engine_of(group: Issuer) -> Engine:
    """Return the engine that runs a group's operations."""
    return group._engine


def node_of(group: Issuer) -> Node | None:
    """Return the node through which a group talks to its run; None for a group of one."""
    return group._engine.node


def peers_of(group: Issuer) -> list[RemoteProcess]:
    """Return the peers that are the other ranks of a group, in the order of their ranks."""
    return group._engine.roster.peers()


def seat_of(group: Issuer, rank: Rank) -> Seat:
    """Return the position in the run of a rank of a group."""
    return group._engine.members[rank]


def policy_of(group: Issuer) -> Policy | None:
    """Return what a group compresses of gradients, unless a call says something else; None if nothing."""
    return group._policy


def steps_between_checks(group: Issuer) -> int:
    """Return every how many steps this rank compares its parameters with those of the other ranks; 0 for never."""
    return group._engine.config.check_every or int(is_debugging())


def functions_of(group: Group) -> FunctionRegistry | None:
    """Return the functions that this process lets other nodes call, if it has registered some; also after `close`."""
    if group._engine.node is None:
        return None if group._node is None else group._node._service.functions
    from covey.runtime.calls.serve import registered_functions

    return registered_functions(group._engine.node)


def restored_state(group: Group) -> MutableMapping[str, Any] | None:
    """Return the state that `Group.restore` was given last, if it was called."""
    return group._state


def checkpoint_state(group: Group, checkpoint_id: str) -> tuple[str, str]:
    """Return whether a checkpoint is `requested`, `pending` or `over`, or "" if unknown; and why it failed, if it did.

    On any thread but that of the control loop.
    """
    from covey.runtime import loop as control

    checkpoints = group._checkpoints()

    async def look() -> tuple[str, str]:
        told = checkpoints.progress(checkpoint_id)
        return told.state, told.text

    return control.run(look(), control.LOOP_SECONDS)


def is_newcomer(group: Group) -> bool:
    """Tell whether this process joined the run with this generation, so that its state does not count."""
    return group._is_fresh
