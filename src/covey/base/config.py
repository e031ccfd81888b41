"""The settings of a group, and the variables of covey; unknown variables and invalid values are refused.

Explicit arguments beat the environment, which beats the defaults. Nothing here reads the environment itself:
callers pass the mapping, with the settings of covey.toml below it (`covey.net.settings_files`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final

from covey.base.errors import ConfigError
from covey.base.setting_kinds import YEAR_SECONDS as YEAR_SECONDS
from covey.base.setting_kinds import check_timeout as check_timeout
from covey.base.settings import PORTS as PORTS
from covey.base.settings import SETTINGS, suggestion

if TYPE_CHECKING:
    from collections.abc import Mapping

LAUNCHER_VARIABLES: Final = (
    "COVEY_RANK",
    "COVEY_SIZE",
    "COVEY_LOCAL_RANK",
    "COVEY_LOCAL_SIZE",
    "COVEY_MEET",
    "COVEY_TOKEN_FD",
    "COVEY_KEEPER",
    "COVEY_RESTART",
    "COVEY_GAVE_RANK",
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
    "COVEY_LAUNCHED",
    "COVEY_KEEPER_ID",
    "COVEY_NODE_ID",
    "COVEY_RUN_MIN_HOSTS",
    "COVEY_RUN_NEW",
    "COVEY_RELAY_PORT",
)
"""The variables with which `covey run` tells the programs it starts which run of the cluster to join."""
CLUSTER_VARIABLES: Final = (
    "COVEY_CLUSTER",
    "COVEY_SECRET",
    "COVEY_SECRET_FILE",
    "COVEY_SEEDS",
    "COVEY_RELAYS",
    "COVEY_PORT",
    "COVEY_HOME",
    "COVEY_TIE_BREAKER",
)
"""The variables that choose the cluster, and how to find it."""
KNOWN_VARIABLES: Final = tuple(
    dict.fromkeys((*(each.variable for each in SETTINGS.values()), *LAUNCHER_VARIABLES, *RUN_VARIABLES))
)
"""All variables of covey: settings, and what launchers tell the processes they start."""


def _default(name: str) -> Any:
    return SETTINGS[name].default


@dataclass(frozen=True, kw_only=True)
class GroupConfig:
    """How the ranks of a run reach each other, how long they wait, and how they work; `base.settings` explains each."""

    lanes: str = _default("lanes")
    timeout: float = _default("timeout")
    insecure: bool = _default("insecure")
    interfaces: str = _default("interfaces")
    map_port: bool = _default("map_port")
    metered: str = _default("metered")
    tls_ca: str = _default("tls_ca")
    tls_cert: str = _default("tls_cert")
    tls_key: str = _default("tls_key")
    streams: str = _default("streams")
    stripe: str = _default("stripe")
    topology: str = _default("topology")
    limit: int = _default("limit")
    on_loss: str = _default("on_loss")
    patience: float = _default("patience")
    quorum: str = _default("quorum")
    compress: str = _default("compress")
    check_every: int = _default("check_every")
    plan: str = _default("plan")
    warn_after: float = _default("warn_after")
    bucket_bytes: int = _default("bucket_bytes")
    heartbeat: float = _default("heartbeat")
    host_silence: float = _default("host_silence")
    process_silence: float = _default("process_silence")
    exchange_bytes: int = _default("exchange_bytes")
    doubling_bytes: int = _default("doubling_bytes")
    tree_bytes: int = _default("tree_bytes")
    segment_bytes: int = _default("segment_bytes")
    cached_segment_bytes: int = _default("cached_segment_bytes")
    ring_bytes: int = _default("ring_bytes")
    kernel_copy: str = _default("kernel_copy")
    eager_bytes: int = _default("eager_bytes")
    credit_bytes: int = _default("credit_bytes")
    call_handlers: int = _default("call_handlers")
    call_bytes: int = _default("call_bytes")

    def __post_init__(self) -> None:
        for field in fields(self):
            setting = SETTINGS[field.name]
            object.__setattr__(self, field.name, setting.kind.read(field.name, getattr(self, field.name)))
        if self.host_silence < 4.5 * self.heartbeat:
            raise ConfigError(
                f"host_silence={self.host_silence:g} must be at least 4.5 times heartbeat={self.heartbeat:g}: a peer "
                "is pinged and suspected before its machine is lost"
            )
        if self.process_silence < self.host_silence:
            raise ConfigError(
                f"process_silence={self.process_silence:g} must be at least host_silence={self.host_silence:g}"
            )

    def agreed(self) -> str:
        """Return the settings that all ranks must share and that are not at their defaults, as one text.

        `lanes` and `on_loss` are not in it: ranks tell each other these in fields of their own.
        """
        shared = [each for each in SETTINGS.values() if each.is_shared and each.name not in ("lanes", "on_loss")]
        values = {each.name: getattr(self, each.name) for each in shared}
        return ", ".join(f"{name}={value}" for name, value in values.items() if value != SETTINGS[name].default)


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


def group_config(env: Mapping[str, str], **explicit: Any) -> GroupConfig:
    """Return the settings from the environment, overridden by the arguments that are not None."""
    refuse_unknown(env)
    if "memory" in (explicit.get("lanes"), env.get("COVEY_LANES")):
        raise ConfigError("lanes='memory' is for covey.testing.run_threads, whose ranks are threads of one process")
    of_group = [setting for setting in SETTINGS.values() if setting.of_group and setting.variable in env]
    found = {each.name: each.kind.read(each.variable, env[each.variable]) for each in of_group}
    return GroupConfig(**(found | {field: value for field, value in explicit.items() if value is not None}))


def refuse_unknown(env: Mapping[str, str]) -> None:
    """Raise ConfigError for an unknown COVEY_ variable, which is most likely a typing error."""
    for key in sorted(env):
        if key.startswith("COVEY_") and key not in KNOWN_VARIABLES:
            raise ConfigError(f"{key} is set, but covey has no such setting{suggestion(key, KNOWN_VARIABLES)}")
