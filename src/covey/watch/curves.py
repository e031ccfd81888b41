"""The history of a run, for curves: an hour, bounded. Pure.

Moments of the last ten minutes are a second apart, older ones ten seconds. What the program reported before this
process began to look is in front, as far as the ranks still know it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from covey.watch.overview import Moment

if TYPE_CHECKING:
    from collections.abc import Sequence

    from covey.wire.progress import ReportRow

CURVE_SECONDS: Final = 3600.0
FINE_SECONDS: Final = 600.0
COARSE_EVERY: Final = 10.0
EARLIER_LIMIT: Final = 1000
"""Moments from before this process looked."""
MOMENTS_LIMIT: Final = 2 * int(FINE_SECONDS + CURVE_SECONDS / COARSE_EVERY)
"""Moments at most, whatever the clock does."""


class Curves:
    """The moments of one run."""

    def __init__(self) -> None:
        self._rows: Sequence[ReportRow] = ()
        self._earlier: tuple[Moment, ...] = ()
        """The rows as moments, none of which is later than the first moment that was seen."""
        self._has_seen = False
        """Whether a moment was added in which the program had reported."""
        self._coarse: list[Moment] = []
        self._fine: list[Moment] = []

    def begin(self, rows: Sequence[ReportRow]) -> None:
        """Take what was reported before; of more rows than are kept, evenly many."""
        self._rows = rows[:: max(1, -(-len(rows) // EARLIER_LIMIT))]
        self._put_rows_in_front()

    def _put_rows_in_front(self) -> None:
        seen = (moment for moment in (*self._coarse, *self._fine) if _tells(moment))
        first = next(seen, None)
        self._earlier = tuple(
            Moment(
                row.at if first is None else min(row.at, first.at),
                row.step,
                dict(row.values),
                None if row.compute < 0 else row.compute + row.sync,
                None if row.compute < 0 else row.compute,
                None if row.sync < 0 else row.sync,
            )
            for row in self._rows
            if first is None or _is_before(row, first)
        )

    def add(self, moment: Moment) -> None:
        """Add a moment, and thin out old ones."""
        self._fine.append(moment)
        if not self._has_seen and _tells(moment):
            self._has_seen = True
            self._put_rows_in_front()
        oldest = 0
        while oldest < len(self._fine) and self._fine[oldest].at < moment.at - FINE_SECONDS:
            past = self._fine[oldest]
            if not self._coarse or not 0 <= past.at - self._coarse[-1].at < COARSE_EVERY:
                self._coarse.append(past)
            oldest += 1
        del self._fine[:oldest]
        while self._coarse and (
            self._coarse[0].at < moment.at - CURVE_SECONDS or len(self._coarse) > MOMENTS_LIMIT // 2
        ):
            del self._coarse[0]
        del self._fine[: max(0, len(self._fine) - MOMENTS_LIMIT // 2)]

    def since(self, at: float) -> tuple[Moment, ...]:
        """Return the moments after a time, oldest first."""
        moments = (*self._earlier, *self._coarse, *self._fine)
        return tuple(sorted((moment for moment in moments if moment.at > at), key=lambda moment: moment.at))

    def __len__(self) -> int:
        return len(self._earlier) + len(self._coarse) + len(self._fine)


def _tells(moment: Moment) -> bool:
    return moment.step is not None or bool(moment.reports)


def _is_before(row: ReportRow, moment: Moment) -> bool:
    """Tell whether a row came before a moment, whose time is when its round of questions began, not its answer."""
    return row.at < moment.at or (row.step is not None and moment.step is not None and row.step < moment.step)
