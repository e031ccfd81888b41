"""Unequal shares of an array, so that all ranks finish together.

Let S be the bytes of the array and s_i the part that slot i owns. If every slot sends its contributions to the owners,
and they send their parts to all (`direct`), slot i sends (1 - s_i) S + s_i (n - 1) S = (1 + (n - 2) s_i) S bytes, and
receives as many. A slot that owns nothing moves S; one of n equal owners moves 2 (n - 1) / n S.

In a ring, the way from slot i to the next slot j carries what i does not own to be combined, and then what j does not
own as results: (2 - s_i - s_j) S bytes.

Shares are integers, which add up to `WHOLE`, so that they are equal on all ranks and can be compared. Floats are added
by `fsum`, which is exact: `sum` gives other bits in newer versions of Python.
"""

from __future__ import annotations

from math import fsum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

WHOLE: Final = 1 << 16
"""The sum of all shares."""
HALVINGS: Final = 40
"""Steps of a search for a number in an interval: more than the digits of a share need."""


def owners(speeds: Sequence[float]) -> tuple[int, ...]:
    """Return the shares with which a direct exchange ends soonest if slot i moves speeds[i] bytes a second each way.

    With T the time and S = 1, T speeds[i] = 1 + (n - 2) s_i for each of the m slots that own something. Their shares
    add up to 1, so T = (n - 2 + m) / (sum of their speeds). The slowest slot is left out while its share would be
    negative; then it is not what the others wait for, or it needs 1 / speed in any plan.
    """
    size = len(speeds)
    if size <= 2:
        return whole([1.0] * size)
    order = sorted(range(size), key=lambda slot: (-speeds[slot], slot))
    shares = [0.0] * size
    for number in range(size, 0, -1):
        chosen = order[:number]
        time = (size - 2 + number) / fsum(speeds[slot] for slot in chosen)
        if time * speeds[chosen[-1]] >= 1 or number == 1:
            for slot in chosen:
                shares[slot] = max(0.0, time * speeds[slot] - 1)
            break
    return whole(shares)


def ring(speeds: Sequence[float]) -> tuple[int, ...]:
    """Return the shares with which a ring ends soonest, by position; speeds[p] is that from position p to the next.

    For a time T, hop p needs s_p + s_next >= 2 - T speeds[p]. The smallest T is
    sought for which such shares have a sum of at most 1.
    """
    slowest = min(speeds)
    low, high = 1 / slowest, 2 / slowest
    if len(speeds) < 3 or fsum(_covering([2 - low * speed for speed in speeds])) <= 1:
        high = low
    for _ in range(HALVINGS if high > low else 0):
        middle = (low + high) / 2
        if fsum(_covering([2 - middle * speed for speed in speeds])) <= 1:
            high = middle
        else:
            low = middle
    shares = _covering([2 - high * speed for speed in speeds])
    rest = max(0.0, 1 - fsum(shares)) / len(speeds)
    return whole([share + rest for share in shares])


def whole(weights: Sequence[float]) -> tuple[int, ...]:
    """Return integers in proportion to `weights` that add up to WHOLE; rests go to those that lose most."""
    total = fsum(weights)
    exact = [weight / total * WHOLE for weight in weights]
    shares = [int(each) for each in exact]
    order = sorted(range(len(weights)), key=lambda slot: (shares[slot] - exact[slot], slot))
    for slot in order[: WHOLE - sum(shares)]:
        shares[slot] += 1
    return tuple(shares)


def _covering(needs: Sequence[float]) -> list[float]:
    """Return numbers round a ring, not negative and with the smallest sum, of which p and the next make needs[p]."""
    low, high = 0.0, max(0.0, *needs)
    for _ in range(HALVINGS):  # the sum is convex in the first number
        third = (high - low) / 3
        if fsum(_covering_from(low + third, needs)) <= fsum(_covering_from(high - third, needs)):
            high -= third
        else:
            low += third
    return min((_covering_from(first, needs) for first in (0.0, low, high)), key=fsum)


def _covering_from(first: float, needs: Sequence[float]) -> list[float]:
    """Return such numbers if the first one is given: what is left to do is left to the later of two."""
    numbers = [first]
    for need in needs[:-1]:
        numbers.append(max(0.0, need - numbers[-1]))
    numbers[-1] = max(numbers[-1], needs[-1] - first, 0.0)
    return numbers
