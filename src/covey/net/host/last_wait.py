"""What a process of this machine waited for when it gave up: `covey doctor` explains it after the timeout, too.

One private file, `last-wait` in covey's folder, has the latest wait that failed; a join of the same run removes it. It
is a hint: if it cannot be written or read, there is none.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Annotated, Final

import msgspec

from covey.base.errors import ConfigError
from covey.base.version import NewerFormatError, check_format, newer_file
from covey.net.host import folders
from covey.wire.messages import Wait  # noqa: TC001 - a field, which msgspec reads

if TYPE_CHECKING:
    from pathlib import Path

LAST_WAIT_FILE: Final = "last-wait"
LAST_WAIT_FORMAT: Final = 1
WAIT_RECENT_SECONDS: Final = 3600.0
"""A wait that failed longer ago is not told: since then much may have changed."""

Text = Annotated[str, msgspec.Meta(max_length=200)]


class _FormatOnly(msgspec.Struct):
    """The one field that every release reads first."""

    format: int = LAST_WAIT_FORMAT


class FailedWait(msgspec.Struct, frozen=True, kw_only=True):
    """A run that a process of this machine waited for, in vain."""

    format: int = LAST_WAIT_FORMAT
    run: Text
    cluster: Text
    at: float
    """When it gave up, in seconds since 1970."""
    seconds: float
    """How long it had waited."""
    node: Text
    """Its name."""
    wait: Wait
    """What it waited for, in the words with which it would have answered a command."""


def keep_wait(failed: FailedWait) -> None:
    """Write down a wait that has failed; does nothing if that cannot be written. Blocks while it is written."""
    with contextlib.suppress(ConfigError, OSError):
        path = folders.home() / LAST_WAIT_FILE
        _read(path)  # that of a later release stays
        folders.write_private(path, msgspec.json.encode(failed))


def forget_wait(run: str, cluster: str) -> None:
    """Remove the wait for this run, which has begun now."""
    with contextlib.suppress(ConfigError, OSError, ValueError):
        path = folders.existing() / LAST_WAIT_FILE
        if path.exists() and (found := _read(path)) is not None and (found.run, found.cluster) == (run, cluster):
            path.unlink(missing_ok=True)


def last_wait(cluster: str) -> FailedWait | None:
    """Return the latest wait in a cluster that failed on this machine; None if it was long ago, or is not known."""
    with contextlib.suppress(ConfigError, OSError):
        found = _read(folders.existing() / LAST_WAIT_FILE)
        if found is not None and found.cluster == cluster and 0 <= time.time() - found.at <= WAIT_RECENT_SECONDS:
            return found
    return None


def _read(path: Path) -> FailedWait | None:
    """Return what the file has; None if there is none, or it is damaged.

    Raises:
        ConfigError: a later release has written it, or others may read it.
    """
    try:
        data = folders.read_private(path)
        check_format(msgspec.json.decode(data, type=_FormatOnly).format, LAST_WAIT_FORMAT)
        return msgspec.json.decode(data, type=FailedWait)
    except NewerFormatError as error:
        raise newer_file(path, error) from None
    except (FileNotFoundError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
