"""DiLoCo: many inner steps on each rank alone, then one outer step with the mean of their changes.

Douillard et al., "DiLoCo" (arXiv 2311.08105) and "Streaming DiLoCo" (arXiv 2501.18512). The outer learning rate and
momentum are those of `outer_rule`, which is made for periods of a few dozen steps; theirs are for hundreds.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from covey.base.errors import ConfigError
from covey.runtime.group.internals import report_for_program
from covey.torch.backend.below import covey_group_of
from covey.torch.training.drift import DriftCheck
from covey.torch.training.gradient_mean import GradientMean, consecutive
from covey.torch.training.local_sgd import (
    copy_from_first,
    parameters_of,
    trained_by,
    unknown_parameters,
    which_train,
)
from covey.torch.training.outer import OuterSteps, outer_rule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from covey.compress.policy import CompressValue

LATEST: Final = 4
"""With overlap, an outer step is taken at most this part of the period after its changes were sent: later ones cost
loss, because the ranks drift apart meanwhile."""


class DiLoCo:
    """Takes an outer step with the parameters of `model` after each `every` steps of `inner`.

        diloco = DiLoCo(model, inner, every=32)
        ...
        inner.step()
        diloco.step()
        ...
        diloco.finish()

    The outer gradient is the mean over the ranks of the parameters after the last outer step minus the parameters now.
    `outer` is an optimizer of the same parameters. By default it is SGD with Nesterov momentum 0.5, whose learning rate
    follows from the number of ranks: 0.71 for two, 0.75 for more. All ranks start with rank 0's parameters, including
    the frozen ones, which are never sent again.

    `fragments` is the number of parts of about equal size that the parameters are cut into. Each part has its outer
    step at another time within the `every` steps, so that the network load is spread.

    With `overlap`, inner steps continue while an outer gradient is being averaged. A fragment's outer step is taken
    `delay` inner steps after it was sent, by default a quarter of `every`, or `every / fragments` if that is less. What
    the inner steps change meanwhile stays in the parameters. Call `finish()` after the last step: it takes the pending
    outer step, and makes the parameters of all ranks their mean.

    Between outer steps the parameters of a rank are its own. Evaluate and save what all ranks agree on:

        with diloco.outer_parameters():
            loss = evaluate(model)

    `every` may differ between ranks: then each rank takes as many inner steps as it can in the time of the others, and
    all have the same number of outer steps. `step(samples)` weighs the change of a rank by the samples that it has
    trained on; all ranks give them, or none.

    `compress` sends fewer bytes: a codec like "int8", or a mapping of names of parameters to codecs; by default what
    covey's group was told to compress of gradients. What an outer step loses is added to the next one.

    Parameters between outer steps, and what compression holds back, differ between ranks: to resume with the same
    numbers, each rank saves its own model, optimizers and `state_dict()`. The inner optimizer keeps its own state.

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
        delay: int | None = None,
        process_group: Any = None,
        compress: CompressValue = None,
    ) -> None:
        self._parameters = trained_by(inner, model)
        self._model, self._inner, self._trains = model, inner, which_train(inner)
        if not 1 <= fragments <= min(every, len(self._parameters)):
            raise ConfigError(
                f"fragments={fragments}, every={every}, {len(self._parameters)} parameters: "
                "need 1 <= fragments <= every, and a parameter for each fragment"
            )
        self._group, self._overlap, self._delay = process_group, overlap, delay
        if delay is not None and not (overlap and 1 <= delay <= every // fragments):
            raise ConfigError(f"delay={delay}: it needs overlap=True, and must be from 1 to every / fragments")
        self._mean, self._drift = GradientMean(compress, feedback=True), DriftCheck()
        if outer is None:
            rule = outer_rule(dist.get_world_size(process_group))
            outer = torch.optim.SGD(
                self._parameters.values(), lr=rule.rate, momentum=rule.momentum, nesterov=rule.momentum > 0
            )
        self.outer = outer
        """The outer optimizer, for instance for a learning rate scheduler."""
        held = {id(parameter) for parameter in parameters_of(self.outer)}
        lacking = [name for name, parameter in self._parameters.items() if id(parameter) not in held]
        others = unknown_parameters(parameters_of(self.outer), self._parameters.values())
        if lacking or others:
            raise ConfigError(
                "the outer optimizer must have exactly the parameters that the inner one trains; "
                f"it lacks {', '.join(lacking) or 'none'}, and has {others or 'none'} besides"
            )
        self._every = self._next_every = every
        self._steps = self._in_period = 0
        copy_from_first(model, process_group)
        self._steps_of = OuterSteps(self._parameters, self.outer, fragments)
        self._samples: list[float | None] = [None] * fragments
        """By fragment: the samples since it was sent."""
        self._flying: _Flight | None = None

    @property
    def every(self) -> int:
        """The inner steps of this rank between two outer steps; a new value counts from the next period on."""
        return self._next_every

    @every.setter
    def every(self, steps: int) -> None:
        if steps < len(self._samples):
            raise ConfigError(f"every={steps}: a period needs a step for each of the {len(self._samples)} fragments")
        self._next_every = steps

    def step(self, samples: float | None = None) -> bool:
        """Count one inner step; return whether an outer step was taken after it.

        Raises:
            ConfigError: other parameters are trained now than at the start; says which. Or `samples` is no number of
                samples, or was given in some steps of a period and not in others.
        """
        if which_train(self._inner) != self._trains and (changes := self._changes()):
            raise ConfigError(f"{changes} since DiLoCo was made; make a new one")
        self._count(samples)
        self._steps += 1
        if (group := covey_group_of(self._group)) is not None:
            report_for_program(group, self._steps, {} if samples is None else {"samples": samples})
        flight, landed = self._flying, False
        if flight is not None:
            flight.steps_left -= 1
            landed = flight.steps_left <= 0 and self._land()
        self._in_period += 1
        fragment = self._due()
        if fragment is not None:
            landed |= self._land()
            self._launch(fragment)
            if not self._overlap:
                landed |= self._land()
        if self._in_period >= self._every:
            self._in_period, self._every = 0, self._next_every
        return landed

    def finish(self) -> None:
        """Take the pending outer step, and make the parameters of all ranks their mean: the end of a training.

        Every rank calls it.
        """
        self._land()
        for fragment in range(len(self._samples)):
            self._launch(fragment)
            flight, self._flying = self._flying, None
            assert flight is not None
            self._steps_of.settle(fragment, flight.mean())

    @contextlib.contextmanager
    def outer_parameters(self) -> Iterator[None]:
        """Let the model have the outer parameters inside a with statement: those that all ranks agree on."""
        with self._steps_of.as_parameters():
            yield

    def state_dict(self) -> dict[str, Any]:
        """Return what a new DiLoCo needs to continue. Waits for a pending outer gradient, which stays pending."""
        flight = self._flying
        if flight is not None:
            flight.mean()  # what compression holds back of it is known now
        return {
            "steps": self._steps,
            "in_period": self._in_period,
            "every": [self._every, self._next_every],
            "samples": list(self._samples),
            "fragments": self._steps_of.fragments,
            "anchors": {name: anchor.clone() for name, anchor in self._steps_of.anchors.items()},
            "outer": self.outer.state_dict(),
            "feedback": self._mean.state_dict(),
            "flying": None
            if flight is None
            else {
                "fragment": flight.fragment,
                "left": flight.left.clone(),
                "mean": flight.mean().clone(),
                "steps_left": flight.steps_left,
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state of a DiLoCo with the same model and settings. The model's state is loaded separately.

        Raises:
            ConfigError: the state has other parameters, or other fragments.
        """
        if state["fragments"] != self._steps_of.fragments:
            count = sum(map(len, state["fragments"]))
            raise ConfigError(
                f"the state is of {count} parameters in {len(state['fragments'])} fragments, "
                f"here are {len(self._parameters)} in {len(self._samples)}; they must be the same"
            )
        if self._flying is not None:  # it belongs to the state that is replaced
            self._flying.mean()
            self._flying = None
        self._steps, self._in_period = state["steps"], state["in_period"]
        self._every, self._next_every = state["every"]
        self._samples = list(state["samples"])
        for name, anchor in self._steps_of.anchors.items():
            anchor.copy_(state["anchors"][name])
        self.outer.load_state_dict(state["outer"])
        self._mean.load_state_dict(state["feedback"])
        if (flying := state["flying"]) is not None:
            self._flying = _Flight(
                flying["fragment"], flying["left"].clone(), None, None, flying["mean"].clone(), flying["steps_left"]
            )

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

    def _count(self, samples: float | None) -> None:
        """Add the samples of a step to what each fragment was trained on since it was sent."""
        if samples is not None and not 0 <= samples < float("inf"):
            raise ConfigError(f"samples={samples!r}: give the number of samples that this step has trained on")
        for fragment, so_far in enumerate(self._samples):
            if self._steps and (so_far is None) != (samples is None):
                raise ConfigError("samples must be given in every step, or in none")
            self._samples[fragment] = None if samples is None else (so_far or 0.0) + samples

    def _due(self) -> int | None:
        """Return the fragment that is due after this step: number k of n at (k + 1) / n of every period."""
        count = len(self._samples)
        for fragment in range(count):
            if self._in_period == (fragment + 1) * self._every // count:
                return fragment
        return None

    def _launch(self, fragment: int) -> None:
        """Start to average the change of the parameters in `fragment` over the ranks."""
        gone, left = self._steps_of.leave(fragment)
        shapes = [(name, self._parameters[name].shape) for name in self._steps_of.fragments[fragment]]
        samples = self._samples[fragment]
        self._samples[fragment] = None if samples is None else 0.0
        work, finish = self._mean.start(gone, consecutive(shapes), self._group, samples)
        delay = self._delay or max(1, self._every // max(LATEST, len(self._samples)))
        self._flying = _Flight(fragment, left, work, finish, gone, delay)

    def _land(self) -> bool:
        """Take the pending outer step, if there is one; return whether there was."""
        flight, self._flying = self._flying, None
        if flight is None:
            return False
        self._steps_of.land(flight.fragment, flight.left, flight.mean())
        anchors = [self._steps_of.anchors[name] for name in self._steps_of.fragments[flight.fragment]]
        self._drift.look(f"anchors of fragment {flight.fragment}", anchors, self._group)
        return True


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
    steps_left: int
    """Inner steps until the outer step is taken."""

    def mean(self) -> torch.Tensor:
        """Wait, and return the mean outer gradient."""
        if self.work is not None:
            self.work.wait()
            assert self.finish is not None
            self.sent, self.work = self.finish(), None
        return self.sent
