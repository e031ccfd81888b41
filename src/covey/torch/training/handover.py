"""Gives newcomers the state of a training: parameters, buffers, optimizer and the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from covey.runtime.group.internals import restore_as
from covey.torch.backend.devices import tensor_over
from covey.torch.training.structure import from_plain, holder_of, put_together, state_of, take_apart, to_plain

if TYPE_CHECKING:
    from collections.abc import Mapping

    from covey.runtime.group.group import Group
    from covey.runtime.group.restore import RestoreReport

_STRUCTURE = "(structure)"


def hand_over(group: Group, model: torch.nn.Module, parts: Mapping[str, Any]) -> RestoreReport:
    """Give newcomers the parameters of `model` and the states of `parts`, objects with load_state_dict.

    Every rank calls it at the start of a generation. State that a part makes later, such as the moments of an
    optimizer, need not exist on a newcomer yet. As with `Group.restore`, a rank that has drifted from the majority gets
    the majority's state.

    Raises:
        ConfigError: a state holds a value that cannot be sent.
        MismatchError: a tensor has another shape or dtype on a newcomer.
    """
    structure, tensors = take_apart({name: state_of(part) for name, part in parts.items()})
    parameters = {f"model.{name}": parameter for name, parameter in holder_of(model).named_parameters()}
    state: dict[str, Any] = {name: _on_host(tensor) for name, tensor in {**tensors, **parameters}.items()}
    state[_STRUCTURE] = to_plain(structure)
    report = group.restore(state)
    if group.rank not in report.receivers:
        return report
    _fill(parameters, state)
    states = put_together(
        from_plain(state.pop(_STRUCTURE), structure), {name: _tensor(value) for name, value in state.items()}
    )
    for name, part in parts.items():
        holder_of(part).load_state_dict(states[name])
    return report


def share_buffers(group: Group, model: torch.nn.Module) -> None:
    """Give all ranks the buffers of `model` of the lowest rank, which is the oldest member."""
    buffers = {name: buffer for name, buffer in holder_of(model).named_buffers() if buffer is not None}
    if not buffers:
        return
    state: dict[str, Any] = {name: _on_host(buffer) for name, buffer in buffers.items()}
    # Buffers differ between ranks while they train. That is no drift, so no rank's state counts as the majority's.
    report = restore_as(group, state, fresh=True)
    if group.rank in report.receivers:
        _fill(buffers, state)


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu()


def _fill(tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> None:
    """Copy received values into tensors on devices. Tensors in host memory were filled in place."""
    with torch.no_grad():
        for name, tensor in tensors.items():
            if tensor.device.type != "cpu":
                tensor.copy_(_tensor(state[name]))


def _tensor(value: Any) -> torch.Tensor:
    """Return a received value as a tensor; it is an array if this rank had no tensor of that name."""
    return value if isinstance(value, torch.Tensor) else tensor_over(value)
