"""A training loop over the generations of a run: its group, its place in the data, and what newcomers get of it.

Invariants: the place is equal on all ranks between steps. What a loop holds of a generation is let go before the next
one begins, also if the generation ended without this process, or while it entered.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from covey.base.errors import ConfigError, GroupChangedError
from covey.runtime.joining.generations import generations

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping, Sequence

    from covey.runtime.group.group import Group
    from covey.torch.training.sampler import ElasticSampler

Given = TypeVar("Given")


class GenerationLoop(ABC, Generic[Given]):
    """Yields what a rank trains on, from one generation of a run to the next, until all epochs are done."""

    def __init__(
        self,
        sampler: ElasticSampler,
        epochs: int,
        parts: Mapping[str, Any],
        extra: Mapping[str, Any] | None,
        **options: Any,
    ) -> None:
        """`parts` and `extra` are what newcomers get besides the model: named objects with `state_dict`.

        A part that is None only keeps its name from `extra`. `options` go to `covey.generations`.
        """
        if epochs < 0:
            raise ConfigError(f"epochs={epochs} must be at least 0")
        if taken := sorted({"model", *parts} & (extra or {}).keys()):
            raise ConfigError(
                f"extra has {', '.join(taken)}, which {type(self).__name__} passes on itself; use other names"
            )
        self._parts = {name: part for name, part in {**parts, **(extra or {})}.items() if part is not None}
        self._sampler, self._epochs, self._options = sampler, epochs, options
        self._samples = self._lost = 0
        self._group: Group | None = None
        self._working: Sequence[int] = ()
        """The ranks that get samples: those that took part in the last exchange. Equal on all ranks."""
        self._is_outside = False
        """Whether the others continue without this process, which joins again."""

    def __iter__(self) -> Iterator[Given]:
        groups = cast("Generator[Group]", generations(**self._options))
        with contextlib.closing(groups):
            for group in groups:
                with contextlib.suppress(GroupChangedError):  # this process joins again with the next group
                    try:
                        self._enter(group)
                        yield from self._give_out(group)
                    finally:
                        self._let_go()
                    if self.done:
                        self._finish()
                        return

    @abstractmethod
    def _enter(self, group: Group) -> None:
        """Begin a generation: set `_group` and `_working`, and give newcomers the state."""

    @abstractmethod
    def _give_out(self, group: Group) -> Iterator[Given]:
        """Yield until the generation ends, which it does after the same exchange on all ranks."""

    @abstractmethod
    def _let_go(self) -> None:
        """Let go of what belongs to the generation that has ended, perhaps before this rank had entered it."""

    @abstractmethod
    def _finish(self) -> None:
        """Make the models of all ranks equal: all epochs are done."""

    @property
    def group(self) -> Group:
        """The group of the current generation."""
        if self._group is None:
            raise ConfigError("there is no group before the loop has started")
        return self._group

    @property
    def is_first(self) -> bool:
        """Whether this is the lowest remaining rank: the one that should print and save checkpoints."""
        return self.group.rank == min(self._working)

    @property
    def epoch(self) -> int:
        """The epoch of the next batch. The last step of an epoch advances it."""
        return self._sampler.epoch

    @property
    def samples(self) -> int:
        """The number of samples that all ranks have trained on, over all epochs, as of the last exchange."""
        return self._samples

    @property
    def lost(self) -> int:
        """The number of samples that were given out again because their rank was lost."""
        return self._lost

    @property
    def done(self) -> bool:
        """Whether all epochs are done. False after the loop means that this process was asked to leave."""
        return self._sampler.epoch >= self._epochs

    def _place(self) -> dict[str, Any]:
        """Return the place in the data, which `_go_to` loads."""
        return {"samples": self._samples, "lost": self._lost, "sampler": self._sampler.state_dict()}

    def _go_to(self, state: Mapping[str, Any]) -> None:
        self._samples, self._lost = state["samples"], state["lost"]
        self._sampler.load_state_dict(state["sampler"])
