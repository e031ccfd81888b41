"""From facts to advice: what is wrong in plain words, and what to do about it. Pure."""

from __future__ import annotations

import ipaddress
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from covey.base.config import PORTS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from covey.cli.doctor.facts import Facts, Network

Weight = Literal["problem", "warning", "note"]
WEIGHTS: Final[tuple[Weight, ...]] = ("problem", "warning", "note")
CLOCK_SECONDS: Final = 5.0
MOST_DROPPED: Final = 50
"""Packets that are not looked at without a flood: many nodes that start at once on one machine, say."""
MOST_TOO_MANY: Final = 50
"""Connections that a door refuses for coming too often without a flood: a machine with very many processes, say."""
PORT_RANGE: Final = f"{PORTS[0]}-{PORTS[-1]}/tcp"
OPEN_PORTS: Final = f"ufw allow {PORTS[0]}:{PORTS[-1]}/tcp, or firewall-cmd --add-port={PORT_RANGE}"


@dataclass(frozen=True)
class Finding:
    """Something to know, and what to do."""

    weight: Weight
    code: str
    """Stable, for programs."""
    text: str
    remedy: str


def findings(facts: Facts) -> list[Finding]:
    """Return what applies, the gravest first; in equal weight, causes before what may follow from them."""
    found = [finding for check in _CHECKS for finding in check(facts)]
    return sorted(found, key=lambda finding: WEIGHTS.index(finding.weight))


# This machine


def _permissions(facts: Facts) -> Iterator[Finding]:
    for path in facts.machine.paths:
        where = shlex.quote(path.path)
        if not path.is_ours:
            text = f"{path.path} belongs to {path.owner}, not to you."
            yield Finding("problem", "owner", text, f"Set COVEY_HOME to a folder of yours, or: chown $(id -u) {where}")
        elif path.is_loose:
            what = "others may enter it" if path.is_folder else "others may read it"
            mode = "700" if path.is_folder else "600"
            yield Finding(
                "problem",
                "permissions",
                f"{path.path} holds keys, and {what} (mode {path.mode}). covey does not use it like that.",
                f"chmod {mode} {where}   If strangers can log in here, then change the secret: covey secret rotate",
            )


def _unknown_variables(facts: Facts) -> Iterator[Finding]:
    for name, meant in sorted(facts.machine.unknown_variables.items()):
        remedy = f"Rename it to {meant}, or unset {name}." if meant else f"unset {name}"
        yield Finding("problem", "unknown-variable", f"{name} is set, but covey has no such setting.", remedy)


def _no_cluster(facts: Facts) -> Iterator[Finding]:
    explained = any((path.is_loose or not path.is_ours) for path in facts.machine.paths)
    if facts.cluster_problem and not explained:
        yield Finding(
            "problem",
            "no-cluster",
            f"There is no cluster to look at: {facts.cluster_problem}.",
            "covey init makes a cluster and prints its join code; covey enroll takes the code on every other machine.",
        )


def _no_interface(facts: Facts) -> Iterator[Finding]:
    if facts.interfaces_problem:
        pattern = next((each for each in facts.machine.settings if each.name == "interfaces"), None)
        where = pattern.variable if pattern is not None and pattern.source == "environment" else "--interfaces"
        yield Finding(
            "problem",
            "interfaces-excluded",
            f"The pattern for interfaces leaves none to use: {facts.interfaces_problem}.",
            f"Change {where} so that it matches one that is up, or leave it out to use all.",
        )
    elif not any(each.is_up and each.kind != "loopback" for each in facts.interfaces):
        yield Finding(
            "warning" if facts.people else "problem",
            "only-loopback",
            "This machine is on no network: nothing but loopback is up.",
            "Plug in a cable or join a Wi-Fi. Nodes on this one machine find each other without.",
        )


def _only_ipv6(facts: Facts) -> Iterator[Finding]:
    ips = [ipaddress.ip_address(ip) for each in facts.interfaces if each.is_used for ip in each.addresses]
    if ips and all(ip.version == 6 for ip in ips):
        local = all(ip.is_link_local for ip in ips)
        yield Finding(
            "note",
            "only-ipv6",
            "This machine has no IPv4 address"
            + (", and link-local IPv6 addresses reach no further than the next router." if local else "."),
            "Give the other machines IPv6 too: one with IPv4 alone cannot be reached from here.",
        )


# Whom we met, and whom not


def _nobody(facts: Facts) -> Iterator[Finding]:
    if not facts.looked or facts.people:
        return
    heard = any(each.heard for each in facts.interfaces if each.is_used)
    silence = "" if heard else ", and not one multicast packet of another machine was heard"
    yield Finding(
        "problem",
        "nobody",
        f"No node of cluster {facts.cluster!r} was found{silence}.",
        "Run covey doctor on another machine of the cluster at the same time: the two look for each other. If they do "
        f"not meet, name an address of the other one: covey doctor --seeds IP:{PORTS[-1]}",
    )


def _unreachable(facts: Facts) -> Iterator[Finding]:
    closed = [where for where, why in facts.unreachable.items() if "refused" not in why]
    if closed:
        yield Finding(
            "problem",
            "unreachable",
            f"Nodes announce themselves at {_some(closed)}, but no connection gets through, in either direction.",
            f"A firewall is in between: open {PORT_RANGE} on this machine or on that one ({OPEN_PORTS}). On a guest "
            "Wi-Fi it may be the access point that keeps its clients apart.",
        )
    if gone := [where for where in facts.unreachable if where not in closed]:
        yield Finding(
            "note",
            "gone",
            f"A node was announced at {_some(gone)}, and connections to it are refused.",
            f"Most likely it has just ended. If it runs, its firewall rejects: open {PORT_RANGE} there ({OPEN_PORTS}).",
        )


def _seeds(facts: Facts) -> Iterator[Finding]:
    weight: Weight = "warning" if facts.people else "problem"
    for seed in facts.seeds:
        if seed.hung_up:
            yield Finding(
                "problem",
                "wrong-secret-at-seed",
                f"The node at seed {seed.text} hangs up on us at the door: it has another secret.",
                f"Enroll one of the two machines with the join code of the other: covey init --show {facts.cluster} "
                "there, covey enroll here. After covey secret rotate, programs must be started anew.",
            )
        elif seed.problem and not seed.answered:
            yield Finding(
                weight,
                "seed-silent",
                f"Nobody was met at seed {seed.text}: {seed.problem}.",
                f"Is a node running there, at that port (the first one takes {PORTS[0]})? If so, open {PORT_RANGE} in "
                "the firewall of that machine. If the address has changed, give the new one.",
            )


def _foreign(facts: Facts) -> Iterator[Finding]:
    places = sorted({place for each in facts.interfaces for place in each.foreign})
    if places:
        yield Finding(
            "note" if facts.people else "problem",
            "wrong-secret-nearby",
            f"Nodes with another secret than cluster {facts.cluster!r} announce themselves nearby: {_some(places)}.",
            "If that is somebody else's cluster, never mind. If it should be this one, enroll that machine with the "
            f"join code that this command prints here: covey init --show {facts.cluster}",
        )


def _refused(facts: Facts) -> Iterator[Finding]:
    told = {seed.text for seed in facts.seeds}
    by_reason: dict[str, list[str]] = {}
    for who, reason in sorted(facts.refusals.items()):
        if who not in told:
            by_reason.setdefault(reason, []).append(who)
    for reason, whom in by_reason.items():
        if "denied" in reason:
            remedy = "If that was not meant, let it in again on the machine that denies it: covey deny --undo NODE"
        elif "identity" in reason:
            remedy = (
                "Two machines have one identity: was a home folder copied? Remove the `identities` folder in the copy, "
                "and a new one is made."
            )
        else:
            remedy = "Give both machines the same version of covey and the join code of one cluster."
        yield Finding("problem", "refused", f"{_some(whom)}: {reason}.", remedy)


# How well we reach each other


def _multicast(facts: Facts) -> Iterator[Finding]:
    used = [each for each in facts.interfaces if each.is_used and each.kind != "loopback"]
    capable = [each for each in used if each.has_multicast]
    if facts.looked and used and not capable:
        yield Finding(
            "warning",
            "no-multicast",
            "No interface in use can do multicast, so nodes do not find each other by themselves.",
            "Name one node to the others: covey run --seeds IP ..., or COVEY_SEEDS.",
        )
    for each in capable if facts.looked else ():
        if each.errors or not each.came_back:
            why = "; ".join(each.errors) or "packets sent do not even come back to this machine"
            yield Finding(
                "warning",
                "multicast-broken",
                f"Multicast does not work on {each.name}: {why}.",
                "Allow 5353/udp in the firewall of this machine, or name one node to the others: --seeds, COVEY_SEEDS.",
            )
    if facts.multicast_problem:
        text = f"Multicast did not start: {facts.multicast_problem}."
        yield Finding("warning", "multicast-broken", text, "Name one node to the others: --seeds or COVEY_SEEDS.")
    unheard = [
        person.name
        for person in facts.people
        if not person.is_here and "multicast" not in person.found_by and _shared(capable, person.addresses)
    ]
    if unheard:
        yield Finding(
            "warning",
            "multicast-blocked",
            f"Multicast is blocked between here and {_some(unheard)}: on one network, and yet nothing was heard of "
            "each other that way.",
            "It works with seeds, as now. To do without them, allow 5353/udp in the firewalls of both, and switch off "
            "client isolation and IGMP snooping in the access point or switch.",
        )


def _flood(facts: Facts) -> Iterator[Finding]:
    for each in facts.interfaces:
        if each.dropped >= MOST_DROPPED:
            yield Finding(
                "warning",
                "multicast-flood",
                f"{each.dropped} packets about covey were not looked at on {each.name}: more than nodes send, "
                "so a machine there repeats or invents them. Nodes may be slow to find each other.",
                f"Find that machine (tcpdump -ni {each.name} udp port 5353) and stop it. Until then, name one node "
                "to the others: --seeds or COVEY_SEEDS.",
            )


def _crowded_door(facts: Facts) -> Iterator[Finding]:
    for person in facts.people:
        if person.too_many >= MOST_TOO_MANY:
            yield Finding(
                "warning",
                "door-flood",
                f"{person.name} has turned {person.too_many:,} connections away that came too often from one source, "
                f"of {person.turned_away:,} in all.",
                "A machine without the cluster's secret keeps connecting: find it in the log of that node (covey audit "
                f"there), and keep it away from {PORT_RANGE} by a firewall. Members have an allowance of their own.",
            )


def _one_way(facts: Facts) -> Iterator[Finding]:
    for person in facts.people:
        if person.is_here or not person.ways_there or not person.ways_back:
            continue
        there, back = (any(way.works for way in ways) for ways in (person.ways_there, person.ways_back))
        if there == back:
            continue
        told, closed, caller = (
            (
                f"we reach {person.name}, but it does not reach us",
                "this machine",
                f"{person.name} ({person.addresses[0]})",
            )
            if there
            else (f"{person.name} reaches us, but we do not reach it", f"{person.name} ({person.addresses[0]})", "here")
        )
        yield Finding(
            "warning",
            "one-way-firewall",
            f"One-way firewall: {told}. Connections from {caller} to {closed} are dropped.",
            f"It works, as one direction is enough. To mend it, open {PORT_RANGE} in the firewall of {closed}: "
            f"{OPEN_PORTS}",
        )


def _wireless(facts: Facts) -> Iterator[Finding]:
    by_name = {each.name: each for each in facts.interfaces}
    cables = [each for each in facts.interfaces if each.kind == "wired" and each.is_up]
    for person in facts.people:
        used = by_name.get(person.chosen_interface)
        cable = _shared(cables, person.addresses)
        if not person.is_here and used is not None and used.kind == "wireless" and cable is not None:
            yield Finding(
                "warning",
                "wireless-used",
                f"The way to {person.name} goes by Wi-Fi ({used.name}), although there is a cable ({cable.name}) that "
                "leads there, too.",
                f"Leave the Wi-Fi out: COVEY_INTERFACES='!{used.name}', or --interfaces '!{used.name}'",
            )


def _versions(facts: Facts) -> Iterator[Finding]:
    ours = facts.machine.versions.get("covey", "")
    others = [f"{person.name} has {person.version}" for person in facts.people if person.version not in ("", ours)]
    if others:
        text = f"Versions of covey differ: this machine has {ours}, {_some(others)}."
        yield Finding("warning", "versions", text, "Install the same version everywhere.")


def _clocks(facts: Facts) -> Iterator[Finding]:
    for person in facts.people:
        if abs(person.clock_offset) > CLOCK_SECONDS:
            direction = "ahead of" if person.clock_offset > 0 else "behind"
            yield Finding(
                "note",
                "clock",
                f"The clock of {person.name} is {abs(person.clock_offset):,.0f} s {direction} ours. covey does not "
                "mind, but logs are hard to compare.",
                "timedatectl set-ntp true, on the machine whose clock is wrong.",
            )


def _shared(networks: Iterable[Network], addresses: Iterable[str]) -> Network | None:
    """Return the first of our interfaces that is on a network with one of their addresses."""
    ips = [ip for ip in map(ipaddress.ip_address, addresses) if not ip.is_link_local]
    for each in networks:
        for network in map(ipaddress.ip_interface, each.networks):
            if any(ip.version == network.version and ip in network.network for ip in ips):
                return each
    return None


def _some(names: list[str], most: int = 4) -> str:
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


_CHECKS: Final = (
    *(_permissions, _unknown_variables, _no_cluster, _no_interface),
    *(_unreachable, _seeds, _refused, _foreign, _nobody),
    *(_one_way, _multicast, _flood, _crowded_door, _wireless, _versions, _clocks, _only_ipv6),
)
