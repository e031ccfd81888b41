"""The readers of arguments and results of calls: how to call them, and inputs to begin with."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.msgpack import Ext

from covey.base.errors import RemoteProtocolError
from covey.wire.call_values import ANY_VALUE, Reference, Signature, decoded, pack

if TYPE_CHECKING:
    from collections.abc import Callable

PART: Final = bytes(range(256)) * 256
"""What every input finds as its second part: 64 KiB."""


class HandleDouble:
    """What stands for a received reference."""


class PlainConverter:
    """Knows references, and no tensors."""

    def to_wire(self, value: Any) -> tuple[Any, bool] | Reference | None:
        """Return a reference for a double."""
        return Reference(True, 7, "Double") if isinstance(value, HandleDouble) else None

    def memory(self, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return an array from numpy."""
        return np.empty(nbytes, np.uint8)

    def tensor(self, array: Any) -> Any:
        """Return the array."""
        return array

    def reference(self, reference: Reference) -> Any:
        """Return a double."""
        return HandleDouble()

    def listed(self, position: int, type_name: str) -> Any:
        """Return a double for the one handle that the payload lists."""
        return [HandleDouble()][position]

    def as_type(self, wanted: Any, value: Any) -> Any:
        """Refuse."""
        raise NotImplementedError(f"expected {wanted}, got {type(value).__name__}")


@dataclasses.dataclass
class FuzzedRecord:
    """A type with an array in it."""

    number: int
    array: np.ndarray[Any, np.dtype[Any]]


class _MuteError(Exception):
    """An exception whose text cannot be made."""

    def __str__(self) -> str:
        raise ZeroDivisionError


def _decode_anything() -> None:
    msgspec.msgpack.decode(b"\xc1")


def _raise(error: BaseException) -> None:
    raise error


_REFUSALS: Final[dict[str, Callable[[], None]]] = {
    "assert": lambda: _raise(AssertionError("refused")),
    "exit": lambda: _raise(SystemExit(3)),
    "interrupt": lambda: _raise(KeyboardInterrupt()),
    "close": lambda: _raise(GeneratorExit()),
    "memory": lambda: _raise(MemoryError()),
    "depth": lambda: _raise(RecursionError()),
    "protocol": lambda: _raise(RemoteProtocolError("of the program's own")),
    "decode": _decode_anything,
    "text": lambda: _raise(_MuteError()),
}
"""What a type of a program may do when it is made."""


@dataclasses.dataclass
class FuzzedRefusal:
    """A type that raises what its sender asks for."""

    what: str

    def __post_init__(self) -> None:
        """Raise it."""
        if self.what in _REFUSALS:
            _REFUSALS[self.what]()


def fuzzed_function(
    number: int,
    array: npt.NDArray[np.float64],
    scalar: np.float32 = np.float32(0),  # noqa: B008
    record: FuzzedRecord | None = None,
    handle: HandleDouble | None = None,
    refusal: FuzzedRefusal | None = None,
    small: np.int8 = np.int8(0),  # noqa: B008
    *rest: str,
    **named: float,
) -> None:
    """Take arguments of all kinds."""


_FUZZED_SIGNATURE: Final = Signature(fuzzed_function, "fuzzed_function")
_CONVERTER: Final = PlainConverter()


def read_arguments(data: bytes) -> None:
    """Decode the arguments of a call."""
    try:
        decoded(_FUZZED_SIGNATURE.arguments, data, [data, bytearray(PART)], _CONVERTER)
    except RemoteProtocolError as error:  # a node cuts the caller off
        if "of the program's own" in str(error):
            raise AssertionError("what a type of the program raises is taken for a breach of the protocol") from error
        raise


def read_result(data: bytes) -> None:
    """Decode a result without an annotation."""
    ANY_VALUE.decode(data, [data, PART], _CONVERTER)


PROMISED: Final = (TypeError, RemoteProtocolError)


def _arrays() -> list[Any]:
    arrays = [np.arange(6.0), np.array([True, False]), np.zeros((2, 0)), np.float32(1.5), np.array(3)]
    return [*arrays, HandleDouble()]


def _extensions() -> list[Ext]:
    """Return extensions as no sender makes them, and some as a sender does."""
    kinds = [(form, code, ndim) for form in (0, 1, 2, 3) for code in (0, 5, 12, 99) for ndim in (0, 1, 2, 33)]
    heads = [bytes(kind) for kind in kinds]
    shapes = [b"", (65536).to_bytes(8, "little"), (8192).to_bytes(8, "little"), bytes(8), (4).to_bytes(8, "little") * 2]
    tails = [b"", (1).to_bytes(4, "little"), bytes(4), (9).to_bytes(4, "little"), b"12345678", bytes(64)]
    arrays = [Ext(code, head + shape + tail) for code in (1, 2) for head in heads for shape in shapes for tail in tails]
    references = [
        bytes((whose,)) + number.to_bytes(8, "little") for whose in (0, 1, 2, 3) for number in (0, 7, 1 << 61)
    ]
    return [
        *arrays[::7],
        *(Ext(3, each + name) for each in references for name in (b"Type", b"T" * 120)),
        Ext(3, b""),
        Ext(1, b""),
        Ext(9, b"123"),
    ]


def argument_seeds() -> list[bytes]:
    """Return arguments of calls, right and wrong ones."""
    right: list[tuple[Any, Any]] = [
        ((1, np.arange(3.0)), {}),
        (
            (
                *(1, np.arange(3.0), np.float32(2), {"number": 1, "array": np.arange(2)}, HandleDouble()),
                *({"what": ""}, 5, "x", "y"),
            ),
            {"z": 1.5},
        ),
        ((1, np.arange(3.0), 2.5), {"record": None}),
        ((1, np.arange(3.0), 2.5, None, None, None, 5), {}),
        ((1, np.arange(3.0), np.float32(2), None, HandleDouble()), {}),
        ((), {"number": 1, "array": np.arange(8192.0)}),
    ]
    wrong: list[tuple[Any, Any]] = [
        ((), {}),
        (("text", np.arange(3.0)), {}),
        ((1, np.arange(3)), {}),
        ((1, 5), {}),
        ((1, np.arange(3.0), "x"), {}),
        ((1, np.arange(3.0)), {"handle": 3}),
        ((1, np.arange(3.0)), {"number": 2}),
        ((1, np.arange(3.0)), {"small": 300}),
        *(((1, np.arange(3.0)), {"refusal": {"what": what}}) for what in _REFUSALS),
    ]
    whole = [pack(value, _CONVERTER)[0] for value in (*right, *wrong)]
    return [*whole, msgspec.msgpack.encode([1]), msgspec.msgpack.encode("x"), b"", b"\xc1"]


def result_seeds() -> list[bytes]:
    """Return results of calls, and extensions as no function makes them."""
    plain = [None, 1, "text", [1, {"a": 2.5}], b"bytes"]
    values = [*plain, *_arrays(), [np.arange(8192.0)]]
    twice = msgspec.msgpack.encode(
        [Ext(2, bytes((0, 5, 1)) + (65536).to_bytes(8, "little") + (1).to_bytes(4, "little"))] * 2
    )
    return [
        *(pack(value, _CONVERTER)[0] for value in values),
        *(msgspec.msgpack.encode(each) for each in _extensions()),
        twice,
        b"\xd9\x01\xff",
        b"\x91" * 3000,
    ]
