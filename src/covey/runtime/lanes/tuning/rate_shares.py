"""How a limit on bytes a second is shared by the connections that it concerns. Pure.

A connection that was idle may use as much as if it were the only one to begin now, so that a short operation is not
slowed down. What all connections together have moved too much is then taken off what follows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from covey.runtime.lanes.tuning.urgency import Urgency

if TYPE_CHECKING:
    from collections.abc import Sequence

LEAST_TENSOR_SHARE: Final = 0.1
"""What tensors have of the limit at least, however much is to be made up for: they would stand still without it."""
PARTS_SHARE: Final = 0.8
"""What parts of large calls have of the limit while tensors are sent, too."""


@dataclass(frozen=True)
class Demand:
    """What one connection does."""

    urgency: Urgency
    is_sending: bool


def divide(available: float, limit: float, demands: Sequence[Demand]) -> list[int]:
    """Return the bytes a second for each connection; `available` of the `limit` is left for tensors and parts.

    Those that are sending have `available` together. An idle one has what it would have if it alone began to send.
    """
    sending = {urgency: sum(each.urgency is urgency and each.is_sending for each in demands) for urgency in Urgency}
    shares = []
    for each in demands:
        if not each.urgency.gives_way:
            shares.append(int(limit))
            continue
        other = Urgency.TENSORS if each.urgency is Urgency.PARTS else Urgency.PARTS
        part = PARTS_SHARE if each.urgency is Urgency.PARTS else 1 - PARTS_SHARE
        pool = available * part if sending[other] else available
        shares.append(max(1, int(pool / (sending[each.urgency] + (not each.is_sending)))))
    return shares


class RateBudget:
    """How much of a limit is available now, so that it holds on average over a second."""

    def __init__(self, repay_seconds: float) -> None:
        """What was moved too much is made up for in this time; what was not moved in such a time may be moved later."""
        self._repay_seconds = repay_seconds
        self._excess = 0.0
        """Bytes that were moved too much and not made up for; below 0, bytes that may be moved in addition."""

    def available(self, limit: float, moved: int, seconds: float) -> float:
        """Return the bytes a second that are available after `moved` bytes in the last `seconds`."""
        self._excess = max(-limit * self._repay_seconds, self._excess + moved - limit * seconds)
        return min(limit, max(LEAST_TENSOR_SHARE * limit, limit - self._excess / self._repay_seconds))
