"""Checkpoints of the run: connects `proto.checkpointing` with links, views, events, and the program's looks.

Most runs have none. So the core is made when the first one is requested, here or on another member.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from concurrent.futures import Future
from typing import TYPE_CHECKING, Final, Protocol

from covey.base.errors import BusyError, ClosedError, ConfigError, DeadlineError
from covey.base.numbers import Seat
from covey.net.host.run_notes import KEPT_FOLDER, note_checkpoint
from covey.runtime import loop as control
from covey.runtime.events import CHECKPOINT, Event
from covey.wire import messages

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from covey.base.numbers import Rank
    from covey.proto.checkpointing import Checkpoint, Checkpointing, Effect
    from covey.runtime.events import Events
    from covey.runtime.tasks import CoreDriver, Tasks
    from covey.wire.checkpoint import Unsaved

logger = logging.getLogger("covey")

FAILURE_CHECK_EVERY: Final = 0.1
"""How often a look that waits checks whether the group has failed."""
SAVED_NOTE_SECONDS: Final = 10.0
"""How long the control loop may take to note that this rank has saved."""
WAITING_LIMIT: Final = 1000
"""Requests of one process that wait for the name of their checkpoint."""


class NumberedGeneration(Protocol):
    """A generation of the run."""

    @property
    def number(self) -> int: ...


class CheckpointedGroup(Protocol):
    """The group of the run in the current generation."""

    @property
    def issued(self) -> int:
        """The number of operations that the program has issued."""

    @property
    def is_over(self) -> bool:
        """Whether the group was closed or has failed."""

    @property
    def generation(self) -> NumberedGeneration | None:
        """The generation that it is the group of; None if there are no views."""


class CheckpointPeers(Protocol):
    """The other processes of the run, by seat."""

    @property
    def seat(self) -> Seat:
        """That of this process."""

    def rank_of(self, seat: Seat) -> Rank: ...

    def send(self, seat: Seat, message: messages.Control) -> None: ...


class Checkpoints:
    """The checkpoints of one process in its run. On the control loop, unless it says otherwise."""

    def __init__(
        self, peers: CheckpointPeers | None = None, tasks: Tasks | None = None, events: Events | None = None
    ) -> None:
        """Begin without members. Without `peers`, this process is alone; `tasks` are those of the run."""
        self._peers, self._tasks, self._events = peers, tasks, events
        self._me = peers.seat if peers is not None else Seat(0)
        self._group: weakref.ref[CheckpointedGroup] | None = None
        self._core: Checkpointing | None = None
        self._driver: CoreDriver[Effect] | None = None
        self._view: tuple[int, tuple[int, ...]] = (-1, ()) if peers is not None else (0, (self._me,))
        """The epoch and its members, in the order of their seats: the first is longest in the run, and leads."""
        self._unnamed: list[Future[str]] = []
        self._changed = threading.Condition()
        self._is_closed = False
        _all.add(self)

    # The program, on any thread

    def follow(self, group: CheckpointedGroup) -> None:
        """Count the operations of this group from now on: the one of a new generation."""
        self._group = weakref.ref(group)

    def is_of(self, group: CheckpointedGroup) -> bool:
        """Tell whether checkpoints begin after operations of this group."""
        return self._group is not None and self._group() is group

    @property
    def is_of_run(self) -> bool:
        """Whether this process is in a run with others, and is not about to leave it."""
        return self._peers is not None and (self._tasks is None or not self._tasks.is_closing)

    @property
    def is_idle(self) -> bool:
        """Whether no look of the program can see a checkpoint, however many operations it has issued."""
        return self._core is None or self._core.limit == self._core.no_limit

    def look(self, group: CheckpointedGroup, timeout: float) -> Checkpoint | None:
        """Return the checkpoint that all ranks see after as many operations; wait until the members have agreed.

        Raises:
            ClosedError: the group has ended, and the members had not agreed.
            DeadlineError: they did not agree within `timeout` seconds.
        """
        core, issued = self._core, group.issued
        if core is None or issued < core.limit:
            return None
        until = time.monotonic() + timeout
        with self._changed:
            while isinstance(state := core.state_at(issued), bool):
                if group.is_over or self._is_closed:
                    raise ClosedError("the group ended before its ranks had agreed on a checkpoint")
                if time.monotonic() >= until:
                    raise DeadlineError(f"the ranks did not agree on a checkpoint within the timeout of {timeout:g} s")
                self._changed.wait(FAILURE_CHECK_EVERY)
            return state

    def request(self, path: str, checkpoint_id: str, timeout: float) -> str:
        """Ask for a checkpoint, and return its name, or that of the one that is under way.

        Raises:
            ConfigError: the name or the path cannot be sent.
            DeadlineError: the members did not answer within `timeout` seconds.
            ClosedError: this process has left the run.
        """
        from covey.wire.checkpoint import check_order  # most runs have no checkpoints

        check_order(path, checkpoint_id)
        outcome: Future[str] = Future()
        control.soon(self._request, path, checkpoint_id, outcome)
        try:
            return outcome.result(timeout)
        except TimeoutError:
            if outcome.done():
                raise
            raise DeadlineError(
                f"the ranks did not take the request for a checkpoint within the timeout of {timeout:g} s"
            ) from None

    def request_soon(self) -> None:
        """Ask for a checkpoint, and do not wait."""
        control.soon(self._request, "", "", Future())

    def end(self, error: str) -> None:
        """Note that this rank has saved the checkpoint that it sees, or why it could not.

        Raises:
            ConfigError: it sees none.
        """
        outcome: Future[bool] = Future()
        control.soon(self._end, error, outcome)
        if not outcome.result(SAVED_NOTE_SECONDS):
            raise ConfigError("no checkpoint is pending on this rank; call end_checkpoint once after each one")

    # The control loop

    def view(self, generation: int, view: int, seats: Sequence[Seat]) -> None:
        """Take the members of a view."""
        epoch = (generation << 32) + view
        if epoch > self._view[0]:
            self._view = epoch, tuple(sorted(seats))
            if self._core is not None:
                self._core.configure(*self._view, time.monotonic())
                self._settle()

    def heard(self, seat: Seat, message: messages.CheckpointNews) -> None:
        """Take a message of another member."""
        from covey.wire.checkpoint import decode_checkpoint  # most runs have no checkpoints

        body = decode_checkpoint(message.body)
        try:
            self._made().heard(seat, message.epoch, body, time.monotonic())
        finally:
            self._settle()

    def link_up(self, seat: Seat) -> None:
        """Repeat, on the new link with a process, what may be lost with the last one."""
        if self._core is not None:
            self._core.repeat(seat, time.monotonic())
            self._settle()

    def asked(self, message: messages.RequestCheckpoint, send: Callable[[messages.CheckpointProgress], None]) -> None:
        """Answer a keeper or a visitor, once the members know which checkpoint the request is for."""
        if message.is_question:
            send(self.progress(message.id))
            return
        outcome: Future[str] = Future()
        outcome.add_done_callback(lambda outcome: send(self._progress_of(outcome, message.id)))
        from covey.wire.checkpoint import check_order

        try:
            check_order(message.path, message.id)
        except ConfigError as error:
            outcome.set_exception(error)
        else:
            self._request(message.path, message.id, outcome)

    def _progress_of(self, outcome: Future[str], asked: str) -> messages.CheckpointProgress:
        error = outcome.exception()
        if error is not None:
            return messages.CheckpointProgress(asked, "refused", str(error))
        return self.progress(outcome.result())

    def progress(self, checkpoint_id: str) -> messages.CheckpointProgress:
        """Tell how a checkpoint is."""
        core = self._core
        if core is None:
            return messages.CheckpointProgress(checkpoint_id, "", "")
        failed = self._reasons(core.failures(checkpoint_id))
        return messages.CheckpointProgress(checkpoint_id, core.state_of(checkpoint_id), failed)

    def close(self) -> None:
        """End all requests and looks."""
        self._is_closed = True
        _all.discard(self)
        if self._driver is not None:
            self._driver.close()
        for outcome in self._unnamed:
            outcome.set_exception(ClosedError("the run was closed while a checkpoint was requested"))
        self._unnamed.clear()
        with self._changed:
            self._changed.notify_all()

    # Effects of the core

    def perform(self, effect: Effect) -> None:
        from covey.proto.checkpointing import Begun, CheckpointEnded, LookAgain, Named, SendToMember

        match effect:
            case SendToMember(peer, message):
                from covey.wire.checkpoint import encode_checkpoint

                if self._peers is not None:
                    body = encode_checkpoint(message)
                    self._peers.send(Seat(peer), messages.CheckpointNews(self._view[0], body))
            case LookAgain():
                with self._changed:
                    self._changed.notify_all()
            case Named(name):
                unnamed, self._unnamed = self._unnamed, []
                for outcome in unnamed:
                    if not outcome.done():
                        outcome.set_result(name)
            case Begun(checkpoint):
                self._tell(f"begun {checkpoint.id}", self._view[1])
            case CheckpointEnded(order, failed):
                self._tell_end(order.id, failed)
                if order.path and not failed and KEPT_FOLDER in os.environ:
                    threading.Thread(
                        target=note_checkpoint, args=(order.path,), name="covey-aside", daemon=True
                    ).start()

    def settled(self) -> None:
        """Do nothing: effects need nothing after them."""

    def failed(self, error: ConfigError) -> None:
        """Do nothing: no effect writes anything."""

    # Helpers

    def _made(self) -> Checkpointing:
        """Return the core, made on first use."""
        if self._core is None:
            from covey.proto.checkpointing import Checkpointing
            from covey.runtime.tasks import CoreDriver

            core = Checkpointing(self._me, self._issued)
            core.configure(*self._view, time.monotonic())
            self._driver = CoreDriver(core, self)
            self._core = core
        return self._core

    def _settle(self) -> None:
        if self._driver is not None:
            self._driver.settle()

    def _issued(self) -> int:
        """Return how many operations the program has issued; in a generation whose group is not made yet, none."""
        group = None if self._group is None else self._group()
        if group is None:
            return 0
        number = 0 if group.generation is None else group.generation.number
        return group.issued if number == self._view[0] >> 32 else 0

    def _request(self, path: str, checkpoint_id: str, outcome: Future[str]) -> None:
        from covey.wire.checkpoint import CheckpointOrder

        if self._is_closed or (self._peers is not None and not self.is_of_run):
            outcome.set_exception(ClosedError("the run is closed; join again"))
            return
        if len(self._unnamed) >= WAITING_LIMIT:
            outcome.set_exception(BusyError("too many requests for a checkpoint wait; wait for some of them"))
            return
        known = self._made().request(CheckpointOrder(checkpoint_id or _new_id(), path), time.monotonic())
        if known is not None:
            outcome.set_result(known)
        else:
            self._unnamed.append(outcome)
        self._settle()

    def _end(self, error: str, outcome: Future[bool]) -> None:
        outcome.set_result(self._core is not None and self._core.end(error, time.monotonic()))
        self._settle()

    def _tell_end(self, checkpoint_id: str, failed: Sequence[Unsaved]) -> None:
        if failed:
            reasons = self._reasons(failed)
            logger.warning("checkpoint %s failed: %s", checkpoint_id, reasons)
            self._tell(f"failed {checkpoint_id}: {reasons}", [each.seat for each in failed])
        else:
            self._tell(f"ended {checkpoint_id}", self._view[1])

    def _reasons(self, failed: Sequence[Unsaved]) -> str:
        return "; ".join(f"rank {self._rank_of(each.seat)}: {each.error}" for each in failed)

    def _rank_of(self, seat: int) -> int:
        return int(seat) if self._peers is None else self._peers.rank_of(Seat(seat))

    def _tell(self, text: str, seats: Sequence[int]) -> None:
        if self._events is not None:
            epoch, ranks = self._view[0], tuple(map(self._rank_of, seats))
            event = Event(CHECKPOINT, time.time(), epoch >> 32, epoch & (1 << 32) - 1, ranks, text=text)
            self._events.add(event)


def _new_id() -> str:
    import secrets

    return secrets.token_hex(8)


def request_all() -> None:
    """Request a checkpoint of each run that this process is in, and do not wait. On any thread."""
    for checkpoints in list(_all):
        checkpoints.request_soon()


_all: weakref.WeakSet[Checkpoints] = weakref.WeakSet()
