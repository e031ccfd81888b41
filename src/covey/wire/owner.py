"""What the owner of a cluster signs: a new secret for one node, and the charter of the cluster.

A cluster made by `covey init` has an owner key (Ed25519). Every member pins its public half, and accepts a change of
the cluster only with its signature. The signed bytes start with a label for their purpose and the cluster's name, and
each field has a fixed length or follows its length, so that a signature is not valid for anything else.
"""

from __future__ import annotations

import hashlib
import struct
from typing import TYPE_CHECKING, Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from covey.wire.messages import Charter

OWNER_BYTES: Final = 32
SIGNATURE_BYTES: Final = 64
_ROTATION: Final = b"covey/1/owner/rotation"
_CHARTER: Final = b"covey/1/owner/charter"
_NAMES: Final = b"covey/1/owner/names"
_FILES: Final = b"covey/1/owner/files"


def rotation_words(cluster: str, serial: int, grace: int, new_key: bytes, old_key: bytes, recipient: bytes) -> bytes:
    """Return the bytes that the owner signs to give one node, named by its id, a new key for its current one.

    `grace` is the number of seconds for which the old key stays valid.
    """
    keys = hashlib.sha256(new_key).digest() + hashlib.sha256(old_key).digest()
    return _begin(_ROTATION, cluster) + struct.pack(">QI", serial, grace) + keys + _measured(recipient)


def charter_words(cluster: str, charter: Charter) -> bytes:
    """Return the bytes that the owner signs for a charter, the list of nodes that may be in the cluster."""
    lists = [charter.denied] if charter.allowed is None else [charter.denied, charter.allowed]
    packed = b"".join(_measured(b"".join(_measured(each) for each in nodes)) for nodes in lists)
    return _begin(_CHARTER, cluster) + struct.pack(">Q", charter.serial) + _measured(charter.machine.encode()) + packed


def names_words(cluster: str, charter: Charter) -> bytes:
    """Return the bytes that the owner signs to bind the names of the allowed machines of a charter to their keys."""
    pairs = zip(charter.allowed or (), charter.names, strict=False)
    packed = b"".join(_measured(machine) + _measured(name.encode()) for machine, name in pairs)
    return _begin(_NAMES, cluster) + struct.pack(">Q", charter.serial) + _measured(packed)


def is_signed(owner: bytes, words: bytes, signature: bytes) -> bool:
    """Tell whether these words were signed with the private half of `owner`."""
    if len(owner) != OWNER_BYTES or len(signature) != SIGNATURE_BYTES:
        return False
    try:
        Ed25519PublicKey.from_public_bytes(owner).verify(signature, words)
    except (InvalidSignature, ValueError):
        return False
    return True


def has_signed_names(cluster: str, owner: bytes, charter: Charter) -> bool:
    """Tell whether the owner has bound the names of a charter: one to each allowed machine."""
    is_complete = charter.allowed is not None and len(charter.names) == len(charter.allowed)
    return is_complete and is_signed(owner, names_words(cluster, charter), charter.names_signature)


def public_half(private: Ed25519PrivateKey) -> bytes:
    """Return the public half of a key."""
    return private.public_key().public_bytes_raw()


def files_tag(owner: bytes) -> str:
    """Return a name for the files of a cluster that does not change with its secret."""
    return hashlib.sha256(_FILES + owner).hexdigest()[:32]


def _begin(label: bytes, cluster: str) -> bytes:
    return _measured(label) + _measured(cluster.encode())


def _measured(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data
