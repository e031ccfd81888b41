"""What a node of a cluster has promised, on its disk: a node that is started anew is still bound by it."""

from __future__ import annotations

import contextlib
import hashlib
from typing import TYPE_CHECKING

from covey.base.errors import ConfigError
from covey.net import home
from covey.wire.membership import Bound, decode_bound, encode_bound

if TYPE_CHECKING:
    from pathlib import Path

    from covey.wire.membership import Record


class Records:
    """What one node wrote down about one run."""

    def __init__(self, cluster: str, run: str, node: bytes) -> None:
        name = hashlib.blake2b(f"{cluster}/{run}".encode() + node, digest_size=16).hexdigest()
        self._name = f"{name}.record"

    def _path(self) -> Path:
        return home.private_folder(home.home() / "runs") / self._name

    def read(self) -> Bound | None:
        """Return what was written last; None: nothing was promised.

        Raises:
            ConfigError: there is something, and it cannot be read.
        """
        try:
            return decode_bound(home.read_private(self._path()))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise ConfigError(f"{self._path()} is damaged ({error}); remove it, and start anew") from error

    def write(self, generation: int, record: Record) -> None:
        """Make a record durable; ConfigError if that fails."""
        home.write_private(self._path(), encode_bound(Bound(generation, record)))

    def forget(self) -> None:
        """This node is bound to nothing any more."""
        with contextlib.suppress(OSError, ConfigError):
            self._path().unlink(missing_ok=True)
