"""Settings: their names, defaults and sources; invalid values are refused.

Explicit arguments beat the environment, which beats the defaults. Nothing here reads the environment itself:
callers pass the mapping.
"""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from covey.base.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

YEAR_SECONDS: Final = 365 * 86400.0
LANES: Final = ("auto", "shm", "unix", "tcp", "secure", "memory")
ON_LOSS: Final = ("raise", "continue")
QUORUMS: Final = ("majority", "any")
STREAMS_LIMIT: Final = 64
PORTS: Final = range(47700, 47732)
"""The ports of cluster nodes: a node listens on the first free one, so that a seed's port is easy to guess."""
LAUNCHER_VARIABLES: Final = (
    "COVEY_RANK",
    "COVEY_SIZE",
    "COVEY_LOCAL_RANK",
    "COVEY_LOCAL_SIZE",
    "COVEY_MEET",
    "COVEY_TOKEN_FD",
    "COVEY_KEEPER",
    "COVEY_RESTART",
)
"""The variables that `covey run -n` sets for the ranks it starts; COVEY_RESTART counts restarts of the rank."""
RUN_VARIABLES: Final = (
    "COVEY_RUN",
    "COVEY_RUN_PROGRAM",
    "COVEY_RUN_SIZE",
    "COVEY_RUN_MIN_SIZE",
    "COVEY_RUN_MAX_SIZE",
    "COVEY_JOIN_TIMEOUT",
    "COVEY_SECRET_FD",
    "COVEY_TORCH_ENV",
    "COVEY_TORCHRUN",
    "COVEY_KEEPER_ID",
    "COVEY_NODE_ID",
    "COVEY_RUN_MIN_HOSTS",
    "COVEY_RUN_NEW",
)
"""The variables with which `covey run` tells the programs it starts which run of the cluster to join."""
CLUSTER_VARIABLES: Final = (
    "COVEY_CLUSTER",
    "COVEY_SECRET",
    "COVEY_SECRET_FILE",
    "COVEY_SEEDS",
    "COVEY_PORT",
    "COVEY_HOME",
    "COVEY_TIE_BREAKER",
)
"""The variables that choose the cluster, and how to find it."""
OTHER_VARIABLES: Final = ("COVEY_DEBUG", "COVEY_EVENTS", "COVEY_NATIVE", "COVEY_WARM_START")
"""Tracebacks for the command line; a file to append events to; whether `covey run` forks its ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupConfig:
    """How the ranks of a run reach each other, and how long they wait."""

    lanes: str = "auto"
    """`auto` uses the fastest safe lane for each pair; shm, unix, tcp or secure forces one; memory is for threads."""
    timeout: float = 1800.0
    """Seconds after which an operation raises DeadlineError. A lost process is noticed long before."""
    insecure: bool = False
    """Allow clear-text connections beyond this machine."""
    interfaces: str = ""
    """Which interfaces to use: `eth*,!docker*,10.0.0.0/8`. Empty: all that are up."""
    streams: str = "auto"
    """Connections per secure lane: a number, or `auto`, which depends on the round-trip time."""
    on_loss: str = "raise"
    """What operations do when a rank is lost: `raise`, or `continue` among the remaining ranks."""
    patience: float = 30.0
    """Seconds that members wait for a quorum of the others before they give up."""
    quorum: str = "majority"
    """Which members may continue: a `majority` of the last view, or `any`, with which two halves may continue apart."""
    compress: str = ""
    """How gradients are compressed: a codec like `int8`, or a policy like `embed.*=topk(0.01), *=int8`."""
    call_handlers: int = 64
    """Functions that run at the same time for calls of other nodes; further calls wait, nodes being served in turn."""
    call_bytes: int = 1 << 30
    """Bytes of the arguments or the result of one call, and of all large arguments that a node holds for calls."""

    def __post_init__(self) -> None:
        if self.lanes not in LANES:
            raise ConfigError(f"lanes={self.lanes!r} is unknown; use one of {', '.join(LANES)}")
        for what, value, known in (("on_loss", self.on_loss, ON_LOSS), ("quorum", self.quorum, QUORUMS)):
            if value not in known:
                raise ConfigError(f"{what}={value!r} is unknown; use one of {', '.join(known)}")
        for what, number in (("call_handlers", self.call_handlers), ("call_bytes", self.call_bytes)):
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise ConfigError(f"{what}={number!r} must be a whole number above 0")
        object.__setattr__(self, "timeout", check_timeout(self.timeout))
        object.__setattr__(self, "patience", check_timeout(self.patience, "patience"))
        object.__setattr__(self, "streams", _check_streams(self.streams))


def split_list(text: str) -> tuple[str, ...]:
    """Return the words of a comma-separated setting."""
    return tuple(word.strip() for word in text.split(",") if word.strip())


def ports_from(text: str) -> range:
    """Return the ports to try to listen on, in order, for a value of COVEY_PORT."""
    if not text:
        return PORTS
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 1 << 16):
        raise ConfigError(f"COVEY_PORT={text!r} must be a port from 1 to 65535")
    return range(int(text), min(int(text) + len(PORTS), 1 << 16))


def _check_streams(streams: str | int) -> str:
    text = str(streams)
    if text == "auto" or (text.isascii() and text.isdigit() and 1 <= int(text) <= STREAMS_LIMIT):
        return text
    raise ConfigError(f"streams={streams!r} must be auto or a number from 1 to {STREAMS_LIMIT}")


def check_timeout(timeout: float, what: str = "timeout") -> float:
    """Return `timeout` as a float, at most a year; raise ConfigError unless it is a number above 0."""
    if type(timeout) is float and 0.0 < timeout <= YEAR_SECONDS:  # the common case, kept short: this is paid per call
        return timeout
    if isinstance(timeout, bool) or not isinstance(timeout, numbers.Real) or math.isnan(timeout) or timeout <= 0:
        raise ConfigError(f"{what}={timeout!r} must be a number of seconds above 0")
    return min(float(timeout), YEAR_SECONDS)


def group_config(env: Mapping[str, str], **explicit: Any) -> GroupConfig:
    """Return the settings from the environment, overridden by the arguments that are not None."""
    refuse_unknown(env)
    if "memory" in (explicit.get("lanes"), env.get("COVEY_LANES")):
        raise ConfigError("lanes='memory' is for covey.testing.run_threads, whose ranks are threads of one process")
    found = {field: parse(key, env[key]) for key, (field, parse) in _ENVIRONMENT.items() if key in env}
    return GroupConfig(**(found | {field: value for field, value in explicit.items() if value is not None}))


def refuse_unknown(env: Mapping[str, str]) -> None:
    """Raise ConfigError for an unknown COVEY_ variable, which is most likely a typing error."""
    known = {*_ENVIRONMENT, *LAUNCHER_VARIABLES, *RUN_VARIABLES, *CLUSTER_VARIABLES, *OTHER_VARIABLES}
    for key in sorted(env):
        if key.startswith("COVEY_") and key not in known:
            import difflib  # rarely needed, and slow to load

            near = difflib.get_close_matches(key, sorted(known), n=1)
            raise ConfigError(
                f"{key} is set, but covey has no such setting" + (f"; did you mean {near[0]}?" if near else "")
            )


def _seconds(key: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{key}={text!r} is not a number of seconds") from None


def _whole(key: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{key}={text!r} is not a whole number") from None


def flag(key: str, text: str) -> bool:
    if text.lower() in ("1", "true", "yes"):
        return True
    if text.lower() in ("", "0", "false", "no"):
        return False
    raise ConfigError(f"{key}={text!r} must be 1 or 0")


def _text(_key: str, text: str) -> str:
    return text


_ENVIRONMENT: Final[dict[str, tuple[str, Callable[[str, str], Any]]]] = {
    "COVEY_LANES": ("lanes", _text),
    "COVEY_TIMEOUT": ("timeout", _seconds),
    "COVEY_INSECURE": ("insecure", flag),
    "COVEY_INTERFACES": ("interfaces", _text),
    "COVEY_STREAMS": ("streams", _text),
    "COVEY_ON_LOSS": ("on_loss", _text),
    "COVEY_PATIENCE": ("patience", _seconds),
    "COVEY_QUORUM": ("quorum", _text),
    "COVEY_COMPRESS": ("compress", _text),
    "COVEY_CALL_HANDLERS": ("call_handlers", _whole),
    "COVEY_CALL_BYTES": ("call_bytes", _whole),
}
