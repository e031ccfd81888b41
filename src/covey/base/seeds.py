"""Seeds and relays: addresses in settings. Pure: names are not resolved here."""

from __future__ import annotations

import ipaddress
import re
from typing import TYPE_CHECKING, Final, NamedTuple

from covey.base.config import PORTS
from covey.base.errors import ConfigError
from covey.base.settings import RELAY_PORT

if TYPE_CHECKING:
    from collections.abc import Callable

FORMS: Final = f"host, host:port or [IPv6]:port, like 192.168.1.5:{PORTS[0]}, separated by commas"
_NAME: Final = re.compile(r"(?!-)[\w-]+(\.[\w-]+)*\.?")
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
    return _split(text, parse)


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
        return parse(relay, RELAY_PORT)
    except ConfigError as error:
        text = str(error).removeprefix("seed ").replace("Seeds are", "Relays are")
        raise ConfigError(f"relay {text}".replace(f":{PORTS[0]}", f":{RELAY_PORT}")) from None


def parse(seed: str, default_port: int = PORTS[0]) -> Seed:
    """Return the host and the port of `host:port` or `[ip]:port`; the port defaults to the first of PORTS.

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
    if ":" not in host and (not _NAME.fullmatch(host) or (_NUMERIC.fullmatch(host) and not _is_ip(host, 4))):
        raise _error(seed, f"{host!r} is neither a host name nor an address")
    return Seed(host, int(port))


def _is_ip(text: str, version: int) -> bool:
    try:
        return ipaddress.ip_address(text).version == version
    except ValueError:
        return False


def _error(seed: str, problem: str) -> ConfigError:
    return ConfigError(f"seed {seed!r}: {problem}. Seeds are {FORMS}")
