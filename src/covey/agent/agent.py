"""The resident agent of a machine: a node of the cluster that is in no run, and starts programs for members.

A `Permission` says which members may start programs on this machine, without I/O. A member is known by the key that TLS
has proved on its link, and by the machine whose first key has signed that key (`wire.signed`). Names play no part: a
node can claim any.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from covey.agent.data_line import DataLine, Grants
from covey.agent.data_service import DataService
from covey.agent.link_transport import LinkTransport
from covey.agent.requests import AGENT_CALL_BYTES
from covey.agent.service import AgentService
from covey.base.config import GroupConfig, ports_from
from covey.base.errors import AuthError
from covey.base.text import printable
from covey.net.host.settings_files import effective_environment
from covey.net.keys.identity import id_text, node_name
from covey.runtime import loop as control
from covey.runtime.calls.service import CallService
from covey.runtime.keeper.keeper import MemberRelay
from covey.runtime.peers.cluster_mesh import ClusterMesh
from covey.runtime.peers.endpoint import cluster_endpoint
from covey.runtime.peers.mesh import MeshListener
from covey.wire import messages
from covey.wire.signed import machine_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from covey.base.numbers import Seat
    from covey.net.keys.clusters import Cluster
    from covey.runtime.calls.transport import CallListener
    from covey.runtime.peers.endpoint import Endpoint
    from covey.runtime.peers.remote_process import RemoteProcess
    from covey.wire.messages import Card

AGENT_CALL_SECONDS: Final = 30.0


@dataclass(frozen=True)
class Permission:
    """The machines whose members may start programs here."""

    own: bytes
    """The first key of this machine, which may always."""
    machines: frozenset[bytes] = frozenset()
    """Ids of machines, or of single nodes."""
    is_for_all: bool = False
    """Whether every member of the cluster may."""
    here: str = ""
    """The name of this machine, for the refusal."""

    def objection(self, card: Card) -> str:
        """Return why a node may not start programs here, and what to do; or ""."""
        try:
            machine = machine_of(card)
        except AuthError as error:
            return str(error)
        if self.is_for_all or {card.id, machine} & {self.own, *self.machines}:
            return ""
        name = printable(node_name(card.host_name, machine), 60)  # a terminal has a key of its own
        return f"{name} may not use {self.here}: there, add --allow {id_text(machine)} to `covey up`"


def call_config(interfaces: str = "") -> GroupConfig:
    """Return the settings of calls between terminals and agents."""
    return GroupConfig(call_bytes=AGENT_CALL_BYTES, timeout=AGENT_CALL_SECONDS, interfaces=interfaces)


class ResidentAgent(MeshListener):
    """Links with the nodes of its cluster, and serves calls of those that may start programs here."""

    def __init__(self, cluster: Cluster, config: GroupConfig, endpoint: Endpoint, permission: Permission) -> None:
        self.mesh = ClusterMesh(cluster, config, endpoint, self, purpose="agent")
        self.permission = permission
        self.relay_port = 0
        """The port at which this machine is a relay, or 0."""
        self.stop: Callable[[AuthError], None] = lambda _error: None
        """Called when this node may not be in the cluster any more, or its identity is in use elsewhere."""
        self._transport: LinkTransport
        self.calls = CallService(self._connect, call_config(config.interfaces), "agent")
        self.service = AgentService(cluster.name, self._transport.card_of, self._note)
        self.service.register(self.calls.functions)
        grants = Grants()
        self.data = DataService(grants, self._transport.remote_of, self._peer, self._note)
        self.data.register(self.calls.functions)
        self.data.line = DataLine(self.data.find, grants.allow, call_config(config.interfaces))

    async def open(self) -> None:
        """Start to listen, to announce this machine and to search for other nodes."""
        await self.mesh.open()
        self.mesh.search.slow_down()

    async def close(self) -> None:
        """Close every link."""
        await self.mesh.close()

    def heard(self, remote: RemoteProcess, message: messages.Control) -> None:
        if isinstance(message, messages.AgentCall | messages.AgentRefusal):
            self.mesh.visitors.asked(remote)
            self._transport.heard(remote, message)
            self.data.line.heard(remote, message)

    def identity_refused(self, error: AuthError) -> None:
        self.stop(error)

    def access_lost(self, error: AuthError) -> None:
        self.stop(error)

    def _connect(self, listener: CallListener) -> LinkTransport:
        self._transport = LinkTransport(listener, self._objection, self._lost)
        return self._transport

    def _lost(self, seat: Seat) -> None:
        self.service.lost(seat)
        self.data.lost(seat)

    def _peer(self, node: bytes) -> RemoteProcess | None:
        """Return another agent that is linked now; on the control loop."""
        found = self.mesh.met.get(node)
        return found if found is not None and found.purpose == "agent" and found.link is not None else None

    def _objection(self, card: messages.Card) -> str:
        reason = self.permission.objection(card)
        if reason:
            self.mesh.audit.note_paced("program-refused", card.id, card, reason=reason)
        return reason

    def _note(self, event: str, card: messages.Card | None, run: str, reason: str) -> None:
        self.mesh.audit.note(event, card, reason=f"{run}: {reason}")


@contextlib.contextmanager
def serving(
    cluster: Cluster, config: GroupConfig, permission: Permission, *, relay_rate: float = 0.0
) -> Iterator[ResidentAgent]:
    """Serve members during the `with` block; at its end, all programs that were started are ended.

    With a `relay_rate`, in bytes a second, this machine is a relay for nodes of the cluster meanwhile.

    Raises:
        ConfigError: no port is free, no interface matches, or the folder of the agent cannot be used.
    """
    ports = ports_from(effective_environment().get("COVEY_PORT", ""))
    agents: list[ResidentAgent] = []
    with contextlib.ExitStack() as ending:
        relay = MemberRelay(lambda: agents[0].mesh.cluster if agents else cluster, relay_rate)
        if relay_rate:
            relay.start()
            ending.callback(relay.close)
        endpoint = cluster_endpoint(
            cluster,
            config,
            run="",
            ports=ports,
            has_lanes=False,
            relay_port=relay.port,
            maps_port=config.map_port,
        )
        ending.callback(endpoint.leave)
        agents.append(agent := control.run(_open(cluster, config, endpoint, permission), control.LOOP_SECONDS))
        agent.relay_port = relay.port
        try:
            yield agent
        finally:
            agent.data.close()
            agent.service.close()
            agent.calls.close()
            with contextlib.suppress(TimeoutError):
                control.run(agent.close(), control.LOOP_SECONDS)


async def _open(cluster: Cluster, config: GroupConfig, endpoint: Endpoint, permission: Permission) -> ResidentAgent:
    agent = ResidentAgent(cluster, config, endpoint, permission)
    try:
        await agent.open()
    except BaseException:
        agent.service.close()
        raise
    return agent
