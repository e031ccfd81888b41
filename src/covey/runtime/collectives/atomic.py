"""Operations that are all or nothing: every member that is left returns the same, or all raise.

The pact of one group on this rank. The thread that runs an operation executes its attempts; the control loop halts them
before this rank answers who proposes a view, and hands over what the view says (`proto.commit`). Both only meet under
the lock.
"""

from __future__ import annotations

import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, Final

from covey.base.errors import ClosedError, RemoteProtocolError
from covey.proto.commit import Commit, Raised, Returned, Run
from covey.runtime import loop as control
from covey.runtime.bell import Bell
from covey.runtime.collectives.attempt import Attempt, DisagreedError, HaltedError
from covey.runtime.collectives.undo_buffer import UndoBuffer
from covey.runtime.fault import Fault

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.proto.commit import Revoked
    from covey.runtime.collectives.engine import Engine
    from covey.runtime.members.generation import Generation
    from covey.wire.membership import State, View

    Step = Run | Returned | Raised | Revoked

MOST_PAUSE_SECONDS: Final = 2.0
"""Between attempts that fail for the same reason."""
SURPLUS_SECONDS: Final = 30.0
"""A view that is not there this long after patience should be over will not come."""


class AtomicOperations:
    """The all-or-nothing operations of one group."""

    def __init__(self, engine: Engine, generation: Generation, descriptors: list[int]) -> None:
        self._owner = weakref.ref(engine)  # groups that are dropped go at once
        self.group = engine.id
        self._node, self._generation = engine.node, generation
        self._ranks_of = generation.ranks_of(engine.members)
        """By rank of the group: rank of the generation."""
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._bell = Bell(descriptors)
        self._undo = UndoBuffer()
        self._is_executing = False
        self._halt_number = -1
        self._told: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
        self._strikes, self._trouble = 0, ""
        """How often lanes broke since something returned, and how."""
        self._step: Step | None = None
        """What a view said about the operation in progress."""
        self._reason: Fault | None = None
        """Why somebody gave up."""
        self._commit = Commit(engine.id, self._ranks_of, self._ranks_of[engine.rank], generation.view)
        self.attempt = self._new_circle(engine)

    @property
    def _engine(self) -> Engine:
        engine = self._owner()
        assert engine is not None
        return engine

    @property
    def view_number(self) -> int:
        """The number of the view in which operations are tried."""
        return self._commit.attempt

    @property
    def is_pending(self) -> bool:
        """Whether all members know of a waiting change."""
        return self._commit.pending

    @property
    def returned(self) -> int:
        """The last operation that is over."""
        return self._commit.returned

    def _new_circle(self, engine: Engine) -> Attempt:
        live = set(self._commit.live)
        ranks = tuple(rank for rank, place in enumerate(self._ranks_of) if place in live)
        return Attempt(engine, self._commit.attempt, ranks, self._bell, self._undo)

    # The thread that runs an operation

    def perform(self, body: Callable[[Attempt], Any], root: int) -> Any:
        """Return what `body` returns, once all who are left have it; `root` is whom it means nothing without, or -1.

        Raises:
            PeerLostError: the root is lost; the group goes on.
            CoveyError: the group is over, for all.
        """
        step: Step | None
        engine = self._engine
        with self._lock:
            step = self._commit.start(-1 if root < 0 else self._ranks_of[root])
            self._is_executing = type(step) is Run
        result = None
        try:
            while True:
                if step is None:
                    step = self._await_view()
                if type(step) is Run:
                    if self._strikes:
                        engine.check_deadline(self._trouble)
                    self._undo.restore()
                    step, result = self._attempt(engine, step, body)
                elif type(step) is Returned:
                    self._undo.forget()
                    self._strikes = 0
                    engine.returned(self._ranks(step.contributors))
                    if isinstance(result, DisagreedError):
                        engine.end(Fault("MismatchError", str(result)))
                        raise result.error
                    return result
                elif type(step) is Raised:
                    raise engine.root_lost(root)
                elif step is not None:
                    engine.end(self._revocation(engine))
                    engine.check()
        except BaseException:
            self._undo.restore()
            self._stop_executing()
            raise

    def _ranks(self, places: tuple[int, ...]) -> tuple[int, ...]:
        """Return the ranks of the group that these of the generation are."""
        if places is not self._told[0]:  # the same ones every time, until somebody is lost
            self._told = places, tuple(map(self._ranks_of.index, places))
        return self._told[1]

    def _attempt(self, engine: Engine, run: Run, body: Callable[[Attempt], Any]) -> tuple[Step | None, Any]:
        """Try once; return what came of it, None if a view has to tell, and the result as far as there is one."""
        attempt, result = self.attempt, None
        attempt.begin(knows_change=engine.knows_change)
        try:
            try:
                result = body(attempt)
            except DisagreedError as disagreement:
                result = disagreement
            with self._lock:
                if not self._commit.completed(run.attempt):
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
        """Return what the next view says about the operation in progress."""
        give_up_at = time.monotonic() + self._generation.patience + SURPLUS_SECONDS
        with self._lock:
            while self._step is None:
                self._engine.check()
                left = give_up_at - time.monotonic()
                if left <= 0:
                    patience = self._generation.patience
                    text = f"no view of the run was agreed on within the timeout of {patience:g} s (patience)"
                    self._engine.end(Fault("DeadlineError", text))
                self._changed.wait(max(0.0, left))
            step, self._step = self._step, None
            self._is_executing = type(step) is Run
            return step

    def _stop_executing(self) -> None:
        with self._lock:
            self._rest()

    def _rest(self) -> None:
        """Under the lock: nothing of this attempt moves any more."""
        self._is_executing = False
        if self._halt_number >= 0:
            number, self._halt_number = self._halt_number, -1
            control.soon(self._generation.halted, self.group, number, self._commit.freeze())

    def disturbed(self, attempt: Attempt, trouble: str) -> None:
        """A lane of an attempt broke, which may be nobody's death: ask for a view, and wait for it.

        If that happens again and again, every view is asked for a little later.
        """
        self._strikes, self._trouble = self._strikes + 1, trouble
        pause = 0.0 if self._strikes == 1 else min(MOST_PAUSE_SECONDS, 0.01 * 2 ** min(self._strikes, 20))
        control.soon(self._generation.disturbed, attempt.number, pause)
        raise HaltedError

    def give_up(self, fault: Fault, differs_at: int = 0) -> None:
        """Ask all to end the operation in progress, or the next, and with it the group. On any thread.

        `differs_at` is the operation that the ranks called differently: it must not return.
        """
        with self._lock:
            self._reason = self._reason or fault
            if differs_at == self._commit.returned + 1:
                self._commit.disagree()
            else:
                self._commit.give_up()
            self.attempt.is_stopped = True
            attempt = self._commit.attempt
        self._bell.ring()
        control.soon(self._generation.disturbed, attempt)

    # The control loop

    def note_reason(self, fault: Fault) -> None:
        """Somebody gives up: what to say if the view says so, too."""
        with self._lock:
            self._reason = self._reason or fault

    def halt(self, number: int) -> State | None:
        """Stop what is being executed; return how far it is, or None: then `Generation.halted` is told."""
        with self._lock:
            if not self._is_executing:
                if type(self._step) is Run:
                    self._step = None  # nobody has begun it, and nobody may
                return self._commit.freeze()
            self._halt_number = number
            self.attempt.is_stopped = True
        self._bell.ring()
        if self._node is not None:
            over = ClosedError("a view is being agreed on")
            self._node.lanes.abandon(lambda key: key.group == self.group and key.purpose == "collectives", over)
        return None

    def install(self, view: View) -> None:
        """Go on as a view says."""
        engine = self._owner()
        if engine is None or self._node is None:
            return  # dropped just now
        with self._lock:
            self._halt_number = -1
            try:
                step = self._commit.install(view)
            except RemoteProtocolError as error:
                step = None
                control.soon(engine.fail, Fault("MismatchError", f"{error}: the ranks called different things"))
            # None: the operation is over, by this view or by one whose word was not fetched yet.
            self._step = step if step is not None else self._step
            self.attempt.close()
            self.attempt = self._new_circle(engine)
            self._bell.hush()
            if self._commit.gives_up and not self._commit.is_revoked:
                control.soon(self._generation.disturbed, view.number)  # the wish came too late for this view
            self._changed.notify_all()
            is_over = self._commit.is_revoked and step is None
        self._node.lanes.retire(self.group, view.number)
        if is_over:  # messages end, too
            engine.end(self._revocation(engine))

    def _revocation(self, engine: Engine) -> Fault:
        return self._reason or Fault("ClosedError", f"group {engine.name!r} was revoked")

    def wake(self) -> None:
        """The group has failed: let whoever waits see it."""
        self.attempt.is_stopped = True
        self._bell.ring()
        with self._lock:
            self._changed.notify_all()

    def close(self) -> None:
        """Take no more part; if others go on, they are told that this rank does not."""
        with self._lock:
            self._commit.give_up()
            state = self._commit.freeze()
        self._generation.dismiss(self.group, state)
        self.attempt.close()
        self._bell.close()

    def forked(self) -> None:
        """Another thread may have held the locks in the process that this one was forked from."""
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._bell.forked()
