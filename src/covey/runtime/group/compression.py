"""What `compress=` means for an operation of a group: which codec, and the operation with it.

A codec applies to gradients only: to what a caller passes as such (`reduce_gradients`), or names a codec for. Figures
that must stay exact are an argument of their own, which no codec reaches.
"""

from __future__ import annotations

import itertools
import math
import numbers
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from covey.base.errors import ConfigError
from covey.compress.choice import SHARED, Auto
from covey.compress.codec import Codec, check_sizes
from covey.compress.low_rank import PowerSGD
from covey.compress.policy import SMALLEST_BYTES, make_policy
from covey.compress.sparse import Sparsifier
from covey.runtime.buffers import Part, writable
from covey.runtime.compressed import dense, sparse
from covey.runtime.compressed.automatic import Size
from covey.runtime.compressed.compressed_sum import CompressedSum, PlainSum, keep, plain_info
from covey.runtime.group.gradients import check_weight, no_weight, scale, share_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from covey.base.numbers import Rank
    from covey.compress.feedback import ErrorFeedback
    from covey.compress.parsing import Compression
    from covey.compress.policy import CompressValue, Policy
    from covey.runtime.buffers import Operand
    from covey.runtime.collectives.attempt import Attempt
    from covey.runtime.group.issuer import Issuer

    Array = np.ndarray[Any, np.dtype[Any]]

COMPRESSED_OPS = ("sum", "mean")


def all_reduce(
    issuer: Issuer,
    reduce_plain: Callable[..., Any],
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
    """Do what `Group.all_reduce` does, with a codec; `key` is what its calls with the same arguments have in common.

    `reduce_plain` is `all_reduce` again, for an array that turns out to be sent as it is.
    """
    operand = writable(x)
    is_simple = feedback is None and algorithm is None and not async_op
    if key is not None and is_simple and (reason := _why_plain(issuer, codec, operand)):
        check_op(op, codec)
        issuer.savings.let_pass(key, plain_info(operand, issuer.size, reason))
        return reduce_plain(x, op, weight=weight, compress=key[0], name=name, timeout=timeout)
    piece = Piece(operand, [Part(name, 0, operand.flat.size, operand.shape)], codec)
    reduced = reduce_gradients(
        issuer, [piece], op, x, weight=weight, feedback=feedback, algorithm=algorithm, timeout=timeout,
        async_op=async_op,
    )  # fmt: skip
    if key is not None and is_simple and isinstance(codec, Auto):
        # All operations that were issued have ended, so every rank knows the same of them.
        count, reason = issuer.savings.tuner.skip_plain(codec, Size(operand.flat.size, operand.flat.itemsize))
        if count:
            issuer.savings.let_pass(key, plain_info(operand, issuer.size, reason), count)
    return reduced


class Piece(NamedTuple):
    """Gradients that are sent alike: an array with named parts, and its codec; None sends it as it is."""

    operand: Operand
    parts: Sequence[Part]
    codec: Compression | None


def reduce_gradients(
    issuer: Issuer,
    pieces: Sequence[Piece],
    op: str,
    result: Any = None,
    *,
    exact: Operand | None = None,
    weight: float | None = None,
    needs_weight: bool = True,
    feedback: ErrorFeedback | None = None,
    algorithm: str | None = None,
    timeout: float | None = None,
    async_op: bool = False,
    then: Callable[[], None] | None = None,
) -> Any:
    """Reduce arrays of gradients in one operation, in place, and return `result`; all have the same contributors.

    Args:
        exact: figures that are no gradients, such as counts. They are added in the same operation, as they are.
        weight: how often this rank's gradients count in a mean.
        needs_weight: raise if all weights are 0; otherwise the gradients become 0.
        then: called before the operation returns.
    """
    totals = [_start(issuer, piece, op, weight, feedback, algorithm) for piece in pieces]
    call = issuer.call(
        "all_reduce",
        pieces[0].operand.code,
        pieces[0].operand.shape if len(pieces) == 1 else None,
        op=op,
        weighted=None if weight is None else True,
        algorithm=algorithm,
        compress=totals[0].codec if len(pieces) == 1 else None,
        pieces=None if len(pieces) == 1 else tuple((each.operand.shape, str(each.codec)) for each in totals),
        exact=None if exact is None else exact.shape,
        warmup=next((each.warmup for each in totals if each.warmup), None),
    )

    def body(attempt: Attempt) -> bool:
        for total in totals:
            total.load(attempt)
        if exact is not None:
            flat = exact.load()
            keep(attempt, exact)
            attempt.all_reduce(flat, "sum")
        if weight is not None:
            share = share_of(attempt, weight)
            if share is None and needs_weight:
                return False  # on every rank, so the group stays usable
            for total in totals:
                scale(total.work, share or 0.0)
        for total in totals:
            total.reduce(attempt)
        return True

    def deliver(has_weight: bool) -> Any:
        if not has_weight:
            raise no_weight()
        delivered = result
        for total in totals:
            delivered = total.deliver(result)
            if total.is_compressed:
                issuer.engine.operation.info = total.info
                issuer.savings.add(total.info)
        if exact is not None:
            exact.store()
        if then is not None:
            then()
        return delivered if len(totals) == 1 else result

    return issuer.engine.run(call, body, timeout=timeout, async_op=async_op, then=deliver)


def _start(
    issuer: Issuer, piece: Piece, op: str, weight: float | None, feedback: ErrorFeedback | None, algorithm: str | None
) -> CompressedSum | PlainSum:
    """Return one of the arrays of an operation; raise if its codec cannot reduce it."""
    operand, parts, codec = piece
    if weight is not None:
        check_weight(op, weight)
    divides = op == "mean" and weight is None
    if codec is None:
        return PlainSum(operand, op if weight is None else "sum")
    check_op(op, codec)
    if isinstance(codec, Codec):
        dense.check_algorithm(algorithm)
        check_sizes(codec, operand.flat.size)
    elif algorithm is not None:
        raise ConfigError(f"algorithm={algorithm!r}: {codec} has one way to be reduced; leave algorithm out")
    elif isinstance(codec, Sparsifier) and not codec.is_shared and operand.flat.size > sparse.MOST_ELEMENTS:
        raise ConfigError(f"{codec} goes up to {sparse.MOST_ELEMENTS} elements, not {operand.flat.size}; use int8")
    if isinstance(codec, Codec) and not codec.is_lossy:
        feedback = None
    return CompressedSum(
        operand,
        parts,
        codec,
        issuer.savings.tuner,
        divides=divides,
        is_weighted=weight is not None,
        feedback=feedback,
        algorithm=algorithm,
        why_plain=_why_plain(issuer, codec, operand),
    )


def reduce_scatter(
    issuer: Issuer,
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
    shape = (shares[issuer.rank], *operand.shape[1:])
    result = issuer.output(np.empty(shape, operand.flat.dtype) if out is None else out, operand.code, shape)
    row = math.prod(operand.shape[1:])
    ends = [0, *(row * end for end in itertools.accumulate(shares))]
    counts = tuple(shares) if is_given else None
    call = issuer.call("reduce_scatter", operand.code, operand.shape, op=op, counts=counts, compress=codec)

    def body(attempt: Attempt) -> Array:
        flat = _floats(operand.load())
        parts = [flat[start:stop] for start, stop in itertools.pairwise(ends)]
        return dense.reduce_scatter(attempt, attempt.chosen(parts), codec, divides=op == "mean")

    def deliver(part: Array) -> Any:
        with np.errstate(over="ignore"):
            result.flat[...] = part
        if out is None:
            made = result.flat.reshape(shape)
            return made if operand.alike is None else operand.alike(made)
        return result.deliver(out)

    return issuer.engine.run(call, body, timeout=timeout, async_op=async_op, then=deliver)


def broadcast(
    issuer: Issuer, x: Any, root: Rank, codec: Compression, algorithm: str | None, timeout: float | None, async_op: bool
) -> Any:
    """Do what `Group.broadcast` does, with a codec; the root's array becomes what the others decode."""
    codec = require_codec("broadcast", codec)
    operand = writable(x)
    check_sizes(codec, operand.flat.size)
    work = operand.flat if operand.flat.dtype == np.float32 else np.empty(operand.flat.size, np.float32)
    call = issuer.call("broadcast", operand.code, operand.shape, root=root, algorithm=algorithm, compress=codec)

    def body(attempt: Attempt) -> Any:
        flat = operand.load()
        if work is not flat:
            work[...] = flat
        elif operand.is_own:
            attempt.keep(flat)
        dense.broadcast(attempt, work, attempt.slot_of(root), codec, algorithm)
        return x

    def deliver(result: Any) -> Any:
        if work is not operand.flat:
            with np.errstate(over="ignore"):
                operand.flat[...] = work
        return operand.deliver(result)

    return issuer.engine.run(call, body, timeout=timeout, async_op=async_op, then=deliver, root=root)


def all_gather(
    issuer: Issuer,
    operand: Operand,
    out: Any,
    codec: Compression,
    algorithm: str | None,
    timeout: float | None,
    async_op: bool,
) -> Any:
    """Do what `Group.all_gather` does, with a codec and equal shapes; every row is what all ranks decode."""
    codec = require_codec("all_gather", codec)
    check_sizes(codec, operand.flat.size)
    rows = None if out is None else issuer.output(out, operand.code, (issuer.size, *operand.shape))
    call = issuer.call(
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
                made = [None if block is None else block.astype(dtype).reshape(shape) for block in blocks]
                return made if operand.alike is None else operand.alike(made)
            for row, block in zip(rows.flat.reshape(issuer.size, count), blocks, strict=True):
                if block is not None:
                    row[...] = block
        return rows.deliver(out)

    return issuer.engine.run(call, body, timeout=timeout, async_op=async_op, then=deliver)


def check_op(op: str, codec: Compression) -> None:
    """Raise ConfigError unless what `codec` loses makes sense for `op`."""
    if op not in COMPRESSED_OPS:
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
    return (
        _worthwhile(policy.codec_for(name, operand.flat.nbytes, operand.flat.dtype), operand)
        if op in COMPRESSED_OPS
        else None
    )


def codec_for_part(policy: Policy, part: Part, nbytes: int, dtype: np.dtype[Any]) -> Compression | None:
    """Return the codec of one part of an array of gradients with so many bytes; None for one that is sent as it is."""
    codec = policy.codec_for(part.name, nbytes, dtype)
    return None if isinstance(codec, PowerSGD) and codec.shape_of(part.shape) is None else codec


def codec_for_all_reduce(compress: CompressValue, x: Any, name: str) -> Compression | None:
    """Return the codec that an all_reduce asks for; None for "none"."""
    if isinstance(x, numbers.Number | np.bool_):
        codec = make_policy(compress).rules[0][1] if isinstance(compress, str) else compress
        if codec is None:
            return None
        raise TypeError(f"{codec} compresses arrays; a number is sent as it is: leave compress out")
    operand = writable(x, is_read=False)
    return _worthwhile(codec_of(compress, operand, name), operand)


def _why_plain(issuer: Issuer, codec: Compression, operand: Operand) -> str:
    """Return why "auto" sends an array as it is, if that is clear from the start, on all ranks; else nothing.

    Such a call is the same as one without `compress`, and takes as long.
    """
    if not isinstance(codec, Auto):
        return ""
    if operand.flat.nbytes < SMALLEST_BYTES:
        return f"none: the array has less than {SMALLEST_BYTES >> 10} KiB"
    # After a loss, all remaining ranks may be on one host; until all know of it, they must not decide by that.
    return SHARED if not issuer.engine.facts.survives and issuer.engine.attempt.lane_family == "ring" else ""


def _worthwhile(codec: Compression | None, operand: Operand) -> Compression | None:
    """Return the codec, unless it would not make the array smaller."""
    if isinstance(codec, PowerSGD) and codec.shape_of(operand.shape) is None:
        return None
    return codec
