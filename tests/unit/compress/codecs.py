"""The codecs that tests run through."""

from __future__ import annotations

from covey.compress.quantisers import BF16, FP8, FP16, Int4, Int8, OneBit

CODECS = [
    *(FP16(), BF16(), FP8(), FP8("e5m2"), OneBit(), OneBit(block=8)),
    *(kind(block=block) for kind in (Int8, Int4) for block in (8, 256, 65536)),
    *(kind(stochastic=True, seed=5) for kind in (Int8, Int4)),
]
"""Every codec, with small, usual and large blocks."""
BLOCKWISE = [codec for codec in CODECS if codec.unit > 1]
EXACT_SIGNS = [codec for codec in CODECS if not isinstance(codec, OneBit)]
