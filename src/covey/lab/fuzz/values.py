"""Makes values of a message type by walking the type, in the form that msgpack carries: lists, dicts, atoms."""

from __future__ import annotations

import re
import typing
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import inspect

from covey.base.errors import CoveyError

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

LIKELY_TEXTS: Final = (
    "",
    "a",
    "run",
    "10.0.0.1",
    "fd00::1",
    "auto",
    "\x1b[31mred\nline",
    "né",
    "x" * 79,
    "train.py",
    "accept",
    "received",
    "keeper",
    "12",
    "0123456789abcdef",
)
"""For a type with a pattern, only the texts that match are used."""
NUMBERS: Final = (0, 0, 0, 1, 1, 2, 3, 5, 64, 127)
_MOST_ITEMS: Final = 3
_VALUE_TRIES: Final = 1000
_REFUSED_TRIES: Final = 20


class Maker:
    """Makes random values of a type: mostly small ones, sometimes those at the bounds of the type."""

    def __init__(self, chance: random.Random, *, at_bounds: float = 0.05) -> None:
        """`at_bounds` is how often a number, a text or a list is as small or as large as its type allows."""
        self._chance, self._at_bounds = chance, at_bounds

    def plain(self, kind: inspect.Type, depth: int = 0) -> Any:
        """Return a value of a type as msgpack would carry it."""
        chance = self._chance
        match kind:
            case inspect.Metadata():
                return self.plain(kind.type, depth)
            case inspect.StructType():
                fields = [self.plain(field.type, depth + 1) for field in kind.fields]
                if kind.array_like:
                    return fields if kind.tag is None else [kind.tag, *fields]
                tag = {} if kind.tag_field is None else {kind.tag_field: kind.tag}
                return tag | {field.encode_name: value for field, value in zip(kind.fields, fields, strict=True)}
            case inspect.DataclassType() | inspect.TypedDictType() | inspect.NamedTupleType():
                made = {field.encode_name: self.plain(field.type, depth + 1) for field in kind.fields}
                return list(made.values()) if isinstance(kind, inspect.NamedTupleType) else made
            case inspect.UnionType():
                return self.plain(chance.choice(kind.types), depth + 1)
            case inspect.TupleType():
                return [self.plain(item, depth + 1) for item in kind.item_types]
            case inspect.CollectionType():
                least, most = self._length(kind.min_length, kind.max_length, _MOST_ITEMS if depth < 6 else 0)
                return [self.plain(kind.item_type, depth + 1) for _ in range(chance.randint(least, most))]
            case inspect.DictType():
                return {"key": self.plain(kind.value_type, depth + 1)}
            case inspect.EnumType():
                return chance.choice(list(kind.cls)).value
            case inspect.LiteralType():
                return chance.choice(kind.values)
            case inspect.IntType():
                return self._integer(kind)
            case inspect.FloatType():
                low, high = kind.ge if kind.ge is not None else kind.gt, kind.le if kind.le is not None else kind.lt
                return min(max(chance.choice([0.0, 0.5, 1.0, 12.25]), low or 0.0), high if high is not None else 1e9)
            case inspect.BoolType():
                return chance.random() < 0.5
            case inspect.NoneType():
                return None
            case inspect.BytesType():
                least, most = self._length(kind.min_length, kind.max_length, 20)
                return chance.randbytes(chance.randint(least, most))
            case inspect.StrType():
                return self._text(kind)
            case inspect.AnyType() | inspect.RawType():
                return chance.choice([None, 1, "a", [1, 2], {"key": 1.5}])
        raise TypeError(f"no values are known for {kind}: add them here")

    def _length(self, least: int | None, most: int | None, usual: int) -> tuple[int, int]:
        least = least or 0
        if most is not None and most <= 4096 and self._chance.random() < self._at_bounds:
            return most, most
        return least, max(least, usual if most is None else min(usual, most))

    def _integer(self, kind: inspect.IntType) -> int:
        low = kind.ge if kind.ge is not None else -(1 << 63) if kind.gt is None else kind.gt + 1
        high = kind.le if kind.le is not None else (1 << 63) - 1 if kind.lt is None else kind.lt - 1
        if self._chance.random() < self._at_bounds:
            return self._chance.choice([low, high])
        return min(max(self._chance.choice(NUMBERS), low), high)

    def _text(self, kind: inspect.StrType) -> str:
        least, most = kind.min_length or 0, kind.max_length
        fitting = [
            text
            for text in (*LIKELY_TEXTS, *("y" * most for most in [most] if most is not None))
            if len(text) >= least and (most is None or len(text) <= most)
            if kind.pattern is None or re.search(kind.pattern, text)
        ]
        if not fitting:
            raise TypeError(f"no text is known that fits {kind}: add one to LIKELY_TEXTS")
        return self._chance.choice(fitting)


def variants(hint: Any) -> tuple[inspect.Type, ...]:
    """Return the types of a tagged union; of anything else the type itself."""
    kind = inspect.type_info(hint)
    return kind.types if isinstance(kind, inspect.UnionType) else (kind,)


def valid(kind: inspect.Type, maker: Maker, read: Callable[[bytes], Any]) -> bytes:
    """Return the bytes of a value that `read` accepts: a type may have rules that its fields do not express."""
    for _ in range(_VALUE_TRIES):
        data = msgspec.msgpack.encode(maker.plain(kind))
        try:
            read(data)
        except (CoveyError, ValueError):
            continue
        return data
    raise TypeError(f"{_VALUE_TRIES} values of {kind} were all refused")


def refused(kind: inspect.Type, maker: Maker, read: Callable[[bytes], Any]) -> list[bytes]:
    """Return the bytes of a value whose fields are all allowed but that `read` refuses; none if none is found soon."""
    for _ in range(_REFUSED_TRIES):
        data = msgspec.msgpack.encode(maker.plain(kind))
        try:
            read(data)
        except (CoveyError, ValueError):
            return [data]
    return []


def structs(kind: inspect.Type) -> set[type]:
    """Return the message classes that a type contains."""
    found: set[type] = set()
    open_kinds: list[Any] = [kind]
    while open_kinds:
        match one := open_kinds.pop():
            case inspect.StructType() | inspect.DataclassType():
                found.add(one.cls)
                open_kinds += [field.type for field in one.fields]
            case inspect.UnionType():
                open_kinds += one.types
            case inspect.TupleType():
                open_kinds += one.item_types
            case inspect.CollectionType():
                open_kinds.append(one.item_type)
            case inspect.Metadata():
                open_kinds.append(one.type)
    return found


def parts(value: Any) -> set[type]:
    """Return the message classes that a value contains."""
    found: set[type] = set()
    open_values = [value]
    while open_values:
        one = open_values.pop()
        if isinstance(one, tuple):
            open_values += one
        elif isinstance(one, msgspec.Struct):
            found.add(type(one))
            open_values += (getattr(one, field) for field in one.__struct_fields__)
    return found


def examples(kind: inspect.Type, maker: Maker, read: Callable[[bytes], Any], count: int) -> list[bytes]:
    """Return at least `count` valid values of a type, which together contain every message class of the type."""
    made = [valid(kind, maker, read) for _ in range(count)]
    missing = structs(kind).difference(*(parts(read(data)) for data in made))
    for _ in range(_VALUE_TRIES):
        if not missing:
            return made
        data = valid(kind, maker, read)
        if found := missing & parts(read(data)):
            missing -= found
            made.append(data)
    raise TypeError(f"no value of {kind} holds {missing}")


def return_type(read: Callable[..., Any]) -> Any:
    """Return the annotated return type of a decoder."""
    return typing.get_type_hints(read, include_extras=True)["return"]
