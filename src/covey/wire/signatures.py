"""What a function takes and returns, by its annotations: checks and decodes the arguments of a call."""

from __future__ import annotations

import functools
import inspect
import typing
from typing import TYPE_CHECKING, Any

import msgspec

from covey.base.errors import CallRefusedError, ConfigError, RemoteProtocolError
from covey.base.text import spell_error
from covey.wire.call_values import ANYTHING, NotAValueError, ValueDecoder

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.wire.call_values import Bytes


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
        self._decoders = {each: self._decoder(each, hints[each]) if each in hints else ANYTHING for each in names}
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
        self._keywords = next((self._decoders[each] for each, kind in kinds if kind is kind.VAR_KEYWORD), ANYTHING)

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
