"""What the page needs of the rest of covey: overviews to show, lines of output, and a few things to do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from covey.watch.output import OutputPage
    from covey.watch.overview import Moment, Overview


class Source(Protocol):
    """Where overviews come from: `watch.collector.Collector`."""

    def newest(self) -> Overview:
        """Return the last overview."""

    def next_after(self, serial: int, within: float) -> Overview | None:
        """Return the newest overview as soon as its serial is above this one; None if there is none in time."""

    def history(self, run_id: str, since: float = 0.0) -> tuple[Moment, ...]:
        """Return the moments of a run after a time, the oldest first."""


class Actions(Protocol):
    """What a person may do on the page; each says what came of it, or raises a CoveyError."""

    def checkpoint(self, run_id: str) -> str:
        """Ask the ranks of a run to save a checkpoint."""

    def stop(self, run_id: str, *, kill: bool = False) -> str:
        """End a run."""

    def approve(self, applicant_id: str) -> str:
        """Let a machine into the cluster."""

    def deny(self, applicant_id: str) -> str:
        """Keep a machine out of the cluster."""

    def join_code(self) -> str:
        """Return the code with which a machine joins the cluster: its secret."""


class Outputs(Protocol):
    """Where lines of output come from."""

    def lines(self, run_id: str, since: str = "") -> OutputPage:
        """Return the newest lines of a run; those after `since`, which an earlier answer gave as `next`."""
