"""Why the coordinator refuses a call. Pure."""

from __future__ import annotations

import enum


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
