"""Loads gRPC, which is an extra, when a coordinator or a worker needs it."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any, Final

from covey.base.errors import ConfigError

NEEDED: Final = ("grpc", "grpc_health", "grpc_reflection")


def require_grpc() -> Any:
    """Return the module `grpc`; ConfigError if it is not installed."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # else every refused handshake is a line on standard error
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        raise ConfigError(
            f"the coordinator and its workers need gRPC ({missing[0]} is not installed); run: pip install 'covey[grpc]'"
        )
    import grpc

    return grpc
