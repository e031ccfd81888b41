"""The file in which a machine keeps what was measured of the links that end at it: `links` in covey's folder.

The file is a hint. If it is missing, damaged, open to other users or of another machine, there are no figures, and
ranks measure as if there had never been any. One log line says so, once in a process.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from covey.base.errors import ConfigError
from covey.base.version import NewerFormatError, newer_file
from covey.net.host import folders
from covey.net.host.locks import only_one
from covey.wire.saved_figures import MAX_FIGURES, SavedFigures, decode_saved_figures, encode_saved_figures

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from covey.wire.saved_figures import SavedFigure

logger = logging.getLogger("covey")

FIGURES_FILE: Final = "links"
OLDEST_SECONDS: Final = 7 * 24 * 3600.0
"""Figures that are older are not used: by then, an access point may stand elsewhere."""
AHEAD_SECONDS: Final = 60.0
"""How far in the future a figure may have been measured: then the clock of the machine was set back since."""

_said: set[str] = set()
"""What was logged by this process."""


def read_figures(machine: bytes) -> tuple[SavedFigure, ...]:
    """Return what this machine keeps; `machine` is its key."""
    try:
        saved = decode_saved_figures(folders.read_private(folders.existing() / FIGURES_FILE))
    except FileNotFoundError:
        return ()
    except NewerFormatError as error:
        _say(f"what was measured of links earlier is not used: {newer_file(folders.existing() / FIGURES_FILE, error)}")
        return ()
    except (ConfigError, ValueError) as error:
        _say(f"what was measured of links earlier is not used: {error}")
        return ()
    if saved.machine != machine:
        _say(f"what {folders.existing() / FIGURES_FILE} says of links is not used: another machine has written it")
        return ()
    return saved.figures


def keep_figures(machine: bytes, figures: Sequence[SavedFigure]) -> None:
    """Add to what this machine keeps; a figure replaces that of the same link. Failing is logged, and changes nothing.

    Blocks while the file is written, and up to 10 s if other processes write it.
    """
    try:
        folder = folders.home()
        with only_one(folder / f".{FIGURES_FILE}.lock"):
            _refuse_newer(folder / FIGURES_FILE)
            latest = {_link(each): each for each in sorted((*read_figures(machine), *figures), key=_time)}
            saved = sorted(latest.values(), key=_time)[-MAX_FIGURES:]
            folders.write_private(folder / FIGURES_FILE, encode_saved_figures(SavedFigures(machine, tuple(saved))))
    except (ConfigError, OSError) as error:
        _say(f"what was measured of links is not kept for the next run: {error}")


def _refuse_newer(path: Path) -> None:
    """Raise ConfigError if a later release has written the file, which is then not changed."""
    try:
        decode_saved_figures(folders.read_private(path))
    except NewerFormatError as error:
        raise newer_file(path, error) from None
    except (FileNotFoundError, ValueError):
        return  # there is nothing to lose


def is_recent(figure: SavedFigure, now: float) -> bool:
    """Tell whether a figure may still be used."""
    return now - OLDEST_SECONDS <= figure.at <= now + AHEAD_SECONDS


def _link(figure: SavedFigure) -> tuple[object, ...]:
    return figure.cluster, figure.machine, figure.sender, figure.receiver, figure.interface, figure.here, figure.there


def _time(figure: SavedFigure) -> float:
    return figure.at


def _say(text: str) -> None:
    if text not in _said:
        _said.add(text)
        logger.warning("%s", text)
