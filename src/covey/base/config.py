"""Reads settings from variables, files and arguments; unknown names and invalid values are refused.

Explicit arguments beat the environment, which beats the defaults. Nothing here reads the environment itself: callers
pass the mapping, with the settings of covey.toml below it (`covey.net.host.settings_files`).

Seeds and relays are addresses in settings. Names are not resolved here.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from covey.base.errors import ConfigError
from covey.base.lane_kinds import LANE_KINDS, LaneReach
from covey.base.setting_kinds import YEAR_SECONDS as YEAR_SECONDS
from covey.base.setting_kinds import check_timeout as check_timeout
from covey.base.settings import NODE_PORTS, RELAY_PORT, SETTINGS, SETTINGS_FILE, USER_FILE, suggestion
from covey.base.settings import GroupConfig as GroupConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from covey.base.settings import Setting


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
    "COVEY_WORKER",
)
"""The variables that `covey run -n` sets for the ranks it starts; COVEY_RESTART counts restarts of the rank.

COVEY_WORKER is what `covey worker` sets: the id of the worker.
"""
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
    "COVEY_BY_AGENT",
    "COVEY_KEPT_FOLDER",
    "COVEY_GATEWAY",
)
"""The variables with which `covey run` tells the programs it starts which run of the cluster to join.

COVEY_GATEWAY is what `covey gateway` sets: where the program that it has started finds it.
"""
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


HIDDEN: Final = ("secret",)
"""Settings whose values are not shown."""


def split_list(text: str) -> tuple[str, ...]:
    """Return the words of a comma-separated setting."""
    return tuple(word.strip() for word in text.split(",") if word.strip())


def ports_from(text: str) -> range:
    """Return the ports to try to listen on, in order, for a value of COVEY_PORT."""
    if not text:
        return NODE_PORTS
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 1 << 16):
        raise ConfigError(f"COVEY_PORT={text!r} must be a port from 1 to 65535")
    return range(int(text), min(int(text) + len(NODE_PORTS), 1 << 16))


def group_config(env: Mapping[str, str], **explicit: Any) -> GroupConfig:
    """Return the settings from the environment, overridden by the arguments that are not None."""
    refuse_unknown(env)
    for name in (explicit.get("lanes"), env.get("COVEY_LANES")):
        if name in LANE_KINDS and LANE_KINDS[name].reach is LaneReach.THREADS:
            raise ConfigError(
                f"lanes={name!r} is for covey.testing.run_threads, whose ranks are threads of one process"
            )
    of_group = [setting for setting in SETTINGS.values() if setting.of_group and setting.variable in env]
    found = {each.name: each.kind.read(each.variable, env[each.variable]) for each in of_group}
    return GroupConfig(**(found | {field: value for field, value in explicit.items() if value is not None}))


def refuse_unknown(env: Mapping[str, str]) -> None:
    """Raise ConfigError for an unknown COVEY_ variable, which is most likely a typing error."""
    for key in sorted(env):
        if key.startswith("COVEY_") and key not in KNOWN_VARIABLES:
            raise ConfigError(f"{key} is set, but covey has no such setting{suggestion(key, KNOWN_VARIABLES)}")


@dataclass(frozen=True, kw_only=True, eq=False)
class EffectiveSetting:
    """One setting of this process: its value, and its source."""

    name: str
    value: str
    """Never a secret."""
    source: str
    """`argument`, `environment`, `default`, or the path of a covey.toml or of a file with keys."""
    variable: str


def effective_settings(layers: Mapping[str, Mapping[str, str]]) -> list[EffectiveSetting]:
    """Return all settings; `layers` has variables and their texts by source, those that take precedence first.

    Raises:
        ConfigError: a value is malformed.
    """
    return [_effective(setting, layers) for setting in SETTINGS.values()]


def _effective(setting: Setting, layers: Mapping[str, Mapping[str, str]]) -> EffectiveSetting:
    source = next((source for source, values in layers.items() if setting.variable in values), "default")
    if source == "default":
        value = setting.shown_default
    elif setting.name in HIDDEN:
        value = "(hidden)"
    else:
        value = setting.show(setting.kind.read(setting.variable, layers[source][setting.variable]))
    return EffectiveSetting(name=setting.name, value=value, source=source, variable=setting.variable)


def from_file(content: Mapping[str, Any], path: str, *, is_users: bool) -> dict[str, str]:
    """Return the settings of a covey.toml, as texts by variable; `is_users` if it is in the configuration folder.

    Raises:
        ConfigError: a name is unknown or must not be set there, or a value is malformed.
    """
    found = {}
    for name, value in content.items():
        setting = SETTINGS.get(name)
        if setting is None:
            raise ConfigError(f"{path}: covey has no setting {name!r}{suggestion(name, SETTINGS)}")
        if not setting.files:
            raise ConfigError(f"{path}: {name} cannot be set in a file; set {setting.variable}")
        if setting.files == USER_FILE and not is_users:
            raise ConfigError(
                f"{path}: {name} cannot be set by the folder of a program, because it affects security; set it in "
                f"{SETTINGS_FILE} of your configuration folder, or set {setting.variable}"
            )
        found[setting.variable] = setting.show(setting.kind.read(f"{path}: {name}", value))
    return found


def from_argument(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the checked values of `join(settings=...)`, by name.

    Raises:
        ConfigError: a name is unknown or has an argument of its own, or a value is malformed.
    """
    found = {}
    known = {name for name, setting in SETTINGS.items() if setting.argument == "settings"}
    for name, value in settings.items():
        setting = SETTINGS.get(name)
        if setting is None:
            raise ConfigError(f"settings={{{name!r}: ...}}: covey has no such setting{suggestion(name, known)}")
        if name not in known:
            instead = f"{setting.argument}= of join" if setting.argument else setting.variable
            raise ConfigError(f"settings={{{name!r}: ...}}: use {instead}")
        found[name] = setting.kind.read(name, value)
    return found


FORMS: Final = f"host, host:port or [IPv6]:port, like 192.168.1.5:{NODE_PORTS[0]}, separated by commas"
_HOST_NAME: Final = re.compile(r"(?!-)[\w-]+(\.[\w-]+)*\.?")
_NUMERIC: Final = re.compile(r"[0-9.]+")


class Seed(NamedTuple):
    """An address at which a node, or a relay, may listen."""

    host: str
    """A name, or an address without brackets."""
    port: int


def split_seeds(text: str) -> tuple[str, ...]:
    """Return the seeds of a comma-separated setting.

    Raises:
        ConfigError: one of them is not a valid seed.
    """
    return _split(text, parse_seed)


def split_relays(text: str) -> tuple[str, ...]:
    """Return the relays of a comma-separated setting.

    Raises:
        ConfigError: one of them is not a valid address.
    """
    return _split(text, parse_relay)


def _split(text: str, check: Callable[[str], Seed]) -> tuple[str, ...]:
    items = tuple(item.strip() for item in text.split(",")) if text.strip() else ()
    for item in items:
        check(item)
    return items


def parse_relay(relay: str) -> Seed:
    """Return the host and the port of a relay, which are written as those of a seed; the default port is RELAY_PORT.

    Raises:
        ConfigError: it is not a valid address.
    """
    try:
        return parse_seed(relay, RELAY_PORT)
    except ConfigError as error:
        text = str(error).removeprefix("seed ").replace("Seeds are", "Relays are")
        raise ConfigError(f"relay {text}".replace(f":{NODE_PORTS[0]}", f":{RELAY_PORT}")) from None


def parse_seed(seed: str, default_port: int = NODE_PORTS[0]) -> Seed:
    """Return the host and the port of `host:port` or `[ip]:port`; the port defaults to the first of NODE_PORTS.

    Raises:
        ConfigError: it is not a valid seed.
    """
    if not seed:
        raise _error(seed, "there is nothing between two commas")
    if seed.startswith("["):
        host, bracket, rest = seed[1:].partition("]")
        port = rest.removeprefix(":") if rest else str(default_port)
        if not bracket or (rest and not rest.startswith(":")) or not _is_ip(host, 6):
            raise _error(seed, "there is no IPv6 address in brackets")
    elif seed.count(":") > 1 and _is_ip(seed, 6):
        host, port = seed, str(default_port)
    else:
        host, colon, port = seed.partition(":")
        port = port if colon else str(default_port)
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        raise _error(seed, f"{port!r} is not a port from 1 to 65535")
    if ":" not in host and (not _HOST_NAME.fullmatch(host) or (_NUMERIC.fullmatch(host) and not _is_ip(host, 4))):
        raise _error(seed, f"{host!r} is neither a host name nor an address")
    return Seed(host, int(port))


def _is_ip(text: str, version: int) -> bool:
    try:
        return ipaddress.ip_address(text).version == version
    except ValueError:
        return False


def _error(seed: str, problem: str) -> ConfigError:
    return ConfigError(f"seed {seed!r}: {problem}. Seeds are {FORMS}")
