"""What the coordinator refuses: the most that callers can cost it, and the reason that a caller is given. Pure."""

from __future__ import annotations

import enum
from typing import Final

REQUEST_BYTES: Final = 1 << 16
"""A message to a coordinator."""
STATUS_BYTES: Final = 1 << 22
"""A message from one: the status of all runs."""
MAX_RUNS: Final = 256
MAX_WORKERS: Final = 1024
"""Workers of one run, those that have left included."""
MAX_CHECKPOINTS: Final = 64
"""Checkpoints of one run that are remembered."""
MAX_CALLS: Final = 8192
"""Calls at a time, streams included; further ones are refused."""
MAX_CONNECTIONS: Final = 4096
"""Callers that are connected; further ones are turned away."""
MAX_HANDSHAKES: Final = 512
"""Connections that have not proved an identity yet; another one ends the oldest."""


class Reason(enum.Enum):
    """What a refused caller can do; the value is the name of the gRPC status."""

    MALFORMED = "INVALID_ARGUMENT"
    """Correct the call."""
    CONTRADICTION = "FAILED_PRECONDITION"
    """Correct the call, or what other workers declared."""
    NOT_FOUND = "NOT_FOUND"
    """Register first."""
    NOT_YOURS = "PERMISSION_DENIED"
    """Use the identity that the worker registered with first, or be let into the cluster again."""
    UNPROVEN = "UNAUTHENTICATED"
    """Prove an identity."""
    NOT_NOW = "ABORTED"
    """Try again later."""
    TAKEN = "ALREADY_EXISTS"
    """Try again: another process may still have this worker's id."""
    FULL = "RESOURCE_EXHAUSTED"
    """Try again when others have left."""


class RefusalError(Exception):
    """The coordinator refuses a call; the text is for the caller."""

    def __init__(self, reason: Reason, text: str) -> None:
        super().__init__(text)
        self.reason = reason
