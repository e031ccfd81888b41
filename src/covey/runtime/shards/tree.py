"""A state as arrays and the rest: nested dicts, lists and tuples are taken apart, and put together again.

The rest is a tree of plain lists, so that no value of a program is taken for a mark: a kind, and what belongs to it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from covey.arrays.adapter import adapter_of
from covey.base.errors import MismatchError, RemoteProtocolError
from covey.proto.shards.safetensors import FORMAT_DTYPES
from covey.runtime.buffers import as_array, readable
from covey.wire.shards import ARRAY_NAME_LIMIT, ARRAYS_LIMIT

if TYPE_CHECKING:
    from collections.abc import Sequence

    Array = np.ndarray[Any, np.dtype[Any]]

TREE_DEPTH_LIMIT: Final = 100
_DICT, _LIST_NODE, _TUPLE, _ARRAY_NODE, _VALUE = range(5)
_PLAIN_TYPES: Final = (type(None), bool, int, float, complex, str, bytes, np.generic)


class Shard:
    """This rank's part of an array that is split between ranks, in a state for `group.checkpoint`.

    With `axis`, the array consists of the parts of all ranks, in their order, joined along this axis; parts may have
    different lengths. With `shape` and `offset`, this part lies there in an array of that shape: for meshes, and for
    parts that several ranks have, which are saved once.

    What `load` returns for it is a Shard again: an even part along `axis` for each rank, however many have saved it.
    To get another part, pass `load` a state that has a Shard with the wanted part in its place.
    """

    def __init__(
        self,
        array: Any,
        axis: int = 0,
        *,
        shape: Sequence[int] | None = None,
        offset: Sequence[int] | None = None,
    ) -> None:
        part = np.shape(array)
        if (shape is None) != (offset is None):
            raise TypeError("a Shard needs both shape= and offset=, or neither")
        if not part or not -len(part) <= axis < len(part):
            raise TypeError(f"axis={axis} of a Shard of shape {list(part)} does not exist")
        self.array = array
        """The part; what was passed, or a numpy array."""
        self.axis = axis % len(part)
        self.shape = None if shape is None else tuple(map(int, shape))
        """Shape of the whole array; None if it follows from the parts of all ranks."""
        self.offset = None if offset is None else tuple(map(int, offset))
        """Where the part begins in the whole array."""
        if self.shape is not None and self.offset is not None:
            is_inside = len(self.shape) == len(self.offset) == len(part) and all(
                start >= 0 and start + count <= size
                for start, count, size in zip(self.offset, part, self.shape, strict=True)
            )
            if not is_inside:
                raise TypeError(
                    f"a part of shape {list(part)} at {list(self.offset)} is not inside an array of shape "
                    f"{list(self.shape)}"
                )

    def __repr__(self) -> str:
        where = f"axis={self.axis}" if self.shape is None else f"shape={self.shape}, offset={self.offset}"
        return f"<Shard of shape {np.shape(self.array)}: {where}>"


class Leaf(NamedTuple):
    """An array of a state, or a part of one."""

    name: str
    value: Any
    """What the program passed."""

    @property
    def shard(self) -> Shard | None:
        return self.value if isinstance(self.value, Shard) else None

    @property
    def array(self) -> Any:
        """The array, or this rank's part of it, as the program has it."""
        return self.value.array if isinstance(self.value, Shard) else self.value

    def replaced(self, array: Any) -> Leaf:
        """Return this leaf with another array of the same shape."""
        part = self.shard
        if part is None:
            return Leaf(self.name, array)
        return Leaf(self.name, Shard(array, part.axis, shape=part.shape, offset=part.offset))


def is_array(value: Any) -> bool:
    """Tell whether a value is saved as an array."""
    if isinstance(value, Shard | np.ndarray):
        return True
    return not isinstance(value, (*_PLAIN_TYPES, type)) and (
        hasattr(value, "__dlpack__") or hasattr(value, "__array__") or adapter_of(value) is not None
    )


def memory_of(value: Any) -> Array:
    """Return an array as numpy sees it: its own memory if that is on the CPU, else a copy.

    Raises:
        TypeError: it has a dtype that cannot be saved.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor) and not value.is_cpu:
        value = value.detach().cpu()
    adapter = adapter_of(value)
    try:
        if adapter is not None and adapter.view(value) is None:
            operand = readable(value)
            array = operand.load().reshape(operand.shape)
        else:
            array = as_array(value)
    except (TypeError, BufferError, RuntimeError):  # DLPack knows fewer dtypes than numpy's protocol
        if not hasattr(value, "__array__"):
            raise
        array = np.asarray(value)
    if FORMAT_DTYPES.get(array.dtype.name) != array.dtype:
        raise TypeError(f"arrays of {array.dtype!r} cannot be saved; these can: {', '.join(FORMAT_DTYPES)}")
    return array


def take_apart(state: Any) -> tuple[Any, list[Leaf]]:
    """Return the tree of a state, and its arrays in the order of their numbers in the tree.

    Raises:
        TypeError: something in it cannot be saved; the message says where it is.
    """
    leaves: list[Leaf] = []
    names: set[str] = set()

    def walk(value: Any, path: tuple[str, ...]) -> list[Any]:
        where = ".".join(path)
        if len(path) > TREE_DEPTH_LIMIT:
            raise TypeError("the state is nested too deeply, or contains itself")
        if is_array(value):
            name = where or "array"
            while name in names or name == "__metadata__":
                name += "'"
            if len(name) > ARRAY_NAME_LIMIT or not name.isprintable():
                raise TypeError(f"{name[:80]!r} is no name: names have up to {ARRAY_NAME_LIMIT} printable characters")
            names.add(name)
            leaves.append(Leaf(name, value))
            if len(leaves) > ARRAYS_LIMIT:
                raise TypeError(f"the state has more than {ARRAYS_LIMIT} arrays")
            return [_ARRAY_NODE, len(leaves) - 1]
        if isinstance(value, dict):
            if wrong := [key for key in value if not isinstance(key, str | int) or isinstance(key, bool)]:
                raise TypeError(f"the key {wrong[0]!r} of {where or 'the state'} is neither a string nor a number")
            keys = sorted(value, key=lambda key: (isinstance(key, str), key))
            return [_DICT, [[key, walk(value[key], (*path, str(key)))] for key in keys]]
        if isinstance(value, list | tuple):
            kind = _LIST_NODE if isinstance(value, list) else _TUPLE
            return [kind, [walk(each, (*path, str(number))) for number, each in enumerate(value)]]
        if isinstance(value, complex):
            return [_VALUE, np.complex128(value)]
        if not isinstance(value, _PLAIN_TYPES):
            raise TypeError(
                f"{where or 'the state'} is a {type(value).__name__}, which cannot be saved: a state has arrays, "
                "numbers, strings, bytes, None, dicts, lists and tuples"
            )
        return [_VALUE, value]

    return walk(state, ()), leaves


def put_together(tree: Any, arrays: Sequence[Any]) -> Any:
    """Return the state of a tree, which may come from a peer, with these arrays in their places.

    Raises:
        RemoteProtocolError: it is no tree.
    """

    def build(node: Any, depth: int) -> Any:
        if not (isinstance(node, list) and len(node) == 2) or depth > TREE_DEPTH_LIMIT + 1:
            raise RemoteProtocolError("the structure of a checkpoint is damaged")
        kind, content = node
        if kind == _VALUE:
            return content
        if kind == _ARRAY_NODE and isinstance(content, int) and 0 <= content < len(arrays):
            return arrays[content]
        if kind == _DICT and isinstance(content, list):
            pairs = [each for each in content if isinstance(each, list) and len(each) == 2]
            if len(pairs) == len(content) and all(isinstance(key, str | int) for key, _ in pairs):
                return {key: build(each, depth + 1) for key, each in pairs}
        if kind in (_LIST_NODE, _TUPLE) and isinstance(content, list):
            items = [build(each, depth + 1) for each in content]
            return items if kind == _LIST_NODE else tuple(items)
        raise RemoteProtocolError("the structure of a checkpoint is damaged")

    return build(tree, 0)


def merged(template: Any, leaves: Sequence[Leaf], loaded: Any) -> Any:
    """Return the state of a tree with its own arrays, and with the values of a state that was loaded.

    Raises:
        MismatchError: what was loaded has no such value.
    """

    def build(node: Any, value: Any, path: tuple[str, ...]) -> Any:
        kind, content = node
        if kind == _ARRAY_NODE:
            return leaves[content].value
        if kind == _VALUE:
            return value
        if kind == _DICT and isinstance(value, dict):
            if lacking := [key for key, _ in content if key not in value]:
                raise MismatchError(f"the checkpoint has no {'.'.join((*path, str(lacking[0])))!r}")
            return {key: build(each, value[key], (*path, str(key))) for key, each in content}
        if kind in (_LIST_NODE, _TUPLE) and isinstance(value, list | tuple) and len(value) == len(content):
            items = [build(each, value[n], (*path, str(n))) for n, each in enumerate(content)]
            return items if kind == _LIST_NODE else tuple(items)
        raise MismatchError(f"{'.'.join(path) or 'the state'} is something else in the checkpoint")

    return build(template, loaded, ())


def first_difference(one: Any, other: Any, names: Sequence[str] = ()) -> str:
    """Return the path to where two trees first differ; empty if they are equal."""
    kinds = [node[0] for node in (one, other)]
    if kinds[0] != kinds[1]:
        return ".".join(names) or "the state"
    kind, mine = one
    theirs = other[1]
    if kind in (_VALUE, _ARRAY_NODE):
        return "" if _same(mine, theirs) else ".".join(names) or "the state"
    if kind == _DICT:
        keys = [[key for key, _ in each] for each in (mine, theirs)]
        if keys[0] != keys[1]:
            odd = sorted(map(str, set(keys[0]) ^ set(keys[1])))
            return ".".join((*names, *odd[:1]))
        rows = [(str(key), each, theirs[number][1]) for number, (key, each) in enumerate(mine)]
    else:
        if len(mine) != len(theirs):
            return ".".join(names) or "the state"
        rows = [(str(number), each, theirs[number]) for number, each in enumerate(mine)]
    for name, ours, others in rows:
        if found := first_difference(ours, others, (*names, name)):
            return found
    return ""


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(one == other or (one != one and other != other))
