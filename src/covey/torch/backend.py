"""covey as a backend of torch.distributed, by the contract of a process group that is written in Python."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
import torch.distributed as dist

from covey.base.errors import ConfigError
from covey.proto.matching import ANY
from covey.torch.entry import NAME
from covey.torch.work import Notices, TorchWork
from covey.torch.world import World, close_world, world_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from covey.runtime.work import Work
    from covey.torch.exchange import TensorGroup

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
"""In the order they are compared with what torch passes, which finds no place in a dict: the usual ones first."""


def create(options: Any) -> ProcessGroupCovey:
    """Return the process group that torch asks for; the first one meets the other ranks."""
    world = world_of(options.store, options.group_rank, options.group_size, options.timeout.total_seconds())
    ranks = list(options.global_ranks_in_group)
    return ProcessGroupCovey(
        world,
        options.store,
        ranks or list(range(options.group_size)),
        options.group_rank,
        name=str(options.group_id),
        timeout=options.timeout,
        is_default=not ranks,
    )


class ProcessGroupCovey(dist.ProcessGroup):  # type: ignore[misc]  # torch is not followed by the type checker
    """A process group whose operations covey performs. Roots and peers are ranks of the group.

    A call that torch will wait for at once runs on the calling thread; others queue for the thread of the group. Any
    thread may call: calls are taken one after the other.
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
        is_default: bool = False,
    ) -> None:
        """`ranks` are those of the world, in the order of the group's own."""
        super().__init__(rank, len(ranks))
        self._world, self._store, self._ranks, self._rank = world, store, ranks, rank
        self._name, self._desc, self._seconds, self._is_default = name, "", timeout.total_seconds(), is_default
        self._group = world.group(name, ranks)
        self._notices = Notices()
        self._issuing = threading.Lock()
        self._last: Work[Any] | None = None
        """The last collective that was queued."""
        world.on_close(self._close)

    @property
    def covey_group(self) -> TensorGroup:
        """The group of covey underneath."""
        return self._group

    # Who. torch keeps these in a C++ backend, which this group does not have.

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
        return [torch.device("cpu")]

    def _get_backend(self, _device: torch.device) -> ProcessGroupCovey:
        return self

    def supports_tensor_alloc(self, _device: torch.device) -> bool:
        return False

    def set_timeout(self, timeout: timedelta) -> None:
        self._seconds = timeout.total_seconds()

    _set_default_timeout = set_timeout

    # Reductions

    def allreduce(self, tensors: Tensors, opts: Any = None) -> TorchWork:
        opts = dist.AllreduceOptions() if opts is None else opts
        op, factor = _reduction(opts.reduceOp)
        if tensors[0].layout is torch.sparse_coo:
            return self._allreduce_sparse(tensors, op, opts)
        if factor is not None:
            for tensor in tensors:
                tensor.mul_(factor)
        return self._done([self._start(opts, self._group.all_reduce, tensor, op) for tensor in tensors], tensors)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> TorchWork:
        return self.allreduce(tensors, dist.AllreduceCoalescedOptions() if opts is None else opts)

    def _allreduce_sparse(self, tensors: Tensors, op: str, opts: Any) -> TorchWork:
        """Everyone gets everyone's entries, and adds up those that meet."""
        if op != "sum":
            raise ConfigError(f"op={op!r} has no meaning for sparse tensors; they can be summed")
        works = []
        for tensor in tensors:
            entries = tensor.detach().coalesce()

            def combine(pairs: list[tuple[Any, Any]], tensor: torch.Tensor = tensor) -> None:
                indices = torch.cat([_tensor(where) for where, _ in pairs], dim=1)
                values = torch.cat([_tensor(what) for _, what in pairs])
                # What came from others is checked: indices beyond the shape would be written to, wherever that is.
                total = torch.sparse_coo_tensor(indices, values, tensor.shape, check_invariants=True)
                with torch.no_grad():
                    tensor.copy_(total.coalesce())

            works.append(self._start(opts, self._group.gather_pairs, entries.indices(), entries.values(), combine))
        return self._done(works, tensors)

    def reduce(self, tensors: Tensors, opts: Any = None) -> TorchWork:
        opts = dist.ReduceOptions() if opts is None else opts
        op, factor = _reduction(opts.reduceOp)
        (tensor,) = tensors
        if factor is not None:
            tensor = tensor.mul_(factor) if opts.rootRank == self._rank else tensor * factor
        return self._done([self._start(opts, self._group.reduce, tensor, opts.rootRank, op)], tensors)

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> TorchWork:
        opts = dist.ReduceScatterOptions() if opts is None else opts
        return self._done([self._scatter_sums(*pair, opts) for pair in zip(outputs, inputs, strict=True)], outputs)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> TorchWork:
        opts = dist.ReduceScatterOptions() if opts is None else opts
        return self._done([self._scatter_sums(output, self._blocks(input), opts)], [output])

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> TorchWork:
        opts = dist.ReduceScatterOptions() if opts is None else opts
        pairs = zip(outputs, inputs, strict=True)
        return self._done([self._scatter_sums(out, self._blocks(whole), opts) for out, whole in pairs], outputs)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _scatter_sums(self, output: torch.Tensor, parts: Sequence[torch.Tensor], opts: Any) -> Work[Any] | None:
        op, factor = _reduction(opts.reduceOp)
        parts = [part if factor is None else part * factor for part in parts]
        return self._start(opts, self._group.reduce_scatter_into, output, parts, op)

    # Moving

    def broadcast(self, tensors: Tensors, opts: Any = None) -> TorchWork:
        opts = dist.BroadcastOptions() if opts is None else opts
        works = [self._start(opts, self._group.broadcast, _movable(tensor), opts.rootRank) for tensor in tensors]
        return self._done(works, tensors)

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> TorchWork:
        opts = dist.AllgatherOptions() if opts is None else opts
        works = [self._gather_all(outs, mine, opts) for outs, mine in zip(outputs, inputs, strict=True)]
        return self._done(works, [out for outs in outputs for out in outs])

    def allgather_coalesced(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> TorchWork:
        # The layout is outputs[rank][i] here.
        return self.allgather([list(outs) for outs in zip(*outputs, strict=True)], inputs, opts)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> TorchWork:
        opts = dist.AllgatherOptions() if opts is None else opts
        return self._done([self._gather_all(self._blocks(output), input, opts)], [output])

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> TorchWork:
        opts = dist.AllgatherOptions() if opts is None else opts
        pairs = zip(outputs, inputs, strict=True)
        return self._done([self._gather_all(self._blocks(out), mine, opts) for out, mine in pairs], outputs)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _gather_all(self, outs: Sequence[torch.Tensor], mine: torch.Tensor, opts: Any) -> Work[Any] | None:
        return self._start(opts, self._group.all_gather_into, [_movable(out) for out in outs], _movable(mine))

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> TorchWork:
        opts = dist.GatherOptions() if opts is None else opts
        is_root = opts.rootRank == self._rank
        outs = [_movable(out) for out in outputs[0]] if is_root else None
        work = self._start(opts, self._group.gather_into, outs, _movable(inputs[0]), opts.rootRank)
        return self._done([work], outputs[0] if is_root else [])

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> TorchWork:
        opts = dist.ScatterOptions() if opts is None else opts
        parts = [_movable(part) for part in inputs[0]] if opts.rootRank == self._rank else None
        work = self._start(opts, self._group.scatter_into, _movable(outputs[0]), parts, opts.rootRank)
        return self._done([work], outputs)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> TorchWork:
        opts = dist.AllToAllOptions() if opts is None else opts
        return self._done([self._exchange(outputs, inputs, opts)], outputs)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: list[int] | None = None,
        input_splits: list[int] | None = None,
        opts: Any = None,
    ) -> TorchWork:
        opts = dist.AllToAllOptions() if opts is None else opts
        outs, parts = (
            list(whole.split(list(splits))) if splits else self._blocks(whole)
            for whole, splits in ((output, output_splits), (input, input_splits))
        )
        return self._done([self._exchange(outs, parts, opts)], [output])

    alltoall_base = all_to_all_single

    def _exchange(self, outs: Tensors, parts: Tensors, opts: Any) -> Work[Any] | None:
        rooms = [_movable(out) for out in outs]
        return self._start(opts, self._group.all_to_all_into, rooms, [_movable(part) for part in parts])

    def barrier(self, opts: Any = None) -> TorchWork:
        return self._done([self._start(dist.BarrierOptions() if opts is None else opts, self._group.barrier)], [])

    # Point to point

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> TorchWork:
        (tensor,) = tensors
        work = self._group.send(_movable(tensor), dst, tag, timeout=self._seconds, async_op=True)
        return self._done([work], tensors)

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> TorchWork:
        (tensor,) = tensors
        work = self._group.recv_into(_movable(tensor), src, tag, timeout=self._seconds, async_op=True)
        return self._done([work], tensors)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> TorchWork:
        return self.recv(tensors, ANY, tag)

    # Groups of groups

    def split_group(
        self,
        ranks: list[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
    ) -> ProcessGroupCovey | None:
        """Return a process group of these ranks of this one; None for ranks outside. All of them call it."""
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
        """Close the group; the default group is the last to be closed, and leaves the run."""
        if self._is_default:
            close_world()
        else:
            self._close()

    def abort(self) -> None:
        """End what is pending on all ranks, and close the group."""
        self._group.revoke()
        self.shutdown()

    def _close(self) -> None:
        self._group.close()  # ends what is pending, so that those who wait for it are told
        self._notices.close()
        self._world.forget(self._close)

    # Issuing

    def _start(self, opts: Any, operation: Callable[..., Any], *args: Any) -> Work[Any] | None:
        """Perform an operation before returning if torch would wait for it at once; else queue it."""
        timeout = opts.timeout.total_seconds()
        timeout = timeout if timeout > 0 else self._seconds
        is_async = opts.asyncOp
        with self._issuing:
            if not is_async and (self._last is None or self._last.done()):
                operation(*args, timeout=timeout)
                return None
            work: Work[Any] = operation(*args, timeout=timeout, async_op=True)
            self._last = work
        if is_async:
            return work
        work.wait()
        return None

    def _done(self, works: list[Work[Any] | None], tensors: Tensors) -> TorchWork:
        return TorchWork([work for work in works if work is not None], tensors, self._notices)

    def _blocks(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """Return the shares of all ranks in a tensor that is made of them, concatenated or stacked."""
        if whole.dim() == 0 or whole.shape[0] % self.size():
            raise ConfigError(
                f"axis 0 of a tensor of shape {list(whole.shape)} cannot be shared among {self.size()} ranks"
            )
        return list(whole.chunk(self.size())) if whole.shape[0] else [whole] * self.size()


def _reduction(op: Any) -> tuple[str, Any]:
    """Return covey's name of torch's reduction, and what tensors are to be multiplied with before it, if anything."""
    for known, name in _OPS:
        if op == known:
            return name, None
    if op == dist.ReduceOp.PREMUL_SUM:
        factor = op.__getstate__()[1]
        return "sum", factor
    raise ConfigError(f"covey has no reduction {op}; use SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR or BXOR")


def _movable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view that covey can move: bytes of dtypes that it does not know."""
    return tensor.view(torch.uint8) if tensor.dtype in _EIGHT_BITS else tensor


_EIGHT_BITS: Final = frozenset(getattr(torch, name) for name in dir(torch) if name.startswith("float8_"))


def _tensor(array: np.ndarray[Any, np.dtype[Any]]) -> torch.Tensor:
    """Return a tensor over the memory of an array."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
