"""What a node of a cluster must remember through a crash, on disk.

One file for each node holds what it has promised in its run. One file for each machine holds the lineages of the run
that its processes know of. A process that is started again reads both, and is still bound by them.
"""

from __future__ import annotations

import contextlib
import hashlib
from typing import TYPE_CHECKING

from covey.base.errors import ConfigError
from covey.base.version import NewerFormatError, newer_file
from covey.net.host import folders
from covey.net.host.locks import only_one
from covey.proto.lineages import Lineages, merge
from covey.wire.formation import Remembered, decode_remembered, encode_remembered
from covey.wire.membership import Bound, decode_bound, encode_bound

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import TypeVar

    T = TypeVar("T")


class Records:
    """The files of one node and its machine about one run."""

    def __init__(self, cluster: str, run: str, node: bytes) -> None:
        self._node_name = f"{_digest(cluster, run, node)}.record"
        self._run_name = f"{_digest(cluster, run, b'')}.lineages"

    def read(self) -> Bound | None:
        """Return what this node is bound to; None if it is bound to nothing.

        Raises:
            ConfigError: the file cannot be read.
        """
        return _read(_folder() / self._node_name, decode_bound)

    def write(self, bound: Bound | None) -> None:
        """Write what this node is bound to durably; ConfigError if that fails. None removes the file."""
        if bound is not None:
            folders.write_private(_folder() / self._node_name, encode_bound(bound))
        else:
            with contextlib.suppress(OSError, ConfigError):
                (_folder() / self._node_name).unlink(missing_ok=True)

    def lineages(self) -> Remembered:
        """Return the lineages of the run that this machine knows of.

        Raises:
            ConfigError: the file cannot be read.
        """
        return _read(_folder() / self._run_name, decode_remembered) or Remembered()

    def remember(self, remembered: Remembered) -> None:
        """Add to the lineages of the run that this machine knows of, durably; ConfigError if that fails."""
        folder = _folder()
        with only_one(folder / ".lock"):
            folders.write_private(folder / self._run_name, encode_remembered(merge(self.lineages(), remembered)))

    def forget_lineages(self) -> dict[bytes, tuple[str, ...]]:
        """Forget the lineages that may be going on, durably; return each with its known members."""
        folder = _folder()
        with only_one(folder / ".lock"):
            known = self.lineages()
            if known.open:
                lineages = Lineages(known)
                for each in known.open:
                    lineages.give_up(each.lineage)
                folders.write_private(folder / self._run_name, encode_remembered(lineages.remembered))
        return {each.lineage: each.names for each in known.open}


def _digest(cluster: str, run: str, node: bytes) -> str:
    return hashlib.blake2b(f"{cluster}/{run}".encode() + node, digest_size=16).hexdigest()


def _folder() -> Path:
    return folders.private_folder(folders.home() / "runs")


def _read(path: Path, decode: Callable[[bytes], T]) -> T | None:
    try:
        return decode(folders.read_private(path))
    except FileNotFoundError:
        return None
    except NewerFormatError as error:
        raise newer_file(path, error) from None
    except ValueError as error:
        raise ConfigError(f"{path} is damaged ({error}); remove it, and start anew") from error
