"""Gives every node its calls, from the moment it joins a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from covey.runtime.calls.lane_transport import LaneTransport
from covey.runtime.calls.service import CallService

if TYPE_CHECKING:
    from covey.base.config import GroupConfig
    from covey.runtime.members.node import Node


def serve_calls(node: Node) -> CallService:
    """Return the calls of a node; make them on first use, so that calls of other nodes are answered from then on."""
    if node.calls is None:
        node.calls = CallService(lambda listener: LaneTransport(node, listener), node.config, node.run)
    assert isinstance(node.calls, CallService)
    return node.calls


def calls_alone(config: GroupConfig, name: str) -> CallService:
    """Return the calls of a node that is alone: it can call itself."""
    return CallService(lambda _: None, config, name)
