"""Scripted overviews for tests of views: a source that shows what a test tells it, and notes of what was asked for."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from covey.base.errors import ConfigError
from covey.watch.output import OutputLine, OutputPage
from covey.watch.overview import Moment, Overview

if TYPE_CHECKING:
    from collections.abc import Sequence

JOIN_CODE = "covey1-7k2mq-x9f3a-0b1c2-d3e4f-secret"


class Player:
    """Is a source of overviews, a doer of actions and a source of output, all by script."""

    def __init__(self, overview: Overview | None = None) -> None:
        self._changed = threading.Condition()
        self._overview = overview or Overview(1, time.time())
        self._moments: dict[str, list[Moment]] = {}
        self.lines_of: dict[str, list[OutputLine]] = {}
        self.done: list[tuple[str, ...]] = []
        """The actions, in order."""
        self.answer = "done"
        self.error = ""
        """What the next actions fail with; empty if they succeed."""
        self.most_lines = 1000

    def show(self, overview: Overview) -> Overview:
        """Make this the newest overview; it gets the next serial."""
        with self._changed:
            self._overview = replace(overview, serial=self._overview.serial + 1)
            self._changed.notify_all()
            return self._overview

    def remember(self, run_id: str, moments: Sequence[Moment]) -> None:
        """Add to the history of a run."""
        with self._changed:
            self._moments.setdefault(run_id, []).extend(moments)

    # Source

    def newest(self) -> Overview:
        with self._changed:
            return self._overview

    def next_after(self, serial: int, within: float) -> Overview | None:
        with self._changed:
            self._changed.wait_for(lambda: self._overview.serial > serial, within)
            return self._overview if self._overview.serial > serial else None

    def history(self, run_id: str, since: float = 0.0) -> tuple[Moment, ...]:
        with self._changed:
            return tuple(each for each in self._moments.get(run_id, ()) if each.at > since)

    # Actions

    def _do(self, *what: str) -> str:
        if self.error:
            raise ConfigError(self.error)
        self.done.append(what)
        return self.answer

    def checkpoint(self, run_id: str) -> str:
        return self._do("checkpoint", run_id)

    def stop(self, run_id: str, *, kill: bool = False) -> str:
        return self._do("kill" if kill else "stop", run_id)

    def approve(self, applicant_id: str) -> str:
        return self._do("approve", applicant_id)

    def deny(self, applicant_id: str) -> str:
        return self._do("deny", applicant_id)

    def join_code(self) -> str:
        self._do("code")
        return JOIN_CODE

    # Outputs

    def lines(self, run_id: str, since: str = "") -> OutputPage:
        lines = self.lines_of.get(run_id, [])
        total, begin = len(lines), int(since or 0)
        first = max(begin, total - self.most_lines)
        return OutputPage(tuple(lines[first:total]), str(total), first - begin if since else 0)
