"""Error feedback: what a lossy codec leaves out of one step is added to the next.

Each rank keeps a residual for each array, by name. Over many steps, the sum of what was sent is the exact sum, less the
residual of the last step. With a rank that is lost, its residual is lost: the sum misses at most what that rank had not
sent yet. A newcomer starts with residuals of zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from covey.base.errors import ConfigError
from covey.compress.codec import clear_non_finite

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from covey.compress.codec import Floats
    from covey.compress.kernels import Indices

_PARTS: Final = ("steps", "residuals", "velocities")


@dataclass
class _Memory:
    """What is remembered under one name."""

    shape: tuple[int, ...]
    residual: Floats
    """Flat."""
    velocity: Floats | None = None
    """Flat; None until momentum is used."""
    step: int = 0
    """Operations that have succeeded."""
    basis: Floats | None = None
    """Where the next low-rank approximation starts."""


class ErrorFeedback:
    """Residuals of one process, by the names of its arrays. Pass the same object to every step.

    Args:
        warmup: steps at the start of each name that are sent uncompressed, while gradients change fast.
        momentum: the momentum of your optimiser, like 0.9, if you train with a sparsifier (topk, randomk, threshold):
            elements then gather momentum before they are sent, instead of in the optimiser, whose own momentum must be
            0. This is the momentum correction of Deep Gradient Compression. It does nothing for other codecs.
    """

    def __init__(self, warmup: int = 0, momentum: float | None = None) -> None:
        if not isinstance(warmup, int) or isinstance(warmup, bool) or warmup < 0:
            raise ConfigError(f"warmup is {warmup!r}; give a number of steps, like 100")
        is_number = isinstance(momentum, int | float) and not isinstance(momentum, bool)
        if momentum is not None and not (is_number and 0 <= momentum < 1):
            raise ConfigError(f"momentum is {momentum!r}; give a number from 0 to below 1, like 0.9, or None")
        self._warmup = warmup
        self._momentum = momentum
        self._memories: dict[str, _Memory] = {}

    def begin(self, name: str, x: NDArray[Any], *, is_sparse: bool = False) -> FeedbackStep:
        """Return the step of one operation on the array `x`; nothing changes here until the step is committed.

        Args:
            name: what the array is called in every step.
            x: the array; only its shape matters.
            is_sparse: whether a sparsifier chooses what is sent.

        Raises:
            ConfigError: the array had another shape before.
        """
        memory = self._memories.get(name)
        if memory is None:
            memory = _Memory(x.shape, np.zeros(x.size, np.float32))
        elif memory.shape != x.shape:
            shapes = f"{memory.shape} before and is {x.shape} now"
            raise ConfigError(f"error feedback: {name!r} was {shapes}; name it differently, or reset({name!r}) first")
        return FeedbackStep(self, name, memory, self._momentum if is_sparse else None)

    @property
    def warmup(self) -> int:
        """How many steps of each name are sent uncompressed."""
        return self._warmup

    def names(self) -> tuple[str, ...]:
        """Return the names with a residual, in the order of their first step."""
        return tuple(self._memories)

    @property
    def nbytes(self) -> int:
        """Return the memory that residuals take."""
        arrays = [each for memory in self._memories.values() for each in (memory.residual, memory.velocity)]
        return sum(array.nbytes for array in arrays if array is not None)

    def reset(self, name: str | None = None) -> None:
        """Forget the residual of a name, or all. The steps are counted from 0 again."""
        if name is None:
            self._memories.clear()
        else:
            self._memories.pop(name, None)

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return copies of all residuals and counters, for a checkpoint. Each rank has its own."""
        memories = self._memories.items()
        return {
            "steps": {name: memory.step for name, memory in memories},
            "residuals": {name: memory.residual.reshape(memory.shape).copy() for name, memory in memories},
            "velocities": {
                name: memory.velocity.reshape(memory.shape).copy()
                for name, memory in memories
                if memory.velocity is not None
            },
        }

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Replace all residuals and counters by copies of what `state_dict` returned.

        Raises:
            ConfigError: the contents are not those of a `state_dict`. Nothing has changed then.
        """
        if (
            not hasattr(state, "keys")
            or set(state) != set(_PARTS)
            or not all(hasattr(state[p], "items") for p in _PARTS)
        ):
            raise ConfigError(f"error feedback: the state has not the parts {', '.join(_PARTS)}")
        steps, residuals, velocities = (state[part] for part in _PARTS)
        if steps.keys() != residuals.keys() or not velocities.keys() <= residuals.keys():
            raise ConfigError("error feedback: the parts of the state have different names")
        loaded = {}
        for name, residual in residuals.items():
            memory = _Memory(np.shape(residual), _checked(name, residual), step=steps[name])
            if not isinstance(memory.step, int) or isinstance(memory.step, bool) or memory.step < 1:
                raise ConfigError(f"error feedback: the state of {name!r} has {memory.step!r} steps")
            if name in velocities:
                if np.shape(velocities[name]) != memory.shape:
                    raise ConfigError(f"error feedback: the state of {name!r} has two shapes")
                memory.velocity = _checked(name, velocities[name])
            loaded[name] = memory
        self._memories = loaded


class FeedbackStep:
    """One operation on one array. It can be tried again, after the loss of a rank, until it is committed."""

    def __init__(self, feedback: ErrorFeedback, name: str, memory: _Memory, momentum: float | None) -> None:
        self._feedback = feedback
        self._name = name
        self._memory = memory
        self._momentum = momentum
        self._velocity: Floats | None = None
        self._is_committed = False
        self._began_at = memory.step
        self.step: int = memory.step
        """Operations that have succeeded before this one; a rank that joined later counts the warm-up of the others as
        its own. While it is below `warmup`, the array is sent as it is, with the residual added, and no residual is
        left."""
        self.basis: Floats | None = memory.basis
        """Where a low-rank approximation starts; None at first."""
        self.residual: Floats = memory.residual.view()
        """What the steps before left out. Flat, and read-only."""
        self.residual.flags.writeable = False

    def add_to(self, work: Floats) -> None:
        """Add the residual to a flat copy of the gradient. With momentum, add the momentum, too."""
        with np.errstate(invalid="ignore", over="ignore"):
            if self._momentum is not None:
                self._velocity = work.copy()
                if self._memory.velocity is not None:
                    self._velocity += np.float32(self._momentum) * self._memory.velocity
                work[:] = self._velocity
            work += self.residual

    def commit(
        self, new_residual: Floats | None = None, sent: Indices | None = None, basis: Floats | None = None
    ) -> None:
        """Keep what the operation left out; call it once, after the operation has succeeded on all ranks.

        Args:
            new_residual: what was not sent of the array that `add_to` made, flat; elements that are not finite count as
                0. None if everything was sent.
            sent: the indices that a sparsifier sent. They lose their momentum, which is part of what was sent.
            basis: where the next low-rank approximation starts.
        """
        memory, memories = self._memory, self._feedback._memories
        if self._is_committed:
            raise RuntimeError(f"error feedback: step {self.step} of {self._name!r} was committed twice")
        is_known = self._began_at > 0
        if memory.step != self._began_at or memories.get(self._name) is not (memory if is_known else None):
            cause = "two operations of this name at once, or a reset in between"
            raise ConfigError(f"error feedback: {self._name!r} changed during a step: {cause}; give each its own name")
        if self._momentum is not None and new_residual is not None and sent is None:
            raise ValueError("error feedback: with momentum, commit needs the indices that were sent")
        if new_residual is not None and new_residual.shape != memory.residual.shape:
            raise ValueError(f"error feedback: a residual of {new_residual.shape} for {memory.residual.size} elements")
        self._is_committed = True
        if new_residual is None:
            memory.residual[:] = 0.0
        else:
            np.copyto(memory.residual, new_residual)
            clear_non_finite(memory.residual)
        if self._velocity is not None:
            clear_non_finite(self._velocity)
            if sent is not None:
                self._velocity[sent] = 0.0
            memory.velocity = self._velocity
        memory.step = self.step + 1
        memory.basis = basis if basis is not None else memory.basis
        memories[self._name] = memory


def _checked(name: str, values: Any) -> Floats:
    """Return a flat float32 copy of an array from a checkpoint."""
    array = np.asarray(values)
    if array.dtype != np.float32 or not np.isfinite(array).all():
        raise ConfigError(f"error feedback: the state of {name!r} is not an array of finite float32 numbers")
    return array.reshape(-1).copy()
