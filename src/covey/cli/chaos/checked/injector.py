"""Injects the faults of a plan into a checked run."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Final

from covey.cli.chaos.checked import orders
from covey.cli.chaos.cutting import cut

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeVar

    from covey.cli.chaos.checked.checked_run import CheckedRun
    from covey.cli.chaos.checked.plan import Trouble
    from covey.cli.chaos.checked.processes import Watched

    T = TypeVar("T")

HOLD_SECONDS: Final = 10.0
"""How long a fault waits until enough processes are at work; between generations none is."""
AGAIN_SECONDS: Final = 0.1
LONG_STOP: Final = (0.8, 3.3)
SHORT_STOP: Final = (0.05, 0.3)
"""Seconds, well below the time after which a process is excluded."""
CUT: Final = (2.0, 11.0)
KEEPER_STOP: Final = (0.3, 3.3)
HOST_STOP: Final = (1.0, 8.0)
HOST_AWAY: Final = (0.4, 3.4)
UNPLUGGED: Final = (0.5, 8.5)


class Injector:
    """Performs planned faults on the processes and hosts of a run."""

    def __init__(self, run: CheckedRun) -> None:
        self._run = run
        self._stopped: set[int] = set()
        """Processes that are stopped now."""
        self._numbers = 0
        self._actions: dict[str, Callable[[Trouble, list[Watched]], str]] = {
            "kill": lambda trouble, well: self._kill([_pick(well, trouble.target)]),
            "two": lambda trouble, well: self._kill(_some(well, trouble.target, 2)),
            "most": lambda trouble, well: self._kill(_some(well, trouble.target, len(well) - 1)),
            "all": lambda _trouble, _well: self._kill(self._run.processes.alive()),
            "stop": self._stop,
            "pause": self._pause,
            "leave": self._leave,
            "cut": self._cut,
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

    def do(self, trouble: Trouble, waited: float = 0.0) -> None:
        """Perform a fault, or try again later while too few processes are at work."""
        well = [each for each in self._run.processes.members() if each.pid not in self._stopped]
        if len(well) < _LEAST.get(trouble.kind, 2):
            if waited < HOLD_SECONDS:
                self._run.later(AGAIN_SECONDS, lambda: self.do(trouble, waited + AGAIN_SECONDS))
            else:
                self._run.log(f"no {trouble.kind}: too few processes are at work")
            return
        said = self._actions[trouble.kind](trouble, well)
        self._run.log(f"{trouble.kind}: {said}")

    # Processes

    def _kill(self, victims: Sequence[Watched]) -> str:
        for each in victims:
            each.signal(signal.SIGKILL)
        return f"killed {_names(victims)}"

    def _stop(self, trouble: Trouble, well: list[Watched]) -> str:
        return self._hold(_pick(well, trouble.target), _between(LONG_STOP, trouble.how), "stop")

    def _pause(self, trouble: Trouble, well: list[Watched]) -> str:
        # On a loaded machine a process may continue late, so that even this may exclude it.
        return self._hold(_pick(well, trouble.target), _between(SHORT_STOP, trouble.how), "stop")

    def _hold(self, victim: Watched, seconds: float, why: str) -> str:
        self._run.touched[victim.name].add(why)
        self._stopped.add(victim.pid)
        victim.signal(signal.SIGSTOP)

        def go_on() -> None:
            self._stopped.discard(victim.pid)
            victim.signal(signal.SIGCONT)

        self._run.later(seconds, go_on)
        return f"stopped {_names([victim])} for {seconds:.2f} s"

    def _leave(self, trouble: Trouble, well: list[Watched]) -> str:
        victim = _pick(well, trouble.target)
        self._run.touched[victim.name].add("leave")
        victim.signal(signal.SIGTERM)
        return f"asked {_names([victim])} to leave"

    def _cut(self, trouble: Trouble, well: list[Watched]) -> str:
        victim = _pick(well, trouble.target)
        count = 0
        for other in well:
            self._run.touched[other.name].add("cut")
            if other is not victim:
                count += cut(victim.pid, other.pid)
        return f"broke {count} connections of {_names([victim])}"

    def _stop_keeper(self, trouble: Trouble, _well: list[Watched]) -> str:
        host = self._host(trouble)
        keeper, seconds = self._run.keepers[host], _between(KEEPER_STOP, trouble.how)
        keeper.signal_leader(signal.SIGSTOP)
        self._run.later(seconds, lambda: keeper.signal_leader(signal.SIGCONT))
        return f"stopped `covey run` of host {host} for {seconds:.2f} s"

    def _give_order(self, trouble: Trouble, well: list[Watched]) -> str:
        order = trouble.order
        assert order is not None
        self._numbers += 1
        orders.give(self._run.folder, self._numbers, order)
        name = signal.Signals(order.signal).name
        said = f"{name} {order.delay:.3f} s after {order.target} process begins: {order.moment}"
        if order.moment in ("restore", "join", "change"):  # a process has to be restarted to cause these moments
            said += "; " + self._kill([_pick(well, trouble.how)])
        return said

    # Hosts

    def _host(self, trouble: Trouble) -> int:
        return int(trouble.target * len(self._run.keepers))

    def _kill_host(self, trouble: Trouble, _well: list[Watched]) -> str:
        host, seconds = self._host(trouble), _between(HOST_AWAY, trouble.how)
        keeper = self._run.keepers[host]
        keeper.signal_leader(signal.SIGKILL)

        def start_again() -> None:
            keeper.process.wait()
            if not self._run.is_finishing:
                self._run.start(host)

        self._run.later(seconds, start_again)
        return f"killed `covey run` of host {host}, which is started again after {seconds:.2f} s"

    def _stop_host(self, trouble: Trouble, _well: list[Watched]) -> str:
        host, seconds = self._host(trouble), _between(HOST_STOP, trouble.how)
        keeper = self._run.keepers[host]
        there = [each for each in self._run.processes.alive() if each.host == host]
        for each in there:
            self._run.touched[each.name].add("stop")
            each.signal(signal.SIGSTOP)
        keeper.signal_leader(signal.SIGSTOP)

        def go_on() -> None:
            for each in there:
                each.signal(signal.SIGCONT)
            keeper.signal_leader(signal.SIGCONT)

        self._run.later(seconds, go_on)
        return f"stopped all of host {host} for {seconds:.2f} s"

    def _unplug(self, trouble: Trouble, _well: list[Watched]) -> str:
        hosts, host, seconds = self._run.hosts, self._host(trouble), _between(UNPLUGGED, trouble.how)
        assert hosts is not None
        self._run.is_network_cut = True
        hosts.unplug(host)
        self._run.later(seconds, lambda: hosts.plug(host))
        return f"unplugged host {host} for {seconds:.2f} s"

    def _isolate(self, trouble: Trouble, _well: list[Watched]) -> str:
        return self._part({self._host(trouble)}, trouble)

    def _split(self, trouble: Trouble, _well: list[Watched]) -> str:
        host = self._host(trouble)
        return self._part({host, (host + 1) % len(self._run.keepers)}, trouble)

    def _part(self, side: set[int], trouble: Trouble) -> str:
        count = len(self._run.keepers)
        pairs = [(one, other) for one in range(count) for other in range(count) if (one in side) != (other in side)]
        said = self._lose(pairs, _between(CUT, trouble.how))
        if trouble.kind.endswith("-kill"):  # processes restarted there must not form a run of their own
            victims = [each for each in self._run.processes.members() if each.host in side]
            self._run.later(0.5 + 2 * trouble.how, lambda: self._run.log(self._kill(victims)))
        return said

    def _one_way(self, trouble: Trouble, _well: list[Watched]) -> str:
        count, one = len(self._run.keepers), self._host(trouble)
        other = (one + 1 + int(trouble.how * (count - 1))) % count
        pairs = [(one, other)] if trouble.how < 0.5 else [(one, each) for each in range(count) if each != one]
        return self._lose(pairs, _between(CUT, trouble.how))

    def _lose(self, pairs: list[tuple[int, int]], seconds: float) -> str:
        hosts = self._run.hosts
        assert hosts is not None
        self._run.is_network_cut = True
        hosts.cut(pairs)

        def heal() -> None:
            hosts.heal(pairs)
            self._run.log(f"healed {pairs}")

        self._run.later(seconds, heal)
        return f"packets are lost between hosts {pairs} for {seconds:.2f} s"


_LEAST: Final = {"two": 3, "most": 3, "leave": 3, "all": 1, "keeper": 1, "host-kill": 1, "host-stop": 1}
"""How many processes must be at work for a fault, if that is not 2."""


def _between(span: tuple[float, float], fraction: float) -> float:
    return round(span[0] + fraction * (span[1] - span[0]), 3)


def _pick(some: Sequence[T], fraction: float) -> T:
    return some[int(fraction * len(some))]


def _some(all_of_them: Sequence[T], fraction: float, count: int) -> list[T]:
    first = int(fraction * len(all_of_them))
    return [all_of_them[(first + number) % len(all_of_them)] for number in range(count)]


def _names(some: Sequence[Watched]) -> str:
    return ", ".join(f"{each.name} (rank {each.rank})" for each in some) or "no process"
