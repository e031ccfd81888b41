"""covey: machines you already own, working on arrays together.

import covey, numpy as np

with covey.join() as group:
    x = np.ones(1000) * group.rank
    group.all_reduce(x)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from covey.base.version import __version__ as __version__

if TYPE_CHECKING:
    from covey.base.errors import (
        AuthError,
        BusyError,
        CallCancelledError,
        CallRefusedError,
        ClosedError,
        ConfigError,
        ConnectError,
        CoveyError,
        DeadlineError,
        GroupChangedError,
        MismatchError,
        PeerLostError,
        QuorumLostError,
        RankFailedError,
        Remedy,
        RemoteCallError,
        RemoteProtocolError,
        SplitRunError,
    )
    from covey.proto.matching import ANY
    from covey.runtime.calls.objects import Handle
    from covey.runtime.calls.work import CallStream, CallWork
    from covey.runtime.events import Event
    from covey.runtime.group.group import Group
    from covey.runtime.group.node import Node
    from covey.runtime.group.saved import load_state
    from covey.runtime.joining.bootstrap import join
    from covey.runtime.joining.generations import generations
    from covey.runtime.keeper.launch import launch
    from covey.runtime.work import Work

__all__ = [
    "ANY",
    "AuthError",
    "BusyError",
    "CallCancelledError",
    "CallRefusedError",
    "CallStream",
    "CallWork",
    "ClosedError",
    "ConfigError",
    "ConnectError",
    "CoveyError",
    "DeadlineError",
    "Event",
    "Group",
    "GroupChangedError",
    "Handle",
    "MismatchError",
    "Node",
    "PeerLostError",
    "QuorumLostError",
    "RankFailedError",
    "Remedy",
    "RemoteCallError",
    "RemoteProtocolError",
    "SplitRunError",
    "Work",
    "generations",
    "join",
    "launch",
    "load_state",
]

_HOMES = {
    "ANY": "covey.proto.matching",
    "CallStream": "covey.runtime.calls.work",
    "CallWork": "covey.runtime.calls.work",
    "Event": "covey.runtime.events",
    "Group": "covey.runtime.group.group",
    "Handle": "covey.runtime.calls.objects",
    "Node": "covey.runtime.group.node",
    "Work": "covey.runtime.work",
    "generations": "covey.runtime.joining.generations",
    "join": "covey.runtime.joining.bootstrap",
    "launch": "covey.runtime.keeper.launch",
    "load_state": "covey.runtime.group.saved",
}
"""Where names live that are not errors. They are loaded on first use: the command line needs few of them."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'covey' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES.get(name, "covey.base.errors")), name)
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
