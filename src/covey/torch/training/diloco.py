"""DiLoCo: many inner steps on each rank alone, then one outer step with the mean of their changes.

Douillard et al., "DiLoCo" (arXiv 2311.08105) and "Streaming DiLoCo" (arXiv 2501.18512).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from covey.base.errors import ConfigError
from covey.runtime.group.internals import report_for_program
from covey.torch.backend.below import covey_group_of
from covey.torch.training.drift import DriftCheck
from covey.torch.training.gradient_mean import GradientMean, consecutive
from covey.torch.training.local_sgd import (
    copy_from_first,
    flat,
    parameters_of,
    parts,
    trained_by,
    unknown_parameters,
    which_train,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from covey.compress.policy import CompressValue


class DiLoCo:
    """Takes an outer step with the parameters of `model` after each `every` steps of `inner`.

        diloco = DiLoCo(model, inner, every=32)
        ...
        inner.step()
        diloco.step()

    The outer gradient is the mean over the ranks of the parameters after the last outer step minus the parameters now.
    `outer` is an optimizer of the same parameters, by default `SGD(lr=0.7, momentum=0.9, nesterov=True)`. All ranks
    start with rank 0's parameters, including the frozen ones.

    `fragments` is the number of parts of about equal size that the parameters are cut into. Each part has its outer
    step at another time within the `every` steps, so that the network load is spread.

    With `overlap`, inner steps continue while an outer gradient is being averaged. A fragment's outer step is taken
    when the next fragment is sent (`every / fragments` steps later), and the change of the inner steps made meanwhile
    is added to its result. Call `finish()` after the last step.

    `compress` sends fewer bytes: a codec like "int8", or a mapping of names of parameters to codecs; by default what
    covey's group was told to compress of gradients. What an outer step loses is added to the next one.

    Parameters between outer steps, and what compression holds back, differ between ranks: to resume with the same
    numbers, each rank saves its own model, optimizers and `state_dict()`.

    Raises:
        ConfigError: an argument is out of range, an optimizer has parameters that `model` does not have, or one is
            sharded.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        inner: torch.optim.Optimizer,
        outer: torch.optim.Optimizer | None = None,
        *,
        every: int,
        fragments: int = 1,
        overlap: bool = False,
        process_group: Any = None,
        compress: CompressValue = None,
    ) -> None:
        self._parameters = trained_by(inner, model)
        self._model, self._inner, self._trains = model, inner, which_train(inner)
        names = list(self._parameters)
        if not 1 <= fragments <= min(every, len(names)):
            raise ConfigError(
                f"fragments={fragments}, every={every}, {len(names)} parameters: "
                "need 1 <= fragments <= every, and a parameter for each fragment"
            )
        self.outer = outer or torch.optim.SGD(self._parameters.values(), lr=0.7, momentum=0.9, nesterov=True)
        """The outer optimizer, for instance for a learning rate scheduler."""
        held = {id(parameter) for parameter in parameters_of(self.outer)}
        lacking = [name for name, parameter in self._parameters.items() if id(parameter) not in held]
        others = unknown_parameters(parameters_of(self.outer), self._parameters.values())
        if lacking or others:
            raise ConfigError(
                "the outer optimizer must have exactly the parameters that the inner one trains; "
                f"it lacks {', '.join(lacking) or 'none'}, and has {others or 'none'} besides"
            )
        self._group, self._overlap = process_group, overlap
        self._mean, self._drift = GradientMean(compress, feedback=True), DriftCheck()
        self._every, self._steps = every, 0
        sizes = [parameter.numel() for parameter in self._parameters.values()]
        self._fragments = [names[start:end] for start, end in _cuts(sizes, fragments)]
        copy_from_first(model, process_group)
        self._anchors = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        self._flying: _Flight | None = None

    def step(self) -> bool:
        """Count one inner step; return whether an outer step was taken after it.

        Raises:
            ConfigError: other parameters are trained now than at the start; says which.
        """
        if which_train(self._inner) != self._trains and (changes := self._changes()):
            raise ConfigError(f"{changes} since DiLoCo was made; make a new one")
        self._steps += 1
        if (group := covey_group_of(self._group)) is not None:
            report_for_program(group, self._steps, {})
        fragment = self._due()
        if fragment is None:
            return False
        landed = self._land()
        self._launch(fragment)
        if self._overlap:
            return landed
        return self._land()

    def finish(self) -> bool:
        """Take the pending outer step, if there is one; return whether there was."""
        return self._land()

    def state_dict(self) -> dict[str, Any]:
        """Return what a new DiLoCo needs to continue. Waits for a pending outer gradient, which stays pending."""
        flight = self._flying
        if flight is not None:
            flight.mean()  # what compression holds back of it is known now
        return {
            "steps": self._steps,
            "fragments": self._fragments,
            "anchors": {name: anchor.clone() for name, anchor in self._anchors.items()},
            "outer": self.outer.state_dict(),
            "feedback": self._mean.state_dict(),
            "flying": None
            if flight is None
            else {"fragment": flight.fragment, "left": flight.left.clone(), "mean": flight.mean().clone()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state of a DiLoCo with the same model and settings. The model's state is loaded separately.

        Raises:
            ConfigError: the state has other parameters, or other fragments.
        """
        if state["fragments"] != self._fragments:
            count = sum(map(len, state["fragments"]))
            raise ConfigError(
                f"the state is of {count} parameters in {len(state['fragments'])} fragments, "
                f"here are {len(self._parameters)} in {len(self._fragments)}; they must be the same"
            )
        if self._flying is not None:  # it belongs to the state that is replaced
            self._flying.mean()
            self._flying = None
        self._steps = state["steps"]
        for name, anchor in self._anchors.items():
            anchor.copy_(state["anchors"][name])
        self.outer.load_state_dict(state["outer"])
        self._mean.load_state_dict(state["feedback"])
        if (flying := state["flying"]) is not None:
            self._flying = _Flight(flying["fragment"], flying["left"].clone(), None, None, flying["mean"].clone())

    def _changes(self) -> str:
        """Return the names of parameters that are no longer trained, and of those that are now, in words."""
        held = [parameter for parameter in parameters_of(self._inner) if parameter.requires_grad]
        ids = {id(parameter) for parameter in held}
        trained = [name for name, parameter in self._model.named_parameters() if id(parameter) in ids]
        frozen = [name for name in self._parameters if name not in trained]
        added = [name for name in trained if name not in self._parameters]
        if others := unknown_parameters(held, self._model.parameters()):
            added.append(f"{others} that are not the model's")
        changes = {"frozen": frozen, "thawed or added": added}
        return ", and ".join(f"{', '.join(names)} was {what}" for what, names in changes.items() if names)

    def _due(self) -> int | None:
        """Return the fragment that is due after this step: number k of n at (k + 1) / n of every period."""
        count = len(self._fragments)
        for fragment in range(count):
            if (self._steps - (fragment + 1) * self._every // count) % self._every == 0:
                return fragment
        return None

    def _launch(self, fragment: int) -> None:
        """Start to average the change of the parameters in `fragment` over the ranks."""
        names = self._fragments[fragment]
        left = flat([self._parameters[name] for name in names])
        gone = flat([self._anchors[name] for name in names]) - left
        work, finish = self._mean.start(
            gone, consecutive([(name, self._anchors[name].shape) for name in names]), self._group
        )
        self._flying = _Flight(fragment, left, work, finish, gone)

    def _land(self) -> bool:
        """Take the pending outer step, and add the change of the inner steps made meanwhile to its result."""
        flight, self._flying = self._flying, None
        if flight is None:
            return False
        names = self._fragments[flight.fragment]
        parameters = [self._parameters[name] for name in names]
        with torch.no_grad():
            since = flat(parameters) - flight.left
            for name, gradient in zip(names, parts(flight.mean(), parameters), strict=True):
                self._parameters[name].copy_(self._anchors[name])
                self._anchors[name].copy_(
                    gradient
                )  # holds the gradient during the outer step; it becomes the anchor again below
            self._outer_step(names)
            for name, extra in zip(names, parts(since, parameters), strict=True):
                self._anchors[name].copy_(self._parameters[name])
                self._parameters[name].add_(extra)
            self._drift.look(f"anchors of fragment {flight.fragment}", [self._anchors[n] for n in names], self._group)
        return True

    def _outer_step(self, names: Sequence[str]) -> None:
        """Step the outer optimizer with the gradients of these parameters only; inner gradients are put back."""
        kept = {name: parameter.grad for name, parameter in self._parameters.items()}
        try:
            for name, parameter in self._parameters.items():
                parameter.grad = self._anchors[name] if name in names else None
            self.outer.step()
        finally:
            for name, parameter in self._parameters.items():
                parameter.grad = kept[name]


@dataclass(slots=True)
class _Flight:
    """A pending outer gradient."""

    fragment: int
    left: torch.Tensor
    """The parameters of this rank when it was sent."""
    work: Any
    """The work of the collective; None once it was waited for."""
    finish: Callable[[], torch.Tensor] | None
    """Returns the mean once the work is done."""
    sent: torch.Tensor
    """The outer gradient of this rank; after the wait, the mean."""

    def mean(self) -> torch.Tensor:
        """Wait, and return the mean outer gradient."""
        if self.work is not None:
            self.work.wait()
            assert self.finish is not None
            self.sent, self.work = self.finish(), None
        return self.sent


def _cuts(sizes: Sequence[int], count: int) -> list[tuple[int, int]]:
    """Cut a list into `count` runs of about equal weight, none of them empty."""
    cuts, start, left = [], 0, sum(sizes)
    for remaining in range(count, 0, -1):
        end, weight = start + 1, sizes[start]
        # Extend the run while that brings it closer to its share and leaves one item for each later run.
        while len(sizes) - end >= remaining and (remaining == 1 or weight + sizes[end] / 2 <= left / remaining):
            weight += sizes[end]
            end += 1
        cuts.append((start, end))
        start, left = end, left - weight
    return cuts
