"""The operations of a group that combine the arrays of its ranks."""

from __future__ import annotations

import functools
import itertools
import math
import numbers
import operator
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, overload

import numpy as np

from covey.base.arithmetic import dtype_code, identity, reduction
from covey.base.config import check_timeout
from covey.base.errors import ConfigError
from covey.plan import choose, doubling
from covey.plan.choose import PLANNED_BYTES
from covey.plan.moves import part
from covey.runtime.buffers import readable, writable
from covey.runtime.collectives.call_log import make_call
from covey.runtime.group import movements
from covey.runtime.group.gradients import check_weight, no_weight, weigh
from covey.runtime.group.issuer import CACHED_CALLS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Unpack

    from covey.base.arithmetic import Op, Reduction
    from covey.compress.feedback import ErrorFeedback
    from covey.compress.policy import CompressValue
    from covey.plan.moves import Plan
    from covey.runtime.buffers import Memory, MemoryT, Operand, Values
    from covey.runtime.collectives.attempt import Attempt
    from covey.runtime.collectives.call_log import Call
    from covey.runtime.group.issuer import Issuer
    from covey.runtime.work import Work

    Array = np.ndarray[Any, np.dtype[Any]]
    NumberT = TypeVar("NumberT", int, float, complex)


class AllReduceOptions(TypedDict, total=False):
    """Further arguments of `all_reduce`, for type checkers."""

    weight: float | None
    compress: CompressValue
    feedback: ErrorFeedback | None
    name: str
    timeout: float | None
    algorithm: str | None


class ReduceScatterOptions(TypedDict, total=False):
    """Further arguments of `reduce_scatter`, for type checkers."""

    counts: Sequence[int] | None
    compress: CompressValue
    timeout: float | None


class Reductions:
    """Operations that combine arrays, as `Group` offers them."""

    def __init__(self, issuer: Issuer) -> None:
        self._issuer, self._engine, self._facts = issuer, issuer.engine, issuer.engine.facts
        self.rank, self.size, self._shortcuts = issuer.rank, issuer.size, issuer.engine.shortcuts

    # The mean of whole numbers is none, although their sum is one: this is what mypy finds inconsistent.

    @overload
    def all_reduce(  # type: ignore[overload-overlap]
        self, x: int, op: Literal["mean"], *, async_op: Literal[False] = ..., **options: Unpack[AllReduceOptions]
    ) -> float: ...

    @overload
    def all_reduce(
        self, x: NumberT, op: Op = ..., *, async_op: Literal[False] = ..., **options: Unpack[AllReduceOptions]
    ) -> NumberT: ...

    @overload
    def all_reduce(
        self, x: np.generic, op: Op = ..., *, async_op: Literal[False] = ..., **options: Unpack[AllReduceOptions]
    ) -> Any: ...

    @overload
    def all_reduce(
        self, x: MemoryT, op: Op = ..., *, async_op: Literal[False] = ..., **options: Unpack[AllReduceOptions]
    ) -> MemoryT: ...

    @overload
    def all_reduce(  # type: ignore[overload-overlap]
        self, x: int, op: Literal["mean"], *, async_op: Literal[True], **options: Unpack[AllReduceOptions]
    ) -> Work[float]: ...

    @overload
    def all_reduce(
        self, x: NumberT, op: Op = ..., *, async_op: Literal[True], **options: Unpack[AllReduceOptions]
    ) -> Work[NumberT]: ...

    @overload
    def all_reduce(
        self, x: np.generic, op: Op = ..., *, async_op: Literal[True], **options: Unpack[AllReduceOptions]
    ) -> Work[Any]: ...

    @overload
    def all_reduce(
        self, x: MemoryT, op: Op = ..., *, async_op: Literal[True], **options: Unpack[AllReduceOptions]
    ) -> Work[MemoryT]: ...

    @overload
    def all_reduce(
        self, x: Memory | complex | np.generic, op: Op = ..., *, async_op: bool, **options: Unpack[AllReduceOptions]
    ) -> Any: ...

    def all_reduce(
        self,
        x: Any,
        op: Op = "sum",
        *,
        weight: float | None = None,
        compress: CompressValue = None,
        feedback: ErrorFeedback | None = None,
        name: str = "",
        timeout: float | None = None,
        algorithm: str | None = None,
        async_op: bool = False,
    ) -> Any:
        """Combine `x` of all ranks, in place on every rank, and return `x`; for a Python number, return the result.

        The result is bit-identical on all ranks. `op` is sum, mean, min, max, prod, and, or, or xor. With `weight`,
        a mean counts this rank's `x` that many times, as unequal batches need; then every rank passes a weight.
        Sums and products of Python ints of up to 64 bits are exact, however large; arrays wrap around as numpy's do.

        The result is exact, whatever the group compresses, unless the call names a codec: `compress="int8"` sends fewer
        bytes of a sum or mean of floats. With `feedback`, what this call loses is added to the next one of the same
        `name`. `sync_gradients` compresses what the group was told to.
        """
        if compress is not None:
            asked = None
            if type(x) is np.ndarray and type(compress) is str:
                asked = (compress, name, op, x.dtype, x.shape, feedback is None and algorithm is None and not async_op)
            if not self._issuer.savings.passes(asked):
                from covey.runtime.group import compression

                codec = compression.codec_for_all_reduce(compress, x, name)
                if codec is not None:
                    return compression.all_reduce(
                        self._issuer, self.all_reduce, x, op, codec, asked, weight=weight, feedback=feedback, name=name,
                        algorithm=algorithm, timeout=timeout, async_op=async_op,
                    )  # fmt: skip
        elif feedback is not None:
            raise ConfigError(
                "feedback= keeps what a codec loses; name the codec with compress=, or use sync_gradients"
            )
        is_array = type(x) is np.ndarray  # the common case, kept short: this call is paid per step
        if not is_array and isinstance(x, int | np.integer | np.bool_) and op in ("sum", "prod") and weight is None:
            return self._reduce_whole_number(x, op, timeout, algorithm, async_op)
        shortcut, begun_in = self._shortcuts.all_reduce, None
        if shortcut is not None and weight is None and algorithm is None:
            if timeout is not None:
                check_timeout(timeout)
            if async_op:
                work = None if self._facts.survives else self._issuer.begin(shortcut, "all_reduce", op, x, timeout)
                if work is not None:
                    return work
            outcome = False if async_op else shortcut.run(x, op)
            if outcome is True:
                return x
            if outcome is not False:
                begun_in = self._engine.atomic
                if begun_in is None:
                    return self._issuer.resume(x, outcome, timeout)
                begun_in.handed_over(x)
        is_number = False
        if is_array and x.flags.carray:
            operand, flat, shape = None, x if x.ndim == 1 else x.reshape(-1), x.shape
        elif is_number := isinstance(x, numbers.Number | np.bool_):
            x = flat = _number_array(x, op)
            operand, shape = None, flat.shape
        else:
            operand = writable(x)
            flat, shape = operand.flat, operand.shape
        is_plain = weight is None
        key = (flat.dtype, shape, op, algorithm, is_plain)
        call = self._issuer.calls.get(key)
        if call is None:
            call = self._prepare_all_reduce(flat, key)
        if weight is not None:
            check_weight(op, weight)

        def body(attempt: Attempt) -> Any:
            if begun_in is not None and attempt.resume_begun():
                return x
            prepared = attempt.prepared.get(key)
            if prepared is None:
                prepared = _prepared_all_reduce(attempt, flat, key)
            plan, rule = prepared
            if operand is not None:
                operand.load()
            if weight is not None and not weigh(attempt, flat, weight):
                return None  # on every rank, so the group stays usable
            # `weigh` has saved a weighted array; an array that is not contiguous is loaded again.
            keeps = weight is None and (operand is None or operand.is_own)
            planner = None if algorithm is not None else attempt.planner
            if planner is None and algorithm is None and attempt.fits_plans and flat.nbytes >= PLANNED_BYTES:
                from covey.runtime.collectives.planner import planner_of  # most groups have no use for it

                planner = planner_of(attempt)
            if planner is not None:
                planner.reduce_plain(
                    attempt, flat.size, flat.itemsize, plan,
                    lambda fitted: attempt.execute(fitted, (flat,), rule, keeps=keeps),
                )  # fmt: skip
            else:
                attempt.execute(plan, (flat,), rule, keeps=keeps)
            return x

        then = None
        if is_number or weight is not None or operand is not None:
            then = functools.partial(_reduced, operand, is_number)
        try:
            result = self._engine.run(call, body, timeout=timeout, async_op=async_op, then=then)
        finally:
            if begun_in is not None:
                begun_in.drop_handed_over()
        may_repeat = shortcut is not None and flat.nbytes <= shortcut.most_bytes
        if may_repeat and is_plain and operand is None and algorithm is None:
            self._add_shortcut(flat, key, call)
        return result

    def _reduce_whole_number(self, x: Any, op: Op, timeout: float | None, algorithm: str | None, async_op: bool) -> Any:
        """Return the exact sum or product of a whole number of every rank."""
        own = readable(_number_array(x, op))  # raises if it is too large
        number = int(own.flat[0])
        if op == "sum":
            choose.all_reduce(
                self.rank, self.size, 2, 8, self._engine.attempt.lane_family, algorithm, self._facts.sizes
            )  # raises if there is no such algorithm
            call = self._issuer.call("all_reduce", own.code, (), op=op, whole=True, algorithm=algorithm)

            def add(attempt: Attempt) -> int:
                # The sums of both halves over all ranks fit into 64 bits.
                halves = np.array([number >> 32, number & 0xFFFFFFFF], np.int64)
                attempt.all_reduce(halves, "sum", algorithm)
                return (int(halves[0]) << 32) + int(halves[1])

            return self._engine.run(call, add, timeout=timeout, async_op=async_op)
        call = self._issuer.call("all_reduce", own.code, (), op=op, whole=True, algorithm=algorithm)

        def multiply(attempt: Attempt) -> int:
            rows = movements.gather_all(attempt, own, wanted=movements.Wanted(shape=own.shape))
            return math.prod(int(row[0]) for row in rows)

        return self._engine.run(call, multiply, timeout=timeout, async_op=async_op)

    def _add_shortcut(self, flat: Array, key: tuple[Any, ...], call: Call) -> None:
        """Let sums of arrays like `flat` take the shortcut of the present attempt."""
        shortcut, attempt = self._shortcuts.all_reduce, self._engine.attempt
        prepared = attempt.prepared.get(key)
        if shortcut is not None and prepared is not None:
            _, shape, op, _, _ = key
            plan, rule = prepared
            shortcut.add(flat, op, shape, call, plan, rule, attempt)

    def _prepare_all_reduce(self, flat: Array, key: tuple[Any, ...]) -> Call:
        """Return the description of calls with arrays like `flat`, and cache it; raise if such calls cannot work."""
        _, shape, op, algorithm, is_plain = key
        reduction(op, flat.dtype)
        _prepared_all_reduce(self._engine.attempt, flat, key)
        if len(self._issuer.calls) > CACHED_CALLS:
            self._issuer.calls.clear()
        call = make_call(
            "all_reduce", dtype_code(flat.dtype), shape, op=op, weighted=None if is_plain else True, algorithm=algorithm
        )
        self._issuer.calls[key] = call
        return call

    @overload
    def reduce(
        self,
        x: MemoryT,
        root: int = ...,
        op: Op = ...,
        *,
        timeout: float | None = ...,
        algorithm: str | None = ...,
        async_op: Literal[False] = ...,
    ) -> MemoryT: ...

    @overload
    def reduce(
        self,
        x: MemoryT,
        root: int = ...,
        op: Op = ...,
        *,
        timeout: float | None = ...,
        algorithm: str | None = ...,
        async_op: Literal[True],
    ) -> Work[MemoryT]: ...

    @overload
    def reduce(
        self,
        x: Memory,
        root: int = ...,
        op: Op = ...,
        *,
        timeout: float | None = ...,
        algorithm: str | None = ...,
        async_op: bool,
    ) -> Any: ...

    def reduce(
        self,
        x: Any,
        root: int = 0,
        op: Op = "sum",
        *,
        timeout: float | None = None,
        algorithm: str | None = None,
        async_op: bool = False,
    ) -> Any:
        """Combine `x` of all ranks into `x` of `root`, and return `x`. On other ranks `x` does not change."""
        shortcut = self._shortcuts.any if algorithm is None and not async_op else None
        if (
            shortcut is not None
            and type(root) is int
            and self._issuer.took_shortcut(shortcut, shortcut.name(("reduce", root, op)), x, timeout=timeout)
        ):
            return x
        root = self._issuer.check_rank(root, "root")
        operand = writable(x)
        rule = reduction(op, operand.flat.dtype)
        choose.reduce(
            self.rank, self.size, root, operand.flat.size, operand.flat.itemsize, algorithm, self._facts.sizes
        )
        call = self._issuer.call("reduce", operand.code, operand.shape, root=root, op=op, algorithm=algorithm)

        def body(attempt: Attempt) -> Any:
            size, slot = operand.flat.size, attempt.slot_of(root)
            plan = choose.reduce(
                attempt.slot, attempt.size, slot, size, operand.flat.itemsize, algorithm, attempt.sizes
            )
            # A rank that forwards contributions of others combines them in a copy.
            is_root = attempt.slot == slot
            flat = operand.load() if is_root or not plan.recvs else operand.load().copy()
            attempt.execute(plan, [flat], rule, keeps=is_root and operand.is_own)
            return x

        then = operand.deliver if self.rank == root else None
        result = self._engine.run(call, body, timeout=timeout, async_op=async_op, then=then, root=root)
        if shortcut is not None and type(x) is np.ndarray and operand.is_own:
            size, itemsize = operand.flat.size, operand.flat.itemsize
            plan = choose.reduce(self.rank, self.size, root, size, itemsize, None, self._facts.sizes)
            if self.rank == root or not plan.recvs:  # a rank that forwards needs a copy
                what = shortcut.name(("reduce", root, op))
                shortcut.add(operand.flat, what, operand.shape, call, plan, rule, self._engine.attempt)
        return result

    @overload
    def reduce_scatter(
        self, x: Values, op: Op = ..., *, async_op: Literal[False] = ..., **options: Unpack[ReduceScatterOptions]
    ) -> Array: ...

    @overload
    def reduce_scatter(
        self,
        x: Values,
        op: Op = ...,
        *,
        out: MemoryT,
        async_op: Literal[False] = ...,
        **options: Unpack[ReduceScatterOptions],
    ) -> MemoryT: ...

    @overload
    def reduce_scatter(
        self, x: Values, op: Op = ..., *, async_op: Literal[True], **options: Unpack[ReduceScatterOptions]
    ) -> Work[Array]: ...

    @overload
    def reduce_scatter(
        self,
        x: Values,
        op: Op = ...,
        *,
        out: MemoryT,
        async_op: Literal[True],
        **options: Unpack[ReduceScatterOptions],
    ) -> Work[MemoryT]: ...

    @overload
    def reduce_scatter(
        self,
        x: Values,
        op: Op = ...,
        *,
        out: Memory | None = ...,
        async_op: bool,
        **options: Unpack[ReduceScatterOptions],
    ) -> Any: ...

    def reduce_scatter(
        self,
        x: Any,
        op: Op = "sum",
        *,
        counts: Sequence[int] | None = None,
        compress: CompressValue = None,
        out: Any = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Combine `x` of all ranks, and return this rank's part of the result. `x` does not change.

        Axis 0 is split as numpy.array_split does, or into `counts[rank]` rows for each rank. With `out`, an array of
        the part's shape, write the part there and return `out`.
        `compress` sends fewer bytes: a cast or a quantiser, like "int8".
        """
        if compress is not None:
            from covey.runtime.group import compression

            whole = readable(x)
            if (codec := compression.codec_of(compress, whole)) is not None:
                shares = self._counts(counts, _rows(whole))
                return compression.reduce_scatter(
                    self._issuer, whole, op, codec, shares, counts is not None, out, timeout, async_op
                )
        shortcut = self._shortcuts.any if counts is None and not async_op else None
        is_new = out is None
        if shortcut is not None and type(x) is np.ndarray and x.ndim:
            if is_new:
                start, stop = part(len(x), self.size, self.rank)
                out = np.empty((stop - start, *x.shape[1:]), x.dtype)
            if self._issuer.took_shortcut(shortcut, shortcut.name(("reduce_scatter", op)), x, out, timeout):
                return out
        operand = readable(x)
        rows = _rows(operand)
        rule = reduction(op, operand.flat.dtype)
        row = int(np.prod(operand.shape[1:], dtype=np.int64))
        shares = self._counts(counts, rows)
        lengths = [share * row for share in shares]
        starts = [0, *itertools.accumulate(lengths[:-1])]
        if out is None:
            out = np.empty((shares[self.rank], *operand.shape[1:]), operand.flat.dtype)
        result = self._issuer.output(out, operand.code, (shares[self.rank], *operand.shape[1:]))
        call = self._issuer.call(
            "reduce_scatter", operand.code, operand.shape, op=op, counts=counts if counts is None else tuple(shares)
        )
        first, length, itemsize = starts[self.rank], lengths[self.rank], operand.flat.itemsize
        overlaps = not is_new and np.may_share_memory(operand.flat, result.flat)

        def body(attempt: Attempt) -> Any:
            source = operand.load().copy() if overlaps else operand.load()  # what is sent must not change before
            if result.is_own and not is_new:
                attempt.keep(result.flat)
            result.flat[...] = source[first : first + length]
            plan = choose.reduce_scatter(
                attempt.slot, tuple(attempt.chosen(starts)), tuple(attempt.chosen(lengths)), itemsize, attempt.sizes
            )
            attempt.execute(plan, (source, result.flat), rule)
            return out

        then = operand.alike if is_new else result.deliver
        returned = self._engine.run(call, body, timeout=timeout, async_op=async_op, then=then)
        if shortcut is not None and type(x) is type(out) is np.ndarray and operand.is_own and result.is_own:
            what, attempt = shortcut.name(("reduce_scatter", op)), self._engine.attempt
            plan = choose.reduce_scatter(attempt.slot, tuple(starts), tuple(lengths), itemsize, attempt.sizes)
            shortcut.add(operand.flat, what, x.shape, call, plan, rule, attempt, out, (first, 0, length))
        return returned

    @overload
    def scan(
        self, x: Values, op: Op = ..., *, timeout: float | None = ..., async_op: Literal[False] = ...
    ) -> Array: ...

    @overload
    def scan(self, x: Values, op: Op = ..., *, timeout: float | None = ..., async_op: Literal[True]) -> Work[Array]: ...

    @overload
    def scan(self, x: Values, op: Op = ..., *, timeout: float | None = ..., async_op: bool) -> Any: ...

    def scan(self, x: Any, op: Op = "sum", *, timeout: float | None = None, async_op: bool = False) -> Any:
        """Return the combination of `x` of ranks 0 to this one. `x` does not change."""
        return self._prefix("scan", x, op, timeout, async_op)

    @overload
    def exscan(
        self, x: Values, op: Op = ..., *, timeout: float | None = ..., async_op: Literal[False] = ...
    ) -> Array: ...

    @overload
    def exscan(
        self, x: Values, op: Op = ..., *, timeout: float | None = ..., async_op: Literal[True]
    ) -> Work[Array]: ...

    @overload
    def exscan(self, x: Values, op: Op = ..., *, timeout: float | None = ..., async_op: bool) -> Any: ...

    def exscan(self, x: Any, op: Op = "sum", *, timeout: float | None = None, async_op: bool = False) -> Any:
        """Return the combination of `x` of the ranks before this one; on rank 0, the identity of `op`, such as 0."""
        return self._prefix("exscan", x, op, timeout, async_op)

    def _prefix(self, name: str, x: Any, op: str, timeout: float | None, async_op: bool) -> Any:
        operand = readable(x)
        if op == "mean":
            raise ConfigError(f"op='mean' has no meaning for {name}; use sum and divide")
        rule = reduction(op, operand.flat.dtype)
        call = self._issuer.call(name, operand.code, operand.shape, op=op)

        def body(attempt: Attempt) -> Any:
            operand.load()
            if name == "scan":
                result = operand.flat.copy()
                plan, buffers = doubling.scan(attempt.slot, attempt.size, result.size), [result]
            else:
                result = np.full_like(operand.flat, identity(op, operand.flat.dtype))
                plan, buffers = doubling.exscan(attempt.slot, attempt.size, result.size), [operand.flat, result]
            attempt.execute(plan, buffers, rule)
            return result.reshape(operand.shape)

        return self._engine.run(call, body, timeout=timeout, async_op=async_op, then=operand.alike)

    def _counts(self, counts: Sequence[int] | None, rows: int) -> list[int]:
        if counts is None:
            ranges = (part(rows, self.size, rank) for rank in self._engine.roster.ranks)
            return [stop - start for start, stop in ranges]
        try:
            counts = [operator.index(count) for count in counts]
        except TypeError:
            raise ConfigError(f"counts={counts!r} must be whole numbers of rows") from None
        if len(counts) != self.size or any(count < 0 for count in counts) or sum(counts) != rows:
            raise ConfigError(f"counts={list(counts)} must be {self.size} numbers of rows that add up to {rows}")
        return list(counts)


def _prepared_all_reduce(attempt: Attempt, flat: Array, key: tuple[Any, ...]) -> tuple[Plan, Reduction]:
    """Return plan and reduction for arrays like `flat` in this attempt, and cache them."""
    dtype, _, op, algorithm, is_plain = key
    plan = choose.all_reduce(
        attempt.slot, attempt.size, flat.size, flat.itemsize, attempt.lane_family, algorithm, attempt.sizes
    )
    # The weighted shares add up to the mean.
    prepared = plan, reduction(op if is_plain else "sum", dtype)
    if len(attempt.prepared) > CACHED_CALLS:
        attempt.prepared.clear()
    attempt.prepared[key] = prepared
    return prepared


def _reduced(operand: Operand | None, is_number: bool, x: Any) -> Any:
    """Return the result of all_reduce; `x` is None if the weights did not add up."""
    if x is None:
        raise no_weight()
    if operand is not None:
        return operand.deliver(x)
    return x[0].item() if is_number else x


def _number_array(x: Any, op: str) -> Array:
    """Return a Python number as an array of a dtype that suits `op`."""
    if isinstance(x, bool | np.bool_) and op in ("and", "or", "xor", "min", "max"):
        return np.array([x], np.bool_)
    if isinstance(x, complex | np.complexfloating):
        return np.array([x], np.complex128)
    if isinstance(x, float | np.floating):
        return np.array([x], np.float64)
    if isinstance(x, int | np.integer | np.bool_):
        try:
            return np.array([int(x)], np.float64 if op == "mean" else np.int64)
        except OverflowError:
            raise TypeError(f"{x} does not fit into 64 bits; pass a float or an array") from None
    raise TypeError(f"cannot reduce a {type(x).__name__}; pass int, float, complex, bool or an array")


def _rows(operand: Operand) -> int:
    if not operand.shape:
        raise TypeError("reduce_scatter splits axis 0, but the array has no axes")
    return operand.shape[0]
