"""Load pickles that name only what the receiver has listed.

A pickle is a program: it can import, call and set anything. Here it may name the listed classes and functions, and the
ones that make numpy arrays and values of the standard library; call only these; and set attributes only of objects that
it made itself. The standard library's unpickler in Python is used, because its steps can be overridden; the one in
C lets a pickle set attributes of classes. That is slow for many small objects, but not for large arrays.

A pickle uses memory in proportion to its length: no value is larger than the contents that the pickle has for it, and
values are copied only a few times. numpy does not count the objects that fill an array, so they are counted here.
"""

from __future__ import annotations

import math
import pickle
from collections import deque
from collections.abc import Collection
from io import BytesIO
from typing import Any, Final, NoReturn, TypeAlias

import numpy as np
from numpy._core.multiarray import _reconstruct, scalar

from covey.base.errors import ConfigError, MismatchError

AllowPickle: TypeAlias = bool | Collection[type | str]
"""False: no pickles. True: any. Else what a pickle may name: classes, and full names like "package.module.Name"."""


def _full_names(modules: dict[str, str]) -> frozenset[str]:
    return frozenset(f"{module}.{name}" for module, names in modules.items() for name in names.split())


_CALLED: Final = _full_names(
    {
        "builtins": "complex slice",
        "collections": "OrderedDict defaultdict deque Counter",
        "datetime": "date datetime time timedelta timezone",
        "decimal": "Decimal",
        "uuid": "UUID",
        "numpy": "dtype",
        "numpy._core.multiarray": "_reconstruct scalar",
        "numpy._core.numeric": "_frombuffer",
        "numpy.core.multiarray": "_reconstruct scalar",  # their names in numpy 1
        "numpy.core.numeric": "_frombuffer",
    }
)
"""Callables that make a value from a few others, and cannot make a large value from a small pickle."""
_NAMED: Final = _CALLED | _full_names({"builtins": "list dict set int float str tuple bool", "numpy": "ndarray"})
"""What a value may contain, as in defaultdict(list), but not call: list(range(10**12)) is a short pickle."""
_COPIES: Final = 8
"""How often a pickle may copy its own size, with calls on values that it has made before."""
_COPIED_BASE: Final = 1 << 16
_SIZED: Final = (list, dict, set, tuple, str, bytes, bytearray, deque, np.ndarray)
_TEXT_LIMIT: Final = 200


def check_allowed(allowed: AllowPickle) -> None:
    """Raise ConfigError if `allow_pickle=` is neither a bool nor a list of classes and full names."""
    if isinstance(allowed, bool):
        return
    if isinstance(allowed, str | bytes) or not isinstance(allowed, Collection):
        raise ConfigError(f"allow_pickle={allowed!r} must be True, False or a list of classes and their full names")
    for each in allowed:
        is_name = isinstance(each, str) and "." in each and all(part.isidentifier() for part in each.split("."))
        if not isinstance(each, type) and not is_name:
            raise ConfigError(f"allow_pickle lists {each!r}; write a class, or a full name: 'package.module.Name'")


def load(data: bytes | memoryview, allowed: AllowPickle) -> Any:
    """Return the value of a pickle that names only what is allowed.

    Raises:
        MismatchError: it names or does something else; the message says what.
        Exception: it is no pickle, or what it calls raises.
    """
    if isinstance(allowed, bool):
        if not allowed:
            _refuse("there is a pickle at all")
        return pickle.loads(data)
    return _Unpickler(bytes(data), allowed).load()


class _Unpickler(pickle._Unpickler):
    """Python's unpickler, with checks in the steps that call or change what a pickle has named."""

    stack: list[Any]
    append: Any
    read: Any

    def __init__(self, data: bytes, allowed: Collection[type | str]) -> None:
        super().__init__(BytesIO(data))
        self._length = len(data)
        self._may_copy = _COPIED_BASE + _COPIES * len(data)
        self._classes = {f"{each.__module__}.{each.__qualname__}": each for each in allowed if isinstance(each, type)}
        self._listed = {each for each in allowed if isinstance(each, str)}
        self._callable: dict[int, Any] = {}
        """The named objects that may be called, by id."""

    def find_class(self, module: str, name: str, /) -> Any:
        full = f"{module}.{name}"
        if full in self._classes:
            found: Any = self._classes[full]
        elif full in self._listed or full in _NAMED:
            found = super().find_class(module, name)
        else:
            _refuse(f"it names {full!r}")
        if full not in _NAMED or full in _CALLED:
            self._callable[id(found)] = found
        return found

    def _load_reduce(self) -> None:
        what, args = self.stack[-2], self.stack[-1]
        self._check_called(what)
        if what is _reconstruct and (type(args) is not tuple or args[1:2] != ((0,),)):
            _refuse("it makes an array that is not filled")
        if what is scalar and (type(args) is not tuple or len(args) != 2):
            _refuse("it makes a value that is not given")
        self._count(args)
        _step(pickle.REDUCE)(self)

    def _load_newobj(self) -> None:
        self._check_called(self.stack[-2])
        self._count(self.stack[-1])
        _step(pickle.NEWOBJ)(self)

    def _load_newobj_ex(self) -> None:
        self._check_called(self.stack[-3])
        self._count(self.stack[-2])
        _step(pickle.NEWOBJ_EX)(self)

    def _load_build(self) -> None:
        made, state = self.stack[-2], self.stack[-1]
        if isinstance(made, type) or id(made) in self._callable:
            _refuse(f"it sets attributes of {getattr(made, '__name__', 'a function')!r} itself")
        if isinstance(made, np.dtype) and not _is_plain(made, state):
            _refuse("it makes a dtype with fields")  # numpy does not check the sizes of fields
        if isinstance(made, np.ndarray) and type(made).__setstate__ is np.ndarray.__setstate__ and not _is_whole(state):
            _refuse("it makes an array without all of its objects")
        self._count(state)
        _step(pickle.BUILD)(self)

    def _load_bytearray8(self) -> None:
        size = int.from_bytes(self.read(8), "little")
        if size > self._length:
            _refuse("it makes more bytes than it has")
        self.append(bytearray(self.read(size)))

    def _count(self, args: Any) -> None:
        """Count the bytes that a call may copy, and refuse too many."""
        parts = args if isinstance(args, tuple) else (args,)
        self._may_copy -= sum(len(part) for part in parts if isinstance(part, _SIZED))
        if self._may_copy < 0:
            _refuse("it copies its values too often")

    def _load_old(self) -> NoReturn:
        _refuse("it calls with an opcode that only old protocols have")

    def _check_called(self, what: Any) -> None:
        if id(what) not in self._callable:
            _refuse(f"it calls {getattr(what, '__name__', f'a {type(what).__name__}')!r}")


def _is_whole(state: Any) -> bool:
    """Tell whether the state of an array has all of its elements, which numpy does not check for objects."""
    if type(state) is not tuple or len(state) != 5 or not isinstance(state[2], np.dtype):
        return False
    shape, dtype, items = state[1], state[2], state[4]
    if not dtype.hasobject:
        return True
    is_shape = type(shape) is tuple and all(type(size) is int for size in shape)
    return is_shape and dtype.kind == "O" and type(items) is list and len(items) == math.prod(shape)


def _is_plain(dtype: np.dtype[Any], state: Any) -> bool:
    """Tell whether the state of a dtype adds nothing to its name: no fields, and no sizes."""
    if not isinstance(state, tuple) or not 8 <= len(state) <= (9 if dtype.kind in "mM" else 8):
        return False
    subarray, names, fields, itemsize, alignment, flags = state[2:8]
    return (
        (subarray, names, fields) == (None, None, None)
        and itemsize in (-1, dtype.itemsize)
        and alignment in (-1, dtype.alignment)
        and flags in (0, dtype.flags)
    )


def _step(opcode: bytes) -> Any:
    return pickle._Unpickler.dispatch[opcode[0]]


_STEPS: Final[dict[int, Any]] = {
    pickle.REDUCE[0]: _Unpickler._load_reduce,
    pickle.NEWOBJ[0]: _Unpickler._load_newobj,
    pickle.NEWOBJ_EX[0]: _Unpickler._load_newobj_ex,
    pickle.BUILD[0]: _Unpickler._load_build,
    pickle.BYTEARRAY8[0]: _Unpickler._load_bytearray8,
    pickle.INST[0]: _Unpickler._load_old,
    pickle.OBJ[0]: _Unpickler._load_old,
}
_Unpickler.dispatch = {**pickle._Unpickler.dispatch, **_STEPS}


def _refuse(what: str) -> NoReturn:
    raise MismatchError(
        f"the pickle is not loaded, because {what[:_TEXT_LIMIT]}; allow_pickle= does not list that here"
    )
