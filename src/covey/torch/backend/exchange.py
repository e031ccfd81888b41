"""Collectives that write their results into memory of the caller, as those of torch do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from covey.base.arithmetic import DTYPES, reduction
from covey.base.errors import ConfigError, MismatchError
from covey.plan import choose, direct
from covey.runtime.buffers import Operand, readable, writable
from covey.runtime.collectives.attempt import NOTHING
from covey.runtime.group import compression, movements
from covey.runtime.group.group import Group, offered
from covey.runtime.group.messages import Messages
from covey.runtime.group.reductions import Reductions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from covey.compress.feedback import ErrorFeedback
    from covey.runtime.collectives.attempt import Attempt
    from covey.runtime.collectives.engine import Engine
    from covey.runtime.group.compression import Piece
    from covey.runtime.group.group import GroupHome
    from covey.runtime.group.issuer import Issuer

    Array = np.ndarray[Any, np.dtype[Any]]


class TensorMoves:
    """Operations into memory of the caller, as `TensorGroup` offers them."""

    def __init__(self, issuer: Issuer) -> None:
        self._issuer, self._engine = issuer, issuer.engine
        self.rank, self.size = issuer.rank, issuer.size
        self._reductions, self._messages = Reductions(issuer), Messages(issuer)

    def average_gradients(
        self,
        pieces: Sequence[Piece],
        feedback: ErrorFeedback | None,
        weight: float | None = None,
        *,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Replace arrays of gradients by their means over all ranks, in one operation.

        Each piece has its codec, and parts with names, under which `feedback` keeps what is lost. With `weight`, this
        rank's gradients count that many times; if no rank has a weight, the gradients become 0.
        """
        if weight is None and len(pieces) == 1 and pieces[0].codec is None:
            x: Any = pieces[0].operand
            return self._reductions.all_reduce(x, "mean", timeout=timeout, async_op=async_op)
        return compression.reduce_gradients(
            self._issuer, pieces, "mean", weight=weight, needs_weight=False, feedback=feedback, timeout=timeout,
            async_op=async_op,
        )  # fmt: skip

    def all_gather_into(
        self, outs: Sequence[Any], x: Any, *, timeout: float | None = None, async_op: bool = False
    ) -> Any:
        """Fill `outs[r]` with `x` of rank r; sizes may differ, but the list of sizes must be equal on all ranks."""
        targets, own = self._targets(outs), readable(x)
        _check_alike([targets[self.rank], own], "this rank's input and its part of the output")
        _check_dtypes([own, *targets])
        lengths = tuple(target.flat.size for target in targets)
        call = self._issuer.call("all_gather", own.code, None, lengths=_compact(lengths))

        def body(attempt: Attempt) -> tuple[int, ...]:
            blocks = attempt.chosen([target.flat for target in targets])
            blocks[attempt.slot][...] = own.load()
            plan = choose.all_gather(attempt.slot, tuple(attempt.chosen(lengths)), attempt.lane_family, None)
            attempt.execute(plan, blocks)
            return attempt.ranks

        return self._engine.run(call, body, timeout=timeout, async_op=async_op, then=self._stores(targets))

    def gather_into(
        self, outs: Sequence[Any] | None, x: Any, root: int, *, timeout: float | None = None, async_op: bool = False
    ) -> Any:
        """Fill `outs[r]` of `root` with `x` of rank r; other ranks pass None."""
        root, own = self._issuer.check_rank(root, "root"), readable(x)
        targets = self._targets(outs) if self.rank == root else []
        _check_dtypes([own, *targets])
        if targets:
            _check_alike([targets[root], own], "this rank's input and its part of the output")
        call = self._issuer.call("gather", own.code, None, root=root)

        def body(attempt: Attempt) -> tuple[int, ...]:
            if targets:
                blocks = attempt.chosen([target.flat for target in targets])
                blocks[attempt.slot][...] = own.load()
            else:
                blocks = [NOTHING] * attempt.size
                blocks[attempt.slot] = own.load()
            lengths = [block.size for block in blocks]
            attempt.execute(direct.gather(attempt.slot, attempt.slot_of(root), lengths), blocks)
            return attempt.ranks

        then = self._stores(targets)
        return self._engine.run(call, body, timeout=timeout, async_op=async_op, then=then, root=root)

    def scatter_into(
        self, out: Any, xs: Sequence[Any] | None, root: int, *, timeout: float | None = None, async_op: bool = False
    ) -> Any:
        """Fill `out` of rank r with `xs[r]` of `root`; other ranks pass None."""
        root, target = self._issuer.check_rank(root, "root"), writable(out)
        parts = self._issuer.list_of_operands(xs, "the list to scatter") if self.rank == root else []
        _check_dtypes([target, *parts])
        if parts:
            _check_alike([target, parts[root]], "the output and this rank's part of the input")
        call = self._issuer.call("scatter", target.code, None, root=root)

        def body(attempt: Attempt) -> None:
            if parts:
                blocks = attempt.chosen([part.load() for part in parts])
            else:
                blocks = [NOTHING] * attempt.size
                blocks[attempt.slot] = target.flat
            lengths = [block.size for block in blocks]
            attempt.execute(direct.scatter(attempt.slot, attempt.slot_of(root), lengths), blocks)
            if parts:
                target.flat[...] = parts[root].flat  # only now: it may overlap another rank's part

        def deliver(_: None) -> None:
            target.store()

        return self._engine.run(call, body, timeout=timeout, async_op=async_op, then=deliver, root=root)

    def all_to_all_into(
        self, outs: Sequence[Any], ins: Sequence[Any], *, timeout: float | None = None, async_op: bool = False
    ) -> Any:
        """Send `ins[r]` to rank r, and fill `outs[r]` with what rank r sent to this one."""
        targets, parts = self._targets(outs), self._issuer.list_of_operands(ins, "the list of inputs")
        _check_dtypes([*parts, *targets])
        _check_alike([targets[self.rank], parts[self.rank]], "this rank's input for itself and the output for it")
        call = self._issuer.call("all_to_all", parts[0].code, None)

        def body(attempt: Attempt) -> tuple[int, ...]:
            outgoing = attempt.chosen([part.load() for part in parts])
            incoming = attempt.chosen([target.flat for target in targets])
            incoming[attempt.slot][...] = outgoing[attempt.slot]
            plan = direct.all_to_all(attempt.slot, [block.size for block in outgoing], [room.size for room in incoming])
            attempt.execute(plan, [*outgoing, *incoming])
            return attempt.ranks

        return self._engine.run(call, body, timeout=timeout, async_op=async_op, then=self._stores(targets))

    def reduce_scatter_into(
        self, out: Any, xs: Sequence[Any], op: str, *, timeout: float | None = None, async_op: bool = False
    ) -> Any:
        """Fill `out` of rank r with the combination of `xs[r]` of all ranks."""
        target, parts = writable(out), self._issuer.list_of_operands(xs, "the list to reduce")
        _check_dtypes([target, *parts])
        _check_alike([target, parts[self.rank]], "the output and this rank's part of the input")
        rule = reduction(op, target.flat.dtype)
        lengths = [part.flat.size for part in parts]
        call = self._issuer.call("reduce_scatter", target.code, None, op=op, lengths=_compact(tuple(lengths)))
        # The parts are read until the end, so the result must not overwrite them.
        is_apart = not any(np.may_share_memory(target.flat, part.flat) for part in parts)

        def body(attempt: Attempt) -> Array | None:
            blocks = [part.load() for part in parts]
            result = target.flat if is_apart else np.empty_like(target.flat)
            result[...] = blocks[self.rank]
            plan = direct.reduce_scatter(
                attempt.slot, attempt.chosen(lengths), attempt.sizes.segment(target.flat.itemsize)
            )
            attempt.execute(plan, [*attempt.chosen(blocks), result], rule)
            return None if is_apart else result

        def deliver(result: Array | None) -> None:
            if result is not None:
                target.flat[...] = result
            target.store()

        return self._engine.run(call, body, timeout=timeout, async_op=async_op, then=deliver)

    def gather_pairs(
        self,
        indices: Any,
        values: Any,
        bounds: Sequence[int],
        then: Callable[[list[tuple[Array, Array]]], None],
        *,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Call `then` with the indices and values of every remaining rank, in the order of ranks.

        `indices` has a column for each row of `values`; their number may differ between ranks. The numbers in row r of
        `indices` are below `bounds[r]`.
        """
        keys, entries = readable(indices), readable(values)
        call = self._issuer.call(
            "all_gather", entries.code, None, sparse=True, rows=keys.shape[0], entry=entries.shape[1:]
        )

        def body(attempt: Attempt) -> list[tuple[Array, Array]]:
            ndims = (movements.Wanted(ndim=len(operand.shape)) for operand in (keys, entries))
            columns, rows = (
                movements.gather_all(attempt, operand, wanted=wanted)
                for operand, wanted in zip((keys, entries), ndims, strict=True)
            )
            for slot, where, what in zip(attempt.slots, columns, rows, strict=True):
                if where.shape != (keys.shape[0], what.shape[0]) or what.shape[1:] != entries.shape[1:]:
                    shapes = f"{list(where.shape)} and {list(what.shape)}"
                    attempt.reject(slot, f"indices and values that are not a sparse tensor: shapes {shapes}")
                if (where < 0).any() or (where >= np.array(bounds)[:, None]).any():
                    attempt.reject(slot, f"indices beyond the {list(bounds)} of the sparse tensor")
            return list(zip(columns, rows, strict=True))

        return self._engine.run(call, body, timeout=timeout, async_op=async_op, then=then)

    def recv_into(self, out: Any, src: int, tag: int, *, timeout: float | None = None, async_op: bool = False) -> Any:
        """Fill `out` with the next message from `src` with `tag`; return the rank that sent it."""
        deadline = None
        if not async_op:
            received, deadline = self._messages.receive_short(out, src, tag, timeout)
            if received is not False:
                return src
        target = writable(out)

        def finish(message: Any) -> int:
            if message.is_object:
                raise MismatchError(f"rank {message.source} sent an object with tag {message.tag}, not a tensor")
            target.store()
            return int(message.source)

        return self._messages.receive(src, tag, target, finish, timeout, async_op, deadline)

    def _targets(self, outs: Sequence[Any] | None) -> list[Operand]:
        if outs is None or len(outs) != self.size:
            got = "None" if outs is None else f"{len(outs)} tensors"
            raise ConfigError(f"the output list must have a tensor for each of the {self.size} ranks, not {got}")
        return [writable(out) for out in outs]

    def _stores(self, targets: list[Operand]) -> Callable[[tuple[int, ...]], None]:
        """Return a function that stores the outputs, or raises if a lost rank did not fill its part."""

        def store(ranks: tuple[int, ...]) -> None:
            if targets and len(ranks) < self.size:
                lost = next(rank for rank in self._engine.roster.ranks if rank not in ranks)
                raise self._engine.failure.part_lost(lost)
            for target in targets:
                target.store()

        return store


_moves = offered(TensorMoves)


class TensorGroup(Group):
    """A group whose ranks know the sizes of what they receive.

    With `on_loss="continue"`, an operation raises on a rank with an output that a lost rank should have filled: torch
    cannot express that a part is missing, and the program would take old memory for a result. The group continues.
    """

    def __init__(self, engine: Engine, home: GroupHome | None, *, local_rank: int) -> None:
        super().__init__(engine, home, local_rank=local_rank)
        self._bind(TensorMoves(self._issuer))

    average_gradients = _moves.average_gradients
    all_gather_into = _moves.all_gather_into
    gather_into = _moves.gather_into
    scatter_into = _moves.scatter_into
    all_to_all_into = _moves.all_to_all_into
    reduce_scatter_into = _moves.reduce_scatter_into
    gather_pairs = _moves.gather_pairs
    recv_into = _moves.recv_into


def _compact(lengths: tuple[int, ...]) -> Any:
    """Return lengths as error messages show them: one number if all are equal."""
    return lengths[0] if len(set(lengths)) == 1 else lengths


def _check_alike(operands: list[Operand], what: str) -> None:
    if len({operand.flat.size for operand in operands}) > 1:
        shapes = " and ".join(str(list(operand.shape)) for operand in operands)
        raise ConfigError(f"{what} must have the same number of elements; they have shapes {shapes}")


def _check_dtypes(operands: list[Operand]) -> None:
    if len(found := {operand.code for operand in operands}) > 1:
        names = sorted(DTYPES[code].name for code in found)
        raise TypeError(f"tensors of one operation must have one dtype, not {', '.join(names)}")
