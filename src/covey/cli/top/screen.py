"""The terminal of `covey top`: keys in, lines out. It is given back as it was, however the program ends.

Nothing here waits for a terminal that stands still (Ctrl-S): a picture that it does not take is left out.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import select
import signal
import termios
import time
from typing import TYPE_CHECKING, Final, Self

from covey.cli.top.canvas import PLAIN_LETTERS
from covey.cli.top.frame import ScreenSize

if TYPE_CHECKING:
    from collections.abc import Sequence

    from covey.cli.layout import Line

ESCAPE_SECONDS: Final = 0.05
"""How long after Esc the rest of a longer sequence may arrive."""
RESTORE_SECONDS: Final = 0.5
"""How long the terminal may take to accept what restores it."""
SEQUENCE_LIMIT: Final = 32
"""Characters after which a sequence is given up."""
SCREEN_CHUNK_BYTES: Final = 256
"""So much is taken without a wait by a terminal that is ready."""
_SEQUENCES: Final = {
    "[A": "up", "[B": "down", "OA": "up", "OB": "down", "[5~": "page-up", "[6~": "page-down",
    "[H": "home", "[F": "end", "OH": "home", "OF": "end", "[1~": "home", "[4~": "end",
}  # fmt: skip
_SINGLE: Final = {"\r": "enter", "\n": "enter", "\t": "tab", "\x7f": "backspace", "\x08": "backspace", "\x03": "ctrl-c"}
_STYLE_CODES: Final = {
    "bold": "1", "dim": "2", "reverse": "7",
    "red": "31", "green": "32", "yellow": "33", "blue": "34", "magenta": "35", "cyan": "36",
}  # fmt: skip
_COLOURS: Final = frozenset(("red", "green", "yellow", "blue", "magenta", "cyan"))


class KeyDecoder:
    """Turns what a terminal sends into names of keys: a letter, or `up`, `enter`, `escape` and the like."""

    def __init__(self) -> None:
        self._text = codecs.getincrementaldecoder("utf-8")("ignore")
        self._held = ""
        """A sequence that is not complete, from Esc on."""

    @property
    def is_waiting(self) -> bool:
        """Whether Esc has come, and perhaps more follows."""
        return bool(self._held)

    def feed(self, data: bytes) -> list[str]:
        """Return the keys that are complete."""
        keys = []
        for letter in self._text.decode(data):
            if self._held:
                self._held += letter
                if self._held[1] not in "[O":  # Alt and a letter, or Esc and then a key
                    keys += ["escape", *self._single(letter)] if letter != "\x1b" else ["escape"]
                    self._held = "\x1b" if letter == "\x1b" else ""
                elif len(self._held) > 2 and (letter.isalpha() or letter == "~" or len(self._held) > SEQUENCE_LIMIT):
                    keys += [_SEQUENCES[self._held[1:]]] if self._held[1:] in _SEQUENCES else []
                    self._held = ""
            elif letter == "\x1b":
                self._held = letter
            else:
                keys += self._single(letter)
        return keys

    def flush(self) -> list[str]:
        """Return what an incomplete sequence means, since nothing follows it."""
        held, self._held = self._held, ""
        return ["escape"] if held == "\x1b" else []

    def _single(self, letter: str) -> list[str]:
        key = _SINGLE.get(letter, letter)
        return [key] if len(key) > 1 or key.isprintable() else []


class TopScreen:
    """A terminal that shows one picture after another, from `with` to its end."""

    def __init__(self, output: int, keys: int | None, *, has_colours: bool, has_letters: bool) -> None:
        """Draw to the descriptor `output`, read keys from `keys`, if that is a terminal.

        `has_colours`: colours may be used. `has_letters`: the terminal shows more than ASCII.
        """
        self._output, self.keys = output, keys
        self._has_colours, self._has_letters = has_colours, has_letters
        self._saved: list[int | list[bytes | int]] | None = None
        self._shown: list[bytes] = []
        self._size = ScreenSize(0, 0)
        self._is_entered = False

    def __enter__(self) -> Self:
        if self.keys is not None:
            self._saved = termios.tcgetattr(self.keys)
        self.enter()
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def enter(self) -> None:
        """Take the terminal: no echo, keys at once, a page of its own."""
        if self.keys is not None and self._saved is not None:
            mode, flags = list(self._saved), self._saved[3]
            assert isinstance(flags, int)
            mode[3] = flags & ~(termios.ICANON | termios.ECHO)
            self._is_entered = True
            termios.tcsetattr(self.keys, termios.TCSANOW, mode)
        self._is_entered = True
        self._put(b"\x1b[?1049h\x1b[?25l\x1b[2J", RESTORE_SECONDS)
        self._shown = []

    def leave(self) -> None:
        """Give the terminal back as it was; also if it is gone."""
        if not self._is_entered:
            return
        self._is_entered = False
        with contextlib.suppress(OSError):
            self._put(b"\x1b[0m\x1b[?25h\x1b[?1049l", RESTORE_SECONDS)
        if self.keys is not None and self._saved is not None:
            with contextlib.suppress(termios.error, OSError):
                termios.tcsetattr(self.keys, termios.TCSANOW, self._saved)

    def pause(self) -> None:
        """Give the terminal back, stop this process as a shell expects after Ctrl-Z, and take the terminal again."""
        self.leave()
        handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        try:
            os.kill(os.getpid(), signal.SIGTSTP)
        finally:
            signal.signal(signal.SIGTSTP, handler)
            self.enter()

    def size(self) -> ScreenSize:
        """Return the size of the terminal."""
        try:
            columns, rows = os.get_terminal_size(self._output)
        except OSError:
            columns, rows = 0, 0
        return ScreenSize(columns or 80, rows or 24)

    def has_changed(self) -> bool:
        """Tell whether the terminal has another size than at the last picture, or lacks some of it."""
        return self.size() != self._size or not self._shown

    def draw(self, lines: Sequence[Line], size: ScreenSize) -> None:
        """Show lines from the top on; write only those that have changed. OSError if the terminal is gone."""
        drawn = [self._encode(line) for line in lines]
        is_new = size != self._size or not self._shown
        parts = [b"\x1b[0m\x1b[2J"] if is_new else []
        for at, text in enumerate(drawn):
            if is_new or at >= len(self._shown) or self._shown[at] != text:
                parts.append(b"\x1b[%d;1H%s\x1b[0m\x1b[K" % (at + 1, text))
        self._shown, self._size = (drawn, size) if self._put(b"".join(parts)) else ([], size)

    def _encode(self, line: Line) -> bytes:
        text = "".join(f"\x1b[0;{self._codes(style)}m{piece}" if style else f"\x1b[0m{piece}" for piece, style in line)
        if self._has_letters:
            return text.encode("utf-8", "replace")
        return text.translate(PLAIN_LETTERS).encode("ascii", "replace")

    def _codes(self, style: str) -> str:
        words = [word for word in style.split() if self._has_colours or word not in _COLOURS]
        return ";".join(_STYLE_CODES[word] for word in words)

    def _put(self, data: bytes, within: float = 0.1) -> bool:
        """Write; return False if the terminal does not take all of it in time."""
        rest, deadline = memoryview(data), time.monotonic() + within
        while rest:
            left = max(deadline - time.monotonic(), 0.0)
            if not select.select([], [self._output], [], left)[1]:
                return False
            rest = rest[os.write(self._output, rest[:SCREEN_CHUNK_BYTES]) :]
        return True
