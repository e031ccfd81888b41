"""What keys sign: changes of a cluster by its owner, and the other keys of a machine by its first key.

A cluster made by `covey init` has an owner key (Ed25519). Every member pins its public half, and accepts a new secret
for its node, or a new charter of the cluster, only with its signature. The signed bytes start with a label for their
purpose and the cluster's name, and each field has a fixed length or follows its length, so that a signature is not
valid for anything else.

A machine has a key for each process slot, and its commands and keepers use temporary keys. Lists of allowed or denied
nodes could not name all of these. So a card may name the machine's first key, with a signature of that key over the
node's own. TLS proves the node's own key, so no other node can use the signature.
"""

from __future__ import annotations

import hashlib
import struct
from typing import TYPE_CHECKING, Final, Protocol

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from covey.base.errors import AuthError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from covey.wire.messages import Charter


OWNER_BYTES: Final = 32
SIGNATURE_BYTES: Final = 64
_ROTATION: Final = b"covey/1/owner/rotation"
_CHARTER: Final = b"covey/1/owner/charter"
_OWNER_NAMES_LABEL: Final = b"covey/1/owner/names"
_OWNER_FILES_LABEL: Final = b"covey/1/owner/files"


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
    return _begin(_OWNER_NAMES_LABEL, cluster) + struct.pack(">Q", charter.serial) + _measured(packed)


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
    return hashlib.sha256(_OWNER_FILES_LABEL + owner).hexdigest()[:32]


def _begin(label: bytes, cluster: str) -> bytes:
    return _measured(label) + _measured(cluster.encode())


def _measured(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data


_MACHINE_LABEL: Final = b"covey/1/machine"
_CERTIFICATE_LABEL: Final = b"covey/1/machine-certificate"


def machine_words(node_id: bytes) -> bytes:
    """Return the bytes that the first key of a machine signs for another key."""
    return _MACHINE_LABEL + node_id


def certificate_words(public: bytes) -> bytes:
    """Return the bytes that the first key of a machine signs for the key of a certificate (SubjectPublicKeyInfo)."""
    return _CERTIFICATE_LABEL + public


class Endorsed(Protocol):
    """A card, or what is known of a node from its card."""

    @property
    def id(self) -> bytes: ...

    @property
    def machine(self) -> bytes: ...

    @property
    def endorsement(self) -> bytes: ...


def machine_of(card: Endorsed) -> bytes:
    """Return the id of the machine of a node: the key that signed for it, or its own.

    Raises:
        AuthError: the card names a machine that has not signed.
    """
    if not card.machine:
        return card.id
    if not is_signed(card.machine, machine_words(card.id), card.endorsement):
        raise AuthError("the card names a machine whose key has not signed it")
    return card.machine
