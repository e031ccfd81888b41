"""Waiting for what ranks on the workers of an engine return: all results, or the failure that explains most."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from covey.base.errors import DeadlineError, RankFailedError
from covey.runtime.keeper.reports import CallReport, most_telling

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

CALL_FAILURE_GRACE: Final = 3.0
"""Seconds that the other ranks have to report after the first failure: one of theirs may explain more."""


def collect(
    size: int,
    wait: Callable[[float | None], Iterable[tuple[int, CallReport | str]]],
    loads: Callable[[bytes], Any],
    *,
    timeout: float | None,
    tolerate_losses: bool,
) -> list[Any]:
    """Return the results of all ranks, by rank.

    `wait(seconds)` waits at most so long (None: without limit) for ranks to end, and returns those that have since it
    was last called: each with its report, or with a text that says how its process was lost. With `tolerate_losses`,
    the result of a lost rank is None, unless all are lost.

    Raises:
        DeadlineError: some have not ended within `timeout` seconds.
        RankFailedError: a rank was lost, or its exception cannot be pickled. Any other exception is raised as it is.
    """
    results: list[Any] = [None] * size
    missing, lost = set(range(size)), 0
    failures: list[BaseException] = []
    deadline = None if timeout is None else time.monotonic() + timeout
    while missing:
        patience = None if deadline is None else deadline - time.monotonic()
        if patience is not None and patience <= 0:
            break
        for rank, ended in wait(patience):
            missing.remove(rank)
            if isinstance(ended, CallReport):
                failure = ended.failure(rank, size)
                if failure is None:
                    results[rank] = loads(ended.body)
                    continue
            else:
                lost += 1
                if tolerate_losses and lost < size:
                    continue
                failure = RankFailedError(f"rank {rank} of {size} is lost: {ended}", rank=rank)
            failures.append(failure)
            grace = time.monotonic() + CALL_FAILURE_GRACE
            deadline = grace if deadline is None else min(deadline, grace)
    if failures:
        raise most_telling(failures)
    if missing:
        late = tuple(sorted(missing))
        names = ", ".join(map(str, late))
        raise DeadlineError(
            f"launch: no result from rank {names} of {size} within the timeout of {timeout:g} s", late=late
        )
    return results
