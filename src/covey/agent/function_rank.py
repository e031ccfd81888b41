"""A function that runs on machines with agents: what travels there and back, and the program that calls it there.

The function travels by value, as code: an agent runs any code of those that it allows. Its arguments and results are
values of calls (`wire.call_values`), decoded by its annotations, so that what comes back is data and never code.
"""

from __future__ import annotations

import functools
import inspect
import os
import pickle
import struct
import sys
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from covey.base.errors import ConfigError, RemoteProtocolError
from covey.runtime.calls.functions import failure_of
from covey.runtime.calls.objects import TensorConverter
from covey.runtime.keeper.reports import dumps
from covey.wire.call_values import Signature, decoded, pack
from covey.wire.calls import CallFailure  # noqa: TC001 - a field

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

CALL_FOLDER: Final = "covey-call"
"""The folder of these files in the working folder of a run."""
FUNCTION_FILE: Final = f"{CALL_FOLDER}/function"
ARGUMENTS_FILE: Final = f"{CALL_FOLDER}/arguments"
RESULTS_FOLDER: Final = f"{CALL_FOLDER}/results"
FUNCTION_PARTS_LIMIT: Final = 1 << 16
_COUNT: Final = struct.Struct("<I")
_PART_LENGTH: Final = struct.Struct("<Q")
CONVERTER: Final = TensorConverter()


class FunctionOutcome(msgspec.Struct, frozen=True, array_like=True):
    """What came of the function on one rank: a failure, or the result, whose parts follow."""

    rank: int
    """-1: it failed before it had a rank."""
    failure: CallFailure | None = None


class ArrivedOutcome(NamedTuple):
    """The outcome of a rank, as it arrived."""

    outcome: FunctionOutcome
    parts: Sequence[Any]


def signature_of(fn: Callable[..., Any]) -> Signature:
    """Return what a function takes after its group, and what it returns; ConfigError if that cannot be told."""
    name = getattr(fn, "__name__", "the function")
    if inspect.iscoroutinefunction(fn) or Signature.is_stream(fn):
        raise ConfigError(f"run_on calls plain functions, and {name} is asynchronous or a generator")
    return Signature(functools.partial(fn, None), name)


def function_file(fn: Callable[..., Any]) -> bytes:
    """Return a function by value, with its annotations, after a line that says which Python can read it.

    Raises:
        ConfigError: it refers to something that cannot be sent.
    """
    try:
        hints = typing.get_type_hints(fn, include_extras=True) if inspect.isroutine(fn) else None
        code = dumps((fn, hints))
    except Exception as error:
        name = getattr(fn, "__qualname__", fn)
        raise ConfigError(f"{name!s} cannot be sent: {type(error).__name__}: {error}") from error
    return msgspec.json.encode(_own_python()) + b"\n" + code


def load_function(file: bytes) -> Callable[..., Any]:
    """Return the function of a file that this machine was sent to run.

    Raises:
        ConfigError: another Python has made it.
    """
    line, _, code = file.partition(b"\n")
    made_by, own = msgspec.json.decode(line, type=list[int]), _own_python()
    if made_by != own:
        raise ConfigError(
            f"the function was made by Python {'.'.join(map(str, made_by))}, and {sys.executable} is "
            f"{'.'.join(map(str, own))}; name an interpreter of the same version with python="
        )
    fn, hints = pickle.loads(code)
    if hints is not None:
        fn.__annotations__ = hints  # evaluated where all their names are known
    loaded: Callable[..., Any] = fn
    return loaded


def values_file(parts: Sequence[Any]) -> bytes:
    """Return parts of values in one file."""
    sizes = b"".join(_PART_LENGTH.pack(len(part)) for part in parts)
    return b"".join([_COUNT.pack(len(parts)), sizes, *parts])


def parts_of(file: bytes) -> list[memoryview]:
    """Return the parts in a file; RemoteProtocolError if it is none."""
    data = memoryview(file)
    count = _COUNT.unpack_from(data)[0] if len(data) >= _COUNT.size else FUNCTION_PARTS_LIMIT + 1
    start = _COUNT.size + count * _PART_LENGTH.size
    if count > FUNCTION_PARTS_LIMIT or len(data) < start:
        raise RemoteProtocolError("not a file of values")
    parts = []
    for number in range(count):
        (size,) = _PART_LENGTH.unpack_from(data, _COUNT.size + number * _PART_LENGTH.size)
        parts.append(data[start : start + size])
        start += size
    if start != len(data):
        raise RemoteProtocolError(f"a file of values has {len(data)} bytes instead of {start}")
    return parts


def arguments_file(args: Sequence[Any]) -> bytes:
    """Return the arguments of a function in a file; TypeError if one cannot be sent."""
    return values_file(pack((list(args), {}), CONVERTER))


def outcome_of(file: bytes) -> ArrivedOutcome:
    """Return what a rank has written; RemoteProtocolError if it is no outcome."""
    parts = parts_of(file)
    if not parts:
        raise RemoteProtocolError("an outcome without parts")
    try:
        return ArrivedOutcome(msgspec.msgpack.decode(parts[0], type=FunctionOutcome), parts[1:])
    except msgspec.DecodeError as error:
        raise RemoteProtocolError(f"not an outcome: {error}") from error


def result_of(signature: Signature, parts: Sequence[Any]) -> Any:
    """Return a result as the function's annotation says; TypeError if it is of another type."""
    return decoded(signature.result.decode_raw, parts[0] if parts else b"", parts, CONVERTER)


def main() -> int:
    """Join the run, call the function in the working folder, and write what came of it. Return the exit code."""
    import covey

    outcome, parts = FunctionOutcome(-1), list[Any]()
    try:
        fn = load_function(Path(FUNCTION_FILE).read_bytes())
        signature = signature_of(fn)
        given = parts_of(Path(ARGUMENTS_FILE).read_bytes())
        args, _ = decoded(signature.arguments, given[0], given, CONVERTER)
        with covey.join() as group:
            outcome = FunctionOutcome(group.rank)
            # Packed while the group is open, because the result may be a view of the group's memory.
            parts = pack(fn(group, *args), CONVERTER)
            written = values_file([msgspec.msgpack.encode(outcome), *parts])
    except BaseException as error:
        if error.__traceback__ is not None:  # the first frame is this one
            error.__traceback__ = error.__traceback__.tb_next or error.__traceback__
        failure = failure_of(1, error)
        written = values_file([msgspec.msgpack.encode(FunctionOutcome(outcome.rank, failure))])
        _write(written)
        if isinstance(error, KeyboardInterrupt):
            raise
        return 1
    _write(written)
    return 0


def _write(data: bytes) -> None:
    folder = Path(RESULTS_FOLDER)
    folder.mkdir(mode=0o700, exist_ok=True)
    part = folder / f".{os.getpid()}"
    part.write_bytes(data)
    part.rename(folder / str(os.getpid()))


def _own_python() -> list[int]:
    return list(sys.version_info[:2])


if __name__ == "__main__":
    sys.exit(main())
