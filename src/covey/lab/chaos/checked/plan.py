"""Plans the faults of a checked run, from its seed, before it begins. Pure.

A seed decides the plan, not which processes exist at the time of a fault. A fault therefore names its target as a
fraction of the processes.
"""

from __future__ import annotations

import random
import signal
from dataclasses import dataclass
from typing import Final

from covey.base.errors import ConfigError
from covey.lab.chaos.checked.orders import MOMENTS, Order

LOCAL: Final = {
    "kill": (4.0, "a process is killed"),
    "two": (2.0, "two processes are killed at once"),
    "most": (1.0, "all processes but one are killed at once"),
    "all": (0.5, "all processes are killed at once"),
    "stop": (3.0, "a process is stopped for longer than the others wait"),
    "pause": (2.0, "a process is stopped for a moment"),
    "leave": (1.0, "a process is asked to leave (SIGTERM)"),
    "cut": (2.0, "all connections of a process with the others break"),
    "keeper": (1.0, "`covey run` is stopped for a while"),
    "order": (8.0, "a process is killed or stopped at a chosen moment, such as the start of a restore"),
}
"""Each kind with its weight."""
HOSTS: Final = {
    **{kind: LOCAL[kind] for kind in ("kill", "two", "stop", "pause", "leave", "cut", "keeper", "order")},
    "host-kill": (2.0, "`covey run` of a host is killed, and started again"),
    "host-stop": (1.0, "all processes of a host are stopped for a while"),
    "unplug": (2.0, "a host is taken off the network"),
    "isolate": (3.0, "the packets between a host and all others are lost"),
    "split": (2.0, "the packets between two hosts and the others are lost"),
    "one-way": (3.0, "the packets from one host to another are lost, but not those in the other direction"),
    "isolate-kill": (1.5, "as isolate, and the processes there are killed meanwhile"),
    "split-kill": (1.5, "as split, and the processes of the two are killed meanwhile"),
}
FIRST_AT: Final = 1.0


@dataclass(frozen=True, slots=True)
class Trouble:
    """One fault."""

    at: float
    """Seconds after all processes were at work."""
    kind: str
    target: float
    """Which of the existing processes or hosts, as a fraction from 0 to 1."""
    how: float
    """How long, or which second host, as a fraction from 0 to 1."""
    order: Order | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """A whole run, as its seed draws it."""

    seed: int
    processes: tuple[int, ...]
    """The number of processes on each host; a single number means this machine."""
    lanes: str
    patience: float
    pause: float
    bulk: int
    large: float
    troubles: tuple[Trouble, ...]

    @property
    def is_one_host(self) -> bool:
        return len(self.processes) == 1

    @property
    def size(self) -> int:
        return sum(self.processes)


def draw(
    seed: int, *, processes: int | None, hosts: int | None, kinds: tuple[str, ...], every: float, count: int, lanes: str
) -> Scene:
    """Return the scene of a seed; the same for the same arguments."""
    chance = random.Random(f"covey chaos --check {seed}")
    known = LOCAL if hosts is None else HOSTS
    for kind in kinds:
        if kind not in known:
            where = "on one machine" if hosts is None else "across hosts"
            raise ConfigError(f"--faults knows no {kind!r} {where}; choose from {', '.join(known)}")
    if hosts is None:
        crowd: tuple[int, ...] = (processes or chance.choice([3, 4, 4, 5, 6]),)
    else:
        crowd = (processes,) * hosts if processes is not None else tuple(chance.choice([1, 1, 2]) for _ in range(hosts))
    chosen = kinds or tuple(known)
    weights = [known[kind][0] for kind in chosen]
    at, troubles = FIRST_AT, list[Trouble]()
    for _ in range(count):
        kind = chance.choices(chosen, weights)[0]
        order = _order(chance) if kind == "order" else None
        troubles.append(Trouble(round(at, 3), kind, chance.random(), chance.random(), order))
        at += every * chance.uniform(0.3, 1.7)
    return Scene(
        seed=seed,
        processes=crowd,
        lanes=lanes or (chance.choice(["", "", "shm", "unix", "tcp"]) if hosts is None else ""),
        patience=20.0 if hosts is None else chance.choice([6.0, 10.0, 30.0]),
        pause=chance.choice([0.004, 0.02, 0.04]),
        bulk=chance.choice([1000, 1000, 4 << 20]),
        large=chance.choice([0.0, 0.02, 0.08]),
        troubles=tuple(troubles),
    )


def _order(chance: random.Random) -> Order:
    moment = chance.choice(MOMENTS)
    target = chance.choice(["fresh", "old", "any", "first"]) if moment == "restore" else chance.choice(["any", "first"])
    longest = {"join": 1.5, "restore": 0.3, "change": 0.3, "large": 0.3}.get(moment, 0.05)
    delay = 0.0 if chance.random() < 0.2 else round(longest * chance.random() ** 2, 4)
    if chance.random() < 0.75:
        return Order(moment, "any" if moment == "join" else target, int(signal.SIGKILL), delay)
    return Order(moment, target, int(signal.SIGSTOP), delay, round(chance.uniform(0.2, 2.2), 3))
