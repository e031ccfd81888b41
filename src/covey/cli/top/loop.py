"""What `covey top` does until it is left: looks, draws, and acts on keys. On the main thread.

Waits are for keys, signals and the next look, never for the network: the collector asks, and actions run on a thread of
their own.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
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
    from covey.cli.top.state import Intent, ShownLine
    from covey.watch.overview import Moment, Overview, RunSeen

LOOK_EVERY: Final = 0.25
"""Seconds between looks whether there is a new overview, or another size of the terminal."""
CLOCK_SECONDS: Final = 1.0
"""How often the picture is drawn without news: ages grow."""
ENDS: Final = frozenset((signal.SIGINT, signal.SIGTERM, signal.SIGHUP))


class Source(Protocol):
    """Where overviews come from: `watch.collector`."""

    def newest(self) -> Overview: ...

    def history(self, run_id: str, since: float = 0.0) -> tuple[Moment, ...]: ...


class Feed(Protocol):
    """Where the output of a run comes from. No method waits."""

    def lines(self, run: RunSeen) -> tuple[tuple[ShownLine, ...], int]:
        """Return the last lines of a run, and how many were left out."""
        ...


class Actor(Protocol):
    """What `covey top` can do to runs and machines: `watch.actions`. Each may take seconds."""

    def checkpoint(self, run_id: str) -> None: ...

    def stop(self, run_id: str, kill: bool = False) -> None: ...

    def approve(self, applicant_id: str) -> None: ...

    def deny(self, applicant_id: str) -> None: ...


class TopLoop:
    """Shows what a source knows, until the person leaves."""

    def __init__(self, source: Source, actor: Actor, feed: Feed, screen: TopScreen, state: ViewState) -> None:
        self._source, self._actor, self._feed, self._screen, self._state = source, actor, feed, screen, state
        self._keys = KeyDecoder()
        self._overview = source.newest()
        self._history: tuple[Moment, ...] = ()
        self._history_of: tuple[int, str] = (0, "")
        self._drawn_at = 0.0
        self._acting: threading.Thread | None = None
        self._outcome = ""

    def run(self) -> None:
        """Show the picture until `q`, Ctrl-C, SIGTERM, or the end of the terminal."""
        arrived: list[int] = []
        with signals_noted(arrived) as wake, self._screen:
            self._draw()
            while True:
                patience = ESCAPE_SECONDS if self._keys.is_waiting else LOOK_EVERY
                inputs = [wake.fileno()] if self._screen.keys is None else [wake.fileno(), self._screen.keys]
                ready = select.select(inputs, [], [], patience)[0]
                if wake.fileno() in ready:
                    wake.recv(4096)
                if ENDS & set(arrived):
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
        does: dict[str, tuple[Callable[[], None], str]] = {
            "checkpoint": (lambda: self._actor.checkpoint(intent.subject), f"{intent.name} was asked for a checkpoint"),
            "stop": (lambda: self._actor.stop(intent.subject), f"{intent.name} was asked to stop"),
            "kill": (lambda: self._actor.stop(intent.subject, kill=True), f"{intent.name} was killed"),
            "approve": (lambda: self._actor.approve(intent.subject), f"{intent.name} was approved"),
            "deny": (lambda: self._actor.deny(intent.subject), f"{intent.name} was denied"),
        }
        perform, outcome = does[intent.kind]
        try:
            perform()
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
        is_due = time.monotonic() - self._drawn_at >= CLOCK_SECONDS
        if is_pressed or is_due or self._screen.has_changed():
            self._draw()

    def _draw(self) -> None:
        self._drawn_at = time.monotonic()
        run = chosen_run(self._overview, self._state)
        if run is not None and not self._state.is_paused:
            if self._history_of != (self._overview.serial, run.id):
                self._history_of = self._overview.serial, run.id
                self._history = self._source.history(run.id)
            if self._state.panel == "logs" or self._state.is_open:
                lines, left_out = self._feed.lines(run)
                self._state = replace(self._state, output=lines, left_out=left_out)
        self._state = replace(self._state, now=time.time())
        size = self._screen.size()
        self._screen.draw(frame(self._overview, self._history if run is not None else (), size, self._state), size)


def print_lines(source: Source, state: ViewState, write: Callable[[str], None]) -> None:
    """Print one line a second, until SIGINT or SIGTERM: for output that is not a terminal."""
    arrived: list[int] = []
    with signals_noted(arrived) as wake:
        while not ENDS & set(arrived):
            write(f"{time.strftime('%H:%M:%S')}  {line_of(source.newest(), state)}")
            if select.select([wake], [], [], CLOCK_SECONDS)[0]:
                wake.recv(4096)
