"""Operations on arrays whose shapes only their owners know: ranks exchange records first, then the contents.

A record has a fixed size. It describes an array, and holds its contents if they are small; then they do not travel
again. A shape that another rank sends is checked before it is used; an invalid one ends the group, with an error that
names the rank. Lists are in the order of slots, and `root` is a slot.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from covey.base.arithmetic import DTYPES
from covey.base.errors import RemoteProtocolError
from covey.plan import choose, direct
from covey.plan.moves import Plan
from covey.runtime.buffers import BYTES
from covey.wire.header import SMALL_BYTES
from covey.wire.message_header import array_bytes

if TYPE_CHECKING:
    from covey.base.numbers import Rank, Slot
    from covey.runtime.buffers import Operand
    from covey.runtime.collectives.attempt import Attempt

    Array = np.ndarray[Any, np.dtype[Any]]

MAX_ARRAY_NDIM: Final = 64
"""The most dimensions of a numpy array."""
META_WORDS: Final = 2 + MAX_ARRAY_NDIM
"""dtype, number of dimensions, and their lengths."""
RECORD_WORDS: Final = SMALL_BYTES // 8
"""The words of a record: the description, then the contents if there is room."""
RECORD_INLINE_BYTES: Final = 8 * (RECORD_WORDS - META_WORDS)
"""The largest array that travels in its record."""
PHYSICAL_BYTES: Final = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
_NO_BYTES: Final = np.empty(0, np.uint8)


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
    records = _records(attempt, {attempt.slot: operand})
    plan = choose.all_gather_rows(attempt.slot, attempt.slots, RECORD_WORDS, "ring", "direct")
    attempt.execute(plan, (records, records.reshape(-1)))
    mine = records[attempt.slot, :META_WORDS].tobytes()
    arrays = [
        np.empty(operand.shape, operand.flat.dtype)  # same header as ours: shape and dtype are known
        if record[:META_WORDS].tobytes() == mine
        else _room(attempt, slot, record, wanted)
        for slot, record in zip(attempt.slots, records, strict=True)
    ]
    for array, record in zip(arrays, records, strict=True):
        _take_inline(array, record)
    arrays[attempt.slot][...] = operand.flat.reshape(operand.shape)
    rests = [_rest(array) for array in arrays]
    lengths = tuple(rest.size for rest in rests)
    if any(lengths):
        attempt.execute(choose.all_gather(attempt.slot, lengths, attempt.lane_family, algorithm), rests)
    return arrays


def gather(attempt: Attempt, operand: Operand, root: Slot, *, wanted: Wanted = ANYTHING) -> list[Array] | None:
    """Return the array of every slot at the slot `root`, None elsewhere; all have the dtype of `operand`."""
    operand.load()
    wanted = wanted._replace(code=operand.code)
    records = _records(attempt, {attempt.slot: operand})
    attempt.execute(choose.gather(attempt.slot, root, (RECORD_WORDS,) * attempt.size), list(records))
    arrays = None
    rests = [_NO_BYTES] * attempt.size
    if attempt.slot == root:
        arrays = [_unpacked(attempt, slot, record, wanted) for slot, record in zip(attempt.slots, records, strict=True)]
        arrays[root][...] = operand.flat.reshape(operand.shape)
        rests = [_rest(array) for array in arrays]
    else:
        rests[attempt.slot] = _rest(operand.flat)
    _execute_rest(attempt, choose.gather(attempt.slot, root, tuple(rest.size for rest in rests)), rests)
    return arrays


def scatter(attempt: Attempt, operands: list[Operand] | None, root: Slot, *, wanted: Wanted = ANYTHING) -> Array:
    """Return this rank's array of those that `root` passes."""
    me = attempt.slot
    for operand in operands or ():
        operand.load()
    records = _records(attempt, dict(enumerate(operands or ())))
    attempt.execute(choose.scatter(me, root, (RECORD_WORDS,) * attempt.size), list(records))
    mine = _unpacked(attempt, root, records[me], wanted)
    rests = [_NO_BYTES] * attempt.size
    if operands is not None:
        rests = [_rest(operand.flat) for operand in operands]
        mine[...] = operands[me].flat.reshape(operands[me].shape)
    else:
        rests[me] = _rest(mine)
    _execute_rest(attempt, choose.scatter(me, root, tuple(rest.size for rest in rests)), rests)
    return mine


def gathered_by_rank(attempt: Attempt, operand: Operand, root: Rank, wanted: Wanted = ANYTHING) -> list[Any] | None:
    """Return the array of every rank, None for lost ones, at the rank `root`; None elsewhere."""
    arrays = gather(attempt, operand, attempt.slot_of(root), wanted=wanted)
    return arrays if arrays is None else attempt.by_rank(arrays)


def scattered_from_rank(
    attempt: Attempt, operands: list[Operand] | None, root: Rank, wanted: Wanted = ANYTHING
) -> Array:
    """Return this rank's array of those that the rank `root` passes, in a list by rank."""
    mine = None if operands is None else attempt.chosen(operands)
    return scatter(attempt, mine, attempt.slot_of(root), wanted=wanted)


def exchange_all(attempt: Attempt, operands: list[Operand]) -> list[Array]:
    """Send one array to each slot, and return those that the slots sent to this one."""
    me = attempt.slot
    for operand in operands:
        operand.load()
    sent = _records(attempt, dict(enumerate(operands)))
    received = np.zeros_like(sent)
    received[me] = sent[me]
    plan = choose.all_to_all_rows(me, attempt.slots, RECORD_WORDS)
    attempt.execute(plan, (sent.reshape(-1), received.reshape(-1)))
    arrays = [_unpacked(attempt, slot, record, ANYTHING) for slot, record in zip(attempt.slots, received, strict=True)]
    arrays[me][...] = operands[me].flat.reshape(operands[me].shape)
    outgoing = [_rest(operand.flat) for operand in operands]
    incoming = [_rest(array) for array in arrays]
    plan = direct.all_to_all(me, [rest.size for rest in outgoing], [rest.size for rest in incoming])
    _execute_rest(attempt, plan, [*outgoing, *incoming])
    return arrays


def broadcast_bytes(attempt: Attempt, data: bytes, root: Slot) -> bytes:
    """Return `data` of the slot `root`; the other ranks need not know its length."""
    length = np.array([len(data)], np.uint64)
    attempt.execute(choose.broadcast(attempt.slot, attempt.size, root, 1, 8, "tree", attempt.sizes), [length])
    if attempt.slot == root:
        payload = np.frombuffer(data, np.uint8)
    else:
        payload = _allocated(attempt, root, BYTES, (int(length[0]),))
    plan = choose.broadcast(attempt.slot, attempt.size, root, payload.size, 1, None, attempt.sizes)
    attempt.execute(plan, [payload])
    return payload.tobytes()


def _records(attempt: Attempt, operands: dict[int, Operand]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Return a record for each slot; those of `operands` are filled, and the others are zero."""
    records = np.zeros((attempt.size, RECORD_WORDS), np.uint64)
    for slot, (flat, shape, code, _) in operands.items():
        record = records[slot]
        record[: 2 + len(shape)] = code, len(shape), *shape
        if flat.nbytes <= RECORD_INLINE_BYTES:
            _inline(record, flat.nbytes)[...] = flat.view(np.uint8)
    return records


def _inline(record: np.ndarray[Any, np.dtype[np.uint64]], nbytes: int) -> Array:
    """Return the bytes of the contents in a record."""
    return record[META_WORDS:].view(np.uint8)[:nbytes]


def _take_inline(array: Array, record: np.ndarray[Any, np.dtype[np.uint64]]) -> None:
    """Fill an array that travelled in its record."""
    if array.nbytes <= RECORD_INLINE_BYTES:
        _bytes(array)[...] = _inline(record, array.nbytes)


def _unpacked(attempt: Attempt, slot: Slot, record: np.ndarray[Any, np.dtype[np.uint64]], wanted: Wanted) -> Array:
    """Return the array that a record describes, with its contents if the record has them."""
    array = _room(attempt, slot, record, wanted)
    _take_inline(array, record)
    return array


def _rest(array: Array) -> Array:
    """Return what of an array travels after its record: all of it, or nothing."""
    return _NO_BYTES if array.nbytes <= RECORD_INLINE_BYTES else _bytes(array)


def _execute_rest(attempt: Attempt, plan: Plan, rests: list[Array]) -> None:
    """Run a plan without its empty moves: both ends know from the record which blocks have nothing left to send."""
    sends = tuple(send for send in plan.sends if send.start < send.stop)
    recvs = tuple(recv for recv in plan.recvs if recv.start < recv.stop)
    if sends or recvs:
        attempt.execute(Plan(sends, recvs), rests)


def _room(attempt: Attempt, slot: Slot, record: np.ndarray[Any, np.dtype[np.uint64]], wanted: Wanted) -> Array:
    """Return memory for the array that a record describes; end the group if the description is invalid."""
    code, ndim = int(record[0]), int(record[1])
    if code >= len(DTYPES) or ndim > MAX_ARRAY_NDIM or record[2 + ndim : META_WORDS].any():
        attempt.reject(slot, f"an invalid description of an array: dtype {code}, {ndim} dimensions")
    shape = tuple(record[2 : 2 + ndim].tolist())
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
