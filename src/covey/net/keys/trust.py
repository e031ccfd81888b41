"""The machines to which this one sends files and programs: told by the owner's charter, or by the person here.

A machine is its first key (`wire.signed`). A name is bound to that key when the machine is trusted; what one of its
nodes calls itself later decides nothing. What the person said is in `trusted.json` in covey's folder, by cluster.
Machines that files reach by ssh are in `ssh-hosts.json`, as they were typed: ssh knows their keys.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import msgspec

from covey.base.errors import ConfigError
from covey.base.version import NewerFormatError, check_format, newer_file
from covey.net.host.folders import existing, home, read_private, write_private
from covey.net.host.locks import only_one
from covey.net.keys import charter
from covey.net.keys.identity import node_name, stored_machine
from covey.wire.formation import ID_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from covey.net.keys.clusters import Cluster

TRUST_FILE: Final = "trusted.json"
SSH_HOSTS_FILE: Final = "ssh-hosts.json"
TRUST_FORMAT: Final = 1
"""The version of the files."""
_File = TypeVar("_File")


class TrustedMachine(NamedTuple):
    """A machine to which files and programs may go."""

    name: str
    by_owner: bool = False
    """Whether the owner's charter lists it; otherwise a person here has said so."""
    has_had_files: bool = False
    """Whether a person here has agreed to send files to it."""


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    has_had_files: bool = False


class _TrustFile(msgspec.Struct, forbid_unknown_fields=True):
    """The format of the file: by the tag of a cluster, and by the id of a machine, which is hexadecimal."""

    version: int
    clusters: dict[str, dict[str, _Entry]] = {}


class _SshHosts(msgspec.Struct, forbid_unknown_fields=True):
    """The format of the file of machines behind ssh."""

    version: int
    hosts: list[str] = []


class _Version(msgspec.Struct):
    version: int


def trusted(cluster: Cluster) -> dict[bytes, TrustedMachine]:
    """Return the machines of a cluster that this machine trusts, by id; itself too.

    Where the owner has a list of approved machines, only these are trusted, under the names that the owner bound.

    Raises:
        ConfigError: the file is damaged, open to other users, or of a later covey.
    """
    said = {bytes.fromhex(each): entry for each, entry in _read().clusters.get(cluster.tag, {}).items()}
    approved = charter.bound_names(cluster)
    if cluster.charter is None or cluster.charter.allowed is None:
        found = {each: TrustedMachine(entry.name, False, entry.has_had_files) for each, entry in said.items()}
    else:
        found = {}
        for each, name in approved.items():
            entry = said.get(each, _Entry(""))
            found[each] = TrustedMachine(name or entry.name, True, entry.has_had_files)
    here = stored_machine()
    return found | {here: TrustedMachine(node_name(socket.gethostname(), here), False, True)} if here else found


def remember(cluster: Cluster, machines: Mapping[bytes, str], *, has_had_files: bool = False) -> None:
    """Trust machines from now on, under these names."""

    def change(entries: dict[str, _Entry]) -> None:
        for machine, name in machines.items():
            before = entries.get(machine.hex())
            entries[machine.hex()] = _Entry(name, has_had_files or (before is not None and before.has_had_files))

    _change(cluster, change)


def forget(cluster: Cluster, machine: bytes) -> None:
    """Trust a machine no more; does nothing if it was not trusted by a person here."""
    _change(cluster, lambda entries: entries.pop(machine.hex(), None))


def ssh_hosts() -> set[str]:
    """Return the machines to which files may go by ssh, as they were typed.

    Raises:
        ConfigError: the file is damaged, open to other users, or of a later covey.
    """
    return set(_read_ssh_hosts().hosts)


def remember_ssh_hosts(names: Iterable[str]) -> None:
    """Let files go to machines by ssh from now on."""
    with only_one(home() / f".{SSH_HOSTS_FILE}.lock"):
        hosts = sorted({*_read_ssh_hosts().hosts, *names})
        data = msgspec.json.encode(_SshHosts(TRUST_FORMAT, hosts))
        write_private(existing() / SSH_HOSTS_FILE, msgspec.json.format(data, indent=2) + b"\n")


def _read_ssh_hosts() -> _SshHosts:
    path = existing() / SSH_HOSTS_FILE
    try:
        return _decode(path, read_private(path), _SshHosts)
    except FileNotFoundError:
        return _SshHosts(TRUST_FORMAT)


def _change(cluster: Cluster, change: Callable[[dict[str, _Entry]], object]) -> None:
    with only_one(home() / f".{TRUST_FILE}.lock"):
        file = _read()
        change(file.clusters.setdefault(cluster.tag, {}))
        write_private(_path(), msgspec.json.format(msgspec.json.encode(file), indent=2) + b"\n")


def _path() -> Path:
    return existing() / TRUST_FILE


def _read() -> _TrustFile:
    try:
        data = read_private(_path())
    except FileNotFoundError:
        return _TrustFile(TRUST_FORMAT)
    file = _decode(_path(), data, _TrustFile)
    try:
        sizes = {len(bytes.fromhex(each)) for entries in file.clusters.values() for each in entries}
    except ValueError:
        raise _damaged(_path()) from None
    if not sizes <= {ID_BYTES}:
        raise _damaged(_path())
    return file


def _decode(path: Path, data: bytes, kind: type[_File]) -> _File:
    try:
        version = msgspec.json.decode(data, type=_Version).version
    except msgspec.DecodeError:
        raise _damaged(path) from None
    if version < 1:
        raise _damaged(path)
    try:
        check_format(version, TRUST_FORMAT)
    except NewerFormatError as error:
        raise newer_file(path, error) from None
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError:
        raise _damaged(path) from None


def _damaged(path: Path) -> ConfigError:
    advice = f"remove {path}, and covey asks again before it sends files to a machine"
    return ConfigError(f"the list of trusted machines {path} is damaged; {advice}")
