"""Hosts for checked runs, made of network namespaces on one bridge. Needs Linux, root and `ip`.

To cut the direction from one host to another, its packets are sent to a link address that no interface has: they are
lost silently, as on a real network. Leaving the block removes all hosts; those of a killed process are removed by the
next one.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Final, Self

from covey.base.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

PREFIX: Final = "covey-chaos"
NETWORK: Final = "10.214.0"
UNUSED_LINK_ADDRESS: Final = "02:00:00:00:ff:ff"
COMMAND_SECONDS: Final = 30.0
NAMESPACES: Final = "/run/netns"
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
        self.count = count
        self._names = [f"{PREFIX}-{os.getpid()}-{index}" for index in range(count)]
        self._bridge = f"{PREFIX}-{os.getpid()}-bridge"
        self._cuts: dict[tuple[int, int], int] = {}
        """How often each direction is cut: faults may overlap."""

    def __enter__(self) -> Self:
        _remove_leftovers()
        try:
            for name in (*self._names, self._bridge):
                _ip(f"netns add {name}")
                off = "for f in all default; do echo 1 > /proc/sys/net/ipv6/conf/$f/disable_ipv6; done"
                subprocess.run(["ip", "netns", "exec", name, "sh", "-c", off], check=False, timeout=COMMAND_SECONDS)
                _in(name, "link set lo up")
            _in(self._bridge, "link add br0 type bridge stp_state 0 forward_delay 0 mcast_snooping 0")
            _in(self._bridge, "link set br0 up")
            for index, name in enumerate(self._names):
                _in(self._bridge, f"link add port{index} type veth peer name eth0 netns {name}")
                _in(self._bridge, f"link set port{index} master br0 up")
                _in(name, "link set eth0 up")
                _in(name, f"address add {_address(index)}/24 dev eth0")
        except BaseException as error:
            self.__exit__()
            if isinstance(error, OSError):
                raise ConfigError(f"--hosts cannot be used here: {error}") from error
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in (*self._names, self._bridge):
            _remove(name)

    def inside(self, index: int) -> list[str]:
        """Return the words that start a command on a host."""
        return ["ip", "netns", "exec", self._names[index]]

    def cut(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Lose all packets of these directions: from the first host of a pair to the second."""
        for pair in pairs:
            self._cuts[pair] = self._cuts.get(pair, 0) + 1
            source, target = pair
            neighbour = f"{_address(target)} lladdr {UNUSED_LINK_ADDRESS}"
            _in(self._names[source], f"neigh replace {neighbour} nud permanent dev eth0")

    def heal(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Undo a cut of these directions."""
        for pair in pairs:
            self._cuts[pair] = self._cuts.get(pair, 1) - 1
            if self._cuts[pair] <= 0:
                source, target = pair
                with contextlib.suppress(OSError):  # an interface that went down has forgotten it
                    _in(self._names[source], f"neigh del {_address(target)} dev eth0")

    def unplug(self, index: int) -> None:
        """Take a host off the network."""
        _in(self._bridge, f"link set port{index} down")

    def plug(self, index: int) -> None:
        _in(self._bridge, f"link set port{index} up")


def _address(index: int) -> str:
    return f"{NETWORK}.{index + 1}"


def _remove_leftovers() -> None:
    """Remove the hosts of processes that were killed."""
    pattern = re.compile(rf"{PREFIX}-(\d+)-(\d+|bridge)")
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(NAMESPACES):
            if (match := pattern.fullmatch(name)) and not os.path.exists(f"/proc/{match[1]}"):
                _remove(name)


def _remove(name: str) -> None:
    """Kill what is left in a namespace, and delete it."""
    deadline = time.monotonic() + COMMAND_SECONDS
    with contextlib.suppress(OSError):
        while os.path.exists(f"{NAMESPACES}/{name}") and (pids := _ip(f"netns pids {name}").split()):
            if time.monotonic() > deadline:
                break
            for pid in map(int, pids):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        _ip(f"netns delete {name}")


def _in(namespace: str, words: str) -> str:
    return _ip(f"-n {namespace} {words}")


def _ip(words: str) -> str:
    done = subprocess.run(["ip", *words.split()], capture_output=True, text=True, timeout=COMMAND_SECONDS)
    if done.returncode:
        raise OSError(f"ip {words}: {(done.stderr or done.stdout).strip()}")
    return done.stdout
