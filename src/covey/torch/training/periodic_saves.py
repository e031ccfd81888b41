"""Checkpoints that an elastic training saves by itself, and to which it returns if its state is lost."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

from covey.base.errors import CheckpointError, ConfigError, CoveyError
from covey.torch.training.checkpoint import load, save

if TYPE_CHECKING:
    from collections.abc import Mapping

    from covey.runtime.group.group import Group
    from covey.torch.training.checkpoint import Saving

logger = logging.getLogger("covey")

SAVE_END_SECONDS: Final = 300.0
"""How long the end of a generation waits for a checkpoint that is being written."""


class PeriodicSaves:
    """Saves the parts of a training every so many steps, on the machines of the run; see `Elastic.keep_checkpoints`."""

    def __init__(self, parts: Mapping[str, Any], every: int, keep: int, *, resume: bool) -> None:
        """`parts` are objects with `state_dict` and `load_state_dict`."""
        if every < 1 or keep < 1:
            raise ConfigError(f"every={every}, keep={keep}: both must be at least 1")
        self._parts, self._every, self._keep = dict(parts), every, keep
        self.resume = resume
        """Whether a training that begins continues from an earlier checkpoint."""
        self._saving: Saving | None = None

    def is_due(self, step: int) -> bool:
        return step > 0 and step % self._every == 0

    def save(self, group: Group, step: int) -> None:
        """Start to save the state after so many steps. Every rank of the group calls it, with the same state."""
        self.settle()
        self._saving = save(dict(self._parts), step=step, keep=self._keep, process_group=group, async_=True)

    def settle(self) -> None:
        """Wait for the save that is under way; if it failed, the training goes on, and earlier checkpoints are left."""
        saving, self._saving = self._saving, None
        if saving is not None:
            try:
                saving.wait(SAVE_END_SECONDS)
            except (CoveyError, OSError) as error:
                logger.warning("a checkpoint was not saved: %s", error)

    def load(self, group: Group) -> int | None:
        """Load the newest checkpoint on all ranks of the group; return its step, or None if there is none."""
        try:
            return load(dict(self._parts), process_group=group)
        except CheckpointError as error:
            if group.rank == min(group.contributors):
                logger.warning("no checkpoint was loaded: %s", error)
            return None
