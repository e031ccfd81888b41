"""Means over ranks for DiLoCo and LocalSGD: in a process group of torch, or in one generation of a run after another.

In a generation, each rank has a row of exact figures in the same operation as the mean, so that the weights, the mean
and what the ranks say of themselves have the same contributors.
"""

from __future__ import annotations

import contextlib
import io
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist

from covey.base.errors import ConfigError, CoveyError, PeerLostError
from covey.compress.feedback import ErrorFeedback
from covey.compress.policy import make_policy
from covey.runtime.group.internals import gradients_of, policy_of, report_for_program, steps_between_checks
from covey.torch.backend.below import covey_group_of
from covey.torch.training.drift import DIGEST_FIGURES, DriftCheck, compare, digest, from_figures, to_figures
from covey.torch.training.gradient_mean import GradientMean

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from covey.compress.policy import CompressValue
    from covey.runtime.buffers import Part
    from covey.runtime.group.group import Group

RANK_WEIGHT: Final = 0
"""Where a rank's figures have how much its values count ..."""
RANK_STEP_SECONDS: Final = 1
"""... how long its steps take ..."""
RANK_DONE: Final = 2
"""... and the samples it was trained on."""
RANK_HEAD: Final = 3
"""The number of these figures; a digest follows."""
STATE_TAG: Final = 0x0D110C0
"""Tag of the messages with the state of an inner optimizer."""


class RankFigures(NamedTuple):
    """What the ranks said of themselves in a mean."""

    contributors: tuple[int, ...]
    step_seconds: list[float]
    """By rank: what an inner step takes; 0 of ranks that are lost, or do not know it yet."""
    done: list[int]
    """By rank: the samples that it was trained on since it said so last."""


class Averaging(Protocol):
    """Where means are made."""

    @property
    def size(self) -> int:
        """The number of ranks."""
        ...

    def start(self, row: torch.Tensor, parts: Sequence[Part], weight: float | None) -> Callable[[], torch.Tensor]:
        """Start to average a row over the ranks; return a function that waits for the mean, and returns it."""
        ...

    def settled(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        """Note that a mean was applied to tensors, which all ranks should hold alike now."""
        ...

    def report(self, step: int, values: dict[str, float]) -> None:
        """Tell views of the run about a step."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return what compression holds back."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Hold back what `state_dict` returned."""
        ...


class InProcessGroup:
    """Means in a process group of torch, of any backend."""

    def __init__(self, process_group: Any, compress: CompressValue) -> None:
        self._group = process_group
        self._mean, self._drift = GradientMean(compress, feedback=True), DriftCheck()

    @property
    def size(self) -> int:
        size: int = dist.get_world_size(self._group)
        return size

    def start(self, row: torch.Tensor, parts: Sequence[Part], weight: float | None) -> Callable[[], torch.Tensor]:
        work, finish = self._mean.start(row, parts, self._group, weight)

        def wait() -> torch.Tensor:
            work.wait()
            return finish()

        return wait

    def settled(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        self._drift.look(name, tensors, self._group)

    def report(self, step: int, values: dict[str, float]) -> None:
        if (group := covey_group_of(self._group)) is not None:
            report_for_program(group, step, values)

    def state_dict(self) -> dict[str, Any]:
        return self._mean.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._mean.load_state_dict(state)


class InGenerations:
    """Means among the members of a run, which `enter` each of its generations.

    A mean is over the members that are left; what a lost one has changed since its last part is lost with it.
    """

    def __init__(self, compress: CompressValue) -> None:
        """`compress` None is what the group was told to compress of gradients; "none" is exact."""
        self._policy = None if compress is None else make_policy(compress, smallest=0)
        self._group: Group | None = None
        self.feedback = ErrorFeedback()
        self._own = (0.0, 0)
        self._settled = 0
        """The means of this generation that were applied."""
        self._digest, self._digested = b"", ""
        """A digest that the next mean carries, and what it is of."""
        self.figures: RankFigures | None = None
        """Those of the last mean in this generation; equal on all ranks."""

    @property
    def group(self) -> Group:
        if self._group is None:
            raise ConfigError("call enter(group) with the group of each generation, before the first step in it")
        return self._group

    @property
    def size(self) -> int:
        return 1 if self._group is None else self._group.size

    def enter(self, group: Group) -> None:
        """Make means in this group from now on."""
        self._group, self._settled, self._digest, self.figures = group, 0, b"", None

    def change_compression(self, compress: CompressValue) -> None:
        """Use other codecs from the next mean on; all ranks call it after the same mean. Keeps what is held back."""
        self._policy = None if compress is None else make_policy(compress, smallest=0)

    def say(self, step_seconds: float, done: int) -> None:
        """Set what this rank says of itself in the next mean."""
        self._own = step_seconds, done

    def start(self, row: torch.Tensor, parts: Sequence[Part], weight: float | None) -> Callable[[], torch.Tensor]:
        group = self.group
        elements, length = row.numel(), RANK_HEAD + DIGEST_FIGURES
        sent = torch.zeros(elements + group.size * length, dtype=row.dtype)
        figures = sent[elements:].view(group.size, length)
        own = figures[group.rank]
        own[RANK_WEIGHT] = 1.0 if weight is None else weight
        own[RANK_STEP_SECONDS], own[RANK_DONE] = self._own
        self._own = self._own[0], 0
        if self._digest:
            own[RANK_HEAD:] = torch.tensor(to_figures(self._digest))
        what, self._digest = self._digested, b""
        if own[RANK_WEIGHT] > 0:  # what was made of no samples may be anything
            torch.mul(row.cpu(), float(own[RANK_WEIGHT]), out=sent[:elements])
        policy = policy_of(group) if self._policy is None else self._policy
        finish = gradients_of(group).start_row(sent.numpy(), parts, policy, self.feedback)

        def wait() -> torch.Tensor:
            contributors = tuple(int(rank) for rank in finish())
            total = float(figures[list(contributors), RANK_WEIGHT].double().sum())
            self.figures = RankFigures(
                contributors,
                [float(seconds) for seconds in figures[:, RANK_STEP_SECONDS].tolist()],
                [int(done) for done in figures[:, RANK_DONE].tolist()],
            )
            compare(
                {rank: from_figures(figures[rank, RANK_HEAD:].tolist()) for rank in contributors},
                what,
            )
            mean = sent[:elements]
            return (mean.div_(total) if total > 0 else mean.zero_()).to(row.device)

        return wait

    def settled(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        every = steps_between_checks(self.group)
        if every and self._settled % every == 0:
            self._digest, self._digested = digest(tensors), f"{name} after mean {self._settled} of this generation"
        self._settled += 1

    def report(self, step: int, values: dict[str, float]) -> None:
        report_for_program(self.group, step, values)

    def forget(self) -> None:
        """Forget what compression holds back: it belongs to parameters that were replaced."""
        self.feedback = ErrorFeedback()

    def state_dict(self) -> dict[str, Any]:
        return {
            part: {name: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for name, x in of_part.items()}
            for part, of_part in self.feedback.state_dict().items()
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            self.feedback.load_state_dict(
                {
                    part: {name: x.numpy() if isinstance(x, torch.Tensor) else x for name, x in of_part.items()}
                    for part, of_part in state.items()
                }
            )


def give_own_state(group: Group, holder: Any, donor: int, receivers: Sequence[int]) -> None:
    """Give `receivers` the state of the donor's `holder`, such as an optimizer, which is not the same on all ranks.

    Only these ranks need to call it. A receiver whose donor is lost keeps what it has.
    """
    if group.rank == donor:
        file = io.BytesIO()
        torch.save(holder.state_dict(), file)
        state = np.frombuffer(file.getvalue(), np.uint8).copy()
        for rank in receivers:
            with contextlib.suppress(PeerLostError):
                group.send(state, rank, tag=STATE_TAG)
    elif group.rank in receivers:
        with contextlib.suppress(PeerLostError):
            came = group.recv(donor, tag=STATE_TAG)
            holder.load_state_dict(torch.load(io.BytesIO(came.tobytes()), weights_only=True))


def drain(wait: Callable[[], torch.Tensor]) -> None:
    """Wait for a mean that is not used: its group has ended."""
    with contextlib.suppress(CoveyError):
        wait()
