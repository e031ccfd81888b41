"""The addresses of this machine for join codes."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

from covey.base.config import ports_from
from covey.wire.secret import MAX_SEEDS

if TYPE_CHECKING:
    from collections.abc import Mapping


def current_seeds(env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the addresses for a join code: where nodes of this machine listen, one address family per interface."""
    from covey.net.discovery.interfaces import usable_interfaces

    seeds: list[str] = []
    port = ports_from(env.get("COVEY_PORT", ""))[0]
    for interface in usable_interfaces(env.get("COVEY_INTERFACES", "")):
        ips = [ipaddress.ip_address(text) for text in interface.addresses]
        ips = [ip for ip in ips if not (ip.is_loopback or ip.is_link_local or ip.is_unspecified)]
        family = min((ip.version for ip in ips), default=4)
        seeds += [f"[{ip}]:{port}" if family == 6 else f"{ip}:{port}" for ip in ips if ip.version == family]
    return tuple(seeds[:MAX_SEEDS])
