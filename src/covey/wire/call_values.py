"""Arguments and results of calls: how they are sent, and how they are checked against a function's annotations.

Values travel as parts: a msgpack body, and the memory of large arrays, which is not copied. `Signature` says what a
function takes and returns, and decodes the arguments of a call accordingly.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
import struct
import typing
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeAlias, get_args, get_origin

import msgspec
import numpy as np
from msgspec.msgpack import Ext

from covey.base.arithmetic import BOOL_CODE, DTYPES, dtype_code
from covey.base.errors import CallRefusedError, ConfigError, CoveyError, RemoteProtocolError
from covey.base.text import printable, spell_error
from covey.wire.calls import CALL_PARTS_LIMIT, HANDLES_LIMIT, PassedHandle
from covey.wire.message_header import MAX_MESSAGE_NDIM, array_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PART_BYTES: Final = 32 * 1024
"""Arrays from this size on are not copied into the body."""
_ARRAY_CODE: Final = 1
_PART: Final = 2
_REFERENCE: Final = 3
_LISTED: Final = 2
"""In place of whether its sender owns it: the handle is in the list of the payload."""
_PLAIN_ARRAY, _NUMPY_SCALAR, _TENSOR = 0, 1, 2
_TYPE_NAME_LIMIT: Final = 100
Bytes: TypeAlias = "bytes | bytearray | memoryview | np.ndarray[Any, np.dtype[np.uint8]]"
Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


class NotAValueError(RemoteProtocolError):
    """These bytes are none that `pack` makes. Code of the program does not raise it, whatever else it raises."""


class Reference(NamedTuple):
    """An exported object, as it travels."""

    is_senders: bool
    """Whether the sender owns it, else the receiver does."""
    number: int
    type_name: str
    listed: PassedHandle | None = None
    """What the payload lists for it, if the run knows lists of handles."""


class Converter(Protocol):
    """What the runtime knows about values that are not plain data: tensors, and references."""

    def to_wire(self, value: Any) -> tuple[Array, bool] | Reference | None:
        """Return an array over a tensor's memory and True, or a reference; None if the value is neither."""

    def memory(self, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return an array of so many bytes, of any content, for a copy that is sent."""

    def tensor(self, array: Array) -> Any:
        """Return a tensor over the memory of an array; the array itself where torch is not loaded."""

    def reference(self, reference: Reference) -> Any:
        """Return the object for a received reference."""

    def listed(self, position: int, type_name: str) -> Any:
        """Return the object for a handle that the payload lists; IndexError if it does not."""

    def as_type(self, wanted: Any, value: Any) -> Any:
        """Return a value as a type that msgspec does not know; NotImplementedError if it cannot be."""


def _to_extension(parts: list[Any], handles: list[PassedHandle], converter: Converter, value: Any) -> Ext:
    """Return what stands in the body for a value that msgspec does not know; add the memory of a large array."""
    if isinstance(value, np.ndarray):
        array = value.view(np.ndarray) if type(value) is not np.ndarray else value
        return _pack_array(parts, array, _PLAIN_ARRAY, converter)
    if isinstance(value, np.generic):
        return _pack_array(parts, np.asarray(value), _NUMPY_SCALAR, converter)
    found = converter.to_wire(value)
    if isinstance(found, Reference):
        name = printable(found.type_name, _TYPE_NAME_LIMIT).encode()
        if found.listed is not None:
            if len(handles) >= HANDLES_LIMIT:
                raise TypeError(f"cannot send more than {HANDLES_LIMIT} handles at a time")
            handles.append(found.listed)
            return Ext(_REFERENCE, struct.pack("<BQ", _LISTED, len(handles) - 1) + name)
        return Ext(_REFERENCE, struct.pack("<BQ", found.is_senders, found.number) + name)
    if found is None:
        raise TypeError(
            f"cannot send a {type(value).__module__}.{type(value).__qualname__}: calls take what msgspec encodes "
            "(numbers, text, bytes, containers, dataclasses, dates), arrays and tensors, and node.export(obj)"
        )
    return _pack_array(parts, found[0], _TENSOR, converter)


def _pack_array(parts: list[Any], array: Array, form: int, converter: Converter) -> Ext:
    code = dtype_code(array.dtype.newbyteorder("="))
    if array.ndim > MAX_MESSAGE_NDIM:
        raise TypeError(f"cannot send an array of {array.ndim} dimensions (at most {MAX_MESSAGE_NDIM})")
    if array.dtype != DTYPES[code] or not array.flags.c_contiguous:
        copy = converter.memory(array.size * DTYPES[code].itemsize).view(DTYPES[code]).reshape(array.shape)
        copy[...] = array
        array = copy
    prefix = struct.pack(f"<BBB{array.ndim}Q", form, code, array.ndim, *array.shape)
    if array.nbytes < PART_BYTES or len(parts) >= CALL_PARTS_LIMIT:
        return Ext(_ARRAY_CODE, prefix + array.tobytes())
    parts.append(memoryview(array.reshape(-1).view(np.uint8)))
    return Ext(_PART, prefix + struct.pack("<I", len(parts) - 1))


def pack(value: Any, converter: Converter, handles: list[PassedHandle] | None = None) -> list[Any]:
    """Return the parts of a value: bytes, then the memory of its large arrays; add to `handles` what payloads list.

    Raises:
        TypeError: there is something in it that cannot be sent.
    """
    parts: list[Any] = [b""]
    listed = [] if handles is None else handles
    try:
        parts[0] = msgspec.msgpack.encode(value, enc_hook=functools.partial(_to_extension, parts, listed, converter))
    except (OverflowError, ValueError) as error:
        raise TypeError(f"cannot send the value: {error}") from error
    except RecursionError:
        raise TypeError("cannot send a value that contains itself, or is nested too deeply") from None
    return parts


_unpacking: contextvars.ContextVar[tuple[dict[int, Bytes], Converter]] = contextvars.ContextVar("covey_unpacking")
"""The parts of the value that is being decoded, by number, as far as they were not used, and its converter."""


def _extension(code: int, data: memoryview) -> Any:
    """Return the value that an extension stands for."""
    parts, converter = _unpacking.get()
    if code == _REFERENCE and 9 <= len(data) <= 9 + 4 * _TYPE_NAME_LIMIT:
        whose, number = struct.unpack_from("<BQ", data)
        name = printable(bytes(data[9:]).decode("utf-8", "replace"), _TYPE_NAME_LIMIT)
        if whose == _LISTED:
            try:
                return converter.listed(number, name)
            except IndexError:
                raise NotAValueError(f"handle {number} is not in the payload") from None
        if whose not in (0, 1) or not 0 < number < 1 << 60:
            raise NotAValueError("not a reference")
        return converter.reference(Reference(bool(whose), number, name))
    if code not in (_ARRAY_CODE, _PART) or len(data) < 3:
        raise NotAValueError(f"not a value of a call: extension {code} of {len(data)} bytes")
    form, dtype, ndim = data[0], data[1], data[2]
    start = 3 + 8 * ndim
    if (
        form > _TENSOR
        or dtype >= len(DTYPES)
        or ndim > MAX_MESSAGE_NDIM
        or len(data) < start
        or (form == _NUMPY_SCALAR and ndim)
    ):
        raise NotAValueError(f"not an array: form {form}, dtype code {dtype}, {ndim} dimensions")
    shape = struct.unpack_from(f"<{ndim}Q", data, 3)
    elements: Any = np.frombuffer(data[start:], np.uint8)
    if code == _PART:
        elements = _take_part(parts, bytes(data[start:]))
    if array_bytes(dtype, shape) != len(elements):
        raise NotAValueError(f"{len(elements)} bytes cannot be {DTYPES[dtype]} of shape {shape}")
    if dtype == BOOL_CODE:  # other bytes than 0 and 1 would make bools that are neither true nor false
        elements = elements.astype(bool)
    elif code == _ARRAY_CODE:
        elements = elements.copy()  # writable, and aligned
    array = elements.view(DTYPES[dtype]).reshape(shape)
    if form == _NUMPY_SCALAR:
        return DTYPES[dtype].type(array[()])
    return converter.tensor(array) if form == _TENSOR else array


def _take_part(parts: dict[int, Bytes], index: bytes) -> Any:
    number = int.from_bytes(index, "little")
    part = parts.pop(number, None) if len(index) == 4 and number else None
    if part is None:
        raise NotAValueError(f"part {number} is missing, or used twice")
    array = np.frombuffer(part, np.uint8)
    return array if array.flags.writeable else array.copy()


def _custom(wanted: Any, value: Any) -> Any:
    plain = get_origin(wanted) or wanted
    if plain is np.ndarray:
        converted = value if isinstance(value, np.ndarray) else _unpacking.get()[1].as_type(np.ndarray, value)
        inner = [each for arg in get_args(wanted) for each in get_args(arg)]
        kinds = [each for each in inner if isinstance(each, type) and issubclass(each, np.generic)]  # not Any
        if kinds and not issubclass(converted.dtype.type, kinds[0]):
            raise ValueError(f"expected an array of {kinds[0].__name__}, got {converted.dtype}")
        return converted
    if isinstance(plain, type) and isinstance(value, plain):
        return value
    if isinstance(plain, type) and issubclass(plain, np.generic) and isinstance(value, bool | int | float):
        with np.errstate(over="ignore"):
            return plain(value)
    return _unpacking.get()[1].as_type(wanted, value)


class ValueDecoder:
    """Decodes values of one type."""

    def __init__(self, wanted: Any) -> None:
        """Raise TypeError if msgspec cannot decode the type."""
        self.decode_raw = msgspec.msgpack.Decoder(wanted, ext_hook=_extension, dec_hook=_custom).decode
        """Returns a value inside one that is being decoded (`decoded`)."""

    def decode(self, body: Bytes, parts: Sequence[Bytes], converter: Converter) -> Any:
        """Return the value; see `decoded` for the errors."""
        return decoded(self.decode_raw, body, parts, converter)


def decoded(decode: Callable[[Any], Any], body: Bytes, parts: Sequence[Bytes], converter: Converter) -> Any:
    """Return what `decode` makes of a body.

    Raises:
        TypeError: the value is not of the type that the receiver wants, or a type of the program refuses it, with
            whatever exception.
        RemoteProtocolError: `pack` never made these bytes.
        CoveyError: a reference is to an object that the sender does not hold.
    """
    token = _unpacking.set((dict(enumerate(parts)), converter))
    try:
        return decode(body)
    except (msgspec.ValidationError, NotImplementedError) as error:
        raise TypeError(printable(str(error))) from error
    except CoveyError:
        raise
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RemoteProtocolError(f"not a value of a call: {error}") from error
    except Exception as error:
        raise TypeError(spell_error(error)) from error
    finally:
        _unpacking.reset(token)


ANY_VALUE: Final = ValueDecoder(Any)


class Signature:
    """The parameters and the result of one function."""

    _lists = msgspec.msgpack.Decoder(tuple[tuple[msgspec.Raw, ...], dict[str, msgspec.Raw]])

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        """Read the annotations.

        Raises:
            ConfigError: an annotation cannot be found, or is of a type that cannot be sent.
        """
        self.name = name
        try:
            self._signature = inspect.signature(function)
            hints = typing.get_type_hints(_annotated(function), include_extras=True)
        except Exception as error:  # whatever an annotation raises when it is evaluated
            raise ConfigError(
                f"the annotations of {name!r} cannot be evaluated: {error}; import its types where the module can find "
                "them at run time, or leave them out"
            ) from error
        names = self._signature.parameters
        self._decoders = {each: self._decoder(each, hints[each]) if each in hints else ANY_VALUE for each in names}
        returned = hints.get("return", Any)
        if self.is_stream(function):
            returned = next(iter(typing.get_args(returned)), Any)
        self.result = self._decoder("return", returned)
        """Decodes what the function returns; of a stream, an item."""
        kinds = [(each.name, each.kind) for each in self._signature.parameters.values()]
        self._in_order = [each for each, kind in kinds if kind in (kind.POSITIONAL_ONLY, kind.POSITIONAL_OR_KEYWORD)]
        needs_names = any(kind is kind.KEYWORD_ONLY for _, kind in kinds)
        self._positional = -1 if needs_names else len(self._in_order)
        """How many positional arguments always fit; -1 if there is no such number."""
        self._rest = next((each for each, kind in kinds if kind is kind.VAR_POSITIONAL), "")
        self._keywords = next((self._decoders[each] for each, kind in kinds if kind is kind.VAR_KEYWORD), ANY_VALUE)

    @staticmethod
    def is_stream(function: Callable[..., Any]) -> bool:
        """Tell whether a function is a generator, or an asynchronous one."""
        plain = _annotated(function)
        return inspect.isgeneratorfunction(plain) or inspect.isasyncgenfunction(plain)

    def _decoder(self, parameter: str, hint: Any) -> ValueDecoder:
        try:
            return ValueDecoder(hint)
        except (TypeError, ValueError) as error:
            text = f"{self.name!r} annotates {parameter!r} with {hint}, which calls do not take: {error}"
            raise ConfigError(text) from error

    def arguments(self, body: Bytes) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and keyword arguments of a call; `call_values.decoded` calls it, and has their parts.

        Types of the program may run code here, such as `__post_init__`, and raise anything: that is a TypeError.

        Raises:
            TypeError: they do not fit the function, or a type of the program refuses one.
            RemoteProtocolError: they are not the arguments of a call.
            CallRefusedError: one is a handle of an object that the caller does not hold.
        """
        try:
            raw, raw_named = self._lists.decode(body)
        except msgspec.ValidationError as error:
            raise RemoteProtocolError(f"not the arguments of a call: {error}") from error
        if raw_named or len(raw) != self._positional:  # else they fit: all of them are positional, and none is missing
            try:
                self._signature.bind(*raw, **raw_named)
            except TypeError as error:
                raise msgspec.ValidationError(f"{self.name}{self._signature}: {error}") from None
        names = [*self._in_order[: len(raw)], *[self._rest] * max(0, len(raw) - len(self._in_order)), *raw_named]
        values: list[Any] = []
        for name, value in zip(names, (*raw, *raw_named.values()), strict=True):
            try:
                values.append(self._decoders.get(name, self._keywords).decode_raw(value))
            except (NotAValueError, CallRefusedError):
                raise
            except (msgspec.ValidationError, NotImplementedError) as error:
                raise msgspec.ValidationError(f"{self.name}(): {name!r}: {error}") from None
            except BaseException as error:  # SystemExit, too: it is an argument that a type of the program refuses
                raise msgspec.ValidationError(f"{self.name}(): {name!r}: {spell_error(error)}") from None
        count = len(raw)
        return tuple(values[:count]), dict(zip(raw_named, values[count:], strict=True))


def _annotated(function: Callable[..., Any]) -> Any:
    """Return what carries the annotations of a callable: a function, or the `__call__` of an object."""
    while isinstance(function, functools.partial):
        function = function.func
    if inspect.isroutine(function):
        return inspect.unwrap(function)
    return function.__init__ if isinstance(function, type) else type(function).__call__  # type: ignore[misc]
