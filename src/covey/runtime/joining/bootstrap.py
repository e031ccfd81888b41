"""`covey.join`: from the arguments and the environment of a process to the group of its run.

A process has one joined group at a time; `join` returns it again while it is open. SIGUSR1 writes the last operations
of the process to a file, and SIGUSR2 requests a checkpoint of its run.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` takes ten times as long: it turns numbers into enums
import atexit
import os
import sys
import threading
from typing import TYPE_CHECKING, Final, Protocol, Unpack

from covey.base.config import YEAR_SECONDS, GroupConfig, group_config
from covey.base.errors import ConfigError, DeadlineError
from covey.base.numbers import MAX_MEMBERS, Seat
from covey.net.host.descriptors import explained
from covey.net.host.settings_files import effective_environment
from covey.runtime import loop as control
from covey.runtime import shutdown, tracebacks
from covey.runtime.collectives.engine import Engine
from covey.runtime.environment import ClusterOptions, LaunchedRank, find_launched_rank, launcher_wait
from covey.runtime.group.group import Group
from covey.runtime.group.internals import engine_of
from covey.runtime.joining.request import JoinArguments, JoinRequest, JoinTarget, takes_join_arguments
from covey.runtime.joining.torch_env import export_rank
from covey.runtime.lanes.opener import check_demanded
from covey.runtime.signals import handle
from covey.runtime.work import off_loop

if TYPE_CHECKING:
    from covey.base.errors import CoveyError
    from covey.runtime.calls.functions import FunctionRegistry
    from covey.runtime.joining.node import NodeParts
    from covey.runtime.own_output import OwnOutput
    from covey.runtime.peers.endpoint import Endpoint

FOUND_SECONDS: Final = 30.0
"""How long the control loop may take to begin a generation."""
NODE_LEAVE_SECONDS: Final = 2.0
"""How long the other members may take to agree that this node leaves, when its group is closed."""


class RankSource(Protocol):
    """What gives the processes of a launcher their ranks when they join, and not when they start."""

    def join(self, target: JoinTarget) -> Group:
        """Return the group in which this process has a rank now; the one before it, if there was one, is over."""


_joined: tuple[JoinTarget, Group] | None = None
"""The last target that was joined, and its group."""
_joining = threading.Lock()
_source: RankSource | None = None
"""What gives this process its ranks, if it is a worker of a coordinator."""


@takes_join_arguments()
def join(run: str | None = None, **arguments: Unpack[JoinArguments]) -> Group:
    """Return the group of a run: of a run in a cluster, or of the run that a launcher started.

    With a `run` (or under `covey run RUN`), the nodes of the cluster that join it find each other and agree on the
    members and their ranks. Without, the variables of a launcher decide, in this order: `covey worker`; `covey run
    -n`; RANK and WORLD_SIZE (torchrun, or set by hand); mpirun; a Slurm step of several tasks. Without a launcher, it
    is a group of one. `rank`, `size` and `address`, or `peers`, take the place of a launcher. A second call for the
    same run returns the same group while it is open.

    Args:
        run: the name of the run; nodes that give the same name are in it together.
        arguments: settings by name, and the place of this process (`rank`, `size`, `address`, `peers`, `new`); each is
            explained by `help(covey.join)`, and the settings by docs/reference/settings.md.

    A setting that is not given here comes from its COVEY_ variable, else from `covey.toml` in the working folder, else
    from `covey.toml` in the configuration folder.

    Raises:
        ConfigError: the arguments, the environment or the settings contradict themselves.
        AuthError: the secret or this node's identity is not accepted.
        ConnectError: this process can open no more files.
        DeadlineError: too few nodes came; lists the nodes that are here, and those that were refused and why.
    """
    return join_with(JoinRequest.of({"run": run, **arguments}))


@takes_join_arguments()
async def join_async(run: str | None = None, **arguments: Unpack[JoinArguments]) -> Group:
    """Return what `join` returns for the same arguments, without blocking the event loop.

    Use the group in `async with`, which closes it without blocking: `async with await covey.join_async() as group:`. A
    group that is joined after the await was cancelled is closed again.

    Args:
        run: the name of the run.
        arguments: as for `join`.
    """
    return await off_loop(join, run, discard=Group.close, **arguments)


@explained("this process cannot join")
def join_with(request: JoinRequest) -> Group:
    """Return the group that a request asks for; the open one, if it came of an equal request."""
    tracebacks.install()
    handle_user_signals()
    _take_secret()
    target = request.resolve(effective_environment())
    global _joined
    if not _joining.acquire(timeout=target.wait):
        raise DeadlineError(f"the timeout of {target.wait:g} s ended while another thread was joining a group")
    try:
        if _joined is None or engine_of(_joined[1]).is_over:
            kept = _keep_output(target) if "COVEY_KEEP_OUTPUT" in os.environ else None
            if target.launched is not None:
                _joined = target, _join_launched(target.launched, target)
            elif target.worker:
                _joined = target, _worker_ranks(target.worker).join(target)
            else:
                from covey.runtime.joining.cluster_join import join_run  # imports all that clusters need

                _joined = target, join_run(target)
            export_rank(_joined[1])
            if kept is not None:
                kept.told_rank(_joined[1].rank)
        elif _joined[0] != target:
            raise ConfigError("a group is open with other settings; close it before you join with new ones")
        return _joined[1]
    except KeyboardInterrupt as interrupt:
        tracebacks.name_wait(interrupt, f"run {target.run.name!r}" if target.run is not None else "the other ranks")
        raise
    finally:
        _joining.release()


def _keep_output(target: JoinTarget) -> OwnOutput | None:
    """Keep what this process prints, if its user asks for it and no keeper does it."""
    from covey.runtime.own_output import keep_own_output

    run = target.run
    name = run.name if run is not None else os.path.basename(sys.argv[0]).removesuffix(".py") or "python"
    return keep_own_output(name, "" if run is None else target.options.find(effective_environment()).name)


def _take_secret() -> None:
    """Take the cluster's secret out of the environment, so that programs which this process starts do not get it."""
    if "COVEY_SECRET" in os.environ:
        from covey.net.keys import secret_sources

        secret_sources.take_secret(os.environ)


def _worker_ranks(worker: str) -> RankSource:
    """Return what gives this process its ranks, which is a worker of a coordinator."""
    if _source is None:
        raise ConfigError(
            f"only the process that `covey worker` started can join as worker {worker!r}, not a program "
            "that it starts in turn; start that one with `covey worker`, too"
        )
    return _source


def take_ranks_from(source: RankSource) -> None:
    """Have `join` get the ranks of this process from `source`, where the environment says that it is a worker."""
    global _source
    _source = source


def joined() -> Group | None:
    """Return the group that `join` returned last, if it is open."""
    joined = _joined
    return joined[1] if joined is not None and not engine_of(joined[1]).is_over else None


def join_as(launched: LaunchedRank, *, on_loss: str | None = None) -> Group:
    """Return the group of a launched rank; `join` returns it from now on, too."""
    global _joined
    _take_secret()
    with _joining:
        env = effective_environment()
        config = group_config(env, on_loss=on_loss)
        group = join_at(launched, config)
        wait = launcher_wait(env, None)
        _joined = JoinTarget(config=config, launched=find_launched_rank(os.environ), wait=wait), group
        return group


def replace_joined(old: Group, new: Group) -> None:
    """Have `join` return `new`, the group of the next generation, if it returned `old`."""
    global _joined
    with _joining:
        if _joined is not None and _joined[1] is old:
            _joined = _joined[0], new


def join_at(
    launched: LaunchedRank,
    config: GroupConfig | None = None,
    *,
    timeout: float | None = None,
    options: ClusterOptions | None = None,
    functions: FunctionRegistry | None = None,
) -> Group:
    """Return the group of a launched rank.

    Other nodes may call `functions`, which this process has registered in an earlier group.
    """
    tracebacks.install()
    handle_user_signals()
    env = effective_environment()
    target = JoinTarget(
        config=config if config is not None else group_config(env),
        launched=launched,
        options=options or ClusterOptions(),
        wait=launcher_wait(env, timeout),
        functions=functions,
    )
    return _join_launched(launched, target)


def _join_launched(launched: LaunchedRank, target: JoinTarget) -> Group:
    config = target.config
    check_demanded(config)
    if config.on_loss == "continue" and launched.size > MAX_MEMBERS:
        raise ConfigError(
            f"on_loss='continue' is for runs of up to {MAX_MEMBERS} ranks, and this one has {launched.size}"
        )
    if launched.size == 1:
        group = Group(Engine(None, 0, (Seat(0),), launched.name, config), None, local_rank=launched.local_rank or 0)
        for name, known in ({} if target.functions is None else target.functions.by_name).items():
            group.node.register(name, known.function)
        return group
    from covey.runtime.joining.launched_links import launched_node
    from covey.runtime.peers.peer_table import ranks_of

    endpoint = _open_endpoint(launched, config, target.options)
    if launched.is_restarted:
        return _join_late(launched, target, endpoint)
    try:
        peers = ranks_of(launched.size, launched.rank, endpoint.contacts)
        node, links = launched_node(launched, config, endpoint, peers)
    except BaseException:
        endpoint.leave()
        raise
    control.make(links.form(within=target.wait), discard=lambda _: node.close(), otherwise=node.close)
    local_rank = local_rank_of(node) if launched.local_rank is None else launched.local_rank
    return group_of(node, local_rank, functions=target.functions)


def _join_late(launched: LaunchedRank, target: JoinTarget, endpoint: Endpoint) -> Group:
    """Return the group of the next generation of a running run, once it has a seat for this process."""
    from covey.runtime.joining.newcomer import Newcomer
    from covey.runtime.joining.node import NodeParts

    async def wait_for_a_seat() -> NodeParts:
        newcomer = Newcomer(launched, target.config, endpoint)
        try:
            return await newcomer.become_a_node(YEAR_SECONDS if target.is_elastic else target.wait)
        except BaseException:
            await newcomer.close()
            raise

    node = control.make(wait_for_a_seat(), discard=NodeParts.close, otherwise=endpoint.leave)
    try:
        control.start(node.views.await_keeper()).result()
    except BaseException:
        node.close()
        raise
    local_rank = local_rank_of(node) if launched.local_rank is None else launched.local_rank
    return group_of(node, local_rank, functions=target.functions)


def _open_endpoint(launched: LaunchedRank, config: GroupConfig, options: ClusterOptions) -> Endpoint:
    from covey.runtime.peers import launched_endpoint

    if launched.folder:
        return launched_endpoint.in_folder(launched, config)
    if config.insecure:
        return launched_endpoint.insecure(launched, config)
    try:
        cluster = options.find(effective_environment())
    except ConfigError as error:
        raise ConfigError(
            f"the ranks of {launched.name} are on several hosts ({launched.addresses[0][0]}), and covey does not talk "
            f"beyond this machine in clear text: {error}. On a network you trust, insecure=True, --insecure or "
            "COVEY_INSECURE=1 allows it."
        ) from error
    return launched_endpoint.in_cluster(launched, config, cluster)


def local_rank_of(node: NodeParts) -> int:
    """Return the number of this node among the run's nodes on its host."""
    return sum(peer.seat < node.seat for peer in node.peers.here)


def group_of(
    node: NodeParts, local_rank: int, *, is_fresh: bool = True, functions: FunctionRegistry | None = None
) -> Group:
    """Return the group of all ranks of a node's generation; closing it closes the node.

    `functions` are those that other nodes may call from now on, if the process was in the run before.
    """
    generation = node.generation
    members = generation.seats if generation is not None else tuple(map(Seat, range(node.size)))
    number = generation.number if generation is not None else 0
    engine = Engine(node, number, members, node.run, node.config, generation=generation)
    node.checkpoints.follow(engine)
    node.await_calls(functions)

    def leave(is_finished: bool) -> None:
        if is_finished:
            for member in node.groups:
                member.confirm()
        if node.calls is not None:
            node.calls.deliver_answers()
        # Agreed with the other members, so that they take it neither for a crash nor for the end of the group; and
        # when all have left, the machines of a cluster know that the run is over.
        is_agreed = node.config.on_loss == "continue" or node.generation_table.is_durable
        if is_agreed and node.generation is generation and generation is not None:
            generation.leave(NODE_LEAVE_SECONDS, is_finished=is_finished and not node.views.wishes.rival)

    def on_close() -> CoveyError | None:
        errors = [member.close() for member in node.groups]  # groups that were split off end with the run
        node.close()
        atexit.unregister(group.close)
        return next((error for error in errors if error is not None), None)

    run = node.run if node.cluster else ""
    group = Group(
        *(engine, node),
        local_rank=local_rank,
        before_close=leave,
        on_close=on_close,
        is_fresh=is_fresh,
        cluster_run=run,
    )
    atexit.register(group.close)
    shutdown.arm()
    return group


def handle_user_signals() -> None:
    """Act on SIGUSR1 and SIGUSR2, unless the program handles them itself."""
    handle(_signal.SIGUSR1, _write_operations)
    handle(_signal.SIGUSR2, _request_checkpoints)


# The thread that was interrupted may hold any lock, so the control loop does the rest.


def _write_operations(_signum: int, _frame: object) -> None:
    control.soon(_start_writing)


def _start_writing() -> None:
    from covey.runtime.metrics.flight import write_all  # most processes never get the signal

    threading.Thread(target=write_all, name="covey-trace", daemon=True).start()


def _request_checkpoints(_signum: int, _frame: object) -> None:
    control.soon(_request_all)


def _request_all() -> None:
    from covey.runtime.state.checkpoints import request_all

    request_all()


def _renew_lock_in_child() -> None:
    global _joining
    _joining = threading.Lock()  # another thread of the parent may have held it


os.register_at_fork(after_in_child=_renew_lock_in_child)
