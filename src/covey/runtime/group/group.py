"""The group: what a program holds to work on arrays together with the other ranks."""

from __future__ import annotations

import itertools
import threading
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np

from covey.base.config import check_timeout
from covey.base.errors import CoveyError
from covey.runtime import loop as control
from covey.runtime.buffers import readable
from covey.runtime.fault import Fault
from covey.runtime.group import gradients, movements, survival
from covey.runtime.group.failing import describe, ending_error, is_failure
from covey.runtime.group.issuer import whole_number
from covey.runtime.group.messaging import Messages
from covey.runtime.group.moving import Moves
from covey.runtime.group.reductions import Reductions

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, MutableMapping
    from types import TracebackType

    from covey.runtime.collectives.attempt import Attempt
    from covey.runtime.collectives.engine import Engine
    from covey.runtime.collectives.stalls import Late
    from covey.runtime.events import Event
    from covey.runtime.group.restore import RestoreReport
    from covey.runtime.group.survival import Assembly

    Array = np.ndarray[Any, np.dtype[Any]]

LEAVE_SECONDS: Final = 5.0
"""How long the others may take to agree that a rank leaves."""


class Group(Reductions, Moves, Messages):
    """An ordered set of ranks that work together. Use it in `with`, or `close` it.

    Collectives of a group run in the order they are issued, and every rank must issue the same ones in the same
    order. One thread at a time issues them; for more threads, `split` more groups. Point-to-point messages have
    lanes of their own and go on whatever the collectives do. After an exception the contents of arrays that the
    operation was changing are undefined; with `on_loss="continue"` they are what they were before.

    Every operation takes `timeout=` seconds (default: the group's, 30 minutes) and `async_op=True`, which returns a
    `Work` at once. Arrays are numpy arrays, torch CPU tensors, or writable buffers, used in place without a copy
    when they are contiguous.

    Every operation may raise:
        MismatchError: ranks called different things. The group is closed.
        PeerLostError: a member went away. The group is closed; with `on_loss="continue"` it goes on: only a lost root
            or partner of a message raises.
        GroupChangedError, QuorumLostError: with `on_loss="continue"`: the others went on without this rank, or too few
            are left to go on.
        DeadlineError: `timeout` passed. The group is closed, unless it was a message: then only that message failed.
        ClosedError: the group was closed or revoked before, or ended by the failure that is its `__cause__`. A group
            that ended with PeerLostError, GroupChangedError or QuorumLostError raises that every time.
        BusyError: another thread is in a collective of this group.
        TypeError, ConfigError: the call itself cannot work; nothing was sent.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        local_rank: int,
        before_close: Callable[[bool], None] | None = None,
        on_close: Callable[[], None] | None = None,
        is_fresh: bool = False,
    ) -> None:
        """Closing begins with `before_close(is_finished)` and ends with `on_close`; a failed program is not finished.

        `is_fresh`: this rank was not in the run before this group, so its state is worth nothing.
        """
        super().__init__(engine)
        self._local_rank = local_rank
        self._before_close, self._on_close = before_close, on_close
        self._is_fresh = is_fresh
        self._sidecar: Assembly | None = None
        self._restores = 0
        self._state: MutableMapping[str, Any] | None = None
        """What `restore` was given last."""
        self._failure: BaseException | None = None
        """The exception with which the program left the `with` block, if it did."""
        self._has_told = False
        """Whether the other ranks were told of such an exception."""
        self._children = itertools.count(1)

    # Who

    @property
    def live(self) -> tuple[int, ...]:
        """The ranks that have not been lost."""
        return self._engine.live

    @property
    def generation(self) -> int:
        """The number of this group in the run's history."""
        return 0 if self._engine.generation is None else self._engine.generation.number

    @property
    def name(self) -> str:
        """What errors call this group."""
        return self._engine.name

    @property
    def on_loss(self) -> str:
        """What an operation does that loses a member: raise, or continue among those who are left."""
        return self._engine.config.on_loss

    @property
    def contributors(self) -> tuple[int, ...]:
        """The ranks whose input is in the result of the last collective that returned."""
        return self._engine.contributors

    @property
    def sequence(self) -> int:
        """How many collectives have returned here, counted from the group's beginning."""
        return self._engine.last_returned

    @property
    def local_rank(self) -> int:
        """This process's number among the run's processes on its host: the index of its device, for instance."""
        return self._local_rank

    def lanes(self) -> dict[int, str]:
        """Return the kind of lane to each other rank: shm, unix, tcp, secure or memory."""
        return self._engine.lane_kinds()

    def __repr__(self) -> str:
        return f"<Group {self.name!r}: rank {self.rank} of {self.size}>"

    # Gradients, and groups of groups

    def sync_gradients(
        self,
        grads: Mapping[str, Any],
        op: str = "mean",
        *,
        bucket_bytes: int = 25 << 20,
        timeout: float | None = None,
    ) -> None:
        """Combine named arrays of all ranks in place, packed into buckets of about `bucket_bytes`.

        Raises:
            MismatchError: ranks passed other names, shapes or dtypes; names the first difference.
        """
        gradients.sync(self, grads, op, bucket_bytes, timeout)

    def split(self, color: int | None, key: int | None = None, *, timeout: float | None = None) -> Group | None:
        """Make new groups: one of all ranks that passed the same `color`, ordered by `key`, then by rank.

        Every rank of this group takes part; one that passes None gets None. The new group has lanes, order and
        failures of its own, and may be used at the same time as this one from another thread.
        """
        wanted = 0 if color is None else whole_number("color", color)
        choice = np.array([color is not None, wanted, self.rank if key is None else whole_number("key", key)], np.int64)
        call = self._call("split", None, None)
        operand = readable(choice)

        def body(attempt: Attempt) -> tuple[dict[int, Array], int]:
            gathered = movements.gather_all(attempt, operand, wanted=movements.Wanted(shape=operand.shape))
            return dict(zip(attempt.ranks, gathered, strict=True)), attempt.engine.operation.sequence

        choices, sequence = self._engine.run(call, body, timeout=timeout, async_op=False)
        if color is None:
            return None
        engine = self._engine
        chosen = [rank for rank, choice in choices.items() if choice[0] and choice[1] == wanted]
        chosen.sort(key=lambda rank: (int(choices[rank][2]), rank))
        members = tuple(engine.members[rank] for rank in chosen)
        name = f"{self.name}/{sequence}.{wanted}"
        made = engine.subgroup(f"{engine.id}/{sequence}/{wanted}", members, name)
        return Group(made, local_rank=self._local_rank)

    # Losses and changes

    @property
    def change_pending(self) -> bool:
        """Whether the next generation waits: newcomers are there, members want to leave, or too few are left.

        Turns true on all ranks after the same all_reduce or barrier (with `on_loss="continue"`, after the same
        collective of any kind), so that loops which look at it end together. Always false outside `covey.generations`.
        """
        return self._engine.change_pending

    def shrink(self, *, timeout: float | None = None) -> tuple[Group, int]:
        """Return a group of the ranks that are left, and the last operation that returned on all of them.

        Every rank that is left calls it, as a rule after a PeerLostError or `revoke`; this group need not be usable any
        more. Ranks are numbered anew, in the same order. Ranks that returned later operations than the number says put
        their state back to that one, and all are in step.

        Raises:
            QuorumLostError: too few are left.
            DeadlineError: some that are alive did not come.
        """
        return survival.shrink(self, timeout)

    def agree(self, flag: bool, *, timeout: float | None = None) -> bool:
        """Return whether `flag` is true on all ranks that are left: the same on all of them, also in a failed group."""
        if self._engine.generation is None or self.on_loss == "continue":
            return bool(self.all_reduce(bool(flag), "and", timeout=timeout))
        return self._assembly().agree(flag, timeout)

    def _assembly(self) -> Assembly:
        if self._sidecar is None:
            self._sidecar = survival.Assembly(self)
        return self._sidecar

    def revoke(self) -> None:
        """End everything that is pending in this group, on all ranks, and the group with it. From any thread."""
        text = f"rank {self.rank} revoked group {self.name!r}"
        self._engine.failure.declare(Fault("ClosedError", text, (self.rank,)))

    def who_is_late(self, *, timeout: float = 2.0) -> list[Late]:
        """Return the ranks that keep the others waiting: behind them in operations, or without an answer in `timeout`.

        Only the caller asks; the others answer whatever they do, and nothing is disturbed. From any thread: when one
        waits in an operation for too long, another can tell for whom. An empty list says that all are where this is.
        """
        return self._engine.stalls.who_is_late(check_timeout(timeout))

    def on_change(self, listener: Callable[[Event], None]) -> None:
        """Call `listener(event)` when members are lost or come, on a thread of its own."""
        if self._engine.node is not None:
            self._engine.node.events.listen(listener)

    def events(self) -> list[Event]:
        """Return what happened to the run so far: losses and recoveries with their timelines, generations."""
        return [] if self._engine.node is None else self._engine.node.events.all()

    def leave(self, *, timeout: float = LEAVE_SECONDS) -> None:
        """Leave the run in good order: the others agree to go on without this rank, then the group is closed here."""
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
        """Bring newcomers of this generation to the state of the others: named arrays, filled in place, and values.

        Every rank calls it, and nobody changes the state until it returns. Newcomers fetch from all others at once,
        and only what differs. A rank whose state has drifted from that of the majority is brought back and named in the
        report; with `on_drift="raise"` all raise MismatchError instead. In the first generation rank 0's state wins.
        """
        self._state = state
        return survival.restore(
            self, state, fresh=self._is_fresh, on_drift=on_drift, timeout=timeout, progress=progress
        )

    # The end

    def close(self) -> None:
        """Leave the group and free what it holds. Closing twice is fine."""
        if control.is_here():  # the garbage collector ends what held it, and happens to run on this thread
            threading.Thread(target=self.close, name="covey-close", daemon=True).start()
            return
        error = self._failure if self._failure is not None else ending_error()
        if error is not None:
            self._tell_failure(error)
        if self._before_close is not None:
            self._before_close(error is None)
        if self._sidecar is not None:
            self._sidecar.close()
        self._engine.close()
        if self._on_close is not None and self._engine.is_freed:  # else who closes it does this, too
            self._on_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and is_failure(error):
            self._failure = error
            self._tell_failure(error)
            if self.on_loss == "raise" and not self._is_consequence(error):
                host = self._engine.roster.host_name(self.rank)
                text = f"rank {self.rank}{f' ({host})' if host else ''} failed with {describe(error)}"
                self._engine.failure.declare(Fault("PeerLostError", text, (self.rank,)))
        self.close()

    def _tell_failure(self, error: BaseException) -> None:
        """Tell the other ranks why this process leaves the run, before anything shows them that it does."""
        node, is_of_all = self._engine.node, self._before_close is not None
        if node is not None and is_of_all and not self._has_told and not self._is_consequence(error):
            self._has_told = True
            node.fail(describe(error))

    def _is_consequence(self, error: BaseException) -> bool:
        """Tell whether an error comes from the group, which has told the other ranks what it failed of."""
        return isinstance(error, CoveyError) and self._engine.failure.has_happened
