"""A terminal for tests: a pty with a program in it, and what its screen shows."""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from typing import TYPE_CHECKING

from tests.support.waiting import DEADLINE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

_SEQUENCE = re.compile(r"\x1b\[(\??)([\d;]*)([A-Za-z])")


class ShownScreen:
    """What programs write to a terminal, as far as `covey top` uses it. Anything else is an error."""

    def __init__(self, columns: int, rows: int) -> None:
        self._columns, self._rows = columns, rows
        self.lines = [""] * rows
        self._row, self._held = 0, ""
        self.is_alternate = self.is_cursor_hidden = False
        self.entered = 0
        """How often a program has taken the whole screen."""

    def feed(self, text: str) -> None:
        """Take what was written."""
        text, self._held = self._held + text, ""
        while text:
            if text[0] == "\x1b":
                found = _SEQUENCE.match(text)
                if found is None:
                    assert re.fullmatch(r"\x1b(\[\??[\d;]*)?", text), f"an unknown escape: {text[:20]!r}"
                    self._held = text
                    return
                self._command(*found.groups())
                text = text[found.end() :]
            else:
                plain, text = re.match(r"([^\x1b]+)(.*)", text, re.DOTALL).groups()  # type: ignore[union-attr]
                if self.is_alternate:
                    assert plain.isprintable(), repr(plain)
                    self.lines[self._row] += plain
                    assert len(self.lines[self._row]) <= self._columns, self.lines[self._row]

    def _command(self, private: str, numbers: str, letter: str) -> None:
        if private:
            assert (numbers, letter) in {("1049", "h"), ("1049", "l"), ("25", "h"), ("25", "l")}
            if numbers == "1049":
                self.is_alternate = letter == "h"
                self.entered += self.is_alternate
            else:
                self.is_cursor_hidden = letter == "l"
        elif letter == "H":
            row, column = map(int, numbers.split(";"))
            assert 1 <= row <= self._rows
            assert column == 1
            self._row, self.lines[row - 1] = row - 1, ""
        elif letter == "J":
            self.lines = [""] * self._rows
        else:
            assert letter in "Km", letter

    @property
    def text(self) -> str:
        """The whole screen."""
        return "\n".join(self.lines)


class InTerminal:
    """A program at a terminal of its own."""

    def __init__(self, process: subprocess.Popen[bytes], master: int, slave: int, screen: ShownScreen) -> None:
        self.process, self.master, self.screen = process, master, screen
        self._slave = slave
        self._letters = codecs.getincrementaldecoder("utf-8")()

    def type(self, keys: str) -> None:
        """Type at the terminal."""
        os.write(self.master, keys.encode())

    def modes(self) -> list[object]:
        """Return how the terminal is set, as `stty -a` shows it."""
        return termios.tcgetattr(self._slave)

    def read(self, within: float) -> bool:
        """Take what the program has written; tell whether there was anything."""
        if not select.select([self.master], [], [], within)[0]:
            return False
        try:
            data = os.read(self.master, 65536)
        except OSError:
            return False
        self.screen.feed(self._letters.decode(data))
        return bool(data)

    def wait_for(self, condition: Callable[[str], object]) -> str:
        """Return the screen when the condition holds for it."""
        deadline = time.monotonic() + DEADLINE
        while not condition(self.screen.text):
            assert time.monotonic() < deadline, self.screen.text
            assert self.read(0.1) or self.process.poll() is None, f"ended\n{self.screen.text}"
        return self.screen.text

    def ended(self) -> int:
        """Return the exit code of the program, after all that it writes."""
        deadline = time.monotonic() + DEADLINE
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.screen.text
            self.read(0.05)
        while self.read(0.0):
            pass
        return self.process.returncode


@contextlib.contextmanager
def at_a_terminal(
    command: Sequence[str], env: Mapping[str, str], columns: int = 80, rows: int = 24
) -> Iterator[InTerminal]:
    """Start a program at a terminal of this size; it is gone at the end."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    with contextlib.ExitStack() as ending:
        ending.callback(os.close, slave)
        ending.callback(_close, master)
        process = subprocess.Popen(
            list(command),
            env={**env, "TERM": "xterm", "PYTHONIOENCODING": "utf-8"},
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        ending.callback(process.wait)
        ending.callback(process.kill)
        yield InTerminal(process, master, slave, ShownScreen(columns, rows))


def _close(descriptor: int) -> None:
    with contextlib.suppress(OSError):  # a test closes it to end the terminal
        os.close(descriptor)
