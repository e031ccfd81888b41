"""The group: what a program holds to work on arrays together with the other ranks."""

from __future__ import annotations

import functools
import hashlib
import itertools
import numbers
import operator
import time
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np

from covey.base.arithmetic import identity, reduction
from covey.base.config import check_timeout
from covey.base.dtypes import DTYPES, dtype_code
from covey.base.errors import ConfigError, MismatchError
from covey.plan import barrier, choose, direct, doubling
from covey.plan.moves import part
from covey.proto.matching import ANY
from covey.runtime import gradients, movements, survival
from covey.runtime.buffers import Operand, readable, writable
from covey.runtime.engine import Engine
from covey.runtime.fault import Fault
from covey.runtime.ledger import Call, make_call
from covey.wire import objects

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, MutableMapping, Sequence
    from types import TracebackType

    from covey.base.arithmetic import Reduction
    from covey.plan.moves import Plan
    from covey.runtime.circle import Circle
    from covey.runtime.events import Event
    from covey.runtime.messenger import Messenger
    from covey.runtime.restore import RestoreReport
    from covey.runtime.survival import Assembly
    from covey.runtime.work import Work

    Array = np.ndarray[Any, np.dtype[Any]]

CACHED_CALLS: Final = 4096
"""Descriptions of different calls that are kept; a program that makes more pays for making them again."""

LEAVE_SECONDS: Final = 5.0
"""How long the others may take to agree that a rank leaves."""
_BYTES: Final = dtype_code(np.dtype(np.uint8))


class Group:
    """An ordered set of ranks that work together. Use it in `with`, or `close` it.

    Collectives of a group run in the order they are issued, and every rank must issue the same ones in the same
    order. One thread at a time issues them; for more threads, `split` more groups. Point-to-point messages have
    lanes of their own and go on whatever the collectives do. After an exception the contents of arrays that the
    operation was changing are undefined; with `on_loss="continue"` they are what they were before.

    Every operation takes `timeout=` seconds (default: the group's, 30 minutes) and `async_op=True`, which returns a
    `Work` at once. Arrays are numpy arrays, torch CPU tensors, or writable buffers, used in place without a copy
    when they are contiguous.

    Every operation may raise:
        MismatchError: ranks called different things. The group is closed.
        PeerLostError: a member went away. The group is closed; with `on_loss="continue"` it goes on: only a lost root
            or partner of a message raises.
        GroupChangedError, QuorumLostError: with `on_loss="continue"`: the others went on without this rank, or too few
            are left to go on.
        DeadlineError: `timeout` passed. The group is closed, unless it was a message: then only that message failed.
        ClosedError: the group was closed before; the first cause is its `__cause__`.
        BusyError: another thread is in a collective of this group.
        TypeError, ConfigError: the call itself cannot work; nothing was sent.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        local_rank: int,
        before_close: Callable[[], None] | None = None,
        on_close: Callable[[], None] | None = None,
        is_fresh: bool = False,
    ) -> None:
        """Closing begins with `before_close` and ends with `on_close`.

        `is_fresh`: this rank was not in the run before this group, so its state is worth nothing.
        """
        self._engine = engine
        self._local_rank = local_rank
        self._before_close, self._on_close = before_close, on_close
        self._is_fresh = is_fresh
        self._calls: dict[Any, Call] = {}
        self._sidecar: Assembly | None = None
        self._restores = 0
        self._children = itertools.count(1)

    # Who

    @property
    def rank(self) -> int:
        """This process's number in the group."""
        return self._engine.rank

    @property
    def size(self) -> int:
        """How many ranks the group has."""
        return self._engine.size

    @property
    def live(self) -> tuple[int, ...]:
        """The ranks that have not been lost."""
        return self._engine.live

    @property
    def generation(self) -> int:
        """The number of this group in the run's history."""
        return 0 if self._engine.generation is None else self._engine.generation.number

    @property
    def name(self) -> str:
        """What errors call this group."""
        return self._engine.name

    @property
    def on_loss(self) -> str:
        """What an operation does that loses a member: raise, or continue among those who are left."""
        return self._engine.config.on_loss

    @property
    def contributors(self) -> tuple[int, ...]:
        """The ranks whose input is in the result of the last collective that returned."""
        return self._engine.contributors

    @property
    def sequence(self) -> int:
        """How many collectives have returned here, counted from the group's beginning."""
        return self._engine.last_returned

    @property
    def local_rank(self) -> int:
        """This process's number among the run's processes on its host: the index of its device, for instance."""
        return self._local_rank

    def lanes(self) -> dict[int, str]:
        """Return the kind of lane to each other rank: shm, unix, tcp, secure or memory."""
        return self._engine.lane_kinds()

    def __repr__(self) -> str:
        return f"<Group {self.name!r}: rank {self.rank} of {self.size}>"

    # Reductions

    def all_reduce(
        self,
        x: Any,
        op: str = "sum",
        *,
        weight: float | None = None,
        timeout: float | None = None,
        algorithm: str | None = None,
        async_op: bool = False,
    ) -> Any:
        """Combine `x` of all ranks, in place on every rank; return `x`. A Python number gives back a number.

        `weight` makes a mean count this rank's `x` that many times (unequal batches); every rank passes one.
        The result is bit-identical on all ranks.
        """
        is_number = False
        if type(x) is np.ndarray and x.flags.carray:  # the common case, kept short: this call is paid per step
            operand, flat, shape = None, x if x.ndim == 1 else x.reshape(-1), x.shape
        elif is_number := isinstance(x, numbers.Number | np.bool_):
            x = flat = _number_array(x, op)
            operand, shape = None, flat.shape
        else:
            operand = writable(x)
            flat, shape = operand.flat, operand.shape
        is_plain = weight is None
        key = (flat.dtype, shape, op, algorithm, is_plain)
        call = self._calls.get(key)
        if call is None:
            call = self._prepare_all_reduce(flat, key)
        if weight is not None:
            _check_weight(op, weight)

        def body(circle: Circle) -> Any:
            prepared = circle.prepared.get(key)
            if prepared is None:
                prepared = _prepared_all_reduce(circle, flat, key)
            plan, rule = prepared
            if operand is not None:
                operand.load()
            if weight is not None and not _weigh(circle, flat, weight):
                return None  # every rank finds the same, so the group can go on
            # What was weighed is kept already, and what is not contiguous is loaded again.
            circle.execute(plan, (flat,), rule, keeps=weight is None and (operand is None or operand.strided is None))
            return x

        then = None
        if is_number or weight is not None or operand is not None:
            then = functools.partial(_reduced, operand, is_number)
        return self._engine.run(call, body, timeout=timeout, async_op=async_op, then=then)

    def _prepare_all_reduce(self, flat: Array, key: tuple[Any, ...]) -> Call:
        """Return what repeated calls with arrays like this one are called; raise if they cannot work."""
        _, shape, op, algorithm, is_plain = key
        reduction(op, flat.dtype)
        _prepared_all_reduce(self._engine.circle, flat, key)
        if len(self._calls) > CACHED_CALLS:
            self._calls.clear()
        call = make_call(
            "all_reduce", dtype_code(flat.dtype), shape, op=op, weighted=None if is_plain else True, algorithm=algorithm
        )
        self._calls[key] = call
        return call

    def reduce(
        self,
        x: Any,
        root: int = 0,
        op: str = "sum",
        *,
        timeout: float | None = None,
        algorithm: str | None = None,
        async_op: bool = False,
    ) -> Any:
        """Combine `x` of all ranks into `x` of `root`; elsewhere `x` stays as it is. Returns `x`."""
        root = self._check_rank(root, "root")
        operand = writable(x)
        rule = reduction(op, operand.flat.dtype)
        choose.reduce(self.rank, self.size, root, operand.flat.size, operand.flat.itemsize, algorithm)
        call = self._call("reduce", operand.code, operand.shape, root=root, op=op, algorithm=algorithm)

        def body(circle: Circle) -> Any:
            size, place = operand.flat.size, circle.position(root)
            plan = choose.reduce(circle.rank, circle.size, place, size, operand.flat.itemsize, algorithm)
            # A rank that passes others' contributions on combines them in memory of its own.
            is_root = circle.rank == place
            flat = operand.load() if is_root or not plan.recvs else operand.load().copy()
            circle.execute(plan, [flat], rule, keeps=is_root and operand.strided is None)
            return x

        then = functools.partial(_delivered, operand) if self.rank == root else None
        return self._engine.run(call, body, timeout=timeout, async_op=async_op, then=then, root=root)

    def reduce_scatter(
        self,
        x: Any,
        op: str = "sum",
        *,
        counts: Sequence[int] | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Combine `x` of all ranks and return this rank's part of the result; `x` stays as it is.

        Axis 0 is split as numpy.array_split does, or into `counts` rows per rank.
        """
        operand = readable(x)
        if not operand.shape:
            raise TypeError("reduce_scatter splits axis 0, but the array has no axes")
        rule = reduction(op, operand.flat.dtype)
        rows, row = operand.shape[0], int(np.prod(operand.shape[1:], dtype=np.int64))
        shares = self._counts(counts, rows)
        lengths = [share * row for share in shares]
        starts = [0, *itertools.accumulate(lengths)]
        segment = max(1, choose.SEGMENT_BYTES // operand.flat.itemsize)
        call = self._call(
            "reduce_scatter", operand.code, operand.shape, op=op, counts=counts if counts is None else tuple(shares)
        )

        def body(circle: Circle) -> Any:
            operand.load()
            parts = [operand.flat[start : start + length] for start, length in zip(starts, lengths, strict=False)]
            result = parts[self.rank].copy()
            plan = direct.reduce_scatter(circle.rank, circle.chosen(lengths), segment)
            circle.execute(plan, [*circle.chosen(parts), result], rule)
            return result.reshape(shares[self.rank], *operand.shape[1:])

        return self._engine.run(call, body, timeout=timeout, async_op=async_op)

    def scan(self, x: Any, op: str = "sum", *, timeout: float | None = None, async_op: bool = False) -> Any:
        """Return the combination of `x` of ranks 0 up to this one; `x` stays as it is."""
        return self._prefix("scan", x, op, timeout, async_op)

    def exscan(self, x: Any, op: str = "sum", *, timeout: float | None = None, async_op: bool = False) -> Any:
        """Return the combination of `x` of the ranks before this one; on rank 0, the value that changes nothing."""
        return self._prefix("exscan", x, op, timeout, async_op)

    def _prefix(self, name: str, x: Any, op: str, timeout: float | None, async_op: bool) -> Any:
        operand = readable(x)
        if op == "mean":
            raise ConfigError(f"op='mean' has no meaning for {name}; use sum and divide")
        rule = reduction(op, operand.flat.dtype)
        call = self._call(name, operand.code, operand.shape, op=op)

        def body(circle: Circle) -> Any:
            operand.load()
            if name == "scan":
                result = operand.flat.copy()
                plan, buffers = doubling.scan(circle.rank, circle.size, result.size), [result]
            else:
                result = np.full_like(operand.flat, identity(op, operand.flat.dtype))
                plan, buffers = doubling.exscan(circle.rank, circle.size, result.size), [operand.flat, result]
            circle.execute(plan, buffers, rule)
            return result.reshape(operand.shape)

        return self._engine.run(call, body, timeout=timeout, async_op=async_op)

    def sync_gradients(
        self,
        grads: Mapping[str, Any],
        op: str = "mean",
        *,
        bucket_bytes: int = 25 << 20,
        timeout: float | None = None,
    ) -> None:
        """Combine named arrays of all ranks in place, packed into buckets of about `bucket_bytes`.

        Raises:
            MismatchError: ranks passed other names, shapes or dtypes; names the first difference.
        """
        gradients.sync(self, grads, op, bucket_bytes, timeout)

    # Moving

    def broadcast(
        self,
        x: Any,
        root: int = 0,
        *,
        timeout: float | None = None,
        algorithm: str | None = None,
        async_op: bool = False,
    ) -> Any:
        """Copy `x` of `root` into `x` of every rank; return `x`."""
        root = self._check_rank(root, "root")
        operand = readable(x) if self.rank == root else writable(x)
        size, itemsize = operand.flat.size, operand.flat.itemsize
        choose.broadcast(self.rank, self.size, root, size, itemsize, algorithm)
        call = self._call("broadcast", operand.code, operand.shape, root=root, algorithm=algorithm)

        def body(circle: Circle) -> Any:
            plan = choose.broadcast(circle.rank, circle.size, circle.position(root), size, itemsize, algorithm)
            circle.execute(plan, [operand.load()], keeps=operand.strided is None)
            return x

        then = functools.partial(_delivered, operand) if self.rank != root else None
        return self._engine.run(call, body, timeout=timeout, async_op=async_op, then=then, root=root)

    def all_gather(
        self,
        x: Any,
        *,
        out: Any = None,
        timeout: float | None = None,
        algorithm: str | None = None,
        async_op: bool = False,
    ) -> Any:
        """Return `x` of every rank as a list by rank; shapes may differ.

        With `out`, an array of shape (size, *x.shape), fill its rows instead and return it; shapes must agree.
        """
        operand = readable(x)
        if out is None:
            # Unknown names are refused here, before the other ranks are involved.
            choose.all_gather(self.rank, (0,) * self.size, "ring", algorithm)
            call = self._call("all_gather", operand.code, None, algorithm=algorithm)
            return self._engine.run(
                call,
                lambda circle: circle.by_rank(movements.gather_all(circle, operand, algorithm)),
                timeout=timeout,
                async_op=async_op,
            )
        rows = writable(out)
        if rows.shape != (self.size, *operand.shape) or rows.code != operand.code:
            raise TypeError(
                f"out must be {DTYPES[operand.code].name}{[self.size, *operand.shape]}, not "
                f"{DTYPES[rows.code].name}{list(rows.shape)}"
            )
        call = self._call("all_gather", operand.code, operand.shape, out=True, algorithm=algorithm)
        choose.all_gather(self.rank, (operand.flat.size,) * self.size, "ring", algorithm)

        def body(circle: Circle) -> Any:
            blocks = circle.chosen(list(rows.load().reshape(self.size, operand.flat.size)))
            mine = operand.load()
            if circle.kept is not None and rows.strided is None:
                circle.kept.make_room((rows.flat,))
                circle.kept.save(blocks[circle.rank])
            blocks[circle.rank][...] = mine
            lengths = (operand.flat.size,) * circle.size
            plan = choose.all_gather(circle.rank, lengths, circle.lane_family, algorithm)
            circle.execute(plan, blocks, keeps=rows.strided is None)
            return out

        then = functools.partial(_delivered, rows)
        return self._engine.run(call, body, timeout=timeout, async_op=async_op, then=then)

    def gather(self, x: Any, root: int = 0, *, timeout: float | None = None, async_op: bool = False) -> Any:
        """Return `x` of every rank as a list by rank on `root`, None elsewhere; shapes may differ."""
        root = self._check_rank(root, "root")
        operand = readable(x)
        call = self._call("gather", operand.code, None, root=root)
        return self._engine.run(
            call, lambda circle: _gathered(circle, operand, root), timeout=timeout, async_op=async_op, root=root
        )

    def scatter(
        self, xs: Sequence[Any] | None, root: int = 0, *, timeout: float | None = None, async_op: bool = False
    ) -> Any:
        """Return this rank's element of `xs`, a list by rank that `root` passes; others pass None."""
        root = self._check_rank(root, "root")
        operands = self._list_of_operands(xs, "xs") if self.rank == root else None
        call = self._call("scatter", None, None, root=root)
        return self._engine.run(
            call, lambda circle: _scattered(circle, operands, root), timeout=timeout, async_op=async_op, root=root
        )

    def all_to_all(self, xs: Sequence[Any], *, timeout: float | None = None, async_op: bool = False) -> Any:
        """Give element r of the list `xs` to rank r; return the list of what every rank gave to this one."""
        operands = self._list_of_operands(xs, "xs")
        call = self._call("all_to_all", None, None)
        return self._engine.run(
            call,
            lambda circle: circle.by_rank(movements.exchange_all(circle, circle.chosen(operands))),
            timeout=timeout,
            async_op=async_op,
        )

    def barrier(self, *, timeout: float | None = None, async_op: bool = False) -> Any:
        """Return once every rank has come here."""
        call = self._call("barrier", None, None)

        def body(circle: Circle) -> None:
            circle.execute(barrier.dissemination(circle.rank, circle.size), [self._engine.nothing])

        return self._engine.run(call, body, timeout=timeout, async_op=async_op)

    # Objects

    def broadcast_object(
        self,
        value: Any = None,
        root: int = 0,
        *,
        type: Any = None,
        allow_pickle: bool = False,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Return `value` of `root` on every rank.

        Values are JSON-like, dataclasses, bytes and numpy arrays; a dataclass arrives as a dict unless `type` names
        its class. `allow_pickle=True` takes anything else: only among ranks you trust with your account, because
        unpickling runs code that the sender chose.
        """
        root = self._check_rank(root, "root")
        failures: list[TypeError] = []
        data = _encoded(value, allow_pickle, failures) if self.rank == root else b""
        call = self._call("broadcast_object", None, None, root=root)

        return self._run_object(
            call,
            lambda circle: movements.broadcast_bytes(circle, data, circle.position(root)),
            failures,
            type,
            allow_pickle,
            timeout,
            async_op,
            root,
        )

    def all_gather_object(
        self,
        value: Any,
        *,
        type: Any = None,
        allow_pickle: bool = False,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Return `value` of every rank as a list by rank; see `broadcast_object` for what values may be."""
        failures: list[TypeError] = []
        operand = _byte_operand(_encoded(value, allow_pickle, failures))
        call = self._call("all_gather_object", None, None)
        return self._run_object(
            call,
            lambda circle: circle.by_rank(movements.gather_all(circle, operand)),
            failures,
            type,
            allow_pickle,
            timeout,
            async_op,
        )

    def gather_object(
        self,
        value: Any,
        root: int = 0,
        *,
        type: Any = None,
        allow_pickle: bool = False,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Return `value` of every rank as a list by rank on `root`, None elsewhere; see `broadcast_object`."""
        root = self._check_rank(root, "root")
        failures: list[TypeError] = []
        operand = _byte_operand(_encoded(value, allow_pickle, failures))
        call = self._call("gather_object", None, None, root=root)
        return self._run_object(
            call,
            lambda circle: _gathered(circle, operand, root),
            failures,
            type,
            allow_pickle,
            timeout,
            async_op,
            root,
        )

    def scatter_object(
        self,
        values: Sequence[Any] | None,
        root: int = 0,
        *,
        type: Any = None,
        allow_pickle: bool = False,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Return this rank's element of `values`, a list by rank that `root` passes; see `broadcast_object`."""
        root = self._check_rank(root, "root")
        operands = None
        failures: list[TypeError] = []
        if self.rank == root:
            if values is None or len(values) != self.size:
                raise ConfigError(f"values must have one element for each of the {self.size} ranks")
            operands = [_byte_operand(_encoded(value, allow_pickle, failures)) for value in values]
        call = self._call("scatter_object", None, None, root=root)
        return self._run_object(
            call,
            lambda circle: _scattered(circle, operands, root).tobytes(),
            failures,
            type,
            allow_pickle,
            timeout,
            async_op,
            root,
        )

    def _run_object(
        self,
        call: Call,
        body: Callable[[Circle], Any],
        failures: list[TypeError],
        type: Any,
        allow_pickle: bool,
        timeout: float | None,
        async_op: bool,
        root: int = -1,
    ) -> Any:
        def decode(data: Any) -> Any:
            if isinstance(data, list):
                return [decode(item if item is None else item.tobytes()) for item in data]
            return data if data is None else objects.decode(data, type=type, allow_pickle=allow_pickle)

        def conclude(data: Any) -> Any:
            if failures:
                raise failures[0]
            return decode(data)

        return self._engine.run(call, body, timeout=timeout, async_op=async_op, then=conclude, root=root)

    # Point to point

    def send(self, x: Any, dst: int, tag: int = 0, *, timeout: float | None = None, async_op: bool = False) -> Any:
        """Send an array to rank `dst`; returns when `x` may be changed again.

        Up to 64 KiB leave at once (4 MiB may be under way to a rank that does not receive); more waits for the
        matching `recv`. Messages of one pair with one tag arrive in order.
        """
        operand = readable(x)
        return self._send(
            operand.load().view(np.uint8), dst, tag, operand.code, operand.shape, False, timeout, async_op
        )

    def recv(
        self,
        src: int = ANY,
        tag: int = ANY,
        *,
        out: Any = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Return the next array from `src` with `tag`; `out` receives it in place.

        Raises:
            MismatchError: `out` has another size or dtype than the message, or the message is an object. The
                message is gone; the group goes on.
        """
        target = writable(out) if out is not None else None

        def finish(message: Any) -> Any:
            if message.is_object:
                raise MismatchError(f"rank {message.source} sent an object with tag {message.tag}; use recv_object")
            if target is not None:
                target.store()
                return out
            return message.data.view(DTYPES[message.dtype_code]).reshape(message.shape)

        return self._recv(src, tag, target, finish, timeout, async_op)

    def send_object(
        self,
        value: Any,
        dst: int,
        tag: int = 0,
        *,
        allow_pickle: bool = False,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Send a value to rank `dst`; see `broadcast_object` for what values may be."""
        data = np.frombuffer(objects.encode(value, allow_pickle=allow_pickle), np.uint8)
        return self._send(data, dst, tag, _BYTES, data.shape, True, timeout, async_op)

    def recv_object(
        self,
        src: int = ANY,
        tag: int = ANY,
        *,
        type: Any = None,
        allow_pickle: bool = False,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Return the next value from `src` with `tag`; see `broadcast_object`."""

        def finish(message: Any) -> Any:
            if not message.is_object:
                raise MismatchError(f"rank {message.source} sent an array with tag {message.tag}; use recv")
            return objects.decode(message.data.tobytes(), type=type, allow_pickle=allow_pickle)

        return self._recv(src, tag, None, finish, timeout, async_op)

    def _send(
        self,
        data: Array,
        dst: int,
        tag: int,
        code: int,
        shape: tuple[int, ...],
        is_object: bool,
        timeout: float | None,
        async_op: bool,
    ) -> Any:
        dst, tag = _whole("dst", dst), _whole("tag", tag)
        messenger, deadline = self._messages(timeout)
        work = messenger.post_send(memoryview(data), dst, tag, code, shape, is_object, deadline)
        return self._finish_message(work, deadline, async_op)

    def _recv(
        self,
        src: int,
        tag: int,
        target: Operand | None,
        finish: Callable[[Any], Any],
        timeout: float | None,
        async_op: bool,
    ) -> Any:
        src, tag = _whole("src", src), _whole("tag", tag)
        messenger, deadline = self._messages(timeout)
        out = None if target is None else memoryview(target.flat.view(np.uint8))
        expect = None if target is None else (target.code, target.shape)
        work = messenger.post_recv(src, tag, out, expect, deadline, finish)
        return self._finish_message(work, deadline, async_op)

    def _finish_message(self, work: Work[Any], deadline: float, async_op: bool) -> Any:
        messenger = self._engine.messenger()
        if async_op:
            messenger.progress_in_background(work, deadline)
            return work
        return messenger.wait(work, deadline)

    def _messages(self, timeout: float | None) -> tuple[Messenger, float]:
        engine = self._engine
        engine.require_open()
        limit = engine.config.timeout if timeout is None else check_timeout(timeout)
        return engine.messenger(), time.monotonic() + limit

    # Groups of groups

    def split(self, color: int | None, key: int | None = None, *, timeout: float | None = None) -> Group | None:
        """Make new groups: one of all ranks that passed the same `color`, ordered by `key`, then by rank.

        Every rank of this group takes part; one that passes None gets None. The new group has lanes, order and
        failures of its own, and may be used at the same time as this one from another thread.
        """
        wanted = 0 if color is None else _whole("color", color)
        choice = np.array([color is not None, wanted, self.rank if key is None else _whole("key", key)], np.int64)
        call = self._call("split", None, None)
        operand = readable(choice)

        def body(circle: Circle) -> tuple[dict[int, Array], int]:
            gathered = movements.gather_all(circle, operand)
            return dict(zip(circle.ranks, gathered, strict=True)), circle.engine.sequence

        choices, sequence = self._engine.run(call, body, timeout=timeout, async_op=False)
        if color is None:
            return None
        engine = self._engine
        chosen = [rank for rank, choice in choices.items() if choice[0] and choice[1] == wanted]
        chosen.sort(key=lambda rank: (int(choices[rank][2]), rank))
        members = tuple(engine.members[rank] for rank in chosen)
        name = f"{self.name}/{sequence}.{wanted}"
        digest = hashlib.blake2b(f"{engine.id}/{sequence}/{wanted}".encode(), digest_size=8).digest()
        node = engine.node if len(members) > 1 else None
        return Group(
            Engine(
                node,
                int.from_bytes(digest, "little"),
                members if node else (0,),
                name,
                engine.config,
                generation=engine.generation if node else None,
            ),
            local_rank=self._local_rank,
        )

    # Losses and changes

    @property
    def change_pending(self) -> bool:
        """Whether the next generation waits: newcomers are there, members want to leave, or too few are left.

        Turns true on all ranks after the same all_reduce or barrier (with `on_loss="continue"`, after the same
        collective of any kind), so that loops which look at it end together. Always false outside `covey.generations`.
        """
        return self._engine.change_pending

    def shrink(self, *, timeout: float | None = None) -> tuple[Group, int]:
        """Return a group of the ranks that are left, and the last operation that returned on all of them.

        Every rank that is left calls it, as a rule after a PeerLostError or `revoke`; this group need not be usable any
        more. Ranks are numbered anew, in the same order. Ranks that returned later operations than the number says put
        their state back to that one, and all are in step.

        Raises:
            QuorumLostError: too few are left.
            DeadlineError: some that are alive did not come.
        """
        return survival.shrink(self, timeout)

    def agree(self, flag: bool, *, timeout: float | None = None) -> bool:
        """Return whether `flag` is true on all ranks that are left: the same on all of them, also in a failed group."""
        if self._engine.generation is None or self.on_loss == "continue":
            return bool(self.all_reduce(bool(flag), "and", timeout=timeout))
        return self._assembly().agree(flag, timeout)

    def _assembly(self) -> Assembly:
        if self._sidecar is None:
            self._sidecar = survival.Assembly(self)
        return self._sidecar

    def revoke(self) -> None:
        """End everything that is pending in this group, on all ranks, and the group with it. From any thread."""
        text = f"rank {self.rank} revoked group {self.name!r}"
        self._engine.fail(Fault("ClosedError", text, (self.rank,)))

    def on_change(self, listener: Callable[[Event], None]) -> None:
        """Call `listener(event)` when members are lost or come, on a thread of its own."""
        if self._engine.node is not None:
            self._engine.node.events.listen(listener)

    def events(self) -> list[Event]:
        """Return what happened to the run so far: losses and recoveries with their timelines, generations."""
        return [] if self._engine.node is None else self._engine.node.events.all()

    def leave(self, *, timeout: float = LEAVE_SECONDS) -> None:
        """Leave the run in good order: the others agree to go on without this rank, then the group is closed here."""
        generation = self._engine.generation
        if generation is not None:
            generation.leave(check_timeout(timeout))
        self.close()

    def restore(
        self,
        state: MutableMapping[str, Any],
        *,
        on_drift: str = "repair",
        timeout: float | None = None,
        progress: bool | None = None,
    ) -> RestoreReport:
        """Bring newcomers of this generation to the state of the others: named arrays, filled in place, and values.

        Every rank calls it, and nobody changes the state until it returns. Newcomers fetch from all others at once,
        and only what differs. A rank whose state has drifted from that of the majority is brought back and named in the
        report; with `on_drift="raise"` all raise MismatchError instead. In the first generation rank 0's state wins.
        """
        return survival.restore(
            self, state, fresh=self._is_fresh, on_drift=on_drift, timeout=timeout, progress=progress
        )

    # The end

    def close(self) -> None:
        """Leave the group and free what it holds. Closing twice is fine."""
        if self._before_close is not None:
            self._before_close()
        if self._sidecar is not None:
            self._sidecar.close()
        self._engine.close()
        if self._on_close is not None:
            self._on_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        is_failure = error is not None and not (isinstance(error, SystemExit) and error.code in (None, 0))
        if is_failure and self.on_loss == "raise":
            text = f"rank {self.rank} left the group because of {type(error).__name__}: {error}"
            self._engine.fail(Fault("PeerLostError", text, (self.rank,)))
        self.close()

    # Small things

    def _call(self, operation: str, code: int | None, shape: tuple[int, ...] | None, **agreed: Any) -> Call:
        """Describe a call; repeated ones are described once."""
        key = (operation, code, shape, *agreed.values())
        call = self._calls.get(key)
        if call is None:
            if len(self._calls) > CACHED_CALLS:
                self._calls.clear()
            call = self._calls[key] = make_call(operation, code, shape, **agreed)
        return call

    def _check_rank(self, rank: int, what: str) -> int:
        """Return `rank` as an int if the group has it."""
        try:
            index = operator.index(rank)
        except TypeError:
            index = -1
        if 0 <= index < self.size:
            return index
        raise ConfigError(f"{what}={rank!r} is no rank of this group; it has ranks 0 to {self.size - 1}")

    def _counts(self, counts: Sequence[int] | None, rows: int) -> list[int]:
        if counts is None:
            ranges = (part(rows, self.size, rank) for rank in self._engine.ranks)
            return [stop - start for start, stop in ranges]
        try:
            counts = [operator.index(count) for count in counts]
        except TypeError:
            raise ConfigError(f"counts={counts!r} must be whole numbers of rows") from None
        if len(counts) != self.size or any(count < 0 for count in counts) or sum(counts) != rows:
            raise ConfigError(f"counts={list(counts)} must be {self.size} numbers of rows that add up to {rows}")
        return list(counts)

    def _list_of_operands(self, xs: Sequence[Any] | None, what: str) -> list[Operand]:
        if xs is None or len(xs) != self.size:
            got = "None" if xs is None else f"{len(xs)} elements"
            raise ConfigError(f"{what} must have one array for each of the {self.size} ranks, not {got}")
        return [readable(x) for x in xs]


def _whole(what: str, value: Any) -> int:
    """Return `value` as an int; ConfigError if it is none, or too large to travel."""
    try:
        number = operator.index(value)
    except TypeError:
        raise ConfigError(f"{what}={value!r} must be a whole number") from None
    if not -(1 << 62) < number < 1 << 62:
        raise ConfigError(f"{what}={value!r} is too large")
    return number


def _check_weight(op: str, weight: float) -> None:
    if op != "mean":
        raise ConfigError(f"weight= goes with op='mean', not op={op!r}")
    if not 0 <= weight < float("inf"):
        raise ConfigError(f"weight={weight!r} must be a number from 0 up")


def _prepared_all_reduce(circle: Circle, flat: Array, key: tuple[Any, ...]) -> tuple[Plan, Reduction]:
    """Return what repeated calls with arrays like this one share in this circle."""
    dtype, _, op, algorithm, is_plain = key
    plan = choose.all_reduce(circle.rank, circle.size, flat.size, flat.itemsize, circle.lane_family, algorithm)
    # Shares add up to the mean by themselves.
    prepared = plan, reduction(op if is_plain else "sum", dtype)
    if len(circle.prepared) > CACHED_CALLS:
        circle.prepared.clear()
    circle.prepared[key] = prepared
    return prepared


def _weigh(circle: Circle, flat: Array, weight: float) -> bool:
    """Scale this rank's contribution by its share of the total weight; tell whether there is any weight."""
    total = np.array([weight], np.float64)
    plan = choose.all_reduce(circle.rank, circle.size, 1, 8, circle.lane_family, "doubling")
    circle.execute(plan, [total], reduction("sum", total.dtype))
    if not 0 < total[0] < np.inf:
        return False
    if circle.kept is not None:
        circle.kept.make_room((flat,))
        circle.kept.save(flat)
    share = weight / total[0]
    if not share:  # what counts for nothing may be nan or infinite
        flat[...] = 0
        return True
    factor = np.float32(share) if flat.itemsize == 2 else flat.dtype.type(share)
    with np.errstate(all="ignore"):
        np.multiply(flat, factor, out=flat, casting="unsafe")
    return True


def _reduced(operand: Operand | None, is_number: bool, x: Any) -> Any:
    """Return what all_reduce returns, once it is known whether there was any weight."""
    if x is None:
        raise ConfigError("the weights of all ranks add up to 0, or to more than a float holds")
    if operand is not None:
        operand.store()
    return x[0].item() if is_number else x


def _delivered(operand: Operand, x: Any) -> Any:
    """Make an argument that is not contiguous show the result, and return it."""
    operand.store()
    return x


def _gathered(circle: Circle, operand: Operand, root: int) -> list[Any] | None:
    arrays = movements.gather(circle, operand, circle.position(root))
    return arrays if arrays is None else circle.by_rank(arrays)


def _scattered(circle: Circle, operands: list[Operand] | None, root: int) -> Array:
    mine = None if operands is None else circle.chosen(operands)
    return movements.scatter(circle, mine, circle.position(root))


def _number_array(x: Any, op: str) -> Array:
    """Return a Python number as an array that `op` can work on."""
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


def _byte_operand(data: bytes) -> Operand:
    flat = np.frombuffer(data, np.uint8)
    return Operand(flat, flat.shape, _BYTES)


def _encoded(value: Any, allow_pickle: bool, failures: list[TypeError]) -> bytes:
    """Encode a value. If that fails, the other ranks must hear of it before this one raises: the failure is sent."""
    try:
        return objects.encode(value, allow_pickle=allow_pickle)
    except TypeError as error:
        failures.append(error)
        return objects.encode_failure(str(error))
