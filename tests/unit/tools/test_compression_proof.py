"""The picture and the table of the training proof, from made-up curves."""

from __future__ import annotations

from xml.etree import ElementTree

from tools.compression_proof import CODECS, NONE, TRIALS, Curve, Training, Trial, draw, table

CURVES = {
    trial: Curve((4.1, 2.5, 2.0 + 0.02 * number), 1.5 + 0.01 * number, 4.0 + number, "")
    for number, trial in enumerate(TRIALS)
}


def test_every_codec_is_trained_with_and_without_feedback() -> None:
    assert TRIALS[0] == Trial(NONE, False)
    assert set(TRIALS[1:]) == {Trial(codec, has_feedback) for codec in CODECS for has_feedback in (False, True)}


def test_the_picture_has_a_panel_with_three_curves_for_each_codec() -> None:
    root = ElementTree.fromstring(draw(CURVES, Training()))
    words = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert [codec for codec in CODECS if codec not in words] == []
    lines = [element for element in root.iter() if element.tag.endswith("polyline")]
    assert len(lines) == 3 * len(CODECS)
    style = next(element.text or "" for element in root.iter() if element.tag.endswith("style"))
    assert "prefers-color-scheme: dark" in style


def test_the_table_compares_with_no_compression() -> None:
    lines = table(CURVES).splitlines()
    assert lines[2] == "| none | | 2.000 | | 1.500 | |"
    assert lines[3] == "| `fp16` | 6.0x | 2.020 (+1.0 %) | 2.040 (+2.0 %) | 1.510 (+0.7 %) | 1.520 (+1.3 %) |"
    assert len({line.count("|") for line in lines}) == 1
    assert len(lines) == 3 + len(CODECS)
