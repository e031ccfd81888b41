"""`covey bench ddp`: measures a step of DistributedDataParallel on covey and on gloo, in turns in one process.

Both train the same model on the same samples, and must end with the same parameters.
"""

from __future__ import annotations

import math
import os
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from covey.base.errors import ConfigError
from covey.cli.layout import Column
from covey.cli.terminal import FittedTable
from covey.lab.bench.sweep import MAX_RANKS, MEASURED_LANES
from covey.runtime.keeper.launch import launch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from covey.runtime.group.group import Group

LAYERS: Final = 8
DDP_BATCH: Final = 8
STEPS: Final = 3
"""Steps of one backend before the turn of the other."""
TOLERANCE: Final = 1e-4
"""How much parameters may differ after all steps: the backends add in different orders."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What is measured; checked when built."""

    size: int = 2
    parameters: int = 25_000_000
    rounds: int = 7
    lanes: str = "shm"

    def __post_init__(self) -> None:
        if not 2 <= self.size <= MAX_RANKS:
            raise ConfigError(f"-n must be from 2 to {MAX_RANKS}, not {self.size}")
        if self.lanes not in MEASURED_LANES:
            raise ConfigError(f"unknown lane {self.lanes!r}; choose from {', '.join(MEASURED_LANES)}")
        if self.rounds < 1 or self.parameters < LAYERS:
            raise ConfigError("at least one round is needed, and a parameter in every layer")


@dataclass(frozen=True)
class DdpOutcome:
    """What was measured of one contender."""

    name: str
    seconds: list[float]
    """Seconds of every step, on the slowest rank."""


def measure(trial: Trial) -> list[DdpOutcome]:
    """Return how long steps take without communication, on covey, and on gloo.

    Raises:
        ArithmeticError: the backends ended with different parameters.
    """
    os.environ["COVEY_LANES"] = trial.lanes  # the ranks inherit it
    with tempfile.TemporaryDirectory(prefix="covey-ddp-") as folder:
        reports = launch(train, trial.size, folder, trial, timeout=120 + 20 * trial.rounds)
    return [
        DdpOutcome(name, [max(times) for times in zip(*(report[name] for report in reports), strict=True)])
        for name in reports[0]
    ]


def train(group: Group, folder: str, trial: Trial) -> dict[str, list[float]]:
    """Train as one rank of both contenders; return how long each step took."""
    import torch
    import torch.distributed as dist

    import covey.torch  # noqa: F401 - imported here: not every contender needs it

    torch.set_num_threads(1)
    where = {"init_method": f"file://{folder}/store", "rank": group.rank, "world_size": group.size}
    dist.init_process_group("covey", timeout=timedelta(seconds=60), **where)
    groups = {"covey": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    width = max(1, math.isqrt(trial.parameters // LAYERS))
    models, steps = {}, {}
    for name in groups:
        torch.manual_seed(0)
        layers = [
            torch.nn.Sequential(torch.nn.Linear(width, width, bias=False), torch.nn.Tanh()) for _ in range(LAYERS)
        ]
        models[name] = torch.nn.parallel.DistributedDataParallel(
            torch.nn.Sequential(*layers), process_group=groups[name]
        )
        steps[name] = torch.optim.SGD(models[name].parameters(), 0.01)
    samples = torch.Generator().manual_seed(group.rank)
    times: dict[str, list[float]] = {"no communication": [], **{name: [] for name in groups}}

    def step(name: str, inputs: torch.Tensor) -> float:
        began = time.perf_counter()
        models[name](inputs).square().mean().backward()
        steps[name].step()
        steps[name].zero_grad()
        return time.perf_counter() - began

    for turn in range(trial.rounds + 1):  # the first one warms up
        batches = [torch.randn(DDP_BATCH, width, generator=samples) for _ in range(STEPS)]
        for name in groups if turn % 2 else reversed(groups):
            dist.barrier()
            taken = [step(name, inputs) for inputs in batches]
            times[name] += taken if turn else []
        with models["covey"].no_sync():
            dist.barrier()
            began = time.perf_counter()
            models["covey"](batches[0]).square().mean().backward()
            times["no communication"] += [time.perf_counter() - began] if turn else []
        steps["covey"].zero_grad()
    pairs = zip(*(model.parameters() for model in models.values()), strict=True)
    off = max((ours - theirs).detach().abs().max().item() for ours, theirs in pairs)
    dist.destroy_process_group()
    if off > TOLERANCE:
        raise ArithmeticError(f"covey and gloo ended with parameters that differ by {off:g}")
    return times


def table(outcomes: Sequence[DdpOutcome]) -> FittedTable:
    """Return what was measured as a table."""
    rows: list[tuple[str, str, str, str]] = []
    gloo = next(statistics.median(each.seconds) for each in outcomes if each.name == "gloo")
    for each in outcomes:
        median, high = statistics.median(each.seconds), sorted(each.seconds)[-(-95 * len(each.seconds) // 100) - 1]
        ratio = f"{gloo / median:.2f}x" if each.name == "covey" else ""
        rows.append((each.name, f"{1e3 * median:.1f} ms", f"{1e3 * high:.1f} ms", ratio))
    titles = ("DDP step", "p50", "p95", "against gloo")
    cells = zip(*rows, strict=True)
    return FittedTable([Column(*each, is_right=each[0] != "DDP step") for each in zip(titles, cells, strict=True)])


def as_json(trial: Trial, outcomes: Sequence[DdpOutcome], facts: dict[str, Any]) -> dict[str, Any]:
    """Return everything as plain values."""
    return {"machine": facts, "trial": asdict(trial), "seconds": {each.name: each.seconds for each in outcomes}}
