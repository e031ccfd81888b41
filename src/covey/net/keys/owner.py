"""The private owner key of a cluster: a file beside the cluster's, only on the machine of the owner."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from covey.base.errors import ConfigError
from covey.net.home import key_words, sync_folder, write_private
from covey.net.keys.clusters import cluster_path, made_folder
from covey.wire.owner import public_half

if TYPE_CHECKING:
    from pathlib import Path

    from covey.net.keys.clusters import Cluster

OwnerKey = Ed25519PrivateKey


def make(name: str) -> bytes:
    """Make an owner key for the cluster of that name, replacing an earlier one; return its public half."""
    private = Ed25519PrivateKey.generate()
    words = f"{private.private_bytes_raw().hex()} {public_half(private).hex()}\n"
    made_folder()
    write_private(_path(name), words.encode())
    return public_half(private)


def held(cluster: Cluster) -> Ed25519PrivateKey | None:
    """Return the private owner key of a cluster, if it is on this machine.

    Raises:
        ConfigError: its file is damaged, or open to other users.
    """
    path = _path(cluster.name)
    try:
        words = key_words(path)
    except FileNotFoundError:
        return None
    with contextlib.suppress(ValueError):
        secret, public = (bytes.fromhex(word.decode("ascii")) for word in words)
        private = Ed25519PrivateKey.from_private_bytes(secret)
        if public_half(private) == public:
            return private if public == cluster.owner else None  # else it is the owner of another, earlier cluster
    raise ConfigError(f"the owner key {path} is damaged; put a copy of it there, or make a new cluster")


def require(cluster: Cluster, deed: str) -> Ed25519PrivateKey:
    """Return the private owner key of a cluster; `deed` is what it is needed for, in words.

    Raises:
        ConfigError: it is not on this machine, or the cluster has none; says what to do.
    """
    if (private := held(cluster)) is not None:
        return private
    if not cluster.owner:
        raise ConfigError(
            f"{deed} takes the owner key of {cluster.name!r}, and this machine knows of none: clusters of a passphrase "
            "or of a bare key have no owner. `covey init` makes a cluster with one; for a new passphrase, run "
            f"`covey init {cluster.name} --passphrase --force` on each machine"
        )
    raise ConfigError(
        f"{deed} takes the owner key of {cluster.name!r}, which is not on this machine: run this on the machine where "
        f"`covey init {cluster.name}` was run (`covey secret show` says there that it holds the owner key)"
    )


def forget(name: str) -> None:
    """Remove the owner key of a cluster, if it is here."""
    path = _path(name)
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
        sync_folder(path.parent)


def _path(name: str) -> Path:
    return cluster_path(name).with_suffix(".owner")
