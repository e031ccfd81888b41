"""The operations of a group that move arrays between its ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal, overload

import numpy as np

from covey.base.config import check_timeout
from covey.base.errors import ConfigError
from covey.plan import choose, doubling
from covey.runtime.buffers import Operand, readable, writable
from covey.runtime.collectives.attempt import NOTHING
from covey.runtime.group import movements

if TYPE_CHECKING:
    from collections.abc import Sequence

    from covey.compress.policy import CompressValue
    from covey.runtime.buffers import Memory, MemoryT, Values
    from covey.runtime.collectives.attempt import Attempt
    from covey.runtime.group.issuer import Issuer
    from covey.runtime.work import Work

    Array = np.ndarray[Any, np.dtype[Any]]


ALL_GATHER: Final = ("all_gather",)
ALL_TO_ALL: Final = ("all_to_all",)
BARRIER: Final = ("barrier",)
"""What names these operations to a shortcut."""


class Moves:
    """Operations that move arrays, as `Group` offers them."""

    def __init__(self, issuer: Issuer) -> None:
        self._issuer, self._engine, self._facts = issuer, issuer.engine, issuer.engine.facts
        self.rank, self.size, self._shortcuts = issuer.rank, issuer.size, issuer.engine.shortcuts

    @overload
    def broadcast(
        self,
        x: MemoryT,
        root: int = ...,
        *,
        compress: CompressValue = ...,
        timeout: float | None = ...,
        algorithm: str | None = ...,
        async_op: Literal[False] = ...,
    ) -> MemoryT: ...

    @overload
    def broadcast(
        self,
        x: MemoryT,
        root: int = ...,
        *,
        compress: CompressValue = ...,
        timeout: float | None = ...,
        algorithm: str | None = ...,
        async_op: Literal[True],
    ) -> Work[MemoryT]: ...

    @overload
    def broadcast(
        self,
        x: Memory,
        root: int = ...,
        *,
        compress: CompressValue = ...,
        timeout: float | None = ...,
        algorithm: str | None = ...,
        async_op: bool,
    ) -> Any: ...

    def broadcast(
        self,
        x: Any,
        root: int = 0,
        *,
        compress: CompressValue = None,
        timeout: float | None = None,
        algorithm: str | None = None,
        async_op: bool = False,
    ) -> Any:
        """Copy `x` of `root` into `x` of every rank, and return `x`.

        `compress` sends fewer bytes: a cast or a quantiser, like "int8". Then `x` of the root is rounded as well.
        """
        if compress is not None:
            from covey.runtime.group import compression

            if (codec := compression.codec_of(compress, writable(x, is_read=False))) is not None:
                root = self._issuer.check_rank(root, "root")
                return compression.broadcast(self._issuer, x, root, codec, algorithm, timeout, async_op)
        shortcut = self._shortcuts.any if algorithm is None and not async_op else None
        if shortcut is not None and type(root) is int and (what := shortcut.broadcasts.get(root)) is not None:
            if timeout is not None:
                check_timeout(timeout)
            outcome = shortcut.run(x, what)  # as `_took_shortcut`, whose call would be a tenth of the time
            if outcome is True:
                return x
            if outcome is not False:
                return self._issuer.resume(x, outcome, timeout)
        root = self._issuer.check_rank(root, "root")
        operand = readable(x) if self.rank == root else writable(x, is_read=False)
        size, itemsize = operand.flat.size, operand.flat.itemsize
        choose.broadcast(self.rank, self.size, root, size, itemsize, algorithm, self._facts.sizes)
        call = self._issuer.call("broadcast", operand.code, operand.shape, root=root, algorithm=algorithm)

        def body(attempt: Attempt) -> Any:
            slot = attempt.slot_of(root)
            plan = choose.broadcast(attempt.slot, attempt.size, slot, size, itemsize, algorithm, attempt.sizes)
            attempt.execute(plan, [operand.load()], keeps=operand.is_own)
            return x

        then = operand.deliver if self.rank != root else None
        result = self._engine.run(call, body, timeout=timeout, async_op=async_op, then=then, root=root)
        if shortcut is not None and type(x) is np.ndarray and operand.is_own:
            plan = choose.broadcast(self.rank, self.size, root, size, itemsize, None, self._facts.sizes)
            what = shortcut.broadcasts[root] = shortcut.name(("broadcast", root))
            shortcut.add(operand.flat, what, operand.shape, call, plan, None, self._engine.attempt)
        return result

    @overload
    def all_gather(
        self,
        x: Values,
        *,
        compress: CompressValue = ...,
        timeout: float | None = ...,
        algorithm: str | None = ...,
        async_op: Literal[False] = ...,
    ) -> list[Array]: ...

    @overload
    def all_gather(
        self,
        x: Values,
        *,
        out: MemoryT,
        compress: CompressValue = ...,
        timeout: float | None = ...,
        algorithm: str | None = ...,
        async_op: Literal[False] = ...,
    ) -> MemoryT: ...

    @overload
    def all_gather(
        self,
        x: Values,
        *,
        compress: CompressValue = ...,
        timeout: float | None = ...,
        algorithm: str | None = ...,
        async_op: Literal[True],
    ) -> Work[list[Array]]: ...

    @overload
    def all_gather(
        self,
        x: Values,
        *,
        out: MemoryT,
        compress: CompressValue = ...,
        timeout: float | None = ...,
        algorithm: str | None = ...,
        async_op: Literal[True],
    ) -> Work[MemoryT]: ...

    @overload
    def all_gather(
        self,
        x: Values,
        *,
        out: Memory | None = ...,
        compress: CompressValue = ...,
        timeout: float | None = ...,
        algorithm: str | None = ...,
        async_op: bool,
    ) -> Any: ...

    def all_gather(
        self,
        x: Any,
        *,
        out: Any = None,
        compress: CompressValue = None,
        timeout: float | None = None,
        algorithm: str | None = None,
        async_op: bool = False,
    ) -> Any:
        """Return `x` of every rank as a list by rank; shapes may differ, and a lost rank's element is None.

        With `out`, an array of shape (size, *x.shape), fill its rows and return it; then all shapes must be equal.
        `compress` sends fewer bytes: a cast or a quantiser, like "int8"; then all shapes must be equal, too.
        """
        if compress is not None:
            from covey.runtime.group import compression

            whole = readable(x)
            if (codec := compression.codec_of(compress, whole)) is not None:
                return compression.all_gather(self._issuer, whole, out, codec, algorithm, timeout, async_op)
        if out is not None:
            return self._all_gather_rows(x, out, timeout, algorithm, async_op)
        operand = readable(x)
        # Raises for an unknown algorithm before anything is sent.
        choose.all_gather(self.rank, (0,) * self.size, "ring", algorithm)
        call = self._issuer.call("all_gather", operand.code, None, algorithm=algorithm)
        return self._engine.run(
            call,
            lambda attempt: attempt.by_rank(movements.gather_all(attempt, operand, algorithm)),
            timeout=timeout,
            async_op=async_op,
            then=operand.alike,
        )

    def _all_gather_rows(self, x: Any, out: Any, timeout: float | None, algorithm: str | None, async_op: bool) -> Any:
        shortcut = self._shortcuts.any if algorithm is None and not async_op else None
        if shortcut is not None and self._issuer.took_shortcut(shortcut, ALL_GATHER, x, out, timeout):
            return out
        operand = readable(x)
        rows = self._issuer.output(out, operand.code, (self.size, *operand.shape))
        call = self._issuer.call("all_gather", operand.code, operand.shape, out=True, algorithm=algorithm)
        count = operand.flat.size
        choose.all_gather(self.rank, (count,) * self.size, "ring", algorithm)

        def body(attempt: Attempt) -> Any:
            flat = rows.load()
            self._copy_own_row(attempt, operand.load(), rows, count)
            plan = choose.all_gather_rows(attempt.slot, attempt.ranks, count, attempt.lane_family, algorithm)
            attempt.execute(plan, (operand.flat, flat), keeps=rows.is_own)
            return out

        result = self._engine.run(call, body, timeout=timeout, async_op=async_op, then=rows.deliver)
        if shortcut is not None and type(x) is type(out) is np.ndarray and operand.is_own and rows.is_own:
            attempt = self._engine.attempt
            plan = choose.all_gather_rows(attempt.slot, attempt.ranks, count, attempt.lane_family, None)
            copied = 0, self.rank * count, count
            shortcut.add(operand.flat, ALL_GATHER, x.shape, call, plan, None, attempt, out, copied)
        return result

    def _copy_own_row(self, attempt: Attempt, row: Array, rows: Operand, count: int) -> None:
        """Copy a row to this rank's row of an output of rows, which is saved before."""
        mine = rows.flat[self.rank * count : (self.rank + 1) * count]
        if rows.is_own:
            attempt.keep(mine, rows.flat)
        mine[...] = row

    @overload
    def gather(
        self, x: Values, root: int = ..., *, timeout: float | None = ..., async_op: Literal[False] = ...
    ) -> list[Array] | None: ...

    @overload
    def gather(
        self, x: Values, root: int = ..., *, timeout: float | None = ..., async_op: Literal[True]
    ) -> Work[list[Array] | None]: ...

    @overload
    def gather(self, x: Values, root: int = ..., *, timeout: float | None = ..., async_op: bool) -> Any: ...

    def gather(self, x: Any, root: int = 0, *, timeout: float | None = None, async_op: bool = False) -> Any:
        """Return `x` of every rank as a list by rank on `root`, None on other ranks; shapes may differ."""
        root = self._issuer.check_rank(root, "root")
        operand = readable(x)
        call = self._issuer.call("gather", operand.code, None, root=root)
        return self._engine.run(
            call,
            lambda attempt: movements.gathered_by_rank(attempt, operand, root),
            timeout=timeout,
            async_op=async_op,
            then=operand.alike,
            root=root,
        )

    @overload
    def scatter(
        self,
        xs: Sequence[Values] | None,
        root: int = ...,
        *,
        timeout: float | None = ...,
        async_op: Literal[False] = ...,
    ) -> Array: ...

    @overload
    def scatter(
        self, xs: Sequence[Values] | None, root: int = ..., *, timeout: float | None = ..., async_op: Literal[True]
    ) -> Work[Array]: ...

    @overload
    def scatter(
        self, xs: Sequence[Values] | None, root: int = ..., *, timeout: float | None = ..., async_op: bool
    ) -> Any: ...

    def scatter(
        self, xs: Sequence[Any] | None, root: int = 0, *, timeout: float | None = None, async_op: bool = False
    ) -> Any:
        """Return this rank's element of `xs`, a list by rank that `root` passes; other ranks pass None."""
        root = self._issuer.check_rank(root, "root")
        operands = self._issuer.list_of_operands(xs, "xs") if self.rank == root else None
        call = self._issuer.call("scatter", None, None, root=root)
        return self._engine.run(
            call,
            lambda attempt: movements.scattered_from_rank(attempt, operands, root),
            timeout=timeout,
            async_op=async_op,
            then=None if operands is None else operands[root].alike,
            root=root,
        )

    @overload
    def all_to_all(
        self, xs: Sequence[Values] | Array, *, timeout: float | None = ..., async_op: Literal[False] = ...
    ) -> list[Array]: ...

    @overload
    def all_to_all(
        self, xs: Memory, *, out: MemoryT, timeout: float | None = ..., async_op: Literal[False] = ...
    ) -> MemoryT: ...

    @overload
    def all_to_all(
        self, xs: Sequence[Values] | Array, *, timeout: float | None = ..., async_op: Literal[True]
    ) -> Work[list[Array]]: ...

    @overload
    def all_to_all(
        self, xs: Memory, *, out: MemoryT, timeout: float | None = ..., async_op: Literal[True]
    ) -> Work[MemoryT]: ...

    @overload
    def all_to_all(
        self, xs: Sequence[Values] | Array, *, out: Memory | None = ..., timeout: float | None = ..., async_op: bool
    ) -> Any: ...

    def all_to_all(
        self, xs: Sequence[Any] | Memory, *, out: Any = None, timeout: float | None = None, async_op: bool = False
    ) -> Any:
        """Send element r of the list `xs` to rank r, and return the list of what every rank sent to this one.

        With `out`, `xs` and `out` are arrays of one shape (size, ...), the same on all ranks: row r of `xs` goes to
        rank r, and row r of `out` comes from rank r. Return `out`.
        """
        if out is not None:
            return self._all_to_all_rows(xs, out, timeout, async_op)
        operands = self._issuer.list_of_operands(xs, "xs")
        call = self._issuer.call("all_to_all", None, None)
        return self._engine.run(
            call,
            lambda attempt: attempt.by_rank(movements.exchange_all(attempt, attempt.chosen(operands))),
            timeout=timeout,
            async_op=async_op,
            then=operands[self.rank].alike,
        )

    def _all_to_all_rows(self, x: Any, out: Any, timeout: float | None, async_op: bool) -> Any:
        shortcut = None if async_op else self._shortcuts.any
        if shortcut is not None and self._issuer.took_shortcut(shortcut, ALL_TO_ALL, x, out, timeout):
            return out
        operand = readable(x)
        if operand.shape[:1] != (self.size,):
            raise ConfigError(
                f"xs has shape {list(operand.shape)}; with out= it needs a row for each of {self.size} ranks"
            )
        rows = self._issuer.output(out, operand.code, operand.shape)
        call = self._issuer.call("all_to_all", operand.code, operand.shape, out=True)
        count = operand.flat.size // self.size
        overlaps = np.may_share_memory(operand.flat, rows.flat)

        def body(attempt: Attempt) -> Any:
            flat = rows.load()
            source = operand.load().copy() if overlaps else operand.load()  # what is sent must not change before
            self._copy_own_row(attempt, source[self.rank * count : (self.rank + 1) * count], rows, count)
            plan = choose.all_to_all_rows(attempt.slot, attempt.ranks, count)
            attempt.execute(plan, (source, flat), keeps=rows.is_own)
            return out

        result = self._engine.run(call, body, timeout=timeout, async_op=async_op, then=rows.deliver)
        if shortcut is not None and type(x) is type(out) is np.ndarray and operand.is_own and rows.is_own:
            attempt = self._engine.attempt
            plan = choose.all_to_all_rows(attempt.slot, attempt.ranks, count)
            copied = self.rank * count, self.rank * count, count
            shortcut.add(operand.flat, ALL_TO_ALL, x.shape, call, plan, None, attempt, out, copied)
        return result

    @overload
    def barrier(self, *, timeout: float | None = ..., async_op: Literal[False] = ...) -> None: ...

    @overload
    def barrier(self, *, timeout: float | None = ..., async_op: Literal[True]) -> Work[None]: ...

    @overload
    def barrier(self, *, timeout: float | None = ..., async_op: bool) -> Any: ...

    def barrier(self, *, timeout: float | None = None, async_op: bool = False) -> Any:
        """Return once every rank has called this."""
        shortcut = None if async_op else self._shortcuts.any
        if shortcut is not None:
            if timeout is not None:
                check_timeout(timeout)
            outcome = shortcut.run(None, BARRIER)  # as `_took_shortcut`, whose call would be a tenth of the time
            if outcome is True:
                return None
            if outcome is not False:
                return self._issuer.resume(None, outcome, timeout)
        call = self._issuer.call("barrier", None, None)

        def body(attempt: Attempt) -> None:
            attempt.execute(doubling.dissemination(attempt.slot, attempt.size), [NOTHING])

        result = self._engine.run(call, body, timeout=timeout, async_op=async_op)
        if shortcut is not None:
            shortcut.add_barrier(BARRIER, call, doubling.dissemination(self.rank, self.size), self._engine.attempt)
        return result
