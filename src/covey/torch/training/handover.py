"""What a newcomer needs to train on, given to it by those who have it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from covey.runtime.group import survival
from covey.torch.backend.devices import tensor_over
from covey.torch.training.structure import from_plain, holder_of, put_together, state_of, take_apart, to_plain

if TYPE_CHECKING:
    from collections.abc import Mapping

    from covey.runtime.group.group import Group
    from covey.runtime.group.restore import RestoreReport

_STRUCTURE = "(structure)"


def hand_over(group: Group, model: torch.nn.Module, parts: Mapping[str, Any]) -> RestoreReport:
    """Bring newcomers to the others' parameters of `model`, and states of `parts`: things with load_state_dict.

    Every rank calls it at the start of a generation. What a part makes late, such as the moments of an optimizer, need
    not be there yet on a newcomer. As with `Group.restore`, who has drifted from the majority is brought back.

    Raises:
        ConfigError: a state has something in it that does not travel.
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
    """Give the buffers of `model` on the lowest rank, which is the oldest member, to all."""
    buffers = {name: buffer for name, buffer in holder_of(model).named_buffers() if buffer is not None}
    if not buffers:
        return
    state: dict[str, Any] = {name: _on_host(buffer) for name, buffer in buffers.items()}
    # They are each rank's own while it trains: nobody's are worth more than the lowest rank's, and none has drifted.
    report = survival.restore(group, state, fresh=True)
    if group.rank in report.receivers:
        _fill(buffers, state)


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu()


def _fill(tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> None:
    """Copy what landed beside a tensor into it: on the host it landed in place."""
    with torch.no_grad():
        for name, tensor in tensors.items():
            if tensor.device.type != "cpu":
                tensor.copy_(_tensor(state[name]))


def _tensor(value: Any) -> torch.Tensor:
    """Return a tensor over what landed, which is an array where this rank had nothing."""
    return value if isinstance(value, torch.Tensor) else tensor_over(value)
