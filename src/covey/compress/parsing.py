"""Names of codecs, sparsifiers and low rank in settings: "int8", "topk(0.01)", "int4(block=128, stochastic=True)"."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import re
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from covey.base.errors import ConfigError
from covey.base.text import listed, printable
from covey.compress.choice import Auto
from covey.compress.codec import Codec, check_sizes
from covey.compress.low_rank import LowRank, PowerSGD
from covey.compress.quantisers import BF16, FP8, FP16, Int4, Int8, OneBit
from covey.compress.sparse import RandomK, Sparsifier, Threshold, TopK

if TYPE_CHECKING:
    from collections.abc import Callable

Compression: TypeAlias = Codec | Sparsifier | LowRank | Auto

NONE: Final = "none"
CODEC_TEXT_LIMIT: Final = 200
"""Characters of a name with its parameters."""
_CODEC_NAME: Final = re.compile(r"[a-z][a-z0-9_]*")
_BUILT_IN: Final = (FP16, BF16, FP8, Int8, Int4, OneBit, TopK, RandomK, Threshold, PowerSGD, Auto)
_factories: dict[str, Callable[..., Compression]] = {kind.name: kind for kind in _BUILT_IN}


def register_codec(name: str, factory: Callable[..., Codec]) -> None:
    """Make a codec of your own known by a name, so that settings can name it.

    Register it on all ranks, before its first use. The text of a codec, `str(codec)`, must make an equal codec when it
    is parsed: `Codec` does that for frozen dataclasses whose `name` is the registered one.

    Args:
        name: lower-case letters, digits and underscores, like "log8".
        factory: what makes the codec from the parameters in parentheses, usually its class.

    Raises:
        ConfigError: the name is taken or not valid.
    """
    if not isinstance(name, str) or not _CODEC_NAME.fullmatch(name):
        raise ConfigError(f"a codec cannot be called {name!r}; use lower-case letters, digits and _, like log8")
    if name == NONE or name in _factories:
        raise ConfigError(f"there is a codec called {name} already; choose another name")
    if not callable(factory):
        raise ConfigError(f"codec {name}: {factory!r} cannot be called; give the class of the codec")
    _factories[name] = factory


def parse(value: str | Compression | None) -> Compression | None:
    """Return the codec, sparsifier or low rank that a setting names; None for None and "none". Objects stay.

    Raises:
        ConfigError: there is no such name or parameter, or a value is not valid.
    """
    if value is None:
        return None
    if isinstance(value, str):
        return None if value.strip() == NONE else _from_text(value.strip())
    if isinstance(value, Codec):
        return _checked(value)
    if isinstance(value, Sparsifier | LowRank | Auto):
        return value
    raise ConfigError(f"{value!r} is no codec; give a name like int8, an object like covey.Int8(), or None")


def _checked(codec: Codec) -> Codec:
    """Return the codec; raise ConfigError if it is one that a collective cannot use."""
    kind = type(codec).__name__
    if not dataclasses.is_dataclass(codec) or not type(codec).__dataclass_params__.frozen:
        raise ConfigError(f"{kind} is not a frozen dataclass; put @dataclass(frozen=True) before the class")
    try:
        _check_unit(codec)
    except TypeError as error:
        raise ConfigError(f"{kind} cannot be used as a codec: {error}") from error
    return codec


@functools.lru_cache(256)
def _check_unit(codec: Codec) -> None:
    unit = codec.unit
    if not isinstance(unit, int) or unit < 1:
        raise ConfigError(f"codec {codec}: its unit is {unit!r}; give the number of elements in a block, at least 1")
    for count in (0, 1, unit, 2 * unit + 1, 5 * unit + 1):
        check_sizes(codec, count)


@functools.lru_cache(256)
def _from_text(text: str) -> Compression:
    made = _made(text)
    if isinstance(made, Codec) and _made(str(_checked(made))) != made:
        raise ConfigError(f"codec {text}: its text {str(made)!r} makes another codec; correct its name or __str__")
    return made


def _made(text: str) -> Compression:
    name, positional, named = _call(text)
    factory = _factories.get(name)
    if factory is None:
        raise ConfigError(f"there is no codec {name!r}{_nearest(name, _factories)}; there are {listed(_known())}")
    signature = inspect.signature(factory)
    for parameter in named:
        if parameter not in signature.parameters:
            allowed = listed(signature.parameters) or "none"
            near = _nearest(parameter, signature.parameters)
            raise ConfigError(f"{name} has no parameter {parameter!r}{near}; its parameters: {allowed}")
    try:
        signature.bind(*positional, **named)
    except TypeError as error:
        raise ConfigError(f"{printable(text)}: {error}; write {name}{signature_text(signature)}") from None
    made = factory(*positional, **named)
    if not isinstance(made, Codec | Sparsifier | LowRank | Auto):
        raise ConfigError(f"codec {name}: its factory returned {made!r}, which is no covey.Codec")
    return made


def _call(text: str) -> tuple[str, list[Any], dict[str, Any]]:
    """Return name and arguments of "name" or "name(0.01, seed=3)". A bare word as an argument is a text."""
    shown = printable(text, CODEC_TEXT_LIMIT)
    wrong = ConfigError(f"{shown!r} is no codec; write a name, or a name and parameters like topk(0.01)")
    if len(text) > CODEC_TEXT_LIMIT:
        raise ConfigError(f"{shown!r} is too long for a codec")
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise wrong from None
    match tree:
        case ast.Name(name):
            return name, [], {}
        case ast.Call(ast.Name(name), arguments, keywords):
            named = {keyword.arg or "**": _literal(keyword.value, shown) for keyword in keywords}
            return name, [_literal(argument, shown) for argument in arguments], named
    raise wrong


def _literal(node: ast.expr, shown: str) -> Any:
    if isinstance(node, ast.Name):
        return node.id
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        raise ConfigError(f"{shown}: {ast.unparse(node)} is no value; write a number, True or False") from None


def signature_text(signature: inspect.Signature) -> str:
    """Return the parameters of a call without their types: "(ratio, seed=0)"."""
    bare = [parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=signature.empty))


def _known() -> list[str]:
    return [*sorted(_factories), NONE]


def _nearest(word: str, known: Any) -> str:
    near = difflib.get_close_matches(word, [*known, NONE] if known is _factories else list(known), 1)
    return f" (did you mean {near[0]}?)" if near else ""
