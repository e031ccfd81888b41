"""A new secret for a cluster: made and signed on the owner's machine, checked and stored on every other one."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Final

from covey.base.errors import AuthError, ConfigError
from covey.net.keys import clusters
from covey.wire.messages import NewSecret
from covey.wire.owner import is_signed, rotation_words
from covey.wire.secret import KEY_BYTES, ClusterSecret

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from covey.net.keys.clusters import Cluster

GIVEN: Final = "its secret was given by COVEY_SECRET, COVEY_SECRET_FILE or secret=; change it there"
NO_OWNER: Final = (
    "it knows no owner of this cluster, so it takes no new secret from the network; run `covey enroll` there"
)


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


def sign(owner: Ed25519PrivateKey, old: Cluster, new: Cluster, grace: int, recipient: bytes) -> NewSecret:
    """Return the message that gives the new secret to the node of this id."""
    key, serial = new.secret.key, new.serial
    words = rotation_words(new.name, serial, grace, key, old.secret.key, recipient)
    return NewSecret(key, serial, grace, owner.sign(words))


def keep(cluster: Cluster, own_id: bytes, message: NewSecret) -> Cluster:
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
            raise ConfigError(GIVEN)
        if not saved.owner:
            raise ConfigError(NO_OWNER)
        words = rotation_words(saved.name, message.serial, message.grace, message.key, saved.secret.key, own_id)
        if not is_signed(saved.owner, words, message.signature):
            raise AuthError("the owner of this cluster has not signed this secret for this node in place of its own")
        if message.serial <= saved.serial:
            raise AuthError(f"change {message.serial} of the secret is not later than {saved.serial}, which it has")
        return clusters.with_secret(saved, secret, message.serial, message.grace)

    if not clusters.cluster_path(cluster.name).exists():
        raise ConfigError(GIVEN)
    return clusters.update(cluster.name, change)
