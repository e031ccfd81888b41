"""What a run with DistributedDataParallel says of its own speed, after its first steps.

DDP reads the annotations of a hook and needs types, not strings: this module does not postpone annotations.
"""

import logging
import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.torch_ranks import run_torch_ranks
from torch.nn.parallel import DistributedDataParallel

from covey.plan.training import Learner, SlowestLine, table, ways
from covey.torch.backend.below import covey_group_of
from covey.torch.training.step_times import ESTIMATE, LEAST_STEPS, MOST_STEPS, WARM_UP_STEPS, measured


class Slow(torch.autograd.Function):
    """Passes a tensor on, and takes so many milliseconds in the forward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, milliseconds: float) -> torch.Tensor:
        time.sleep(milliseconds / 1e3)
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


class Model(torch.nn.Module):
    def __init__(self, milliseconds: float) -> None:
        super().__init__()
        self.inner, self.milliseconds = torch.nn.Linear(64, 64), milliseconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(Slow.apply(x, self.milliseconds))


def slow_hook(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages as DDP does, over a line on which each rank waits for the other in turn."""
    work = dist.all_reduce(bucket.buffer().div_(2), async_op=True)
    for _ in range(60):
        dist.all_reduce(torch.zeros(1 << 14))
    return work.get_future().then(lambda done: done.value()[0])


def train(rank: int, size: int, store: str, milliseconds: float, exchanges: bool, estimate: bool) -> Any:
    if estimate:
        os.environ[ESTIMATE] = "1"
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("covey").addHandler(handler)
    dist.init_process_group("covey", init_method=f"file://{store}", rank=rank, world_size=size)
    ddp = DistributedDataParallel(Model(milliseconds))
    if exchanges:
        ddp.register_comm_hook(None, slow_hook)
    steps = 0
    try:
        while steps < WARM_UP_STEPS + MOST_STEPS + 5:
            ddp(torch.ones(2, 64)).sum().backward()
            steps += 1
    except SystemExit:
        said.append("ended")
    group = covey_group_of()
    assert group is not None
    return said, [event.text for event in group.events() if event.kind == "report"], steps


def test_a_run_that_is_slower_than_one_machine_says_so_with_what_is_better_and_another_one_does_not() -> None:
    (said, events, _), (others, other_events, _) = run_torch_ranks(2, train, 0.1, True, False)
    warned = [text for text in said if "slower than one machine alone" in text]
    assert len(warned) == 1, said
    assert "times faster: use covey.torch.train_together, or one machine." in warned[0]
    assert any("slower than one machine alone" in text for text in events), "views show it, too"
    assert not others, "one rank speaks"
    assert not other_events or all("2 ranks, DDP" in text for text in other_events)
    (said, events, _), _ = run_torch_ranks(2, train, 40, False, False)
    assert said == []
    assert any(text.startswith("2 ranks, DDP: a step takes") for text in events)


def test_covey_estimate_ends_all_ranks_after_the_same_step() -> None:
    for said, _, steps in run_torch_ranks(2, train, 1, False, True):
        assert said[-1] == "ended"
        assert steps == WARM_UP_STEPS + MOST_STEPS


def test_what_a_step_computes_and_what_the_line_brings_follow_from_three_times() -> None:
    used, members, line = measured(2, 8_000_000, (1.0, 0.8, 0.05), 1.0)
    assert [each.step_seconds for each in members] == [pytest.approx(0.2)] * 2, "what is not spent in operations"
    assert line == SlowestLine(1e7)
    assert used.samples_per_second == 2.0
    _, members, line = measured(3, 6_000_000, (1.0, 0.9, 0.1), 0.25)
    assert [each.step_seconds for each in members] == [pytest.approx(0.3)] * 3, "operations may overlap computation"
    assert line.bytes_per_second == pytest.approx(4 / 3 * 6e6 * 0.25 / 0.9)
    assert LEAST_STEPS < MOST_STEPS
    lines = table(used, [Learner(0.2, 1.0)] * 2, 8e6, SlowestLine(1e6))
    assert lines[1].startswith(ways([Learner(0.2, 1.0)] * 2, 8e6, SlowestLine(1e6))[0].text)
    assert lines[-1].startswith("over a cable of 1 Gbit/s: ")
