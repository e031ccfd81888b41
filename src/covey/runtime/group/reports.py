"""`Group.report`: what the program tells of its steps."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.runtime.report_log import ReportLog


class Reports:
    """Reports of a program, as `Group` offers them."""

    def __init__(self, log: Callable[[], ReportLog]) -> None:
        """`log` returns what keeps the reports of this process."""
        self._find_log = log

    @functools.cached_property
    def log(self) -> ReportLog:
        """What keeps the reports of this process, found when the first comes."""
        return self._find_log()

    def report(self, /, *, step: int | None = None, **values: Any) -> None:
        """Tell `covey ui`, `covey top`, `/metrics` and files how far the program is: `report(step=n, loss=loss)`.

        It is no collective: any rank may call it or not, on any thread, and it raises nothing for a lost rank. It takes
        less than a microsecond. A value is a number; a tensor or an array of one element is read with `float()`, which
        waits for a GPU; a function without arguments is called once a second on another thread, and its result is the
        value. Values that are not finite are kept, and the event `report` tells of them.

        `step` ends the step before: views show how much of it was spent in operations. Values without a step belong to
        the last one. A step that is reported again replaces the values of that step, and a lower one those of all that
        follow it. `samples` is how many samples a rank has processed in the step; views make a rate of it.

        A process keeps 4,096 rows: of a longer series fewer of its beginning.

        Raises:
            ValueError: a name is empty, longer than 40 characters or not printable ASCII, or there are more than 32.
            TypeError: a value is no number and no function, or `step` is no whole number.
        """
        self.log.add(step, values)
