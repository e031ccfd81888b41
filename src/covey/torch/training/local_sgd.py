"""Local SGD: ranks train alone for some steps, and then average their parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from covey.base.errors import ConfigError
from covey.torch.backend.below import there
from covey.torch.training.averaging import InGenerations, InProcessGroup
from covey.torch.training.gradient_mean import consecutive
from covey.torch.training.structure import hand_over

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from covey.compress.policy import CompressValue
    from covey.runtime.group.group import Group


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

    With `generations=True` the ranks are those of `covey.generations`: members may be lost, leave, join and come back,
    as with `DiLoCo`. Call `enter(group)` at the start of each generation, and ask for the next one when
    `change_pending` is true. An average is over the members that are left.

    Raises:
        ConfigError: `every` is below 1, no parameter is trained, one is sharded (a DTensor), or complex and trained.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        every: int,
        process_group: Any = None,
        compress: CompressValue = None,
        generations: bool = False,
    ) -> None:
        if every < 1:
            raise ConfigError(f"every={every}: give the number of steps between two averages, at least 1")
        if generations and process_group is not None:
            raise ConfigError("generations=True takes no process_group: its groups are those of covey.generations")
        self._every, self._group, self._steps = every, process_group, 0
        self._model = model
        whole_parameters(model.named_parameters())
        self._generations = InGenerations("none" if compress is None else compress) if generations else None
        self._over = self._generations or InProcessGroup(process_group, compress)
        self._is_compressed, self._is_ending = compress is not None, False
        if self._generations is None:  # else enter gives newcomers what they need
            copy_from_first(model, process_group)
        self._anchors: dict[str, torch.Tensor] = {}
        """By name of the parameter: its value after the last average, which is equal on all ranks. With `compress`, or
        generations."""
        self._anchor(model.named_parameters())

    def enter(self, group: Group, extra: Mapping[str, Any] | None = None) -> None:
        """Begin a generation: newcomers get the parameters, the number of steps, and `extra`: see `DiLoCo.enter`.

        What a rank has changed since its last average is kept by those that are no newcomers.
        """
        if self._generations is None:
            raise ConfigError("enter() is for LocalSGD(..., generations=True)")
        self._generations.enter(group)
        self._is_ending = False
        report = hand_over(group, torch.nn.Module(), {"local": _Agreed(self), **(extra or {})})
        if group.rank in report.receivers:
            self._generations.forget()

    @property
    def change_pending(self) -> bool:
        """Whether the next generation should start; true on all ranks after the same average."""
        return self._is_ending

    def step(self) -> bool:
        """Count one step of the optimizer; return whether the parameters were averaged after it.

        Raises:
            ConfigError: no parameter is trained any more, or one that is has become sharded or complex.
        """
        self._steps += 1
        if self._steps % self._every or self._is_ending:
            return False
        trained = whole_parameters(self._model.named_parameters())
        changed = {name: p for name, p in trained.items() if self._is_compressed and name in self._anchors}
        if whole := [p for name, p in trained.items() if name not in changed]:  # all, or those that were added since
            self._average(whole)
        if changed:
            self._average_changes(changed)
        self._anchor(trained.items())
        self._over.settled("parameters", list(trained.values()))
        if self._generations is not None:
            self._is_ending = self._generations.group.change_pending
        return True

    def _anchor(self, named: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
        if self._is_compressed or self._generations is not None:
            self._anchors |= {name: parameter.detach().clone() for name, parameter in named}

    def _average(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        mean = flat(parameters)
        if self._generations is not None and self._is_compressed:  # only changes are sent in fewer bytes
            group, total = self._generations.group, mean.cpu()
            group.all_reduce(total)
            mean = total.div_(len(group.contributors)).to(mean.device)
        elif self._generations is not None:
            named = [(str(place), parameter.shape) for place, parameter in enumerate(parameters)]
            mean = self._generations.start(mean, consecutive(named), None)()
        else:
            work = dist.all_reduce(mean, group=self._group, async_op=True)
            work.wait()
            mean /= there(work, self._group)
        with torch.no_grad():
            for parameter, part in zip(parameters, parts(mean, parameters), strict=True):
                parameter.copy_(part)

    def _average_changes(self, named: Mapping[str, torch.nn.Parameter]) -> None:
        """Add the mean of the changes since the last average to what the parameters were then."""
        anchors = flat([self._anchors[name] for name in named])
        change = flat(list(named.values())) - anchors
        shapes = [(name, parameter.shape) for name, parameter in named.items()]
        anchors += self._over.start(change, consecutive(shapes), None)()
        with torch.no_grad():
            for parameter, part in zip(named.values(), parts(anchors, list(named.values())), strict=True):
                parameter.copy_(part)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps so far, and with `compress` what it needs to continue.

        The parameters are part of the model's state.
        """
        if not self._is_compressed:
            return {"steps": self._steps}
        anchors = {name: anchor.clone() for name, anchor in self._anchors.items()}
        return {"steps": self._steps, "anchors": anchors, "feedback": self._over.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state.

        Raises:
            ConfigError: it was saved without `compress`, and this averages with it.
        """
        if self._is_compressed:
            if "anchors" not in state:
                raise ConfigError("the state was saved by a LocalSGD without compress=; make this one without it, too")
            self._anchors = {name: anchor.clone() for name, anchor in state["anchors"].items()}
            self._over.load_state_dict(state["feedback"])
        self._steps = state["steps"]


class _Agreed:
    """What all ranks of a LocalSGD hold alike, whatever they have changed since the last average."""

    def __init__(self, local: LocalSGD) -> None:
        self._local = local

    def state_dict(self) -> dict[str, Any]:
        local = self._local
        held = {**dict(local._model.named_parameters()), **local._anchors}
        values = {name: held[name].detach().clone() for name, _ in local._model.named_parameters()}
        return {"steps": local._steps, "values": values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the values of the others as parameters; a rank that has them already keeps what it has changed since."""
        local, values = self._local, state["values"]
        local._steps = state["steps"]
        if all(
            torch.equal(value.to(own.device), own)
            for name, value in values.items()
            if (own := local._anchors.get(name)) is not None
        ):
            return
        with torch.no_grad():
            for name, parameter in local._model.named_parameters():
                if name in values:
                    parameter.copy_(values[name])
        local._anchors = {}
        local._anchor(local._model.named_parameters())


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
