"""Which array is compressed how: by name, size and dtype."""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, TypeAlias

import numpy as np

from covey.base.arithmetic import BFLOAT16
from covey.base.errors import ConfigError
from covey.base.text import printable
from covey.compress.parsing import NONE, Compression, parse

Value: TypeAlias = str | Compression | None

SMALLEST_BYTES: Final = 1 << 16
"""Bytes of an array below which compression saves less than a round trip over a network takes."""
POLICY_TEXT_LIMIT: Final = 10_000
"""Characters of a policy."""
_EVERYTHING: Final = "*"
_SMALLEST_WORD: Final = "smallest"
_PATTERN: Final = re.compile(r"[^\s,=()]+")


@dataclass(frozen=True)
class Policy:
    """Rules that choose a codec for an array. Policies are values, and `str(policy)` makes an equal one."""

    rules: tuple[tuple[str, Compression | None], ...]
    """Patterns of names, as in a shell, and what is used for them. The first match counts; no match means no codec."""
    smallest: int = SMALLEST_BYTES
    """Bytes of the smallest array that is compressed."""
    is_explicit: bool = False
    """Whether a call asked for one codec for its array. Then an array that cannot be compressed is an error."""

    floats: ClassVar = frozenset([np.dtype(np.float16), BFLOAT16, np.dtype(np.float32), np.dtype(np.float64)])
    """The dtypes that are compressed. Codecs work on float32, so that float64 is rounded to it first."""

    def __post_init__(self) -> None:
        if not isinstance(self.smallest, int) or isinstance(self.smallest, bool) or self.smallest < 0:
            raise ConfigError(f"smallest is {self.smallest!r}; give a number of bytes, like {SMALLEST_BYTES}")
        for pattern, _ in self.rules:
            if not isinstance(pattern, str) or not _PATTERN.fullmatch(pattern) or pattern == _SMALLEST_WORD:
                raise ConfigError(f"{pattern!r} is no pattern of names; write one like embed.* or *.bias")

    def codec_for(self, name: str, nbytes: int, dtype: np.dtype[Any]) -> Compression | None:
        """Return how to compress an array of this name, size and dtype; None to send it as it is.

        Raises:
            TypeError: a call asked for a codec, and the dtype is not one of floats.
        """
        codec = next((codec for pattern, codec in self.rules if fnmatch.fnmatchcase(name, pattern)), None)
        if codec is None:
            return None
        if dtype not in self.floats:
            if self.is_explicit:
                sent = f"{dtype} arrays are sent as they are: pass compress=None"
                raise TypeError(f"{codec} compresses floats; {sent}")
            return None
        return codec if nbytes >= self.smallest else None

    def __str__(self) -> str:
        def text(codec: Compression | None) -> str:
            return NONE if codec is None else str(codec)

        if [pattern for pattern, _ in self.rules] == [_EVERYTHING]:
            items = [text(self.rules[0][1])]
        else:
            items = [f"{pattern}={text(codec)}" for pattern, codec in self.rules] or [NONE]
        return ", ".join([*items, *([f"{_SMALLEST_WORD}={self.smallest}"] if self.smallest != SMALLEST_BYTES else [])])


CompressValue: TypeAlias = Policy | Value | Mapping[str, Value]
"""What `compress=` takes."""


def make_policy(value: CompressValue, *, smallest: int | None = None, is_explicit: bool = False) -> Policy:
    """Return the policy that a setting or an argument describes.

    Args:
        value: a policy; a codec, its name or None, for all arrays; a mapping of patterns to these; or a text like
            "embed.*=topk(0.01), *.bias=none, *=int8, smallest=4096".
        smallest: bytes of the smallest array to compress, if the value does not say it.
        is_explicit: whether the value is an argument of the call that sends the array. It has no effect on patterns.

    Raises:
        ConfigError: a name, pattern or parameter is not valid.
    """
    least = SMALLEST_BYTES if smallest is None else smallest
    if isinstance(value, Policy):
        return value
    if isinstance(value, str):
        return _from_text(value, least, is_explicit)
    if value is None or not hasattr(value, "items"):
        return Policy(((_EVERYTHING, parse(value)),), least, is_explicit)
    return Policy(tuple((pattern, parse(codec)) for pattern, codec in value.items()), least)


@functools.lru_cache(256)
def _from_text(text: str, smallest: int, is_explicit: bool) -> Policy:
    if len(text) > POLICY_TEXT_LIMIT:
        raise ConfigError(f"a policy of {len(text)} characters is too long; {POLICY_TEXT_LIMIT} are allowed")
    rules: list[tuple[str, Compression | None]] = []
    has_patterns = False
    for item in split_items(text):
        pattern, equals, codec = _partition(item)
        if equals and pattern == _SMALLEST_WORD:
            smallest = _bytes(codec)
        elif equals:
            rules.append((pattern, parse(codec)))
            has_patterns = True
        elif rules:
            shown = printable(item, 100)
            raise ConfigError(f"compress: {shown!r} follows another codec; write patterns, like *.bias=none, *=int8")
        else:
            rules.append((_EVERYTHING, parse(item)))
    if not rules:
        raise ConfigError("compress: there is no codec; write one like int8, or none")
    return Policy(tuple(rules), smallest, is_explicit and not has_patterns)


def split_items(text: str) -> list[str]:
    """Return the items between commas that are not in parentheses."""
    return [item.strip() for item in re.split(r",(?![^()]*\))", text) if item.strip()]


def _partition(item: str) -> tuple[str, str, str]:
    """Return pattern, "=" and codec of a rule; a codec without a pattern has its first "=", if any, in parentheses."""
    pattern, equals, codec = item.partition("=")
    return ("", "", item) if "(" in pattern else (pattern.strip(), equals, codec.strip())


def _bytes(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or len(text) > 18:
        raise ConfigError(f"compress: smallest={printable(text, 100)}; give a number of bytes, like {SMALLEST_BYTES}")
    return int(text)
