"""Weighted means: each rank's share of the total weight."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from covey.base.errors import ConfigError

if TYPE_CHECKING:
    from covey.runtime.collectives.attempt import Attempt

    Array = np.ndarray[Any, np.dtype[Any]]


def check_weight(op: str, weight: float) -> None:
    """Raise ConfigError unless `op` can be weighted, with this weight."""
    if op != "mean":
        raise ConfigError(f"weight= goes with op='mean', not op={op!r}")
    if not 0 <= weight < float("inf"):
        raise ConfigError(f"weight={weight!r} must be a number from 0 up")


def share_of(attempt: Attempt, weight: float) -> float | None:
    """Return this rank's share of the total weight; None on all ranks if there is no weight."""
    total = np.array([weight], np.float64)
    attempt.all_reduce(total, "sum", "doubling")
    return weight / float(total[0]) if 0 < total[0] < np.inf else None


def scale(flat: Array, share: float) -> None:
    """Multiply this rank's contribution by its share."""
    if not share:  # the contribution may be nan or infinite, and must not count
        flat[...] = 0
        return
    factor = np.float32(share) if flat.itemsize == 2 else flat.dtype.type(share)
    with np.errstate(all="ignore"):
        np.multiply(flat, factor, out=flat, casting="unsafe")


def weigh(attempt: Attempt, flat: Array, weight: float) -> bool:
    """Scale this rank's contribution by its share of the total weight; return False if there is no weight."""
    share = share_of(attempt, weight)
    if share is None:
        return False
    attempt.keep(flat)
    scale(flat, share)
    return True


def no_weight() -> ConfigError:
    """Return the error for weights that add up to nothing."""
    return ConfigError("the weights of all ranks add up to 0, or to more than a float holds")
