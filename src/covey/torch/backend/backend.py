"""covey as a backend of torch.distributed: a process group written in Python."""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
from collections import deque
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from covey.base.errors import ConfigError
from covey.proto.matching import ANY
from covey.torch.backend.devices import (
    EIGHT_BITS,
    KINDS,
    blocks_of,
    operand_of,
    operands_of,
    piece_length,
    tensor_over,
    writing_to,
)
from covey.torch.backend.work import Notices, TorchWork
from covey.torch.backend.world import World, close_world, world_of
from covey.torch.entry import NAME

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType

    from covey.runtime.work import Work
    from covey.torch.backend.exchange import TensorGroup

    Tensors = list[torch.Tensor]

_OPS: Final = (
    (dist.ReduceOp.SUM, "sum"),
    (dist.ReduceOp.AVG, "mean"),
    (dist.ReduceOp.MAX, "max"),
    (dist.ReduceOp.MIN, "min"),
    (dist.ReduceOp.PRODUCT, "prod"),
    (dist.ReduceOp.BAND, "and"),
    (dist.ReduceOp.BOR, "or"),
    (dist.ReduceOp.BXOR, "xor"),
)
"""The most used first: they are compared in order, since torch's operators cannot be keys of a dict."""

LENT_ELEMENTS: Final = 64
LENT_WORKS: Final = 1024
"""The last LENT_WORKS works on up to LENT_ELEMENTS elements are kept alive, and no large tensor with them."""
_OF_FLAGS: Final = {"sum": "or", "prod": "and"}


def create(options: Any) -> ProcessGroupCovey:
    """Return the process group that torch asks for. Making the first one waits for the other ranks."""
    ranks, size = list(options.global_ranks_in_group), options.group_size
    world = world_of(options.store, options.group_rank, size, options.timeout.total_seconds(), ranks)
    is_first = world.is_new
    return ProcessGroupCovey(
        world,
        options.store,
        list(range(size)) if is_first else ranks,
        options.group_rank,
        name=str(options.group_id),
        timeout=options.timeout,
        is_first=is_first,
    )


class ProcessGroupCovey(dist.ProcessGroup):  # type: ignore[misc]  # torch is not followed by the type checker
    """A process group whose operations covey performs. Roots and peers are ranks of the group.

    An operation that torch waits for at once runs on the calling thread; others queue for the thread of the group. Any
    thread may call; the calls are issued one after the other.
    """

    supports_splitting = supports_coalescing = supports_time_estimate = supports_shrinking = False

    def __init__(
        self,
        world: World,
        store: Any,
        ranks: list[int],
        rank: int,
        *,
        name: str,
        timeout: timedelta,
        is_first: bool = False,
    ) -> None:
        """`ranks` are ranks of the world, in the order of the group's own. The world is closed with its first group."""
        super().__init__(rank, len(ranks))
        self._world, self._store, self._ranks, self._rank = world, store, ranks, rank
        self._name, self._desc, self._seconds, self._is_first = name, "", timeout.total_seconds(), is_first
        self._group = world.group(name, ranks)
        self._everyone = list(range(len(ranks)))
        self._notices = Notices()
        self._issuing = threading.Lock()
        self._last: Work[Any] | None = None
        """The last collective that was queued."""
        self._lent: deque[TorchWork] = deque(maxlen=LENT_WORKS)
        """Works that Python may have passed to C++ and dropped, as DDP's join does: C++ alone cannot wait for them."""
        world.on_close(self._close)

    @property
    def covey_group(self) -> TensorGroup:
        """The covey group that carries out the operations."""
        return self._group

    # Description. torch keeps these in a C++ backend, which this group does not have.

    def getBackendName(self) -> str:  # noqa: N802
        return NAME

    def name(self) -> str:
        return NAME

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return len(self._ranks)

    getRank, getSize = rank, size  # noqa: N815

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._desc

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._desc

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802
        self._desc = desc

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc

    def get_group_store(self) -> Any:
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in KINDS if kind == "cpu" or torch.get_device_module(kind).is_available()]

    def _get_backend(self, _device: torch.device) -> ProcessGroupCovey:
        return self

    def supports_tensor_alloc(self, _device: torch.device) -> bool:
        return False

    def set_timeout(self, timeout: timedelta) -> None:
        self._seconds = timeout.total_seconds()

    _set_default_timeout = set_timeout

    # Reductions

    def allreduce(self, tensors: Tensors, opts: Any = None) -> TorchWork:
        opts = c10d.AllreduceOptions() if opts is None else opts
        op, factor = _reduction(opts.reduceOp, tensors[0].dtype)
        if tensors[0].layout is torch.sparse_coo:
            return self._allreduce_sparse(tensors, op, opts)
        if factor is not None:
            for tensor in tensors:
                tensor.mul_(factor)
        calls = [(operand, op) for tensor in tensors for operand in operands_of(tensor, self._cut([tensor]))]
        return self._issue(opts, tensors, self._group.all_reduce, calls)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> TorchWork:
        return self.allreduce(tensors, c10d.AllreduceCoalescedOptions() if opts is None else opts)

    def _allreduce_sparse(self, tensors: Tensors, op: str, opts: Any) -> TorchWork:
        """Gather the entries of all ranks on every rank, and add those with equal indices."""
        if op != "sum":
            raise ConfigError(f"op={op!r} has no meaning for sparse tensors; they can be summed")
        calls = []
        for tensor in tensors:
            entries, writing = tensor.detach().coalesce(), writing_to(tensor)

            def combine(pairs: list[tuple[Any, Any]], tensor: torch.Tensor = tensor, writing: Any = writing) -> None:
                indices = torch.cat([tensor_over(where) for where, _ in pairs], dim=1)
                values = torch.cat([tensor_over(what) for _, what in pairs])
                total = torch.sparse_coo_tensor(indices, values, tensor.shape, check_invariants=True).coalesce()
                with torch.no_grad(), writing():
                    tensor.copy_(total.to(tensor.device))

            bounds = tuple(tensor.shape[: tensor.sparse_dim()])
            calls.append((operand_of(entries.indices()), operand_of(entries.values()), bounds, combine))
        return self._issue(opts, tensors, self._group.gather_pairs, calls)

    def reduce(self, tensors: Tensors, opts: Any = None) -> TorchWork:
        opts = c10d.ReduceOptions() if opts is None else opts
        (tensor,) = tensors
        op, factor = _reduction(opts.reduceOp, tensor.dtype)
        if factor is not None:
            tensor = tensor.mul_(factor) if opts.rootRank == self._rank else tensor * factor
        calls = [(operand, opts.rootRank, op) for operand in operands_of(tensor, self._cut([tensor]))]
        return self._issue(opts, tensors, self._group.reduce, calls)

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> TorchWork:
        opts = c10d.ReduceScatterOptions() if opts is None else opts
        op, factor = _reduction(opts.reduceOp, outputs[0].dtype)
        if factor is not None:
            inputs = [[part * factor for part in parts] for parts in inputs]
        return self._scatter_sums(outputs, inputs, op, opts)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> TorchWork:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> TorchWork:
        opts = c10d.ReduceScatterOptions() if opts is None else opts
        op, factor = _reduction(opts.reduceOp, outputs[0].dtype)
        if factor is not None:
            inputs = [whole * factor for whole in inputs]
        return self._scatter_sums(outputs, [self._blocks(whole) for whole in inputs], op, opts)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _scatter_sums(self, outputs: Tensors, inputs: Sequence[Sequence[Any]], op: str, opts: Any) -> TorchWork:
        """Fill every output with this rank's share of the combined inputs."""
        calls = []
        for output, parts in zip(outputs, inputs, strict=True):
            length = self._cut([output, *parts])
            targets = operands_of(output, length, is_read=False)
            shares = zip(*(operands_of(part, length, is_written=False) for part in parts), strict=True)
            calls += [(target, list(share), op) for target, share in zip(targets, shares, strict=True)]
        return self._issue(opts, outputs, self._group.reduce_scatter_into, calls)

    # Moving

    def broadcast(self, tensors: Tensors, opts: Any = None) -> TorchWork:
        opts = c10d.BroadcastOptions() if opts is None else opts
        root, is_root = opts.rootRank, opts.rootRank == self._rank
        calls = [
            (operand, root)
            for tensor in tensors
            for operand in operands_of(tensor, self._cut([tensor]), is_read=is_root, is_written=not is_root)
        ]
        return self._issue(opts, tensors, self._group.broadcast, calls)

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> TorchWork:
        opts = c10d.AllgatherOptions() if opts is None else opts
        return self._gather_all(outputs, inputs, [out for outs in outputs for out in outs], opts)

    def allgather_coalesced(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> TorchWork:
        # The layout is outputs[rank][i] here.
        return self.allgather([list(outs) for outs in zip(*outputs, strict=True)], inputs, opts)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> TorchWork:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> TorchWork:
        opts = c10d.AllgatherOptions() if opts is None else opts
        return self._gather_all([self._blocks(out) for out in outputs], inputs, outputs, opts)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _gather_all(self, rows: Sequence[Sequence[Any]], inputs: Tensors, filled: Tensors, opts: Any) -> TorchWork:
        """Fill every row with the inputs of all ranks."""
        calls = []
        for row, mine in zip(rows, inputs, strict=True):
            length = self._cut([mine, *row])
            outs = zip(*(operands_of(out, length, is_read=False) for out in row), strict=True)
            own = operands_of(mine, length, is_written=False)
            calls += [(list(places), x) for places, x in zip(outs, own, strict=True)]
        return self._issue(opts, filled, self._group.all_gather_into, calls)

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> TorchWork:
        opts = c10d.GatherOptions() if opts is None else opts
        is_root = opts.rootRank == self._rank
        outs = [operand_of(out, is_read=False) for out in outputs[0]] if is_root else None
        call = (outs, operand_of(inputs[0]), opts.rootRank)
        return self._issue(opts, outputs[0] if is_root else [], self._group.gather_into, [call])

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> TorchWork:
        opts = c10d.ScatterOptions() if opts is None else opts
        parts = [operand_of(part) for part in inputs[0]] if opts.rootRank == self._rank else None
        call = (operand_of(outputs[0], is_read=False), parts, opts.rootRank)
        return self._issue(opts, outputs, self._group.scatter_into, [call])

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> TorchWork:
        return self._exchange(outputs, inputs, outputs, opts)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: list[int] | None = None,
        input_splits: list[int] | None = None,
        opts: Any = None,
    ) -> TorchWork:
        outs, parts = (
            whole.split(list(splits)) if splits else self._blocks(whole, by_rows=True)
            for whole, splits in ((output, output_splits), (input, input_splits))
        )
        return self._exchange(outs, parts, [output], opts)

    alltoall_base = all_to_all_single

    def _exchange(self, outs: Sequence[Any], parts: Sequence[Any], filled: Tensors, opts: Any) -> TorchWork:
        opts = c10d.AllToAllOptions() if opts is None else opts
        rooms = [operand_of(out, is_read=False) for out in outs]
        return self._issue(opts, filled, self._group.all_to_all_into, [(rooms, list(map(operand_of, parts)))])

    def barrier(self, opts: Any = None) -> TorchWork:
        return self._issue(c10d.BarrierOptions() if opts is None else opts, [], self._group.barrier, [()])

    # Point to point

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> TorchWork:
        (tensor,) = tensors
        is_async = not _is_waited_for(sys._getframe())
        work = self._group.send(operand_of(tensor), dst, tag, timeout=self._seconds, async_op=is_async)
        return TorchWork([work] if is_async else [], tensors, self._notices)

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> TorchWork:
        return self._receive(tensors, src, tag, is_async=not _is_waited_for(sys._getframe()))

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> TorchWork:
        return self._receive(tensors, ANY, tag, is_async=not _is_waited_for(sys._getframe()))

    def _receive(self, tensors: Tensors, src: int, tag: int, *, is_async: bool) -> TorchWork:
        (tensor,) = tensors
        target = operand_of(tensor, is_read=False)
        outcome = self._group.recv_into(target, src, tag, timeout=self._seconds, async_op=is_async)
        if is_async:
            return TorchWork([outcome], tensors, self._notices)
        return TorchWork([], tensors, self._notices, source=outcome)

    # Subgroups

    def split_group(
        self,
        ranks: list[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
    ) -> ProcessGroupCovey | None:
        """Return a process group of some ranks of this one; None on other ranks. Every rank in `ranks` calls it."""
        if self._rank not in ranks:
            return None
        name = group_name or f"{self._name}/{'-'.join(map(str, ranks))}"
        made = ProcessGroupCovey(
            self._world,
            dist.PrefixStore(f"{name}/", self._store),
            [self._ranks[rank] for rank in ranks],
            ranks.index(self._rank),
            name=name,
            timeout=timedelta(seconds=self._seconds) if timeout is None else timeout,
        )
        made.setGroupDesc(group_desc or "")
        return made

    splitGroup = split_group  # noqa: N815

    def merge_remote_group(self, *_args: Any, **_kwargs: Any) -> ProcessGroupCovey:
        raise ConfigError(
            "covey cannot merge process groups; make one of all ranks with init_process_group or new_group"
        )

    mergeRemoteGroup = merge_remote_group  # noqa: N815

    # The end

    def shutdown(self) -> None:
        """Close the group. Closing the first group of a world closes the others and leaves the run."""
        if self._is_first:
            close_world(self._world)
        else:
            self._close()

    def abort(self) -> None:
        """End pending operations on all ranks, and close the group."""
        self._group.revoke()
        self.shutdown()

    def _close(self) -> None:
        self._group.close()  # ends pending operations, so that threads that wait for them wake up
        self._notices.close()
        self._world.forget(self._close)

    # Issuing

    def _cut(self, tensors: Sequence[torch.Tensor]) -> int:
        """Return the length of the pieces that tensors are cut into, if some rank has a device; 0 for no cutting.

        Tensors are not cut in a group that survives losses, where an operation is all or nothing.
        """
        return piece_length(tensors) if self._world.has_devices and self._group.on_loss == "raise" else 0

    def _issue(
        self, opts: Any, filled: Tensors, operation: Callable[..., Any], calls: Sequence[tuple[Any, ...]]
    ) -> TorchWork:
        """Call `operation` with each of `calls`: now if torch waits at once and nothing is queued, else queue them."""
        timeout = opts.timeout.total_seconds()
        timeout = timeout if timeout > 0 else self._seconds
        is_async = opts.asyncOp
        works: list[Work[Any]] = []
        contributors = self._everyone
        with self._issuing:
            if not is_async and (self._last is None or self._last.done()):
                for args in calls:
                    operation(*args, timeout=timeout)
                    if len(self._group.contributors) < len(contributors):
                        contributors = list(self._group.contributors)
            else:
                works = [operation(*args, timeout=timeout, async_op=True) for args in calls]
                self._last = works[-1] if works else self._last
        work = TorchWork(works, filled, self._notices, contributors)
        if not is_async:
            if works:
                work.wait()
        elif len(filled) == 1 and filled[0].numel() <= LENT_ELEMENTS:
            self._lent.append(work)
        return work

    def _blocks(self, whole: torch.Tensor, *, by_rows: bool = False) -> Sequence[Any]:
        """Return the equal shares of all ranks in a tensor, consecutive in its memory.

        With `by_rows`, the first axis must be divisible by the number of ranks.
        """
        size, rows = self.size(), whole.shape[0] if whole.dim() else 1
        length = whole.numel() if whole.is_contiguous() and not by_rows else rows
        if length % size:
            raise ConfigError(f"a tensor of shape {list(whole.shape)} cannot be divided among {size} ranks")
        if not whole.is_contiguous():
            return list(whole.chunk(size))
        if self._world.has_devices:
            return list(whole.view(size, whole.numel() // size).unbind())
        return blocks_of(whole, size)


_WAITING: Final = frozenset(inspect.unwrap(each).__code__ for each in (dist.send, dist.recv))


def _is_waited_for(called: FrameType) -> bool:
    """Tell whether `dist.send` or `dist.recv` called a method: they wait at once, so the message can move before.

    torch calls the same method for `isend`, whose message another thread has to move; that takes five times as long.
    Any other caller gets a work, and only loses time.
    """
    frame = called.f_back
    return frame is not None and frame.f_back is not None and frame.f_back.f_code in _WAITING


def _reduction(op: Any, dtype: torch.dtype) -> tuple[str, Any]:
    """Return covey's name of torch's reduction, and the factor to multiply tensors with before it, or None."""
    if dtype in EIGHT_BITS:
        raise TypeError(f"covey can move {dtype} but not reduce it; reduce in bfloat16 or float32")
    for known, name in _OPS:
        if op == known:
            # As in torch, True + True is True.
            return _OF_FLAGS.get(name, name) if dtype is torch.bool else name, None
    if op == dist.ReduceOp.PREMUL_SUM:
        if not (dtype.is_floating_point or dtype.is_complex):
            raise TypeError(f"PREMUL_SUM multiplies with a fraction, which {dtype} cannot hold; use float32")
        factor = op.__getstate__()[1]
        return "sum", factor
    raise ConfigError(f"covey has no reduction {op}; use SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR or BXOR")


def _keep_from_dynamo(*classes: type) -> None:
    """Keep torch.compile from tracing methods that torch calls while it traces, as DDP's reducer does.

    `torch.compiler.disable` would do the same, but imports the compiler, which takes seconds. Versions of torch without
    the functions used here trace the methods.
    """
    with contextlib.suppress(ImportError, AttributeError):
        from torch._C._dynamo import eval_frame as frames

        skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
        for value in (value for each in classes for value in vars(each).values()):
            if code := getattr(value, "__code__", None):
                frames.set_code_exec_strategy(code, skip)


_keep_from_dynamo(ProcessGroupCovey, TorchWork)
