"""Checked runs on several hosts: network namespaces as hosts, and the faults that concern more than single processes.

The hosts are those of `covey.testing.netns`, with IPv4 only, and need Linux, root and `ip`. `HostInjector` breaks
keepers, hosts and networks, and gives orders to processes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Final, Protocol, Self

from covey.base.errors import ConfigError
from covey.lab.chaos import orders
from covey.lab.chaos.faults import pick
from covey.lab.chaos.injector import Breakable, Injector, titles
from covey.testing.netns import Lan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from covey.lab.chaos.faults import PlannedFault
    from covey.lab.chaos.injector import Action, Victim
    from covey.runtime.processes import Child

HOSTS_PREFIX: Final = "covey-chaos"
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
        self._lan = Lan(count, prefix=HOSTS_PREFIX)
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


class HostedJob(Breakable, Protocol):
    """A job that `covey run` started on every host."""

    folder: str
    hosts: Hosts | None
    """None on one machine."""
    keepers: dict[int, Child]
    """Host → its `covey run`."""

    def on_host(self, host: int) -> Sequence[Victim]:
        """Return the live processes of a host."""

    def start(self, host: int) -> None:
        """Start the keeper of a host again, unless the run is about to end."""


class HostInjector(Injector):
    """Also breaks keepers, hosts, and the network between hosts."""

    def __init__(
        self, job: HostedJob, faults: Sequence[PlannedFault], say: Callable[[str], None], *, min_alive: int = 0
    ) -> None:
        super().__init__(job, faults, say, min_alive=min_alive)
        self.is_network_cut = False
        """Whether packets were ever lost between hosts."""
        self._hosted = job

    def actions(self) -> dict[str, Action]:
        return super().actions() | {
            "keeper": self._stop_keeper,
            "order": self._give_order,
            "host-kill": self._kill_host,
            "host-stop": self._stop_host,
            "unplug": self._unplug,
            "isolate": self._isolate,
            "split": self._split,
            "one-way": self._one_way,
            "isolate-kill": self._isolate,
            "split-kill": self._split,
        }

    def _give_order(self, fault: PlannedFault, members: list[Victim]) -> str:
        order = fault.order
        assert order is not None
        orders.give(self._hosted.folder, fault.number, order)
        name = signal.Signals(order.signal).name
        said = f"{name} {order.delay:.3f} s after {order.target} process begins: {order.moment}"
        if order.moment in ("restore", "join", "change"):  # a process has to be restarted to cause these moments
            said += "; " + self.kill(fault, pick(members, fault.target))
        return said

    # Keepers and hosts

    def _host(self, fault: PlannedFault) -> int:
        return int(fault.target * len(self._hosted.keepers))

    def _stop_keeper(self, fault: PlannedFault, _members: list[Victim]) -> str:
        host = self._host(fault)
        keeper = self._hosted.keepers[host]
        keeper.signal_leader(signal.SIGSTOP)
        self.later(fault.seconds, lambda: keeper.signal_leader(signal.SIGCONT))
        return f"stopped `covey run` of host {host} for {fault.seconds:.2f} s"

    def _kill_host(self, fault: PlannedFault, _members: list[Victim]) -> str:
        host = self._host(fault)
        keeper = self._hosted.keepers[host]
        keeper.signal_leader(signal.SIGKILL)

        def start_again() -> None:
            keeper.process.wait()
            self._hosted.start(host)

        self.later(fault.seconds, start_again)
        return f"killed `covey run` of host {host}, which is started again after {fault.seconds:.2f} s"

    def _stop_host(self, fault: PlannedFault, _members: list[Victim]) -> str:
        host = self._host(fault)
        keeper, there = self._hosted.keepers[host], self._hosted.on_host(host)
        for each in there:
            self._hosted.on_fault(fault, each)
            each.signal(signal.SIGSTOP)
        keeper.signal_leader(signal.SIGSTOP)

        def release() -> None:
            for each in there:
                each.signal(signal.SIGCONT)
            keeper.signal_leader(signal.SIGCONT)

        self.later(fault.seconds, release)
        return f"stopped host {host} ({titles(there)}) for {fault.seconds:.2f} s"

    # The network

    def _network(self) -> Hosts:
        assert self._hosted.hosts is not None, "faults of the network are planned for hosts only"
        self.is_network_cut = True
        return self._hosted.hosts

    def _unplug(self, fault: PlannedFault, _members: list[Victim]) -> str:
        hosts, host = self._network(), self._host(fault)
        hosts.unplug(host)
        self.later(fault.seconds, lambda: hosts.plug(host))
        return f"unplugged host {host} for {fault.seconds:.2f} s"

    def _isolate(self, fault: PlannedFault, _members: list[Victim]) -> str:
        return self._part({self._host(fault)}, fault)

    def _split(self, fault: PlannedFault, _members: list[Victim]) -> str:
        host = self._host(fault)
        return self._part({host, (host + 1) % len(self._hosted.keepers)}, fault)

    def _part(self, side: set[int], fault: PlannedFault) -> str:
        count = len(self._hosted.keepers)
        pairs = [(one, other) for one in range(count) for other in range(count) if (one in side) != (other in side)]
        said = self._lose(pairs, fault.seconds)
        if fault.kind.endswith("-kill"):  # processes restarted there must not form a run of their own
            victims = [each for host in side for each in self._hosted.on_host(host)]
            self.later(0.5 + 2 * fault.how, lambda: self.say(self.kill(fault, victims)))
        return said

    def _one_way(self, fault: PlannedFault, _members: list[Victim]) -> str:
        count, one = len(self._hosted.keepers), self._host(fault)
        other = (one + 1 + int(fault.how * (count - 1))) % count
        pairs = [(one, other)] if fault.how < 0.5 else [(one, each) for each in range(count) if each != one]
        return self._lose(pairs, fault.seconds)

    def _lose(self, pairs: list[tuple[int, int]], seconds: float) -> str:
        hosts = self._network()
        hosts.cut(pairs)

        def heal() -> None:
            hosts.heal(pairs)
            self.say(f"healed {pairs}")

        self.later(seconds, heal)
        return f"packets are lost between hosts {pairs} for {seconds:.2f} s"
