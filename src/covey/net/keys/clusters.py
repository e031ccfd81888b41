"""The clusters that this machine is in: one private file each, with the secret, and the nodes that were seen."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

import msgspec

from covey.base.errors import ConfigError, RemoteProtocolError
from covey.base.version import NewerFormatError, check_format, newer_file
from covey.net.host.folders import existing, home, private_folder, read_private, write_private
from covey.net.host.locks import only_one
from covey.wire.formation import ID_BYTES
from covey.wire.messages import WAITING_NODES_LIMIT, Charter, decode_control, encode
from covey.wire.secret import CLUSTER_NAME, ClusterSecret, check_cluster_name
from covey.wire.signed import OWNER_BYTES, charter_words, files_tag, has_signed_names, is_signed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

CLUSTER_FORMAT: Final = 1
"""The format of cluster files."""
MAX_KNOWN: Final = 1000
GRACE: Final = 600
"""Seconds for which the previous secret stays valid, so that nodes without the new one can still be reached."""
MAX_GRACE: Final = 7 * 24 * 3600
NO_CLUSTER: Final = "this machine is in no cluster: run `covey init` here, or `covey enroll` with the join code of one"


@dataclass(frozen=True, slots=True)
class Cluster:
    """What a node needs to be in a cluster."""

    secret: ClusterSecret
    seeds: tuple[str, ...] = ()
    """Addresses `host:port` to dial in addition to those found by multicast."""
    denied: frozenset[bytes] = frozenset()
    """Ids of nodes that this machine refuses although they have the secret."""
    owner: bytes = b""
    """The public key that must sign changes of the cluster. If it is empty, no change is accepted."""
    serial: int = 0
    """The number of the last change of the secret that the owner signed."""
    previous: ClusterSecret | None = None
    """The secret before that change, which is valid until `previous_until`."""
    previous_until: float = 0.0
    """In seconds since 1970, by the clock of this machine."""
    charter: Charter | None = None
    """The owner's list of nodes that may be in the cluster."""
    relays: tuple[str, ...] = ()
    """Addresses `host:port` of relays, through which nodes meet that cannot connect."""

    def earlier(self, now: float) -> ClusterSecret | None:
        """Return the secret before the last change, if it is still valid; `now` is in seconds since 1970."""
        return self.previous if 0 < self.previous_until - now <= MAX_GRACE else None  # else the clock was set back

    @property
    def name(self) -> str:
        return self.secret.name

    @property
    def tag(self) -> str:
        """A name for files that differs between clusters of the same name.

        It is derived from the owner key if there is one, so that it stays when the secret changes.
        """
        return f"{self.name}/{files_tag(self.owner) if self.owner else self.secret.derive('files')[:16].hex()}"


class _ClusterFormat(msgspec.Struct):
    """The one field of a cluster's file that every release reads first."""

    version: int = CLUSTER_FORMAT


class _File(msgspec.Struct, forbid_unknown_fields=True):
    """The format of a cluster's file; bytes are hexadecimal."""

    name: str
    key: str
    seeds: list[str]
    denied: list[str]
    known: dict[str, str]
    created: str
    owner: str = ""
    serial: int = 0
    previous: str = ""
    previous_until: float = 0.0
    charter: str = ""
    machines: dict[str, str] = {}
    """By id of known nodes: the first key of their machine, if it is another."""
    waiting: dict[str, str] = {}
    """The names of machines that wait for the owner's approval, by id."""
    relays: list[str] = []
    version: int = CLUSTER_FORMAT
    """The format of the file."""

    def cluster(self) -> Cluster:
        secret = ClusterSecret(self.name, bytes.fromhex(self.key))
        denied = frozenset(bytes.fromhex(node_id) for node_id in self.denied)
        return Cluster(
            secret,
            tuple(self.seeds),
            denied,
            bytes.fromhex(self.owner),
            self.serial,
            ClusterSecret(self.name, bytes.fromhex(self.previous)) if self.previous else None,
            self.previous_until,
            self._charter(),
            tuple(self.relays),
        )

    def _charter(self) -> Charter | None:
        if not self.charter:
            return None
        charter = decode_control(bytes.fromhex(self.charter))
        words = charter_words(self.name, charter) if isinstance(charter, Charter) else b""
        if not isinstance(charter, Charter) or not is_signed(bytes.fromhex(self.owner), words, charter.signature):
            raise ValueError
        if charter.names and not has_signed_names(self.name, bytes.fromhex(self.owner), charter):
            raise ValueError
        return charter


def find_saved(name: str | None) -> Cluster:
    """Return the cluster of that name, or the default one, from the files of this machine."""
    name = default_name() if name is None else name
    if name is None:
        raise ConfigError(_several(names) if (names := _names()) else NO_CLUSTER)
    return load(name)


def load(name: str) -> Cluster:
    """Return the cluster of that name; ConfigError if this machine is not in it or its file cannot be used."""
    return _read(name).cluster()


def save(cluster: Cluster) -> Path:
    """Write the cluster's file and return its path; known nodes and the default stay as they are."""
    with only_one(made_folder() / ".lock"):
        default = default_name()
        _write(cluster)
        if default is not None and default_name() is None:  # with a second cluster, the first stays the default
            write_private(home() / "default", f"{default}\n".encode())
    return cluster_path(cluster.name)


def update(name: str, change: Callable[[Cluster], Cluster]) -> Cluster:
    """Replace a cluster by `change(cluster)`, under a lock."""
    with only_one(made_folder() / ".lock"):
        changed = change(load(name))
        _write(changed)
    return changed


def remove(name: str) -> None:
    """Remove a cluster with its secret, and its owner key if it is on this machine."""
    from covey.net.keys import owner

    path = cluster_path(name)
    with only_one(made_folder() / ".lock"):
        if not path.exists():
            raise ConfigError(_unknown(name))
        marked = _marked_default()
        path.unlink()
        owner.forget(name)
        if marked == name:
            (home() / "default").unlink(missing_ok=True)


def list_clusters() -> list[Cluster]:
    """Return the clusters that this machine is in, by name."""
    return [load(name) for name in _names()]


def default_name() -> str | None:
    """Return the name of the only cluster, or of the default one; None if there is neither."""
    names = _names()
    marked = _marked_default()
    return names[0] if len(names) == 1 else marked if marked in names else None


def set_default(name: str) -> None:
    """Set the default cluster."""
    load(name)
    write_private(home() / "default", f"{name}\n".encode())


def next_serial(last: int) -> int:
    """Return the number of a change after `last`: the time in milliseconds, so that it grows if a file was lost."""
    return max(last + 1, time.time_ns() // 1_000_000)


def with_secret(cluster: Cluster, secret: ClusterSecret, serial: int, grace: int) -> Cluster:
    """Return the cluster with another secret; the current one stays valid for `grace` seconds."""
    until = time.time() + min(grace, MAX_GRACE)
    return replace(cluster, secret=secret, serial=serial, previous=cluster.secret, previous_until=until)


def known(name: str) -> dict[bytes, str]:
    """Return the names of known nodes of a cluster, by id."""
    return {bytes.fromhex(node_id): node for node_id, node in _read(name).known.items()}


def machines(name: str) -> dict[bytes, bytes]:
    """Return, by id of known nodes, the first key of their machine, if it is another."""
    return {bytes.fromhex(node): bytes.fromhex(machine) for node, machine in _read(name).machines.items()}


def waiting(name: str) -> dict[bytes, str]:
    """Return the names of machines that wait for approval, as nodes of this machine have seen them, by id."""
    return {bytes.fromhex(machine): node for machine, node in _read(name).waiting.items()}


def remember(cluster_name: str, node_id: bytes, node_name: str, machine: bytes = b"") -> None:
    """Store the name of a node for commands; does nothing if it cannot be written.

    `machine` is the first key of its machine. The latest 1000 are stored. Writes to disk: not for the event loop.
    """
    node, other = node_id.hex(), machine.hex() if machine != node_id else ""
    with contextlib.suppress(ConfigError):
        if not cluster_path(cluster_name).exists():
            return
        file = _read(cluster_name)
        if file.known.get(node) != node_name or file.machines.get(node, "") != other:
            with only_one(made_folder() / ".lock"):
                file = _read(cluster_name)
                file.known.pop(node, None)
                file.known[node] = node_name
                if other:
                    file.machines[node] = other
                for oldest in list(file.known)[:-MAX_KNOWN]:
                    del file.known[oldest]
                    file.machines.pop(oldest, None)
                _put(file)


def remember_waiting(cluster_name: str, machine: bytes, node_name: str) -> None:
    """Store a machine that waits for approval; the latest 64 are stored. Writes to disk: not for the event loop."""
    if cluster_path(cluster_name).exists():
        with only_one(made_folder() / ".lock"):
            file = _read(cluster_name)
            file.waiting.pop(machine.hex(), None)
            file.waiting[machine.hex()] = node_name
            for oldest in list(file.waiting)[:-WAITING_NODES_LIMIT]:
                del file.waiting[oldest]
            _put(file)


def forget_waiting(cluster_name: str, answered: Iterable[bytes]) -> None:
    """Remove machines from the ones that wait for approval."""
    with only_one(made_folder() / ".lock"):
        file = _read(cluster_name)
        for machine in answered:
            file.waiting.pop(machine.hex(), None)
        _put(file)


def cluster_path(name: str) -> Path:
    """Return the path of a cluster's file, which may not exist."""
    return existing("clusters") / f"{check_cluster_name(name)}.json"


def made_folder() -> Path:
    """Return the folder of the files of clusters, for writing: made if missing."""
    return private_folder(home() / "clusters")


def _names() -> list[str]:
    return sorted(path.stem for path in existing("clusters").glob("*.json") if CLUSTER_NAME.fullmatch(path.stem))


def _marked_default() -> str | None:
    try:
        return read_private(existing() / "default").decode("ascii", "replace").strip()
    except FileNotFoundError:
        return None


def _read(name: str) -> _File:
    path = cluster_path(name)
    try:
        data = read_private(path)
    except FileNotFoundError:
        raise ConfigError(_unknown(name)) from None
    try:
        check_format(msgspec.json.decode(data, type=_ClusterFormat).version, CLUSTER_FORMAT)
        file = msgspec.json.decode(data, type=_File)
        named = (*file.known, *file.machines, *file.machines.values(), *file.waiting)
        ids = [*file.cluster().denied, *map(bytes.fromhex, named)]
        if file.name != name or any(len(node_id) != ID_BYTES for node_id in ids) or file.serial < 0:
            raise ValueError
        if len(file.cluster().owner) not in (0, OWNER_BYTES):
            raise ValueError
    except NewerFormatError as error:
        raise newer_file(path, error) from None
    except (ValueError, msgspec.DecodeError, RemoteProtocolError):
        raise ConfigError(
            f"the cluster file {path} is damaged; run `covey clusters --forget {name}`, then enroll again"
        ) from None
    return file


def _write(cluster: Cluster) -> None:
    """Write a cluster's file. Called under the lock."""
    old = _read(cluster.name) if cluster_path(cluster.name).exists() else None
    key = cluster.secret.key.hex()
    _put(
        _File(
            name=cluster.name,
            key=key,
            seeds=list(cluster.seeds),
            denied=sorted(node_id.hex() for node_id in cluster.denied),
            known=old.known if old else {},
            created=old.created if old and old.key == key else datetime.now(UTC).isoformat(timespec="seconds"),
            owner=cluster.owner.hex(),
            serial=cluster.serial,
            previous=cluster.previous.key.hex() if cluster.previous is not None else "",
            previous_until=cluster.previous_until,
            charter=encode(cluster.charter).hex() if cluster.charter is not None else "",
            machines=old.machines if old else {},
            waiting=old.waiting if old else {},
            relays=list(cluster.relays),
        )
    )


def _put(file: _File) -> None:
    data = msgspec.json.format(msgspec.json.encode(file), indent=2)
    write_private(cluster_path(file.name), data + b"\n")


def _unknown(name: str) -> str:
    names = _names()
    if not names:
        return f"there is no cluster {name!r} here: {NO_CLUSTER}"
    return f"this machine is not in a cluster {name!r}, only in {', '.join(names)}; `covey enroll` puts it into another"


def _several(names: list[str]) -> str:
    return (
        f"this machine is in several clusters: {', '.join(names)}; choose one with --cluster NAME or cluster=, or "
        "set the default with `covey clusters --default NAME`"
    )
