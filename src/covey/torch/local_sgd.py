"""Ranks that train alone for a while and then meet at the average of their parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from covey.base.errors import ConfigError
from covey.torch.lost import there

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class LocalSGD:
    """Averages the parameters of `model` over the group every `every` steps.

        local = LocalSGD(model, every=8)
        ...
        optimizer.step()
        local.step()

    All ranks begin with rank 0's parameters. Buffers, such as the statistics of a batch norm, stay each rank's own.

    Raises:
        ConfigError: `every` is below 1, or a parameter is sharded (a DTensor) or complex.
    """

    def __init__(self, model: torch.nn.Module, *, every: int, process_group: Any = None) -> None:
        if every < 1:
            raise ConfigError(f"every={every}: give the number of steps between two averages, 1 or more")
        self._every, self._group, self._steps = every, process_group, 0
        self._model = model
        copy_from_first(list(whole_parameters(model.named_parameters()).values()), process_group)

    def step(self) -> bool:
        """Count one step of the optimizer; return whether the parameters were averaged after it."""
        self._steps += 1
        if self._steps % self._every:
            return False
        parameters = list(whole_parameters(self._model.named_parameters()).values())
        mean = flat(parameters)
        work = dist.all_reduce(mean, group=self._group, async_op=True)
        work.wait()
        mean /= there(work, self._group)
        with torch.no_grad():
            for parameter, part in zip(parameters, parts(mean, parameters), strict=True):
                parameter.copy_(part)
        return True

    def state_dict(self) -> dict[str, int]:
        """Return the number of steps so far; the parameters are the model's."""
        return {"steps": self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._steps = state["steps"]


def whole_parameters(named: Iterable[tuple[str, torch.nn.Parameter]]) -> dict[str, torch.nn.Parameter]:
    """Return the parameters that are trained, by name, if each rank holds the whole of every one.

    Raises:
        ConfigError: one is sharded or complex, or none is trained.
    """
    trained = {name: parameter for name, parameter in named if parameter.requires_grad}
    for name, parameter in trained.items():
        if isinstance(parameter, DTensor) or parameter.is_complex():
            kind = "complex" if parameter.is_complex() else "sharded"
            raise ConfigError(f"{name} is {kind}; averaging over ranks needs whole, real parameters on each")
    if not trained:
        raise ConfigError("no parameter of the model requires a gradient")
    return trained


def trained_by(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the parameters of `model` that `optimizer` trains, by name, in the order of the model.

    Raises:
        ConfigError: the optimizer trains others too, or one is sharded or complex.
    """
    trained = {id(parameter) for parameter in parameters_of(optimizer)}
    if strangers := len(trained - {id(parameter) for parameter in model.parameters()}):
        raise ConfigError(f"the optimizer trains {strangers} parameters that are not the model's")
    return whole_parameters((name, p) for name, p in model.named_parameters() if id(p) in trained)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """Return the parameters that an optimizer trains, in its order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def which_train(optimizer: torch.optim.Optimizer) -> list[bool]:
    """Tell of each parameter of an optimizer whether it is trained now; layers are frozen and thawed."""
    return [parameter.requires_grad for parameter in parameters_of(optimizer)]


def copy_from_first(tensors: Sequence[torch.Tensor], group: Any) -> None:
    """Give the tensors of every rank the values they have on the first rank of the group."""
    row = flat(tensors)
    dist.broadcast(row, group=group, group_src=0)
    with torch.no_grad():
        for tensor, part in zip(tensors, parts(row, tensors), strict=True):
            tensor.copy_(part)


def flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the elements of all tensors in a row: float64 if one of them is, else float32, so that sums stay exact."""
    wide = any(tensor.dtype == torch.float64 for tensor in tensors)
    return torch.cat([tensor.detach().reshape(-1).to(torch.float64 if wide else torch.float32) for tensor in tensors])


def parts(row: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the parts of a row that `flat` made, in the shapes of `like`."""
    pieces = row.split([tensor.numel() for tensor in like])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]
