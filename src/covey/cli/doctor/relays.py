"""What the doctor finds about relays and the router: those that do not answer, and nodes behind a relay. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from covey.base.settings import RELAY_PORT
from covey.cli.doctor.cures import Obstacle, cure, obstacle
from covey.cli.doctor.finding import PORT_RANGE, Finding, some

if TYPE_CHECKING:
    from collections.abc import Iterator

    from covey.cli.doctor.facts import Facts


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
