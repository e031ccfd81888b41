"""Operations on arrays whose shapes only their owners know: ranks exchange shapes first, then contents.

A shape that another rank sends is checked before it is used; an invalid one ends the group, with an error that names
the rank. Lists are in the order of slots, and `root` is a slot.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from covey.base.dtypes import DTYPES
from covey.base.errors import RemoteProtocolError
from covey.plan import choose, direct
from covey.runtime.buffers import BYTES
from covey.wire.message_header import array_bytes

if TYPE_CHECKING:
    from covey.base.numbers import Slot
    from covey.runtime.buffers import Operand
    from covey.runtime.collectives.attempt import Attempt

    Array = np.ndarray[Any, np.dtype[Any]]

MAX_NDIM: Final = 64
"""The most dimensions of a numpy array."""
META_WORDS: Final = 2 + MAX_NDIM
"""dtype, number of dimensions, and their lengths."""
PHYSICAL_BYTES: Final = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
_NOTHING: Final = np.empty(0, np.uint8)


class Wanted(NamedTuple):
    """What the arrays of other ranks must be; a field that is None allows anything."""

    code: int | None = None
    ndim: int | None = None
    shape: tuple[int, ...] | None = None
    most_bytes: int | None = None


ANYTHING: Final = Wanted()
ENCODED: Final = Wanted(code=BYTES, ndim=1)
"""An encoded value."""


def gather_all(
    attempt: Attempt, operand: Operand, algorithm: str | None = None, *, wanted: Wanted = ANYTHING
) -> list[Array]:
    """Return the array of every slot; all have the dtype of `operand`."""
    operand.load()
    wanted = wanted._replace(code=operand.code)
    metas = _metas(attempt, {attempt.slot: operand})
    attempt.execute(direct.all_gather(attempt.slot, [META_WORDS] * attempt.size), list(metas))
    alike = (metas == metas[attempt.slot]).all(axis=1)  # usually all of them, and then no row needs a check
    arrays = [
        np.empty(operand.shape, operand.flat.dtype) if alike[slot] else _room(attempt, slot, meta, wanted)
        for slot, meta in zip(attempt.slots, metas, strict=True)
    ]
    arrays[attempt.slot][...] = operand.flat.reshape(operand.shape)
    blocks = [_bytes(array) for array in arrays]
    lengths = tuple(block.size for block in blocks)
    attempt.execute(choose.all_gather(attempt.slot, lengths, attempt.lane_family, algorithm), blocks)
    return arrays


def gather(attempt: Attempt, operand: Operand, root: Slot, *, wanted: Wanted = ANYTHING) -> list[Array] | None:
    """Return the array of every slot at the slot `root`, None elsewhere; all have the dtype of `operand`."""
    operand.load()
    wanted = wanted._replace(code=operand.code)
    metas = _metas(attempt, {attempt.slot: operand})
    attempt.execute(direct.gather(attempt.slot, root, [META_WORDS] * attempt.size), list(metas))
    if attempt.slot == root:
        arrays = [_room(attempt, slot, meta, wanted) for slot, meta in zip(attempt.slots, metas, strict=True)]
        arrays[root][...] = operand.flat.reshape(operand.shape)
        blocks = [_bytes(array) for array in arrays]
    else:
        arrays = None
        blocks = [_NOTHING] * attempt.size
        blocks[attempt.slot] = _bytes(operand.flat)
    attempt.execute(direct.gather(attempt.slot, root, [block.size for block in blocks]), blocks)
    return arrays


def scatter(attempt: Attempt, operands: list[Operand] | None, root: Slot, *, wanted: Wanted = ANYTHING) -> Array:
    """Return this rank's array of those that `root` passes."""
    me = attempt.slot
    for operand in operands or ():
        operand.load()
    metas = _metas(attempt, dict(enumerate(operands or ())))
    attempt.execute(direct.scatter(me, root, [META_WORDS] * attempt.size), list(metas))
    mine = _room(attempt, root, metas[me], wanted)
    if operands is not None:
        blocks = [_bytes(operand.flat) for operand in operands]
        mine[...] = operands[me].flat.reshape(operands[me].shape)
    else:
        blocks = [_NOTHING] * attempt.size
        blocks[me] = _bytes(mine)
    attempt.execute(direct.scatter(me, root, [block.size for block in blocks]), blocks)
    return mine


def exchange_all(attempt: Attempt, operands: list[Operand]) -> list[Array]:
    """Send one array to each slot, and return those that the slots sent to this one."""
    me = attempt.slot
    for operand in operands:
        operand.load()
    out_metas = _metas(attempt, dict(enumerate(operands)))
    in_metas = np.zeros_like(out_metas)
    in_metas[me] = out_metas[me]
    fixed = [META_WORDS] * attempt.size
    attempt.execute(direct.all_to_all(me, fixed, fixed), [*out_metas, *in_metas])
    arrays = [_room(attempt, slot, meta, ANYTHING) for slot, meta in zip(attempt.slots, in_metas, strict=True)]
    arrays[me][...] = operands[me].flat.reshape(operands[me].shape)
    outgoing = [_bytes(operand.flat) for operand in operands]
    incoming = [_bytes(array) for array in arrays]
    plan = direct.all_to_all(me, [block.size for block in outgoing], [block.size for block in incoming])
    attempt.execute(plan, [*outgoing, *incoming])
    return arrays


def broadcast_bytes(attempt: Attempt, data: bytes, root: Slot) -> bytes:
    """Return `data` of the slot `root`; the other ranks need not know its length."""
    length = np.array([len(data)], np.uint64)
    attempt.execute(choose.broadcast(attempt.slot, attempt.size, root, 1, 8, "tree"), [length])
    if attempt.slot == root:
        payload = np.frombuffer(data, np.uint8)
    else:
        payload = _allocated(attempt, root, BYTES, (int(length[0]),))
    plan = choose.broadcast(attempt.slot, attempt.size, root, payload.size, 1, None)
    attempt.execute(plan, [payload])
    return payload.tobytes()


def _metas(attempt: Attempt, operands: dict[int, Operand]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Return a row for each slot; the rows of `operands` hold dtype and shape."""
    metas = np.zeros((attempt.size, META_WORDS), np.uint64)
    for slot, operand in operands.items():
        metas[slot, :2] = operand.code, len(operand.shape)
        metas[slot, 2 : 2 + len(operand.shape)] = operand.shape
    return metas


def _room(attempt: Attempt, slot: Slot, meta: np.ndarray[Any, np.dtype[np.uint64]], wanted: Wanted) -> Array:
    """Return memory for the array that a row describes; end the group if the row is invalid."""
    code, ndim = int(meta[0]), int(meta[1])
    if code >= len(DTYPES) or ndim > MAX_NDIM or meta[2 + ndim :].any():
        attempt.reject(slot, f"an invalid description of an array: dtype {code}, {ndim} dimensions")
    shape = tuple(map(int, meta[2 : 2 + ndim]))
    if wanted.code not in (None, code) or wanted.ndim not in (None, ndim) or wanted.shape not in (None, shape):
        attempt.reject(slot, f"{DTYPES[code].name}{list(shape)}, which does not fit this operation")
    if wanted.most_bytes is not None and _size(attempt, slot, code, shape) > wanted.most_bytes:
        attempt.reject(slot, f"{DTYPES[code].name}{list(shape)}, and up to {wanted.most_bytes} bytes are allowed")
    return _allocated(attempt, slot, code, shape)


def _size(attempt: Attempt, slot: Slot, code: int, shape: tuple[int, ...]) -> int:
    try:
        return array_bytes(code, shape)
    except RemoteProtocolError as error:
        attempt.reject(slot, f"an invalid description of an array: {error}")


def _allocated(attempt: Attempt, slot: Slot, code: int, shape: tuple[int, ...]) -> Array:
    """Return memory for the array that a slot is about to send; end the group if there is not enough."""
    nbytes = _size(attempt, slot, code, shape)
    try:
        if nbytes <= PHYSICAL_BYTES:  # more can only be a mistake, but the kernel might grant it
            return np.empty(shape, DTYPES[code])
    except MemoryError:
        pass
    attempt.disagree_with(slot, f"{DTYPES[code].name}{list(shape)}, and there is no memory for {nbytes} bytes")


def _bytes(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)
