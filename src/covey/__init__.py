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
    from covey.agent.data_store import data
    from covey.agent.run_on import run_on
    from covey.arrays.adapter import ArrayAdapter, StagedArray, register_adapter
    from covey.base.arithmetic import Op, accumulate, clip_norm
    from covey.base.errors import (
        AuthError,
        BusyError,
        CallCancelledError,
        CallRefusedError,
        CancelledError,
        CheckpointError,
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
    from covey.base.numbers import ANY, Priority
    from covey.base.settings import OnLoss
    from covey.compress.codec import Codec
    from covey.compress.feedback import ErrorFeedback
    from covey.compress.low_rank import PowerSGD
    from covey.compress.parsing import register_codec
    from covey.compress.quantisers import BF16, FP8, FP16, Int4, Int8, OneBit
    from covey.compress.sparse import RandomK, Threshold, TopK
    from covey.coordinator.worker import WorkerNode, WorkerNodeConfig
    from covey.net.lanes.lane import LanePath
    from covey.proto.checkpointing import Checkpoint
    from covey.proto.message import MessageInfo
    from covey.runtime.calls.objects import Handle
    from covey.runtime.calls.work import CallStream, CallWork
    from covey.runtime.events import Event
    from covey.runtime.group.explanation import PlanAlternative, PlanReport
    from covey.runtime.group.group import Group
    from covey.runtime.group.members import Member, MemberHealth, PeerLink
    from covey.runtime.group.mesh import Mesh
    from covey.runtime.group.node import Election, Node
    from covey.runtime.group.restore import load_state
    from covey.runtime.group.strategy import GroupStrategy, HierarchicalStrategy, Strategy
    from covey.runtime.group.topology import Topology, TopologyHost, TopologyLink, TopologyNode
    from covey.runtime.http_server import HttpServer
    from covey.runtime.joining.bootstrap import join, join_async
    from covey.runtime.joining.generations import generations
    from covey.runtime.keeper.launch import launch
    from covey.runtime.metrics.pages import serve_http
    from covey.runtime.shards.tree import Shard
    from covey.runtime.shutdown import on_shutdown, shutdown
    from covey.runtime.work import Work, wait_all, wait_any

__all__ = [  # noqa: RUF022 - in the order of `sorted`: BF16 is a class, not a constant
    "ANY",
    "ArrayAdapter",
    "AuthError",
    "BF16",
    "BusyError",
    "CallCancelledError",
    "CallRefusedError",
    "CallStream",
    "CallWork",
    "CancelledError",
    "Checkpoint",
    "CheckpointError",
    "ClosedError",
    "Codec",
    "ConfigError",
    "ConnectError",
    "CoveyError",
    "DeadlineError",
    "Election",
    "ErrorFeedback",
    "Event",
    "FP16",
    "FP8",
    "Group",
    "GroupChangedError",
    "GroupStrategy",
    "Handle",
    "HierarchicalStrategy",
    "HttpServer",
    "Int4",
    "Int8",
    "LanePath",
    "Member",
    "MemberHealth",
    "Mesh",
    "MessageInfo",
    "MismatchError",
    "Node",
    "OnLoss",
    "OneBit",
    "Op",
    "PeerLink",
    "PeerLostError",
    "PlanAlternative",
    "PlanReport",
    "PowerSGD",
    "Priority",
    "QuorumLostError",
    "RandomK",
    "RankFailedError",
    "Remedy",
    "RemoteCallError",
    "RemoteProtocolError",
    "Shard",
    "SplitRunError",
    "StagedArray",
    "Strategy",
    "Threshold",
    "TopK",
    "Topology",
    "TopologyHost",
    "TopologyLink",
    "TopologyNode",
    "Work",
    "WorkerNode",
    "WorkerNodeConfig",
    "accumulate",
    "clip_norm",
    "data",
    "generations",
    "join",
    "join_async",
    "launch",
    "load_state",
    "on_shutdown",
    "register_adapter",
    "register_codec",
    "run_on",
    "serve_http",
    "shutdown",
    "wait_all",
    "wait_any",
]

_HOME_MODULES = {
    "ANY": "covey.base.numbers",
    "ArrayAdapter": "covey.arrays.adapter",
    "BF16": "covey.compress.quantisers",
    "CallStream": "covey.runtime.calls.work",
    "CallWork": "covey.runtime.calls.work",
    "Checkpoint": "covey.proto.checkpointing",
    "Shard": "covey.runtime.shards.tree",
    "Codec": "covey.compress.codec",
    "Election": "covey.runtime.group.node",
    "ErrorFeedback": "covey.compress.feedback",
    "Event": "covey.runtime.events",
    "FP16": "covey.compress.quantisers",
    "FP8": "covey.compress.quantisers",
    "Group": "covey.runtime.group.group",
    "GroupStrategy": "covey.runtime.group.strategy",
    "Handle": "covey.runtime.calls.objects",
    "HierarchicalStrategy": "covey.runtime.group.strategy",
    "HttpServer": "covey.runtime.http_server",
    "Int4": "covey.compress.quantisers",
    "Int8": "covey.compress.quantisers",
    "LanePath": "covey.net.lanes.lane",
    "Member": "covey.runtime.group.members",
    "MemberHealth": "covey.runtime.group.members",
    "Mesh": "covey.runtime.group.mesh",
    "Node": "covey.runtime.group.node",
    "MessageInfo": "covey.proto.message",
    "OnLoss": "covey.base.settings",
    "Priority": "covey.base.numbers",
    "OneBit": "covey.compress.quantisers",
    "Op": "covey.base.arithmetic",
    "PeerLink": "covey.runtime.group.members",
    "PlanAlternative": "covey.runtime.group.explanation",
    "PlanReport": "covey.runtime.group.explanation",
    "PowerSGD": "covey.compress.low_rank",
    "RandomK": "covey.compress.sparse",
    "StagedArray": "covey.arrays.adapter",
    "Strategy": "covey.runtime.group.strategy",
    "Threshold": "covey.compress.sparse",
    "TopK": "covey.compress.sparse",
    "Topology": "covey.runtime.group.topology",
    "TopologyHost": "covey.runtime.group.topology",
    "TopologyLink": "covey.runtime.group.topology",
    "TopologyNode": "covey.runtime.group.topology",
    "Work": "covey.runtime.work",
    "WorkerNode": "covey.coordinator.worker",
    "WorkerNodeConfig": "covey.coordinator.worker",
    "accumulate": "covey.base.arithmetic",
    "clip_norm": "covey.base.arithmetic",
    "data": "covey.agent.data_store",
    "generations": "covey.runtime.joining.generations",
    "join": "covey.runtime.joining.bootstrap",
    "join_async": "covey.runtime.joining.bootstrap",
    "launch": "covey.runtime.keeper.launch",
    "load_state": "covey.runtime.group.restore",
    "on_shutdown": "covey.runtime.shutdown",
    "register_adapter": "covey.arrays.adapter",
    "register_codec": "covey.compress.parsing",
    "run_on": "covey.agent.run_on",
    "serve_http": "covey.runtime.metrics.pages",
    "shutdown": "covey.runtime.shutdown",
    "wait_all": "covey.runtime.work",
    "wait_any": "covey.runtime.work",
}
"""Where names live that are not errors. They are loaded on first use: the command line needs few of them."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'covey' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOME_MODULES.get(name, "covey.base.errors")), name)
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
