"""Operations whose shapes only their owners know: shapes travel first, in blocks of fixed size, contents second."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from covey.base.dtypes import DTYPES
from covey.plan import choose, direct

if TYPE_CHECKING:
    from covey.runtime.buffers import Operand
    from covey.runtime.engine import Engine

    Array = np.ndarray[Any, np.dtype[Any]]

META_WORDS: Final = 66
"""dtype, number of dimensions, and numpy's limit of 64 lengths."""
_NOTHING: Final = np.empty(0, np.uint8)


def gather_all(engine: Engine, operand: Operand, algorithm: str | None = None) -> list[Array]:
    """Return everyone's array, by rank."""
    operand.load()
    metas = _metas(engine, {engine.rank: operand})
    engine.execute(direct.all_gather(engine.rank, [META_WORDS] * engine.size), list(metas))
    arrays = [_empty(meta) for meta in metas]
    arrays[engine.rank][...] = operand.flat.reshape(operand.shape)
    blocks = [_bytes(array) for array in arrays]
    lengths = tuple(block.size for block in blocks)
    engine.execute(choose.all_gather(engine.rank, lengths, engine.lane_family, algorithm), blocks)
    return arrays


def gather(engine: Engine, operand: Operand, root: int) -> list[Array] | None:
    """Return everyone's array, by rank, on `root`."""
    operand.load()
    metas = _metas(engine, {engine.rank: operand})
    engine.execute(direct.gather(engine.rank, root, [META_WORDS] * engine.size), list(metas))
    if engine.rank == root:
        arrays = [_empty(meta) for meta in metas]
        arrays[root][...] = operand.flat.reshape(operand.shape)
        blocks = [_bytes(array) for array in arrays]
    else:
        arrays = None
        blocks = [_NOTHING] * engine.size
        blocks[engine.rank] = _bytes(operand.flat)
    engine.execute(direct.gather(engine.rank, root, [block.size for block in blocks]), blocks)
    return arrays


def scatter(engine: Engine, operands: list[Operand] | None, root: int) -> Array:
    """Return this rank's of the arrays that `root` has."""
    me = engine.rank
    for operand in operands or ():
        operand.load()
    metas = _metas(engine, dict(enumerate(operands or ())))
    engine.execute(direct.scatter(me, root, [META_WORDS] * engine.size), list(metas))
    mine = _empty(metas[me])
    if operands is not None:
        blocks = [_bytes(operand.flat) for operand in operands]
        mine[...] = operands[me].flat.reshape(operands[me].shape)
    else:
        blocks = [_NOTHING] * engine.size
        blocks[me] = _bytes(mine)
    engine.execute(direct.scatter(me, root, [block.size for block in blocks]), blocks)
    return mine


def exchange_all(engine: Engine, operands: list[Operand]) -> list[Array]:
    """Give each rank one array and return what each gave to this one."""
    me = engine.rank
    for operand in operands:
        operand.load()
    out_metas = _metas(engine, dict(enumerate(operands)))
    in_metas = np.zeros_like(out_metas)
    in_metas[me] = out_metas[me]
    fixed = [META_WORDS] * engine.size
    engine.execute(direct.all_to_all(me, fixed, fixed), [*out_metas, *in_metas])
    arrays = [_empty(meta) for meta in in_metas]
    arrays[me][...] = operands[me].flat.reshape(operands[me].shape)
    outgoing = [_bytes(operand.flat) for operand in operands]
    incoming = [_bytes(array) for array in arrays]
    plan = direct.all_to_all(me, [block.size for block in outgoing], [block.size for block in incoming])
    engine.execute(plan, [*outgoing, *incoming])
    return arrays


def broadcast_bytes(engine: Engine, data: bytes, root: int) -> bytes:
    """Return `data` of `root`, whose length only it knows."""
    length = np.array([len(data)], np.uint64)
    engine.execute(choose.broadcast(engine.rank, engine.size, root, 1, 8, "tree"), [length])
    payload = np.frombuffer(data, np.uint8) if engine.rank == root else np.empty(int(length[0]), np.uint8)
    plan = choose.broadcast(engine.rank, engine.size, root, payload.size, 1, None)
    engine.execute(plan, [payload])
    return payload.tobytes()


def _metas(engine: Engine, operands: dict[int, Operand]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Return a row for each rank; those of `operands` say their dtype and shape."""
    metas = np.zeros((engine.size, META_WORDS), np.uint64)
    for rank, operand in operands.items():
        metas[rank, :2] = operand.code, len(operand.shape)
        metas[rank, 2 : 2 + len(operand.shape)] = operand.shape
    return metas


def _empty(meta: np.ndarray[Any, np.dtype[np.uint64]]) -> Array:
    """Return room for an array like the one that a row describes."""
    return np.empty([int(length) for length in meta[2 : 2 + int(meta[1])]], DTYPES[int(meta[0])])


def _bytes(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)
