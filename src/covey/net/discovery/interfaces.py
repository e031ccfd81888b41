"""The network interfaces of this host: which to use, which addresses to advertise, and which of others to dial.

Nothing here uses DNS or the host's name: addresses are those of the interfaces, also in join codes.
"""

from __future__ import annotations

import dataclasses
import fcntl
import fnmatch
import ipaddress
import re
import socket
import struct
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import ifaddr

from covey.base.config import ports_from
from covey.base.errors import ConfigError, ConnectError
from covey.net.host.descriptors import explain
from covey.wire.messages import Address
from covey.wire.secret import MAX_SEEDS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

Ip: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
IpInterface: TypeAlias = ipaddress.IPv4Interface | ipaddress.IPv6Interface
IpNetwork: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network
Kind: TypeAlias = Literal["wired", "wireless", "virtual", "loopback", "unknown"]
SocketAddress: TypeAlias = tuple[str, int] | tuple[str, int, int, int]

MOST_ADVERTISED: Final = 16
MOST_DIALLED: Final = 64
RECENT_INTERFACES_SECONDS: Final = 0.5
"""How old the answer of `recent_interfaces` may be: asking the system takes milliseconds, and dials are frequent."""

_PREFERENCE: Final = ("wired", "unknown", "wireless", "virtual", "loopback")
_BRIDGES: Final = ("docker*", "br-*", "virbr*", "podman*", "cni*", "lxcbr*", "lxdbr*", "vmnet*", "vboxnet*")
"""Networks between this host and its containers or guests: other hosts use the same addresses for theirs."""
_VIRTUAL: Final = (
    *_BRIDGES,
    *("veth*", "tun*", "tap*", "wg*", "utun*", "awdl*", "llw*", "tailscale*", "zt*", "flannel*", "cali*", "vnet*"),
)
_MACOS: Final = sys.platform == "darwin"
_GET_FLAGS, _GET_MTU = (0xC0206911, 0xC0206933) if _MACOS else (0x8913, 0x8921)  # SIOCGIFFLAGS, SIOCGIFMTU
_GET_INDEX: Final = 0x8933  # SIOCGIFINDEX, which macOS has not
_IFF_UP, _IFF_LOOPBACK, _IFF_RUNNING = 0x1, 0x8, 0x40
_IFF_MULTICAST: Final = 0x8000 if _MACOS else 0x1000
_NOT_OURS_YET: Final = 0x48  # IFA_F_TENTATIVE or IFA_F_DADFAILED: nothing can be bound to such an address
_TERM: Final = re.compile(r"[A-Za-z0-9._@*?\[\]-]+")
_LOOKS_NUMERIC: Final = re.compile(r"[0-9.]+|.*[/:].*")


@dataclasses.dataclass(frozen=True)
class Interface:
    """A network interface with its addresses."""

    name: str
    index: int
    addresses: tuple[str, ...]
    """Numeric, IPv6 without scope."""
    networks: tuple[IpInterface, ...]
    """The same addresses, each with its network."""
    is_loopback: bool
    is_up: bool
    """Whether it is switched on and connected."""
    kind: Kind
    mtu: int
    multicast: bool
    is_on: bool = True
    """Whether it is switched on, connected or not."""


@dataclasses.dataclass(frozen=True)
class Pattern:
    """Which interfaces and addresses to use: `eth*,!docker*,10.0.0.0/8`."""

    text: str
    only: tuple[str | IpNetwork, ...]
    """What to use; if empty, everything."""
    never: tuple[str | IpNetwork, ...]

    def allows(self, name: str, ip: str) -> bool:
        """Tell whether address `ip` of interface `name` may be used."""
        address = ipaddress.ip_address(ip)
        if any(_matches(term, name, address) for term in self.never):
            return False
        return not self.only or any(_matches(term, name, address) for term in self.only)


def parse_pattern(text: str) -> Pattern:
    """Read a pattern: names with `*` and `?`, or networks, separated by commas; `!` in front excludes.

    Raises:
        ConfigError: a part of it is empty, or neither a name nor a network.
    """
    only: list[str | IpNetwork] = []
    never: list[str | IpNetwork] = []
    for part in text.split(",") if text.strip() else ():
        term = part.strip()
        excludes = term.startswith("!")
        (never if excludes else only).append(_parse_term(term.removeprefix("!").strip(), text))
    return Pattern(text, tuple(only), tuple(never))


def all_interfaces() -> list[Interface]:
    """Return every interface of this host that has an address, in the order of the system."""
    found: dict[str, list[ifaddr.IP]] = {}
    for adapter in ifaddr.get_adapters():
        found.setdefault(adapter.name.partition(":")[0], []).extend(adapter.ips)  # eth0:1 is an alias of eth0
    not_ready = _addresses_not_ready()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        listed = [_interface(probe, name, ips, not_ready) for name, ips in found.items()]
    return [interface for interface in listed if interface.index]  # without an index, it has gone since it was listed


def bare_interfaces() -> list[Interface]:
    """Return the network cards of this host that have no address: switched off, not plugged in, or not set up."""
    known = {interface.name for interface in all_interfaces()}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        found = [_interface(probe, name, [], set()) for _, name in socket.if_nameindex() if name not in known]
    return [interface for interface in found if interface.index and interface.kind in ("wired", "wireless")]


def usable_interfaces(pattern: str = "") -> list[Interface]:
    """Return the interfaces that reach other hosts, with the addresses that `pattern` allows, best first.

    The loopback interface reaches no other host: it is returned only if a pattern matches it and nothing else.

    Raises:
        ConfigError: `pattern` is malformed, or matches nothing; lists the interfaces.
    """
    return _usable(parse_pattern(pattern), _listed())


def recent_interfaces(pattern: str = "") -> list[Interface]:
    """Return what `usable_interfaces` returned at most RECENT_INTERFACES_SECONDS ago; cheap enough for every dial.

    Raises:
        ConfigError: as `usable_interfaces`.
        ConnectError: the interfaces cannot be listed, and never were before.
    """
    return _usable(parse_pattern(pattern), _recently())


def is_loopback(name: str) -> bool:
    """Tell whether an interface of that name is there, and reaches only processes of this host."""
    return any(interface.name == name and interface.is_loopback for interface in _recently())


def _recently() -> list[Interface]:
    """Return the interfaces, listed at most RECENT_INTERFACES_SECONDS ago unless the system fails to list them now."""
    global _known
    seen_at, there = _known
    if time.monotonic() <= seen_at + RECENT_INTERFACES_SECONDS:
        return there
    try:
        return _listed()
    except OSError as error:  # most likely no free descriptor
        if not there:
            raise ConnectError(f"the interfaces of this machine cannot be listed: {explain(error)}") from error
    _known = time.monotonic(), there
    return there


def _listed() -> list[Interface]:
    """List the interfaces now, and keep the list for `_recently`."""
    global _known
    there = all_interfaces()
    _known = time.monotonic(), there
    return there


_known: tuple[float, list[Interface]] = -RECENT_INTERFACES_SECONDS, []
"""When the interfaces were last listed, and the list."""


def _usable(chosen: Pattern, there: list[Interface]) -> list[Interface]:
    allowed = [_restricted(interface, chosen) for interface in there if interface.is_up]
    allowed = sorted((interface for interface in allowed if interface.addresses), key=_preference)
    usable = [interface for interface in allowed if not interface.is_loopback]
    if not usable and chosen.only:
        usable = allowed
    has_others = any(interface.is_up and not interface.is_loopback for interface in there)
    if not usable and (chosen.only or (chosen.never and has_others)):
        inventory = "; ".join(_in_words(interface) for interface in there) or "no interface with an address"
        raise ConfigError(f'interfaces="{chosen.text}" matches nothing that is up on this host. It has: {inventory}')
    return usable


def loopback_interfaces() -> list[Interface]:
    """Return the interfaces that only processes of this host can use."""
    return [interface for interface in all_interfaces() if interface.is_loopback and interface.is_up]


def advertised(interfaces: Iterable[Interface], port: int) -> tuple[Address, ...]:
    """Return the addresses at which other hosts can reach `port` on this host, best first."""
    found = [
        (Address(ip, port, interface.name), ipaddress.ip_address(ip))
        for interface in interfaces
        for ip in sorted(interface.addresses, key=_family_first)
        if _can_be_remote(ipaddress.ip_address(ip))
    ]
    routed = [address for address, ip in found if not ip.is_link_local]
    local6 = [address for address, ip in found if ip.is_link_local and ip.version == 6]
    local4 = [address for address, ip in found if ip.is_link_local and ip.version == 4]
    return tuple([*(routed or local4), *local6][:MOST_ADVERTISED])


def on_link(interface: Interface, ip: str, index: int) -> bool:
    """Tell whether an address is on the network of `interface`; for loopback, whether it is a loopback address.

    `index` is that of the interface to which an IPv6 link-local address refers. An address that is not one machine's,
    such as multicast, is on no network.
    """
    try:
        address: Ip = ipaddress.ip_address(ip)
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address):
        if address.is_link_local:
            has_some = any(net.version == 6 for net in interface.networks) and not interface.is_loopback
            return has_some and index == interface.index
        address = address.ipv4_mapped or address
    if address.is_loopback != interface.is_loopback or not (address.is_loopback or _can_be_remote(address)):
        return False
    return any(address.version == net.version and address in net.network for net in interface.networks)


def to_dial(own: Sequence[Interface], theirs: Sequence[Address], same_host: bool) -> list[SocketAddress]:
    """Return the socket addresses to try, in this order, to reach the node that advertises `theirs`.

    On the same host, loopback comes first. Then: addresses in a network of this host (best interface first), other
    addresses that may be routed, addresses that this host has itself (a bridge with the same address on every host, or
    another user's node here), and IPv6 link-local addresses by each interface that could reach them. Addresses that
    cannot work are left out: of families that this host lacks, loopback of another host, malformed ones.
    """
    reachable = [(ip, address.port) for address in theirs if (ip := _dialable(address)) is not None]
    ports = dict.fromkeys(address.port for address in theirs if 0 < address.port < 1 << 16)
    order: list[SocketAddress] = []
    if same_host:
        order += [(loopback, port) for port in ports for loopback in ("127.0.0.1", "::1")]
    networks = [network for interface in own if not interface.is_loopback for network in interface.networks]
    our_addresses = {network.ip for network in networks}
    families = {network.version for network in networks if not network.is_link_local}
    routed = [(ip, port) for ip, port in reachable if not ip.is_link_local and ip.version in families]
    remote = [(ip, port) for ip, port in routed if ip not in our_addresses]
    for network in networks:
        if not network.is_link_local:
            order += [(str(ip), port) for ip, port in remote if ip in network.network]
    order += [(str(ip), port) for ip, port in remote]
    order += [(str(ip), port) for ip, port in routed if ip in our_addresses]
    for interface in own:
        for network in interface.networks:
            if network.is_link_local and not interface.is_loopback:
                scope = (0, interface.index) if network.version == 6 else ()
                order += [
                    (str(ip), port, *scope)
                    for ip, port in reachable
                    if ip.is_link_local and ip.version == network.version
                ]
    return list(dict.fromkeys(order))[:MOST_DIALLED]


def describe(ip: str) -> str:
    """Return the name of this host's interface that has the address `ip`, or ""."""
    wanted = ip.partition("%")[0]
    return next((interface.name for interface in _recently() if wanted in interface.addresses), "")


def is_own_address(ip: str) -> bool:
    """Tell whether an address belongs to this host."""
    return ip.startswith("127.") or ip == "::1" or bool(describe(ip))


def _parse_term(term: str, text: str) -> str | IpNetwork:
    if not term:
        raise ConfigError(f'interfaces="{text}" has an empty part; write it like "eth*,!docker*,10.0.0.0/8"')
    if _LOOKS_NUMERIC.fullmatch(term):
        try:
            return ipaddress.ip_network(term, strict=False)
        except ValueError:
            raise ConfigError(
                f'"{term}" in interfaces="{text}" is not a network; write 10.0.0.0/8 or fd00::/8'
            ) from None
    if not _TERM.fullmatch(term):
        raise ConfigError(f'"{term}" in interfaces="{text}" is neither the name of an interface nor a network')
    return term


def _matches(term: str | IpNetwork, name: str, ip: Ip) -> bool:
    return fnmatch.fnmatchcase(name, term) if isinstance(term, str) else ip in term


def _restricted(interface: Interface, pattern: Pattern) -> Interface:
    networks = tuple(network for network in interface.networks if pattern.allows(interface.name, str(network.ip)))
    return dataclasses.replace(interface, networks=networks, addresses=tuple(str(network.ip) for network in networks))


def preference_of(interface: Interface | None) -> int:
    """Return the place of an interface's kind in the order of preference, 0 for the best; None is an unknown one."""
    return _PREFERENCE.index("unknown" if interface is None else interface.kind)


def _preference(interface: Interface) -> tuple[int, bool]:
    is_bridge = interface.kind == "virtual" and any(fnmatch.fnmatchcase(interface.name, name) for name in _BRIDGES)
    return _PREFERENCE.index(interface.kind), is_bridge


def _family_first(ip: str) -> int:
    return ipaddress.ip_address(ip).version


def _can_be_remote(ip: Ip) -> bool:
    return not (ip.is_loopback or ip.is_unspecified or ip.is_multicast)


def _dialable(address: Address) -> Ip | None:
    """Return the address to dial, or None if it cannot be one of another node: it may be forged."""
    try:
        ip: Ip = ipaddress.ip_address(address.ip.partition("%")[0])
    except ValueError:
        return None
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped  # ::ffff:127.0.0.1 is loopback, too
    return ip if 0 < address.port < 1 << 16 and _can_be_remote(ip) else None


def _interface(probe: socket.socket, name: str, ips: list[ifaddr.IP], not_ready: set[tuple[str, str]]) -> Interface:
    texts = [(ip.ip if isinstance(ip.ip, str) else ip.ip[0].partition("%")[0], ip.network_prefix) for ip in ips]
    parsed = [ipaddress.ip_interface(f"{text}/{prefix}") for text, prefix in texts]
    networks = tuple(dict.fromkeys(network for network in parsed if (name, str(network.ip)) not in not_ready))
    flags = _ask(probe, _GET_FLAGS, name, "H")
    is_loopback = bool(flags & _IFF_LOOPBACK)
    return Interface(
        name=name,
        index=_index(probe, name),
        addresses=tuple(str(network.ip) for network in networks),
        networks=networks,
        is_loopback=is_loopback,
        is_up=flags & (_IFF_UP | _IFF_RUNNING) == _IFF_UP | _IFF_RUNNING,
        kind="loopback" if is_loopback else _kind(name),
        mtu=_ask(probe, _GET_MTU, name, "i"),
        multicast=bool(flags & _IFF_MULTICAST),
        is_on=bool(flags & _IFF_UP),
    )


def _index(probe: socket.socket, name: str) -> int:
    """Return the number of an interface, or 0 if the interface has just gone."""
    if not _MACOS:  # here if_nametoindex opens a socket, and denies that there is such an interface if it cannot
        return _ask(probe, _GET_INDEX, name, "i")
    try:
        return socket.if_nametoindex(name)
    except OSError:
        return 0


def _ask(probe: socket.socket, question: int, name: str, answer: str) -> int:
    """Return a number that the kernel has for an interface, or 0 if the interface has just gone."""
    try:
        reply = fcntl.ioctl(probe, question, struct.pack("16s240x", name.encode()[:15]))
    except OSError:
        return 0
    return int(struct.unpack_from(answer, reply, 16)[0])


def _kind(name: str) -> Kind:
    folder = Path("/sys/class/net", name)
    if (folder / "wireless").exists() or (folder / "phy80211").exists():
        return "wireless"
    if (folder / "device").exists():
        return "wired"
    return "virtual" if any(fnmatch.fnmatchcase(name, pattern) for pattern in _VIRTUAL) else "unknown"


def _addresses_not_ready() -> set[tuple[str, str]]:
    """Return each (interface, IPv6 address) that the kernel still checks for duplicates, or found to be one."""
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return set()
    rows = [line.split() for line in lines]
    return {
        (row[5], str(ipaddress.IPv6Address(bytes.fromhex(row[0])))) for row in rows if int(row[4], 16) & _NOT_OURS_YET
    }


def _in_words(interface: Interface) -> str:
    return f"{interface.name} ({', '.join(interface.addresses)}{'' if interface.is_up else ', down'})"


def current_seeds(env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the addresses for a join code: where nodes of this machine listen, one address family per interface."""
    seeds: list[str] = []
    port = ports_from(env.get("COVEY_PORT", ""))[0]
    for interface in usable_interfaces(env.get("COVEY_INTERFACES", "")):
        ips = [ipaddress.ip_address(text) for text in interface.addresses]
        ips = [ip for ip in ips if not (ip.is_loopback or ip.is_link_local or ip.is_unspecified)]
        family = min((ip.version for ip in ips), default=4)
        seeds += [f"[{ip}]:{port}" if family == 6 else f"{ip}:{port}" for ip in ips if ip.version == family]
    return tuple(seeds[:MAX_SEEDS])
