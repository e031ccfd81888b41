"""Ranks that train alone for a while and then meet at the average of their parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from covey.base.errors import ConfigError
from covey.torch.backend.lost import there

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class LocalSGD:
    """Averages the parameters of `model` over the group every `every` steps.

        local = LocalSGD(model, every=8)
        ...
        optimizer.step()
        local.step()

    All ranks begin with rank 0's parameters, the frozen ones too. Buffers, such as the statistics of a batch norm, stay
    each rank's own. An average is over the parameters that are trained at that moment: layers may be frozen, thawed and
    added, by all ranks alike.

    Raises:
        ConfigError: `every` is below 1, no parameter is trained, one is sharded (a DTensor), or complex and trained.
    """

    def __init__(self, model: torch.nn.Module, *, every: int, process_group: Any = None) -> None:
        if every < 1:
            raise ConfigError(f"every={every}: give the number of steps between two averages, 1 or more")
        self._every, self._group, self._steps = every, process_group, 0
        self._model = model
        whole_parameters(model.named_parameters())
        copy_from_first(model, process_group)

    def step(self) -> bool:
        """Count one step of the optimizer; return whether the parameters were averaged after it.

        Raises:
            ConfigError: no parameter is trained any more, or one that is has become sharded or complex.
        """
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
            raise _unusable(name, "complex" if parameter.is_complex() else "sharded")
    if not trained:
        raise ConfigError("no parameter of the model requires a gradient")
    return trained


def _unusable(name: str, kind: str) -> ConfigError:
    return ConfigError(f"{name} is {kind}; averaging over ranks needs whole, real parameters on each")


def trained_by(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the parameters of `model` that `optimizer` trains, by name, in the order of the model.

    Raises:
        ConfigError: the optimizer trains others too, or one is sharded or complex.
    """
    trained = parameters_of(optimizer)
    if shapes := strangers(trained, model.parameters()):
        raise ConfigError(
            f"the optimizer trains {shapes} that are not the model's; make it of the model's own, as they are now"
        )
    ids = {id(parameter) for parameter in trained}
    return whole_parameters((name, p) for name, p in model.named_parameters() if id(p) in ids)


def strangers(parameters: Iterable[torch.nn.Parameter], known: Iterable[torch.nn.Parameter]) -> str:
    """Return in words those parameters that are not among the known, which have no names here; "" if there are none."""
    ids = {id(parameter) for parameter in known}
    shapes = [str(list(parameter.shape)) for parameter in parameters if id(parameter) not in ids]
    shown = ", ".join(shapes[:5]) + (", ..." if len(shapes) > 5 else "")
    return f"{len(shapes)} parameter{'s' if len(shapes) > 1 else ''} (of shape {shown})" if shapes else ""


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """Return the parameters that an optimizer trains, in its order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def which_train(optimizer: torch.optim.Optimizer) -> list[bool]:
    """Tell of each parameter of an optimizer whether it is trained now; layers are frozen and thawed."""
    return [parameter.requires_grad for parameter in parameters_of(optimizer)]


def copy_from_first(model: torch.nn.Module, group: Any) -> None:
    """Give the parameters of every rank, trained or frozen, the values they have on the first rank of the group.

    Raises:
        ConfigError: one is sharded.
    """
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise _unusable(name, "sharded")
    # In place where they are contiguous, and as bytes, which every backend moves.
    rows = [parameter.detach().contiguous() for parameter in model.parameters()]
    works = [dist.broadcast(row.view(-1).view(torch.uint8), group=group, group_src=0, async_op=True) for row in rows]
    with torch.no_grad():
        for parameter, row, work in zip(model.parameters(), rows, works, strict=True):
            work.wait()
            parameter.copy_(row)


def flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the elements of all tensors in a row: float64 if one of them is, else float32, so that sums stay exact."""
    wide = any(tensor.dtype == torch.float64 for tensor in tensors)
    return torch.cat([tensor.detach().reshape(-1).to(torch.float64 if wide else torch.float32) for tensor in tensors])


def parts(row: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the parts of a row that `flat` made, in the shapes of `like`."""
    pieces = row.split([tensor.numel() for tensor in like])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]
