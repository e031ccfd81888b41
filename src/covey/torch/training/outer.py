"""Outer steps: what DiLoCo makes of the parameters' changes on all ranks, without the exchange of these changes.

Invariant: every change that inner steps make is sent once. What they change while a mean is under way stays in the
parameters of the rank, and is part of its next change.
"""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from covey.torch.training.local_sgd import flat, parts

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

OUTER_MOMENTUM: Final = 0.5
"""The outer steps remember two periods: with 0.9 and a period of a few dozen steps, they overshoot."""
STIFF_GAIN: Final = 2 * (1 + OUTER_MOMENTUM) / ((1 - OUTER_MOMENTUM) * (1 + 2 * OUTER_MOMENTUM))
"""The gain from which outer steps diverge in directions that the inner steps of one period settle (Nesterov)."""


class OuterRule(NamedTuple):
    """The learning rate and the Nesterov momentum of outer steps."""

    rate: float
    momentum: float

    @property
    def gain(self) -> float:
        """How many times a steady mean change is taken in the long run."""
        return self.rate / (1 - self.momentum)


def outer_rule(members: int) -> OuterRule:
    """Return the outer learning rate and momentum for so many members.

    Where noise dominates a gradient, optimizers that divide by its size, as Adam does, take steps on the mean gradient
    of n members that are sqrt(n) times as long as the mean of their own steps. So the gain is sqrt(n); but at most half
    of what makes outer steps diverge. One member takes its own change as it is.
    """
    if members <= 1:
        return OuterRule(1.0, 0.0)
    return OuterRule((1 - OUTER_MOMENTUM) * min(math.sqrt(members), STIFF_GAIN / 2), OUTER_MOMENTUM)


class OuterSteps:
    """Holds the outer parameters of one rank, and takes outer steps with parts of them, called fragments."""

    def __init__(
        self, parameters: Mapping[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer, fragments: int
    ) -> None:
        """`optimizer` has these parameters; `fragments` is a number from 1 to theirs."""
        self._parameters, self.optimizer = parameters, optimizer
        names = list(parameters)
        self.fragments = [
            names[start:end] for start, end in cuts([each.numel() for each in parameters.values()], fragments)
        ]
        """The names of the parameters of each fragment."""
        self.anchors = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        """The outer parameters, which are equal on all ranks: those after the last outer step."""

    def leave(self, fragment: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the change of a fragment since its last outer step, with its sign turned, and what it is now."""
        names = self.fragments[fragment]
        left = flat([self._parameters[name] for name in names])
        return flat([self.anchors[name] for name in names]) - left, left

    def land(self, fragment: int, left: torch.Tensor, mean: torch.Tensor) -> None:
        """Take an outer step with the mean over the ranks of what `leave` returned.

        What inner steps have changed since `left` stays.
        """
        names = self.fragments[fragment]
        parameters = [self._parameters[name] for name in names]
        with torch.no_grad():
            since = flat(parameters) - left
            for name, gradient in zip(names, parts(mean, parameters), strict=True):
                self._parameters[name].copy_(self.anchors[name])
                self.anchors[name].copy_(gradient)  # holds the gradient during the step, and is the anchor again below
            self._step(names)
            for name, extra in zip(names, parts(since, parameters), strict=True):
                self.anchors[name].copy_(self._parameters[name])
                self._parameters[name].add_(extra)

    def settle(self, fragment: int, mean: torch.Tensor) -> None:
        """Make a fragment the plain mean over the ranks, on all of them: the end of a training."""
        names = self.fragments[fragment]
        with torch.no_grad():
            for name, gone in zip(names, parts(mean, [self._parameters[name] for name in names]), strict=True):
                self.anchors[name].sub_(gone)
                self._parameters[name].copy_(self.anchors[name])

    @contextlib.contextmanager
    def as_parameters(self) -> Iterator[None]:
        """Let the parameters be the outer ones inside a with statement."""
        own = self.own_parameters()
        self.show(self.anchors)
        try:
            yield
        finally:
            self.show(own)

    def own_parameters(self) -> dict[str, torch.Tensor]:
        """Return a copy of the parameters of this rank."""
        return {name: parameter.detach().clone() for name, parameter in self._parameters.items()}

    def show(self, values: Mapping[str, torch.Tensor]) -> None:
        """Let the parameters have these values."""
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(values[name])

    def take_parameters_as_anchors(self) -> None:
        """Let the outer parameters be what the parameters are now."""
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                self.anchors[name].copy_(parameter)

    def _step(self, names: Sequence[str]) -> None:
        """Step the optimizer with the gradients of these parameters only; inner gradients are put back."""
        kept = {name: parameter.grad for name, parameter in self._parameters.items()}
        try:
            for name, parameter in self._parameters.items():
                parameter.grad = self.anchors[name] if name in names else None
            self.optimizer.step()
        finally:
            for name, parameter in self._parameters.items():
                parameter.grad = kept[name]


def cuts(sizes: Sequence[int], count: int) -> list[tuple[int, int]]:
    """Cut a list into `count` runs of about equal weight, none of them empty."""
    found, start, left = [], 0, sum(sizes)
    for remaining in range(count, 0, -1):
        end, weight = start + 1, sizes[start]
        # Extend the run while that brings it closer to its share and leaves one item for each later run.
        while len(sizes) - end >= remaining and (remaining == 1 or weight + sizes[end] / 2 <= left / remaining):
            weight += sizes[end]
            end += 1
        found.append((start, end))
        start, left = end, left - weight
    return found
