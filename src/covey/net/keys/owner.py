"""The owner of a cluster: its private key, a file that only the owner's machine has, and the new secrets that it signs.

A new secret is made and signed on the owner's machine; every other one checks and stores it.
"""

from __future__ import annotations

import contextlib
import secrets
from typing import TYPE_CHECKING, Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from covey.base.errors import AuthError, ConfigError
from covey.net.host.folders import key_words, sync_folder, write_private
from covey.net.keys import clusters
from covey.net.keys.clusters import cluster_path, made_folder
from covey.wire.messages import NewSecret
from covey.wire.secret import KEY_BYTES, ClusterSecret
from covey.wire.signed import is_signed, public_half, rotation_words

if TYPE_CHECKING:
    from pathlib import Path

    from covey.net.keys.clusters import Cluster

OwnerKey = Ed25519PrivateKey
SECRET_GIVEN: Final = "its secret was given by COVEY_SECRET, COVEY_SECRET_FILE or secret=; change it there"
NO_OWNER: Final = (
    "it knows no owner of this cluster, so it takes no new secret from the network; run `covey enroll` there"
)


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


def rotate(old: Cluster, grace: int) -> Cluster:
    """Give the cluster a new secret in the file of this machine, and return the changed cluster.

    Raises:
        ConfigError: another process has changed the secret meanwhile.
    """
    secret = ClusterSecret(old.name, secrets.token_bytes(KEY_BYTES))

    def change(now: Cluster) -> Cluster:
        if now.secret != old.secret:
            raise ConfigError(f"the secret of {old.name!r} was changed by another process just now; look again")
        return clusters.with_secret(now, secret, clusters.next_serial(now.serial), grace)

    return clusters.update(old.name, change)


def sign_secret(owner: Ed25519PrivateKey, old: Cluster, new: Cluster, grace: int, recipient: bytes) -> NewSecret:
    """Return the message that gives the new secret to the node of this id."""
    key, serial = new.secret.key, new.serial
    words = rotation_words(new.name, serial, grace, key, old.secret.key, recipient)
    return NewSecret(key, serial, grace, owner.sign(words))


def keep_secret(cluster: Cluster, own_id: bytes, message: NewSecret) -> Cluster:
    """Store a new secret, if the owner key that this machine has pinned signed it for the node of this id.

    Return the changed cluster. `cluster` is what the caller uses. Writes to disk: not for the event loop.

    Raises:
        ConfigError: it cannot be stored here; says why, and what to do.
        AuthError: the owner has not signed it, or has signed a later one.
    """
    secret = ClusterSecret(cluster.name, message.key)

    def change(saved: Cluster) -> Cluster:
        if saved.secret == secret and saved.serial == message.serial:
            return saved  # another process of this machine has stored it
        if saved.secret != cluster.secret:
            raise ConfigError(SECRET_GIVEN)
        if not saved.owner:
            raise ConfigError(NO_OWNER)
        words = rotation_words(saved.name, message.serial, message.grace, message.key, saved.secret.key, own_id)
        if not is_signed(saved.owner, words, message.signature):
            raise AuthError("the owner of this cluster has not signed this secret for this node in place of its own")
        if message.serial <= saved.serial:
            raise AuthError(f"change {message.serial} of the secret is not later than {saved.serial}, which it has")
        return clusters.with_secret(saved, secret, message.serial, message.grace)

    if not clusters.cluster_path(cluster.name).exists():
        raise ConfigError(SECRET_GIVEN)
    return clusters.update(cluster.name, change)
