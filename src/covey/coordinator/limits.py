"""What callers can cost a coordinator at most."""

from __future__ import annotations

from typing import Final

MESSAGE_BYTES: Final = 1 << 16
"""A message to a coordinator."""
ANSWER_BYTES: Final = 1 << 22
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
