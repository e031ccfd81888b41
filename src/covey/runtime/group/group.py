"""`Group`, the object with which a program works on arrays together with other ranks."""

from __future__ import annotations

import functools
import itertools
import threading
from typing import TYPE_CHECKING, Any, Final, Self, overload

import numpy as np

from covey.base.config import check_timeout
from covey.base.errors import CoveyError
from covey.runtime import loop as control
from covey.runtime.buffers import readable
from covey.runtime.fault import Fault
from covey.runtime.group import gradients, movements, survival
from covey.runtime.group.asynchronous import AsyncForms
from covey.runtime.group.checkpoints import CheckpointForms
from covey.runtime.group.describing import Description
from covey.runtime.group.failing import describe, ending_error, is_failure
from covey.runtime.group.issuer import whole_number
from covey.runtime.group.messaging import Messages
from covey.runtime.group.moving import Moves
from covey.runtime.group.object_moving import ObjectMoves
from covey.runtime.group.reductions import Reductions
from covey.runtime.shutdown import raise_or_exit

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, MutableMapping
    from types import TracebackType

    from covey.compress.feedback import ErrorFeedback
    from covey.compress.policy import CompressValue
    from covey.runtime.collectives.attempt import Attempt
    from covey.runtime.collectives.engine import Engine
    from covey.runtime.group.node import Node
    from covey.runtime.group.restore import RestoreReport
    from covey.runtime.group.survival import Assembly

    Array = np.ndarray[Any, np.dtype[Any]]

LEAVE_SECONDS: Final = 5.0
"""How long the other ranks may take to agree that a rank leaves."""


class Group(Description, Reductions, Moves, ObjectMoves, Messages, AsyncForms, CheckpointForms):
    """An ordered set of ranks that work together. Use it in `with`, or `close` it.

    Collectives of a group run in the order in which they are issued, and every rank must issue the same ones in the
    same order. One thread at a time may issue them; for more threads, `split` more groups. Point-to-point messages have
    their own lanes and do not wait for collectives. After an exception the contents of arrays that the operation was
    changing are undefined; with `on_loss="continue"` they are what they were before.

    Every operation takes `timeout=` in seconds (default: the group's, 30 minutes) and `async_op=True`, which returns a
    `Work` at once. Arrays are numpy arrays, torch CPU tensors, or writable buffers. Contiguous ones are used in place,
    without a copy.

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
        *,
        local_rank: int,
        before_close: Callable[[bool], None] | None = None,
        on_close: Callable[[], CoveyError | None] | None = None,
        is_fresh: bool = False,
        parent_ranks: tuple[int, ...] | None = None,
    ) -> None:
        """`close` first calls `before_close(is_finished)`, false if the program failed, and `on_close` at its end.

        `on_close` may return an error to raise. `is_fresh`: this rank joined the run with this group, so that `restore`
        does not count its state. `parent_ranks` are the ranks in the group that it was split from.
        """
        super().__init__(engine)
        self._local_rank, self._parent_ranks = local_rank, parent_ranks
        self._before_close, self._on_close = before_close, on_close
        self._is_fresh = is_fresh
        self._sidecar: Assembly | None = None
        self._restores = 0
        self._state: MutableMapping[str, Any] | None = None
        """The state that `restore` was given last."""
        self._failure: BaseException | None = None
        """The exception that ended the `with` block, if one did."""
        self._has_told = False
        """Whether the other ranks were told of the exception that ends this program."""
        self._children = itertools.count(1)
        self._node: Node | None = None

    # Gradients and subgroups

    def sync_gradients(
        self,
        grads: Mapping[str, Any],
        op: str = "mean",
        *,
        bucket_bytes: int | None = None,
        compress: CompressValue = None,
        feedback: ErrorFeedback | bool = True,
        timeout: float | None = None,
    ) -> None:
        """Combine named arrays of all ranks in place, packed into buckets of up to `bucket_bytes` (a setting).

        `compress` sends fewer bytes: a codec like "int8", or a mapping of patterns of names to codecs; default: what
        the group was joined with. What a step loses is added to the next one of the same name, by `group.feedback`,
        by a `feedback` of your own, or not at all with False.

        Raises:
            MismatchError: ranks passed different names, shapes or dtypes; the message says the first difference.
        """
        policy = self._policy
        if compress is not None:
            from covey.compress.policy import make_policy  # slow to load, and most programs do not need it

            policy = make_policy(compress)
        own = self.feedback if feedback is True else feedback or None
        limit = self._engine.config.bucket_bytes if bucket_bytes is None else bucket_bytes
        gradients.sync(self, grads, op, limit, policy, None if policy is None else own, timeout)

    @functools.cached_property
    def feedback(self) -> ErrorFeedback:
        """What compressed gradients of `sync_gradients` have lost so far, by name; each rank saves its own."""
        from covey.compress.feedback import ErrorFeedback  # slow to load, and most programs do not need it

        return ErrorFeedback()

    @overload
    def split(self, color: int, key: int | None = None, *, timeout: float | None = None) -> Group: ...

    @overload
    def split(self, color: int | None, key: int | None = None, *, timeout: float | None = None) -> Group | None: ...

    def split(self, color: int | None, key: int | None = None, *, timeout: float | None = None) -> Group | None:
        """Return a new group of all ranks that passed the same `color`, ordered by `key`, then by rank.

        Every rank of this group calls it; a rank that passes None gets None. The new group has its own lanes, order
        of operations and failures. Another thread may use it at the same time as this group.
        """
        wanted = 0 if color is None else whole_number("color", color)
        choice = np.array([color is not None, wanted, self.rank if key is None else whole_number("key", key)], np.int64)
        call = self._call("split", None, None)
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
        made = engine.subgroup(f"{engine.id}/{sequence}/{wanted}", members, name)
        return Group(made, local_rank=self._local_rank, parent_ranks=tuple(chosen))

    def split_by_host(self, *, timeout: float | None = None) -> Group:
        """Return a new group of the ranks on this machine. Every rank of this group calls it."""
        ranks = next(ranks for ranks in self.node.hosts().values() if self.rank in ranks)
        return self.split(ranks[0], timeout=timeout)

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
        return survival.shrink(self, timeout)

    def agree(self, flag: bool, *, timeout: float | None = None) -> bool:
        """Return whether `flag` is true on all remaining ranks; all get the same answer, also in a failed group."""
        if self._engine.generation is None or self.on_loss == "continue":
            return bool(self.all_reduce(bool(flag), "and", timeout=timeout))
        return self._assembly().agree(flag, timeout)

    def _assembly(self) -> Assembly:
        if self._sidecar is None:
            self._sidecar = survival.Assembly(self)
        return self._sidecar

    def revoke(self) -> None:
        """End this group and all its pending operations, on all ranks. On any thread."""
        text = f"rank {self.rank} revoked group {self.name!r}"
        self._engine.failure.declare(Fault("ClosedError", text, (self._engine.rank,)))

    def leave(self, *, timeout: float = LEAVE_SECONDS) -> None:
        """Leave the run: the other ranks agree to continue without this one, then the group is closed here."""
        generation = self._engine.generation
        if generation is not None:
            generation.leave(check_timeout(timeout))
        self.close()

    def restore(
        self,
        state: MutableMapping[str, Any],
        *,
        on_drift: str = "repair",
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
        return survival.restore(
            self, state, fresh=self._is_fresh, on_drift=on_drift, timeout=timeout, progress=progress
        )

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
        if self._before_close is not None:
            self._before_close(error is None)
        if self._sidecar is not None:
            self._sidecar.close()
        self._engine.close()
        mismatch = self._engine.failure.untold_mismatch()
        if self._on_close is not None and self._engine.is_freed:  # else the thread that closes it calls this
            mismatch = self._on_close() or mismatch
        if mismatch is not None and error is None:
            raise_or_exit(mismatch)

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

    def _tell_failure(self, error: BaseException) -> None:
        """Tell the other ranks which error ends this program, before its lanes end."""
        node, is_of_all = self._engine.node, self._before_close is not None
        if node is None or not is_of_all or self._has_told:
            return
        self._has_told = True
        if not self._is_consequence(error):
            node.fail(describe(error))
        else:
            self._engine.failure.report_loss(describe(error))

    def _is_consequence(self, error: BaseException) -> bool:
        """Tell whether an error comes from the failure of the group itself, which the other ranks know of."""
        return isinstance(error, CoveyError) and self._engine.failure.has_happened
