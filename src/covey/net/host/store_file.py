"""The entries of a run's store in a file: it is read when a run begins, and written after changes.

The member that orders the changes writes it, half a second after a change and when it leaves: a file lacks at most the
changes of that time. It is replaced as a whole, so that after a crash it has all entries of one moment.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from covey.base.errors import ConfigError
from covey.base.version import NewerFormatError, check_format, newer_file
from covey.net.host.folders import read_private, write_private
from covey.wire.store import Key, Value

if TYPE_CHECKING:
    import os

    from covey.wire.store import Key, Value

STORE_FORMAT: Final = 1
SAVE_AFTER: Final = 0.5
"""Seconds after a change until the file has it, and all others that came meanwhile."""

logger = logging.getLogger(__name__)
StoredEntries = tuple[tuple[str, bytes], ...]


class _Head(msgspec.Struct, frozen=True, array_like=True):
    """The start of a file of any release."""

    format: int


class _Saved(msgspec.Struct, frozen=True, array_like=True):
    """The content of a file."""

    format: int
    entries: tuple[tuple[Key, Value], ...]


class StoreFile:
    """A file with the entries of a store. On any thread."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).expanduser().absolute()
        self._lock = threading.Lock()
        self._written = -1
        self._has_failed = False

    def read(self) -> StoredEntries:
        """Return the entries; none if there is no file.

        Raises:
            ConfigError: the file cannot be read, is none of a store, or was written by a later release.
        """
        try:
            data = read_private(self.path, most=1 << 42)
            check_format(msgspec.msgpack.decode(data, type=_Head).format, STORE_FORMAT)
            return msgspec.msgpack.decode(data, type=_Saved).entries
        except FileNotFoundError:
            return ()
        except NewerFormatError as error:
            raise newer_file(self.path, error) from None
        except msgspec.DecodeError as error:
            raise ConfigError(
                f"{self.path} is not the file of a store ({error}); set store_file to another path, or move it away"
            ) from None

    def write(self, number: int, entries: StoredEntries) -> None:
        """Replace the file, unless it was replaced with a higher number already. That it fails is logged, once."""
        with self._lock:
            if number <= self._written:
                return
            try:
                data = msgspec.msgpack.encode(_Saved(STORE_FORMAT, entries))
                write_private(self.path, data, otherwise="set store_file to another path")
            except ConfigError as error:
                if not self._has_failed:
                    logger.warning("the entries of the store are not saved: %s", error)
                self._has_failed = True
            else:
                self._written, self._has_failed = number, False
