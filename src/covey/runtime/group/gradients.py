"""`Group.sync_gradients`: combine named arrays over all ranks, packed into buckets; and rows of them with figures.

In a weighted mean, each rank scales its contribution by its share of the total weight first.
"""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from covey.base.arithmetic import DTYPES, reduction
from covey.base.errors import ConfigError, MismatchError
from covey.base.text import printable
from covey.plan import choose
from covey.runtime.buffers import Operand, Part, byte_operand, readable, writable
from covey.runtime.group import movements

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from covey.base.arithmetic import Op
    from covey.base.numbers import Rank
    from covey.compress.feedback import ErrorFeedback
    from covey.compress.parsing import Compression
    from covey.compress.policy import CompressValue, Policy
    from covey.runtime.collectives.attempt import Attempt
    from covey.runtime.collectives.call_log import Call
    from covey.runtime.group.issuer import Issuer
    from covey.runtime.group.reductions import Reductions

    Array = np.ndarray[Any, np.dtype[Any]]


def check_weight(op: str, weight: float) -> None:
    """Raise ConfigError unless `op` can be weighted, with this weight."""
    if op != "mean":
        raise ConfigError(f"weight= goes with op='mean', not op={op!r}")
    if not 0 <= weight < float("inf"):
        raise ConfigError(f"weight={weight!r} must be a number from 0 up")


def share_of(attempt: Attempt, weight: float) -> float | None:
    """Return this rank's share of the total weight; None on all ranks if there is no weight."""
    total = np.array([weight], np.float64)
    attempt.all_reduce(total, "sum", "doubling")
    return weight / float(total[0]) if 0 < total[0] < np.inf else None


def scale(flat: Array, share: float) -> None:
    """Multiply this rank's contribution by its share."""
    if not share:  # the contribution may be nan or infinite, and must not count
        flat[...] = 0
        return
    factor = np.float32(share) if flat.itemsize == 2 else flat.dtype.type(share)
    with np.errstate(all="ignore"):
        np.multiply(flat, factor, out=flat, casting="unsafe")


def weigh(attempt: Attempt, flat: Array, weight: float) -> bool:
    """Scale this rank's contribution by its share of the total weight; return False if there is no weight."""
    share = share_of(attempt, weight)
    if share is None:
        return False
    attempt.keep(flat)
    scale(flat, share)
    return True


def no_weight() -> ConfigError:
    """Return the error for weights that add up to nothing."""
    return ConfigError("the weights of all ranks add up to 0, or to more than a float holds")


Named = list[tuple[str, Operand]]

LIST_BYTES: Final = 32 << 20
"""The longest list of names, dtypes and shapes that ranks exchange."""
LINE_SHOWN: Final = 300


class Gradients:
    """Combines gradients, as `Group` offers it."""

    def __init__(self, issuer: Issuer, reductions: Reductions) -> None:
        self._issuer, self._reductions = issuer, reductions

    @functools.cached_property
    def feedback(self) -> ErrorFeedback:
        """What compressed gradients of `sync_gradients` have lost so far, by name."""
        from covey.compress.feedback import ErrorFeedback  # slow to load, and most programs do not need it

        return ErrorFeedback()

    def sync_gradients(
        self,
        grads: Mapping[str, Any],
        op: Op = "mean",
        *,
        bucket_bytes: int | None = None,
        compress: CompressValue = None,
        feedback: ErrorFeedback | bool = True,
        timeout: float | None = None,
    ) -> dict[str, Any]:
        """Combine named arrays of all ranks in place, packed into buckets of up to `bucket_bytes` (a setting).

        Return them by name: those of `grads`, and new ones for arrays that cannot be changed, such as those of JAX.

        `compress` sends fewer bytes: a codec like "int8", or a mapping of patterns of names to codecs; default: what
        the group was joined with. What a step loses is added to the next one of the same name, by `group.feedback`,
        by a `feedback` of your own, or not at all with False.

        Raises:
            MismatchError: ranks passed different names, shapes or dtypes; the message says the first difference.
        """
        policy = self._issuer.policy
        if compress is not None:
            from covey.compress.policy import make_policy  # slow to load, and most programs do not need it

            policy = make_policy(compress)
        own = self.feedback if feedback is True else feedback or None
        limit = self._issuer.engine.facts.config.bucket_bytes if bucket_bytes is None else bucket_bytes
        return self._sync(grads, op, limit, policy, None if policy is None else own, timeout)

    def _sync(
        self,
        grads: Mapping[str, Any],
        op: Op,
        bucket_bytes: int,
        policy: Policy | None,
        feedback: ErrorFeedback | None,
        timeout: float | None,
    ) -> dict[str, Any]:
        if bucket_bytes <= 0:
            raise ConfigError(f"bucket_bytes={bucket_bytes} must be above 0")
        named: Named = [(name, writable(grads[name])) for name in sorted(grads)]
        for _, operand in named:
            reduction(op, operand.flat.dtype)
        _refuse_shared_memory(named)
        if self._issuer.size > 1:
            call = self._issuer.call(
                "sync_gradients",
                None,
                None,
                op=op,
                bucket_bytes=bucket_bytes,
                compress=None if policy is None else str(policy),
                feedback=None if feedback is None else True,
            )
            _agree(self._issuer, named, call, timeout)
        results = dict(grads)
        for codec, bucket in _buckets(named, bucket_bytes, op, policy):
            if len(bucket) == 1:
                name, operand = bucket[0]
                parts = [Part(name, 0, operand.flat.size, operand.shape)]
                reduced = self._reduce(operand, parts, op, codec, feedback, timeout)
                results[name] = grads[name] if reduced is operand else reduced
                continue
            packed = np.concatenate([operand.load() for _, operand in bucket])
            ends = [0, *itertools.accumulate(operand.flat.size for _, operand in bucket)]
            parts = [Part(name, ends[at], ends[at + 1], operand.shape) for at, (name, operand) in enumerate(bucket)]
            self._reduce(readable(packed), parts, op, codec, feedback, timeout)
            for part, (name, operand) in zip(parts, bucket, strict=True):
                operand.flat[...] = packed[part.start : part.stop]
                results[name] = operand.deliver(grads[name])
        return results

    def _reduce(
        self,
        operand: Operand,
        parts: list[Part],
        op: Op,
        codec: Compression | None,
        feedback: ErrorFeedback | None,
        timeout: float | None,
    ) -> Any:
        """Return the operand, or the array with the result if the argument is not changed in place."""
        if codec is None:
            x: Any = operand
            return self._reductions.all_reduce(x, op, timeout=timeout)
        from covey.runtime.group import compression

        piece = compression.Piece(operand, parts, codec)
        return compression.reduce_gradients(self._issuer, [piece], op, operand, feedback=feedback, timeout=timeout)

    def sum_row(
        self,
        row: Array,
        parts: Sequence[Part],
        policy: Policy | None,
        feedback: ErrorFeedback | None,
        nbytes: int | None = None,
    ) -> None:
        """Add a row of all ranks, in place, in one operation: the gradients in `parts`, then figures that stay exact.

        The parts start at element 0, one after the other. `policy` chooses their codecs by name; the size of all that
        travels together counts, not that of a part: `nbytes`, or that of the row.
        """
        self._add_row(row, parts, policy, feedback, nbytes, async_op=False)

    def start_row(
        self,
        row: Array,
        parts: Sequence[Part],
        policy: Policy | None,
        feedback: ErrorFeedback | None,
        nbytes: int | None = None,
    ) -> Callable[[], tuple[Rank, ...]]:
        """Start what `sum_row` does; return a function that waits for it, and returns the ranks with a part in it."""
        work, unpack = self._add_row(row, parts, policy, feedback, nbytes, async_op=True)

        def finish() -> tuple[Rank, ...]:
            work.take()
            unpack()
            return work.contributors  # type: ignore[no-any-return]

        return finish

    def _add_row(
        self,
        row: Array,
        parts: Sequence[Part],
        policy: Policy | None,
        feedback: ErrorFeedback | None,
        nbytes: int | None,
        *,
        async_op: bool,
    ) -> tuple[Any, Callable[[], None]]:
        """Add a row, and return what the operation returns, and what is left to do once it is done."""
        size = row.nbytes if nbytes is None else nbytes
        by_codec: dict[Compression | None, list[Part]] = {}
        for part in parts:
            by_codec.setdefault(None if policy is None else _codec_of_part(policy, part, row, size), []).append(part)
        if not by_codec.keys() - {None}:
            return self._reductions.all_reduce(row, async_op=async_op), lambda: None
        from covey.runtime.group import compression

        end = parts[-1].stop
        whole = [(row[:end], list(parts))]
        packed = whole if len(by_codec) == 1 else [pack(row, chosen) for chosen in by_codec.values()]
        pieces = [
            compression.Piece(writable(piece), places, codec)
            for (piece, places), codec in zip(packed, by_codec, strict=True)
        ]
        figures = row[end:]
        exact = writable(figures) if figures.size else None
        work = compression.reduce_gradients(
            self._issuer, pieces, "sum", exact=exact, feedback=feedback, async_op=async_op
        )

        def unpack() -> None:
            if len(by_codec) > 1:
                for (piece, places), chosen in zip(packed, by_codec.values(), strict=True):
                    for place, part in zip(places, chosen, strict=True):
                        row[part.start : part.stop] = piece[place.start : place.stop]

        if not async_op:
            unpack()
        return work, unpack


def pack(row: Array, parts: Sequence[Part]) -> tuple[Array, list[Part]]:
    """Return some parts of a row in an array of their own, and where they are in it."""
    ends = [0, *itertools.accumulate(part.stop - part.start for part in parts)]
    places = [
        part._replace(start=start, stop=stop)
        for part, (start, stop) in zip(parts, itertools.pairwise(ends), strict=True)
    ]
    return np.concatenate([row[part.start : part.stop] for part in parts]), places


def _codec_of_part(policy: Policy, part: Part, row: Array, nbytes: int) -> Compression | None:
    from covey.runtime.group import compression

    return compression.codec_for_part(policy, part, nbytes, row.dtype)


def _buckets(named: Named, limit: int, op: Op, policy: Policy | None) -> Iterator[tuple[Compression | None, Named]]:
    """Yield runs of arrays of one dtype and codec, in an order that is the same on all ranks."""
    chosen = []
    for name, operand in named:
        codec = None if policy is None else _codec(policy, name, operand, op)
        chosen.append((operand.code, "" if codec is None else str(codec), name, operand, codec))
    bucket: Named = []
    kind: tuple[int, str] = (0, "")
    nbytes, common = 0, None
    for code, text, name, operand, codec in sorted(chosen, key=lambda item: item[:3]):
        if bucket and (kind != (code, text) or nbytes + operand.flat.nbytes > limit):
            yield common, bucket
            bucket, nbytes = [], 0
        bucket.append((name, operand))
        kind, common = (code, text), codec
        nbytes += operand.flat.nbytes
    if bucket:
        yield common, bucket


def _refuse_shared_memory(named: Named) -> None:
    """Raise if two arrays share memory: whether the shared part is combined twice would depend on the buckets."""
    arrays = [(name, operand.flat if operand.strided is None else operand.strided) for name, operand in named]
    spans = [(*np.lib.array_utils.byte_bounds(array), name, array) for name, array in arrays if array.size]
    spans.sort(key=lambda span: span[:3])
    for (_, end, one, first), (start, _, other, second) in itertools.pairwise(spans):
        if start < end and np.shares_memory(first, second):
            raise ConfigError(f"sync_gradients: {one!r} and {other!r} share memory; pass each array once")


def _agree(issuer: Issuer, named: Named, call: Call, timeout: float | None) -> None:
    """Compare what the ranks passed: a digest every time, the lists themselves only if the digests differ."""
    lines = [f"{name}: {DTYPES[operand.code].name}{list(operand.shape)}" for name, operand in named]
    data = "\n".join(lines).encode(errors="replace")
    if len(data) > LIST_BYTES:
        raise ConfigError(f"sync_gradients: the names take {len(data)} bytes; up to {LIST_BYTES} are allowed")
    digest, listed = _digest(data), byte_operand(data)

    def body(attempt: Attempt) -> None:
        digests = np.empty((attempt.size, 16), np.uint8)
        digests[attempt.slot] = digest
        attempt.execute(choose.all_gather(attempt.slot, (16,) * attempt.size, "stream", "direct"), list(digests))
        if (digests == digest).all():
            return
        texts = movements.gather_all(attempt, listed, wanted=movements.Wanted(ndim=1, most_bytes=LIST_BYTES))
        for slot, text in zip(attempt.slots, texts, strict=True):
            if not np.array_equal(_digest(text.tobytes()), digests[slot]):
                attempt.reject(slot, "a list of names that differs from the one it announced")
        lists = {
            rank: text.tobytes().decode(errors="replace").split("\n")
            for rank, text in zip(attempt.ranks, texts, strict=True)
        }
        first = next(at for at in range(max(map(len, lists.values())) + 1) if len({*_at(lists, at).values()}) > 1)
        said = "; ".join(
            f"rank {rank} has {printable(line[:LINE_SHOWN]) or 'nothing'}" for rank, line in _at(lists, first).items()
        )
        story = (
            f"sync_gradients: the arrays differ between ranks, first at number {first} in the order of names: {said}"
        )
        attempt.disagree(MismatchError(story))

    issuer.engine.run(call, body, timeout=timeout, async_op=False)


def _digest(data: bytes) -> Any:
    import hashlib  # slow to load: it loads OpenSSL

    return np.frombuffer(hashlib.blake2b(data, digest_size=16).digest(), np.uint8)


def _at(lists: dict[Rank, list[str]], index: int) -> dict[Rank, str]:
    return {rank: lines[index] if index < len(lines) else "" for rank, lines in lists.items()}


def _codec(policy: Policy, name: str, operand: Operand, op: Op) -> Compression | None:
    from covey.runtime.group import compression

    return compression.codec_for_gradient(policy, name, operand, op)
