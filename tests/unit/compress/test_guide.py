"""The table of docs/guides/compression.md says what the codecs do."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from tests.unit.compress.arrays import around, normal
from tests.unit.compress.codecs import CODECS

from covey.compress.codec import Codec
from covey.compress.parsing import parse
from covey.compress.quantisers import Int8

PAGE = (Path(__file__).parents[3] / "docs" / "guides" / "compression.md").read_text()
ROWS = re.findall(r"^\| `(.+?)` \| 1/([\d.]+) \| ([\d.]+) \|", PAGE, re.MULTILINE)


def test_the_table_has_every_codec() -> None:
    assert {text.partition("(")[0] for text, _, _ in ROWS} == {codec.name for codec in CODECS}


@pytest.mark.parametrize(("text", "ratio", "error"), ROWS)
def test_a_row_has_the_ratio_and_the_error_of_its_codec(text: str, ratio: str, error: str) -> None:
    codec, x = parse(text), normal(1 << 18, 1)
    assert isinstance(codec, Codec)
    assert x.nbytes / codec.wire_bytes(x.size) == pytest.approx(float(ratio), rel=0.02)
    measured = np.sqrt(np.mean((around(codec, x) - x) ** 2.0) / np.mean(x**2.0))
    assert measured == pytest.approx(float(error), rel=0.05)


def test_smaller_blocks_have_more_bytes_and_smaller_errors() -> None:
    x = normal(1 << 16, 2)
    sizes = [Int8(block=block).wire_bytes(x.size) for block in (64, 256)]
    errors = [float(np.abs(around(Int8(block=block), x) - x).mean()) for block in (64, 256)]
    assert sizes[0] > sizes[1]
    assert errors[0] < errors[1]


def test_the_texts_of_the_page_are_codecs() -> None:
    texts = re.findall(r"`\"?((?:int|fp|bf|topk|threshold|randomk|powersgd|onebit)\w*(?:\([^`]*?\))?)\"?`", PAGE)
    assert len(texts) > 15
    for text in texts:
        if "(" in text or text not in ("topk", "threshold", "randomk", "powersgd"):
            assert parse(text) is not None
