"""`covey bench train`: how much faster machines train together than one alone, over lines of several speeds.

The machines are network namespaces of this one, a core each; `tc tbf` shapes their lines. The bound is exact training
over a line that nothing shapes, which also has the loss of one machine with the whole batch.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final

from covey.base.errors import ConfigError
from covey.lab.bench.train_courses import UNSHAPED, WAYS, TrainCase, TrainCourse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from covey.testing.netns import Host, Lan

TRAINED_MODELS: Final = ("mlp", "attention", "lora")
BATCH_OF_EACH: Final = {"mlp": 128, "attention": 16, "lora": 128}
OTHER_PACKAGES: Final = ("torchft", "hivemind")
"""Ways of packages that covey does not need; they are measured where these are installed."""
UNEVEN_SPEEDS: Final = (0.6, 0.6, 0.3)
"""The parts of a core that three machines compute with, so that two cores are enough for all and what they send."""
LOSS_AFTER: Final = 0.4
"""The part of a run after which a machine is lost; it is started again at once."""
TRIAL_START_SECONDS: Final = 120.0
"""For interpreters to start, ranks to join, and the copies to be judged."""
LIKELY_START_SECONDS: Final = 15.0
"""What that takes on a quiet machine: for the time that is left, before a run has shown it."""
PROOF_LINES: Final = (10, 100, 1000)


@dataclass(frozen=True, kw_only=True)
class TrainTrial:
    """What is measured; checked when built."""

    models: tuple[str, ...] = ("mlp",)
    lines: tuple[int, ...] = (100,)
    """Mbit/s."""
    seeds: tuple[int, ...] = (0,)
    ways: tuple[str, ...] = ()
    """All that are installed, if none is given."""
    seconds: float = 60.0
    size: int = 2

    def __post_init__(self) -> None:
        for what, given, known in (("model", self.models, TRAINED_MODELS), ("way", self.ways, WAYS)):
            if unknown := [name for name in given if name not in known]:
                raise ConfigError(f"unknown {what} {', '.join(unknown)}; choose from {', '.join(known)}")
        if lacking := [way for way in self.ways if way not in installed()]:
            raise ConfigError(f"{', '.join(lacking)} is not installed here; install it beside covey, or leave it out")
        if self.seconds <= 0 or not 2 <= self.size <= 16 or any(line <= 0 for line in self.lines):
            raise ConfigError("seconds and lines must be above 0, and -n from 2 to 16")

    def cases(self) -> list[TrainCase]:
        """Return the runs, in their order."""
        ways = self.ways or installed()
        found = []
        for model in self.models:
            for seed in self.seeds:
                kinds = [(way, 0) for way in ways if way in UNSHAPED]
                kinds += [(way, line) for line in self.lines for way in ways if way not in UNSHAPED]
                found += [TrainCase(model, "equal", way, line, seed, self.size, self.seconds) for way, line in kinds]
        return found


@dataclass(frozen=True, kw_only=True)
class TrainOrder:
    """What one rank does."""

    way: str
    model: str
    seed: int
    seconds: float
    """Seconds of training, without the start; the lowest rank ends the run."""
    rank: int
    size: int
    least: int
    """Ranks without which the run does not begin, or waits."""
    batch: int
    """Batch of each rank; for `together`, a part of it of the loader's batch."""
    speed: float = 1.0
    """The part of a core that this rank computes with."""
    exact: bool = False
    """For `together`: the numbers of one machine with the whole batch."""
    lost_after: float = 0.0
    """Seconds of training after which this process ends itself without a word; 0 for never."""

    def as_json(self) -> str:
        return json.dumps(asdict(self))


def installed() -> tuple[str, ...]:
    """Return the ways that can be measured here."""
    return tuple(way for way in WAYS if way not in OTHER_PACKAGES or importlib.util.find_spec(way) is not None)


def proof(seconds: float = 60.0) -> list[TrainCase]:
    """Return all runs of the proof: what every claim about training together needs, one seed after the other.

    Ways that are only compared with have one seed: they differ by more than seeds do.
    """
    others = [way for way in OTHER_PACKAGES if way in installed()]
    found: list[TrainCase] = []

    def add(model: str, machines: str, seed: int, *kinds: tuple[str, int]) -> None:
        size = 2 if machines == "equal" else len(UNEVEN_SPEEDS)
        found.extend(TrainCase(model, machines, way, line, seed, size, seconds) for way, line in kinds)

    for seed in range(3):
        for model in ("mlp", "attention"):
            together = [("together", line) for line in PROOF_LINES]
            add(model, "equal", seed, ("alone", 0), ("bound", 0), *together)
        add("lora", "equal", seed, ("alone", 0), ("bound", 0), ("together", 10))
        add("mlp", "uneven", seed, ("alone", 0), ("bound", 0), ("together", 100))
        add("mlp", "loss", seed, ("together", 100))
        if seed == 0:
            for model in ("mlp", "attention"):
                add(model, "equal", seed, *((way, line) for line in PROOF_LINES for way in ("diloco", *others)))
                add(model, "equal", seed, *((way, line) for line in PROOF_LINES[1:] for way in ("gloo", "ddp int8")))
    return found


def measure(
    cases: Sequence[TrainCase], say: Callable[[str], None], failed: Callable[[str], None]
) -> Iterator[TrainCourse]:
    """Yield the course of each run as it ends; `say` is told what runs, and `failed` why one has no course.

    Raises:
        ConfigError: this process may make no network namespaces.
    """
    from covey.testing.netns import Lan, permitted

    if reason := permitted():
        raise ConfigError(f"covey bench train needs network namespaces: {reason}")
    spent: list[float] = []
    for place, case in enumerate(cases):
        each = sum(spent) / len(spent) if spent else case.seconds + LIKELY_START_SECONDS
        left = each * (len(cases) - place) / 60
        say(f"{place + 1} of {len(cases)}: {case.text} (about {left:.0f} min left)")
        begun = time.monotonic()
        size = 1 if case.way == "alone" else case.size
        try:
            with Lan(hosts=size, rate=f"{case.line}mbit" if case.line else "", prefix="covey-train") as lan:
                points = _run(lan, case)
        except ConfigError as error:
            failed(f"{case.text}: {error}")
        else:
            yield TrainCourse(case=case, points=points)
        spent.append(time.monotonic() - begun)


def order_of(case: TrainCase, rank: int, *, is_back: bool = False) -> TrainOrder:
    """Return what one rank of a run does; `is_back` says that it was lost."""
    size = 1 if case.way == "alone" else case.size
    is_uneven, is_victim = case.machines != "equal", case.machines == "loss" and rank == size - 1
    is_exact = is_uneven and case.way == "bound"  # a batch that is divided by speed, in every step
    return TrainOrder(
        way="together" if is_exact else case.way,
        model=case.model,
        seed=case.seed,
        seconds=case.seconds,
        rank=rank,
        size=size,
        least=size - 1 if case.machines == "loss" else size,
        batch=BATCH_OF_EACH[case.model],
        speed=UNEVEN_SPEEDS[rank] if is_uneven else 1.0,
        exact=is_exact,
        lost_after=LOSS_AFTER * case.seconds if is_victim and not is_back else 0.0,
    )


def _run(lan: Lan, case: TrainCase) -> list[tuple[float, int, float]]:
    """Run the ranks of one way until the lowest one has its time; return its course."""
    orders = [order_of(case, rank) for rank in range(len(lan.hosts))]
    ranks = [_start(lan, host, order) for host, order in zip(lan.hosts, orders, strict=True)]
    victim = next((order.rank for order in orders if order.lost_after), None)
    until = time.monotonic() + case.seconds + TRIAL_START_SECONDS
    while True:
        try:
            out, err = ranks[0].communicate(timeout=0.2)
        except subprocess.TimeoutExpired:
            if time.monotonic() > until:
                os.killpg(ranks[0].pid, signal.SIGKILL)
                _, err = ranks[0].communicate()
                raise ConfigError(f"{case.way} did not end in time: {err[-2000:]}") from None
            if victim is not None and ranks[victim].poll() is not None:
                _start(lan, lan.hosts[victim], order_of(case, victim, is_back=True))
                victim = None
            continue
        if ranks[0].returncode:
            raise ConfigError(f"{case.way} failed: {err[-2000:]}")
        points = [(float(at), int(samples), float(loss)) for at, samples, loss in json.loads(out.splitlines()[-1])]
        if not points:
            raise ConfigError(f"{case.way} took no step in {case.seconds:g} s: {err[-2000:]}")
        if case.machines == "loss" and victim is not None:
            raise ConfigError(f"no machine was lost in {case.seconds:g} s: {err[-2000:]}")
        return points


def _start(lan: Lan, host: Host, order: TrainOrder) -> subprocess.Popen[str]:
    first = lan.hosts[0].ip4
    env = {"BENCH_FIRST": first, "BENCH_OWN": host.ip4, "GLOO_SOCKET_IFNAME": "eth0", "COVEY_SECRET": "5a" * 32}
    command = [sys.executable, "-m", "covey.lab.bench.train_worker", order.as_json()]
    if order.rank:  # nothing reads what the others say: it must not fill a pipe
        command = ["sh", "-c", 'exec "$@" >/dev/null 2>&1', "sh", *command]
    return host.popen(command, env=env)
