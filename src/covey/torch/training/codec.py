"""Rows of floats, packed into fewer bytes."""

from __future__ import annotations

from typing import Final

import torch

BLOCK: Final = 256
"""Elements that share one scale as int8. The scales add 1.6 % to the bytes."""


def pack_int8(row: torch.Tensor) -> torch.Tensor:
    """Return a row of floats as bytes: an int8 per element, then a float32 scale per block of `BLOCK` elements.

    A block with an element that is not finite unpacks to no finite element, so that the problem stays visible.
    """
    blocks = _blocks(row)
    scales = blocks.abs().amax(dim=1, keepdim=True).to(torch.float32) / 127
    levels = torch.where(scales > 0, blocks / scales, 0).round().clamp(-127, 127).to(torch.int8)
    return torch.cat([levels.view(-1).view(torch.uint8), scales.view(-1).view(torch.uint8)])


def unpack_int8(packed: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the row that `pack_int8` packed, in the length and dtype of `like`."""
    count = -(-like.numel() // BLOCK)
    levels, scales = packed.split([count * BLOCK, count * 4])
    blocks = levels.view(torch.int8).view(count, BLOCK).to(like.dtype) * scales.clone().view(torch.float32).view(-1, 1)
    return blocks.view(-1)[: like.numel()].to(like.dtype)


def _blocks(row: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(row, (0, -row.numel() % BLOCK)).view(-1, BLOCK)
