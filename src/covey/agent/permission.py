"""Which members may start programs on this machine. No I/O.

A member is known by the key that TLS has proved on its link, and by the machine whose first key has signed that key
(`wire.signed`). Names play no part: a node can claim any.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from covey.base.errors import AuthError
from covey.base.text import printable
from covey.net.keys.identity import id_text, node_name
from covey.wire.signed import machine_of

if TYPE_CHECKING:
    from covey.wire.messages import Card


@dataclass(frozen=True)
class Permission:
    """The machines whose members may start programs here."""

    own: bytes
    """The first key of this machine, which may always."""
    machines: frozenset[bytes] = frozenset()
    """Ids of machines, or of single nodes."""
    is_for_all: bool = False
    """Whether every member of the cluster may."""
    here: str = ""
    """The name of this machine, for the refusal."""

    def objection(self, card: Card) -> str:
        """Return why a node may not start programs here, and what to do; or ""."""
        try:
            machine = machine_of(card)
        except AuthError as error:
            return str(error)
        if self.is_for_all or {card.id, machine} & {self.own, *self.machines}:
            return ""
        name = printable(node_name(card.host_name, machine), 60)  # a terminal has a key of its own
        return f"{name} may not use {self.here}: there, add --allow {id_text(machine)} to `covey up`"
