"""Whether bytes over the links of this rank cost money: then nothing is sent only to measure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from covey.base.errors import ConfigError
from covey.net.discovery.interfaces import all_interfaces, parse_pattern

if TYPE_CHECKING:
    from covey.runtime.collectives.attempt import Attempt


def is_metered(attempt: Attempt) -> bool:
    """Tell whether a link of this rank with another machine goes over an interface that `metered` names."""
    try:
        pattern = parse_pattern(attempt.engine.config.metered)
    except ConfigError:  # nodes of a cluster have read it before; a rank of a launcher must not fail alone
        return True
    if not pattern.only:  # an empty setting names none
        return False
    roster = attempt.engine.roster
    links = [peer.link for rank in attempt.ranks if (peer := roster.peer(rank)) is not None]
    used = {link.local_ip for link in links if link is not None}
    return any(
        pattern.allows(interface.name, ip) for interface in all_interfaces() for ip in used & {*interface.addresses}
    )
