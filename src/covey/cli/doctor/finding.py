"""One finding of `covey doctor`, and the cause and cure of a connection error. Pure."""

from __future__ import annotations

import enum
import errno
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from covey.base.settings import NODE_PORTS
from covey.runtime.links.handshake import NO_ANSWER

if TYPE_CHECKING:
    from collections.abc import Sequence

Weight = Literal["problem", "warning", "note"]
WEIGHTS: Final[tuple[Weight, ...]] = ("problem", "warning", "note")
PORT_RANGE: Final = f"{NODE_PORTS[0]}-{NODE_PORTS[-1]}/tcp"
OPEN_PORTS: Final = f"ufw allow {NODE_PORTS[0]}:{NODE_PORTS[-1]}/tcp, or firewall-cmd --add-port={PORT_RANGE}"
UNKNOWN_CURE: Final = "covey does not know the cause. The error is written above as the system reported it."


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


class Obstacle(enum.Enum):
    """Why a connection fails."""

    REFUSED = enum.auto()
    """A machine answers, and no process listens at that port."""
    SILENCE = enum.auto()
    """No packet comes back."""
    NO_ROUTE = enum.auto()
    """This machine, or a router, has no route to the address."""
    NO_NAME = enum.auto()
    MALFORMED = enum.auto()
    SECRET = enum.auto()
    CLOCK_HERE = enum.auto()
    """The clock of this machine is so early that certificates are not valid yet."""
    CLOCK_THERE = enum.auto()
    """The other side holds the secret and rejects a certificate made with it: its clock must be wrong."""
    IDENTITY = enum.auto()
    DENIED = enum.auto()
    VERSION = enum.auto()
    UNKNOWN = enum.auto()


WRONG_SECRET: Final = "did not accept this cluster's secret"
"""What a link says whose other end has another secret."""
_OBSTACLE_SIGNS: Final = {
    Obstacle.REFUSED: (os.strerror(errno.ECONNREFUSED),),
    Obstacle.SILENCE: (NO_ANSWER, os.strerror(errno.ETIMEDOUT)),
    Obstacle.NO_ROUTE: (
        *map(os.strerror, (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EADDRNOTAVAIL)),
        "no interface leads there",
        "no address that can be dialled",
    ),
    Obstacle.NO_NAME: ("write a numeric address",),
    Obstacle.MALFORMED: ("is not host:port",),
    Obstacle.SECRET: (WRONG_SECRET,),
    Obstacle.CLOCK_HERE: ("not yet valid",),
    Obstacle.CLOCK_THERE: ("ALERT_BAD_CERTIFICATE", "ALERT_CERTIFICATE_EXPIRED"),
    Obstacle.DENIED: ("denied", "approv"),
    Obstacle.IDENTITY: ("identity",),
    Obstacle.VERSION: ("update covey", "incompatible version of covey"),
}


def obstacle(problem: str) -> Obstacle:
    """Return the obstacle that an error shows, or UNKNOWN."""
    return next(
        (kind for kind, signs in _OBSTACLE_SIGNS.items() if any(sign in problem for sign in signs)), Obstacle.UNKNOWN
    )


def cure(problem: str, where: str, cluster: str = "") -> str:
    """Return what to do about a failed connection to `where`."""
    return {
        Obstacle.REFUSED: f"The machine at {where} answers, but no covey node listens there. Start covey run on that "
        f"machine. If it already runs there, covey status on that machine shows its port (the first node takes "
        f"{NODE_PORTS[0]}).",
        Obstacle.SILENCE: f"Nothing came back from {where}. Check on that machine that it is on, that this is "
        f"still its address (ip address), and that its firewall lets {PORT_RANGE} in: {OPEN_PORTS}",
        Obstacle.NO_ROUTE: f"This machine has no route to {where}. Check that both are on one network and that the "
        "address is right: ip address, ip route",
        Obstacle.NO_NAME: f"The name in {where} cannot be looked up. Write a numeric address, or correct the name.",
        Obstacle.MALFORMED: f"Write it as HOST or HOST:PORT, for example 192.0.2.10:{NODE_PORTS[0]}",
        Obstacle.SECRET: f"If both machines should be in {cluster!r}, type `covey pair` on the one that has the right "
        "secret, and `covey enroll` on the other. After covey secret rotate, restart programs that still use the old "
        "secret.",
        Obstacle.CLOCK_HERE: "Set the clock of this machine: timedatectl set-ntp true",
        Obstacle.CLOCK_THERE: f"The node at {where} holds the same secret and rejects this node's certificate, so its "
        "clock is wrong. Set the clock of that machine: timedatectl set-ntp true",
        Obstacle.IDENTITY: "Two machines have one identity: was a home folder copied? Remove the `identities` "
        "folder in the copy; covey then makes a new identity.",
        Obstacle.DENIED: "If that is a mistake, let it in again on the machine that denies it: covey deny --undo "
        "NODE. If the owner approves nodes: covey allow NODE, on the owner's machine.",
        Obstacle.VERSION: "Update covey on the machine that the message names.",
        Obstacle.UNKNOWN: UNKNOWN_CURE,
    }[obstacle(problem)]
