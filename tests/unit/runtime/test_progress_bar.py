"""Progress bars: a person sees them after a second, on a terminal or in a notebook; programs and pipes never."""

from __future__ import annotations

import io
import sys
import types
from typing import Any

import pytest

from covey.runtime import progress_bar
from covey.runtime.progress_bar import ProgressBar


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


class Screen(io.StringIO):
    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress_bar, "time", clock)
    return clock


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A notebook, and what its cell shows in turn."""
    shown: list[str] = []

    def note(bar: Any) -> None:
        shown.append(bar._repr_html_())

    def display(bar: Any, *, display_id: bool) -> Any:
        note(bar)
        return types.SimpleNamespace(update=note)

    ipython: Any = types.ModuleType("IPython")
    ipython.get_ipython = lambda: types.SimpleNamespace(kernel=object())
    shows: Any = types.ModuleType("IPython.display")
    shows.display = display
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", shows)
    monkeypatch.setattr(sys, "stderr", Screen(is_terminal=False))
    return shown


def test_a_call_of_less_than_a_second_shows_nothing(clock: Clock, shown: list[str]) -> None:
    with ProgressBar("restoring", 100) as bar:
        bar.show(50)
        clock.now += 0.9
        bar.show(50)
    assert shown == []


def test_a_notebook_shows_one_bar_that_changes_at_most_ten_times_a_second(clock: Clock, shown: list[str]) -> None:
    with ProgressBar("sending <data>", 8_000_000) as bar:
        clock.now += 2
        bar.show(4_000_000)
        bar.show(1_000_000)
        clock.now += 2
        bar.show(1_000_000)
        bar.show(2_000_000)
    assert shown == [
        '<div><progress value="4000000" max="8000000"></progress> '
        "sending &lt;data&gt;: 4.0 MB of 8.0 MB, 2.0 MB/s</div>",
        '<div><progress value="6000000" max="8000000"></progress> '
        "sending &lt;data&gt;: 6.0 MB of 8.0 MB, 1.5 MB/s</div>",
        '<div><progress value="8000000" max="8000000"></progress> '
        "sending &lt;data&gt;: 8.0 MB of 8.0 MB, 2.0 MB/s</div>",
    ]


def test_things_are_counted_too(clock: Clock, shown: list[str]) -> None:
    with ProgressBar("returned", 4, unit="ranks") as bar:
        clock.now += 2
        bar.show(3)
    assert "returned: 3 of 4 ranks" in shown[-1]


@pytest.mark.parametrize("unit", ["bytes", "ranks"])
def test_a_terminal_shows_a_bar_on_standard_error(clock: Clock, monkeypatch: pytest.MonkeyPatch, unit: str) -> None:
    monkeypatch.setattr(sys, "stderr", screen := Screen(is_terminal=True))
    monkeypatch.setenv("TERM", "xterm")
    with ProgressBar("restoring", 2000, unit=unit) as bar:
        clock.now += 2
        bar.show(2000)
    assert "restoring" in screen.getvalue()
    assert ("2.0/2.0 kB" if unit == "bytes" else "2000/2000") in screen.getvalue()


def test_a_pipe_gets_nothing_and_neither_does_who_wants_none(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    for wanted, is_terminal in ((None, False), (False, True)):
        monkeypatch.setattr(sys, "stderr", screen := Screen(is_terminal=is_terminal))
        with ProgressBar("restoring", 100, wanted) as bar:
            clock.now += 2
            bar.show(100)
        assert screen.getvalue() == ""
