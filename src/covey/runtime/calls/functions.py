"""The functions that other nodes may call, by name or as methods of exported objects, and how their failures travel."""

from __future__ import annotations

import difflib
import inspect
import threading
import traceback
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from covey.base.errors import ConfigError
from covey.base.text import printable, spell_error
from covey.wire import calls as wire
from covey.wire.call_values import Signature
from covey.wire.calls import FUNCTION_NAME_LIMIT

if TYPE_CHECKING:
    from collections.abc import Callable


SHORT_SECONDS: Final = 0.0002
"""A function that takes less time on average is short. Waking a thread takes about half as long."""
_TEXT_LIMIT: Final = 4000
_ERROR_LINE_LIMIT: Final = 300
"""Characters of the text of an exception, and of a line of its traceback."""
_FIRST_RUNS: Final = 8
"""How often a function runs before it may count as short."""


class CallPace:
    """How long a function takes, by its last runs. Threads may lose a run of another one; that does no harm."""

    __slots__ = ("_average", "_runs", "is_short")

    def __init__(self) -> None:
        self._average, self._runs = 0.0, 0
        self.is_short = False
        """Whether the function usually ends before another thread could have been woken to run it."""

    def took(self, seconds: float) -> None:
        """Note a run."""
        self._average += (seconds - self._average) / 8  # so one run of a second takes 50 short ones to be forgotten
        self._runs += 1
        self.is_short = self._runs >= _FIRST_RUNS and self._average < SHORT_SECONDS


class CallableFunction(NamedTuple):
    """A function that other nodes may call."""

    name: str
    function: Callable[..., Any]
    signature: Signature
    is_async: bool
    is_stream: bool
    pace: CallPace


def callable_function(name: str, function: Any) -> CallableFunction:
    """Describe a function; ConfigError if it cannot be called by other nodes."""
    if not callable(function):
        raise ConfigError(f"register {name!r} with a function, not with {printable(repr(function), 100)}")
    signature = Signature(function, name)
    is_stream = Signature.is_stream(function)
    plain = function if inspect.isroutine(function) else type(function).__call__
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(plain)
    is_async = is_async or inspect.isasyncgenfunction(plain)
    return CallableFunction(name, function, signature, is_async, is_stream, CallPace())


class FunctionRegistry:
    """Functions by name. Any thread may call any method."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.by_name: dict[str, CallableFunction] = {}
        """Read it on any thread; only the methods change it."""

    def register(self, name: str, function: Any) -> None:
        """Let other nodes call a function.

        Raises:
            ConfigError: the name is taken or cannot be used, or the function cannot be called.
        """
        if not isinstance(name, str) or not 0 < len(name) <= FUNCTION_NAME_LIMIT or not name.isprintable():
            raise ConfigError(
                f"a name has 1 to {FUNCTION_NAME_LIMIT} printable characters; {printable(repr(name), 100)} has not"
            )
        described = callable_function(name, function)
        with self._lock:
            if name in self.by_name:
                raise ConfigError(f"{name!r} is registered already; unregister it first")
            self.by_name[name] = described

    def unregister(self, name: str) -> None:
        """Let other nodes no longer call a function; calls that have begun go on."""
        with self._lock:
            if self.by_name.pop(name, None) is None:
                raise ConfigError(self.unknown(name))

    def name_of(self, function: Any) -> str:
        """Return the name under which a function is registered here; ConfigError if it is not."""
        for name, described in list(self.by_name.items()):
            if described.function == function:
                return name
        raise ConfigError(f"{printable(repr(function), 100)} is not registered here; pass the name of a function")

    def unknown(self, name: str) -> str:
        """Return what to tell a caller about a name without a function."""
        names = list(self.by_name)
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "" if names else "; no function is registered there"
        return f"no function {printable(name, 100)!r} is registered{hint}"


# How the failures of functions travel


class UnservedError(Exception):
    """A call has no result, for this reason: `kind` is one of those of `wire.calls`."""

    def __init__(self, kind: int, text: str) -> None:
        super().__init__(text)
        self.kind = kind


def failure_of(number: int, error: BaseException) -> wire.CallFailure:
    """Return the failure that tells a caller what was raised instead of a result, whatever it is."""
    if isinstance(error, UnservedError):
        return wire.CallFailure(number, error.kind, "", str(error))
    try:
        return _raised(number, error)
    except BaseException:  # the exception's own code raises: `__str__`, a metaclass, a line of the source that is gone
        return wire.CallFailure(number, wire.RAISED, type(error).__name__, spell_error(error))


def _raised(number: int, error: BaseException) -> wire.CallFailure:
    """Return the failure for an exception of a function, without the frames of covey."""
    trace = error.__traceback__
    while trace is not None and _is_ours(trace.tb_frame.f_code.co_filename) and trace.tb_next is not None:
        trace = trace.tb_next
    lines = [
        printable(line, _ERROR_LINE_LIMIT)
        for text in traceback.format_exception(type(error), error, trace)
        for line in text.splitlines()
    ]
    kind = type(error)
    name = (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )
    return wire.CallFailure(
        number, wire.RAISED, name[:200], printable(str(error), _TEXT_LIMIT), tuple(lines[-wire.TRACEBACK_LINES_LIMIT :])
    )


_OURS: Final = __file__.rpartition("calls")[0] + "calls"


def _is_ours(path: str) -> bool:
    return path.startswith(_OURS)


def too_large(number: int, what: str, size: int, limit: int) -> wire.CallFailure:
    """Return the failure that tells a caller that what its function made is too large."""
    text = f"{what} has {size} bytes, and a call may carry {limit}; send it in pieces, or set COVEY_CALL_BYTES"
    return wire.CallFailure(number, wire.TOO_LARGE, "", text)
