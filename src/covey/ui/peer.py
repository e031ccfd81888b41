"""Which user of this machine has the other end of a connection on loopback, as Linux tells it."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Final

TABLES: Final = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_LOCAL, _REMOTE, _STATE, _UID = 1, 2, 3, 7
_OWNED_STATES: Final = frozenset(["01", "02", "03", "04", "05", "08", "09"])
"""Those in which a process has the socket; of others the table does not know whose they were."""


def uid_of(peer: tuple[str, int], here: tuple[str, int]) -> int | None:
    """Return the user id of the end `peer` of a connection to `here`, both IPv4; None if it is not known."""
    wanted = {_spelled(peer), _spelled(peer, mapped=True)}, {_spelled(here), _spelled(here, mapped=True)}
    for table in TABLES:
        try:
            lines = table.read_text().splitlines()[1:]
        except OSError:  # not Linux, or a sandbox
            continue
        for line in lines:
            words = line.split()
            if words[_LOCAL] in wanted[0] and words[_REMOTE] in wanted[1] and words[_STATE] in _OWNED_STATES:
                return int(words[_UID])
    return None


def _spelled(end: tuple[str, int], *, mapped: bool = False) -> str:
    """Return an address and port as the tables have them: words of four bytes in the order of this machine."""
    address = socket.inet_pton(socket.AF_INET, end[0])
    whole = bytes(10) + b"\xff\xff" + address if mapped else address
    words = (whole[start : start + 4] for start in range(0, len(whole), 4))
    return "".join(f"{int.from_bytes(word, _ORDER):08X}" for word in words) + f":{end[1]:04X}"


_ORDER: Final = "little" if socket.htons(1) != 1 else "big"
