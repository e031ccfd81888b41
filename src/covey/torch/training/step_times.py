"""Times the first steps of DistributedDataParallel, and says if training together is not worth it.

Nothing is exchanged for that: a rank knows how long its steps and forward passes take, and how long its process is in
operations. The other machines are taken to be like this one.
"""

from __future__ import annotations

import logging
import os
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any, Final

from covey.base.settings import SETTINGS
from covey.plan import training
from covey.runtime.counters import process
from covey.runtime.group.internals import tell_of_training

if TYPE_CHECKING:
    from collections.abc import Sequence

    from covey.plan.training import Learner, SlowestLine, TrainingWay
    from covey.runtime.group.group import Group

logger = logging.getLogger("covey")

ESTIMATE: Final = "COVEY_ESTIMATE"
"""Set by `covey estimate`: rank 0 prints all ways after the timed steps, and all ranks end."""
WARM_UP_STEPS: Final = 2
"""Steps that are not counted: DDP arranges its buckets anew after the first one."""
LEAST_STEPS: Final = 3
MOST_STEPS: Final = 12
TIMED_SECONDS: Final = 5.0
"""After so long, fewer steps are enough: a run says within ten seconds what is wrong with it."""
PASSES: Final = 3
"""A step computes at least as much as so many forward passes."""


class StepTimes:
    """Times the steps of one model, from one forward pass to the next, on one thread."""

    def __init__(self, group: Group, nbytes: int) -> None:
        """`nbytes` are those of the gradients, as float32."""
        self._group, self._nbytes = group, nbytes
        self._is_asked = is_asked()
        self._begun_at = self._first_at = 0.0
        self._spent = 0
        self._forward = 0.0
        self._steps: list[tuple[float, float, float]] = []
        """Seconds of each step: in all, in operations, and in the forward pass."""
        self.is_over = False

    def begin(self) -> None:
        """Note that a forward pass begins: the step before is over."""
        now, spent = time.perf_counter(), process.spent_ns()
        if self._begun_at:
            self._steps.append((now - self._begun_at, (spent - self._spent) / 1e9, self._forward))
        self._first_at = self._first_at or now
        self._begun_at, self._spent = now, spent
        counted = len(self._steps) - WARM_UP_STEPS
        if counted >= MOST_STEPS:
            self._end()
        elif counted >= LEAST_STEPS and now - self._first_at > TIMED_SECONDS and not self._is_asked:
            self._end()  # under `covey estimate`, all ranks end after the same step

    def forwarded(self) -> None:
        """Note that the forward pass is over."""
        self._forward = time.perf_counter() - self._begun_at

    def _end(self) -> None:
        self.is_over = True
        if self._group.rank == 0:
            lasted, spent, forward = (
                statistics.median(each) for each in zip(*self._steps[WARM_UP_STEPS:], strict=True)
            )
            sent, plain = process.coded()
            report(
                self._group,
                *measured(self._group.size, self._nbytes, (lasted, spent, forward), sent / plain if plain else 1.0),
                nbytes=self._nbytes,
            )
        if self._is_asked:
            sys.exit(0)


def measured(
    size: int, nbytes: int, step: tuple[float, float, float], ratio: float
) -> tuple[TrainingWay, list[Learner], SlowestLine]:
    """Return what is used, the members and the line, from the seconds of a step, its operations and its forward pass.

    `ratio` is how many bytes are sent of each byte of gradients.
    """
    lasted, spent, forward = step
    computed = min(lasted, max(lasted - spent, PASSES * forward, 1e-6))
    rate = 2 * (size - 1) / size * nbytes * ratio / max(spent, 1e-6)
    used = training.TrainingWay("ddp", "compressed" if ratio < 1 else "", 1, lasted, size / lasted, 1.0)
    return used, [training.Learner(computed, 1.0)] * size, training.SlowestLine(rate)


def report(group: Group, used: TrainingWay, members: Sequence[Learner], line: SlowestLine, *, nbytes: float) -> None:
    """Tell how fast the training is: an event, a warning if one machine alone is faster, a table if that was asked."""
    found = training.ways(members, nbytes, line)
    text = headline(used, members, line)
    wrong = training.verdict(used, found)
    tell_of_training(group, f"{text}. {wrong}".removesuffix(". "))
    if wrong.startswith("training together"):
        logger.warning(
            "%s. %s: use covey.torch.train_together, or one machine. `covey estimate` with this program shows all ways",
            text, wrong,
        )  # fmt: skip
    if is_asked():
        sys.stdout.write("\n".join([text, *training.table(used, members, nbytes, line)]) + "\n")
        sys.stdout.flush()


def is_asked() -> bool:
    """Tell whether `covey estimate` has started this program."""
    return SETTINGS["estimate"].kind.read(ESTIMATE, os.environ.get(ESTIMATE, "")) is True


def headline(used: TrainingWay, members: Sequence[Learner], line: SlowestLine) -> str:
    """Return the line about a training that views show."""
    computed = max(member.step_seconds for member in members)
    return (
        f"{len(members)} ranks, {used.text}: a step takes {_spell(used.step_seconds)}, {_spell(computed)} of it "
        f"computing; all_reduces at {line.bytes_per_second * 8 / 1e6:.3g} Mbit/s"
    )


def _spell(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def gradient_bytes(model: Any) -> int:
    """Return the bytes of the gradients of a model as float32."""
    return sum(parameter.numel() * 4 for parameter in model.parameters() if parameter.requires_grad)
