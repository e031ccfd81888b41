"""Which array is compressed how."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from covey.base.errors import ConfigError
from covey.compress.choice import Auto
from covey.compress.policy import SMALLEST_BYTES, Policy, make_policy
from covey.compress.quantisers import Int4, Int8
from covey.compress.sparse import TopK

FLOAT = np.dtype(np.float32)
LARGE = 1 << 20
RULES = {"embed.*": "topk(0.01)", "*.bias": None, "*": Int8()}
TEXT = "embed.*=topk(0.01), *.bias=none, *=int8"


@pytest.mark.parametrize("value", [RULES, TEXT, TEXT.replace(" ", ""), f" {TEXT} , "])
def test_the_first_pattern_that_matches_counts(value: Any) -> None:
    policy = make_policy(value)
    assert policy.codec_for("embed.weight", LARGE, FLOAT) == TopK(0.01)
    assert policy.codec_for("embed.bias", LARGE, FLOAT) == TopK(0.01)
    assert policy.codec_for("layer.bias", LARGE, FLOAT) is None
    assert policy.codec_for("layer.weight", LARGE, FLOAT) == Int8()
    assert policy.codec_for("", LARGE, FLOAT) == Int8(), "an array without a name"
    assert policy.codec_for("EMBED.weight", LARGE, FLOAT) == Int8(), "names have a case"
    assert str(policy) == TEXT


def test_what_no_pattern_matches_is_not_compressed() -> None:
    policy = make_policy({"*.weight": "int8"})
    assert policy.codec_for("layer.bias", LARGE, FLOAT) is None
    assert policy.codec_for("layer.weight", LARGE, FLOAT) == Int8()


@pytest.mark.parametrize(
    ("value", "codec", "text"),
    [
        ("int8", Int8(), "int8"),
        (Int8(), Int8(), "int8"),
        ("int4(block=128, stochastic=True)", Int4(128, stochastic=True), "int4(block=128, stochastic=True)"),
        ("auto(max_error=0.02)", Auto(0.02), "auto(max_error=0.02)"),
        ("*=int8", Int8(), "int8"),
        ({"*": "int8"}, Int8(), "int8"),
        (None, None, "none"),
        ("none", None, "none"),
    ],
)
def test_one_codec_is_for_all_arrays(value: Any, codec: object, text: str) -> None:
    policy = make_policy(value)
    assert policy.codec_for("any", LARGE, FLOAT) == codec
    assert str(policy) == text
    assert make_policy(str(policy)) == policy
    assert make_policy(policy) is policy


def test_small_arrays_are_not_compressed() -> None:
    policy = make_policy("int8")
    assert policy.codec_for("x", SMALLEST_BYTES - 1, FLOAT) is None
    assert policy.codec_for("x", SMALLEST_BYTES, FLOAT) == Int8()
    assert make_policy("int8", smallest=0).codec_for("x", 0, FLOAT) == Int8()


@pytest.mark.parametrize("text", ["int8, smallest=4096", "*.bias=none, *=int8, smallest=4096"])
def test_the_smallest_size_is_part_of_the_text(text: str) -> None:
    policy = make_policy(text)
    assert policy.smallest == 4096
    assert str(policy) == text
    assert make_policy(str(policy)) == policy
    assert make_policy(text.rsplit(",", 1)[0], smallest=4096) == policy


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", ml_dtypes.bfloat16])
def test_all_floats_are_compressed(dtype: Any) -> None:
    assert make_policy("int8", is_explicit=True).codec_for("x", LARGE, np.dtype(dtype)) == Int8()


@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool", "complex64"])
def test_other_dtypes_are_an_error_only_if_the_call_asked_for_the_codec(dtype: str) -> None:
    for nbytes in (8, LARGE):
        with pytest.raises(TypeError, match=f"int8 compresses floats; {dtype} arrays .*: pass compress=None"):
            make_policy("int8", is_explicit=True).codec_for("x", nbytes, np.dtype(dtype))
    assert make_policy("int8").codec_for("x", LARGE, np.dtype(dtype)) is None
    assert make_policy({"*": "int8"}, is_explicit=True).codec_for("x", LARGE, np.dtype(dtype)) is None
    assert make_policy("*=int8", is_explicit=True).codec_for("x", LARGE, np.dtype(dtype)) is None
    assert make_policy(None, is_explicit=True).codec_for("x", LARGE, np.dtype(dtype)) is None


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("", "there is no codec; write one like int8, or none"),
        ("smallest=3", "there is no codec"),
        ("int8, int4", "'int4' follows another codec; write patterns"),
        ("*.bias=none, int8", "'int8' follows another codec"),
        ("a*=int9", r"did you mean int8\?"),
        ("=int8", "'' is no pattern of names"),
        ("a b=int8", "'a b' is no pattern of names"),
        ("int8, smallest=-1", "smallest=-1; give a number of bytes"),
        ("int8, smallest=" + "9" * 30, "give a number of bytes"),
        ({"a,b": "int8"}, "'a,b' is no pattern of names"),
        ({3: "int8"}, "3 is no pattern of names"),
        ({"smallest": "int8"}, "'smallest' is no pattern of names"),
        ({"*": 8}, "8 is no codec"),
        (8, "8 is no codec"),
        ("int8," * 3000, "a policy of 15000 characters is too long"),
    ],
)
def test_a_mistake_is_named(value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_policy(value)


@pytest.mark.parametrize("smallest", [-1, 1.5, True, "8"])
def test_the_smallest_size_is_a_number_of_bytes(smallest: Any) -> None:
    with pytest.raises(ConfigError, match="give a number of bytes"):
        make_policy("int8", smallest=smallest)


def test_policies_are_values() -> None:
    assert make_policy(RULES) == make_policy(TEXT)
    assert hash(make_policy(RULES)) == hash(make_policy(TEXT))
    assert make_policy(TEXT) != make_policy("int8")
    assert str(Policy(())) == "none"
