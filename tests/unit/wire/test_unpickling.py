"""Pickles that may only name what the receiver lists: what they can carry, and the tricks that do not work."""

from __future__ import annotations

import collections
import contextlib
import copyreg
import datetime
import decimal
import enum
import os
import pickle
import subprocess
import tracemalloc
import uuid
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from numpy._core import multiarray
from tests.support.in_turn import in_turn

from covey.base.errors import ConfigError, MismatchError, RemoteProtocolError
from covey.wire import objects
from covey.wire.unpickling import check_allowed, load


@dataclass
class Point:
    x: float
    data: Any = None
    tags: set[str] = field(default_factory=set)


class Colour(enum.Enum):
    RED = 1


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class Caller:
    """An object that can be called."""

    called: list[Any] = []  # noqa: RUF012

    def __call__(self, *args: Any) -> Any:
        self.called.append(args)
        return args


class Outer:
    class Inner:
        pass


@pytest.mark.parametrize(
    "value",
    [
        Point(1.5, np.arange(6.0).reshape(2, 3), {"a"}),
        Point(2.5, np.arange(300_000, dtype=np.int16)[::3]),
        Point(0.0, [np.float32(3.5), np.int8(7), np.array(["x", None], dtype=object), np.array("2026", "M8[s]")]),
        Point(0.0, [np.array(["ab", "c"]), np.array([b"xyz"]), np.array([1 + 2j, 3]), np.zeros((0, 3), "f2")]),
        {"colour": Colour.RED, "many": [Point(float(n)) for n in range(50)]},
        Point(1.0, (collections.OrderedDict(a=1), collections.defaultdict(list, b=[2]), collections.deque([1, 2], 5))),
        Point(1.0, (collections.Counter("aab"), frozenset({1}), bytearray(b"x"), slice(1, 2), 1j, b"raw")),
        Point(1.0, (datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC), decimal.Decimal("1.5"), uuid.UUID(int=7))),
        {1: {2: (3, None, True, "text", 2**100)}},
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_of_listed_classes_come_back_equal(value: Any) -> None:
    for allowed in ([Point, Colour], {f"{__name__}.Point", f"{__name__}.Colour"}):
        back = load(pickle.dumps(value, protocol=5), allowed)
        assert repr(back) == repr(value)
        assert type(back) is type(value)


def test_slots_and_nested_classes_come_back() -> None:
    assert load(pickle.dumps(Slotted([1, 2])), [Slotted]).value == [1, 2]
    assert type(load(pickle.dumps(Outer.Inner()), [Outer.Inner])) is Outer.Inner
    with pytest.raises(MismatchError, match=r"Outer\.Inner"):
        load(pickle.dumps(Outer.Inner()), [Outer])


class Calls:
    """Pickles as a call of something, with these arguments."""

    def __init__(self, what: Any, *args: Any) -> None:
        self._call = (what, args)

    def __reduce__(self) -> Any:
        return self._call


def named(module: str, name: str, *args: Any) -> bytes:
    """Return a pickle that calls `module.name(*args)`, which need not exist here."""
    arguments = pickle.dumps(args, protocol=4)[2:-1]  # without its start and its end
    strings = b"".join(b"\x8c" + bytes((len(word.encode()),)) + word.encode() for word in (module, name))
    return b"\x80\x04" + strings + b"\x93" + arguments + b"R."


GADGETS = {
    "os.system": pickle.dumps(Calls(os.system, "true")),
    "Popen": pickle.dumps(Calls(subprocess.Popen, ["true"])),
    "eval": pickle.dumps(Calls(eval, "1+1")),
    "exec": pickle.dumps(Calls(exec, "1+1")),
    "getattr": pickle.dumps(Calls(getattr, Point, "__init__")),
    "__import__": pickle.dumps(Calls(__import__, "os")),
    "importlib": named("importlib", "import_module", "os"),
    "attrgetter": named("operator", "attrgetter", "system"),
    "partial": named("functools", "partial", print, 1),
    "a module's module": named("numpy", "f2py.os.system", "true"),
    "a class's method": named(__name__, "Point.__init__", 1),
    "a class's globals": named(__name__, "Point.__init__.__globals__"),
    "numpy that runs code": named("numpy.testing._private.utils", "runstring", "1", {}),
    "numpy that writes files": named("numpy", "memmap", "/tmp/x", "u1", "w+", 0, 1),
    "numpy that loads pickles": named("numpy", "load", "/tmp/x"),
    "a bomb of a list": pickle.dumps(Calls(list, range(10))),
    "a bomb of bytes": named("builtins", "bytearray", 10**12),
    "a bomb of a range": named("builtins", "list", (1, 2)),
    "copyreg": pickle.dumps(Calls(copyreg._reconstructor, Point, object, None)),  # type: ignore[attr-defined]
    "a shell by an old step": b"(S'true'\nios\nsystem\n.",
    "a class by an old step": b"(" + f"c{__name__}\nPoint\n".encode() + b"I1\no.",
    "old text": b"cos\nsystem\n(S'true'\ntR.",
    "an unknown name": named("nowhere", "nothing"),
}


@in_turn(gadget=GADGETS)
def test_what_is_not_listed_is_neither_imported_nor_called(gadget: str) -> None:
    with pytest.raises(MismatchError, match="allow_pickle"):
        load(GADGETS[gadget], [Point, Colour, Caller])


def test_an_error_names_what_was_refused_on_one_line() -> None:
    with pytest.raises(MismatchError, match=r"posix\.system"):
        load(GADGETS["os.system"], [Point])
    with pytest.raises(MismatchError) as refused:
        load(named("a\n\x1b[2J" + "x" * 200, "y"), [Point])
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 400


def test_a_pickle_cannot_change_a_class() -> None:
    """The unpickler in C sets attributes of whatever stands on its stack."""
    change = f"c{__name__}\nOuter\n".encode() + b"(N}(S'Inner'\nS'gone'\nutb."
    before = Outer.Inner
    try:
        assert pickle.loads(change) is Outer
        assert Outer.Inner == "gone"  # type: ignore[comparison-overlap]
    finally:
        Outer.Inner = before  # type: ignore[misc]
    with pytest.raises(MismatchError, match="attributes of 'Outer'"):
        load(change, [Outer])
    assert Outer.Inner is before


def test_a_pickle_cannot_call_what_it_made() -> None:
    call = f"c{__name__}\nCaller\n)\x81(I1\ntR.".encode("latin-1")
    assert pickle.loads(call) == (1,)
    Caller.called.clear()
    with pytest.raises(MismatchError, match="calls"):
        load(call, [Caller])
    assert Caller.called == []


def test_a_dtype_cannot_be_given_sizes_of_its_own() -> None:
    structured = np.zeros(2, dtype=[("a", "f4"), ("b", "i8")])
    with pytest.raises(MismatchError, match="dtype"):
        load(pickle.dumps(structured), [Point])


def test_what_is_no_pickle_is_an_error_of_its_own() -> None:
    for data in (b"", b"\x80", b"garbage", pickle.dumps(Point(1.0))[:-5], b"\x80\x04P1\n.", b"\x82\x01."):
        with pytest.raises(Exception) as raised:  # noqa: PT011  (as many kinds as the standard library has)
            load(data, [Point])
        assert not isinstance(raised.value, SystemExit)


@in_turn(allowed=["numpy", b"x", 7, None, ["numpy"], [7], ["a..b"], ["a b.c"], [""], [None]])
def test_what_is_no_list_of_classes_and_full_names_is_refused(allowed: Any) -> None:
    with pytest.raises(ConfigError, match="allow_pickle"):
        check_allowed(allowed)


@pytest.mark.parametrize("allowed", [True, False, [], [Point], ("a.b",), {Point, "a.b.C"}, frozenset({"a.b"})])
def test_lists_of_classes_and_full_names_are_taken(allowed: Any) -> None:
    check_allowed(allowed)


# As values of groups are sent


def test_a_value_of_a_listed_class_is_sent_and_nothing_else() -> None:
    point = Point(1.5, {1, 2})
    data = objects.encode(point, allow_pickle=[Point])
    assert objects.decode(data, allow_pickle=[Point]) == point
    with pytest.raises(MismatchError, match="Point"):
        objects.decode(data, allow_pickle=[Colour])
    with pytest.raises(TypeError, match="allow_pickle"):
        objects.decode(data)
    with pytest.raises(ConfigError):
        objects.encode(point, allow_pickle="Point")
    with pytest.raises(ConfigError):
        objects.decode(data, allow_pickle=["Point"])


def test_plain_values_do_not_become_pickles_because_they_may() -> None:
    data = objects.encode({"a": [1, 2]}, allow_pickle=[Point])
    assert objects.decode(data) == {"a": [1, 2]}


def test_a_broken_pickle_breaks_the_protocol_and_nothing_else() -> None:
    data = objects.encode(Point(1.5, {1}), allow_pickle=True)
    for at in range(1, len(data)):
        for change in (0x00, 0x52, 0x62, 0x93, 0xFF):
            broken = data[:at] + bytes((change,)) + data[at + 1 :]
            with contextlib.suppress(MismatchError, RemoteProtocolError, TypeError):
                objects.decode(broken, allow_pickle=[Point])


# A pickle takes memory in proportion to its length, and numpy is told nothing that is not so.


class Made:
    """Pickles as a call of `function`, with a state."""

    def __init__(self, function: Any, args: tuple[Any, ...], state: Any = None) -> None:
        self.reduced = (function, args) if state is None else (function, args, state)

    def __reduce__(self) -> Any:
        return self.reduced


def unfilled(state: Any) -> Made:
    return Made(multiarray._reconstruct, (np.ndarray, (0,), b"b"), state)


@pytest.mark.parametrize(
    "trick",
    [
        Made(np.ndarray, ((1 << 34,),)),
        Made(multiarray._reconstruct, (np.ndarray, (1 << 34,), b"b")),
        Made(multiarray.scalar, (np.dtype("V2000000000"),)),
        unfilled((1, (1_000_000,), np.dtype("O"), False, [1])),  # numpy would read a million objects, and crash
        unfilled((1, (2,), np.dtype("O"), False, (1, 2))),
        unfilled(((1_000_000,), np.dtype("O"), False, [1])),
        [Made(collections.deque, (part,)) for part in [list(range(1000))] for _ in range(1000)],
    ],
    ids=lambda trick: getattr(trick, "reduced", ["copies"])[0] if isinstance(trick, Made) else "copies",
)
def test_a_short_pickle_makes_nothing_large_and_no_array_of_objects_that_are_not_there(trick: Any) -> None:
    with pytest.raises(MismatchError):
        load(pickle.dumps(trick), [])


def test_bytes_that_a_pickle_announces_and_does_not_have_are_not_made() -> None:
    tracemalloc.start()
    try:
        with pytest.raises(MismatchError):
            load(pickle.BYTEARRAY8 + (1 << 34).to_bytes(8, "little") + b".", [])
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert load(pickle.dumps(bytearray(b"abc"), 5), []) == bytearray(b"abc")
