"""Hosts for checked runs: the network namespaces of `covey.testing.netns`, with IPv4 only. Needs Linux, root and `ip`.

To cut the direction from one host to another, its packets are sent to a link address that no interface has: they are
lost silently, as on a real network. Leaving the block removes all hosts; those of a killed process are removed by the
next one.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Final, Self

from covey.base.errors import ConfigError
from covey.testing.netns import Lan

if TYPE_CHECKING:
    from collections.abc import Iterable

PREFIX: Final = "covey-chaos"
UNUSED_LINK_ADDRESS: Final = "02:00:00:00:ff:ff"
NO_IPV6: Final = "for f in all default; do echo 1 > /proc/sys/net/ipv6/conf/$f/disable_ipv6; done"
MOST_HOSTS: Final = 16


def require_hosts() -> None:
    """Raise ConfigError, with the reason, if hosts cannot be made here."""
    if sys.platform != "linux":
        why = "only Linux has network namespaces"
    elif os.geteuid() != 0:
        why = "only root may make network namespaces"
    elif shutil.which("ip") is None:
        why = "there is no `ip` command (package iproute2)"
    else:
        return
    raise ConfigError(f"--hosts cannot be used here: {why}. Without it the run is on this machine alone")


class Hosts:
    """Hosts with IPv4 on one bridge. Use it in `with`."""

    def __init__(self, count: int) -> None:
        if not 2 <= count <= MOST_HOSTS:
            raise ConfigError(f"--hosts {count} must be from 2 to {MOST_HOSTS}")
        self._lan = Lan(count, prefix=PREFIX)
        self._cuts: dict[tuple[int, int], int] = {}
        """How often each direction is cut: faults may overlap."""

    def __enter__(self) -> Self:
        try:
            self._lan.__enter__()
        except (OSError, subprocess.SubprocessError) as error:
            raise ConfigError(f"--hosts cannot be used here: {error}") from error
        try:
            for host in self._lan.hosts:
                host.run(["sh", "-c", NO_IPV6])
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._lan.__exit__()

    def inside(self, index: int) -> list[str]:
        """Return the words that start a command on a host."""
        return ["ip", "netns", "exec", self._lan.hosts[index].namespace]

    def cut(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Lose all packets of these directions: from the first host of a pair to the second."""
        for pair in pairs:
            self._cuts[pair] = self._cuts.get(pair, 0) + 1
            self._set_link_address(pair, "replace", f"lladdr {UNUSED_LINK_ADDRESS} nud permanent")

    def heal(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Undo a cut of these directions."""
        for pair in pairs:
            self._cuts[pair] = self._cuts.get(pair, 1) - 1
            if self._cuts[pair] <= 0:
                with contextlib.suppress(subprocess.CalledProcessError):  # an interface that went down has forgotten it
                    self._set_link_address(pair, "del", "")

    def _set_link_address(self, pair: tuple[int, int], what: str, how: str) -> None:
        source, target = (self._lan.hosts[index] for index in pair)
        source.run(["ip", *f"neigh {what} {target.ip4} {how} dev eth0".split()])

    def unplug(self, index: int) -> None:
        """Take a host off the network."""
        self._lan.unplug(self._lan.hosts[index])

    def plug(self, index: int) -> None:
        self._lan.plug(self._lan.hosts[index])
