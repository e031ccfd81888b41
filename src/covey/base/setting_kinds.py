"""The kinds of values that settings have: how a value is read from text, from covey.toml or from an argument.

A kind returns the value in its own form, or raises ConfigError; `label` says in that error where the value stands.
"""

from __future__ import annotations

import math
import numbers
import re
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from covey.base.errors import ConfigError
from covey.base.numbers import PRIORITIES

YEAR_SECONDS: Final = 365 * 86400.0
_BYTE_UNITS: Final = {"": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
_RATE_UNITS: Final = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9}


_Read = TypeVar("_Read", covariant=True)


class Kind(Protocol[_Read]):
    """A kind of value."""

    @property
    def words(self) -> str:
        """What values of this kind are, for the documentation."""

    @property
    def metavar(self) -> str:
        """What stands for a value in the help of a command; "" if its option takes none."""

    def read(self, label: str, value: Any) -> _Read:
        """Return a value of this kind; raise ConfigError if `value` is none."""


class Seconds(NamedTuple):
    """A duration above 0, at most a year."""

    least: float = 0.0

    @property
    def words(self) -> str:
        return f"seconds, at least {self.least:g}" if self.least else "seconds"

    @property
    def metavar(self) -> str:
        return "S"

    def read(self, label: str, value: Any) -> float:
        if isinstance(value, str):
            try:
                value = float(value)
            except ValueError:
                raise ConfigError(f"{label}={value!r} is not a number of seconds") from None
        seconds = check_timeout(value, label)
        if seconds < self.least:
            raise ConfigError(f"{label}={value!r} must be at least {self.least:g} seconds")
        return seconds


class ByteCount(NamedTuple):
    """A number of bytes, or text like `4MiB`."""

    least: int
    most: int
    multiple: int = 1

    @property
    def words(self) -> str:
        return f"bytes, {show_bytes(self.least)} to {show_bytes(self.most)}" + (
            f", a multiple of {self.multiple}" if self.multiple > 1 else ""
        )

    @property
    def metavar(self) -> str:
        return "BYTES"

    def read(self, label: str, value: Any) -> int:
        size = value
        if isinstance(value, str) and (match := re.fullmatch(r"([0-9]{1,15}) ?([KMG]iB|)", value, re.IGNORECASE)):
            size = int(match[1]) * _BYTE_UNITS[match[2].lower()]
        if isinstance(size, bool) or not isinstance(size, numbers.Integral):
            raise ConfigError(f"{label}={value!r} is not a number of bytes; write 65536, 64KiB or 4MiB")
        size = int(size)
        if not self.least <= size <= self.most or size % self.multiple:
            raise ConfigError(f"{label}={value!r} must be {self.words}")
        return size


class Rate(NamedTuple):
    """Bits a second, or text like `20M`; 0 is no limit."""

    least: int
    most: int

    @property
    def words(self) -> str:
        return (
            f"bits a second, `{show_rate(self.least)}` to `{show_rate(self.most)}`, or bytes a second as in `2.5MB`; "
            "`0`: no limit"
        )

    @property
    def metavar(self) -> str:
        return "RATE"

    def read(self, label: str, value: Any) -> int:
        rate = value
        if isinstance(value, str):
            match = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,6})?) ?(?:([kKMG])(bit|B)?|(bit|B))(?:/s)?", value)
            if match is not None:
                from decimal import Decimal  # slow to load, and few programs have a limit

                unit = _RATE_UNITS[match[2] or ""] * (8 if "B" in (match[3], match[4]) else 1)
                rate = round(Decimal(match[1]) * unit)
            elif value == "0":
                rate = 0
        if isinstance(rate, bool) or not isinstance(rate, numbers.Integral):
            raise ConfigError(
                f"{label}={value!r} is not a rate; write 20M or 20Mbit for 20 million bits a second, 2.5MB for 2.5 "
                "million bytes a second, or 0"
            )
        rate = int(rate)
        if rate and not self.least <= rate <= self.most:
            raise ConfigError(f"{label}={value!r} must be {self.words.replace('`', '')}")
        return rate


class OneOf(NamedTuple):
    """One of a few words."""

    known: tuple[str, ...]
    hidden: tuple[str, ...] = ()
    """Words that are accepted but not for people to use."""

    @property
    def words(self) -> str:
        return " or ".join(f"`{word}`" for word in self.known)

    @property
    def metavar(self) -> str:
        return "|".join(self.known)

    def read(self, label: str, value: Any) -> Any:
        if value not in (*self.known, *self.hidden):
            raise ConfigError(f"{label}={value!r} is unknown; use one of {', '.join(self.known)}")
        return str(value)


class Flag(NamedTuple):
    """On or off."""

    words: str = "1 or 0"

    @property
    def metavar(self) -> str:
        return ""

    def read(self, label: str, value: Any) -> bool:
        word = ("1" if value else "0") if isinstance(value, bool) else str(value).lower()
        if word in ("1", "true", "yes"):
            return True
        if word in ("", "0", "false", "no"):
            return False
        raise ConfigError(f"{label}={value!r} must be 1 or 0")


class AnyText(NamedTuple):
    """Any text."""

    words: str = "text"

    @property
    def metavar(self) -> str:
        return "TEXT"

    def read(self, label: str, value: Any) -> str:
        if not isinstance(value, str):
            raise ConfigError(f"{label}={value!r} must be text")
        return value


class FilePath(NamedTuple):
    """The path of a file or a folder."""

    words: str = "a path"

    @property
    def metavar(self) -> str:
        return "FILE"

    def read(self, label: str, value: Any) -> str:
        return AnyText(self.words).read(label, value)


class Listing(NamedTuple):
    """Texts that are separated by commas; a list in covey.toml and in Python."""

    words: str = "a list, separated by commas"

    @property
    def metavar(self) -> str:
        return "A,B"

    def read(self, label: str, value: Any) -> str:
        if isinstance(value, list | tuple) and all(isinstance(each, str) for each in value):
            return ",".join(value)
        if not isinstance(value, str):
            raise ConfigError(f"{label}={value!r} must be a list of texts")
        return value


class Number(NamedTuple):
    """A whole number, or a word instead of one."""

    least: int
    most: int
    word: str = ""

    @property
    def words(self) -> str:
        return (f"`{self.word}` or " if self.word else "") + f"a number from {self.least} to {self.most}"

    @property
    def metavar(self) -> str:
        return "N"

    def read(self, label: str, value: Any) -> str:
        text = str(value)
        if text == self.word or (text.isascii() and text.isdigit() and self.least <= int(text) <= self.most):
            return text
        raise ConfigError(f"{label}={value!r} must be {self.words.replace('`', '')}")


class Whole(Number):
    """A whole number, as such."""

    def read(self, label: str, value: Any) -> Any:
        text = super().read(label, value)
        if not text:
            raise ConfigError(f"{label}={value!r} must be {self.words}")
        return int(text)


def check_timeout(timeout: float, what: str = "timeout") -> float:
    """Return `timeout` as a float, at most a year; raise ConfigError unless it is a number above 0."""
    if type(timeout) is float and 0.0 < timeout <= YEAR_SECONDS:  # the common case, kept short: this is paid per call
        return timeout
    if isinstance(timeout, bool) or not isinstance(timeout, numbers.Real) or math.isnan(timeout) or timeout <= 0:
        raise ConfigError(f"{what}={timeout!r} must be a number of seconds above 0")
    return min(float(timeout), YEAR_SECONDS)


def check_priority(priority: str) -> int:
    """Return the class of a priority; raise ConfigError unless it is one of PRIORITIES."""
    if priority not in PRIORITIES:
        raise ConfigError(f"priority={priority!r} must be one of {', '.join(map(repr, PRIORITIES))}")
    return PRIORITIES.index(priority)


def show_bytes(count: int) -> str:
    """Return a number of bytes as a person would write it."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count and count % size == 0:
            return f"{count // size}{unit}"
    return str(count)


def show_rate(bits: int) -> str:
    """Return bits a second as a person would write them."""
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if bits and bits % size == 0:
            return f"{bits // size}{unit}"
    return f"{bits}bit" if bits else "0"
