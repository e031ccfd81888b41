"""Encode values as bytes, and decode bytes that are not trusted.

The first byte says what follows: a plain value (msgpack), a pickle, or the reason why the sender could not encode.
Arrays and numpy scalars are msgpack extensions: dtype code u8, ndim u8, ndim x u64, then the elements.

The receiver chooses the classes of what it gets, with `type=`; nothing in the bytes can name one. A pickle is a program
that can do anything the process can, whatever it may name: it is either refused, or run as it is.
"""

from __future__ import annotations

import dataclasses
import pickle
import re
import struct
from typing import Any, Final

import msgspec
import numpy as np
from msgspec.msgpack import Ext

from covey.base.arithmetic import BOOL_CODE, DTYPES, dtype_code
from covey.base.errors import ConfigError, MismatchError, RemoteProtocolError
from covey.wire.message_header import MAX_MESSAGE_NDIM, array_bytes

_PLAIN_FORM: Final = b"\x01"
_PICKLED: Final = b"\x02"
_FAILED: Final = b"\x03"

_ARRAY_EXTENSION: Final = 1
_SCALAR_EXTENSION: Final = 2

_TIMESTAMP: Final = re.compile(rb"[\xd6\xd7]\xff|\xc7\x0c\xff", re.DOTALL)
"""The first bytes of times in msgpack. msgspec decodes them, although `encode` never makes one."""

_ATOMS: Final = frozenset({type(None), bool, int, float, str, bytes, bytearray, memoryview, np.ndarray})


def encode(value: Any, *, type: Any = None, allow_pickle: bool = False) -> bytes:
    """Return bytes that `decode` turns into an equal value.

    Takes None, bools, numbers, strings, bytes, lists, tuples, dicts, dataclasses, numpy arrays and numpy scalars,
    nested in any way. Tuples arrive as lists, dataclasses as dicts (or as the type the receiver asks for), and
    bytearrays as bytes. With `type`, which the receiver passes, too, also what else msgspec encodes: sets, dates,
    decimals, UUIDs, enums, structs.

    Raises:
        TypeError: there is something else in it, and `allow_pickle` is not set (or pickle cannot take it either).
        ConfigError: `allow_pickle` is neither True nor False.
    """
    check_allowed(allow_pickle)
    try:
        try:
            if type is None:
                _check(value)
            return _PLAIN_FORM + msgspec.msgpack.encode(value, enc_hook=_to_extension)
        except (OverflowError, ValueError) as error:  # big ints, lone surrogates, arrays beyond 4 GiB
            raise _refusal(str(error)) from error
        except RecursionError as error:
            raise _refusal("a value that contains itself, or is nested too deeply") from error
    except TypeError:
        if not allow_pickle:
            raise
    try:
        return _PICKLED + pickle.dumps(value, protocol=5)
    except Exception as error:  # pickling runs the value's own code, which may raise anything
        kind = _name(value.__class__)
        raise TypeError(f"a {kind} can be sent neither as plain data nor as a pickle: {error}") from error


def check_allowed(allow_pickle: bool) -> None:
    """Raise ConfigError if `allow_pickle=` is neither True nor False."""
    if not isinstance(allow_pickle, bool):
        raise ConfigError(
            f"allow_pickle={allow_pickle!r} must be True or False: a pickle that may name some classes only can still "
            "run any code. Leave it out, and pass type= with the class of the value, here and where it is sent"
        )


def encode_failure(text: str) -> bytes:
    """Return bytes for which `decode` raises TypeError(text), to send in place of a value that cannot be encoded."""
    return _FAILED + text.encode("utf-8", "replace")


def decode(data: bytes | bytearray | memoryview, *, type: Any = None, allow_pickle: bool = False) -> Any:
    """Return the value that was encoded, as `type` if one is given; nothing in `data` can name a class.

    Arrays are fresh and writable. With `allow_pickle=True` the sender can run any code in this process.

    Raises:
        TypeError: the sender could not encode its value; or it was pickled and `allow_pickle` is not set.
        ConfigError: `allow_pickle` is neither True nor False.
        MismatchError: the value does not fit `type`.
        RemoteProtocolError: `encode` never made these bytes.
    """
    check_allowed(allow_pickle)
    form, body = bytes(data[:1]), memoryview(data)[1:]
    if form == _PLAIN_FORM:
        return _decode_plain(body, type)
    if form == _FAILED:
        raise TypeError(str(body, "utf-8", "replace"))
    if form != _PICKLED:
        raise RemoteProtocolError(f"not an encoded object: it starts with {form!r}")
    if not allow_pickle:
        raise TypeError(
            "the sender pickled its value; let it pass type= instead, and pass it here as well, or allow_pickle=True "
            "if the sender may run any code here"
        )
    try:
        return pickle.loads(body)
    except Exception as error:  # unpickling runs code of classes, which may raise anything
        raise RemoteProtocolError(f"the pickle cannot be loaded: {error!r}") from error


def _decode_plain(body: memoryview, wanted: Any) -> Any:
    try:
        value = msgspec.msgpack.decode(body, type=Any if wanted is None else wanted, ext_hook=_from_extension)
        if wanted is None and _TIMESTAMP.search(body):
            _check(value)
        return value
    except msgspec.ValidationError as error:
        if wanted is None:
            raise RemoteProtocolError(f"not an encoded object: {error}") from error
        raise MismatchError(f"the object received is not a {wanted}: {error}") from error
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, TypeError) as error:
        # TypeError: an array as the key of a dict, or a time.
        raise RemoteProtocolError(f"not an encoded object: {error}") from error


def _check(value: Any) -> None:
    """Raise TypeError for the first value that would not decode to an equal one, such as a set."""
    kind = type(value)
    if kind in _ATOMS or isinstance(value, np.generic):
        return
    if isinstance(value, dict):
        _check_all(value.keys())
        _check_all(value.values())
    elif isinstance(value, (list, tuple)):
        _check_all(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        _check_all(getattr(value, field.name) for field in dataclasses.fields(value))
    else:
        raise _refusal(f"a {_name(kind)}")


def _check_all(values: Any) -> None:
    values = list(values)
    if not set(map(type, values)) <= _ATOMS:  # long lists of numbers are checked in C only
        for value in values:
            _check(value)


def _to_extension(value: Any) -> Ext:
    if type(value) is not np.ndarray and not isinstance(value, np.generic):
        raise _refusal(f"a {_name(type(value))}")
    array = np.asarray(value)
    try:
        code = dtype_code(array.dtype.newbyteorder("="))
    except TypeError as error:
        raise _refusal(f"numpy values of {array.dtype!r}") from error
    if array.ndim > MAX_MESSAGE_NDIM:
        raise _refusal(f"an array of {array.ndim} dimensions (at most {MAX_MESSAGE_NDIM})")
    array = array.astype(DTYPES[code], copy=False)
    prefix = struct.pack(f"<BB{array.ndim}Q", code, array.ndim, *array.shape)
    return Ext(_ARRAY_EXTENSION if isinstance(value, np.ndarray) else _SCALAR_EXTENSION, prefix + array.tobytes())


def _from_extension(extension: int, data: memoryview) -> Any:
    if extension not in (_ARRAY_EXTENSION, _SCALAR_EXTENSION) or len(data) < 2:
        raise RemoteProtocolError(f"not an array: extension {extension} of {len(data)} bytes")
    code, ndim = data[0], data[1]
    start = 2 + 8 * ndim
    if code >= len(DTYPES) or ndim > MAX_MESSAGE_NDIM or len(data) < start or (extension == _SCALAR_EXTENSION and ndim):
        raise RemoteProtocolError(f"not an array: dtype code {code}, {ndim} dimensions, {len(data)} bytes")
    shape = struct.unpack_from(f"<{ndim}Q", data, 2)
    if array_bytes(code, shape) != len(data) - start:
        raise RemoteProtocolError(f"{len(data) - start} bytes cannot be {DTYPES[code]} of shape {shape}")
    if code == BOOL_CODE:  # other bytes than 0 and 1 would make bools that are neither true nor false
        array = np.frombuffer(data[start:], np.uint8).astype(bool).reshape(shape)
    else:
        array = np.frombuffer(data[start:], DTYPES[code]).reshape(shape).copy()
    return array if extension == _ARRAY_EXTENSION else DTYPES[code].type(array[()])


def _refusal(what: str) -> TypeError:
    return TypeError(
        f"cannot send {what}: objects may hold JSON-like values, bytes, dataclasses and numpy arrays. "
        "Sets, dates, decimals, enums and msgspec's structs need type=, here and where they are received. Anything "
        "else can be sent as a pickle: pass allow_pickle=True among ranks that may run any code on each other."
    )


def _name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
