"""Which rank this process is, from the arguments `rank=`, `size=`, `address=` and `peers=` of `covey.join`."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

from covey.base.config import parse_seed
from covey.base.errors import ConfigError
from covey.net.discovery.host_rendezvous import rendezvous_folder
from covey.runtime.environment import LaunchedRank, is_loopback

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from covey.base.config import Seed

PLACING_NAMES = ("rank", "address", "peers")
"""The arguments that place a process; `size` goes with them."""
_CLUSTER_ARGUMENTS = ("run", "min_size", "max_size", "tie_breaker", "new")


def find_placed_rank(asked: Mapping[str, Any]) -> LaunchedRank | None:
    """Return the rank that arguments of `join` describe; None if they describe none.

    Raises:
        ConfigError: they contradict themselves, or say too little.
    """
    given = {name: value for name, value in asked.items() if value is not None}
    if not given.keys() & {*PLACING_NAMES}:
        return None
    if wrong := given.keys() & {*_CLUSTER_ARGUMENTS}:
        raise ConfigError(
            f"{min(wrong)}= is for runs of a cluster, whose nodes agree on their ranks; leave it out, or leave out "
            f"{min(given.keys() & {*PLACING_NAMES})}="
        )
    if "peers" in given:
        if "address" in given:
            raise ConfigError("peers= says where every rank listens, address= where rank 0 does; give one of them")
        return _among_peers(given["peers"], given.get("rank"), given.get("size"))
    if missing := {"rank", "size", "address"} - given.keys():
        raise ConfigError(
            f"{min(missing)}= is missing: rank=, size= and address= (where rank 0 listens, host:port) belong together"
        )
    rank, size = _whole("rank", given["rank"]), _whole("size", given["size"])
    address = _parse("address", given["address"])
    return _placed(f"address-{address.host}-{address.port}", rank, size, address, ())


def _among_peers(listed: Sequence[str], rank: Any, size: Any) -> LaunchedRank:
    if isinstance(listed, str):
        raise ConfigError("peers= is a list of addresses: peers=['10.0.0.1:29400', '10.0.0.2:29400']")
    peers = tuple(_parse("peers", each) for each in listed)
    if not peers or len(set(peers)) < len(peers):
        raise ConfigError("peers= needs the address of every rank, host:port, each once")
    if size is not None and _whole("size", size) != len(peers):
        raise ConfigError(f"size={size} and the {len(peers)} addresses of peers= contradict each other")
    own = _own_position(peers) if rank is None else _whole("rank", rank)
    return _placed(f"peers-{peers[0].host}-{peers[0].port}", own, len(peers), peers[0], peers)


def _own_position(peers: Sequence[Seed]) -> int:
    """Return the position of the only address that belongs to this machine."""
    own = [position for position, peer in enumerate(peers) if _is_of_this_machine(peer.host)]
    if len(own) != 1:
        found = "none of them is" if not own else f"{len(own)} of them are"
        raise ConfigError(f"peers= has {len(peers)} addresses, and {found} of this machine; give rank=, too")
    return own[0]


def _is_of_this_machine(host: str) -> bool:
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)
    except OSError:  # a name that only other machines know
        return False
    for family, kind, _, _, address in found:
        with socket.socket(family, kind) as probe:
            try:
                probe.bind(address)
            except OSError:
                continue
            return True
    return False


def _placed(name: str, rank: int, size: int, first: Seed, peers: tuple[Seed, ...]) -> LaunchedRank:
    if all(is_loopback(peer.host) for peer in (first, *peers)):
        folder = str(rendezvous_folder(name)) if size > 1 else ""
        return LaunchedRank(rank=rank, size=size, local_rank=rank, local_size=size, folder=folder, name=name)
    listens_at = tuple((peer.host, peer.port) for peer in peers or (first,))
    return LaunchedRank(rank=rank, size=size, local_rank=None, listens_at=listens_at, name=name)


def _parse(what: str, text: Any) -> Seed:
    forms = f"{what}: {text!r} is not an address; write host:port or [IPv6]:port, like 192.168.1.5:29400"
    if not isinstance(text, str) or not text.rpartition(":")[2].isdigit() or (text.count(":") > 1 and "]" not in text):
        raise ConfigError(forms)
    try:
        return parse_seed(text)
    except ConfigError:
        raise ConfigError(forms) from None


def _whole(what: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < (what == "size"):
        raise ConfigError(f"{what}={value!r} must be a whole number from {int(what == 'size')} up")
    return value
