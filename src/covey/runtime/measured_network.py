"""The links that the ranks of a run have measured, for commands that ask."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from covey.net.discovery.interfaces import all_interfaces
from covey.wire.reports import encode_network

if TYPE_CHECKING:
    from collections.abc import Collection

    from covey.wire.reports import MeasuredNetwork


def encode_measured(measured_at: float, network: MeasuredNetwork, addresses: Collection[str]) -> bytes:
    """Return a network that was measured at a time since 1970; `addresses` are those of this end of links."""
    return encode_network(network, max(0.0, time.time() - measured_at), medium_of(addresses))


def medium_of(addresses: Collection[str]) -> str:
    """Return the kind of the interfaces with these addresses: the slowest kind, if there are several."""
    kinds = {each.kind for each in all_interfaces() if set(addresses) & set(each.addresses)}
    return next((kind for kind in ("wireless", "wired", "virtual") if kind in kinds), "unknown")
