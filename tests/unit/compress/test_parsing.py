"""Names of codecs: what is written parses to what it means, and back; mistakes are answered with the nearest name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest
from tests.support.in_turn import in_turn

import covey
from covey.base.errors import ConfigError
from covey.compress import parsing
from covey.compress.choice import Auto
from covey.compress.codec import Codec
from covey.compress.low_rank import PowerSGD
from covey.compress.parsing import Compression, parse, register_codec
from covey.compress.quantisers import BF16, FP8, FP16, Int4, Int8, OneBit
from covey.compress.sparse import RandomK, Threshold, TopK

if TYPE_CHECKING:
    from collections.abc import Iterator

    from covey.compress.codec import Bytes, Floats

TEXTS: dict[str, Compression] = {
    "fp16": FP16(),
    "bf16": BF16(),
    "fp8": FP8("e4m3"),
    "fp8(e5m2)": FP8("e5m2"),
    "int8": Int8(),
    "int8(block=512)": Int8(512),
    "int4(block=128, stochastic=True)": Int4(128, stochastic=True),
    "int4(stochastic=True, seed=9)": Int4(stochastic=True, seed=9),
    "onebit": OneBit(),
    "onebit(block=64)": OneBit(64),
    "topk(0.01)": TopK(0.01),
    "topk(1e-06)": TopK(1e-6),
    "randomk(0.1)": RandomK(0.1),
    "randomk(0.1, seed=3)": RandomK(0.1, seed=3),
    "threshold(0.001)": Threshold(0.001),
    "powersgd(4)": PowerSGD(4),
    "powersgd(4, seed=2)": PowerSGD(4, 2),
    "auto": Auto(),
    "auto(max_error=0.02)": Auto(0.02),
}
"""The canonical text of codecs."""


@in_turn(text=TEXTS)
def test_the_text_of_a_codec_makes_it_again(text: str) -> None:
    assert parse(text) == TEXTS[text]
    assert str(TEXTS[text]) == text
    assert parse(TEXTS[text]) is TEXTS[text]


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("int8()", Int8()),
        (" int8 ( 256 ) ", Int8()),
        ("int8(block=256, seed=0)", Int8()),
        ("fp8(e4m3)", FP8()),
        ("fp8('e5m2')", FP8("e5m2")),
        ("fp8(form=e5m2)", FP8("e5m2")),
        ("topk(ratio=0.01)", TopK(0.01)),
        ("topk(1)", TopK(1.0)),
        ("threshold(2)", Threshold(2.0)),
        ("auto(max_error=1)", Auto(1.0)),
        ("randomk(seed=3, ratio=.5)", RandomK(0.5, 3)),
    ],
)
def test_other_ways_to_write_it_mean_the_same(text: str, meaning: Codec) -> None:
    assert parse(text) == meaning
    assert parse(str(parse(text))) == meaning
    assert str(parse(text)) == str(meaning), "the text is part of a fingerprint"


def test_no_codec_is_none() -> None:
    assert parse("none") is None
    assert parse(" none ") is None
    assert parse(None) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("int9", r"no codec 'int9' \(did you mean int8\?\); there are auto, bf16, .*topk and none"),
        ("topkk(0.1)", r"did you mean topk\?"),
        ("non", r"did you mean none\?"),
        ("INT8", r"there is no codec 'INT8'"),
        ("quantum", r"no codec 'quantum'; there are"),
        ("int8(blok=256)", r"int8 has no parameter 'blok' \(did you mean block\?\); .*: block, stochastic and seed"),
        ("fp16(3)", r"fp16\(3\): too many positional arguments; write fp16\(\)"),
        ("fp16(x=3)", r"fp16 has no parameter 'x'; its parameters: none"),
        ("topk", r"missing a required argument: 'ratio'; write topk\(ratio\)"),
        ("randomk(0.1, ratio=0.2)", r"multiple values for argument 'ratio'; write randomk\(ratio, seed=0\)"),
        ("topk(0)", r"topk: ratio is 0; give the part"),
        ("topk(a+b)", r"a \+ b is no value"),
        ("topk(__import__('os'))", r"is no value"),
        ("int8(**{})", r"int8 has no parameter '\*\*'"),
        ("int8(block=256", r"'int8\(block=256' is no codec; write a name"),
        ("int8(256)(3)", r"is no codec; write a name"),
        ("", r"'' is no codec"),
        ("8", r"'8' is no codec"),
        ("int8, int4", r"'int8, int4' is no codec"),
        ("none(3)", r"there is no codec 'none'"),
        ("\x00", r"is no codec"),
        ("int8(" + "(" * 150, r"is no codec"),
        ("int8(" + "1" * 500 + ")", r"is too long for a codec"),
        ("auto(max_error=0)", r"max_error is 0; give a part of the magnitude"),
    ],
)
def test_a_mistake_is_answered_with_what_is_right(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(text)


@pytest.mark.parametrize("value", [8, 0.1, b"int8", Int8, ["int8"], object()])
def test_what_is_no_codec_is_an_error(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"is no codec; give a name like int8, an object like covey\.Int8\(\)"):
        parse(value)


@dataclass(frozen=True)
class Shifted(Codec):
    """Float32 less an offset: a codec as a user would write it."""

    offset: float = 0.0

    name: ClassVar[str] = "shifted"

    @property
    def unit(self) -> int:
        return 1

    def wire_bytes(self, count: int) -> int:
        return 4 * count

    def encode(self, x: Floats, wire: Bytes, salt: int = 0) -> None:
        wire.view(np.float32)[:] = x - np.float32(self.offset)

    def decode(self, wire: Bytes, out: Floats) -> None:
        out[:] = wire.view(np.float32) + np.float32(self.offset)

    def error_bound(self, x: Floats) -> Floats:
        return np.abs(x) * np.float32(2.0**-22)


@pytest.fixture(autouse=True)
def _forget_codecs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Codecs that a test registers are not known to the next one."""
    monkeypatch.setattr(parsing, "_factories", dict(parsing._factories))
    parsing._from_text.cache_clear()
    yield
    parsing._from_text.cache_clear()


def test_a_registered_codec_is_named_in_settings() -> None:
    covey.register_codec("shifted", Shifted)
    codec = parse("shifted(offset=1.5)")
    assert codec == Shifted(1.5)
    assert str(codec) == "shifted(offset=1.5)"
    with pytest.raises(ConfigError, match=r"did you mean shifted\?"):
        parse("shiftd")


def test_decode_add_comes_with_the_interface() -> None:
    x, out = np.arange(70_000, dtype=np.float32), np.ones(70_000, np.float32)
    wire = np.zeros(Shifted(2.0).wire_bytes(x.size), np.uint8)
    Shifted(2.0).encode(x, wire)
    Shifted(2.0).decode_add(wire, out)
    assert out.tolist() == (x + 1).tolist()


@pytest.mark.parametrize("name", ["", "Int8", "8bit", "a-b", "a b", "é", None, 3])
def test_a_name_that_cannot_be_parsed_is_refused(name: Any) -> None:
    with pytest.raises(ConfigError, match="use lower-case letters, digits and _"):
        register_codec(name, Shifted)


@pytest.mark.parametrize("name", ["int8", "topk", "none", "auto", "shifted"])
def test_a_name_that_is_taken_is_refused(name: str) -> None:
    register_codec("shifted", Shifted)
    with pytest.raises(ConfigError, match=f"there is a codec called {name} already"):
        register_codec(name, Shifted)


def test_a_factory_must_be_callable_and_make_codecs() -> None:
    with pytest.raises(ConfigError, match="give the class of the codec"):
        register_codec("shifted", Shifted(1.0))  # type: ignore[arg-type]
    register_codec("wrong", lambda: 3)  # type: ignore[arg-type, return-value]
    with pytest.raises(ConfigError, match=r"codec wrong: its factory returned 3, which is no covey.Codec"):
        parse("wrong")


def test_a_codec_whose_text_makes_another_one_is_refused_at_its_first_use() -> None:
    register_codec("shifted", Shifted)
    register_codec("moved", lambda: Shifted(2.0))
    assert parse("moved") == Shifted(2.0), "another name for a codec that has one"
    register_codec("forgets", lambda offset=0.0: Forgets(offset))
    with pytest.raises(ConfigError, match=r"codec forgets\(offset=1\): its text 'forgets' makes another codec"):
        parse("forgets(offset=1)")


class Forgets(Shifted):
    """A codec whose text leaves its parameter out."""

    def __str__(self) -> str:
        return "forgets"


@dataclass(frozen=True)
class Wordy(Shifted):
    """A codec with parameters of many kinds."""

    word: str = "a"
    other: str = "b"
    numbers: Any = (1, 2)
    last: float = field(default=0.5, kw_only=True)

    name: ClassVar[str] = "wordy"


@pytest.mark.parametrize(
    ("codec", "text"),
    [
        (Wordy(), "wordy"),
        (Wordy(word="x"), "wordy(word=x)"),
        (Wordy(1.5, "x", "y"), "wordy(offset=1.5, word=x, other=y)"),
        (Wordy(other="if"), "wordy(other='if')"),
        (Wordy(other="a, b=(c"), "wordy(other='a, b=(c')"),
        (Wordy(numbers=(1, (2, "z"))), "wordy(numbers=(1, (2, 'z')))"),
        (Wordy(last=np.float64(0.25), offset=np.float64(2)), "wordy(offset=2.0, last=0.25)"),
        (Wordy(word=""), "wordy(word='')"),
    ],
)
def test_parameters_of_all_kinds_are_written_and_read(codec: Wordy, text: str) -> None:
    register_codec("wordy", Wordy)
    assert str(codec) == text
    assert parse(text) == codec


@dataclass(frozen=True)
class Sized(Shifted):
    """A codec whose sizes can be wrong."""

    unit_is: Any = 1
    header: int = 0

    name: ClassVar[str] = "sized"

    @property
    def unit(self) -> int:
        return self.unit_is

    def wire_bytes(self, count: int) -> int:
        return self.header + 4 * count


@pytest.mark.parametrize("value", [Sized(unit_is=0), Sized(unit_is=1.5), Sized(unit_is=None)])
def test_a_codec_without_a_unit_is_refused(value: Sized) -> None:
    with pytest.raises(ConfigError, match="give the number of elements in a block, at least 1"):
        parse(value)


def test_a_codec_whose_sizes_do_not_add_up_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"codec sized\(header=8\): wire_bytes does not add up"):
        parse(Sized(header=8))
    register_codec("sized", Sized)
    with pytest.raises(ConfigError, match="wire_bytes does not add up"):
        parse("sized(header=8)")
    assert parse("sized") == Sized()


def test_a_codec_that_cannot_be_hashed_is_refused() -> None:
    with pytest.raises(ConfigError, match="Wordy cannot be used as a codec: unhashable type: 'list'"):
        parse(Wordy(numbers=[1]))


def test_an_object_that_is_no_value_is_refused() -> None:
    class Plain(Shifted):
        """Not a dataclass of its own, though its base is one: parameters would be missing from its text."""

    assert parse(Plain()) == Plain()

    class Bare(Codec):
        name = "bare"
        unit = 1

        def wire_bytes(self, count: int) -> int:
            return count

        def encode(self, x: Floats, wire: Bytes, salt: int = 0) -> None: ...

        def decode(self, wire: Bytes, out: Floats) -> None: ...

        def error_bound(self, x: Floats) -> Floats:
            return x

    with pytest.raises(ConfigError, match=r"Bare is not a frozen dataclass; put @dataclass\(frozen=True\)"):
        parse(Bare())
