"""`Group.report`: what the program tells of its steps."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from covey.runtime.group.issuer import Issuer
from covey.runtime.report_log import log_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from covey.runtime.group.group import Group
    from covey.runtime.report_log import ReportLog


class ReportForms(Issuer):
    """Reports of a program; a base of `Group`."""

    @functools.cached_property
    def _reports(self) -> ReportLog:
        return log_of(self._engine.node)

    def report(self, *, step: int | None = None, **values: Any) -> None:
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
        self._reports.add(step, values)


def report_for_program(group: Group, step: int | None, values: Mapping[str, Any]) -> None:
    """Report for a program that uses a library; nothing is kept once the program reports itself, and nothing raises."""
    group._reports.add_for_program(step, values)
