"""Operations whose shapes only their owners know: shapes travel first, in blocks of fixed size, contents second.

Lists are by place in the circle; so is `root`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from covey.base.dtypes import DTYPES
from covey.plan import choose, direct

if TYPE_CHECKING:
    from covey.runtime.buffers import Operand
    from covey.runtime.circle import Circle

    Array = np.ndarray[Any, np.dtype[Any]]

META_WORDS: Final = 66
"""dtype, number of dimensions, and numpy's limit of 64 lengths."""
_NOTHING: Final = np.empty(0, np.uint8)


def gather_all(circle: Circle, operand: Operand, algorithm: str | None = None) -> list[Array]:
    """Return everyone's array, by place in the circle."""
    operand.load()
    metas = _metas(circle, {circle.rank: operand})
    circle.execute(direct.all_gather(circle.rank, [META_WORDS] * circle.size), list(metas))
    arrays = [_empty(meta) for meta in metas]
    arrays[circle.rank][...] = operand.flat.reshape(operand.shape)
    blocks = [_bytes(array) for array in arrays]
    lengths = tuple(block.size for block in blocks)
    circle.execute(choose.all_gather(circle.rank, lengths, circle.lane_family, algorithm), blocks)
    return arrays


def gather(circle: Circle, operand: Operand, root: int) -> list[Array] | None:
    """Return everyone's array, by place, at the place `root`."""
    operand.load()
    metas = _metas(circle, {circle.rank: operand})
    circle.execute(direct.gather(circle.rank, root, [META_WORDS] * circle.size), list(metas))
    if circle.rank == root:
        arrays = [_empty(meta) for meta in metas]
        arrays[root][...] = operand.flat.reshape(operand.shape)
        blocks = [_bytes(array) for array in arrays]
    else:
        arrays = None
        blocks = [_NOTHING] * circle.size
        blocks[circle.rank] = _bytes(operand.flat)
    circle.execute(direct.gather(circle.rank, root, [block.size for block in blocks]), blocks)
    return arrays


def scatter(circle: Circle, operands: list[Operand] | None, root: int) -> Array:
    """Return this rank's of the arrays that `root` has."""
    me = circle.rank
    for operand in operands or ():
        operand.load()
    metas = _metas(circle, dict(enumerate(operands or ())))
    circle.execute(direct.scatter(me, root, [META_WORDS] * circle.size), list(metas))
    mine = _empty(metas[me])
    if operands is not None:
        blocks = [_bytes(operand.flat) for operand in operands]
        mine[...] = operands[me].flat.reshape(operands[me].shape)
    else:
        blocks = [_NOTHING] * circle.size
        blocks[me] = _bytes(mine)
    circle.execute(direct.scatter(me, root, [block.size for block in blocks]), blocks)
    return mine


def exchange_all(circle: Circle, operands: list[Operand]) -> list[Array]:
    """Give each rank one array and return what each gave to this one."""
    me = circle.rank
    for operand in operands:
        operand.load()
    out_metas = _metas(circle, dict(enumerate(operands)))
    in_metas = np.zeros_like(out_metas)
    in_metas[me] = out_metas[me]
    fixed = [META_WORDS] * circle.size
    circle.execute(direct.all_to_all(me, fixed, fixed), [*out_metas, *in_metas])
    arrays = [_empty(meta) for meta in in_metas]
    arrays[me][...] = operands[me].flat.reshape(operands[me].shape)
    outgoing = [_bytes(operand.flat) for operand in operands]
    incoming = [_bytes(array) for array in arrays]
    plan = direct.all_to_all(me, [block.size for block in outgoing], [block.size for block in incoming])
    circle.execute(plan, [*outgoing, *incoming])
    return arrays


def broadcast_bytes(circle: Circle, data: bytes, root: int) -> bytes:
    """Return `data` of `root`, whose length only it knows."""
    length = np.array([len(data)], np.uint64)
    circle.execute(choose.broadcast(circle.rank, circle.size, root, 1, 8, "tree"), [length])
    payload = np.frombuffer(data, np.uint8) if circle.rank == root else np.empty(int(length[0]), np.uint8)
    plan = choose.broadcast(circle.rank, circle.size, root, payload.size, 1, None)
    circle.execute(plan, [payload])
    return payload.tobytes()


def _metas(circle: Circle, operands: dict[int, Operand]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Return a row for each rank; those of `operands` say their dtype and shape."""
    metas = np.zeros((circle.size, META_WORDS), np.uint64)
    for rank, operand in operands.items():
        metas[rank, :2] = operand.code, len(operand.shape)
        metas[rank, 2 : 2 + len(operand.shape)] = operand.shape
    return metas


def _empty(meta: np.ndarray[Any, np.dtype[np.uint64]]) -> Array:
    """Return room for an array like the one that a row describes."""
    return np.empty([int(length) for length in meta[2 : 2 + int(meta[1])]], DTYPES[int(meta[0])])


def _bytes(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)
