"""covey: machines you already own, working on arrays together.

import covey, numpy as np

with covey.join() as group:
    x = np.ones(1000) * group.rank
    group.all_reduce(x)
"""

from covey.base.errors import (
    AuthError,
    BusyError,
    ClosedError,
    ConfigError,
    ConnectError,
    CoveyError,
    DeadlineError,
    MismatchError,
    PeerLostError,
    RankFailedError,
    Remedy,
    RemoteProtocolError,
)
from covey.runtime.bootstrap import join
from covey.runtime.group import ANY, Group
from covey.runtime.launch import launch
from covey.runtime.work import Work

__version__ = "0.1.0.dev0"

__all__ = [
    "ANY",
    "AuthError",
    "BusyError",
    "ClosedError",
    "ConfigError",
    "ConnectError",
    "CoveyError",
    "DeadlineError",
    "Group",
    "MismatchError",
    "PeerLostError",
    "RankFailedError",
    "Remedy",
    "RemoteProtocolError",
    "Work",
    "join",
    "launch",
]
