"""`Group`, the object with which a program works on arrays together with other ranks.

A group is a facade: its parts have one subject each, and carry the operations out. `offered` puts an operation of a
part into the class, with its signature and documentation, and `Group.__init__` binds it to the part: a call of the
group is a call of the part, without a frame between.
"""

from __future__ import annotations

import functools
import threading
import types
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, Self, TypeVar, cast, overload

import numpy as np

from covey.base.config import check_timeout
from covey.base.errors import CoveyError
from covey.base.numbers import PRIORITIES
from covey.base.setting_kinds import check_priority
from covey.runtime import loop as control
from covey.runtime.buffers import readable
from covey.runtime.fault import Fault, describe, ending_error, is_failure
from covey.runtime.group import movements
from covey.runtime.group.checkpoint_store import CheckpointRequests, CheckpointStore
from covey.runtime.group.gradients import Gradients
from covey.runtime.group.introspection import Introspection, Reports
from covey.runtime.group.issuer import Issuer, whole_number
from covey.runtime.group.messages import Messages
from covey.runtime.group.moves import Moves
from covey.runtime.group.object_moves import ObjectMoves
from covey.runtime.group.reductions import Reductions
from covey.runtime.group.survival import Survival
from covey.runtime.report_log import log_of
from covey.runtime.shutdown import raise_or_exit
from covey.runtime.work import off_loop

if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping
    from contextlib import AbstractContextManager
    from types import TracebackType

    from covey.base.numbers import Priority
    from covey.base.settings import GroupConfig, OnLoss
    from covey.compress.feedback import ErrorFeedback
    from covey.proto.checkpointing import Checkpoint
    from covey.runtime.calls.serve import AwaitedCalls
    from covey.runtime.calls.service import CallService
    from covey.runtime.collectives.attempt import Attempt
    from covey.runtime.collectives.engine import Engine
    from covey.runtime.group.issuer import Compression
    from covey.runtime.group.members import Member
    from covey.runtime.group.node import Node
    from covey.runtime.group.restore import RestoreReport
    from covey.runtime.report_log import ReportLog
    from covey.runtime.state.checkpoints import Checkpoints
    from covey.runtime.state.store import Stores

    Array = np.ndarray[Any, np.dtype[Any]]

PartT = TypeVar("PartT")

RANK_LEAVE_SECONDS: Final = 5.0
"""How long the other ranks may take to agree that a rank leaves."""


class GroupHome(Protocol):
    """What groups use of the run of their process, beside what their operations need (`joining.node`)."""

    stores: Stores
    checkpoints: Checkpoints
    reports: ReportLog
    calls: AwaitedCalls | None

    def fail(self, reason: str) -> None:
        """Tell all other processes with which error the program ends. Returns at once; on any thread."""

    def tell_keeper_of_survival(self) -> None:
        """Tell the keeper that the program goes on although its groups end. Returns at once; on any thread."""


class OfferedOperations:
    """The operations of a part, as methods of groups; see `offered`."""

    def __init__(self, part: type[Any]) -> None:
        self._part = part

    def __getattr__(self, name: str) -> Callable[..., Any]:
        operation = getattr(self._part, name)

        @functools.wraps(operation)
        def method(group: Any, /, *args: Any, **named: Any) -> Any:
            return group._operations[operation](*args, **named)

        return method


def offered(part: type[PartT]) -> PartT:
    """Return what has the operations of a part as methods of groups, for `Group.name(group, ...)` and `super()`.

    A call of a group goes to the part at once; see `Group._bind`. For type checkers it is the part itself, so that a
    method of a group has all overloads of the operation.
    """
    return cast("PartT", OfferedOperations(part))


_reductions, _gradients, _moves, _objects = (
    offered(Reductions),
    offered(Gradients),
    offered(Moves),
    offered(ObjectMoves),
)
_messages, _introspection, _reports = offered(Messages), offered(Introspection), offered(Reports)
_checkpoints = offered(CheckpointRequests)


class Group:
    """An ordered set of ranks that work together. Use it in `with`, or `close` it.

    Collectives of a group run in the order in which they are issued, and every rank must issue the same ones in the
    same order. One thread at a time may issue them; for more threads, `split` more groups. Point-to-point messages have
    their own lanes and do not wait for collectives. After an exception the contents of arrays that the operation was
    changing are undefined; with `on_loss="continue"` they are what they were before.

    Every operation takes `timeout=` in seconds (default: the group's, 30 minutes) and `async_op=True`, which returns a
    `Work` at once. Arrays are numpy arrays, torch tensors, writable buffers, arrays of JAX, CuPy and MLX, and what
    `covey.register_adapter` adds. Contiguous host memory is used in place, without a copy. For arrays that cannot be
    changed the new one is returned; arrays that an operation makes live where its argument lives.

    Every operation may raise:
        MismatchError: ranks called different operations. The group is closed.
        PeerLostError: a rank was lost. The group is closed. With `on_loss="continue"` the group continues, and only
            an operation with a lost root and a message with a lost partner raise.
        GroupChangedError, QuorumLostError: with `on_loss="continue"`, the other ranks continue without this one, or
            too few ranks remain to continue.
        DeadlineError: `timeout` passed. The group is closed; if it was a message, only that message failed.
        ClosedError: the group was closed or revoked, or the failure in `__cause__` ended it. A group that ended with
            PeerLostError, GroupChangedError or QuorumLostError raises that error every time.
        BusyError: another thread is in a collective of this group.
        TypeError, ConfigError: the arguments are wrong; nothing was sent.
    """

    def __init__(
        self,
        engine: Engine,
        home: GroupHome | None,
        *,
        local_rank: int,
        before_close: Callable[[bool], None] | None = None,
        on_close: Callable[[], CoveyError | None] | None = None,
        is_fresh: bool = False,
        parent: Group | None = None,
        parent_ranks: tuple[int, ...] | None = None,
        cluster_run: str = "",
    ) -> None:
        """`home` is the run of this process; None if the process is alone.

        `close` first calls `before_close(is_finished)`, false if the program failed, and `on_close` at its end.

        `on_close` may return an error to raise. `is_fresh`: this rank joined the run with this group, so that `restore`
        does not count its state. `parent` is the group that it was split from, and `parent_ranks` its ranks there.
        `cluster_run` is the name of the run, if it is one of a cluster.
        """
        self._engine, self._home, self._local_rank, self._is_fresh = engine, home, local_rank, is_fresh
        self._before_close, self._on_close = before_close, on_close
        self._parent = parent
        self._state: MutableMapping[str, Any] | None = None
        """The state that `restore` was given last."""
        self._failure: BaseException | None = None
        """The exception that ended the `with` block, if one did."""
        self._has_told = False
        """Whether the other ranks were told of the exception that ends this program."""
        self._issuer = issuer = Issuer(engine)
        self._reductions, self._objects, self._messages = Reductions(issuer), ObjectMoves(issuer), Messages(issuer)
        self._moves, self._gradients = Moves(issuer), Gradients(issuer, self._reductions)
        serve = functools.partial(_serve, engine, home)
        self._introspection = Introspection(engine, issuer, parent_ranks, serve)
        self._survival = Survival(engine, None if home is None else home.tell_keeper_of_survival)
        checkpoints, is_alone = None if home is None else home.checkpoints, home is None and parent_ranks is None
        self._checkpoints = CheckpointRequests(engine, checkpoints, is_alone=is_alone)
        self._store = CheckpointStore(engine, cluster_run, is_split=parent_ranks is not None)
        self._operations: dict[Callable[..., Any], Callable[..., Any]] = {}
        """By operation of a part: what carries it out."""
        operations = (self._reductions, self._moves, self._objects, self._messages, self._gradients)
        self._reports = Reports(lambda: log_of(None if engine.node is None else home))
        for part in (*operations, self._introspection, self._checkpoints, self._reports):
            self._bind(part)

    def _bind(self, part: object) -> None:
        """Let this group call the operations of a part that its class offers, unless a subclass has its own."""
        for name, operation in vars(type(part)).items():
            if isinstance(operation, types.FunctionType) and not name.startswith("_"):
                bound = self._operations[operation] = getattr(part, name)
                if getattr(getattr(type(self), name, None), "__wrapped__", None) is operation:
                    self.__dict__[name] = bound

    def __repr__(self) -> str:
        return f"<Group {self.name!r}: rank {self.rank} of {self.size}>"

    def _repr_html_(self) -> str:
        from covey.runtime.group.topology import group_html  # only notebooks ask

        return group_html(self._engine, is_over=self._engine.is_over)

    # Operations that combine arrays

    all_reduce = _reductions.all_reduce
    reduce = _reductions.reduce
    reduce_scatter = _reductions.reduce_scatter
    scan = _reductions.scan
    exscan = _reductions.exscan
    sync_gradients = _gradients.sync_gradients

    @property
    def feedback(self) -> ErrorFeedback:
        """What compressed gradients of `sync_gradients` have lost so far, by name; each rank saves its own."""
        return self._gradients.feedback

    # Operations that move arrays and values

    broadcast = _moves.broadcast
    all_gather = _moves.all_gather
    gather = _moves.gather
    scatter = _moves.scatter
    all_to_all = _moves.all_to_all
    barrier = _moves.barrier
    broadcast_object = _objects.broadcast_object
    all_gather_object = _objects.all_gather_object
    gather_object = _objects.gather_object
    scatter_object = _objects.scatter_object

    # Messages

    send = _messages.send
    recv = _messages.recv
    sendrecv = _messages.sendrecv
    probe = _messages.probe
    iprobe = _messages.iprobe
    send_object = _messages.send_object
    recv_object = _messages.recv_object

    # What the group says about itself

    lanes = _introspection.lanes
    to_parent = _introspection.to_parent
    to_local = _introspection.to_local
    to_run = _introspection.to_run
    metrics = _introspection.metrics
    explain = _introspection.explain
    call = _introspection.call
    who_is_late = _introspection.who_is_late
    on_change = _introspection.on_change
    events = _introspection.events
    report = _reports.report

    @property
    def rank(self) -> int:
        """The rank of this process in the group."""
        return self._engine.rank

    @property
    def size(self) -> int:
        """The number of ranks in the group, lost ones included."""
        return self._engine.size

    @property
    def live(self) -> tuple[int, ...]:
        """The ranks that have not been lost."""
        return self._engine.live

    @property
    def generation(self) -> int:
        """The number of the run's generation that this group belongs to."""
        return 0 if self._engine.generation is None else self._engine.generation.number

    @property
    def name(self) -> str:
        """The name of this group in error messages."""
        return self._engine.name

    @property
    def on_loss(self) -> OnLoss:
        """What operations do when a rank is lost: "raise", or "continue" among the remaining ranks."""
        return self._engine.config.on_loss

    @property
    def settings(self) -> GroupConfig:
        """The settings of this group, as arguments, variables and files gave them. They cannot be changed."""
        return self._engine.config

    @property
    def parent(self) -> Group | None:
        """The group that this one was split from; None for the group of a run, and for what `shrink` returns."""
        return self._parent

    @property
    def contributors(self) -> tuple[int, ...]:
        """The ranks whose input is in the result of the last collective that returned."""
        return self._engine.contributors

    @property
    def sequence(self) -> int:
        """The number of collectives of this group that have returned on this rank."""
        return self._engine.last_returned

    @property
    def local_rank(self) -> int:
        """The number of this process among the run's processes on its host, for instance to choose a device."""
        return self._local_rank

    @property
    def members(self) -> tuple[Member, ...]:
        """The members of the group by rank, lost ones included; see `Node.members`."""
        return self.node.members

    @property
    def compression(self) -> Compression:
        """What compression has saved so far, and the codec of the last compressed operation."""
        return self._issuer.savings.total

    @property
    def node(self) -> Node:
        """This process as the other nodes know it: functions that they may call, and calls to theirs."""
        return self._introspection.node()

    def cancellable(self) -> AbstractContextManager[None]:
        """Let collectives that are issued in the `with` block be cancelled: `work.cancel()` of queued ones.

        A collective waits in the queue of its rank while earlier ones run. If a rank cancels it before its turn comes
        there, no rank performs it: `wait` raises CancelledError on all of them, arrays stay as they were, and the next
        collective follows. One that has begun on a rank that did not cancel it is cancelled all the same if another
        rank cancels it in time, since ranks vote before they move data. All ranks have to issue it in such a block,
        also with `async_op=False`. The vote takes as long as an `all_reduce` of one number.
        """
        return self._engine.cancellable()

    # Subgroups

    @overload
    def split(
        self, color: int, key: int | None = None, *, priority: Priority | None = None, timeout: float | None = None
    ) -> Group: ...

    @overload
    def split(
        self,
        color: int | None,
        key: int | None = None,
        *,
        priority: Priority | None = None,
        timeout: float | None = None,
    ) -> Group | None: ...

    def split(
        self,
        color: int | None,
        key: int | None = None,
        *,
        priority: Priority | None = None,
        timeout: float | None = None,
    ) -> Group | None:
        """Return a new group of all ranks that passed the same `color`, ordered by `key`, then by rank.

        Every rank of this group calls it; a rank that passes None gets None. The new group has its own lanes, order
        of operations and failures. Another thread may use it at the same time as this group. With a `priority` above
        that of other groups, such as "critical", its operations need not wait for theirs: issued with `async_op=True`,
        both move at the same time, and on slow lines the others leave room. Default: that of this group.
        """
        agreed = {} if priority is None else {"priority": PRIORITIES[check_priority(priority)]}
        wanted = 0 if color is None else whole_number("color", color)
        choice = np.array([color is not None, wanted, self.rank if key is None else whole_number("key", key)], np.int64)
        call = self._issuer.call("split", None, None, **agreed)
        operand = readable(choice)

        def body(attempt: Attempt) -> tuple[dict[int, Array], int]:
            gathered = movements.gather_all(attempt, operand, wanted=movements.Wanted(shape=operand.shape))
            return dict(zip(attempt.ranks, gathered, strict=True)), attempt.operation.sequence

        choices, sequence = self._engine.run(call, body, timeout=timeout, async_op=False)
        if color is None:
            return None
        engine = self._engine
        chosen = [rank for rank, choice in choices.items() if choice[0] and choice[1] == wanted]
        chosen.sort(key=lambda rank: (int(choices[rank][2]), rank))
        members = tuple(engine.members[rank] for rank in chosen)
        name = f"{self.name}/{sequence}.{wanted}"
        urgency = None if priority is None else check_priority(priority)
        made = engine.subgroup(f"{engine.id}/{sequence}/{wanted}", members, name, priority=urgency)
        return Group(made, self._home, local_rank=self._local_rank, parent=self, parent_ranks=tuple(chosen))

    def split_by_host(self, *, timeout: float | None = None) -> Group:
        """Return a new group of the ranks on this machine. Every rank of this group calls it."""
        ranks = next(ranks for ranks in self.node.hosts().values() if self.rank in ranks)
        return self.split(ranks[0], timeout=timeout)

    async def split_async(self, color: int | None, key: int | None = None, **arguments: Any) -> Any:
        """Return what `split` returns, without blocking the event loop."""
        return await off_loop(self.split, color, key, discard=_close, **arguments)

    # Losses and changes

    @property
    def change_pending(self) -> bool:
        """Whether the next generation should start: newcomers wait, members want to leave, or too few remain.

        Becomes true on all ranks after the same all_reduce or barrier, with `on_loss="continue"` after the same
        collective of any kind, so that loops that check it end together. Always false outside `covey.generations`.
        """
        return self._engine.change_pending

    def shrink(self, *, timeout: float | None = None) -> tuple[Group, int]:
        """Return a group of the remaining ranks, and the number of the last operation that returned on all of them.

        Every remaining rank calls it, usually after a PeerLostError or `revoke`; this group may have failed. Ranks are
        numbered anew, in the same order. A rank on which later operations returned should put its state back to the
        operation with that number; then all ranks have the same state.

        Raises:
            QuorumLostError: too few ranks remain.
            DeadlineError: a live rank did not call it in time.
        """
        made, number = self._survival.shrink(timeout)
        run = self._store.run
        return type(self)(made, self._home, local_rank=self._local_rank, cluster_run=run), number

    def agree(self, flag: bool, *, timeout: float | None = None) -> bool:
        """Return whether `flag` is true on all remaining ranks; all get the same answer, also in a failed group."""
        return self._survival.agree(flag, timeout)

    def revoke(self) -> None:
        """End this group and all its pending operations, on all ranks. On any thread."""
        text = f"rank {self.rank} revoked group {self.name!r}"
        self._engine.failure.declare(Fault("ClosedError", text, (self._engine.rank,)))

    def leave(self, *, timeout: float = RANK_LEAVE_SECONDS) -> None:
        """Leave the run: the other ranks agree to continue without this one, then the group is closed here."""
        generation = self._engine.generation
        if generation is not None:
            generation.leave(check_timeout(timeout))
        self.close()

    def restore(
        self,
        state: MutableMapping[str, Any],
        *,
        on_drift: Literal["repair", "raise"] = "repair",
        timeout: float | None = None,
        progress: bool | None = None,
    ) -> RestoreReport:
        """Give newcomers of this generation the state of the other ranks: named arrays, filled in place, and values.

        Every rank calls it, and no rank may change the state until it returns. A newcomer fetches from all other ranks
        at once, and only what differs. A rank whose state differs from that of the majority gets the majority's, and
        the report names it; with `on_drift="raise"` all ranks raise MismatchError instead. In the first generation
        all ranks get the state of rank 0.
        """
        self._state = state
        options: dict[str, Any] = {"fresh": self._is_fresh, "on_drift": on_drift}
        return self._survival.restore(state, **options, timeout=timeout, progress=progress)

    async def restore_async(self, state: Any, **arguments: Any) -> RestoreReport:
        """Return what `restore` returns, without blocking the event loop."""
        return await off_loop(self.restore, state, **arguments)

    # Checkpoints

    request_checkpoint = _checkpoints.request_checkpoint
    end_checkpoint = _checkpoints.end_checkpoint

    @property
    def checkpoint(self) -> CheckpointStore:
        """Saves the state of all ranks and loads it, without a folder that they share: `save`, `load`, `steps`."""
        return self._store

    @property
    def checkpoint_pending(self) -> Checkpoint | None:
        """The checkpoint that this rank is to save now, or None.

        It is set on all ranks after the same operation of this group. Operations count when they are issued: wait for
        your works before you save. `end_checkpoint` clears it. Reading it takes no time, except for the few
        milliseconds in which the ranks agree on a request.
        """
        return self._checkpoints.pending()

    # The end

    def close(self) -> None:
        """Leave the group and free its lanes, threads and descriptors. A second call does nothing.

        A rank that was the root of a `broadcast`, or only sent, may have called something else than the others, and
        not know it. If such a call is among its last ones, it first waits until the others have called theirs, for up
        to two seconds.

        Raises:
            MismatchError: the ranks called different operations, and this one was not told before. Everything is freed.
        """
        if control.is_here():  # the garbage collector runs on the control loop's thread, which must not block
            threading.Thread(target=self.close, name="covey-close", daemon=True).start()
            return
        error = self._failure if self._failure is not None else ending_error()
        if error is not None:
            self._tell_failure(error)
        if error is None:
            self._engine.confirm()
        self._store.close(is_finished=error is None)
        if self._before_close is not None:
            self._before_close(error is None)
        self._survival.close()
        self._engine.close()
        mismatch = self._engine.failure.untold_mismatch()
        if self._on_close is not None and self._engine.is_freed:  # else the thread that closes it calls this
            mismatch = self._on_close() or mismatch
        if mismatch is not None and error is None:
            raise_or_exit(mismatch)

    async def close_async(self) -> None:
        """Close the group without blocking the event loop."""
        await off_loop(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and is_failure(error):
            self._failure = error
            self._tell_failure(error)
            if self.on_loss == "raise" and not self._is_consequence(error):
                host = self._engine.roster.host_name(self._engine.rank)
                text = f"rank {self.rank}{f' ({host})' if host else ''} failed with {describe(error)}"
                self._engine.failure.declare(Fault("PeerLostError", text, (self._engine.rank,)))
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await off_loop(self.__exit__, kind, error, trace)

    def _tell_failure(self, error: BaseException) -> None:
        """Tell the other ranks which error ends this program, before its lanes end."""
        home, is_of_all = self._home, self._before_close is not None
        if home is None or self._engine.node is None or not is_of_all or self._has_told:
            return
        self._has_told = True
        if not self._is_consequence(error):
            home.fail(describe(error))
        else:
            self._engine.failure.report_loss(describe(error))

    def _is_consequence(self, error: BaseException) -> bool:
        """Tell whether an error comes from the failure of the group itself, which the other ranks know of."""
        return isinstance(error, CoveyError) and self._engine.failure.has_happened


def _serve(engine: Engine, home: GroupHome | None) -> tuple[CallService, Stores | None]:
    """Return what serves calls between nodes, and the stores of the run; a process that is alone has none."""
    from covey.runtime.calls.serve import calls_alone  # most programs make no calls

    if engine.node is None or home is None:
        return calls_alone(engine.config, engine.name), None
    assert home.calls is not None
    return home.calls.service(), home.stores


def _close(made: Group | None) -> None:
    if made is not None:
        made.close()
