"""One finding of `covey doctor`: what was found, and what to do about it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from covey.base.config import PORTS

if TYPE_CHECKING:
    from collections.abc import Sequence

Weight = Literal["problem", "warning", "note"]
WEIGHTS: Final[tuple[Weight, ...]] = ("problem", "warning", "note")
PORT_RANGE: Final = f"{PORTS[0]}-{PORTS[-1]}/tcp"
OPEN_PORTS: Final = f"ufw allow {PORTS[0]}:{PORTS[-1]}/tcp, or firewall-cmd --add-port={PORT_RANGE}"


@dataclass(frozen=True)
class Finding:
    """Something to know, and what to do."""

    weight: Weight
    code: str
    """Stable, for programs."""
    text: str
    remedy: str


def parted(message: str, otherwise: str) -> tuple[str, str]:
    """Split an error message of covey at its semicolon: what happened, and the remedy (`otherwise` if it has none)."""
    what, semicolon, remedy = message.rpartition("; ")
    return (what, f"{remedy[:1].upper()}{remedy[1:]}.") if semicolon else (message, otherwise)


def some(names: Sequence[str], most: int = 4) -> str:
    """Return the first `most` names, and how many more there are."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")
