"""Progress bars of long calls: on a terminal, in a notebook's cell, or not at all.

A bar appears once a call takes longer than a second, and only where a person sees it: standard error is a terminal, or
the process is the kernel of a notebook. Any thread may count.
"""

from __future__ import annotations

import contextlib
import html
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Final, Self

if TYPE_CHECKING:
    from types import TracebackType

PROGRESS_SECONDS: Final = 1.0
"""A call that takes longer shows a bar."""
BAR_REDRAW_SECONDS: Final = 0.1
"""How often a bar in a notebook changes."""


def is_notebook() -> bool:
    """Tell whether this process is the kernel of a notebook, which shows HTML."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


class CellBar:
    """A bar as a notebook shows it: HTML, or text where that is not shown."""

    def __init__(self, title: str, total: int, unit: str) -> None:
        self._title, self.total, self._unit = title, total, unit
        self.done, self.seconds = 0, 0.0

    def __repr__(self) -> str:
        if self._unit != "bytes":
            return f"{self._title}: {self.done} of {self.total} {self._unit}".rstrip()
        rate = f", {_mega(self.done / self.seconds)}/s" if self.seconds else ""
        return f"{self._title}: {_mega(self.done)} of {_mega(self.total)}{rate}"

    def _repr_html_(self) -> str:
        bar = f'<progress value="{self.done}" max="{max(self.total, 1)}"></progress>'
        return f"<div>{bar} {html.escape(repr(self))}</div>"


class ProgressBar:
    """The bar of one call. Use it in `with`, or call `close`. What draws it is imported only if it is shown."""

    def __init__(self, title: str, total: int, wanted: bool | None = None, *, unit: str = "bytes") -> None:
        """`wanted`: always, never, or (None) where a person sees it, after one second. `unit`: of what it counts."""
        self._title, self._total, self._unit = title, total, unit
        self._is_wanted = (sys.stderr.isatty() or is_notebook()) if wanted is None else wanted
        self._began_at = time.monotonic()
        self._show_at = self._began_at + (0.0 if wanted else PROGRESS_SECONDS)
        self._lock = threading.Lock()
        self._done, self._drawn_at = 0, 0.0
        self._terminal: Any = None
        self._cell: tuple[Any, CellBar] | None = None

    def expect(self, more: int) -> None:
        """Count so much more that will come."""
        with self._lock:
            self._total += more
            if self._terminal is not None:
                self._terminal.update(self._terminal.task_ids[0], total=self._total)

    def show(self, more: int) -> None:
        """Count so much more."""
        with self._lock:
            self._done += more
            now = time.monotonic()
            if not self._is_wanted or now < self._show_at:
                return
            if is_notebook():
                if now - self._drawn_at >= BAR_REDRAW_SECONDS:
                    self._drawn_at = now
                    self._draw_in_cell()
            else:
                self._draw_on_terminal()

    def close(self) -> None:
        """Leave the bar as it is."""
        with self._lock:
            if self._terminal is not None:
                self._terminal.stop()
            if self._cell is not None:
                self._draw_in_cell()
            self._is_wanted, self._terminal, self._cell = False, None, None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _draw_on_terminal(self) -> None:
        if self._terminal is None:
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                DownloadColumn,
                MofNCompleteColumn,
                Progress,
                TimeRemainingColumn,
                TransferSpeedColumn,
            )

            counts = (
                (DownloadColumn(), TransferSpeedColumn())
                if self._unit == "bytes"
                else (MofNCompleteColumn(), self._unit)
            )
            columns = (self._title, BarColumn(), *counts, TimeRemainingColumn())
            self._terminal = Progress(*columns, console=Console(stderr=True))
            self._terminal.add_task(self._title, total=self._total)
            self._terminal.start()
        self._terminal.update(self._terminal.task_ids[0], completed=self._done)

    def _draw_in_cell(self) -> None:
        if self._cell is None:
            from IPython.display import display

            bar = CellBar(self._title, self._total, self._unit)
            self._count(bar)
            self._cell = display(bar, display_id=True), bar
            return
        handle, bar = self._cell
        self._count(bar)
        with contextlib.suppress(AttributeError):  # there is no handle where nothing is displayed
            handle.update(bar)

    def _count(self, bar: CellBar) -> None:
        bar.done, bar.total, bar.seconds = self._done, self._total, time.monotonic() - self._began_at


def _mega(size: float) -> str:
    return f"{size / 1e6:.1f} MB" if size < 1e9 else f"{size / 1e9:.2f} GB"
