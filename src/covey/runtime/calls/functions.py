"""The functions that other nodes may call: registered by name, or methods of exported objects."""

from __future__ import annotations

import difflib
import inspect
import threading
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from covey.base.errors import ConfigError
from covey.base.text import printable
from covey.wire.calls import NAME_LIMIT
from covey.wire.signatures import Signature

if TYPE_CHECKING:
    from collections.abc import Callable


SHORT_SECONDS: Final = 0.0002
"""A function that takes less time on average is short. Waking a thread takes about half as long."""
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
        self._functions: dict[str, CallableFunction] = {}

    def register(self, name: str, function: Any) -> None:
        """Let other nodes call a function.

        Raises:
            ConfigError: the name is taken or cannot be used, or the function cannot be called.
        """
        if not isinstance(name, str) or not 0 < len(name) <= NAME_LIMIT or not name.isprintable():
            raise ConfigError(
                f"a name has 1 to {NAME_LIMIT} printable characters; {printable(repr(name), 100)} has not"
            )
        described = callable_function(name, function)
        with self._lock:
            if name in self._functions:
                raise ConfigError(f"{name!r} is registered already; unregister it first")
            self._functions[name] = described

    def unregister(self, name: str) -> None:
        """Let other nodes no longer call a function; calls that have begun go on."""
        with self._lock:
            if self._functions.pop(name, None) is None:
                raise ConfigError(self.unknown(name))

    def get(self, name: str) -> CallableFunction | None:
        """Return the function of a name, if there is one."""
        return self._functions.get(name)

    def name_of(self, function: Any) -> str:
        """Return the name under which a function is registered here; ConfigError if it is not."""
        for name, described in list(self._functions.items()):
            if described.function == function:
                return name
        raise ConfigError(f"{printable(repr(function), 100)} is not registered here; pass the name of a function")

    def unknown(self, name: str) -> str:
        """Return what to tell a caller about a name without a function."""
        names = list(self._functions)
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "" if names else "; no function is registered there"
        return f"no function {printable(name, 100)!r} is registered{hint}"
