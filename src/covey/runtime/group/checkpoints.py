"""Checkpoints of the run, as a program requests, sees and ends them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from covey.base.config import check_timeout
from covey.base.errors import ClosedError, ConfigError

if TYPE_CHECKING:
    from covey.proto.checkpointing import Checkpoint
    from covey.runtime.collectives.failure import Failure
    from covey.runtime.collectives.roster import GroupFacts
    from covey.runtime.state.checkpoints import Checkpoints
    from covey.runtime.views.generation import Generation

CHECKPOINT_CHOICE_SECONDS: Final = 30.0
"""How long the ranks may take to agree which checkpoint a request is for."""


class CheckpointedEngine(Protocol):
    """The engine of the group, whose operations checkpoints begin after (`collectives.engine`)."""

    facts: GroupFacts
    failure: Failure
    generation: Generation | None

    @property
    def issued(self) -> int: ...

    @property
    def is_over(self) -> bool: ...


class CheckpointRequests:
    """Checkpoints, as `Group` offers them. Only the group that `join` or `generations` returns has them."""

    def __init__(self, engine: CheckpointedEngine, of_run: Checkpoints | None, *, is_alone: bool) -> None:
        """`of_run` are the checkpoints of the run, None without a node. A group that `is_alone` has its own."""
        self._engine, self._of_run, self._is_alone = engine, of_run, is_alone
        self._known: Checkpoints | None = None
        """Those of the run, once the program has looked for one, or those of a group that is alone."""

    def pending(self) -> Checkpoint | None:
        """Return the checkpoint that this rank is to save now, or None; see `Group.checkpoint_pending`."""
        if self._known is not None and self._known.is_idle:
            return None
        engine = self._engine
        checkpoints = self._known = self.of_run()
        try:
            return checkpoints.look(engine, engine.facts.config.timeout)
        except ClosedError:
            engine.failure.require_open()  # raises the error that ended the group, if there is one
            raise

    def request_checkpoint(self, path: str = "", *, id: str = "", timeout: float = CHECKPOINT_CHOICE_SECONDS) -> str:
        """Ask all ranks to save a checkpoint, and return its id. On any rank and any thread.

        `path` is passed to the program of each rank as it is. A request with the `id` of an earlier checkpoint, one of
        the last 16, does nothing. If another checkpoint is requested or pending, this returns its id, and the request
        is for that one.

        Raises:
            DeadlineError: the ranks did not answer within `timeout` seconds.
        """
        return self.of_run().request(path, id, check_timeout(timeout))

    def end_checkpoint(self, error: str = "") -> None:
        """Tell that this rank has saved the pending checkpoint, or why it could not.

        When all remaining ranks have, the checkpoint is over, and an event tells so.

        Raises:
            ConfigError: no checkpoint is pending on this rank.
        """
        self.of_run().end(error)

    def of_run(self) -> Checkpoints:
        """Return the checkpoints of the run; raise ConfigError for a group that has none."""
        engine, known = self._engine, self._of_run
        if self._is_alone:
            engine.failure.require_open()
            if known is None:
                from covey.runtime.state.checkpoints import Checkpoints  # a group of one has loaded little of covey

                known = self._of_run = Checkpoints(None)
                known.follow(engine)
            return known
        if known is None or not known.is_of(engine):
            raise ConfigError(
                f"a checkpoint is one of the whole run: use the group that covey.join or covey.generations returned "
                f"last, or torch.distributed.group.WORLD.covey_group if there is one, not {engine.facts.name!r}"
            )
        return known
