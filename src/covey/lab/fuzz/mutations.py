"""Mutates valid messages: their structure, so that a decoder reads far into them, and their bytes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec.msgpack import Ext

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

INTEGERS: Final = (
    -(1 << 63),
    -(1 << 31),
    -2,
    -1,
    0,
    1,
    2,
    127,
    128,
    1 << 31,
    1 << 32,
    (1 << 62) - 1,
    1 << 62,
    (1 << 63) - 1,
    (1 << 64) - 1,
)
FLOATS: Final = (math.nan, math.inf, -math.inf, -0.0, 1e308, 5e-324, -1.5)
ODD_TEXTS: Final = ("", "\x00", "\x1b]0;title\x07\r\n", "\u202e", "\U0010ffff" * 20, "x" * 101, "x" * 1001, "x" * 9000)
ODD_BYTES: Final = (b"", b"\xff", bytes(15), bytes(17), bytes(31), bytes(33), bytes(65), bytes(1 << 13))
OTHERS: Final[tuple[Any, ...]] = (
    None,
    True,
    False,
    [],
    {},
    {"key": [1]},
    {1: 2},
    Ext(1, b"\x00\x00"),
    Ext(-1, bytes(4)),
    Ext(5, b""),
)
_DEEP: Final = 40
_MANY: Final = 5000
_RAW: Final = (
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xc1",
)
"""Lengths that announce gigabytes, and a byte that is no valid start."""


class Mutator:
    """Mutates values at random: into other values of their type, and into values of the wrong type."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._seen: dict[type, list[Any]] = {}
        """Atoms of earlier values, by type: an id of another message is more likely to mean something than noise."""

    def learn(self, plain: Any, most: int = 200) -> None:
        """Remember the atoms of a value, to use them in others."""
        for place, key in _parts([plain]):
            atom = place[key]
            if not isinstance(atom, list | dict):
                known = self._seen.setdefault(type(atom), [])
                if atom not in known:
                    known.append(atom)
                    if len(known) > most:
                        del known[self._chance.randrange(most)]

    def plain(self, plain: Any, *, keeps_types: bool = False) -> Any:
        """Return a changed copy of a value; with `keeps_types`, atoms become others of their type, lists stay lists."""
        holder = [_copy(plain)]
        for _ in range(self._chance.choice([1, 1, 1, 2, 3])):
            if not holder:
                break
            place, key = self._pick(holder)
            if keeps_types and not isinstance(place[key], list):
                place[key] = self.alike(place[key])
            elif keeps_types:
                self._reorder(place[key])
            else:
                self._change(place, key)
        return holder[0] if holder else None

    def disguised(self, plain: Any) -> Any:
        """Return a copy of a value in which most atoms were seen in other values."""
        holder = [_copy(plain)]
        for place, key in _parts(holder):
            seen = self._seen.get(type(place[key]))
            if seen and self._chance.random() < 0.7:
                place[key] = self._chance.choice(seen)
        return holder[0]

    def _pick(self, holder: Any) -> tuple[Any, Any]:
        """Return a random part of a value, at a random depth, as its holder and its key."""
        place, key = holder, 0
        while isinstance(value := place[key], list | dict) and value and self._chance.random() < 0.85:
            place, key = value, self._chance.choice(range(len(value)) if isinstance(value, list) else list(value))
        return place, key

    def packed(self, data: bytes, others: Sequence[bytes] = (), prefix: int = 0) -> bytes:
        """Return a mutated copy of a msgpack message that begins after `prefix` bytes."""
        if self._chance.random() < 0.7:
            try:
                plain = msgspec.msgpack.decode(data[prefix:])
                return data[:prefix] + msgspec.msgpack.encode(self.plain(plain))
            except (msgspec.MsgspecError, ValueError, TypeError, RecursionError, OverflowError):
                pass  # not msgpack, or a mutation that msgpack cannot encode
        return self.bytes(data, others)

    def bytes(self, data: bytes, others: Sequence[bytes] = ()) -> bytes:
        """Return a mutated copy of any bytes."""
        chance, changed = self._chance, bytearray(data)
        for _ in range(chance.choice([1, 1, 2, 4])):
            at = chance.randrange(len(changed) + 1)
            match chance.randrange(8):
                case 0 if changed:
                    changed[at % len(changed)] ^= 1 << chance.randrange(8)
                case 1 if changed:
                    changed[at % len(changed)] = chance.choice([0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)])
                case 2:
                    del changed[at : at + chance.randint(1, 8)]
                case 3:
                    changed[at:at] = chance.randbytes(chance.randint(1, 8))
                case 4:
                    changed[at:at] = changed[at : at + chance.randint(1, 32)]
                case 5:
                    changed[at:at] = chance.choice(_RAW)
                case 6 if others:
                    other = chance.choice(others)
                    changed[at:] = other[chance.randrange(len(other) + 1) :]
                case 7:
                    del changed[at:]
        return bytes(changed)

    def _change(self, place: Any, key: Any) -> None:
        chance, value = self._chance, place[key]
        match chance.randrange(9):
            case 0 | 1:
                place[key] = self.alike(value)
            case 2:
                place[key] = _copy(chance.choice([*INTEGERS, *FLOATS, *ODD_TEXTS, *ODD_BYTES, *OTHERS]))
            case 3:
                del place[key]
            case 4 if isinstance(place, list):
                place.insert(key, _copy(chance.choice([value, *INTEGERS, *OTHERS])))
            case 5:
                for _ in range(chance.choice([1, 2, _DEEP])):
                    value = [value]
                place[key] = value
            case 6 if isinstance(value, list):
                self._reorder(value)
            case 7 if isinstance(value, list) and value:
                value[:] = value * chance.choice([2, 3, max(1, _MANY // len(_parts(value)))])
            case 8 if isinstance(value, list):
                del value[chance.randrange(len(value) + 1) :]

    def _reorder(self, value: list[Any]) -> None:
        """Drop, repeat, exchange or add items of a list."""
        chance = self._chance
        if not value:
            value.append(self.alike(0))
            return
        at, other = chance.randrange(len(value)), chance.randrange(len(value))
        match chance.randrange(4):
            case 0:
                del value[at]
            case 1:
                value.insert(at, _copy(value[other]))
            case 2:
                value[at], value[other] = value[other], value[at]
            case 3:
                value.append(self.alike(value[at]))

    def alike(self, atom: Any) -> Any:
        """Return another atom of the same type: one that was seen elsewhere, one near it, or an odd one."""
        chance = self._chance
        if atom is None or isinstance(atom, list | dict):
            return atom
        if isinstance(atom, bool):
            return not atom
        if chance.random() < 0.5 and (seen := self._seen.get(type(atom))):
            return chance.choice(seen)
        match atom:
            case int():
                return chance.choice([atom - 1, atom + 1, atom + 2, 2 * atom, *INTEGERS])
            case float():
                return chance.choice([atom + 1, -atom, *FLOATS])
            case str():
                return chance.choice([atom[:-1], atom + "x", *ODD_TEXTS])
            case bytes():
                return chance.choice([chance.randbytes(len(atom)), atom[::-1], *ODD_BYTES])
        return atom


def _parts(holder: Any) -> list[tuple[Any, Any]]:
    """Return the parts of a value, each as its list or dict and its index or key."""
    found: list[tuple[Any, Any]] = []
    open_parts = [holder]
    while open_parts:
        part = open_parts.pop()
        keys = range(len(part)) if isinstance(part, list) else list(part)
        for key in keys:
            found.append((part, key))
            if isinstance(part[key], list | dict):
                open_parts.append(part[key])
    return found


def _copy(value: Any) -> Any:
    if isinstance(value, list):
        return [_copy(item) for item in value]
    return {key: _copy(item) for key, item in value.items()} if isinstance(value, dict) else value
