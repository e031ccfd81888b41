"""Derives findings from facts: what is wrong, in plain words, and what to do about it. Pure."""

from __future__ import annotations

import ipaddress
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from covey.base.settings import NODE_PORTS, RELAY_PORT
from covey.cli.doctor.finding import (
    OPEN_PORTS,
    PORT_RANGE,
    UNKNOWN_CURE,
    WEIGHTS,
    WRONG_SECRET,
    Finding,
    Obstacle,
    Weight,
    cure,
    obstacle,
    parted,
    some,
)
from covey.cli.doctor.limits import slow_machines
from covey.cli.doctor.own_machine import MACHINE_CHECKS, bad_folders, is_before_certificates, physical_and_down
from covey.cli.doctor.waits import failed_wait, silent_members, waiting_runs

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from covey.cli.doctor.facts import Facts, NetworkFacts, SeedFacts

CLOCK_DIFFERENCE_SECONDS: Final = 5.0
_WHY_ANOTHER_SECRET: Final = ("two-clusters", "old-secret")
MOST_DROPPED: Final = 50
"""Up to this many dropped packets are normal, for example when many nodes start at once on one machine."""
MOST_TOO_MANY: Final = 50
"""Up to this many connections refused as too frequent are normal, for example from a machine with many processes."""


def silent_relays(facts: Facts) -> Iterator[Finding]:
    """Yield the relays that do not work from here."""
    for relay, why in facts.relays.items():
        if not why:
            continue
        text = f"The relay {relay} does not work from here: {why}."
        kind = obstacle(why)
        if kind is Obstacle.REFUSED:
            remedy = (
                f"The machine answers, but no relay listens there. Start one on it: covey relay (port {RELAY_PORT})"
            )
        elif kind is Obstacle.SILENCE:
            remedy = (
                "Nothing came back. Check that the address is right, that the machine is on and runs covey relay, and "
                f"that its firewall and router let TCP port {RELAY_PORT}, or the one it listens at, in."
            )
        else:
            remedy = cure(why, relay, facts.cluster)
        yield Finding("warning" if facts.nodes else "problem", "relay-silent", text, remedy)


def relayed_nodes(facts: Facts) -> Iterator[Finding]:
    """Yield the nodes that only a relay leads to."""
    by_relay: dict[str, list[str]] = {}
    for node in facts.nodes:
        if node.relay:
            by_relay.setdefault(node.relay, []).append(node.name)
    for relay, names in by_relay.items():
        yield Finding(
            "note",
            "relayed",
            f"{some(names)} cannot be reached directly from here; the relay {relay} is used.",
            "Runs work, at most as fast as the relay's line. For a direct way, let one of the two machines in: "
            f"{PORT_RANGE} in its firewall, and a port forwarded by its router.",
        )


def router(facts: Facts) -> Iterator[Finding]:
    """Yield whether the router lets connections in, if it is to be asked."""
    if facts.router_ip:
        text = f"The router maps ports, with {facts.router}, but its own address, {facts.router_ip}, is private."
        remedy = (
            "It is behind another router, so the internet does not lead to its ports: only machines between the two "
            "connect there. Let the outer one pass ports on, or use a relay: covey relay"
        )
        yield Finding("warning", "router-private", text, remedy)
    elif facts.router:
        text = f"The router maps ports, with {facts.router}: nodes of this machine can be reached from outside."
        yield Finding("note", "router", text, "Others use the address that a node logs, with --seeds.")
    if facts.router_problem:
        text = f"No port of the router can be mapped, as map_port asks for: {facts.router_problem}."
        remedy = "Allow it in the settings of the router (PCP, NAT-PMP or UPnP). A relay works everywhere: covey relay"
        yield Finding("warning", "router-silent", text, remedy)


RELAY_CHECKS: Final = (silent_relays, relayed_nodes, router)


def findings(facts: Facts) -> list[Finding]:
    """Return the findings that apply: problems first, then warnings and notes; causes before their likely effects."""
    found = [finding for check in _CHECKS for finding in check(facts)]
    if any(finding.code in _WHY_NOBODY for finding in found):  # each cause once
        found = [finding for finding in found if finding.code != "nobody"]
    found = _one_about_the_secret(found, facts.cluster)
    return sorted(found, key=lambda finding: WEIGHTS.index(finding.weight))


def _one_about_the_secret(found: list[Finding], cluster: str) -> list[Finding]:
    """Say once that another machine has another secret: with the run that waits for it, and the cure that fits best."""
    of_secret = cure(WRONG_SECRET, "", cluster)
    told = [finding for finding in found if finding.remedy == of_secret]
    waits = [finding for finding in told if finding.text.startswith("Run ")]  # as all of `waits` begin
    why = next((finding for finding in found if finding.code in _WHY_ANOTHER_SECRET), None)
    if not waits and why is None:
        return found
    left = [finding for finding in found if finding not in told or finding in waits]
    if why is None or not waits:
        return left
    cured = [replace(finding, remedy=why.remedy) if finding in waits else finding for finding in left]
    return [finding for finding in cured if finding != why]


# Which nodes are found and linked


def _search(facts: Facts) -> Iterator[Finding]:
    """Report why this command itself could not search, unless another finding explains it."""
    if bad_folders(facts):
        return
    if facts.search_problem:
        what, remedy = parted(facts.search_problem, UNKNOWN_CURE)
        yield Finding("problem", "search-failed", f"covey doctor could not look for other nodes: {what}.", remedy)
    if facts.host_problem:
        what, remedy = parted(facts.host_problem, UNKNOWN_CURE)
        yield Finding("problem", "this-host", f"Nodes on this machine do not find each other: {what}.", remedy)


def _no_node(facts: Facts) -> Iterator[Finding]:
    if not facts.looked or facts.nodes or is_before_certificates(facts):
        return
    if not any(each.is_used for each in facts.interfaces) and physical_and_down(facts):
        return  # there is no network to find a node on
    heard = any(each.heard for each in facts.interfaces if each.is_used)
    silence = "" if heard else ", and not one multicast packet of another machine was heard"
    yield Finding(
        "problem",
        "nobody",
        f"No node of cluster {facts.cluster!r} was found{silence}.",
        "Start covey run here or on another machine. If it already runs there, run covey doctor there at the same "
        "time: the two look for each other. If they do not meet, give one the address of the other: covey doctor "
        f"--seeds IP:{NODE_PORTS[-1]}",
    )


def _other_clusters(facts: Facts) -> Iterator[Finding]:
    """If no node of this cluster was found, name nodes of other clusters on this machine: they may be meant."""
    if facts.other_processes and not any(node.is_here for node in facts.nodes):
        processes = some([str(pid) for pid in facts.other_processes])
        what = "Process {} is a node" if len(facts.other_processes) == 1 else "Processes {} are nodes"
        yield Finding(
            "note",
            "other-cluster",
            f"{what.format(processes)} of another cluster than {facts.cluster!r}, on this machine.",
            "If you mean that cluster, name it: covey doctor CLUSTER   (covey clusters lists those of this machine)",
        )


def _unreachable(facts: Facts) -> Iterator[Finding]:
    by_kind: dict[Obstacle, list[str]] = {}
    for where, why in facts.unreachable.items():
        by_kind.setdefault(obstacle(why), []).append(where)
    for kind, places in by_kind.items():
        why = facts.unreachable[places[0]].removeprefix("cannot be reached: ")
        if kind is Obstacle.SILENCE:
            yield Finding(
                "problem",
                "unreachable",
                f"Nodes announce themselves at {some(places)}, but no connection gets through, in either direction.",
                "Multicast packets come through and connections do not, so a firewall is in between: open "
                f"{PORT_RANGE} on this machine or on that one ({OPEN_PORTS}). On a guest Wi-Fi, the access point may "
                "keep its clients apart.",
            )
        elif kind is Obstacle.REFUSED:
            yield Finding(
                "note",
                "gone",
                f"A node was announced at {some(places)}, and connections to it are refused.",
                "The node has probably just ended. If covey run still waits there, restart it.",
            )
        else:
            text = f"Nodes announce themselves at {some(places)}, but cannot be reached: {why}."
            yield Finding("problem", "unreachable", text, cure(why, some(places), facts.cluster))


def _seeds(facts: Facts) -> Iterator[Finding]:
    weight: Weight = "warning" if facts.nodes else "problem"
    waits = [node.wait for node in facts.nodes if node.wait is not None]
    waits += [facts.last_wait.wait] if facts.last_wait is not None else []
    told = {seed for wait in waits for seed in wait.seeds}
    silent: dict[Obstacle, list[SeedFacts]] = {}
    for seed in facts.seeds:
        if seed.hung_up:
            text = f"The node at seed {seed.text} closed the connection at the door: it has another secret."
            remedy = cure(WRONG_SECRET, seed.text, facts.cluster)
            yield Finding("problem", "wrong-secret-at-seed", text, remedy)
        elif seed.problem and not seed.answered and seed.text not in told:
            silent.setdefault(obstacle(seed.problem), []).append(seed)
    for kind, seeds in silent.items():
        if kind is Obstacle.CLOCK_HERE and is_before_certificates(facts):
            continue
        places, why = [seed.text for seed in seeds], seeds[0].problem
        text = f"No covey node answered at {'seed' if len(places) == 1 else 'seeds'} {some(places)}: {why}."
        yield Finding(weight, "seed-silent", text, cure(why, some(places), facts.cluster))


def _foreign(facts: Facts) -> Iterator[Finding]:
    places = sorted({place for each in facts.interfaces for place in each.foreign})
    is_alone = all(node.is_here for node in facts.nodes)
    if places and is_alone and facts.is_owner and not facts.knows_others:
        yield Finding(
            "problem",
            "two-clusters",
            f"{some(places)} {'announces' if len(places) == 1 else 'announce'} another cluster, and no other node has "
            f"ever been in {facts.cluster!r} of this machine: `covey init` was probably typed on both.",
            "Type `covey pair` on one of the two machines and `covey enroll` on the other, which asks whether to give "
            "its own cluster up.",
        )
    elif places and is_alone and facts.knows_others:
        yield Finding(
            "problem",
            "old-secret",
            f"{some(places)} {'has' if len(places) == 1 else 'have'} another secret than cluster {facts.cluster!r} has "
            "on this machine, which has met others of the cluster before: the secret was probably changed (covey "
            "secret rotate) while one of the two was off.",
            "Type `covey pair` on a machine that has the new secret, and `covey enroll` on the one that has the old. "
            "If it is another user's cluster, ignore it.",
        )
    elif places:
        yield Finding(
            "note" if facts.nodes else "problem",
            "wrong-secret-nearby",
            f"Nodes with another secret than cluster {facts.cluster!r} announce themselves nearby: {some(places)}.",
            "If that is another user's cluster, ignore it. If it should be this one, enroll that machine with the "
            f"join code that this command prints here: covey init --show {facts.cluster}",
        )


def _refused(facts: Facts) -> Iterator[Finding]:
    told = {seed.text for seed in facts.seeds}
    by_reason: dict[str, list[str]] = {}
    for where, reason in sorted(facts.refusals.items()):
        if where not in told and not (is_before_certificates(facts) and obstacle(reason) is Obstacle.CLOCK_HERE):
            by_reason.setdefault(reason, []).append(where)
    for reason, places in by_reason.items():
        first = places[0].partition(", ")[0]  # of the addresses of one node
        yield Finding("problem", "refused", f"{some(places)}: {reason}.", cure(reason, first, facts.cluster))


# How well nodes reach each other


def _multicast(facts: Facts) -> Iterator[Finding]:
    used = [each for each in facts.interfaces if each.is_used and each.kind != "loopback"]
    capable = [each for each in used if each.has_multicast]
    if facts.looked and used and not capable:
        yield Finding(
            "warning",
            "no-multicast",
            "No interface in use supports multicast, so nodes do not find each other by themselves.",
            "Give the other nodes the address of one node: covey run --seeds IP ..., or COVEY_SEEDS.",
        )
    for each in capable if facts.looked else ():
        if each.errors or not each.came_back:
            why = "; ".join(each.errors) or "packets that this machine sends do not come back to it"
            cause = (
                "covey does not know the cause" if each.errors else "If a firewall runs here, let 5353/udp through it"
            )
            yield Finding(
                "warning",
                "multicast-broken",
                f"Multicast does not work on {each.name}: {why}.",
                f"{cause}. Without multicast, give the other nodes the address of one: --seeds or COVEY_SEEDS.",
            )
    if facts.multicast_problem:
        text = f"Multicast did not start: {facts.multicast_problem}."
        remedy = "Give the other nodes the address of one node: --seeds or COVEY_SEEDS."
        yield Finding("warning", "multicast-broken", text, remedy)
    unheard = [
        node.name
        for node in facts.nodes
        if not node.is_here and "multicast" not in node.found_by and _shared(capable, node.addresses)
    ]
    if unheard:
        yield Finding(
            "warning",
            "multicast-blocked",
            f"Multicast is blocked between here and {some(unheard)}: both are on one network, but no multicast packet "
            "arrives.",
            "Seeds work, as they do now. To do without them, allow 5353/udp in the firewalls of both, and switch off "
            "client isolation and IGMP snooping in the access point or switch.",
        )


def _flood(facts: Facts) -> Iterator[Finding]:
    for each in facts.interfaces:
        if each.dropped >= MOST_DROPPED:
            yield Finding(
                "warning",
                "multicast-flood",
                f"{each.dropped} packets about covey were dropped on {each.name}. That is more than nodes send, so a "
                "machine there repeats or invents them. Nodes may be slow to find each other.",
                f"Find that machine (tcpdump -ni {each.name} udp port 5353) and stop it. Until then, give the other "
                "nodes the address of one node: --seeds or COVEY_SEEDS.",
            )


def _crowded_door(facts: Facts) -> Iterator[Finding]:
    for node in facts.nodes:
        if node.too_many >= MOST_TOO_MANY:
            yield Finding(
                "warning",
                "door-flood",
                f"{node.name} has refused {node.turned_away:,} connections, {node.too_many:,} of them because one "
                "source connects too often.",
                "A machine without the cluster's secret keeps connecting. Find it in the log of that node (covey audit "
                f"there), and block it from {PORT_RANGE} with a firewall. The limit does not affect members.",
            )


def _one_way(facts: Facts) -> Iterator[Finding]:
    for node in facts.nodes:
        if node.is_here or not node.ways_there or not node.ways_back:
            continue
        there, back = (any(way.works for way in ways) for ways in (node.ways_there, node.ways_back))
        if there == back:
            continue
        failed = {way.problem for way in (node.ways_back if there else node.ways_there)}
        if not any(obstacle(why) is Obstacle.SILENCE for why in failed):
            source, target = ("there", "here") if there else ("here", "there")
            text = (
                f"{node.name} can be reached in one direction only. From {source} to {target}: {some(sorted(failed))}."
            )
            remedy = f"One direction is enough, so runs work. {cure(sorted(failed)[0], target, facts.cluster)}"
            yield Finding("warning", "one-way", text, remedy)
            continue
        told, closed, caller = (
            (
                f"this machine reaches {node.name}, but not vice versa",
                "this machine",
                f"{node.name} ({node.addresses[0]})",
            )
            if there
            else (f"{node.name} reaches this machine, but not vice versa", f"{node.name} ({node.addresses[0]})", "here")
        )
        yield Finding(
            "warning",
            "one-way-firewall",
            f"One-way firewall: {told}. Connections from {caller} to {closed} are dropped.",
            f"One direction is enough, so runs work. To open the other, allow {PORT_RANGE} in the firewall of "
            f"{closed}: {OPEN_PORTS}",
        )


def _wireless(facts: Facts) -> Iterator[Finding]:
    by_name = {each.name: each for each in facts.interfaces}
    cables = [each for each in facts.interfaces if each.kind == "wired" and each.is_up]
    for node in facts.nodes:
        used = by_name.get(node.chosen_interface)
        cable = _shared(cables, node.addresses)
        if not node.is_here and used is not None and used.kind == "wireless" and cable is not None:
            yield Finding(
                "warning",
                "wireless-used",
                f"Traffic to {node.name} uses Wi-Fi ({used.name}), although the cable ({cable.name}) leads there "
                "as well.",
                f"Exclude the Wi-Fi: COVEY_INTERFACES='!{used.name}', or --interfaces '!{used.name}'",
            )


def _versions(facts: Facts) -> Iterator[Finding]:
    """Tell which machines have another release; those that cannot talk to this one are refused, and named above."""
    ours = facts.machine.versions.get("covey", "")
    by_host = {node.host_name: node for node in facts.nodes if node.version not in ("", ours)}
    others = [f"{host} has {node.version} (protocol {node.protocol})" for host, node in sorted(by_host.items())]
    if others:
        text = f"Releases of covey differ: this machine has {ours}, {some(others)}. They work together."
        yield Finding("note", "versions", text, "Update the machines one after the other, when it suits.")


def _clocks(facts: Facts) -> Iterator[Finding]:
    for node in facts.nodes:
        if abs(node.clock_offset) > CLOCK_DIFFERENCE_SECONDS:
            direction = "ahead of" if node.clock_offset > 0 else "behind"
            yield Finding(
                "note",
                "clock",
                f"The clock of {node.name} is {abs(node.clock_offset):,.0f} s {direction} this machine's. covey "
                "works, but logs are hard to compare.",
                "timedatectl set-ntp true, on the machine whose clock is wrong.",
            )


def _shared(networks: Iterable[NetworkFacts], addresses: Iterable[str]) -> NetworkFacts | None:
    """Return the first of these interfaces whose network contains one of `addresses`."""
    ips = [ip for ip in map(ipaddress.ip_address, addresses) if not ip.is_link_local]
    for each in networks:
        for network in map(ipaddress.ip_interface, each.networks):
            if any(ip.version == network.version and ip in network.network for ip in ips):
                return each
    return None


_WHY_NOBODY: Final = {"unreachable", "wrong-secret-at-seed", "two-clusters", "old-secret", "refused", "gave-up"}
"""Findings that say why no node was found."""
_CHECKS: Final = (
    *(waiting_runs, failed_wait, silent_members),
    *MACHINE_CHECKS,
    *(_search, _unreachable, _seeds, *RELAY_CHECKS, _refused, _foreign, _no_node, _other_clusters),
    *(_one_way, _multicast, _flood, _crowded_door, _wireless, _versions, _clocks),
    slow_machines,
)
