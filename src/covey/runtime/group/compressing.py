"""What `compress=` means for an operation of a group: which codec, and the operation with it."""

from __future__ import annotations

import itertools
import math
import numbers
from typing import TYPE_CHECKING, Any

import numpy as np

from covey.base.errors import ConfigError
from covey.compress.choice import SHARED, Auto
from covey.compress.codec import Codec, check_sizes
from covey.compress.low_rank import PowerSGD
from covey.compress.policy import SMALLEST, make_policy
from covey.compress.sparse import Sparsifier
from covey.runtime.buffers import readable, writable
from covey.runtime.compressed import dense, sparse
from covey.runtime.compressed.automatic import Size
from covey.runtime.compressed.compressed_sum import CompressedSum, plain_info
from covey.runtime.compressed.part import Part
from covey.runtime.group.weights import check_weight, no_weight, weigh

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from covey.base.numbers import Rank
    from covey.compress.feedback import ErrorFeedback
    from covey.compress.parsing import Compression
    from covey.compress.policy import CompressValue, Policy
    from covey.runtime.buffers import Operand
    from covey.runtime.collectives.attempt import Attempt
    from covey.runtime.group.issuer import Issuer
    from covey.runtime.group.reductions import Reductions

    Array = np.ndarray[Any, np.dtype[Any]]

OPS = ("sum", "mean")


def all_reduce(
    group: Reductions,
    x: Any,
    op: str,
    codec: Compression,
    key: tuple[Any, ...] | None,
    *,
    weight: float | None,
    feedback: ErrorFeedback | None,
    name: str,
    algorithm: str | None,
    timeout: float | None,
    async_op: bool,
) -> Any:
    """Do what `Group.all_reduce` does, with a codec; `key` is what its calls with the same arguments have in common."""
    operand = writable(x)
    is_simple = feedback is None and algorithm is None and not async_op
    if key is not None and is_simple and (reason := _why_plain(group, codec, operand)):
        check_op(op, codec)
        group._savings.let_pass(key, plain_info(operand, group.size, reason))
        return group.all_reduce(x, op, weight=weight, compress=key[0], name=name, timeout=timeout)
    reduced = reduce_parts(
        group, operand, [Part(name, 0, operand.flat.size, operand.shape)], op, codec, x, weight=weight,
        feedback=feedback, algorithm=algorithm, timeout=timeout, async_op=async_op,
    )  # fmt: skip
    if key is not None and is_simple and isinstance(codec, Auto):
        # All operations that were issued have ended, so every rank knows the same of them.
        count, reason = group._savings.tuner.skip_plain(codec, Size(operand.flat.size, operand.flat.itemsize))
        if count:
            group._savings.let_pass(key, plain_info(operand, group.size, reason), count)
    return reduced


def reduce_parts(
    group: Issuer,
    operand: Operand,
    parts: Sequence[Part],
    op: str,
    codec: Compression,
    result: Any = None,
    *,
    weight: float | None = None,
    feedback: ErrorFeedback | None = None,
    algorithm: str | None = None,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """Reduce an array with named parts in one operation, in place, and return `result`."""
    check_op(op, codec)
    if isinstance(codec, Codec):
        dense.check_algorithm(algorithm)
        check_sizes(codec, operand.flat.size)
    elif algorithm is not None:
        raise ConfigError(f"algorithm={algorithm!r}: {codec} has one way to be reduced; leave algorithm out")
    elif isinstance(codec, Sparsifier) and not codec.is_shared and operand.flat.size > sparse.MOST_ELEMENTS:
        raise ConfigError(f"{codec} goes up to {sparse.MOST_ELEMENTS} elements, not {operand.flat.size}; use int8")
    if weight is not None:
        check_weight(op, weight)
    if isinstance(codec, Codec) and not codec.is_lossy:
        feedback = None
    reason = _why_plain(group, codec, operand)
    total = CompressedSum(
        operand,
        parts,
        None if reason else codec,
        group._savings.tuner,
        divides=op == "mean" and weight is None,
        is_weighted=weight is not None,
        feedback=feedback,
        algorithm=algorithm,
    )
    call = group._call(
        "all_reduce",
        operand.code,
        operand.shape,
        op=op,
        weighted=None if weight is None else True,
        algorithm=algorithm,
        compress=None if reason else codec,
        warmup=(feedback.warmup or None) if feedback is not None and not reason else None,
    )

    def body(attempt: Attempt) -> bool:
        total.load(attempt)
        if weight is not None and not weigh(attempt, total.work, weight):
            return False  # on every rank, so the group stays usable
        total.reduce(attempt)
        return True

    def deliver(has_weight: bool) -> Any:
        if not has_weight:
            raise no_weight()
        total.deliver()
        if reason:
            total.info["reason"] = reason
        group._engine.operation.info = total.info
        group._savings.add(group._engine, total.info)
        return result

    return group._engine.run(call, body, timeout=timeout, async_op=async_op, then=deliver)


def reduce_scatter(
    group: Issuer,
    operand: Operand,
    op: str,
    codec: Compression,
    shares: Sequence[int],
    is_given: bool,
    out: Any,
    timeout: float | None,
    async_op: bool,
) -> Any:
    """Do what `Group.reduce_scatter` does, with a codec; `shares` are rows by rank, `is_given` by the caller."""
    codec = require_codec("reduce_scatter", codec)
    check_op(op, codec)
    for share in set(shares):
        check_sizes(codec, share * math.prod(operand.shape[1:]))
    shape = (shares[group.rank], *operand.shape[1:])
    result = group._output(np.empty(shape, operand.flat.dtype) if out is None else out, operand.code, shape)
    row = math.prod(operand.shape[1:])
    ends = [0, *(row * end for end in itertools.accumulate(shares))]
    counts = tuple(shares) if is_given else None
    call = group._call("reduce_scatter", operand.code, operand.shape, op=op, counts=counts, compress=codec)

    def body(attempt: Attempt) -> Array:
        flat = _floats(operand.load())
        parts = [flat[start:stop] for start, stop in itertools.pairwise(ends)]
        return dense.reduce_scatter(attempt, attempt.chosen(parts), codec, divides=op == "mean")

    def deliver(part: Array) -> Any:
        with np.errstate(over="ignore"):
            result.flat[...] = part
        result.store()
        return result.flat.reshape(shape) if out is None else out

    return group._engine.run(call, body, timeout=timeout, async_op=async_op, then=deliver)


def broadcast(
    group: Issuer, x: Any, root: Rank, codec: Compression, algorithm: str | None, timeout: float | None, async_op: bool
) -> Any:
    """Do what `Group.broadcast` does, with a codec; the root's array becomes what the others decode."""
    codec = require_codec("broadcast", codec)
    operand = writable(x)
    check_sizes(codec, operand.flat.size)
    work = operand.flat if operand.flat.dtype == np.float32 else np.empty(operand.flat.size, np.float32)
    call = group._call("broadcast", operand.code, operand.shape, root=root, algorithm=algorithm, compress=codec)

    def body(attempt: Attempt) -> Any:
        flat = operand.load()
        if work is not flat:
            work[...] = flat
        elif attempt.undo is not None and operand.is_own:
            attempt.undo.make_room((flat,))
            attempt.undo.save(flat)
        dense.broadcast(attempt, work, attempt.slot_of(root), codec, algorithm)
        return x

    def deliver(result: Any) -> Any:
        if work is not operand.flat:
            with np.errstate(over="ignore"):
                operand.flat[...] = work
        return operand.deliver(result)

    return group._engine.run(call, body, timeout=timeout, async_op=async_op, then=deliver, root=root)


def all_gather(
    group: Issuer, x: Any, out: Any, codec: Compression, algorithm: str | None, timeout: float | None, async_op: bool
) -> Any:
    """Do what `Group.all_gather` does, with a codec and equal shapes; every row is what all ranks decode."""
    codec = require_codec("all_gather", codec)
    operand = readable(x)
    check_sizes(codec, operand.flat.size)
    rows = None if out is None else group._output(out, operand.code, (group.size, *operand.shape))
    call = group._call(
        "all_gather", operand.code, operand.shape, out=rows is not None, algorithm=algorithm, compress=codec
    )
    count = operand.flat.size

    def body(attempt: Attempt) -> list[Array]:
        blocks = [np.empty(count, np.float32) for _ in attempt.slots]
        blocks[attempt.slot][...] = operand.load()
        dense.all_gather(attempt, blocks, codec, algorithm)
        return attempt.by_rank(blocks)  # type: ignore[return-value]

    def deliver(blocks: list[Array | None]) -> Any:
        with np.errstate(over="ignore"):
            if rows is None:
                dtype, shape = operand.flat.dtype, operand.shape
                return [None if block is None else block.astype(dtype).reshape(shape) for block in blocks]
            for row, block in zip(rows.flat.reshape(group.size, count), blocks, strict=True):
                if block is not None:
                    row[...] = block
        rows.store()
        return out

    return group._engine.run(call, body, timeout=timeout, async_op=async_op, then=deliver)


def check_op(op: str, codec: Compression) -> None:
    """Raise ConfigError unless what `codec` loses makes sense for `op`."""
    if op not in OPS:
        raise ConfigError(f"compress={str(codec)!r} goes with op='sum' and 'mean', not op={op!r}; leave compress out")


def require_codec(operation: str, codec: Compression) -> Codec:
    """Return `codec`; raise ConfigError if it works for sums only."""
    if isinstance(codec, Codec):
        return codec
    raise ConfigError(f"{operation} cannot send a part of the array: {codec} is for all_reduce; use int8 or a cast")


def _floats(flat: Array) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):
        return flat.astype(np.float32, copy=False)


def codec_of(compress: CompressValue, operand: Operand, name: str = "") -> Compression | None:
    """Return the codec that a call asks for, for an array; None for "none"."""
    return make_policy(compress, smallest=0, is_explicit=True).codec_for(name, operand.flat.nbytes, operand.flat.dtype)


def codec_for_gradient(policy: Policy, name: str, operand: Operand, op: str) -> Compression | None:
    """Return the codec of one gradient of several: None for one that the policy, or its codec, does not compress."""
    return _worthwhile(policy.codec_for(name, operand.flat.nbytes, operand.flat.dtype), operand) if op in OPS else None


def codec_for_all_reduce(
    policy: Policy | None, compress: CompressValue, x: Any, op: str, name: str
) -> Compression | None:
    """Return the codec of an all_reduce: what the call asks for, or else what the group compresses.

    A group compresses only what looks like gradients: sums and means of floats, of at least the policy's smallest size.
    """
    is_number = isinstance(x, numbers.Number | np.bool_)
    if compress is not None and is_number:
        codec = make_policy(compress).rules[0][1] if isinstance(compress, str) else compress
        if codec is None:
            return None
        raise TypeError(f"{codec} compresses arrays; a number is sent as it is: leave compress out")
    if compress is not None:
        operand = writable(x)
        return _worthwhile(codec_of(compress, operand, name), operand)
    if policy is None or is_number:
        return None
    return codec_for_gradient(policy, name, writable(x), op)


def _why_plain(group: Issuer, codec: Compression, operand: Operand) -> str:
    """Return why "auto" sends an array as it is, if that is clear from the start, on all ranks; else nothing.

    Such a call is the same as one without `compress`, and takes as long.
    """
    if not isinstance(codec, Auto):
        return ""
    if operand.flat.nbytes < SMALLEST:
        return f"none: the array has less than {SMALLEST >> 10} KiB"
    # After a loss, all remaining ranks may be on one host; until all know of it, they must not decide by that.
    return SHARED if not group._engine.survives and group._engine.attempt.lane_family == "ring" else ""


def _worthwhile(codec: Compression | None, operand: Operand) -> Compression | None:
    """Return the codec, unless it would not make the array smaller."""
    if isinstance(codec, PowerSGD) and codec.shape_of(operand.shape) is None:
        return None
    return codec
