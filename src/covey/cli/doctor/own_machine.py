"""Findings about this machine itself: its files and folders, settings, clock and interfaces. Pure."""

from __future__ import annotations

import datetime
import errno
import ipaddress
import os
import shlex
from typing import TYPE_CHECKING, Final

from covey.cli.doctor.finding import Finding, Weight, parted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from covey.cli.doctor.facts import Facts, Folder, NetworkFacts

CERTIFICATES_SINCE: Final = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)
"""When the certificates of nodes begin to be valid."""
RELEASED: Final = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
"""No version of covey is older than this."""
MAKE_CLUSTER: Final = (
    "covey init makes a cluster and shows a code of six digits; covey enroll on every other machine asks for it."
)
PHYSICAL: Final = ("wired", "wireless", "unknown")


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
                f"{path.path} holds keys, and {what} (mode {path.mode}). covey refuses to use it.",
                f"chmod {mode} {where}   If other people can log in here, also change the secret: covey secret rotate",
            )


def _unknown_variables(facts: Facts) -> Iterator[Finding]:
    for name, meant in sorted(facts.machine.unknown_variables.items()):
        remedy = f"Rename it to {meant}, or unset {name}." if meant else f"unset {name}"
        yield Finding("problem", "unknown-variable", f"{name} is set, but covey has no such setting.", remedy)


def _no_cluster(facts: Facts) -> Iterator[Finding]:
    explained = any((path.is_loose or not path.is_ours) for path in facts.machine.paths)
    explained = explained or any(folder.role == "configuration" for folder in bad_folders(facts))
    if not facts.cluster_problem or explained:
        return
    if "in no cluster" in facts.cluster_problem:
        what, remedy = facts.cluster_problem.partition(": run `covey init`")[0], MAKE_CLUSTER
    else:
        what, remedy = parted(facts.cluster_problem, "covey clusters shows the clusters of this machine.")
    yield Finding("problem", "no-cluster", f"There is no cluster to look at: {what}.", remedy)


def _folders(facts: Facts) -> Iterator[Finding]:
    for folder in bad_folders(facts):
        is_full = folder.problem in (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))
        what = f"The {folder.role} folder {folder.path}"
        if is_full:
            free = "" if folder.free_bytes < 0 else f" It has {_size(folder.free_bytes)} free."
            text, first = f"{what} is full: {folder.problem}.{free}", "Free some space there"
        elif folder.problem == os.strerror(errno.ENOENT):
            text, first = f"{what} does not exist.", f"Make it (mkdir -p {shlex.quote(folder.path)})"
        elif folder.problem == os.strerror(errno.EROFS):
            text, first = f"{what} cannot be written: {folder.problem}.", "Mount it writable"
        else:
            text, first = f"{what} cannot be written: {folder.problem}.", "Make it writable for this user"
        has_another = folder.role == "temporary" and not (is_full or facts.search_problem or facts.host_problem)
        if has_another:
            may_miss = ", and may not find processes that use this one" if folder.variable != "TMPDIR" else ""
            text += f" covey uses another folder{may_miss}."
        remedy = f"{first}, or set {folder.variable} to a folder that can be written."
        yield Finding("warning" if has_another else "problem", f"{folder.role}-folder", text, remedy)


def bad_folders(facts: Facts) -> list[Folder]:
    """Return the folders in which nothing can be written."""
    return [folder for folder in facts.machine.folders if folder.problem]


def _size(count: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count} bytes"


def is_before_certificates(facts: Facts) -> bool:
    """Tell whether this machine's clock makes every certificate invalid."""
    return 0 < facts.machine.clock < CERTIFICATES_SINCE.timestamp()


def _clock(facts: Facts) -> Iterator[Finding]:
    clock = facts.machine.clock
    if not 0 < clock < RELEASED.timestamp():
        return
    says = datetime.datetime.fromtimestamp(clock, datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    others = [(node.name, node.clock_offset) for node in facts.nodes if not node.is_here]
    behind = f"; the clock of {others[0][0]} is {others[0][1]:,.0f} s ahead of it" if others else ""
    years = f"at least {(RELEASED.timestamp() - clock) / (365.25 * 86400):.0f} years" if not others else ""
    late = f" It is {years} behind: no covey is older than {RELEASED:%Y-%m-%d}." if years else ""
    if is_before_certificates(facts):
        effect = f" The certificates of nodes are valid from {CERTIFICATES_SINCE:%Y} on, so no connection is accepted."
        text = f"The clock of this machine is wrong: it says {says}{behind}.{late}{effect}"
        yield Finding(
            "problem", "clock-wrong", text, "Set the clock: timedatectl set-ntp true, or date -s 'YYYY-MM-DD HH:MM'"
        )
    else:
        text = f"The clock of this machine is wrong: it says {says}{behind}.{late} covey works, but its logs mislead."
        yield Finding(
            "warning", "clock-wrong", text, "Set the clock: timedatectl set-ntp true, or date -s 'YYYY-MM-DD HH:MM'"
        )


def physical_and_down(facts: Facts) -> list[NetworkFacts]:
    """Return the network cards that are switched off or not connected."""
    return [each for each in facts.interfaces if not each.is_up and each.kind in PHYSICAL]


def is_on_no_network(facts: Facts) -> bool:
    """Tell whether no interface is up that leads to another machine."""
    return not any(each.is_up and each.kind != "loopback" for each in facts.interfaces)


def connecting(interface: NetworkFacts) -> str:
    """Return how to connect an interface that is down."""
    if not interface.is_on:
        return f"ip link set {interface.name} up"
    if interface.kind == "wireless":
        return f"Join a Wi-Fi with {interface.name}."
    return f"Plug a cable into {interface.name}, and look whether the other end is connected and on."


def _interface_down(facts: Facts) -> Iterator[Finding]:
    """Report interfaces that are down, if that may be why other nodes are not found."""
    down, is_alone = physical_and_down(facts), is_on_no_network(facts)
    missed = [seed.text for seed in facts.seeds if not seed.answered]
    has_met = any(not node.is_here for node in facts.nodes)
    waits = any(node.state == "joining" for node in facts.nodes)
    is_cut_off = (is_alone or bool(facts.interfaces_problem)) and not has_met
    if not is_cut_off and not missed and (has_met or (facts.nodes and not waits)):
        return
    for each in down:
        where = f" ({', '.join(each.addresses)})" if each.addresses else ""
        state = "is switched off" if not each.is_on else "is on, but not connected"
        effect = " This machine is on no other network." if is_alone else ""
        weight: Weight = "note" if not is_cut_off else "problem" if waits or not facts.nodes else "warning"
        yield Finding(
            weight, "interface-down", f"Interface {each.name}{where} is down: it {state}.{effect}", connecting(each)
        )


def _no_interface(facts: Facts) -> Iterator[Finding]:
    if facts.interfaces_problem:
        pattern = next((each for each in facts.machine.settings if each.name == "interfaces"), None)
        where = pattern.variable if pattern is not None and pattern.source == "environment" else "--interfaces"
        yield Finding(
            "problem",
            "interfaces-excluded",
            f"The interface pattern matches no usable interface: {facts.interfaces_problem}.",
            f"Change {where} so that it matches an interface that is up, or remove it to use all.",
        )
    elif is_on_no_network(facts) and not physical_and_down(facts):
        yield Finding(
            "warning" if facts.nodes else "problem",
            "only-loopback",
            "This machine is on no network: nothing but loopback is up.",
            "Plug in a cable or join a Wi-Fi. Nodes on this machine find each other without a network.",
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
            "Give the other machines IPv6 as well: a machine with IPv4 alone cannot be reached from here.",
        )


MACHINE_CHECKS: Final = (
    *(_clock, _folders, _permissions, _unknown_variables, _no_cluster, _interface_down, _no_interface, _only_ipv6),
)
