"""Lightning on covey: `Trainer(strategy=CoveyStrategy())`, started by `covey run`, torchrun, srun or the like."""

from __future__ import annotations

import time
from typing import Any, Final

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import ClusterEnvironment
from lightning.pytorch.strategies import DDPStrategy

from covey.integrations.process_group import ready_group
from covey.runtime.group.internals import report_for_program

__all__ = ["CoveyStrategy"]

LOGGED_EVERY: Final = 1.0
"""How often what a module logs is reported."""


class CoveyStrategy(DDPStrategy):  # type: ignore[misc]  # Lightning is not followed by mypy
    """DDP over covey. The launcher says how many ranks there are: `devices` and `num_nodes` of the Trainer do not.

    `options` are those of Lightning's `DDPStrategy`. The process group is made here, unless there is one already.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(process_group_backend="covey", cluster_environment=_CoveyEnvironment(), **options)
        self._covey_group, self._report_at = ready_group(), 0.0

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **options: Any) -> Any:
        """Step the optimizer; then report the step, and once a second what the module has logged."""
        result = super().optimizer_step(optimizer, closure, model, **options)
        trainer, now = self.lightning_module.trainer, time.monotonic()
        logged: dict[str, Any] = {}
        if now >= self._report_at:
            self._report_at = now + LOGGED_EVERY
            logged = {
                name: value.detach().item for name, value in trainer.callback_metrics.items() if value.numel() == 1
            }
        report_for_program(self._covey_group, int(trainer.global_step) + 1, logged)
        return result

    @property
    def root_device(self) -> torch.device:
        """The device of this rank: the one with its local rank, if there is one for each."""
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank % len(self.parallel_devices)]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """How samplers divide the data."""
        return {"num_replicas": dist.get_world_size(), "rank": dist.get_rank()}


class _CoveyEnvironment(ClusterEnvironment):  # type: ignore[misc]
    """What Lightning asks about the ranks, answered by covey's group."""

    def __init__(self) -> None:
        super().__init__()
        group = ready_group()
        self._local_rank, self._node_rank = next(
            (ranks.index(group.rank), number)
            for number, ranks in enumerate(group.node.hosts().values())
            if group.rank in ranks
        )

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return "unused"

    @property
    def main_port(self) -> int:
        return 0

    @staticmethod
    def detect() -> bool:
        return False  # used by the strategy only

    def world_size(self) -> int:
        return int(dist.get_world_size())

    def set_world_size(self, size: int) -> None:
        pass

    def global_rank(self) -> int:
        return int(dist.get_rank())

    def set_global_rank(self, rank: int) -> None:
        pass

    def local_rank(self) -> int:
        return self._local_rank

    def node_rank(self) -> int:
        return self._node_rank
