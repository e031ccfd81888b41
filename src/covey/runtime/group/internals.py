"""What covey's own packages need of a `Group` besides its public methods.

`Group` is public, and all of its public names are promised to users. The functions here are not: use them in
`runtime.joining`, `torch`, `cli` and tests instead of a group's private attributes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from covey.base.errors import RemoteProtocolError
from covey.runtime.tracebacks import is_debugging

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

    from covey.base.numbers import Rank, Seat
    from covey.compress.policy import Policy
    from covey.runtime.calls.functions import FunctionRegistry
    from covey.runtime.collectives.engine import Engine
    from covey.runtime.group.gradients import Gradients
    from covey.runtime.group.group import Group, GroupHome
    from covey.runtime.group.issuer import Issuer
    from covey.runtime.group.restore import RestoreReport
    from covey.runtime.peers.remote_process import RemoteProcess
    from covey.runtime.state.store import StoreClient


OPEN_SECONDS: Final = 60.0
"""How long it may take to make a store; it takes far less, unless a machine is suspended."""


def engine_of(group: Group) -> Engine:
    """Return the engine that runs a group's operations."""
    return group._engine


def issuer_of(group: Group) -> Issuer:
    """Return what issues a group's operations."""
    return group._issuer


def gradients_of(group: Group) -> Gradients:
    """Return what combines a group's gradients."""
    return group._gradients


def restore_as(group: Group, state: MutableMapping[str, Any], *, fresh: bool) -> RestoreReport:
    """Do what `Group.restore` does; `fresh` if the state of this rank does not count."""
    return group._survival.restore(state, fresh=fresh)


def home_of(group: Group) -> GroupHome | None:
    """Return what groups share with their run; None for a group of one, and in a process that was forked."""
    return None if group._engine.node is None else group._home


def peers_of(group: Group) -> list[RemoteProcess]:
    """Return the peers that are the other ranks of a group, in the order of their ranks."""
    return group._engine.roster.peers()


def seat_of(group: Group, rank: Rank) -> Seat:
    """Return the position in the run of a rank of a group."""
    return group._engine.members[rank]


def policy_of(group: Group) -> Policy | None:
    """Return what a group compresses of gradients, unless a call says something else; None if nothing."""
    return group._issuer.policy


def steps_between_checks(group: Group) -> int:
    """Return every how many steps this rank compares its parameters with those of the other ranks; 0 for never."""
    return group._engine.config.check_every or int(is_debugging())


def functions_of(group: Group) -> FunctionRegistry | None:
    """Return the functions that this process lets other nodes call, if it has registered some; also after `close`."""
    if (home := home_of(group)) is None:
        known = group._introspection.known_node
        return None if known is None else known._service.functions
    return None if home.calls is None else home.calls.functions


def restored_state(group: Group) -> MutableMapping[str, Any] | None:
    """Return the state that `Group.restore` was given last, if it was called."""
    return group._state


def checkpoint_state(group: Group, checkpoint_id: str) -> tuple[str, str]:
    """Return whether a checkpoint is `requested`, `pending` or `over`, or "" if unknown; and why it failed, if it did.

    On any thread but that of the control loop.
    """
    from covey.runtime import loop as control

    checkpoints = group._checkpoints.of_run()

    async def look() -> tuple[str, str]:
        told = checkpoints.progress(checkpoint_id)
        return told.state, told.text

    return control.run(look(), control.LOOP_SECONDS)


def is_newcomer(group: Group) -> bool:
    """Tell whether this process joined the run with this generation, so that its state does not count."""
    return group._is_fresh


def is_leaving(group: Group) -> bool:
    """Tell whether this process was asked to leave the run at the end of this generation."""
    node = group._engine.roster.node
    return node is not None and node.is_leaving


def open_group_store(group: Group, timeout: float | None = None) -> StoreClient:
    """Make a store, and return this rank's client of it. Every rank of the group calls this."""
    import secrets  # slow to load: it loads OpenSSL

    from covey.runtime.state.store import StoreClient, Stores  # most programs need no further store
    from covey.wire import store as wire

    home = home_of(group)
    number = secrets.randbits(61) + 1
    if home is None:
        client = StoreClient(Stores(bytes_limit=engine_of(group).facts.config.store_bytes), number)
        client.ask(wire.Open(), OPEN_SECONDS)
        return client
    if group.rank == 0:
        StoreClient(home.stores, number).ask(wire.Open(), OPEN_SECONDS if timeout is None else timeout)
    number = group.broadcast_object(number, type=int, timeout=timeout)
    if not 0 <= number < 1 << 62:
        raise RemoteProtocolError(f"rank 0 sent the store number {number}, which is not within 62 bits")
    return StoreClient(home.stores, number)


def report_for_program(group: Group, step: int | None, values: Mapping[str, Any]) -> None:
    """Report for a program that uses a library; nothing is kept once the program reports itself, and nothing raises."""
    group._reports.log.add_for_program(step, values)


def tell_of_training(group: Group, text: str) -> None:
    """Tell the run, in an event, how fast a training is, and what would be faster."""
    import time

    from covey.runtime.events import REPORT, Event  # loaded with the node

    if (node := group._engine.roster.node) is not None:
        node.events.add(Event(REPORT, time.time(), group.generation, 0, text=text))
