"""Checkpoints of the run, as a program requests, sees and ends them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from covey.base.config import check_timeout
from covey.base.errors import ClosedError, ConfigError
from covey.runtime.group.issuer import Issuer

if TYPE_CHECKING:
    from covey.proto.checkpointing import Checkpoint
    from covey.runtime.state.checkpoints import Checkpoints

REQUEST_SECONDS: Final = 30.0
"""How long the ranks may take to agree which checkpoint a request is for."""


class CheckpointForms(Issuer):
    """What a group offers for checkpoints of its run. Only the group that `join` or `generations` returns has them."""

    _alone: Checkpoints | None = None
    """Those of a group of one, which has no node."""
    _known: Checkpoints | None = None
    """Those of the run, once the program has looked for one."""
    _parent_ranks: tuple[int, ...] | None

    @property
    def checkpoint_pending(self) -> Checkpoint | None:
        """The checkpoint that this rank is to save now, or None.

        It is set on all ranks after the same operation of this group. Operations count when they are issued: wait for
        your works before you save. `end_checkpoint` clears it. Reading it takes no time, except for the few
        milliseconds in which the ranks agree on a request.
        """
        if self._known is not None and self._known.is_idle:
            return None
        engine = self._engine
        checkpoints = self._known = self._checkpoints()
        try:
            return checkpoints.look(engine, engine.config.timeout)
        except ClosedError:
            engine.failure.require_open()  # raises the error that ended the group, if there is one
            raise

    def request_checkpoint(self, path: str = "", *, id: str = "", timeout: float = REQUEST_SECONDS) -> str:
        """Ask all ranks to save a checkpoint, and return its id. On any rank and any thread.

        `path` is passed to the program of each rank as it is. A request with the `id` of an earlier checkpoint, one of
        the last 16, does nothing. If another checkpoint is requested or pending, this returns its id, and the request
        is for that one.

        Raises:
            DeadlineError: the ranks did not answer within `timeout` seconds.
        """
        return self._checkpoints().request(path, id, check_timeout(timeout))

    def end_checkpoint(self, error: str = "") -> None:
        """Tell that this rank has saved the pending checkpoint, or why it could not.

        When all remaining ranks have, the checkpoint is over, and an event tells so.

        Raises:
            ConfigError: no checkpoint is pending on this rank.
        """
        self._checkpoints().end(error)

    def _checkpoints(self) -> Checkpoints:
        engine = self._engine
        if engine.node is None and self._parent_ranks is None:
            if engine.is_over:
                engine.failure.require_open()
            if self._alone is None:
                from covey.runtime.state.checkpoints import Checkpoints  # a group of one has loaded little of covey

                self._alone = Checkpoints(None)
                self._alone.follow(engine)
            return self._alone
        if engine.node is None or not engine.node.checkpoints.is_of(engine):
            raise ConfigError(
                f"a checkpoint is one of the whole run: use the group that covey.join or covey.generations returned "
                f"last, or torch.distributed.group.WORLD.covey_group if there is one, not {engine.name!r}"
            )
        return engine.node.checkpoints
