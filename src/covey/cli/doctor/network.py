"""Facts about the network: the interfaces, the nodes that a visitor finds, and the connections between them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from covey.base.errors import ConfigError, CoveyError
from covey.base.settings import NODE_PORTS
from covey.cli.doctor.facts import ConnectionTry, LimitingLink, MetNode, NetworkFacts, PastWait, SeedFacts, WaitFacts
from covey.cli.doctor.limits import limiting_links
from covey.cli.doctor.probes import MulticastListener
from covey.cli.status.network import measured_networks
from covey.net.discovery.interfaces import all_interfaces, bare_interfaces, describe, parse_pattern, usable_interfaces
from covey.net.host.run_notes import last_wait
from covey.net.keys import clusters, owner
from covey.net.keys.identity import own_ids
from covey.runtime import loop as control
from covey.runtime.joining.situation import bare_reason
from covey.runtime.links.handshake import NO_ANSWER, spell
from covey.runtime.links.probe import PROBE_SECONDS, Sounding, sound, sound_each, throughput
from covey.runtime.loop import aside
from covey.runtime.peers.reach import NOT_TRIED, TOO_OFTEN
from covey.runtime.peers.search import seed_addresses
from covey.runtime.peers.visit import visiting
from covey.wire import messages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from covey.base.config import GroupConfig
    from covey.cli.doctor.facts import Facts
    from covey.net.discovery.mdns import Observation
    from covey.net.keys.clusters import Cluster
    from covey.runtime.links.handshake import Where
    from covey.runtime.peers.cluster_mesh import ClusterMesh
    from covey.runtime.peers.remote_process import RemoteProcess
    from covey.runtime.peers.visit import Visit

DOCTOR_SEARCH_SECONDS: Final = 2.5
"""How long to search. Multicast DNS repeats its question twice in the first second; answers take at most one more."""
REACH_ANSWER_SECONDS: Final = 4.0
"""How long other nodes have to answer."""
LAST_MEASUREMENT_SECONDS: Final = 8.0
"""No measurement starts later than this."""
POLITE_SECONDS: Final = 1.5
"""How long to stay connected for another doctor, which may have started later and still be examining this one."""
SHORT_FLOW_SECONDS: Final = 0.5
LONG_FLOW_SECONDS: Final = 1.0
LONG_ROUND_TRIP: Final = 0.01
"""Above this, throughput is measured for LONG_FLOW_SECONDS: a long round trip takes longer to reach full speed."""
FLOW_BYTES: Final = 128 << 20
NO_WAY: Final = "cannot be reached"
"""A mesh reports an unreachable address with a text that begins like this."""
MOST_EXAMINED: Final = 32
MOST_PORTS: Final = 4
"""How many ports of a silent machine are tried."""
MOST_SILENT: Final = 16
"""How many silent machines are tried. It is limited because their packets may be forged."""
LATE_SECONDS: Final = 5.0
"""How late the control loop may be before the examination is given up."""


class NodeSearch:
    """Searches for the nodes of a cluster, as a visitor, and tries connections in both directions."""

    def __init__(self, cluster: Cluster, config: GroupConfig, tell: Callable[[str], None]) -> None:
        """Prepare a search; `tell` is called with a short text at the start of each phase.

        Raises:
            ConfigError: no interface can be used.
        """
        self._config, self._tell = config, tell
        self._seeds = cluster.seeds
        self._cluster = replace(cluster, seeds=tuple(dict.fromkeys((*cluster.seeds, *_doctors_at(cluster.seeds)))))
        self._own = usable_interfaces(config.interfaces)
        self._token = secrets.token_bytes(16)
        """Shows other nodes that the probes come from this process."""
        self._until = time.monotonic() + LAST_MEASUREMENT_SECONDS
        self.interfaces: tuple[NetworkFacts, ...] = ()
        self.nodes: tuple[MetNode, ...] = ()
        self.seeds: tuple[SeedFacts, ...] = ()
        self.relays: dict[str, str] = {}
        self.other_processes: tuple[int, ...] = ()
        self.unreachable: dict[str, str] = {}
        self.refusals: dict[str, str] = {}
        self.limits: tuple[LimitingLink, ...] = ()
        self.multicast_problem = self.host_problem = ""

    def run(self) -> None:
        """Fill in the facts, in about nine seconds at most."""
        listener = MulticastListener(self._own)
        try:
            control.run(listener.open(), LATE_SECONDS)
            with visiting(self._cluster, self._config) as visit:
                self._tell("looking for other nodes")
                visit.look(DOCTOR_SEARCH_SECONDS)
                self._tell("trying connections in both directions")
                self._examine(visit, listener)
                if any(node.purpose == "visitor" for node in self.nodes):
                    self._tell("waiting for the other doctor")
                    left = min(POLITE_SECONDS, self._until - time.monotonic())
                    visit.look(left, until=lambda visit: not visit.has_visitors())
        finally:
            control.soon(listener.close)

    def _examine(self, visit: Visit, listener: MulticastListener) -> None:
        mesh = visit.mesh
        observations = mesh.search.beacon.observed()
        dialling = control.start(self._dial_announced(mesh, listener, observations))
        trying_seeds = control.start(self._try_seeds(mesh))
        cards = visit.cards()[:MOST_EXAMINED]
        trying = [control.start(self._try_ways(mesh, card)) for card in cards]
        stories = visit.ask_all(cards, messages.Ask(), PROBE_SECONDS)
        ours = mesh.card.contact
        for attempt in trying:  # they try the addresses that connections from here came from
            attempt.result(PROBE_SECONDS + LATE_SECONDS)
        elsewhere = [card for card in cards if card.contact.host != ours.host]  # on this machine every address works
        replies = visit.ask_all(elsewhere, messages.Reach(ours.addresses, self._token), REACH_ANSWER_SECONDS)
        answers = {card.id: answer for card, answer in zip(elsewhere, replies, strict=True)}
        nodes = []
        for card, attempt, story in zip(cards, trying, stories, strict=True):
            remote = mesh.met.get(card.id)
            if remote is not None and remote.link is not None:  # else it has left meanwhile
                soundings = attempt.result()
                node = self._describe(remote, mesh, soundings, self._found_by(card, mesh, listener))
                node = _with_ways_back(node, ours.addresses, answers[card.id]) if card.id in answers else node
                nodes.append((_with_story(node, story), remote.way or _quickest(soundings)))
        self.limits = limiting_links(measured_networks(visit, cards, stories, PROBE_SECONDS))
        self._tell("measuring throughput")
        self.nodes = tuple(self._measure(mesh, node, way) for node, way in nodes)
        closed = dialling.result(PROBE_SECONDS + LATE_SECONDS)
        self.interfaces = look_at_interfaces(self._config.interfaces, observations, listener)
        problems, hung_up = control.run(_problems(mesh), LATE_SECONDS)
        self.multicast_problem = problems.pop("multicast", "")
        self.relays = {relay: problems.pop(relay, "") for relay in self._cluster.relays}
        if (host_registry := mesh.endpoint.host_registry) is not None:
            self.other_processes = tuple(sorted({each.pid for each in host_registry.of_other_clusters()}))
        self.host_problem = problems.pop("this host", "")
        tried = trying_seeds.result(2 * PROBE_SECONDS + LATE_SECONDS)
        self.seeds = tuple(
            SeedFacts(
                text=seed,
                answered=not tried[seed] or any(_answers_at(seed, node) for node in self.nodes),
                hung_up=not hung_up.isdisjoint((seed, *_doctors_at((seed,)))),
                problem=bare_reason(seed, problems.get(seed, "") or tried[seed]),
            )
            for seed in self._seeds
        )
        others = {where: why for where, why in problems.items() if where not in self._cluster.seeds}
        self.refusals = {where: why for where, why in others.items() if not why.startswith(NO_WAY)}
        self.unreachable = {where: why for where, why in others.items() if where not in self.refusals} | closed

    async def _try_seeds(self, mesh: ClusterMesh) -> dict[str, str]:
        """Return why no node answers, by seed; "" if one does. (A visitor that met a node tries no further seeds.)"""

        async def try_one(seed: str) -> str:
            try:
                async with asyncio.timeout(PROBE_SECONDS):
                    addresses = await aside(seed_addresses, seed)
                is_here = any(each.ip in ("127.0.0.1", "::1") for each in addresses)
                found = await sound_each(addresses, self._own, mesh.endpoint.credentials, same_host=is_here)
            except (OSError, CoveyError) as error:  # TimeoutError, too
                return str(error) or NO_ANSWER
            return "" if any(each.round_trip >= 0 for each in found) else found[0].problem if found else NO_ANSWER

        problems = await asyncio.gather(*map(try_one, self._seeds))
        return dict(zip(self._seeds, problems, strict=True))

    async def _try_ways(self, mesh: ClusterMesh, card: messages.Card) -> list[Sounding]:
        is_here = card.contact.host == mesh.card.contact.host
        credentials, addresses = mesh.endpoint.credentials, card.contact.addresses
        return await sound_each(addresses, self._own, credentials, same_host=is_here, token=self._token)

    def _found_by(self, card: messages.Card, mesh: ClusterMesh, listener: MulticastListener) -> tuple[str, ...]:
        addresses = {address.ip for address in card.contact.addresses}
        found_by = ["same host"] * (card.contact.host == mesh.card.contact.host)
        found_by += ["multicast"] * any(addresses & heard.speakers.keys() for heard in listener.heard.values())
        found_by += ["seed"] * any(_is_at(seed, addresses) for seed in self._seeds)
        remote = mesh.met.get(card.id)
        is_relayed = remote is not None and remote.link is not None and bool(remote.link.relay)
        return tuple(found_by or ["relay" if is_relayed else "others"])

    def _describe(
        self, remote: RemoteProcess, mesh: ClusterMesh, soundings: list[Sounding], found_by: tuple[str, ...]
    ) -> MetNode:
        card, link = remote.card, remote.link
        assert link is not None
        attempts = zip(card.contact.addresses, soundings, strict=True)
        ways = tuple(_way(address, sounding, self._names()) for address, sounding in attempts)
        chosen = (spell(remote.way) if remote.way is not None else link.address).removeprefix("::ffff:")
        local = link.local_ip.removeprefix("::ffff:").partition("%")[0]
        taken = next((way for way in ways if way.address == chosen and way.works), None)
        return MetNode(
            name=card.name,
            id=card.id.hex(),
            host_name=card.host_name,
            pid=card.pid,
            version=card.version,
            protocol=link.agreed.version,
            purpose=remote.purpose,
            is_here=card.contact.host == mesh.card.contact.host,
            found_by=found_by,
            addresses=tuple(address.ip for address in card.contact.addresses),
            ways_there=ways,
            chosen_way=chosen,
            chosen_interface=taken.local_interface if taken else self._names().get(local, describe(local)),
            round_trip=remote.round_trip,
            path_mtu=taken.path_mtu if taken else max((way.path_mtu for way in ways), default=0),
            clock_offset=remote.clock_offset,
            relay=link.relay,
        )

    def _measure(self, mesh: ClusterMesh, node: MetNode, way: Where | None) -> MetNode:
        """Measure the throughput to one node while no other is measured, if there is time left."""
        seconds = LONG_FLOW_SECONDS if node.round_trip > LONG_ROUND_TRIP else SHORT_FLOW_SECONDS
        if way is None or self._until - time.monotonic() < seconds:
            return node
        flow = throughput(way, mesh.endpoint.credentials, FLOW_BYTES, seconds)
        return replace(node, bytes_per_second=control.run(flow, seconds + PROBE_SECONDS + LATE_SECONDS))

    async def _dial_announced(
        self, mesh: ClusterMesh, listener: MulticastListener, observations: Iterable[Observation]
    ) -> dict[str, str]:
        """Dial machines that announce nodes of this cluster; return those that do not respond at all, and why.

        The search itself would wait longer for them than there is time.
        """
        known = {address.ip for remote in mesh.met.values() for address in remote.card.contact.addresses}
        known |= {address.ip for each in observations for address in each.foreign}
        indices = {interface.name: interface.index for interface in self._own}
        silent = {
            ip: indices[name]
            for name, heard in listener.heard.items()
            for ip, announces in heard.speakers.items()
            if announces and ip not in known
        }
        ports = (*NODE_PORTS[:MOST_PORTS], NODE_PORTS[-1])
        dials = {
            ip: [sound((ip, port, 0, index) if ":" in ip else (ip, port), mesh.endpoint.credentials) for port in ports]
            for ip, index in itertools.islice(silent.items(), MOST_SILENT)
        }
        answers = await asyncio.gather(*(asyncio.gather(*each) for each in dials.values()))
        return {
            ip: f"{NO_WAY}: {NO_ANSWER}"
            for ip, each in zip(dials, answers, strict=True)
            if all(answer.problem == NO_ANSWER for answer in each)
        }

    def _names(self) -> dict[str, str]:
        return {ip: interface.name for interface in self._own for ip in interface.addresses}


def with_memory(facts: Facts, cluster: Cluster) -> Facts:
    """Return the facts with what this machine knows of its cluster from before."""
    known: set[bytes] = set()
    is_owner = False
    with contextlib.suppress(ConfigError, OSError):  # a secret from the environment has no file
        own, machines = own_ids(), clusters.machines(cluster.name)
        known = {node for node in clusters.known(cluster.name) if not own & {node, machines.get(node, node)}}
        is_owner = owner.held(cluster) is not None
    waited = last_wait(cluster.name)
    past = None
    if waited is not None:
        since = max(time.time() - waited.at, 0.0)
        past = PastWait(run=waited.run, node=waited.node, ago=since, seconds=waited.seconds, wait=_as_fact(waited.wait))
    return replace(facts, is_owner=is_owner, knows_others=bool(known), last_wait=past)


def look_at_interfaces(
    pattern: str, observations: Iterable[Observation] = (), listener: MulticastListener | None = None
) -> tuple[NetworkFacts, ...]:
    """Return every interface: what it is, whether it is used, and what multicast did there."""
    chosen = parse_pattern(pattern)
    try:
        usable = {interface.name: interface for interface in usable_interfaces(pattern)}
    except ConfigError:
        usable = {}
    observed = {observation.interface: observation for observation in observations}
    networks = []
    for interface in (*all_interfaces(), *bare_interfaces()):
        is_used = interface.name in usable
        reason = ""
        if not interface.is_up:
            reason = "down" if interface.is_on else "down (switched off)"
        elif not interface.addresses:
            reason = "has no address"
        elif not is_used and interface.is_loopback:
            reason = "reaches only this machine"
        elif not is_used and not any(chosen.allows(interface.name, ip) for ip in interface.addresses):
            reason = f'excluded by interfaces="{pattern}"'
        elif not is_used:
            reason = "not usable"
        seen = observed.get(interface.name)
        heard = listener.heard.get(interface.name) if listener is not None else None
        networks.append(
            NetworkFacts(
                name=interface.name,
                kind=interface.kind,
                is_up=interface.is_up,
                is_on=interface.is_on,
                addresses=interface.addresses,
                networks=tuple(str(network) for network in interface.networks),
                mtu=interface.mtu,
                has_multicast=interface.multicast,
                is_used=is_used,
                reason=reason,
                sent=seen.sent if seen else 0,
                came_back=heard.own if heard else 0,
                heard=heard.others if heard else 0,
                dropped=seen.dropped if seen else 0,
                heard_from=tuple(sorted(heard.speakers)) if heard else (),
                foreign=tuple(spell((place.ip, place.port)) for place in seen.foreign) if seen else (),
                errors=seen.errors if seen else (),
            )
        )
    return tuple(networks)


async def _problems(mesh: ClusterMesh) -> tuple[dict[str, str], set[str]]:
    return mesh.report_problems(), set(mesh.problems.hung_up)


def _quickest(soundings: list[Sounding]) -> Where | None:
    working = [sounding for sounding in soundings if sounding.way is not None]
    return min(working, key=lambda sounding: sounding.round_trip).way if working else None


def _way(address: messages.Address, sounding: Sounding, names: Mapping[str, str]) -> ConnectionTry:
    where = spell((address.ip, address.port))
    return ConnectionTry(
        address=where,
        interface=address.interface,
        local=sounding.local,
        local_interface=names.get(sounding.local, ""),
        round_trip=sounding.round_trip,
        path_mtu=sounding.path_mtu,
        problem=sounding.problem.removeprefix(f"{where}: "),
    )


def _with_ways_back(node: MetNode, ours: tuple[messages.Address, ...], answer: messages.Answer | CoveyError) -> MetNode:
    if not isinstance(answer, messages.Reached):
        return replace(node, ways_back_problem=str(answer))
    if not len(ours) == len(answer.round_trips) == len(answer.problems):
        return replace(node, ways_back_problem="it sent an unexpected answer")
    said = zip(ours, answer.round_trips, answer.problems, strict=True)
    tried = [(address, Sounding(taken, why)) for address, taken, why in said if why not in (NOT_TRIED, TOO_OFTEN)]
    if not tried:
        why = answer.problems[0].removeprefix("not tried: ") if answer.problems else NOT_TRIED
        return replace(node, ways_back_problem=f"it tried no address of this machine: {why}")
    return replace(node, ways_back=tuple(_way(address, sounding, {}) for address, sounding in tried))


def _with_story(node: MetNode, story: messages.Answer | CoveyError) -> MetNode:
    if not isinstance(story, messages.Tell):
        return node
    return replace(
        node,
        run=story.run,
        state=story.state,
        since=story.since,
        wait=_as_fact(story.wait) if story.wait is not None else None,
        turned_away=story.turned_away,
        too_many=story.too_many,
    )


def _as_fact(wait: messages.Wait) -> WaitFacts:
    def by_where(troubles: tuple[messages.AddressTrouble, ...]) -> dict[str, str]:
        return {trouble.where: trouble.why for trouble in troubles}

    return WaitFacts(
        cause=wait.cause,
        text=wait.text,
        program=wait.program,
        size=wait.size,
        min_size=wait.min_size,
        max_size=wait.max_size,
        version=wait.version,
        lanes=wait.lanes,
        on_loss=wait.on_loss,
        here=wait.here,
        missing=wait.missing,
        seeds=by_where(wait.seeds),
        refused=by_where(wait.refused),
        problems=by_where(wait.problems),
    )


def _is_at(seed: str, addresses: Iterable[str]) -> bool:
    """Tell whether a seed is one of these addresses; host names are not looked up again."""
    host = seed.rpartition(":")[0] if _has_port(seed) else seed
    return host.strip("[]") in addresses


def _answers_at(seed: str, node: MetNode) -> bool:
    """Tell whether `node` answers at a seed; another doctor on the same machine counts, too."""
    if not _is_at(seed, node.addresses):
        return False
    port = seed.rpartition(":")[2] if _has_port(seed) else str(NODE_PORTS[0])
    return node.purpose == "visitor" or any(way.address.endswith(f":{port}") for way in node.ways_there)


def _has_port(seed: str) -> bool:
    return seed.count(":") == 1 or (seed.startswith("[") and "]:" in seed)


def _doctors_at(seeds: tuple[str, ...]) -> Iterator[str]:
    """Yield the addresses at which a doctor would listen on the machines of seeds: visitors use the last port."""
    for seed in seeds:
        if seed.endswith(f":{NODE_PORTS[0]}"):
            yield seed.removesuffix(str(NODE_PORTS[0])) + str(NODE_PORTS[-1])
        elif ":" not in seed:
            yield f"{seed}:{NODE_PORTS[-1]}"
