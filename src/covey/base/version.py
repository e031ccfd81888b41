"""The version of the package, and the formats of its files: a file of a later release is refused and not changed.

A file holds the number of its format; a file without one has format 1. A release raises the number if releases before
it would misread the file, and reads all lower ones.
"""

from __future__ import annotations

from covey.base.errors import ConfigError

__version__ = "0.1.0.dev0"


class NewerFormatError(ValueError):
    """The file has a format that this release does not know."""

    def __init__(self, found: int, known: int) -> None:
        super().__init__(f"format {found}; this release reads up to {known}")
        self.found, self.known = found, known


def check_format(found: int, known: int) -> None:
    """Raise NewerFormatError if a file has a later format than the latest that this release knows."""
    if found > known:
        raise NewerFormatError(found, known)


def newer_file(path: object, error: NewerFormatError) -> ConfigError:
    """Return the error for the file at `path`."""
    return ConfigError(
        f"{path} was written by a later release of covey (format {error.found}, and this release reads up to "
        f"{error.known}); update covey on this machine. The file was not changed"
    )
