"""All-or-nothing operations: either every remaining member returns the same result, or all of them raise.

The thread that runs an operation executes its attempts. When a view is proposed, the control loop halts the attempt
before this rank answers, and later passes on what the decided view says about the operation (`proto.commit`). The two
threads share state only under the lock.
"""

from __future__ import annotations

import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, Final, NoReturn

from covey.base.errors import ClosedError, RemoteProtocolError
from covey.base.numbers import Rank
from covey.base.pace import Growing
from covey.proto.commit import LENT_PHASES, Commit, Raised, Returned, RunOperation
from covey.runtime import loop as control
from covey.runtime.bell import Bell
from covey.runtime.collectives.attempt import DisagreedError, HaltedError, HandedOver
from covey.runtime.collectives.executor import UndoBuffer
from covey.runtime.fault import Fault

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.proto.commit import Revoked
    from covey.runtime.collectives.attempt import Attempt, Shortcuts
    from covey.runtime.collectives.failure import Failure
    from covey.runtime.collectives.operation import CurrentAttempt
    from covey.runtime.collectives.roster import CollectiveLanes, GroupFacts, GroupRoster
    from covey.runtime.collectives.trouble import OperationTrouble
    from covey.runtime.views.generation import Generation
    from covey.wire.membership import State, View

    Step = RunOperation | Returned | Raised | Revoked
    MakeAttempt = Callable[[int, tuple[Rank, ...], Bell, Any], Attempt]

ATTEMPT_PAUSES: Final = Growing(0.04, 2.0)
"""Before an attempt whose predecessors failed too; the first that follows a failure comes at once."""
VIEW_SURPLUS_SECONDS: Final = 30.0
"""How long after the end of `patience` a view may still be decided; then none will be."""


class AtomicOperations:
    """The all-or-nothing operations of one group on this rank."""

    def __init__(
        self,
        facts: GroupFacts,
        roster: GroupRoster,
        lanes: CollectiveLanes,
        failure: Failure,
        trouble: OperationTrouble,
        shortcuts: Shortcuts,
        current: CurrentAttempt,
        generation: Generation,
        make_attempt: MakeAttempt,
        *,
        has_news: bool,
    ) -> None:
        """`make_attempt` gets the number and the ranks of an attempt, its bell and its undo buffer.

        `has_news` if the program goes from generation to generation: every operation tells of waiting changes then.
        """
        self.group = facts.id
        self._name, self._roster, self._lanes = facts.name, roster, lanes
        self._failure, self._trouble, self._current = failure, trouble, current
        self._shortcuts = weakref.ref(shortcuts)  # a shortcut refers to this object
        self._generation, self._make_attempt, self._has_news = generation, make_attempt, has_news
        self._ranks_of = generation.ranks_of(roster.seats)
        """By rank of the group: the rank in the generation."""
        self.contributors = tuple(roster.ranks)
        """The ranks whose input is in the result of the last operation that returned."""
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._bell = Bell()
        self._undo: Any = UndoBuffer()
        if facts.is_native:
            from covey.runtime.collectives.native_executor import NativeUndoBuffer

            self._undo = NativeUndoBuffer()
        self.is_executing = False
        """Whether a thread runs an attempt. The shortcut sets it, too, before it hands an operation over."""
        self._is_handed_over = False
        """Whether the shortcut has begun an operation that `perform` has not gone on with yet."""
        self._halt_number = -1
        self._translated: tuple[tuple[int, ...], tuple[Rank, ...]] = ((), ())
        """The ranks of the generation that `_ranks` translated last, and the ranks of the group that they are."""
        self._strikes, self._problem = 0, ""
        """How often lanes broke since an operation returned, and how the last one did."""
        self._step: Step | None = None
        """What the last view says about the operation in progress."""
        self._reason: Fault | None = None
        """Why a rank gave up."""
        self._commit = Commit(facts.id, self._ranks_of, self._ranks_of[roster.rank], generation.view)
        self.attempt = self._new_attempt()
        self._renew_shortcut()
        failure.agree_with(weakref.ref(self))

    @property
    def size(self) -> int:
        """The number of ranks in the group, including lost ones."""
        return len(self._ranks_of)

    @property
    def view_number(self) -> int:
        """The number of the view in which attempts run."""
        return self._commit.attempt

    @property
    def is_pending(self) -> bool:
        """Whether all members know of a waiting change."""
        return self._commit.pending

    @property
    def returned(self) -> int:
        """The number of the last operation that has ended."""
        return self._commit.returned

    def _new_attempt(self) -> Attempt:
        live = set(self._commit.live)
        ranks = tuple(rank for rank, at in zip(self._roster.ranks, self._ranks_of, strict=True) if at in live)
        attempt = self._make_attempt(self._commit.attempt, ranks, self._bell, self._undo)
        self._current.follow(weakref.ref(attempt))
        return attempt

    # The thread that runs an operation

    def perform(self, body: Callable[[Attempt], Any], root: Rank) -> Any:
        """Return what `body` returns, once all remaining ranks have completed it; `root` is the rank it needs, or -1.

        Raises:
            PeerLostError: the root is lost; the group continues.
            CoveyError: the group has ended, on all ranks.
        """
        step: Step | None
        failure = self._failure
        with self._lock:
            is_begun, self._is_handed_over = self._is_handed_over, False
            if is_begun:
                step = self._commit.resume()
            else:
                step = self._commit.start(-1 if root < 0 else self._ranks_of[root])
                self.is_executing = type(step) is RunOperation
        result = None
        try:
            while True:
                if step is None:
                    step = self._await_view()
                if type(step) is RunOperation:
                    if self._strikes:
                        self._trouble.check_deadline(self._problem)
                    if not is_begun:
                        self._undo.restore()
                    step, result = self._attempt(step, body, is_begun=is_begun)
                    is_begun = False
                elif type(step) is Returned:
                    self._undo.forget()
                    self._strikes = 0
                    self._returned(self._ranks(step.contributors))
                    if isinstance(result, DisagreedError):
                        failure.end_here(Fault("MismatchError", str(result)))
                        raise result.error
                    return result
                elif type(step) is Raised:
                    raise failure.root_lost(root)
                elif step is not None:
                    failure.end_here(self._revocation())
                    failure.raise_fault()
        except BaseException:
            self._undo.restore()
            self._stop_executing()
            raise

    def _ranks(self, members: tuple[int, ...]) -> tuple[Rank, ...]:
        """Return the ranks of the group that these ranks of the generation are."""
        if members is not self._translated[0]:  # the same tuple every time, until a rank is lost
            self._translated = members, tuple(Rank(index) for index in map(self._ranks_of.index, members))
        return self._translated[1]

    def _returned(self, contributors: tuple[Rank, ...]) -> None:
        """Note the ranks whose input is in the result of an operation, which returns now."""
        self.contributors = contributors
        if self._roster.node is not None and self._roster.node.events.is_recovering:
            self._roster.node.events.phase("redo")

    def _attempt(self, run: RunOperation, body: Callable[[Attempt], Any], *, is_begun: bool) -> tuple[Step | None, Any]:
        """Run one attempt; return the next step, None if a view has to decide it, and the result if there is one.

        With `is_begun`, the shortcut has begun it, and may be in the barrier.
        """
        attempt, result = self.attempt, None
        is_in_barrier = is_begun and self._commit.is_complete
        try:
            # The headers of a barrier that has begun say what this rank knew then: nothing new counts in it.
            knows_change = self._roster.knows_change and not is_in_barrier
            attempt.begin(knows_change=knows_change, begun=HandedOver(is_begun + is_in_barrier))
            try:
                result = body(attempt)
            except DisagreedError as disagreement:
                result = disagreement
            with self._lock:
                if not is_in_barrier and not self._commit.completed(run.attempt):
                    raise HaltedError
            if attempt.size > 1:
                attempt.commit()
        except HaltedError:
            self._stop_executing()
            return None, result
        with self._lock:
            step = self._commit.passed(run.attempt, attempt.knows_change)
            self._rest()
            return step, result

    def _await_view(self) -> Step:
        """Wait for the next view, and return what it says about the operation in progress."""
        give_up_at = time.monotonic() + self._generation.patience + VIEW_SURPLUS_SECONDS
        with self._lock:
            while self._step is None:
                self._failure.raise_fault()
                left = give_up_at - time.monotonic()
                if left <= 0:
                    patience = self._generation.patience
                    text = f"the members agreed on no view of the run within the timeout of {patience:g} s (patience)"
                    self._failure.end_here(Fault("DeadlineError", text))
                self._changed.wait(max(0.0, left))
            step, self._step = self._step, None
            self.is_executing = type(step) is RunOperation
            return step

    # The shortcut

    def _renew_shortcut(self) -> None:
        """Let the group have a shortcut for the sums of the present attempt, if the compiled executor is used."""
        shortcuts = self._shortcuts()
        if shortcuts is not None:
            is_usable = self._roster.node is not None and not self._has_news
            parts = (self, self._commit, *LENT_PHASES)
            shortcuts.all_reduce = self.attempt.shortcut(parts) if is_usable else None

    def open_shortcut(self, started: int) -> None:
        """Let operations take the shortcut, unless a view is being decided; `started` is the number of operations."""
        with self._lock:
            if not self.is_executing and self._halt_number < 0 and self._commit.lend(started):
                self.attempt.open_shortcut()

    def drop_shortcut(self) -> None:
        """Let every operation go the long way, now that the node is elastic; not while a view brings a shortcut."""
        with self._lock:
            self._has_news = True
            self.attempt.close_shortcut()
            self._renew_shortcut()

    def handed_over(self, x: Any) -> None:
        """Note that the shortcut has begun an operation on `x`, which `perform` goes on with."""
        self._undo.keep(x)
        self._is_handed_over = True

    def drop_handed_over(self) -> None:
        """Give up an operation that the shortcut has begun, if `perform` was not called for it."""
        if self._is_handed_over:
            self._is_handed_over = False
            self.attempt.drop_begun()
            self._undo.restore()
            self._stop_executing()

    def _stop_executing(self) -> None:
        with self._lock:
            self._rest()

    def _rest(self) -> None:
        """Note, under the lock, that the attempt has stopped, and report how far it got if a halt asked for that."""
        self.is_executing = False
        if self._halt_number >= 0:
            number, self._halt_number = self._halt_number, -1
            control.soon(self._generation.halted, self.group, number, self._commit.freeze())

    def disturbed(self, attempt: int, trouble: str) -> NoReturn:
        """Ask for a new view because a lane of the attempt broke, and stop the attempt. No process need be lost.

        If lanes keep breaking, each request comes a little later than the one before.
        """
        self._strikes, self._problem = self._strikes + 1, trouble
        control.soon(self._generation.disturbed, attempt, ATTEMPT_PAUSES.after(self._strikes - 1))
        raise HaltedError

    def withdraw(self) -> None:
        """Let the others agree to continue without this rank. On any thread."""
        control.soon(self._generation.withdraw)

    def give_up(self, fault: Fault, differs_at: int = 0) -> None:
        """Ask all ranks to end the operation in progress, or the next one, and the group with it. On any thread.

        `differs_at` is the operation that the ranks called differently; it must not return.
        """
        with self._lock:
            self.attempt.close_shortcut()
            self._reason = self._reason or fault
            if differs_at == self._commit.returned + 1:
                self._commit.disagree()
            else:
                self._commit.give_up()
            self.attempt.stop()
            attempt = self._commit.attempt
        self._bell.ring()
        control.soon(self._generation.disturbed, attempt)

    # The control loop

    def note_reason(self, fault: Fault) -> None:
        """Record why a rank gave up: the reason to raise if the view ends the group."""
        with self._lock:
            self._reason = self._reason or fault

    def halt(self, number: int) -> State | None:
        """Stop the attempt and return its state, or None if it still runs: then `Generation.halted` gets the state."""
        with self._lock:
            self.attempt.close_shortcut()  # before anything is read that it changes
            if not self.is_executing:
                if type(self._step) is RunOperation:
                    self._step = None  # it has not begun, and must not
                return self._commit.freeze()
            self._halt_number = number
            self.attempt.stop()
        self._bell.ring()
        self._lanes.abandon(ClosedError("the members are agreeing on a view"), only="collectives")
        return None

    def install(self, view: View) -> None:
        """Continue as a decided view says: with a new attempt among its members."""
        if self._roster.node is None:
            return
        with self._lock:
            self.attempt.close_shortcut()
            self._halt_number = -1
            try:
                step = self._commit.install(view)
            except RemoteProtocolError as error:
                step = None
                fault = Fault("MismatchError", f"{error}: the ranks called different things")
                control.soon(self._failure.declare, fault)
            # None: this view ends the operation, or an earlier one did whose step was not fetched yet.
            self._step = step if step is not None else self._step
            self.attempt.close()
            self.attempt = self._new_attempt()
            self._renew_shortcut()
            self._bell.hush()
            if self._commit.gives_up and not self._commit.is_revoked:
                control.soon(self._generation.disturbed, view.number)  # the request came too late for this view
            self._changed.notify_all()
            is_over = self._commit.is_revoked and step is None
        self._lanes.retire(view.number)
        if is_over:  # which ends the group's messages, too
            self._failure.end_here(self._revocation())

    def _revocation(self) -> Fault:
        return self._reason or Fault("ClosedError", f"group {self._name!r} was revoked")

    def wake(self) -> None:
        """Wake the thread that runs an operation: the group has failed."""
        self.attempt.stop()
        self._bell.ring()
        with self._lock:
            self._changed.notify_all()

    def close(self) -> None:
        """Take no part in later operations; the ranks that continue learn that this one does not."""
        with self._lock:
            self.attempt.close_shortcut()
            self._commit.give_up()
            state = self._commit.freeze()
        self._generation.dismiss(self.group, state)
        self.attempt.close()
        self._bell.close()

    def forked(self) -> None:
        """Replace the locks in a forked child: another thread of the parent may have held them."""
        self.attempt.close_shortcut()  # or the child would write into the parent's lanes
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._bell.forked()
