"""QR codes against codes that another encoder made (segno 1.6), and codewords of the standard's example."""

from __future__ import annotations

import hashlib

import pytest

from covey.base.errors import ConfigError
from covey.ui.qr import correction_codewords, qr_rows

HELLO_WORLD = """\
111111100010101111111
100000101110001000001
101110100010101011101
101110100010101011101
101110101011101011101
100000100111001000001
111111101010101111111
000000000000000000000
101010100100100010010
011110001001000010001
000111111101001011000
111101011001110101110
010011110101001110101
000000001010001000101
111111100000100101100
100000100110001101000
101110101100101111111
101110100011010100010
101110101111011101001
100000100001110001011
111111101101011100001
"""


def test_codes_are_those_of_another_encoder() -> None:
    assert qr_rows("HELLO WORLD") == HELLO_WORLD.splitlines()
    for length, version, digest in KNOWN:
        rows = qr_rows(("COVEY1-7K2MQ-X9F3A-0B1C2-D3E4F-" * 40)[:length])
        assert len(rows) == 17 + 4 * version
        assert hashlib.sha256("\n".join(rows).encode()).hexdigest() == digest, version


def test_the_codewords_for_correction_are_those_of_the_standard() -> None:
    data = bytes([32, 91, 11, 120, 209, 114, 220, 77, 67, 64, 236, 17, 236, 17, 236, 17])
    assert list(correction_codewords(data, 10)) == [196, 35, 39, 119, 235, 215, 231, 226, 93, 23]


def test_a_text_that_is_too_long_or_has_other_signs_is_an_error() -> None:
    assert len(qr_rows("A" * 970)) == 97
    for wrong in ("A" * 971, "a", "Ä"):
        with pytest.raises(ConfigError, match="QR code"):
            qr_rows(wrong)


KNOWN = [
    (1, 1, "f659cccc8ea08aa7c48594482f746a18a4ce4ceddd88e04dd416d8134f7d552a"),
    (20, 1, "d4288adbd6cc1cd2a95f7184bd9ee0d2b642584de513a82bac26229a1505e6c5"),
    (60, 3, "3fa97b59f01e0ae4f5eab5ea93be39f10000ac338b1265d95a333785c13b9657"),
    (95, 5, "bd9f28d14d68fcfa7e72cfff6ed61113c0ee30e8358fb02e57d892a6bd1bc314"),
    (140, 6, "80139e26a5717e9d6b6fc86f0e9287110d232d5801c75344678d5996ca5fe00c"),
    (200, 8, "2f7f4018f05db012c213a0a78157a00a6d858fa8c640c1809c7696c708d14a3d"),
    (287, 10, "16d465e8886763f1c43ebad8a151bca05d994e1f8b818d2d7086bc000411db54"),
    (375, 12, "60790bb4abc9140408a96a3bb7b619241f47683fc23381e4da36889e48cdadc1"),
    (480, 13, "ac992ae7cdc38955fff5783c9f19a700645fbbbacaa8129020f129e5694354c3"),
    (500, 14, "dce77340fe92da9d4d1f887e0ec5c5b9b121a0db4adeaa191d1143c1f09f9a03"),
    (640, 16, "39d7dd73bfa099336e92d1a97a80803adb9cc79e84632bb50efd0f0cd68589b1"),
    (790, 18, "3edd7dec1715dddc4fe3e52935ec72b09dcab4e1e64dc54c291df91b9761dd50"),
    (970, 20, "e6c280b2c029b37db2b98682fe5a313091af7b14fe17c1a29cc85fcc2c94bdac"),
]
"""Length of the text, version, and SHA-256 of the rows, with the mask that suits it best."""
