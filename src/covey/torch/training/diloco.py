"""DiLoCo: many inner steps on each rank alone, then one outer step with the mean of their changes.

Douillard et al., "DiLoCo" (arXiv 2311.08105) and "Streaming DiLoCo" (arXiv 2501.18512). The outer learning rate and
momentum are those of `outer_rule`, which is made for periods of a few dozen steps; theirs are for hundreds.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from covey.base.errors import ConfigError
from covey.torch.training.averaging import InGenerations, InProcessGroup, RankFigures, drain, give_own_state
from covey.torch.training.gradient_mean import consecutive
from covey.torch.training.local_sgd import (
    copy_from_first,
    parameters_of,
    trained_by,
    unknown_parameters,
    which_train,
)
from covey.torch.training.outer import OuterSteps, outer_rule
from covey.torch.training.own_pace import LATEST, PeriodClock
from covey.torch.training.structure import hand_over

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from covey.compress.policy import CompressValue
    from covey.runtime.group.group import Group


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

    With `generations=True` the ranks are those of `covey.generations`: members may be lost, leave, join and come back.

        diloco = DiLoCo(model, inner, every=20, generations=True)
        for group in covey.generations():
            with contextlib.suppress(covey.GroupChangedError):  # this process joins again
                diloco.enter(group)
                while not diloco.change_pending:
                    ...
                    inner.step()
                    diloco.step()

    The outer state survives as long as one member does: `enter` gives newcomers the outer parameters, the state of the
    outer optimizer and the position in the period, which are equal on all ranks, and a copy of the inner optimizer's
    state of the lowest rank. What a lost rank has changed since it last sent a fragment is lost with it. Then, with
    `own_pace`, a period is a time instead of a number of steps: in it, all ranks together take `every` inner steps for
    each of them, a slow machine fewer, a fast one more, and none waits for another; changes count by samples.

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
        generations: bool = False,
        own_pace: bool = False,
    ) -> None:
        self._parameters = trained_by(inner, model)
        self._model, self._inner, self._trains = model, inner, which_train(inner)
        if not 1 <= fragments <= min(every, len(self._parameters)):
            raise ConfigError(
                f"fragments={fragments}, every={every}, {len(self._parameters)} parameters: "
                "need 1 <= fragments <= every, and a parameter for each fragment"
            )
        self._overlap, self._delay, self._is_at_own_pace = overlap, delay, own_pace
        if delay is not None and not (overlap and 1 <= delay <= every // fragments):
            raise ConfigError(f"delay={delay}: it needs overlap=True, and must be from 1 to every / fragments")
        if (own_pace and not generations) or (generations and process_group is not None):
            raise ConfigError(
                "own_pace=True needs generations=True, and generations=True takes no process_group: its groups are "
                "those of covey.generations"
            )
        self._generations = InGenerations(compress) if generations else None
        self._over = self._generations or InProcessGroup(process_group, compress)
        self._is_by_rule = outer is None
        if outer is None:
            rule = outer_rule(self._over.size)
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
        self._steps = self._in_period = self._turn = self._done = 0
        """`_turn`: the fragment that is sent next. `_done`: samples since this rank said how many."""
        self._is_ending = False
        self._clock = PeriodClock()
        if self._generations is None:  # else enter gives newcomers what they need
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
        self.check_trained()
        self._clock.stop()
        self._count(samples)
        self._steps += 1
        self._over.report(self._steps, {} if samples is None else {"samples": samples})
        flight, landed = self._flying, False
        if flight is not None:
            flight.steps_left -= 1
            landed = self._is_due(flight) and self._land()
        self._in_period += 1
        # In generations, nothing is under way after an outer step: all ranks are at the same place, and may call
        # collectives of their own, or ask for the next generation.
        may_send = not self._is_ending and not (landed and self._generations is not None)
        if may_send and self._is_turn():
            landed |= self._exchange()
        self._clock.start()
        return landed

    def check_trained(self) -> None:
        """Check that the optimizer trains the same parameters as at the start.

        Raises:
            ConfigError: it trains others; says which.
        """
        if which_train(self._inner) != self._trains and (changes := self._changes()):
            raise ConfigError(f"{changes} since DiLoCo was made; make a new one")

    def send(self) -> bool:
        """Wait for the pending outer step, or send the next fragment before its time: this rank has no data.

        For ranks of a run that are at their own pace. Return whether an outer step was taken.
        """
        landed = not self._is_ending and self._exchange()
        self._clock.start()
        return landed

    @property
    def change_pending(self) -> bool:
        """Whether the next generation should start; true on all ranks after the same outer step.

        Until `enter` is called, steps send nothing.
        """
        return self._is_ending

    @property
    def figures(self) -> RankFigures | None:
        """What the ranks of a generation said of themselves in the last outer step; None before it."""
        return None if self._generations is None else self._generations.figures

    @property
    def step_seconds(self) -> float:
        """What an inner step takes on this rank, without the exchange; 0 before the second one."""
        return self._clock.step_seconds

    def enter(self, group: Group, extra: Mapping[str, Any] | None = None) -> None:
        """Begin a generation: newcomers get the outer state, and `extra`, named objects with `load_state_dict`.

        `extra` must be equal on all ranks. Every rank calls it at the start of a generation.
        """
        if self._generations is None:
            raise ConfigError("enter() is for DiLoCo(..., generations=True)")
        if self._flying is not None:  # of a generation that has ended without this process
            drain(self._flying.mean)
            self._flying = None
        self._generations.enter(group)
        self._is_ending = False
        if self._is_by_rule:
            rule = outer_rule(group.size)
            for settings in self.outer.param_groups:
                settings.update(lr=rule.rate, momentum=rule.momentum, nesterov=rule.momentum > 0)
        own = self._steps_of.own_parameters()
        self._steps_of.show(self._steps_of.anchors)
        report = hand_over(group, self._model, {"diloco": _SharedTurn(self), "outer": self.outer, **(extra or {})})
        if group.rank in report.receivers:
            self._steps_of.take_parameters_as_anchors()
            self._generations.forget()
            self._samples, self._done = [None] * len(self._samples), 0
        else:
            self._steps_of.show(own)
        if report.receivers and not report.first:
            give_own_state(group, self._inner, report.donors[0], report.receivers)
        self._in_period = self._turn * self._every // len(self._samples)
        self._clock.begin_period(self._turn, len(self._samples))

    def rebase(self) -> None:
        """Let the outer parameters be those that all ranks hold alike now; forget momentum and what was not sent.

        In generations, all ranks call it after the same outer step, or after training in another way.
        """
        self._steps_of.take_parameters_as_anchors()
        self.outer.state.clear()
        if self._generations is not None:
            self._generations.forget()
        self._samples, self._done = [None] * len(self._samples), 0
        self._in_period = self._turn = 0
        self._clock.begin_period(0, len(self._samples))

    def retune(self, every: int, compress: CompressValue, figures: RankFigures | None = None) -> None:
        """Change the period and the codec; all ranks of a generation call it alike, after the same outer step.

        `figures` say how fast the ranks are, if no outer step has done so yet.
        """
        self.every = self._every = every
        if self._generations is not None:
            self._generations.change_compression(compress)
        if figures is not None:
            self._clock.agree(figures, every, len(self._samples))

    @property
    def period_seconds(self) -> float:
        """How long a period lasts at the ranks' own pace, as all ranks have computed it; 0 while it is unknown."""
        return self._clock.period_seconds

    def flush(self) -> list[RankFigures]:
        """Take the pending outer step, and one with each fragment at once: all that the ranks have learned is sent.

        Every rank of a generation calls it after the same outer step, for instance because one of them leaves. Return
        what the ranks said of themselves in each exchange.
        """
        return self._send_all(self._land)

    def finish(self) -> list[RankFigures]:
        """Take the pending outer step, and make the parameters of all ranks their mean: the end of a training.

        Every rank calls it. Return what the ranks of a generation said of themselves in each exchange.
        """
        return self._send_all(self._settle)

    def _send_all(self, end: Callable[[], object]) -> list[RankFigures]:
        """Send all fragments, one after the other; `end` ends the flight of each."""
        told = [self.figures] if self._land() else []
        for fragment in range(len(self._samples)):
            self._launch(fragment)
            end()
            told.append(self.figures)
        return [figures for figures in told if figures is not None]

    def _settle(self) -> None:
        flight, self._flying = self._flying, None
        assert flight is not None
        self._steps_of.settle(flight.fragment, flight.mean())

    @contextlib.contextmanager
    def outer_parameters(self) -> Iterator[None]:
        """Let the model have the outer parameters inside a with statement: those that all ranks agree on."""
        with self._steps_of.as_parameters():
            yield

    def outer_state(self) -> dict[str, Any]:
        """Return what all ranks of a generation hold alike, but for the outer parameters, for a checkpoint of all."""
        return {"position": _SharedTurn(self).state_dict(), "outer": self.outer.state_dict()}

    def load_outer_state(self, state: Mapping[str, Any]) -> None:
        """Continue from the outer parameters that the model has now, and what `outer_state` returned.

        Call it before `enter`, at least on rank 0, whose state the others get.
        """
        self.rebase()
        self.outer.load_state_dict(state["outer"])
        _SharedTurn(self).load_state_dict(state["position"])

    def state_dict(self) -> dict[str, Any]:
        """Return what a new DiLoCo needs to continue. Waits for a pending outer gradient, which stays pending."""
        flight = self._flying
        if flight is not None:
            flight.mean()  # what compression holds back of it is known now
        return {
            "steps": self._steps,
            "in_period": self._in_period,
            "turn": self._turn,
            "every": [self._every, self._next_every],
            "samples": list(self._samples),
            "fragments": self._steps_of.fragments,
            "anchors": {name: anchor.clone() for name, anchor in self._steps_of.anchors.items()},
            "outer": self.outer.state_dict(),
            "feedback": self._over.state_dict(),
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
        self._steps, self._in_period, self._turn = state["steps"], state["in_period"], state["turn"]
        self._every, self._next_every = state["every"]
        self._samples = list(state["samples"])
        for name, anchor in self._steps_of.anchors.items():
            anchor.copy_(state["anchors"][name])
        self.outer.load_state_dict(state["outer"])
        self._over.load_state_dict(state["feedback"])
        if (flying := state["flying"]) is not None:
            mean = flying["mean"].clone()
            self._flying = _Flight(flying["fragment"], flying["left"].clone(), lambda: mean, flying["steps_left"])

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
        if self._is_at_own_pace and samples is None:
            samples = 1.0  # steps count
        self._done += int(samples or 0)
        for fragment, so_far in enumerate(self._samples):
            if self._steps and self._generations is None and (so_far is None) != (samples is None):
                raise ConfigError("samples must be given in every step, or in none")
            self._samples[fragment] = None if samples is None else (so_far or 0.0) + samples

    def _is_turn(self) -> bool:
        """Tell whether a fragment is sent after this step: number k of n at (k + 1) / n of every period."""
        if self._is_at_own_pace and self._clock.period_seconds:
            return self._clock.is_due(self._turn, len(self._samples))
        due: int = (self._turn + 1) * self._every // len(self._samples)
        return self._in_period >= due

    def _is_due(self, flight: _Flight) -> bool:
        return self._clock.has_flown(flight.sent_at) if self._is_at_own_pace else flight.steps_left <= 0

    def _exchange(self) -> bool:
        """Send the fragment whose turn it is, after the pending outer step; return whether an outer step was taken."""
        landed = self._land()
        if self._is_ending or (landed and self._generations is not None):
            return landed
        self._launch(self._turn)
        self._turn += 1
        if self._turn == len(self._samples):
            self._turn = self._in_period = 0
            self._every = self._next_every
            self._clock.end_period()
        if not self._overlap:
            landed |= self._land()
        return landed

    def _launch(self, fragment: int) -> None:
        """Start to average the change of the parameters in `fragment` over the ranks."""
        gone, left = self._steps_of.leave(fragment)
        shapes = [(name, self._parameters[name].shape) for name in self._steps_of.fragments[fragment]]
        samples = self._samples[fragment]
        self._samples[fragment] = None if samples is None and not self._is_at_own_pace else 0.0
        if self._generations is not None:
            self._generations.say(self._clock.step_seconds, self._done)
            self._done = 0
            if self._is_at_own_pace and samples is None:
                samples = 0.0  # a newcomer that has not taken a step
        wait = self._over.start(gone, consecutive(shapes), samples)
        delay = self._delay or max(1, self._every // max(LATEST, len(self._samples)))
        self._flying = _Flight(fragment, left, wait, delay)

    def _land(self) -> bool:
        """Take the pending outer step, if there is one; return whether there was."""
        flight, self._flying = self._flying, None
        if flight is None:
            return False
        began = time.monotonic()
        mean = flight.mean()
        self._clock.shift(time.monotonic() - began)
        self._steps_of.land(flight.fragment, flight.left, mean)
        anchors = [self._steps_of.anchors[name] for name in self._steps_of.fragments[flight.fragment]]
        self._over.settled(f"the outer parameters of fragment {flight.fragment}", anchors)
        if self._generations is not None:
            self._is_ending = self._generations.group.change_pending
            if self._is_at_own_pace and self.figures is not None:
                self._clock.agree(self.figures, self._every, len(self._samples))
        return True


@dataclass(slots=True)
class _Flight:
    """A pending outer gradient."""

    fragment: int
    left: torch.Tensor
    """The parameters of this rank when it was sent."""
    wait: Callable[[], torch.Tensor]
    """Waits for the mean outer gradient, and returns it."""
    steps_left: int
    """Inner steps until the outer step is taken."""
    sent_at: float = 0.0

    def __post_init__(self) -> None:
        self.sent_at = time.monotonic()

    def mean(self) -> torch.Tensor:
        """Wait, and return the mean outer gradient; a later call returns it again."""
        mean = self.wait()
        self.wait = lambda: mean
        return mean


class _SharedTurn:
    """The part of a DiLoCo's position that all ranks share, for newcomers."""

    def __init__(self, diloco: DiLoCo) -> None:
        self._diloco = diloco

    def state_dict(self) -> dict[str, Any]:
        diloco = self._diloco
        return {"turn": diloco._turn, "every": diloco._next_every, "seconds": diloco._clock.period_seconds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        diloco = self._diloco
        diloco._turn, diloco._every, diloco._next_every = state["turn"], state["every"], state["every"]
        diloco._clock.period_seconds = state["seconds"]
