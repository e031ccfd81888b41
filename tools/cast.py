"""Run `covey demo --plain` and draw what it prints, at the pace it prints it, as an animated SVG.

    python -m tools.cast docs/demo.svg [covey demo options]

The text is that of the program, line by line; pauses are played at double speed and end after a second, and lines
that were printed together follow each other slowly enough to be read. The picture needs no script and no font: browsers
animate it, beginning where the first lines are there, and other viewers show the last screen.
"""

from __future__ import annotations

import html
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Final, NamedTuple

SPEED: Final = 2.0
LONGEST_PAUSE: Final = 1.0
"""Seconds of playback between two lines."""
SHORTEST_PAUSE: Final = 0.15
"""Seconds of playback between two lines that were printed at once."""
FIRST_SHOWN: Final = 5
"""Lines that a browser shows at once, when it begins to play."""
LAST_PAUSE: Final = 6.0
"""Seconds for which the last screen stays."""
ROWS: Final = 26
COLUMNS: Final = 104
LINE_HEIGHT: Final = 18.0
CHARACTER_WIDTH: Final = 7.83
MARGIN: Final = 14.0
COLOURS: Final = (
    (re.compile(r"is killed"), "#ff7b72"),
    (re.compile(r"go on without|started again|waits to be let in|is back as"), "#e3b341"),
    (re.compile(r"detect .* redo"), "#e3b341"),
    (re.compile(r": yes$"), "#7ee787"),
    (re.compile(r"^\$ "), "#79c0ff"),
)
PLAIN: Final = "#c9d1d9"


class Line(NamedTuple):
    """A line of output and when it is shown, in seconds of playback."""

    at: float
    text: str


def record(options: list[str]) -> list[Line]:
    """Run the demo and return its lines, the command before them."""
    lines = [Line(0.0, "$ covey demo")]
    command = [sys.executable, "-u", "-m", "covey", "demo", "--plain", *options]
    before = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for text in process.stdout or ():
            now = time.monotonic()
            pause = max(SHORTEST_PAUSE, min(LONGEST_PAUSE, (now - before) / SPEED))
            lines.append(Line(lines[-1].at + pause, text.rstrip("\n")))
            before = now
    if process.returncode:
        raise SystemExit(f"covey demo exited with {process.returncode}")
    return lines


def draw(lines: list[Line]) -> str:
    """Return the lines as an SVG that shows each at its time, and scrolls when the screen is full."""
    total = lines[-1].at + LAST_PAUSE
    played = f"{total:.1f}s step-end {-lines[min(FIRST_SHOWN, len(lines)) - 1].at:.2f}s infinite"
    width, height = COLUMNS * CHARACTER_WIDTH + 2 * MARGIN, ROWS * LINE_HEIGHT + 2 * MARGIN
    scrolls = ["0% {transform: translateY(0)}"]
    for number, line in enumerate(lines[ROWS:], start=1):
        scrolls.append(f"{100 * line.at / total:.2f}% {{transform: translateY({-number * LINE_HEIGHT:.0f}px)}}")
    end = max(0, len(lines) - ROWS) * LINE_HEIGHT
    scrolls.append(f"100% {{transform: translateY({-end:.0f}px)}}")
    rules = [
        "text {font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; white-space: pre; opacity: 1}",
        f"@keyframes scroll {{{' '.join(scrolls)}}}",
        f"#lines {{transform: translateY({-end:.0f}px); animation: scroll {played}}}",
    ]
    rows = []
    for number, line in enumerate(lines):
        if not line.text.strip():
            continue
        if line.at > 0:
            shown = 100 * line.at / total
            rules.append(f"@keyframes l{number} {{0% {{opacity: 0}} {shown:.2f}%, 100% {{opacity: 1}}}}")
            rules.append(f"#l{number} {{animation: l{number} {played}}}")
        y = MARGIN + (number + 0.75) * LINE_HEIGHT
        text = html.escape(line.text[:COLUMNS])
        rows.append(f'<text id="l{number}" x="{MARGIN}" y="{y:.1f}" fill="{_colour(line.text)}">{text}</text>')
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}">',
            f"<style>{' '.join(rules)}</style>",
            f'<clipPath id="screen"><rect width="{width:.0f}" height="{height:.0f}"/></clipPath>',
            f'<rect width="{width:.0f}" height="{height:.0f}" rx="8" fill="#0d1117"/>',
            '<g clip-path="url(#screen)"><g id="lines">',
            *rows,
            "</g></g></svg>\n",
        ]
    )


def _colour(text: str) -> str:
    return next((colour for pattern, colour in COLOURS if pattern.search(text)), PLAIN)


def main() -> None:
    target, *options = sys.argv[1:]
    Path(target).write_text(draw(record(options)))


if __name__ == "__main__":
    main()
