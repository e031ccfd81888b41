"""QR codes of join codes (ISO/IEC 18004): digits and capitals, packed in pairs; level M, versions 1 to 20. Pure."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Final

from covey.base.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

_ALPHANUMERIC: Final = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ $%*+-./:"
_VERSION_BLOCKS: Final = (1, 1, 1, 2, 2, 4, 4, 4, 5, 5, 5, 8, 9, 9, 10, 10, 11, 13, 14, 16)
"""Blocks of each version, from version 1 on, at level M."""
_CORRECTION: Final = (10, 16, 26, 18, 24, 16, 18, 22, 22, 26, 30, 22, 22, 24, 24, 28, 28, 26, 26, 26)
"""Codewords for correction in each block of them."""
_LEVEL_M: Final = 0
QUIET: Final = 4
"""Light modules that belong around a code."""

Grid = list[list[int]]


def qr_rows(text: str) -> list[str]:
    """Return the code of a text as rows of "1" (dark) and "0", without the quiet zone.

    Raises:
        ConfigError: the text is too long for version 20, or has other signs than the alphanumeric mode.
    """
    if not set(text) <= set(_ALPHANUMERIC):
        raise ConfigError("a QR code of covey has digits, capital letters and a few signs only")
    for version in range(1, len(_VERSION_BLOCKS) + 1):
        bits = _bits(text, version)
        if len(bits) <= 8 * _data_codewords(version):
            break
    else:
        raise ConfigError(f"a text of {len(text)} characters is too long for a QR code")
    codewords = _interleaved(_padded(bits, version), version)
    grid, is_fixed = _patterns(version)
    _place(grid, is_fixed, codewords)
    masked = [_masked(grid, is_fixed, version, mask) for mask in range(8)]
    best = min(masked, key=_penalty)
    return ["".join(map(str, row)) for row in best]


# Bits and codewords


def _modules(version: int) -> int:
    """Return how many modules of a version hold data and correction."""
    size = 17 + 4 * version
    aligned = len(_alignment(version))
    fixed = 3 * 64 + 2 * (size - 16) + 31  # finders with their borders, timing, format with the dark module
    if aligned:
        fixed += 25 * (aligned**2 - 3) - 10 * (aligned - 2)  # those on timing patterns share five modules with them
    return size**2 - fixed - (36 if version >= 7 else 0)


def _data_codewords(version: int) -> int:
    return _modules(version) // 8 - _VERSION_BLOCKS[version - 1] * _CORRECTION[version - 1]


def _bits(text: str, version: int) -> list[int]:
    """Return mode, length and text as bits."""
    bits: list[int] = []

    def put(value: int, count: int) -> None:
        bits.extend(value >> place & 1 for place in range(count - 1, -1, -1))

    put(0b0010, 4)
    put(len(text), 9 if version < 10 else 11)
    for first, second in zip(text[::2], text[1::2], strict=False):
        put(_ALPHANUMERIC.index(first) * 45 + _ALPHANUMERIC.index(second), 11)
    if len(text) % 2:
        put(_ALPHANUMERIC.index(text[-1]), 6)
    return bits


def _padded(bits: list[int], version: int) -> bytes:
    """Return the data codewords: the bits, a terminator, and padding."""
    room = _data_codewords(version)
    bits = bits + [0] * min(4, 8 * room - len(bits))
    bits += [0] * (-len(bits) % 8)
    data = [int("".join(map(str, bits[at : at + 8])), 2) for at in range(0, len(bits), 8)]
    return bytes(data + [0xEC if at % 2 == 0 else 0x11 for at in range(room - len(data))])


def _interleaved(data: bytes, version: int) -> bytes:
    """Return all codewords in the order in which they are placed: byte by byte from each block in turn."""
    blocks, correction = _VERSION_BLOCKS[version - 1], _CORRECTION[version - 1]
    short, longer = divmod(len(data), blocks)
    pieces, at = [], 0
    for number in range(blocks):
        length = short + (number >= blocks - longer)
        pieces.append(data[at : at + length])
        at += length
    checks = [correction_codewords(piece, correction) for piece in pieces]
    mixed = [piece[at] for at in range(short + 1) for piece in pieces if at < len(piece)]
    return bytes(mixed + [check[at] for at in range(correction) for check in checks])


def correction_codewords(data: bytes, count: int) -> bytes:
    """Return the Reed-Solomon codewords of a block, over GF(256) with the polynomial 0x11d."""
    generator, root = [1], 1
    for _ in range(count):
        generator = [_times(left, root) ^ right for left, right in zip([0, *generator], [*generator, 0], strict=True)]
        root = _times(root, 2)
    rest = [0] * count
    for byte in data:
        factor = byte ^ rest[0]
        rest = [each ^ _times(factor, by) for each, by in zip([*rest[1:], 0], generator[1:], strict=True)]
    return bytes(rest)


def _times(one: int, other: int) -> int:
    """Multiply in GF(256)."""
    product = 0
    while other:
        if other & 1:
            product ^= one
        one = one << 1 ^ (0x11D if one & 0x80 else 0)
        other >>= 1
    return product


# Modules


def _alignment(version: int) -> list[int]:
    """Return the rows, which are also the columns, of the centres of alignment patterns."""
    if version == 1:
        return []
    count = version // 7 + 2
    last = 4 * version + 10
    step = -(-(last - 6) // (count - 1))
    step += step % 2
    return [6, *(last - step * at for at in range(count - 2, -1, -1))]


def _patterns(version: int) -> tuple[Grid, Grid]:
    """Return a grid with what does not depend on the data, and which modules that are."""
    size = 17 + 4 * version
    grid, is_fixed = [[0] * size for _ in range(size)], [[0] * size for _ in range(size)]

    def put(row: int, column: int, value: int) -> None:
        if 0 <= row < size and 0 <= column < size:
            grid[row][column], is_fixed[row][column] = value, 1

    for at in range(size):
        put(6, at, 1 - at % 2)
        put(at, 6, 1 - at % 2)
    for row, column in ((3, 3), (3, size - 4), (size - 4, 3)):
        for down in range(-4, 5):
            for right in range(-4, 5):
                put(row + down, column + right, int(max(abs(down), abs(right)) not in (2, 4)))
    centres = _alignment(version)
    for row in centres:
        for column in centres:
            if (row, column) in ((6, 6), (6, size - 7), (size - 7, 6)):
                continue
            for down in range(-2, 3):
                for right in range(-2, 3):
                    put(row + down, column + right, int(max(abs(down), abs(right)) != 1))
    _put_format(put, size, 0)
    if version >= 7:
        rest = version
        for _ in range(12):
            rest = rest << 1 ^ (rest >> 11) * 0x1F25
        bits = version << 12 | rest
        for at in range(18):
            put(at // 3, size - 11 + at % 3, bits >> at & 1)
            put(size - 11 + at % 3, at // 3, bits >> at & 1)
    return grid, is_fixed


def _put_format(put: Callable[[int, int, int], None], size: int, mask: int) -> None:
    """Put the level and the mask, twice, and the module that is always dark."""
    data = _LEVEL_M << 3 | mask
    rest = data
    for _ in range(10):
        rest = rest << 1 ^ (rest >> 9) * 0x537
    bits = (data << 10 | rest) ^ 0x5412
    for at in range(15):
        bit = bits >> at & 1
        row = at if at < 6 else at + 1 if at < 8 else None
        put(row if row is not None else size - 15 + at, 8, bit)
        put(8, size - 1 - at if at < 8 else 7 if at == 8 else 14 - at, bit)
    put(size - 8, 8, 1)


def _place(grid: Grid, is_fixed: Grid, codewords: bytes) -> None:
    """Put the codewords, two columns at a time, upwards and downwards in turn, from the right."""
    size = len(grid)
    bits = (byte >> place & 1 for byte in codewords for place in range(7, -1, -1))
    is_upwards = True
    for right in (*range(size - 1, 6, -2), 5, 3, 1):
        for row in range(size - 1, -1, -1) if is_upwards else range(size):
            for column in (right, right - 1):
                if not is_fixed[row][column]:
                    grid[row][column] = next(bits, 0)
        is_upwards = not is_upwards


def _masked(grid: Grid, is_fixed: Grid, version: int, mask: int) -> Grid:
    """Return the grid with a mask over the data, and its number in the format."""
    flips: tuple[Callable[[int, int], bool], ...] = (
        lambda row, column: (row + column) % 2 == 0,
        lambda row, column: row % 2 == 0,
        lambda row, column: column % 3 == 0,
        lambda row, column: (row + column) % 3 == 0,
        lambda row, column: (row // 2 + column // 3) % 2 == 0,
        lambda row, column: row * column % 2 + row * column % 3 == 0,
        lambda row, column: (row * column % 2 + row * column % 3) % 2 == 0,
        lambda row, column: ((row + column) % 2 + row * column % 3) % 2 == 0,
    )
    size, flip = len(grid), flips[mask]
    masked = [
        [grid[row][column] ^ int(not is_fixed[row][column] and flip(row, column)) for column in range(size)]
        for row in range(size)
    ]

    def put(row: int, column: int, value: int) -> None:
        masked[row][column] = value

    _put_format(put, size, mask)
    return masked


def _penalty(grid: Grid) -> int:
    """Return how hard a grid is to read, by the rules of the standard."""
    size, total = len(grid), 0
    lines = ["".join(map(str, row)) for row in grid]
    columns = ["".join(map(str, column)) for column in zip(*grid, strict=True)]
    for line in (*lines, *columns):
        run = 1
        for before, bit in zip(line, line[1:] + "x", strict=True):
            if before == bit:
                run += 1
                continue
            total += run - 2 if run >= 5 else 0
            run = 1
        for at in range(size - 10):
            if line[at : at + 11] in ("10111010000", "00001011101"):
                total += 40
    for upper, lower in itertools.pairwise(lines):
        total += 3 * sum(upper[at] == upper[at + 1] == lower[at] == lower[at + 1] for at in range(size - 1))
    dark = sum(map(sum, grid))
    return total + 10 * (abs(20 * dark - 10 * size**2) // size**2)
