"""Local SGD: ranks train alone for some steps, and then average their parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from covey.base.errors import ConfigError
from covey.torch.backend.lost import there
from covey.torch.training.drift import DriftCheck
from covey.torch.training.gradient_mean import GradientMean, consecutive

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from covey.compress.policy import CompressValue


class LocalSGD:
    """Averages the parameters of `model` over the group every `every` steps.

        local = LocalSGD(model, every=8)
        ...
        optimizer.step()
        local.step()

    All ranks start with rank 0's parameters, including the frozen ones. Buffers, such as the statistics of a batch
    norm, are not averaged. Only parameters that are trained at the time are averaged: layers may be frozen, unfrozen
    and added, on all ranks alike.

    The average is exact. With `compress`, a codec like "int8" or a mapping of names of parameters to codecs, ranks send
    how their parameters changed since the last average, in fewer bytes; what that loses is added to the next change.
    What is held back differs between ranks; each rank saves its own `state_dict()`.

    Raises:
        ConfigError: `every` is below 1, no parameter is trained, one is sharded (a DTensor), or complex and trained.
    """

    def __init__(
        self, model: torch.nn.Module, *, every: int, process_group: Any = None, compress: CompressValue = None
    ) -> None:
        if every < 1:
            raise ConfigError(f"every={every}: give the number of steps between two averages, at least 1")
        self._every, self._group, self._steps = every, process_group, 0
        self._model = model
        whole_parameters(model.named_parameters())
        copy_from_first(model, process_group)
        self._drift = DriftCheck()
        self._changes = None if compress is None else GradientMean(compress, feedback=True)
        self._anchors: dict[str, torch.Tensor] = {}
        """With `compress`, by name of the parameter: its value after the last average, which is equal on all ranks."""
        if compress is not None:
            self._anchors = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def step(self) -> bool:
        """Count one step of the optimizer; return whether the parameters were averaged after it.

        Raises:
            ConfigError: no parameter is trained any more, or one that is has become sharded or complex.
        """
        self._steps += 1
        if self._steps % self._every:
            return False
        trained = whole_parameters(self._model.named_parameters())
        changed = {name: p for name, p in trained.items() if name in self._anchors}  # others were added since
        if whole := [parameter for name, parameter in trained.items() if name not in changed]:
            self._average(whole)
        if changed:
            self._average_changes(changed)
        if self._changes is not None:
            self._anchors |= {name: parameter.detach().clone() for name, parameter in trained.items()}
        self._drift.look("parameters", list(trained.values()), self._group)
        return True

    def _average(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        mean = flat(parameters)
        work = dist.all_reduce(mean, group=self._group, async_op=True)
        work.wait()
        mean /= there(work, self._group)
        with torch.no_grad():
            for parameter, part in zip(parameters, parts(mean, parameters), strict=True):
                parameter.copy_(part)

    def _average_changes(self, named: Mapping[str, torch.nn.Parameter]) -> None:
        """Add the mean of the changes since the last average to what the parameters were then."""
        assert self._changes is not None
        anchors = flat([self._anchors[name] for name in named])
        change = flat(list(named.values())) - anchors
        work, finish = self._changes.start(
            change, consecutive([(name, parameter.shape) for name, parameter in named.items()]), self._group
        )
        work.wait()
        anchors += finish()
        with torch.no_grad():
            for parameter, part in zip(named.values(), parts(anchors, list(named.values())), strict=True):
                parameter.copy_(part)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps so far, and with `compress` what it needs to continue.

        The parameters are part of the model's state.
        """
        if self._changes is None:
            return {"steps": self._steps}
        anchors = {name: anchor.clone() for name, anchor in self._anchors.items()}
        return {"steps": self._steps, "anchors": anchors, "feedback": self._changes.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state.

        Raises:
            ConfigError: it was saved without `compress`, and this averages with it.
        """
        if self._changes is not None:
            if "anchors" not in state:
                raise ConfigError("the state was saved by a LocalSGD without compress=; make this one without it, too")
            self._anchors = {name: anchor.clone() for name, anchor in state["anchors"].items()}
            self._changes.load_state_dict(state["feedback"])
        self._steps = state["steps"]


def whole_parameters(named: Iterable[tuple[str, torch.nn.Parameter]]) -> dict[str, torch.nn.Parameter]:
    """Return the parameters that are trained, by name; each rank must hold all of every one.

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


def trained_by(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module, *, may_be_sharded: bool = False
) -> dict[str, torch.nn.Parameter]:
    """Return the parameters of `model` that `optimizer` trains, by name, in the order of the model.

    Raises:
        ConfigError: the optimizer trains other parameters, too, or one is sharded or complex.
    """
    trained = parameters_of(optimizer)
    if shapes := unknown_parameters(trained, model.parameters()):
        raise ConfigError(
            f"the optimizer trains {shapes} that are not the model's; make it with the model's current parameters"
        )
    ids = {id(parameter) for parameter in trained}
    found = [(name, p) for name, p in model.named_parameters() if id(p) in ids]
    if may_be_sharded:
        return {name: parameter for name, parameter in found if parameter.requires_grad}
    return whole_parameters(found)


def unknown_parameters(parameters: Iterable[torch.nn.Parameter], known: Iterable[torch.nn.Parameter]) -> str:
    """Describe the parameters that are not in `known`, which have no names here; return "" if there are none."""
    ids = {id(parameter) for parameter in known}
    shapes = [str(list(parameter.shape)) for parameter in parameters if id(parameter) not in ids]
    shown = ", ".join(shapes[:5]) + (", ..." if len(shapes) > 5 else "")
    return f"{len(shapes)} parameter{'s' if len(shapes) > 1 else ''} (of shape {shown})" if shapes else ""


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """Return the parameters that an optimizer trains, in its order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def which_train(optimizer: torch.optim.Optimizer) -> list[bool]:
    """Return for each parameter of an optimizer whether it is trained now; layers may be frozen and unfrozen."""
    return [parameter.requires_grad for parameter in parameters_of(optimizer)]


def copy_from_first(model: torch.nn.Module, group: Any) -> None:
    """Copy the parameters of the first rank of the group, trained or frozen, to all ranks.

    Raises:
        ConfigError: one is sharded.
    """
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise _unusable(name, "sharded")
    # In place if they are contiguous, and as bytes, which every backend can move.
    rows = [parameter.detach().contiguous() for parameter in model.parameters()]
    works = [dist.broadcast(row.view(-1).view(torch.uint8), group=group, group_src=0, async_op=True) for row in rows]
    with torch.no_grad():
        for parameter, row, work in zip(model.parameters(), rows, works, strict=True):
            work.wait()
            parameter.copy_(row)


def flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the elements of all tensors in one row: float64 if one of them is, else float32, for exact sums."""
    wide = any(tensor.dtype == torch.float64 for tensor in tensors)
    return torch.cat([tensor.detach().reshape(-1).to(torch.float64 if wide else torch.float32) for tensor in tensors])


def parts(row: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the parts of a row that `flat` made, in the shapes of `like`."""
    pieces = row.split([tensor.numel() for tensor in like])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]
