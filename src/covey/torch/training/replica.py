"""One copy of a model that several ranks hold between them: what a rank makes before it shards its model."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from covey.base.errors import ConfigError
from covey.runtime.environment import find_launched_rank
from covey.torch.backend.replica_group import start_replica

if TYPE_CHECKING:
    from collections.abc import Mapping


class ModelReplica:
    """The place of this process among the ranks that hold one copy of a sharded model.

        replica = covey.torch.ModelReplica(shards=2)
        fully_shard(model, mesh=replica.mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        elastic = covey.torch.Elastic(model=model, optimizer=optimizer, replica=replica, ...)

    Each process holds the shard `index`, by default its number on its machine modulo `shards`: of the processes of a
    machine, the first `shards` are a replica, then the next ones. `Elastic` forms the replicas anew whenever ranks are
    lost or join; processes of one machine come together where possible.

    torch's default process group is that of the replica, so that a mesh of `shards` ranks is one of it. It has no
    connections before the loop over `Elastic`. If a rank of the replica is lost, its operations return zeros instead of
    raising an error, and the step does not count.

    Raises:
        ConfigError: `index` is not from 0 to `shards` - 1, or torch has a default process group already.
    """

    def __init__(self, shards: int, *, index: int | None = None, device: str = "cpu") -> None:
        if shards < 1:
            raise ConfigError(f"shards={shards} must be at least 1")
        local_rank = find_launched_rank(os.environ).local_rank or 0
        self.index = local_rank % shards if index is None else index
        if not 0 <= self.index < shards:
            raise ConfigError(f"index={index} must be from 0 to {shards - 1}, for shards={shards}")
        self.shards, self._device = shards, device
        self.home = local_rank // shards
        """Which replica of its machine this process was started for."""
        self.bond = start_replica(self.index, shards)
        """What connects the ranks of the replica."""
        self._mesh: Any = None

    @property
    def mesh(self) -> Any:
        """The device mesh of the replica, for `fully_shard`."""
        if self._mesh is None:
            self._mesh = init_device_mesh(self._device, (self.shards,), mesh_dim_names=("shard",))
        return self._mesh

    @property
    def is_torn(self) -> bool:
        """Whether a rank of the replica was lost, so that what it computed since does not count."""
        return self.bond.is_torn

    def part_of(self, samples: list[int]) -> list[int]:
        """Return the samples of the replica that this rank trains on; parts differ by one sample at most."""
        count = len(samples)
        return samples[count * self.index // self.shards : count * (self.index + 1) // self.shards]


class WeightedReduceScatter:
    """Makes gradients in a replica the mean over its samples, where fully_shard would take that over its ranks."""

    def __init__(self) -> None:
        self._weight = 1.0

    def weigh(self, own: int, all_samples: int, shards: int) -> None:
        """Let this rank's gradients, the mean over `own` samples, count as these of `all_samples`."""
        self._weight = own * shards / all_samples if all_samples else 0.0

    def attach(self, model: torch.nn.Module, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Do it for all modules of a model.

        Raises:
            ConfigError: one of the parameters that are trained is not sharded.
        """
        if whole := [name for name, parameter in parameters.items() if not isinstance(parameter, DTensor)]:
            raise ConfigError(
                f"{whole[0]} is not sharded, so that nothing would average it in a replica: call fully_shard on the "
                "whole model, too, after its layers"
            )
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_reduce_scatter(self)

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for torch to reduce in."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        """Reduce and scatter, with the weight of this rank."""
        if self._weight:
            input_tensor.mul_(self._weight)
        else:
            input_tensor.zero_()  # the gradient over no samples may be anything
        return dist.reduce_scatter_single(
            output=output_tensor, input=input_tensor, group=group, op=op, async_op=async_op
        )
