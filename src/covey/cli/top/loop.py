"""What `covey top` does until it is left: looks, draws, and acts on keys. On the main thread.

Waits are for keys, signals and the next look, never for the network: the collector asks, and actions run on a thread of
their own.
"""

from __future__ import annotations

import functools
import os
import select
import signal
import threading
import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Protocol

from covey.base.errors import CoveyError
from covey.base.text import printable
from covey.cli.top.frame import frame, line_of
from covey.cli.top.screen import ESCAPE_SECONDS, KeyDecoder
from covey.cli.top.state import ViewState, chosen_run, press
from covey.runtime.signals import signals_noted

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.cli.top.screen import TopScreen
    from covey.cli.top.state import Intent
    from covey.watch.output import OutputLine, OutputPage
    from covey.watch.overview import Moment, Overview

PICTURE_EVERY: Final = 0.25
"""Seconds between looks whether there is a new overview, or another size of the terminal."""
REDRAWN_EVERY: Final = 1.0
"""How often the picture is drawn without news: ages grow."""
OUTPUT_LINES: Final = 1000
"""Lines of output that can be scrolled back to."""
END_SIGNALS: Final = frozenset((signal.SIGINT, signal.SIGTERM, signal.SIGHUP))


class OverviewSource(Protocol):
    """Where overviews come from: `watch.collector`. No method waits."""

    def newest(self) -> Overview: ...

    def history(self, run_id: str, since: float = 0.0) -> tuple[Moment, ...]: ...


class OutputSource(Protocol):
    """Where the output of runs comes from: `watch.output`. No method waits."""

    def lines(self, run_id: str, since: str = "") -> OutputPage: ...


class TopActions(Protocol):
    """What `covey top` can do to runs and machines: `watch.actions`. Each may take seconds, and says what it did."""

    def checkpoint(self, run_id: str) -> str: ...

    def stop(self, run_id: str, *, kill: bool = False) -> str: ...

    def approve(self, applicant_id: str) -> str: ...

    def deny(self, applicant_id: str) -> str: ...


class TopLoop:
    """Shows what a source knows, until the person leaves."""

    def __init__(
        self, source: OverviewSource, actions: TopActions, output: OutputSource, screen: TopScreen, state: ViewState
    ) -> None:
        self._source, self._actions, self._output, self._screen, self._state = source, actions, output, screen, state
        self._keys = KeyDecoder()
        self._overview = source.newest()
        self._history: tuple[Moment, ...] = ()
        self._history_of: tuple[int, str] = (0, "")
        self._drawn_at = 0.0
        self._acting: threading.Thread | None = None
        self._outcome = ""
        self._output_of, self._output_next, self._left_out = "", "", 0
        self._lines: deque[OutputLine] = deque(maxlen=OUTPUT_LINES)

    def run(self) -> None:
        """Show the picture until `q`, Ctrl-C, SIGTERM, or the end of the terminal."""
        arrived: list[int] = []
        with signals_noted(arrived) as wake, self._screen:
            self._draw()
            while True:
                patience = ESCAPE_SECONDS if self._keys.is_waiting else PICTURE_EVERY
                inputs = [wake.fileno()] if self._screen.keys is None else [wake.fileno(), self._screen.keys]
                ready = select.select(inputs, [], [], patience)[0]
                if wake.fileno() in ready:
                    wake.recv(4096)
                if END_SIGNALS & set(arrived):
                    return
                if signal.SIGTSTP in arrived:
                    self._screen.pause()
                    self._drawn_at = 0.0
                arrived.clear()
                pressed = self._pressed(self._screen.keys in ready)
                if pressed is None or any(self._press(key) for key in pressed):
                    return
                self._look(is_pressed=bool(pressed))

    def _pressed(self, is_ready: bool) -> list[str] | None:
        """Return the keys that were pressed; None if the terminal is gone."""
        if not is_ready:
            return self._keys.flush()
        assert self._screen.keys is not None
        try:
            data = os.read(self._screen.keys, 1024)
        except OSError:
            return None
        return self._keys.feed(data) if data else None

    def _press(self, key: str) -> bool:
        """Do what a key means; return whether it ends the program."""
        self._state, intent = press(replace(self._state, now=time.time()), key, self._overview)
        if intent is None:
            return False
        if intent.kind == "quit":
            return True
        if self._acting is not None:
            self._state = replace(self._state, message="wait: the last action is still under way")
            return False
        self._acting = threading.Thread(target=self._act, args=(intent,), name="covey-action", daemon=True)
        self._acting.start()
        return False

    def _act(self, intent: Intent) -> None:
        """Perform an action, on a thread of its own."""
        actions = self._actions
        does: dict[str, Callable[[str], str]] = {
            "checkpoint": actions.checkpoint,
            "stop": actions.stop,
            "kill": functools.partial(actions.stop, kill=True),
            "approve": actions.approve,
            "deny": actions.deny,
        }
        try:
            outcome = does[intent.kind](intent.subject)
        except CoveyError as error:
            outcome = f"not done: {printable(str(error), 300)}"
        except Exception as error:  # the picture goes on, and says so
            outcome = f"not done: {type(error).__name__}: {printable(str(error), 300)}"
        self._outcome = outcome

    def _look(self, *, is_pressed: bool) -> None:
        """Draw the picture again if there is anything new."""
        if self._acting is not None and not self._acting.is_alive():
            self._acting = None
            self._state = replace(self._state, message=self._outcome)
            is_pressed = True
        newest = self._source.newest()
        if newest.serial != self._overview.serial and not self._state.is_paused:
            self._overview = newest
            is_pressed = True
        is_due = time.monotonic() - self._drawn_at >= REDRAWN_EVERY
        if is_pressed or is_due or self._screen.has_changed():
            self._draw()

    def _draw(self) -> None:
        self._drawn_at = time.monotonic()
        run = chosen_run(self._overview, self._state)
        if run is not None and not self._state.run:
            self._state = replace(self._state, run=run.id)  # it stays, also when another one begins or it ends
        if run is not None and not self._state.is_paused:
            if self._history_of != (self._overview.serial, run.id):
                self._history_of = self._overview.serial, run.id
                self._history = self._source.history(run.id)
            if self._state.panel == "logs" or self._state.is_open:
                self._read_output(run.id)
        self._state = replace(self._state, now=time.time())
        size = self._screen.size()
        self._screen.draw(frame(self._overview, self._history if run is not None else (), size, self._state), size)

    def _read_output(self, run_id: str) -> None:
        if run_id != self._output_of:
            self._output_of, self._output_next, self._left_out = run_id, "", 0
            self._lines.clear()
        page = self._output.lines(run_id, self._output_next)
        self._left_out += page.left_out + max(len(self._lines) + len(page.lines) - OUTPUT_LINES, 0)
        self._output_next = page.next
        self._lines.extend(page.lines)
        self._state = replace(self._state, output=tuple(self._lines), left_out=self._left_out)


def print_lines(source: OverviewSource, state: ViewState, write: Callable[[str], None]) -> None:
    """Print one line a second, until SIGINT or SIGTERM: for output that is not a terminal."""
    arrived: list[int] = []
    with signals_noted(arrived) as wake:
        while not END_SIGNALS & set(arrived):
            write(f"{time.strftime('%H:%M:%S')}  {line_of(source.newest(), state)}")
            if select.select([wake], [], [], REDRAWN_EVERY)[0]:
                wake.recv(4096)
