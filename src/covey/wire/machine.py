"""The machine that a node belongs to: the first key of a machine signs its other keys.

A machine has a key for each process slot, and its commands and keepers use temporary keys. Lists of allowed or denied
nodes could not name all of these. So a card may name the machine's first key, with a signature of that key over the
node's own. TLS proves the node's own key, so no other node can use the signature.
"""

from __future__ import annotations

from typing import Final, Protocol

from covey.base.errors import AuthError
from covey.wire.owner import is_signed

_LABEL: Final = b"covey/1/machine"
_CERTIFICATE_LABEL: Final = b"covey/1/machine-certificate"


def machine_words(node_id: bytes) -> bytes:
    """Return the bytes that the first key of a machine signs for another key."""
    return _LABEL + node_id


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
