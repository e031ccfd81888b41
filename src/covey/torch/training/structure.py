"""Take a training state apart into its tensors, by name, and the structure around them; hand it over to newcomers."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from covey.arrays.torch_devices import tensor_over
from covey.base.errors import ConfigError
from covey.runtime.group.internals import restore_as

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from covey.runtime.group.group import Group
    from covey.runtime.group.restore import RestoreReport

_STRUCTURE = "(structure)"


@dataclass(frozen=True, slots=True)
class TensorKey:
    """Stands for a tensor in a structure."""

    key: str
    """The keys and indices that lead to the tensor, joined by dots."""


def holder_of(value: Any) -> Any:
    """Return the model inside a DistributedDataParallel; any other `value` as it is.

    So the names in a checkpoint do not depend on how the model was trained.
    """
    return value.module if isinstance(value, DistributedDataParallel) else value


def state_of(value: Any) -> Any:
    """Return the state_dict of an object that has load_state_dict; any other value as it is."""
    holder = holder_of(value)
    return holder.state_dict() if hasattr(holder, "load_state_dict") else holder


def take_apart(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return `state` with a TensorKey in place of each tensor, and the tensors by key; of sparse ones dense copies.

    Raises:
        ConfigError: two tensors would have the same key, or a module or an optimizer is deep inside the state.
    """
    tensors: dict[str, torch.Tensor] = {}

    def visit(value: Any, path: tuple[str, ...]) -> Any:
        match value:
            case torch.Tensor():
                key = ".".join(path)
                if key in tensors:
                    raise ConfigError(
                        f"two tensors of the state are called {key}; rename an entry with a dot in its name"
                    )
                tensors[key] = value.to_dense() if value.is_sparse else value
                return TensorKey(key)
            case dict():
                changed = copy.copy(value)  # keeps the attributes that a state_dict has besides its entries
                for key, inner in value.items():
                    changed[key] = visit(inner, (*path, str(key)))
                return changed
            case list():
                return [visit(inner, (*path, str(index))) for index, inner in enumerate(value)]
            case tuple():
                parts = [visit(inner, (*path, str(index))) for index, inner in enumerate(value)]
                return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        if hasattr(value, "load_state_dict"):
            raise ConfigError(
                f"{'.'.join(path)} is a {type(value).__name__}; put it at the top of the state, where it can be loaded"
            )
        return value

    return {key: visit(value, (str(key),)) for key, value in state.items()}, tensors


def put_together(structure: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return the structure with its tensors in place: the inverse of `take_apart`."""
    match structure:
        case TensorKey(key):
            return tensors[key]
        case dict():
            changed = copy.copy(structure)
            for key, inner in structure.items():
                changed[key] = put_together(inner, tensors)
            return changed
        case list():
            return [put_together(inner, tensors) for inner in structure]
        case tuple():
            parts = [put_together(inner, tensors) for inner in structure]
            return type(structure)(*parts) if hasattr(structure, "_fields") else tuple(parts)
    return structure


def make_dense(parts: Mapping[str, Any]) -> None:
    """Let objects with load_state_dict hold dense tensors where they have sparse ones, such as moments of a table.

    What is sent arrives dense. Sums of dense and of sparse tensors are rounded differently, so all ranks need the same.
    """
    for part in parts.values():
        if _has_sparse(state := state_of(part)):
            structure, tensors = take_apart({"": state})
            holder_of(part).load_state_dict(put_together(structure, tensors)[""])


def _has_sparse(value: Any) -> bool:
    match value:
        case torch.Tensor():
            return bool(value.is_sparse)
        case dict():
            return any(map(_has_sparse, value.values()))
        case list() | tuple():
            return any(map(_has_sparse, value))
    return False


def tensor_keys(structure: Any) -> Iterator[str]:
    """Yield the keys of the tensors in a structure."""
    match structure:
        case TensorKey(key):
            yield key
        case dict():
            for inner in structure.values():
                yield from tensor_keys(inner)
        case list() | tuple():
            for inner in structure:
                yield from tensor_keys(inner)


def to_plain(structure: Any, path: str = "the state") -> Any:
    """Return a structure as nested plain lists with the names of the types; equal structures give equal lists.

    Raises:
        ConfigError: it holds other values than tensor keys, dicts, lists, tuples, numbers, strings, bytes and None.
    """
    match structure:
        case TensorKey(key):
            return ["slot", key]
        case dict():
            pairs = [(to_plain(key), to_plain(inner, f"{path}.{key}")) for key, inner in structure.items()]
            return ["dict", [each for pair in pairs for each in pair]]
        case list() | tuple():
            kind = "list" if isinstance(structure, list) else "tuple"
            return [kind, [to_plain(inner, f"{path}.{index}") for index, inner in enumerate(structure)]]
        case int() if structure.bit_length() > 63:  # as in the states of some random number generators
            return ["int", str(structure)]
        case None | bool() | int() | float() | str() | bytes() | np.generic() | np.ndarray():
            return structure
    raise ConfigError(
        f"{path} is a {type(structure).__name__}, which cannot be sent to newcomers; make it numbers, strings, lists, "
        "tuples, dicts or tensors in state_dict()"
    )


def from_plain(plain: Any, like: Any = None) -> Any:
    """Return the structure that `to_plain` was given; a dict gets the type that it has in `like`, if it is there."""
    match plain:
        case ["slot", key]:
            return TensorKey(key)
        case ["int", digits]:
            return int(digits)
        case ["list" | "tuple" as kind, inners]:
            likes = like if isinstance(like, list | tuple) and len(like) == len(inners) else [None] * len(inners)
            made = [from_plain(*pair) for pair in zip(inners, likes, strict=True)]
            return made if kind == "list" else tuple(made)
        case ["dict", flat]:
            own: dict[Any, Any] = like if isinstance(like, dict) else {}
            changed = copy.copy(own)  # a Counter stays a Counter
            changed.clear()
            for key, inner in zip(map(from_plain, flat[::2]), flat[1::2], strict=True):
                changed[key] = from_plain(inner, own.get(key))
            return changed
    return plain


def parameters_by_state(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the parameters that the optimizers in `state` train, by the keys under which their states are saved.

    An optimizer has no state before its first step; then its parameters tell how the state will be sharded.
    """
    return {
        f"{name}.state.{index}": parameter
        for name, optimizer in state.items()
        if isinstance(optimizer, torch.optim.Optimizer)
        for index, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"])
    }


def hand_over(
    group: Group, model: torch.nn.Module, parts: Mapping[str, Any], *, fresh: bool | None = None
) -> RestoreReport:
    """Give newcomers the parameters of `model` and the states of `parts`, objects with load_state_dict.

    Every rank calls it at the start of a generation. State that a part makes later, such as the moments of an
    optimizer, need not exist on a newcomer yet. As with `Group.restore`, a rank that has drifted from the majority gets
    the majority's state. `fresh` says whether the state of this rank does not count, by default that of newcomers. Of
    sharded tensors each rank has a part; all ranks of the group must have the same parts.

    Raises:
        ConfigError: a state holds a value that cannot be sent.
        MismatchError: a tensor has another shape or dtype on a newcomer.
    """
    make_dense(parts)
    structure, tensors = take_apart({name: state_of(part) for name, part in parts.items()})
    parameters = {f"model.{name}": parameter for name, parameter in holder_of(model).named_parameters()}
    state: dict[str, Any] = {name: _on_host(tensor) for name, tensor in {**tensors, **parameters}.items()}
    state[_STRUCTURE] = to_plain(structure)
    report = group.restore(state) if fresh is None else restore_as(group, state, fresh=fresh)
    if group.rank not in report.receivers:
        return report
    _fill(parameters, state)
    sharded = {key: owner for key, owner in parameters_by_state(parts).items() if isinstance(owner, DTensor)}
    states = put_together(
        from_plain(state.pop(_STRUCTURE), structure),
        {name: _like_its_parameter(name, _tensor(value), sharded) for name, value in state.items()},
    )
    for name, part in parts.items():
        holder_of(part).load_state_dict(states[name])
    return report


def share_buffers(group: Group, model: torch.nn.Module, *, is_donor: bool = False) -> None:
    """Give all ranks the buffers of `model` of the rank that `is_donor`, or of the lowest rank, the oldest member."""
    buffers = {name: buffer for name, buffer in holder_of(model).named_buffers() if buffer is not None}
    if not buffers:
        return
    state: dict[str, Any] = {name: _on_host(buffer) for name, buffer in buffers.items()}
    # Buffers differ between ranks while they train. That is no drift, so no rank's state counts as the majority's.
    report = restore_as(group, state, fresh=not is_donor)
    if group.rank in report.receivers:
        _fill(buffers, state)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor, in the same memory: all of it, or its part of a sharded one."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _like_its_parameter(key: str, value: torch.Tensor, sharded: Mapping[str, DTensor]) -> torch.Tensor:
    """Return a received part of the state of an optimizer, sharded as the parameter that it belongs to."""
    owner = sharded.get(key.rpartition(".")[0])
    if owner is None or value.shape != owner.to_local().shape or isinstance(value, DTensor):
        return value
    return DTensor.from_local(
        value, owner.device_mesh, owner.placements, run_check=False, shape=owner.size(), stride=owner.stride()
    )


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return local_part(tensor.detach()).cpu()


def _fill(tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> None:
    """Copy received values into tensors on devices. Tensors in host memory were filled in place."""
    with torch.no_grad():
        for name, tensor in tensors.items():
            if tensor.device.type != "cpu":
                local_part(tensor).copy_(_tensor(state[name]))


def _tensor(value: Any) -> torch.Tensor:
    """Return a received value as a tensor; it is an array if this rank had no tensor of that name."""
    return value if isinstance(value, torch.Tensor) else tensor_over(value)
