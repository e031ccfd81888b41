"""Versions of covey's files: a file of a later release is refused with one sentence, and not changed.

A file holds the number of its format; a file without one has format 1. A release raises the number if releases before
it would misread the file, and reads all lower ones.
"""

from __future__ import annotations

import contextlib

import msgspec

from covey.base.errors import ConfigError


class NewerFormatError(ValueError):
    """The file has a format that this release does not know."""

    def __init__(self, found: int, known: int) -> None:
        super().__init__(f"format {found}; this release reads up to {known}")
        self.found, self.known = found, known


def check_format(found: int, known: int) -> None:
    """Raise NewerFormatError if a file has a later format than the latest that this release knows."""
    if found > known:
        raise NewerFormatError(found, known)


def check_packed(data: bytes, at: int, known: int) -> None:
    """Raise NewerFormatError if a file is a msgpack array with a later format at index `at`, whatever else it holds."""
    found: object = None
    with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        found = msgspec.msgpack.decode(data)
    if isinstance(found, list) and len(found) > at and type(found[at]) is int:
        check_format(found[at], known)


def newer_file(path: object, error: NewerFormatError) -> ConfigError:
    """Return the error for the file at `path`."""
    return ConfigError(
        f"{path} was written by a later release of covey (format {error.found}, and this release reads up to "
        f"{error.known}); update covey on this machine. The file was not changed"
    )
