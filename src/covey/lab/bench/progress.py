"""A bar that shows how much of a benchmark is done, on terminals that can show one."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from covey.cli.terminal import is_lively

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console


@contextmanager
def counting(total: int, console: Console) -> Iterator[Callable[[str, int], None]]:
    """Yield a function that shows a text and adds finished steps; it does nothing without a terminal."""
    if not is_lively(console):
        yield lambda text, steps: None
        return
    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=16), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, refresh_per_second=4) as bar:
        task = bar.add_task("", total=total)
        yield lambda text, steps: bar.update(task, description=text, advance=steps)
